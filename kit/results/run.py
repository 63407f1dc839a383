"""A run: a folder with `run.json`, `records*.jsonl`, `verdict.json` and `logs/rankN.log`.

`create_run` makes one. `Run` reads one, whole or cut off by a kill, and follows it while it grows. Its rows are a pandas table: a null
value is NaN, ids are JSON text, which `frames.rows_of` and `frames.with_ids` read. The checks of its lab and the plotter come from the
caller, since this room knows neither labs nor views.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from kit.errors import BadInput, KitError, hint
from kit.machine import MIB, is_gone, owner
from kit.results.frames import export, read_ids, rows_of
from kit.results.old import current_settings
from kit.results.records import (
    COLUMNS,
    MISSING,
    OWN_LAB,
    PATTERN,
    SCHEMA,
    SEALED,
    SEALED_FACTS,
    TYPES,
    Columns,
    Row,
    RowWriter,
    digest_of,
    digests_of,
    output_file,
    parse_lines,
    rank_name,
    read_bytes,
    read_json,
    rewrite_json,
    seal,
    to_json,
    unreadable_note,
    user_path,
    utc,
    write_json,
    write_text,
)
from kit.results.rules import Answer, Measured, Rule, applicable, hold_limits, measure_checks, suspect_in
from kit.results.units import ROW, counted
from kit.results.verdict import Verdict, checked_tolerances, read_verdict, tally
from kit.target import kit_version

if TYPE_CHECKING:
    import pandas as pd

Rules = Callable[[str], Sequence[Rule]]
CPU_WANTED = "asked for"  # why a rank is on the CPU, if device=cpu
Plotter = Callable[..., object]  # of a run, a drawing's name, and how it is to look
Stamp = tuple[tuple[str, int, int], ...]

INDEX = "index.json"  # of a folder that holds the runs of one sweep
LABEL = "label.json"  # in a run's folder, where a person has named the run
SNAPSHOTS = "memory"  # the folder in a run's folder
VIEWER = "drop one on https://pytorch.org/memory_viz, which opens it in the browser and uploads nothing"
NAMED = re.compile(r"(?P<lab>.+)-\d{8}-\d{6}-[0-9a-f]{4}")  # as create_run names them
RUN_ID = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")  # older kits took the name of any folder
LONGEST = 120  # characters of a label
SHOWN_NAMES = 4  # of several runs with one name
EDITED = "run.json: the {} was edited after the run ended"
UNSEALED = f"run.json: `{SEALED}` was removed, so nothing shows whether the run was edited after it ended"
BROKEN = ("stopped", "interrupted", "failed")
STATUSES = ("running", "finished", "stopped", "failed")  # in a file; a reader also knows `interrupted`


class Provenance(dict[str, Any]):
    """What a table is of. pandas copies a table's attrs with every operation on it; these stay the same."""

    def __deepcopy__(self, _: object) -> Provenance:
        return self


