"""Records as a pandas table, in which a null value is NaN and ids are JSON text; and reading the records of a run while it grows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.results.records import COLUMNS, MISSING, OPTIONAL, PATTERN, TYPES, label, note, parse, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import pandas as pd

    from kit.results.records import Columns, Record


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as a table with a column for each key."""
    rows = list(records)
    return frame_of({name: [getattr(row, name) for row in rows] for name in COLUMNS})


def frame_of(columns: Columns) -> pd.DataFrame:
    import pandas as pd

    table: dict[str, Any] = dict(columns)
    index = range(len(columns["run"]))
    for name, empty in (("text", ""), ("ids", ""), ("start", math.nan)):  # in most runs no record has any
        if not any(value or value == 0 for value in columns[name]):
            table[name] = empty
        elif name == "ids":
            table[name] = [_spelled(ids) for ids in columns[name]]
    return pd.DataFrame({name: pd.Series(table[name], dtype=TYPES[name], index=index) for name in COLUMNS})


def with_ids(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The rows that have all of these ids, each id as a column: `with_ids(frame, "bucket", "tensor")`."""
    if taken := [name for name in names if name in frame.columns]:
        raise ValueError(f"the table has a column {taken[0]!r} already")
    every: dict[str, dict[str, str | int]] = {text: json.loads(text) for text in frame["ids"].unique() if text}
    known = {text: ids for text, ids in every.items() if all(name in ids for name in names)}
    rows = frame[frame["ids"].isin(list(known))]
    return rows.assign(**{name: [known[text][name] for text in rows["ids"]] for name in names})


def labels(frame: pd.DataFrame) -> list[str]:
    """What each row measured, in words: its metric with its ids."""
    known = {text: json.loads(text) if text else {} for text in frame["ids"].unique()}
    return [label(metric, known[text]) for metric, text in zip(frame["metric"], frame["ids"], strict=True)]


def without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """The table without those of the columns text, ids and start that no row has."""
    empty = [name for name in OPTIONAL if name in frame and (frame[name].isna() | (frame[name] == "")).all()]
    return frame.drop(columns=empty)


# What phases measure by themselves; the rest of a job's numbers are its own.
OF_PHASES = {
    *(
        "seconds",
        "overhead_seconds",
        "observers_seconds",
        "failed",
        "lost_records",
        "groups",
        "fds",
        "sockets",
        "threads",
    ),
    *("rss", "anon_rss", "shared_rss", "peak_rss", "file_rss", "shm_rss", "allocated", "reserved", "peak_allocated"),
    *(
        "driver_used",
        "process_used",
        "pinned_bytes",
        "memfds",
        "shared_maps",
        "shared_bytes",
        "shm_files",
        "temp_files",
    ),
    "children",
}


def own_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """The numbers that a job recorded itself, such as losses."""
    own = ~frame["metric"].str.removesuffix("_before").isin(OF_PHASES) & (frame["value"].abs() < math.inf)
    return frame[own & (frame["rank"] >= 0)]


def summary_of(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each own number over all ranks: how many there are, the first, the last and the ends."""
    groups = own_numbers(frame).groupby(["phase", "metric", "unit"], sort=False)["value"]
    return groups.agg(["count", "first", "last", "min", "max"]).reset_index().rename(columns={"count": "n"})


_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def _spelled(ids: Mapping[str, str | int]) -> str:
    """JSON with sorted keys, empty where there are none: the same ids are the same text."""
    return _encode(ids) if ids else ""


KNOWN_BY = 256  # bytes before the last position, by which a file is recognised as the one that was read


@dataclass
class Place:
    """How far a file was read: its size, its last bytes, its lines, and which lines were dropped."""

    size: int = 0
    last: bytes = b""
    lines: int = 0
    dropped: list[int] = field(default_factory=list)


class Reader:
    """A run folder's records as a table, and a sentence for each loss."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, Place] = {}
        self._frame: pd.DataFrame | None = None

    def read(self) -> tuple[pd.DataFrame, list[str]]:
        """All records, in the order of their files. A table returned earlier is never changed."""
        files = sorted(self._folder.glob(PATTERN))
        if self._frame is None or [path.name for path in files] != list(self._places) or len(files) != 1:
            self._start(files)
        else:
            self._follow(files[0])
        assert self._frame is not None
        notes = [note(name, place.dropped) for name, place in self._places.items() if place.dropped]
        return self._frame, notes if files else [MISSING]

    def _start(self, files: list[Path]) -> None:
        import pandas as pd

        self._places = {path.name: Place() for path in files}
        frames = [self._more(path, read_bytes(path)) for path in files]
        self._frame = pd.concat(frames, ignore_index=True) if len(frames) > 1 else (frames or [self._nothing()])[0]

    def _follow(self, path: Path) -> None:
        import pandas as pd

        place = self._places[path.name]
        data = read_bytes(path, place.size - len(place.last))
        if not place.last.endswith(b"\n") or not data.startswith(place.last):
            self._start([path])  # it ended within a line, or was written anew
            return
        more = self._more(path, data[len(place.last) :])
        assert self._frame is not None
        if len(more):
            self._frame = pd.concat([self._frame, more], ignore_index=True) if len(self._frame) else more

    def _more(self, path: Path, data: bytes) -> pd.DataFrame:
        place = self._places[path.name]
        columns, dropped = parse(data)
        place.dropped += [place.lines + index + 1 for index in dropped]
        place.lines += data.count(b"\n")
        place.size += len(data)
        place.last = (place.last + data)[-KNOWN_BY:]
        return frame_of(columns)

    def _nothing(self) -> pd.DataFrame:
        return frame_of(parse(b"")[0])
