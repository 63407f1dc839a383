"""Records: what a run measured, one JSON object a line, appended as it happens.

`value` is null where there was nothing to measure; NaN and the infinities are the words "NaN", "Infinity" and
"-Infinity", so that every line is strict JSON. A writer that dies leaves at most one torn line; where several
processes append to one file, others may follow it. Readers drop such lines and say how many.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
        notes.append("records.jsonl is missing: what was measured is gone")
    for path in files:
        dropped: list[int] = []
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
        # A line torn inside a character must not make the others unreadable, hence "replace".
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                records.append(_parse(line.decode(errors="replace")))
            except (ValueError, KeyError, TypeError):
                dropped.append(number)
        if dropped:
            torn += len(dropped)
            notes.append(_note(path.name, dropped))
    return Loaded(records, torn, notes)


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as a table of the nine columns. In it a null value is NaN: a table of floats has one missing value."""
    import pandas as pd

    rows = list(records)
    return pd.DataFrame({name: pd.Series([getattr(row, name) for row in rows], dtype=TYPES[name]) for name in COLUMNS})


def _parse(line: str) -> Record:
    row = json.loads(line)
    value = row["value"]
    return Record(
        run=row["run"],
        lab=row["lab"],
        cycle=int(row["cycle"]),
        phase=row["phase"],
        rank=int(row["rank"]),
        metric=row["metric"],
        value=None if value is None else float(value),
        unit=row["unit"],
        time=float(row["time"]),
    )


def _note(name: str, lines: list[int]) -> str:
    shown = ", ".join(str(number) for number in lines[:5]) + (", ..." if len(lines) > 5 else "")
    if len(lines) == 1:
        return f"{name}: 1 incomplete line was dropped (line {shown})"
    return f"{name}: {len(lines)} incomplete lines were dropped (lines {shown})"