class Run:
    """A run on disk. `rules` gives the rules of a lab (none for a lab it does not know); `plotter` draws a run.

    `complete` says that no record will follow, which `run.json` says of a finished run: in a complete run, records that a fault or
    code from outside the kit kept away fail their checks.
    """

    def __init__(
        self,
        dir: str | Path,  # noqa: A002 - the contract's name
        *,
        rules: Rules | None = None,
        plotter: Plotter | None = None,
        complete: bool = False,
    ) -> None:
        self._complete = complete
        self.dir = user_path(dir).absolute()
        self._rules = rules
        self._plotter = plotter
        self._info: tuple[Stamp, dict[str, Any]] | None = None
        self._files: dict[str, File] = {}
        self._loaded: tuple[Stamp, pd.DataFrame, list[str]] | None = None
        self._answers: tuple[pd.DataFrame, tuple[object, ...], list[Answer]] | None = None
        self.info()

    def info(self) -> dict[str, Any]:
        path = self.dir / "run.json"
        if not self.dir.is_dir():
            raise BadInput(f"there is no run folder {self.dir}")
        try:
            if not path.is_file():
                sweep = (self.dir / INDEX).is_file() and "; it holds the runs of a sweep: `kit runs DIR` lists them"
                raise BadInput(f"{self.dir} is not a run: it has no run.json{sweep or ''}")
            stamp = stamp_of([path])
        except PermissionError:
            raise BadInput(f"cannot read {path}: Permission denied") from None
        if self._info is None or self._info[0] != stamp:
            self._info = stamp, checked_info(path, read_json(path))
        return self._info[1]

    @property
    def id(self) -> str:
        return str(self.info()["run"])

    @property
    def lab(self) -> str:
        return str(self.info()["lab"])

    @property
    def config(self) -> dict[str, Any]:
        return current_settings(self.lab, self.info().get("config") or {})

    @property
    def provenance(self) -> dict[str, Any]:
        return dict(self.info().get("provenance") or {})

    @property
    def roles(self) -> dict[int, str]:
        about = self.provenance.get("world")
        roles = about.get("roles") or {} if isinstance(about, dict) else {}
        return {int(rank): str(name) for name, ranks in roles.items() for rank in ranks}

    @property
    def status(self) -> str:
        """running, finished, stopped (by a person), interrupted or failed.

        The file of a run that was killed says `running` for ever; it is interrupted once the process that wrote it is gone.
        """
        return status_in(self.info())

    @property
    def broke(self) -> bool:
        return self.status in BROKEN

    @property
    def ended(self) -> str:
        """The status of a run that did not come to its end, else empty. Another system's ledger, which has no owner, may stay `running`."""
        return early_end(self.info(), complete=self._complete)

    @property
    def fault(self) -> str | None:
        return self.info().get("fault")

    @property
    def error(self) -> str | None:
        return self.info().get("error")

    @property
    def own(self) -> bool:
        """A user's own job wrote it, with a Recorder."""
        return self.lab == OWN_LAB or "launch" in self.info()

    @property
    def partial(self) -> bool:
        """The run did not finish, or some of its records are torn, gone or changed."""
        return self.status != "finished" or bool(self._load()[1]) or bool(self.alterations)

    @property
    def alterations(self) -> list[str]:
        """What accidents have changed since the run ended, one sentence each. Someone who forges a run can also change its seal."""
        sealed = self.info().get(SEALED)
        if not sealed or self.info()["status"] == "running":
            return [UNSEALED] if lacks_seal(self.info()) else []
        self._load()
        known = sealed["records"]
        changes = edited_facts(self.info())
        changes += [change for name, wrote in known.items() if (change := self._altered(name, wrote))]
        if not self.own:
            changes += [f"{name} was added after the run ended" for name in self._files if name not in known]
        if "verdict" in sealed:
            try:
                verdict = self.stored_verdict()
                change = (
                    "is missing" if verdict is None else "was edited" if verdict.digest != sealed["verdict"] else ""
                )
            except BadInput:
                change = "is damaged"
            if change:
                changes.append(f"the stored verdict {change}: `kit check` judges the records again")
        return changes

    def _altered(self, name: str, wrote: Mapping[str, Any]) -> str:
        file = self._files.get(name)
        if file is None:
            return f"{name} is missing, with its {counted(wrote['rows'], 'row')}" if len(self._files) else ""
        lost = wrote["rows"] - file.lines
        if lost > 0:
            return f"{name}: {counted(lost, 'row')} of {wrote['rows']} {'is' if lost == 1 else 'are'} missing"
        if lost < 0:
            return f"{name}: {counted(-lost, 'row')} {'was' if lost == -1 else 'were'} added after the run ended"
        return "" if file.digest == wrote["sha256"] else f"{name} was edited after the run ended"

    @property
    def label(self) -> str:
        """A person's name for the run, or a note on it; set it with `run.label = "..."`. Empty without one."""
        path = self.dir / LABEL
        return label_in(path) if path.is_file() else ""

    @label.setter
    def label(self, text: str) -> None:
        if len(text := " ".join(text.split())) > LONGEST:
            raise BadInput(f"the label has {len(text)} characters; at most {LONGEST} fit beside a run")
        write_json(output_file(self.dir / LABEL), text)

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know, one sentence each."""
        status = {
            "running": "the run has not finished",
            "stopped": "a person stopped the run",
            "interrupted": "the run was interrupted: the process that wrote it is gone",
            "failed": f"the run failed: {self.error or 'no reason was recorded'}",
        }
        ran, gpu = self.provenance.get("world") or {}, self.provenance.get("gpu") or {}
        cpu = (
            f"the ranks ran on the CPU although {why}"
            if (why := unused_gpu(gpu, ran.get("device"), ran.get("why")))
            else ""
        )
        shared = (
            "all ranks shared one GPU, so NCCL went over sockets: times of collectives and memory of communicators say nothing of NVLink"
            if ran.get("device") == "cuda" and len(gpu.get("gpus") or ()) == 1 and self.config.get("ranks") != 1
            else ""
        )
        return [*filter(None, [status.get(self.status), cpu, shared]), *self._load()[1], *self.alterations]

    def frame(self) -> pd.DataFrame:
        """The records as a table: run, lab, cycle, phase, rank, metric, value, unit, time, text, ids, start. Yours to change.

        `attrs["provenance"]` says which run they are of, with its settings, machine and versions.
        """
        frame = self._load()[0].copy()
        frame.attrs["provenance"] = Provenance(self.about())
        return frame

    def table(self, metric: str) -> pd.DataFrame:
        """A metric with a row for each cycle and phase, in the order in which they ran, and for each of its ids; a column for each rank."""
        frame = self.frame()
        rows = frame[frame["metric"] == metric]
        if rows.empty:
            raise BadInput(f"{self.id} has no metric {metric!r}; {hint(metric, frame['metric'].unique())}")
        if rows["value"].isna().all():
            raise BadInput(f"{metric!r} has no numbers; frame() has its rows, with their ids and texts")
        ids = {text: read_ids(text) for text in rows["ids"].unique()}
        names = sorted({name for known in ids.values() for name in known})
        columns: dict[str, list[Any]] = {name: [ids[text].get(name, "") for text in rows["ids"]] for name in names}
        places = ["cycle", "phase", *names, "rank"]
        last = rows.assign(**columns).groupby(places, sort=False, dropna=False, observed=True)["value"].last()
        wide = last.unstack("rank")
        wide.attrs = {**frame.attrs, "unit": rows["unit"].iloc[0]}
        return wide

    def verdict(self, **tolerances: float) -> Verdict:
        """The lab's checks put to the records; where the lab has none here, the verdict that the run stored.

        A run that broke is judged as far as its records go: what they do not reach is not measured.
        """
        if answers := self._measured():
            moved = checked_tolerances(tolerances, allowed=[rule.name for rule in self._lab_rules()])
            return Verdict(hold_limits(answers, self.config, moved), ended=self.ended)
        if tolerances:
            raise BadInput(
                f"lab {self.lab!r} has no checks here, so it takes no tolerances (got {', '.join(tolerances)})"
            )
        return self.stored_verdict() or Verdict([])

    def stored_verdict(self) -> Verdict | None:
        path = self.dir / "verdict.json"
        return Verdict(read_verdict(path), ended=self.ended) if path.is_file() else None

    def cycles_needed(self) -> dict[str, int]:
        """The checks that are not measured because the run had too few cycles, and how many cycles each needs."""
        return {
            f"{rule.name}/{part.of}" if part.of else rule.name: part.cycles
            for rule, finding in self._measured()
            for part in ([finding] if isinstance(finding, Measured) else finding)
            if part.cycles
        }

    def _lab_rules(self) -> Sequence[Rule]:
        return self._rules(self.lab) if self._rules else ()

    def _measured(self) -> list[Answer]:
        """What the checks found, cached until the records grow: limits move far more often than records arrive."""
        rules = applicable(self._lab_rules(), self.config)
        if not rules:
            return []
        frame, info, config = self._load()[0], self.info(), self.config
        # No record will follow, and this kit's labs wrote them: if a check lacks records, something kept them away.
        # Older kits, which wrote no schema, coded texts and ids in the names of metrics.
        # A world of `kit explore` has only what its lab's cores write, whoever wrote them.
        explored = "explored" in (info.get("provenance") or {})
        done = self._complete or (self.status == "finished" and info.get("kit") == kit_version() and not explored)
        whole = done and "schema" in info
        edited = edited_facts(info)
        asked = config, whole, self.lab, edited
        if self._answers is None or self._answers[0] is not frame or self._answers[1] != asked:
            copied = frame.copy()
            copied.attrs["folder"] = str(self.dir)  # for checks of other files that a system wrote beside its records
            suspect = suspect_in(config, self.fault) if whole else ""
            if edited:
                kept = Measured(None, edited[0], failed=True)
                answers: list[Answer] = [(rule, kept) for rule in rules]
                self._answers = frame, asked, answers
                return answers
            self._answers = frame, asked, measure_checks(copied, config, rules, suspect, whole=whole)
        return self._answers[2]

    def shown_verdict(self) -> Verdict:
        """The verdict as it was given at the run's end; without one, the checks' answers to its records now."""
        return self.stored_verdict() or self.verdict()

    def about(self) -> dict[str, Any]:
        names = ("id", "lab", "config", "fault", "status", "partial", "notes")
        return {**self.provenance, "run": {name: getattr(self, name) for name in names}}

    def save(self, path: str | Path) -> Path:
        """Export the records to .csv, .parquet, .md, .tex, .html or .json, with their provenance."""
        return export(self.frame(), self.about(), path, units={"value": ROW}, title=f"Records of {self.id}")

    def plot(self, name: str = "overview", **options: Any) -> object:
        """A picture of the run: all of it, or the drawing of that name. `theme` is light or dark, `tolerances` move its limits."""
        if self._plotter is None:
            raise BadInput("this Run was made without a plotter; load it with kit.load to plot it")
        return self._plotter(self, name, **options)

    def __repr__(self) -> str:
        state = f"{self.status} (partial)" if self.partial else self.status
        return f"Run({self.id!r}, lab={self.lab!r}, {state}, {len(self._load()[0])} records, {self.dir})"

    def _load(self) -> tuple[pd.DataFrame, list[str]]:
        import pandas as pd

        paths = sorted(self.dir.glob(PATTERN))
        stamp = stamp_of(paths)
        if self._loaded is None or self._loaded[0] != stamp:
            self._files = {path.name: self._files.get(path.name) or File(path) for path in paths}
            frames = [file.read() for file in self._files.values()] or [to_frame([])]
            notes = [unreadable_note(name, file.dropped) for name, file in self._files.items() if file.dropped]
            frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
            self._loaded = stamp, frame, notes if paths else [MISSING]
        return self._loaded[1:]


def unused_gpu(gpu: Mapping[str, Any], device: str | None, why: str | None) -> str:
    """That a box has a GPU, and why its ranks do not use it; empty if they do, or if the CPU was asked for."""
    if device != "cpu" or why == CPU_WANTED or not (gpu.get("gpus") or gpu.get("driver")):
        return ""
    there = gpu["gpus"][0]["name"] if gpu.get("gpus") else f"the GPU driver {gpu['driver']}"
    return f"this box has {there}: {why}"


def lacks_seal(info: Mapping[str, Any]) -> bool:
    """Whether a lab's run has ended and its file lacks what the kit wrote then; older kits wrote none."""
    since = info.get("schema", 0) >= SCHEMA and "launch" not in info
    return since and info["status"] != "running" and SEALED not in info


