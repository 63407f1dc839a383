"""Records: what a run measured, one JSON object a line, appended as it happens.

`value` is null where there was nothing to measure; NaN and the infinities are the words "NaN", "Infinity" and
"-Infinity", so that every line is strict JSON. A writer that dies leaves at most one torn line; where several
processes append to one file, others may follow it. Readers drop such lines and say how many.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput, KitError
from kit.results.files import spell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    import pandas as pd

TYPES = {
    "run": "str",
    "lab": "str",
    "cycle": "int64",
    "phase": "str",
    "rank": "int64",
    "metric": "str",
    "value": "float64",
    "unit": "str",
    "time": "float64",
}
COLUMNS = tuple(TYPES)
PATTERN = "records*.jsonl"
MISSING = "records.jsonl is missing: what was measured is gone"

Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured row. `time` is the end of the phase in unix seconds."""

    run: str
    lab: str
    cycle: int
    phase: str
    rank: int
    metric: str
    value: float | None
    unit: str
    time: float

    def to_line(self) -> str:
        row = {name: getattr(self, name) for name in COLUMNS}
        if self.value is not None:
            row["value"] = spell(float(self.value))
        return json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a run folder holds: its records, how many lines were unreadable, and a sentence for each thing that is lost."""

    records: list[Record]
    torn: int = 0
    notes: list[str] = field(default_factory=list)


class RecordWriter:
    """Appends to one file. Bytes survive the death of this process, not a power cut: there is no fsync per batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise KitError(f"cannot record to {path}: {error.strerror}") from error
        size = os.fstat(self._fd).st_size
        # A predecessor may have died in the middle of a line: end it, or it would swallow our first record.
        self._lead = b"\n" if size and os.pread(self._fd, 1, size - 1) != b"\n" else b""

    def append(self, records: Sequence[Record]) -> None:
        """Append the batch with one write. When the disk is full, the half-written tail is taken back."""
        if not records:
            return
        data = self._lead + "".join(record.to_line() for record in records).encode()
        done = start = 0
        try:
            done = os.write(self._fd, data)
            start = os.lseek(self._fd, 0, os.SEEK_CUR) - done
            while done < len(data):  # a short write means that something is wrong; the next one says what
                done += os.write(self._fd, data[done:])
        except OSError as error:
            # Only a tail that is still ours alone is cut; bytes that another process appended behind it stay.
            if done and os.fstat(self._fd).st_size == start + done:
                os.ftruncate(self._fd, start)
            raise KitError(
                f"cannot record to {self.path}: {error.strerror}; what was measured before is kept there"
            ) from error
        self._lead = b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(folder: Path) -> Loaded:
    """Every record of a run folder, in file order. Several nodes of a run have a file each."""
    records: list[Record] = []
    notes: list[str] = []
    torn = 0
    files = sorted(folder.glob(PATTERN))
    if not files:
        notes.append(MISSING)
    for path in files:
        columns, dropped = parse(lines_of(read_bytes(path)))
        records += [Record(**dict(zip(COLUMNS, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        if dropped:
            torn += len(dropped)
            notes.append(note(path.name, [index + 1 for index in dropped]))
    return Loaded(records, torn, notes)


def read_bytes(path: Path, start: int = 0) -> bytes:
    """A file of records from a place on."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error


def lines_of(data: bytes) -> list[str]:
    # A line torn inside a character must not make the others unreadable, hence "replace".
    return data.decode(errors="replace").split("\n")


def parse(lines: Sequence[str]) -> tuple[Columns, list[int]]:
    """Columns of what can be read, and the places of the lines that cannot. Empty lines are nothing."""
    full = [line for line in lines if line]
    try:  # all at once is several times as fast as one by one
        rows = json.loads(f"[{','.join(full)}]")
        if len(rows) == len(full):
            return _columns(rows), []
    except (ValueError, KeyError, TypeError):
        pass
    parts: list[Columns] = []
    dropped: list[int] = []
    for index, line in enumerate(lines):
        if line:
            try:
                parts.append(_columns([json.loads(line)]))
            except (ValueError, KeyError, TypeError):
                dropped.append(index)
    return {name: [value for part in parts for value in part[name]] for name in COLUMNS}, dropped


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as a table of the nine columns. In it a null value is NaN: a table of floats has one missing value."""
    rows = list(records)
    return frame_of({name: [getattr(row, name) for row in rows] for name in COLUMNS})


def frame_of(columns: Columns) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({name: pd.Series(columns[name], dtype=TYPES[name]) for name in COLUMNS})


def _columns(rows: list[Any]) -> Columns:
    """The rows by column; what is no record raises."""
    columns: Columns = {name: [row[name] for row in rows] for name in COLUMNS}
    columns["value"] = [None if value is None else float(value) for value in columns["value"]]
    for name, kind in (("cycle", int), ("rank", int), ("time", float)):
        columns[name] = [kind(value) for value in columns[name]]
    return columns


def note(name: str, lines: list[int]) -> str:
    shown = ", ".join(str(number) for number in lines[:5]) + (", ..." if len(lines) > 5 else "")
    if len(lines) == 1:
        return f"{name}: 1 incomplete line was dropped (line {shown})"
    return f"{name}: {len(lines)} incomplete lines were dropped (lines {shown})"
