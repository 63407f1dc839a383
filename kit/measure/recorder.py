"""The recorder: three lines in anybody's own training script write a Run that every view, check and export understands.

Rank and world size come from the environment (RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK or NODE_RANK: torchrun
and Ray Train set them), else this is rank 0 of 1. Ranks of one machine append to one records.jsonl, a single write()
a phase; with several machines each has its own records.node<N>.jsonl. Rank 0 also keeps run.json.

Recording never ends a training: when the disk fills, one warning tells so, lost records are counted, and the count is
told at close. An exception that nobody catches marks the run failed; `sys.exit` with an error does so only inside
`with Recorder(...)`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from kit.errors import BadInput
from kit.measure.clock import utc
from kit.measure.phase import Metric, PhaseMeter
from kit.measure.provenance import kit_version, provenance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

OUTSIDE = "run"  # the phase of a number recorded outside any


class Recorder:
    """`rec = Recorder("runs/mine")`, then `with rec.phase("offload", cycle=i): ...` and `rec.record("loss", loss)`.

    `config` (JSON-able) is stored in run.json; `device` is as for `PhaseMeter`. Use it from one thread.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002 - the folder is called dir on a Run too
        *,
        lab: str = "own",
        config: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        self.dir = Path(dir).resolve()
        self.rank = _from_environment("RANK", 0)
        self.world_size = _from_environment("WORLD_SIZE", 1)
        self.lab = lab
        self.lost = 0
        self._device = device
        self._inside: list[tuple[str, int]] = []
        self._torn = False
        self._closed = False
        self._pid = os.getpid()
        self._last_error = getattr(sys, "last_value", None)
        self._head = {"run": self.dir.name, "lab": lab}
        self._run: dict[str, Any] | None = None
        config = _json_values(config or {})
        try:
            self._file = self._open()
            if self.rank == 0:
                self._run = self._describe(config)
                self._write_run()
        except OSError as error:
            why = error.strerror or str(error)
            raise BadInput(f"cannot record into {self.dir}: {why}; give a folder that can be written to") from error
        atexit.register(self._at_exit)

    @contextmanager
    def phase(self, name: str, *, cycle: int = 0) -> Iterator[PhaseMeter]:
        """Measure the block and append its records at once. A block that raises is recorded too, with `failed` 1."""
        self._must_be_open()
        meter = PhaseMeter(self._device)
        failed = [Metric("failed", 1, "1")]
        self._inside.append((name, cycle))
        try:
            with meter:
                yield meter
            failed = []
        finally:
            self._inside.pop()
            self._append(meter.metrics + failed, name, cycle, meter.ended)

    def record(
        self, metric: str, value: SupportsFloat, unit: str = "", *, phase: str | None = None, cycle: int | None = None
    ) -> None:
        """Append a number of your own. Phase and cycle are those of the block around it, unless given."""
        self._must_be_open()
        try:
            number = float(value.item() if hasattr(value, "item") else value)  # item() takes a loss with its graph
        except (TypeError, ValueError) as error:
            raise BadInput(f"{metric} cannot be recorded: {value!r} is not a number") from error
        inner = self._inside[-1] if self._inside else (OUTSIDE, 0)
        where = inner[0] if phase is None else phase
        when = inner[1] if cycle is None else cycle
        self._append([Metric(metric, number, unit)], where, when, time.time())

    def close(self, error: BaseException | None = None) -> None:
        """End the run: "finished", or "failed" with `error`. Closing twice is closing once."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        lost = self.lost
        if lost:
            self._append([Metric("lost_records", lost, "1")], OUTSIDE, 0, time.time())
            self._warn(f"{lost} records of rank {self.rank} were lost; those before and after are in {self.dir}")
        os.close(self._file)
        if self._run is None:
            return
        self._run["status"] = "finished" if error is None else "failed"
        self._run["finished"] = utc()
        if error is not None:
            self._run["error"] = f"{type(error).__name__}: {error}"
        elif lost:
            self._run["error"] = f"{lost} records of rank 0 were lost"
        try:
            self._write_run()
        except OSError as failure:
            self._warn(f"run.json in {self.dir} still says that the run is running: {failure.strerror}")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        wanted = isinstance(error, SystemExit) and error.code in (None, 0)
        self.close(None if wanted else error)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # a forked child that leaves by sys.exit: the run is its parent's
            return
        last = getattr(sys, "last_value", None)  # set by the interpreter for an exception that nobody caught
        self.close(None if last is self._last_error else last)

    def _must_be_open(self) -> None:
        if self._closed:
            raise BadInput(f"the recorder of {self.dir} is closed; make a new one with a new folder")

    def _open(self) -> int:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if self.rank == 0 and (self.dir / "run.json").exists() and not restarted:
            raise BadInput(f"{self.dir} already holds a run; give a new folder, or delete that one first")
        self.dir.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self.dir / _records_name(self.rank, self.world_size), flags, 0o644)

    def _describe(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "config": {"ranks": self.world_size, **config},
            "status": "running",
            "started": utc(),
            "finished": None,
            "fault": None,
            "error": None,
            "provenance": provenance(),
            "kit": kit_version(),
        }

    def _write_run(self) -> None:
        """Replace run.json as a whole, so that a reader never sees half of it."""
        draft = self.dir / f".run.json.{self._pid}"
        try:
            draft.write_text(json.dumps(self._run, indent=1) + "\n")
            draft.replace(self.dir / "run.json")
        finally:
            draft.unlink(missing_ok=True)

    def _append(self, metrics: Iterable[Metric], phase: str, cycle: int, ended: float) -> None:
        head = {**self._head, "cycle": cycle, "phase": phase, "rank": self.rank}
        rows = [{**head, "metric": m.metric, "value": m.value, "unit": m.unit, "time": ended} for m in metrics]
        # After a torn write a newline of its own keeps the torn piece from swallowing the next record.
        start = b"\n" if self._torn else b""
        batch = start + "".join(json.dumps(row) + "\n" for row in rows).encode()
        try:
            written = os.write(self._file, batch)
            reason = "the disk took only a part"
        except OSError as error:
            written, reason = 0, error.strerror or str(error)
        self._torn = written < len(batch)
        if self._torn:
            if not self.lost:
                self._warn(f"recording into {self.dir} failed ({reason}); training goes on, lost records are counted")
            self.lost += len(rows) - batch[len(start) : written].count(b"\n")

    def _warn(self, sentence: str) -> None:
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def _json_values(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(dict(config))
    except (TypeError, ValueError) as error:
        raise BadInput(f"config must be JSON values only: {error}") from error
    return dict(config)


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise BadInput(f"{name} is {text!r} in the environment; it must be a number, as torchrun sets it")
    return int(text)


def _records_name(rank: int, world_size: int) -> str:
    """Name the file that the ranks of one machine share: only within a machine is an append whole."""
    if _from_environment("LOCAL_WORLD_SIZE", 1) == world_size:
        return "records.jsonl"
    node = os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK")
    return f"records.node{rank if node is None else node}.jsonl"