def edited_facts(info: Mapping[str, Any]) -> list[str]:
    """What run.json says otherwise than when the run ended, a sentence each. Older kits sealed fewer facts."""
    sealed = info.get(SEALED) or {}
    return [
        EDITED.format(name) for name in SEALED_FACTS if name in sealed and sealed[name] != digest_of(info.get(name))
    ]


def label_in(path: Path) -> str:
    text = read_json(path)
    return " ".join(text.split()) if isinstance(text, str) else ""


def memory_snapshots(run: Run) -> str:
    """PyTorch's memory snapshots of a run, or why there are none; empty where none were asked for."""
    if not run.config.get("memory_snapshot"):
        return ""
    snapshots = sorted(run.dir.glob(f"{SNAPSHOTS}/rank*.pickle"), key=lambda path: (len(path.name), path.name))
    if snapshots:
        return f"{', '.join(f'{SNAPSHOTS}/{path.name}' for path in snapshots)}; {VIEWER}"
    if (run.provenance.get("world") or {}).get("device") == "cpu":
        return "none: the ranks worked on the CPU, and PyTorch keeps a history of its CUDA allocator only"
    return "none: no rank wrote one; the reason, if any, is in its log"


def list_runs(folder: str | Path) -> list[Path]:
    """The run folders inside `folder`, and inside its sweeps, the one whose run.json changed last first."""
    dated = dated_runs(user_path(folder))
    return [Path(path) for _, path in sorted(dated, reverse=True)]


