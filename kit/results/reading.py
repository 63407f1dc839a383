"""Reading a run's records while it grows: what was read before is not read again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kit.results.records import MISSING, PATTERN, frame_of, lines_of, note, parse, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

KNOWN_BY = 256  # as many bytes before a place tell whether the file is still the one that was read


@dataclass
class Place:
    """How far a file was read: its bytes, the last of them, its lines, and which of these were dropped."""

    size: int = 0
    last: bytes = b""
    lines: int = 0
    dropped: list[int] = field(default_factory=list)


class Reader:
    """A run folder's records as a table, and a sentence for each thing that is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, Place] = {}
        self._frame: pd.DataFrame | None = None

    def read(self) -> tuple[pd.DataFrame, list[str]]:
        """All records, in the order of their files. A table that was given before is never changed."""
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
        lines = lines_of(data)
        columns, dropped = parse(lines)
        place.dropped += [place.lines + index + 1 for index in dropped]
        place.lines += len(lines) - 1
        place.size += len(data)
        place.last = (place.last + data)[-KNOWN_BY:]
        return frame_of(columns)

    def _nothing(self) -> pd.DataFrame:
        return frame_of(parse([])[0])
