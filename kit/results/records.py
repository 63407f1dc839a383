"""Rows: what a run measured, one JSON object per line, appended as it happens. The one schema and the one writer. And files of JSON.

An id of a row is a text, a whole number or a list of whole numbers. Files hold a list as a JSON list; a text such as "3,4" is read as a
list too, by `numbers`, because older kits and other systems write lists that way.

JSON has no NaN and no infinity: such numbers are written as the words "NaN", "Infinity" and "-Infinity" (Python's float() and
JavaScript's Number() both read them), so that all is strict JSON; null means that there is no value. A writer that dies leaves at most
one torn line; where several processes append to one file, others may follow it. Readers drop lines that are no rows and count them.
Other files are complete or absent: a temporary beside the target, then a rename.

Ranks import this: it needs the standard library only. Tables are made in `kit.results.frames`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import operator
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, SupportsIndex

from kit.errors import BadInput, KitError

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
    "text": "str",
    "ids": "str",
    "start": "float64",
}
COLUMNS = tuple(TYPES)
OPTIONAL = ("text", "ids", "start")
REQUIRED = COLUMNS[: -len(OPTIONAL)]
OWN_LAB = "own"  # the lab of a run that a person's own job writes, unless it names one
SEALED = (
    "sealed"  # in run.json: the count and digest of rows and verdict when the run ended, and digests of these facts
)
SEALED_FACTS = ("config", "lab", "fault")
SCHEMA = (
    3  # in run.json; since 3 a run that ended is sealed; runs without it coded texts and ids in the names of metrics
)
ZEROS = "came back as zeros"  # what a record says of a tensor that was something else before
STEP_LINE = "kit: step "  # begins the line of a training step in a rank's log; a screen does not show it
NOTEBOOK = -1  # the rank of what the notebook side recorded
PATTERN = "records*.jsonl"
MISSING = "records.jsonl is missing: the records of this run are lost"
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # how files spell what JSON has no number for
WHOLE = range(-(2**63), 2**63)  # the whole numbers that a table can hold

# What a terminal would obey: sequences of ANSI (colours, titles), then single control characters but tab and end of line.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# What a line that is no row raises.
UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)

QUOTED = ("kind", "group", "sample", "step", "update", "replica", "number")  # the ids by which a finding names a row

Columns = dict[str, list[Any]]
Id = str | int | tuple[int, ...]
AsId = str | SupportsIndex | Sequence[SupportsIndex]  # what a person may give as an id


class Unjudged(KitError):  # noqa: N818 - a check raises it for `judge`; people do not see it as an error
    """The code under test kept a check from being judged: a failed row without a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured fact; without a value it is an event. `time` is when it was measured, in Unix seconds; a span also has a `start`.

    `text` is a short text beside the value (a digest, a reason), `ids` name what the row is about (tensor, group, bucket, ...). A
    recorded row has its place: run, lab, phase, cycle, rank and its role (which a file lacks, and a run's provenance has). In a
    ledger it has its position `at`, and `since`, the seconds since the first row.
    """

    metric: str
    value: float | None = None
    unit: str = ""
    ids: Mapping[str, Id] = field(default_factory=dict)
    text: str = ""
    start: float | None = None
    time: float
    run: str = ""
    lab: str = ""
    phase: str = ""
    cycle: int = 0
    rank: int = NOTEBOOK
    role: str = ""
    at: int = -1
    since: float = 0.0

    @property
    def event(self) -> str:
        """The name of an event: its metric."""
        return self.metric

    @property
    def who(self) -> str:
        """The pipeline that the row is about; empty in the ledger of a single one."""
        return str(self.ids.get("who", self.ids.get("pipeline", "")))

    def get(self, name: str, default: Any = None) -> Any:
        return self.ids.get(name, default)

    def __getitem__(self, name: str) -> Any:
        """An id. A row without it cannot be judged: `Unjudged`."""
        if name not in self.ids:
            raise Unjudged(f"{self} has no id `{name}`")
        return self.ids[name]

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and name not in self.ids:
            return default
        try:
            return int(self[name])
        except (TypeError, ValueError):
            raise Unjudged(f"{self} has {name}={value_in_words(self[name])!r}; it must be a whole number") from None

    def numbers(self, name: str) -> tuple[int, ...]:
        """The whole numbers of an id, none if the row lacks it: a list, a text such as "3,4", or a single number."""
        try:
            return numbers(self.ids.get(name, ()))
        except ValueError:
            raise Unjudged(f"{self} has {name}={self[name]!r}; it must be a list of whole numbers") from None

    def __str__(self) -> str:
        about = [f"{name} {value_in_words(self.ids[name])}" for name in QUOTED if name in self.ids]
        of = ", ".join([self.who, *about] if self.who else about)
        return f"`{self.event}`{' of ' if of else ''}{of} (row {self.at}, {self.since:.3f} s)"

    @classmethod
    def placed(cls, facts: Mapping[str, Any], **place: Any) -> Row:
        """The row of these facts (`Row.facts`, perhaps sent as JSON) at its place."""
        return cls(**{**facts, "ids": typed(facts.get("ids", {}))}, **place)

    def facts(self) -> dict[str, Any]:
        """What the row has beside its place, as JSON can hold it; an empty text, id or start takes no room."""
        number = None if self.value is None else float(self.value)
        return {"metric": self.metric, "value": number, "unit": self.unit, "time": self.time} | self._optional()

    def to_line(self) -> str:
        """One line of JSON, without text, ids or start if they are empty."""
        row = {name: getattr(self, name) for name in REQUIRED}
        if self.value is not None:
            row["value"] = spell(float(self.value))
        return json.dumps(row | self._optional(), allow_nan=False, separators=(",", ":")) + "\n"

    def _optional(self) -> dict[str, Any]:
        optional = {"text": self.text, "ids": checked_ids(self.ids), "start": self.start}
        return {name: value for name, value in optional.items() if value or value == 0}


def spell(number: float) -> float | str:
    return number if math.isfinite(number) else json.dumps(number)


# -- ids -----------------------------------------------------------------------------------------------------------------


def checked_ids(ids: Mapping[str, AsId]) -> dict[str, Id]:
    """Ids as they are written. One that is neither text nor whole numbers, or has the name of a row's key, is a `BadInput`."""
    checked: dict[str, Id] = {}
    for name, value in ids.items():
        if name in TYPES:
            raise BadInput(f"{name!r} is a key of every row; give the id another name")
        try:
            checked[name] = value if isinstance(value, str) else _whole_id(value)
        except TypeError:
            raise BadInput(
                f"the id {name}={value!r} is neither text, a whole number nor a list of whole numbers"
            ) from None
        except OverflowError:
            raise BadInput(f"the id {name}={value} does not fit into 64 bits; give it as text") from None
    return checked


def _whole_id(value: SupportsIndex | Sequence[SupportsIndex]) -> int | tuple[int, ...]:
    if isinstance(value, Sequence):
        return tuple(map(_whole_number, value))
    return _whole_number(value)


def _whole_number(value: SupportsIndex) -> int:
    number = int(operator.index(value))
    if number not in WHOLE:
        raise OverflowError
    return number


def typed(ids: Mapping[str, Any]) -> Mapping[str, Id]:
    """Ids that were read from JSON: lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in ids.items()}


def numbers(value: Id) -> tuple[int, ...]:
    """The whole numbers of an id: a list, a text such as "3,4", or a single number."""
    if isinstance(value, str):
        return tuple(map(int, value.split(","))) if value else ()
    return (value,) if isinstance(value, int) else value


def value_in_words(value: Id) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def label(metric: str, ids: Mapping[str, Id]) -> str:
    return " ".join([metric, *(f"{name}={value_in_words(value)}" for name, value in ids.items())])


def rank_name(rank: int, roles: Mapping[int, str]) -> str:
    if rank == NOTEBOOK:
        return "notebook"
    return f"rank {rank} ({roles[rank]})" if roles.get(rank) else f"rank {rank}"


class Recording:
    __slots__ = ()

    def record(
        self,
        metric: str,
        value: float | None,
        unit: str = "1",
        *,
        text: str = "",
        start: float | None = None,
        **ids: AsId,
    ) -> None:
        """Add a row to the phase that runs, within a second also in the run's folder. Driven steps record as rank -1.

        `text` is a short text beside the value; `start` makes it a span that ends now; `ids` name what it is about.
        """
        number = None if value is None else float(value)
        about = checked_ids(ids)
        self._send(Row(metric=metric, value=number, unit=unit, time=time.time(), text=text, start=start, ids=about))

    def _send(self, row: Row) -> None:
        raise NotImplementedError


def utc() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")  # noqa: UP017 - ranks may run Python 3.10


class RowsLost(KitError):  # noqa: N818 - the owner of a writer may go on
    """Rows could not be written: `lost` of them. What was written before is whole."""

    def __init__(self, message: str, lost: int) -> None:
        super().__init__(message)
        self.lost = lost


class RowWriter:
    """Appends to one file, which other processes may append to. Bytes survive the death of this process, not a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise KitError(f"cannot record into {path}: {error.strerror}") from error
        size = os.fstat(self._fd).st_size
        # A predecessor may have died in the middle of a line: end it, or it would swallow our first row.
        self._lead = b"\n" if size and os.pread(self._fd, 1, size - 1) != b"\n" else b""

    def append(self, rows: Sequence[Row]) -> None:
        """Append the batch with one write. When the disk is full, the half-written tail is taken back: `RowsLost`."""
        if not rows:
            return
        data = self._lead + "".join(row.to_line() for row in rows).encode()
        done = start = 0
        try:
            done = os.write(self._fd, data)
            start = os.lseek(self._fd, 0, os.SEEK_CUR) - done
            while done < len(data):  # a short write means that something is wrong; the next one has the reason
                done += os.write(self._fd, data[done:])
        except OSError as error:
            kept = 0 if self._take_back(start, done) else data[len(self._lead) : done].count(b"\n")
            raise RowsLost(
                f"cannot record into {self.path}: {error.strerror}; what was measured before is kept there",
                len(rows) - kept,
            ) from error
        self._lead = b""

    def _take_back(self, start: int, done: int) -> bool:
        """Cut a half-written tail, unless another process has appended behind it."""
        if not done:
            return True
        try:
            if os.fstat(self._fd).st_size == start + done:
                os.ftruncate(self._fd, start)
                return True
        except OSError:  # then it stays, and readers drop it
            pass
        self._lead = b"\n"  # the torn piece must not swallow the next row
        return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def seal(path: Path) -> dict[str, Any]:
    """The number and the digest of a file's rows, by which a reader sees that some were lost or changed afterwards."""
    digest, rows = hashlib.sha256(), 0
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size  # 0 for a device, which may have no end
        while data := file.read(min(left, 2**20)):
            left -= len(data)
            digest.update(data)
            rows += data.count(b"\n")
        size = file.tell()
    return {"rows": rows, "bytes": size, "sha256": digest.hexdigest()}


def digests_of(info: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest_of(info.get(name)) for name in SEALED_FACTS}


def digest_of(fact: Any) -> str:
    """The same for a config in memory and the one that is read from its file: a key 1 is "1" there, and a tuple a list."""
    filed = load_json(to_json(fact or {}))
    return hashlib.sha256(json.dumps(filed, sort_keys=True).encode()).hexdigest()


def read_bytes(path: Path, start: int = 0) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error


def parse_lines(data: bytes) -> tuple[Columns, list[int]]:
    """Columns of the readable lines, and the positions of the unreadable ones. Empty lines are ignored."""
    # A line torn inside a character must not make the others unreadable, hence "replace".
    return _parse(data.decode(errors="replace").removesuffix("\n").split("\n"))


def _parse(lines: Sequence[str]) -> tuple[Columns, list[int]]:
    """All lines at once, which is several times as fast as one by one; lines with an unreadable one among them in halves."""
    full = [line for line in lines if line]
    try:
        return _columns(_rows(",".join(full), len(full)), exact=len(full) == 1), []
    except UNREADABLE:
        if len(lines) == 1:
            return {name: [] for name in COLUMNS}, [0]
    middle = len(lines) // 2
    (first, lost), (second, more_lost) = _parse(lines[:middle]), _parse(lines[middle:])
    return {name: first[name] + second[name] for name in COLUMNS}, lost + [middle + index for index in more_lost]


def unreadable_note(name: str, lines: list[int]) -> str:
    if len(lines) == 1:
        return f"{name}: 1 unreadable line was dropped (line {lines[0]})"
    shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    return f"{name}: {len(lines)} unreadable lines were dropped (lines {shown})"


# -- from JSON to columns: what is no row raises ---------------------------------------------------------------------------


def finite(digits: str) -> float:
    """A number of a JSON file; one that no float can hold, such as 1e400, is no number."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _rows(joined: str, count: int) -> list[Any]:
    """The objects of some lines. One line alone is parsed in a slower way, which tells 1e400 from a word."""
    text = f"[{joined}]"
    rows: list[Any] = json.loads(text, parse_float=finite) if count == 1 else json.loads(text)
    if len(rows) != count:
        raise ValueError("some lines are not one object each")
    if "\\" in text and ("\\ud" in text or "\\uD" in text):  # half a character, which no table takes
        rows = json.loads(json.dumps(rows, ensure_ascii=False).encode(errors="replace"))
    plain: list[Any] = without_escapes(rows, text)
    return plain


def without_escapes(value: Any, text: str) -> Any:
    """The value of a JSON text without what a terminal would obey; most texts have nothing of the kind."""
    if "\\u00" not in text and text.isascii() and "\x7f" not in text:
        return value
    if isinstance(value, str):
        return ESCAPES.sub("", value)
    if isinstance(value, list):
        return [without_escapes(item, text) for item in value]
    if isinstance(value, dict):
        return {ESCAPES.sub("", name): without_escapes(item, text) for name, item in value.items()}
    return value


def _columns(rows: list[Any], *, exact: bool) -> Columns:
    columns: Columns = {}
    for name in REQUIRED:
        column = [row[name] for row in rows]
        if name in {"value", "time"}:
            columns[name] = _numbers(column, exact=exact) if name == "value" else _times(column)
        else:
            columns[name] = _texts(column) if TYPES[name] == "str" else _wholes(column)
    if set(map(len, rows)) <= {len(REQUIRED)}:  # as in most files: nothing to look for
        return {**columns, "text": [""] * len(rows), "ids": [{}] * len(rows), "start": [None] * len(rows)}
    columns["text"] = _texts([row.get("text", "") for row in rows])
    columns["ids"] = _ids([row.get("ids", {}) for row in rows])
    starts = [row.get("start") for row in rows]
    known = iter(_times([start for start in starts if start is not None]))
    columns["start"] = [None if start is None else next(known) for start in starts]
    return columns


def _texts(column: list[Any]) -> list[Any]:
    if set(map(type, column)) - {str}:
        raise TypeError("a text must be a string")
    return column


def _wholes(column: list[Any]) -> list[Any]:
    if set(map(type, column)) - {int}:
        if not all(type(value) is int or (type(value) is float and value.is_integer()) for value in column):
            raise TypeError("not a whole number")
        column = list(map(int, column))
    if column and not (min(column) in WHOLE and max(column) in WHOLE):
        raise OverflowError("a whole number is too large")
    return column


def _numbers(column: list[Any], *, exact: bool) -> list[Any]:
    kinds = set(map(type, column))
    if kinds - {float, int, str, type(None)}:
        raise TypeError("a value must be a number or null")
    if not exact and (math.inf in column or -math.inf in column):
        raise OverflowError("a number that was perhaps too large: only a line alone tells")
    if str in kinds:
        column = [WORDS[value] if type(value) is str else value for value in column]
    return [None if value is None else float(value) for value in column] if kinds - {float} else column


def _times(column: list[Any]) -> list[Any]:
    kinds = set(map(type, column))
    if kinds - {float, int} or not all(map(math.isfinite, column)):
        raise ValueError("a time must be a number")
    return list(map(float, column)) if int in kinds else column


def _ids(column: list[Any]) -> list[Any]:
    if set(map(type, column)) - {dict}:
        raise TypeError("ids must be an object")
    values = [value for ids in column for value in ids.values()]
    kinds = set(map(type, values))
    if kinds - {str, int, list}:
        raise TypeError("an id must be a text, a whole number or a list of whole numbers")
    lists = [value for value in values if type(value) is list]
    in_lists = list(itertools.chain.from_iterable(lists))
    if set(map(type, in_lists)) - {int}:
        raise TypeError("an id must be a text, a whole number or a list of whole numbers")
    _wholes([value for value in values if type(value) is int] + in_lists)
    return [typed(ids) for ids in column] if lists else column


# -- files of JSON that are either complete or absent --------------------------------------------------------------------

ROOM = f"{' ' * 512}\n"


def spelled_number(value: Any) -> Any:
    if isinstance(value, float):
        return spell(value)
    if isinstance(value, Mapping):
        return {key: spelled_number(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spelled_number(item) for item in value]
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(spelled_number(value), ensure_ascii=False, allow_nan=False, indent=indent)


NAME_BYTES, PATH_BYTES = 255, 4095  # as long as Linux allows


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path that a person gave, with its `~` replaced. An empty one, which may come from an unset variable, is refused."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise BadInput(f"{text!r} is not a path; give the path of a file or folder")
    try:
        expanded = Path(text).expanduser()
    except RuntimeError:
        raise BadInput(f"there is no user {Path(text).parts[0].removeprefix('~')!r} for the path {text}") from None
    longest = max(expanded.parts, key=len, default="")
    if len(os.fsencode(longest)) > NAME_BYTES or len(os.fsencode(expanded)) > PATH_BYTES:
        raise BadInput(f"the path {text} is too long; a name has at most {NAME_BYTES} bytes, a path {PATH_BYTES}")
    return expanded


def output_file(path: str | os.PathLike[str]) -> Path:
    """A file that a person wants written. Its folder is made; a path that cannot be a file is refused."""
    target = user_path(path)
    if target.is_dir():
        raise BadInput(f"cannot write {target}: it is a folder")
    make_folder(target.parent)
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise BadInput(f"cannot write {target}: its folder takes no file ({error.strerror})") from error
    return target


def make_folder(folder: Path) -> None:
    """The one rule for missing folders, wherever a person names a file or a folder: they are made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {folder}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it is renamed to `path` when the block succeeds, and removed when it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        try:
            yield temporary
            temporary.replace(path)
        except OSError as error:
            raise KitError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # already renamed, or the folder itself is out of reach: nothing to remove
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        # Half a character, as in an odd file name, is spelled out, which JSON reads back.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value, indent=1) + "\n")


def rewrite_json(path: Path, value: Any) -> None:
    """Replace a file, and leave some room in it: on a full disk or in a read-only folder the new text is written over the old."""
    try:
        write_text(path, to_json(value, indent=1) + ROOM)
    except KitError:
        data = to_json(value).encode(errors="backslashreplace")
        if not path.is_file() or len(data) > path.stat().st_size:
            raise
        with path.open("r+b", buffering=0) as file:
            file.write(data.ljust(path.stat().st_size))


def read_json(path: Path) -> Any:
    """The file's JSON; a file that is missing or damaged is a `BadInput` that names it."""
    try:
        return load_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise BadInput(f"{path} is damaged: its brackets are nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"{path} is damaged: it is not valid JSON ({error})") from error


def load_json(text: str) -> Any:
    """JSON in which every number fits into a float; its texts come without what a terminal would obey."""
    return without_escapes(json.loads(text, parse_float=finite, parse_int=_whole_digits), text)


def _whole_digits(digits: str) -> int:
    finite(digits)
    return int(digits)


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config under one name for each setting; those of a nested config under NAME.SETTING: `{"a": {"steps": 3}}` is `{"a.steps": 3}`."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            named |= {f"{name}.{setting}": nested for setting, nested in value.items()}
        else:
            named[name] = value
    return named