def dated_runs(folder: str | Path, *, sweeps: bool = True) -> Iterator[tuple[int, str]]:
    """Without the objects of pathlib: thousands of runs are listed while a person waits."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            changed = state_of(f"{entry.path}/run.json")[1]
            if changed:
                yield changed, entry.path
            elif sweeps and state_of(f"{entry.path}/{INDEX}")[1]:
                yield from dated_runs(entry.path, sweeps=False)


def state_of(path: str) -> tuple[int, int]:
    """A file's size and time of change; zeros if there is none."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - as in `dated_runs`
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def status_in(info: Mapping[str, Any]) -> str:
    return "interrupted" if info["status"] == "running" and is_gone(str(info.get("owner"))) else str(info["status"])


def early_end(info: Mapping[str, Any], *, complete: bool = False) -> str:
    status = status_in(info)
    under_way = status == "running" and bool(info.get("owner")) and not complete
    return status if status in BROKEN or under_way else ""


def find_run(word: str | Path | None = None) -> Path:
    """The folder that a person means: a path, a run or sweep among the runs by its name or id, or, without a word, the newest finished run.

    A run of a sweep is SWEEP/RUN. Its name alone, such as 01, is enough as long as no other run has it.
    """
    root = runs_dir()
    if word is None:
        if not (newest := first_finished(list_runs(root))):
            raise BadInput(f"there is no run in {root}; name a folder")
        return newest
    path = user_path(word)
    if path.exists():
        return path
    among = root / path
    if among.exists() and among.resolve().is_relative_to(root.resolve()):
        return among
    named = [run for run in list_runs(root) if str(word) in (run.name, _entry(run, "run"))]
    if len(named) > 1:
        names = ", ".join(map(run_name, named[:SHOWN_NAMES]))
        raise BadInput(
            f"{len(named)} runs are called {str(word)!r}: {names}{', ...' if named[SHOWN_NAMES:] else ''}; name one of them so"
        )
    return named[0] if named else path


def run_name(folder: Path) -> str:
    """The name by which every command knows a run: that of its folder, SWEEP/RUN for one of a sweep, its path if it lies elsewhere."""
    root = runs_dir()
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder)


def newest_run(folder: str | Path, lab: str) -> Path | None:
    """The newest finished run of a lab, if there is one."""
    return first_finished(runs_of_lab(folder, lab))


def runs_of_lab(folder: str | Path, lab: str) -> Iterator[Path]:
    """The runs of a lab, newest first. A folder with the name of another lab is not opened."""
    for path in list_runs(folder):
        if (named["lab"] if (named := NAMED.fullmatch(path.name)) else _entry(path, "lab")) == lab:
            yield path


def first_finished(folders: Iterable[Path]) -> Path | None:
    """The first run that came to its end; without one, the first: a run that broke early has little to show."""
    first = None
    for folder in folders:
        if _entry(folder, "status") == "finished":
            return folder
        first = first or folder
    return first


def _entry(folder: Path, key: str) -> str:
    with contextlib.suppress(BadInput, AttributeError):
        return str(read_json(folder / "run.json").get(key))
    return ""


def stamp_of(paths: Sequence[Path]) -> Stamp:
    stats = [(path.name, path.stat()) for path in paths]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def checked_info(path: Path, info: object) -> dict[str, Any]:
    if not isinstance(info, dict) or not all(isinstance(info.get(key), str) for key in ("run", "lab", "status")):
        raise BadInput(f"{path} is damaged: it must be a JSON object with run, lab and status")
    if not RUN_ID.fullmatch(info["run"]):
        raise BadInput(f"{path} is damaged: the run's id {info['run']!r} has a slash, or is too long for a name")
    if info["status"] not in STATUSES:
        raise BadInput(f"{path} is damaged: status is {info['status']!r}, allowed are {', '.join(STATUSES)}")
    for key in ("config", "provenance", "started", "finished", "fault", "error"):
        kind, words = (dict, "a JSON object") if key in {"config", "provenance"} else (str, "text or null")
        if not isinstance(info.get(key), kind | None):
            raise BadInput(f"{path} is damaged: {key} must be {words}")
    try:
        records = (info.get(SEALED) or {"records": {}})["records"]
        for name, wrote in records.items():
            (path.parent / name, wrote["rows"] + 0, wrote["sha256"] + "", wrote.get("bytes", 0) + 0)
    except (AttributeError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged: {SEALED} must have the count and digest of each file of records") from None
    return info


# -- the records as a table ------------------------------------------------------------------------------------------------


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    rows = list(rows)
    return frame_of({name: [getattr(row, name) for row in rows] for name in COLUMNS})


def frame_of(columns: Columns) -> pd.DataFrame:
    import pandas as pd

    table: dict[str, Any] = dict(columns)
    index = range(len(columns["run"]))
    for name, empty in (("text", ""), ("ids", ""), ("start", math.nan)):  # in most runs no record has any
        if not any(value or value == 0 for value in columns[name]):
            table[name] = empty
        elif name == "ids":
            table[name] = [_encode(ids) if ids else "" for ids in columns[name]]
    return pd.DataFrame({name: pd.Series(table[name], dtype=TYPES[name], index=index) for name in COLUMNS})


# Sorted keys: the same ids are the same text.
_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


BLOCK = MIB
KNOWN_BY = 256  # bytes before the last position, by which a file is recognised as the one that was read


class File:
    """One file of records, read as it grows: how far, its last bytes, its table, and which lines were dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp = ()
        self._start()

    def _start(self) -> None:
        self.size = self.lines = 0
        self.last = b""
        self._hash = hashlib.sha256()
        self.dropped: list[int] = []
        self.frame = to_frame([])

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def read(self) -> pd.DataFrame:
        import pandas as pd

        if self._stamp == (stamp := stamp_of([self.path])):
            return self.frame
        data = read_bytes(self.path, self.size - len(self.last))
        grown = len(data) > len(self.last) and data.startswith(self.last)
        if self.size and not (self.last.endswith(b"\n") and grown):
            self._start()  # it ended within a line, was edited, or was rewritten
            data = read_bytes(self.path)
        self._stamp = stamp  # only now: a file that could not be read is tried again
        data = data.removeprefix(self.last)
        self.size += len(data)
        self.last = (self.last + data[-KNOWN_BY:])[-KNOWN_BY:]
        # A block at a time: Python's objects for all rows at once take ten times the memory of the table.
        blocks = [block for block in (self._block(part) for part in in_blocks(data)) if len(block)]
        del data
        frames = [self.frame, *blocks] if len(self.frame) else blocks
        if blocks:
            self.frame = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
        return self.frame

    def _block(self, data: bytes) -> pd.DataFrame:
        columns, dropped = parse_lines(data)
        self.dropped += [self.lines + index + 1 for index in dropped]
        self.lines += data.count(b"\n")
        self._hash.update(data)
        return frame_of(columns)


def in_blocks(data: bytes) -> Iterator[bytes]:
    """The data in parts of whole lines."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + BLOCK) + 1 or len(data)
        yield data[start:end]
        start = end


# -- making a run ----------------------------------------------------------------------------------------------------------


class RunWriter:
    """The one process that owns a run's folder. The status stays `running` until `finish` is called."""

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        self.dir = folder
        self.id, self.lab = str(info["run"]), str(info["lab"])
        self._info = info
        (folder / "logs").mkdir(exist_ok=True)
        self._update()
        self._records = RowWriter(folder / "records.jsonl")
        self.append = self._records.append

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Replace the config: which device the ranks have is known once they have started."""
        self._update(config=dict(config))

    def set_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Replace the provenance: the ranks' part of it arrives after the folder was made."""
        self._update(provenance=dict(provenance))

    def write_verdict(self, verdict: Verdict) -> None:
        verdict.write(self.dir / "verdict.json")
        if self._info["status"] != "running":
            self._update(**{SEALED: self._info[SEALED] | self._verdict_seal()})

    def finish(self, error: str | None = None, *, stopped: bool = False) -> None:
        """No record will follow. `error` is what broke the run; `stopped`: a person did."""
        self._records.close()
        status = "stopped" if stopped else "finished" if error is None else "failed"
        sealed: dict[str, Any] = {"records": {}, **digests_of(self._info), **self._verdict_seal()}
        with contextlib.suppress(OSError):  # the records were removed; the run still has its end
            sealed["records"] = {"records.jsonl": seal(self.dir / "records.jsonl")}
        self._update(finished=utc(), status=status, error=error, **{SEALED: sealed})

    def _verdict_seal(self) -> dict[str, str]:
        with contextlib.suppress(BadInput):
            return {"verdict": read_verdict(self.dir / "verdict.json").digest}
        return {}

    def _update(self, **fields: Any) -> None:
        self._info |= fields
        rewrite_json(self.dir / "run.json", self._info)


def create_run(
    runs_dir: str | Path,
    lab: str,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    fault: str | None = None,
) -> RunWriter:
    """Make a run folder, `out` or a new one in `runs_dir`, for its owner only. A folder that cannot be written, or that has a person's
    files, is a `BadInput`."""
    folder = None
    while folder is None:
        identity = f"{lab}-{unique()}"
        wanted = (Path(runs_dir) / identity if out is None else user_path(out)).absolute()
        made = [path for path in (wanted / "logs", wanted) if not path.exists()]
        folder = _make_folder(wanted, exist_ok=out is not None)
    refuse_filled(folder)
    if not _claim(folder, made):
        raise BadInput(HOLDS_RUN.format(folder))
    info = {
        "run": identity,
        "lab": lab,
        "config": dict(config),
        "status": "running",
        "owner": owner(),
        "started": utc(),
        "finished": None,
        "fault": fault,
        "error": None,
        "provenance": dict(provenance),
        "kit": kit_version(),
        "schema": SCHEMA,
    }
    try:
        return RunWriter(folder, info)
    except (OSError, KitError) as error:
        _unclaim(folder, made)
        raise BadInput(f"cannot write a run to {folder}: {error}") from error


HOLDS_RUN = "{} already holds a run; choose another folder"


def refuse_filled(folder: Path) -> None:
    """Refuse a folder that holds a run or other files: a run would be among them, and whoever deletes it would delete them too."""
    try:
        filled = any(folder.iterdir())
    except OSError as error:
        raise BadInput(f"cannot write a run to {folder}: {error.strerror}") from error
    if (folder / "run.json").exists() or any(folder.glob(PATTERN)):
        raise BadInput(HOLDS_RUN.format(folder))
    if filled:
        raise BadInput(f"{folder} is not empty; choose a new folder or an empty one")


def _unclaim(folder: Path, made: Iterable[Path]) -> None:
    """Remove what a run that could not begin has made, such as on a full disk: it would be a folder of records without run.json. `made`:
    folders that were not there before."""
    with contextlib.suppress(OSError):
        for name in ("run.json", "records.jsonl"):
            (folder / name).unlink(missing_ok=True)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


def unique() -> str:
    """The end of a name in the runs folder: the time and four random digits."""
    return f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def runs_dir() -> Path:
    """Where runs go: KIT_RUNS, else `runs` beside the kit's own pyproject.toml, else the user's data folder."""
    if chosen := os.environ.get("KIT_RUNS"):
        return user_path(chosen).absolute()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "runs"
    return Path.home() / ".local" / "share" / "lifecycle-kit" / "runs"


def _claim(folder: Path, made: Iterable[Path]) -> bool:
    """Make the file of records; False if another run made it in the meantime: of several that begin in one folder, one gets it. A folder
    that was there keeps its mode."""
    try:
        (folder / "records.jsonl").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        _unclaim(folder, made)
        raise BadInput(f"cannot write a run to {folder}: {error}") from error
    return True


def _make_folder(folder: Path, *, exist_ok: bool) -> Path | None:
    """The folder, or None where another run took the name first."""
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if exist_ok and folder.is_dir():
            return folder
        folder.mkdir(mode=0o700)  # records name hosts and settings
    except FileExistsError as error:
        if folder.is_dir():
            return None
        raise BadInput(f"cannot make a run folder at {folder}: {error.filename} is a file") from error
    except OSError as error:
        raise BadInput(f"cannot make a run folder at {folder}: {error.strerror}") from error
    return folder


# -- a run for other programs --------------------------------------------------------------------------------------------

# A timeline for Perfetto or chrome://tracing. Each rank is a process of it: its phases, counters for memory, and its spans (records with a
# start) as asynchronous events, which the viewer places below the phases, those of one metric together and apart where they overlap. Spans
# with the id `track`, which do not overlap, are bars on a process of that name instead, named by their text. Events without a duration are
# marks among the phases. Times are microseconds since the earliest start. Ranks on several nodes are placed by their own clocks.

Timed = dict[str, Any]  # an event of the timeline

TRACKS = 1_000_000  # process numbers of tracks begin here, above those of any number of ranks
COUNTERS = ("rss", "driver_used")


def trace(run: Run) -> dict[str, Any]:
    rows = rows_of(run.frame())
    spans = [row for row in rows if row.start is not None]
    phases: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.start is None:
            phases[row.cycle, row.phase, row.rank].append(row)
    begins = [began(row) for row in rows if row.start is not None or row.metric == "seconds"]
    if not begins:
        raise BadInput(
            f"run {run.id!r} has no timed phases (no metric 'seconds') and no spans, so there is no timeline to draw"
        )
    zero = min(begins)
    events = [event for in_phase in phases.values() for event in _of_phase(in_phase, zero)]
    tracks: dict[str, int] = {}  # pids behind those of ranks
    for number, row in enumerate(spans):
        about = _about(row)
        if "track" in about:
            pid = tracks.setdefault(str(about["track"]), TRACKS + len(tracks))
            length, name = round((row.time - began(row)) * 1e6, 3), row.text or row.metric
            events.append(_event(row, "X", began(row), zero, name=name, dur=length, pid=pid, args=about))
        else:
            ends = (("b", began(row)), ("e", row.time))
            events += [_event(row, kind, moment, zero, id=number, args=about) for kind, moment in ends]
    named = {rank + 1: rank_name(rank, run.roles) for rank in sorted({row.rank for row in rows})}
    named |= {pid: name for name, pid in tracks.items()}
    heads = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in named.items()]
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    return {"displayTimeUnit": "ms", "otherData": {"run": run.id}, "traceEvents": heads + ordered}


def save_settings(settings: Mapping[str, Any], path: str | Path, about: str) -> Path:
    """Write settings for `kit run LAB --config`, with a comment that says what they are."""
    import yaml

    target = output_file(path)
    if target.suffix.lower() not in {".yaml", ".yml"}:
        raise BadInput(f"settings are written as .yaml or .yml, not {target.name!r}")
    write_text(target, f"# {about}\n{yaml.safe_dump(dict(settings), sort_keys=False)}")
    return target


def write_trace(run: Run, path: str | Path) -> Path:
    if Path(path).suffix.lower() != ".json":
        raise BadInput(f"{Path(path).name!r} has no known ending; a trace is written as .json")
    target = output_file(path)
    write_text(target, to_json(trace(run)) + "\n")
    return target


def began(row: Row) -> float:
    """When a span, or the phase that a row `seconds` measures, began."""
    return row.time - (row.value or 0.0) if row.start is None else row.start


def _of_phase(rows: Sequence[Row], zero: float) -> Iterator[Timed]:
    timed = [row for row in rows if row.metric == "seconds"]
    for phase in timed:
        metrics = [row for row in rows if row.metric != "seconds" and (len(timed) == 1 or row.time == phase.time)]
        args = {"cycle": phase.cycle, **{_label(row): row.value for row in metrics if not row.ids}}
        length = round((phase.value or 0.0) * 1e6, 3)
        yield _event(phase, "X", began(phase), zero, name=phase.phase, dur=length, args=args)
        values = {row.metric: row.value for row in metrics}
        for metric in COUNTERS:
            for name, moment in ((f"{metric}_before", began(phase)), (metric, phase.time)):
                if name in values:
                    yield _event(phase, "C", moment, zero, name=metric, args={"bytes": values[name]})
    for row in rows:
        if row.ids and row.value is None:
            yield _event(row, "i", row.time, zero, s="t", args=_about(row))


def _about(row: Row) -> dict[str, Any]:
    text = {"text": row.text} if row.text else {}
    value = {} if row.value is None else {_label(row): row.value}
    return {"cycle": row.cycle, "phase": row.phase, **row.ids, **text, **value}


def _label(row: Row) -> str:
    return f"{row.metric} [{row.unit}]".removesuffix(" []")


def _event(row: Row, kind: str, moment: float, zero: float, **more: object) -> Timed:
    begin = round((moment - zero) * 1e6, 3)
    return {"name": row.metric, "cat": row.lab, "ph": kind, "ts": begin, "pid": row.rank + 1, "tid": 0, **more}


# -- JUnit XML: a suite for each run, a case for each check ----------------------------------------------------------------

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(runs: Sequence[tuple[Run, Verdict]], path: Path) -> Path:
    """A check that failed is a failure, one that was not measured is skipped, and a run that broke has an error."""
    top = ET.Element("testsuites", name="Lifecycle Kit")
    for run, rows in runs:
        suite = ET.SubElement(top, "testsuite", name=f"{run.lab} {run.id}")
        for row in rows:
            case = ET.SubElement(suite, "testcase", classname=run.lab, name=row.check)
            if row.passed is not True:
                kind = "skipped" if row.passed is None else "failure"
                ET.SubElement(case, kind, message=NOT_XML.sub("", row.why))
        if run.status != "finished" or run.alterations or rows.answer is None:
            case = ET.SubElement(suite, "testcase", classname=run.lab, name="run")
            ET.SubElement(case, "error", message=NOT_XML.sub("", "; ".join(run.notes) or "nothing was measured"))
        for count, kind in {
            "tests": "testcase",
            "failures": "failure",
            "errors": "error",
            "skipped": "skipped",
        }.items():
            suite.set(count, str(len(suite.findall(f".//{kind}"))))
        ET.SubElement(suite, "system-out").text = f"{tally(rows)}; {run.dir}"
    ET.indent(top)
    path = output_file(path)
    write_text(path, ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n")
    return path
