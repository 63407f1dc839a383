"""The recorder: three lines in anybody's own training script write a Run that every view and export understands.

Rank and world size are arguments, or come from the environment (RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK or NODE_RANK:
torchrun and Ray Train set them), else this is rank 0 of 1. Ranks of one machine append to one records.jsonl, a single write()
a phase; with several machines each has its own records.node<N>.jsonl. Rank 0 also keeps run.json.

Recording never stops a training: when the disk is full, the recorder warns once, counts the lost records, and reports the
count at close. An uncaught exception marks the run as failed; `sys.exit` with an error does so only inside `with Recorder(...)`.

`provenance` says where a number comes from: one JSON-able dict of versions, machine, limits, GPUs, commit and settings. It does not
initialise CUDA: GPUs are read through `nvidia-smi`, and torch is asked only where the process has loaded it. A value that could not be
read is None, with the reason under `why`. User names, paths and secrets are left out; the host's name is included.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import math
import operator
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

from kit import machine, nccl
from kit.errors import BadInput, KitError
from kit.measure.phase import Metric, PhaseMeter, between_phases, current_device, watch_files
from kit.results.records import (
    OWN_LAB,
    PATTERN,
    SCHEMA,
    SEALED,
    AsId,
    Row,
    RowsLost,
    RowWriter,
    checked_ids,
    digests_of,
    load_json,
    read_json,
    rewrite_json,
    seal,
    user_path,
    utc,
)
from kit.target import kit_version

OUTSIDE = "run"  # the phase of a number recorded outside any
# The same on all ranks of a launch.
LAUNCH = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "RAY_JOB_ID")
CLOCK_S = 2.0  # the error of a process's start time as the kernel reports it


class Recorder:
    """`rec = Recorder("runs/mine")`, then `with rec.phase("offload", cycle=i): ...` and `rec.record("loss", loss)`.

    `rec.event("completed", group=17)` appends an event, `with rec.span("generate", group=17): ...` a span.
    `config` (JSON-able) is stored in run.json; `device` is as for `PhaseMeter`. Pass `rank` and `world_size` if the environment has
    none, as in a Ray actor. `sinks` also receive each number: objects with W&B's `log(dict, step=cycle)` or TensorBoard's
    `add_scalar(name, value, cycle)`. Use it from one thread.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002 - the folder is called dir on a Run too
        *,
        lab: str = OWN_LAB,
        config: Mapping[str, Any] | None = None,
        device: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        sinks: Sequence[Any] = (),
    ) -> None:
        self.dir = user_path(dir).resolve()
        self.rank = _from_environment("RANK", 0) if rank is None else _checked_number("rank", rank)
        self.world_size = (
            _from_environment("WORLD_SIZE", 1) if world_size is None else _checked_number("world_size", world_size)
        )
        if not 0 <= self.rank < self.world_size:
            raise BadInput(f"rank is {self.rank} and world_size {self.world_size}; a rank is from 0 to world_size - 1")
        if wrong := [sink for sink in sinks if not hasattr(sink, "log") and not hasattr(sink, "add_scalar")]:
            raise BadInput(f"the sink {wrong[0]!r} has neither log(dict, step=) nor add_scalar(name, value, step)")
        self._sinks = list(sinks)
        self.lab = lab
        self.lost = 0
        self._device = device
        self._inside: list[tuple[str, int]] = []
        self._closed = False
        self._watching = False
        self._pid = os.getpid()
        self._last_error = getattr(sys, "last_value", None)
        self._head: dict[str, Any] = {"run": re.sub(r"[^\w.-]+", "-", self.dir.name), "lab": lab}
        self._run: dict[str, Any] | None = None
        config = _json_values(config or {})
        try:
            self._writer = self._open()
            if self.rank == 0:
                self._run = {
                    **self._head,
                    "config": {"ranks": self.world_size, **config},
                    "status": "running",
                    "owner": machine.owner(),
                    "started": utc(),
                    "finished": None,
                    "fault": None,
                    "error": None,
                    "provenance": provenance(),
                    "kit": kit_version(),
                    "schema": SCHEMA,
                    "launch": _launch(),
                }
                self._write_run()
        except (OSError, KitError) as error:
            if isinstance(error, BadInput):
                raise
            cause = error if isinstance(error, OSError) else error.__cause__
            why = getattr(cause, "strerror", None) or str(error)
            raise BadInput(f"cannot record into {self.dir}: {why}; give a folder that can be written to") from error
        atexit.register(self._at_exit)

    @contextmanager
    def phase(self, name: str, *, cycle: int = 0, observe: bool = False) -> Iterator[PhaseMeter]:
        """Measure the block and append its rows when it ends. A block that raises is recorded too, with `failed` 1.

        With `observe` the labs' observers also record, before and after: shared memory, memfds, files, child processes, memory by kind.
        `kit check DIR` then judges whether any of these grows from cycle to cycle.
        """
        self._must_be_open()
        key = str(name), _checked_number("cycle", cycle)
        seen: list[Metric] = []
        if observe:
            self._watch()
            seen = [metric._replace(metric=f"{metric.metric}_before") for metric in self._observe()]
        meter = PhaseMeter(self._device)
        failed = [Metric("failed", 1, "1")]
        self._inside.append(key)
        try:
            with meter:
                yield meter
            failed = []
        finally:
            self._inside.pop()
            seen += self._observe() if observe else []
            measured = [Row(**metric._asdict(), time=meter.ended) for metric in (*meter.metrics, *seen, *failed)]
            self._append(measured, *key)

    def record(
        self,
        metric: str,
        value: SupportsFloat | None,
        unit: str = "",
        *,
        phase: str | None = None,
        cycle: int | None = None,
        text: str = "",
        start: float | None = None,
        **ids: AsId,
    ) -> None:
        """Append a number. Its phase and cycle are those of the enclosing block, unless you pass them.

        `ids` say what it is about (`tensor="embedding"`, `group=17`), `text` is a short text beside the value. With
        `start`, in Unix seconds, the row is a span that ends now.
        """
        self._one(metric, value, unit, ids, phase=phase, cycle=cycle, text=text, start=start)

    def event(
        self,
        name: str,
        /,
        *,
        phase: str | None = None,
        cycle: int | None = None,
        text: str = "",
        start: float | None = None,
        **ids: AsId,
    ) -> None:
        """Append an event: a row with a time and ids, without a value. With `start` it is a span until now."""
        self._one(name, None, "", ids, phase=phase, cycle=cycle, text=text, start=start)

    @contextmanager
    def span(self, name: str, /, *, text: str = "", **ids: AsId) -> Iterator[None]:
        """Append the block as a span when it ends: start, end, and seconds as the value.

        Unlike a phase it measures nothing else, and costs two clock readings and an append. If the block raises and no text is
        given, the text is the name of the error.
        """
        self._must_be_open()
        checked_ids(ids)  # before the block rather than after it
        began, start = time.perf_counter(), time.time()
        raised = ""
        try:
            yield
        except BaseException as error:
            raised = type(error).__name__
            raise
        finally:
            self._one(name, time.perf_counter() - began, "s", ids, text=text or raised, start=start)

    def close(self, error: BaseException | None = None) -> None:
        """End the run as "finished", with `error` as "failed", or "stopped" for Ctrl-C. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        lost = self.lost
        if lost:
            self._append([Row(metric="lost_records", value=lost, unit="1", time=time.time())], OUTSIDE, 0)
            self._warn(f"{lost} records of rank {self.rank} were lost; those before and after are in {self.dir}")
        self._writer.close()
        if self._run is not None:
            self._end_run(self._run, error, lost)
        with suppress(OSError, KitError):  # the run then has no seal, as if a rank had not closed
            self._seal()

    def _end_run(self, run: dict[str, Any], error: BaseException | None, lost: int) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        run["status"] = "stopped" if stopped else "finished" if error is None else "failed"
        run["finished"] = utc()
        if error is not None:
            run["error"] = f"{type(error).__name__}: {error}"
        elif lost:
            run["error"] = f"{lost} records of rank 0 were lost"
        try:
            self._write_run()
        except KitError as failure:
            self._warn(f"the run still reads as running: {failure}")

    def _seal(self) -> None:
        """The rank that closes last writes the count and digest of all ranks' rows; if one never closes, the run has none."""
        mark = f".closed-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-"
        (self.dir / f"{mark}{self.rank}").touch()
        closed = list(self.dir.glob(f"{mark}*"))
        if len(closed) < self.world_size:
            return
        files = {path.name: seal(path) for path in self.dir.glob(PATTERN)}
        run = read_json(self.dir / "run.json")
        rewrite_json(self.dir / "run.json", {**run, SEALED: {"records": files, **digests_of(run)}})
        for path in closed:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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

    def _watch(self) -> None:
        """From the first observed phase on: what came before it is not this job's."""
        if self._watching:
            return
        self._watching = True
        watch_files()
        if self._run is not None:
            self._run["config"]["observed"] = True  # so that `kit check` asks the observers' checks
            with suppress(KitError):
                self._write_run()

    def _observe(self) -> list[Metric]:
        return between_phases(self._device or current_device())

    def _open(self) -> RowWriter:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if (self.dir / "run.json").exists() and not restarted and (self.rank == 0 or self._of_another_launch()):
            raise BadInput(f"{self.dir} already holds a run; give a new folder, or delete that one first")
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return RowWriter(self.dir / _records_name(self.rank, self.world_size))

    def _of_another_launch(self) -> bool:
        """Whether run.json is of a launch before this one. Under torchrun each has a parent that starts before all of its ranks;
        elsewhere a run that was over before this process began is another's."""
        info = read_json(self.dir / "run.json")
        if info.get("launch") != _launch():
            return True
        pid, when = (os.getppid(), "started") if "TORCHELASTIC_RUN_ID" in os.environ else (os.getpid(), "finished")
        began = machine.start_time(pid)
        return began is not None and _unix_seconds(info.get(when)) < machine.started_at(began) - CLOCK_S

    def _write_run(self) -> None:
        rewrite_json(self.dir / "run.json", self._run)

    def _one(
        self,
        metric: str,
        value: SupportsFloat | None,
        unit: str,
        ids: Mapping[str, AsId],
        *,
        phase: str | None = None,
        cycle: int | None = None,
        text: str = "",
        start: float | None = None,
    ) -> None:
        self._must_be_open()
        try:
            # item() takes a loss with its graph
            number = None if value is None else float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"{metric} cannot be recorded: {value!r} is not a number") from error
        if start is not None and not (isinstance(start, float | int) and math.isfinite(start)):
            raise BadInput(f"{metric} cannot start at {start!r}; give Unix seconds, as time.time() does")
        row = Row(
            metric=str(metric),
            value=number,
            unit=str(unit),
            time=time.time(),
            text=str(text),
            start=start,
            ids=checked_ids(ids),
        )
        inner = self._inside[-1] if self._inside else (OUTSIDE, 0)
        phase_name = inner[0] if phase is None else str(phase)
        self._append([row], phase_name, inner[1] if cycle is None else _checked_number("cycle", cycle))

    def _append(self, rows: Sequence[Row], phase: str, cycle: int) -> None:
        place = {**self._head, "cycle": cycle, "phase": phase, "rank": self.rank}
        try:
            self._writer.append([dataclasses.replace(row, **place) for row in rows])
        except RowsLost as error:
            if not self.lost:
                self._warn(f"{error}; training goes on, lost records are counted")
            self.lost += error.lost
        if self._sinks:
            self._pass_on({f"{phase}/{row.metric}": row.value for row in rows if row.value is not None}, cycle)

    def _pass_on(self, values: Mapping[str, float], cycle: int) -> None:
        """To the sinks; one that raises is not asked again, and training goes on."""
        for sink in [*self._sinks] if values else ():
            try:
                if hasattr(sink, "log"):
                    sink.log(dict(values), step=cycle)
                else:
                    for name, value in values.items():
                        sink.add_scalar(name, value, cycle)
            except Exception as error:  # noqa: BLE001 - a stranger's logger may raise anything
                self._sinks.remove(sink)
                self._warn(
                    f"the sink {type(sink).__name__} raised {error!r} and gets no more numbers; training goes on"
                )

    def _warn(self, sentence: str) -> None:
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def _json_values(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        load_json(json.dumps(dict(config)))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"config must be JSON values only: {error}") from error
    return dict(config)


def _launch() -> str:
    """An identifier of this launch, the same on all of its ranks; empty where the environment has none."""
    return " ".join(os.environ[name] for name in LAUNCH if name in os.environ)


def _unix_seconds(moment: Any) -> float:
    """A time of run.json in Unix seconds; infinite where there is none."""
    with suppress(ValueError, TypeError):
        return datetime.fromisoformat(moment).timestamp()
    return math.inf


def _checked_number(what: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise BadInput(f"{what} is {value!r}; it must be a whole number") from None


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


# -- provenance --------------------------------------------------------------------------------------------------------

_ROOT = Path(__file__).resolve().parents[2]
_PREFIXES = ("NCCL_", "TORCH_", "MASTER_", "KIT_")
_NAMES = (
    "OMP_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
# A GPU's UUID is no secret: its pieces are shorter than any key.
_SECRET_VALUE = re.compile(r"[A-Za-z0-9+=]{32,}|\b(?:hf_|ghp_|sk-|nvapi-|AKIA)[\w-]{8,}|(?<=//)[^/@\s]+(?=@)")
_PATH = re.compile(r"file://\S*|~[\w.-]*(?:/[^\s,;:]*)?|(?<![\w./])/(?!/)[^\s,;:]*")
_GPU_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "memory_mib": "memory.total",
    "memory_free_mib": "memory.free",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
    "pcie_width_max": "pcie.link.width.max",
    "driver": "driver_version",
}


def provenance() -> dict[str, Any]:
    """Read everything again. Takes up to a second where there is a GPU driver, so call it once per run, on one rank."""
    import platform

    return {
        "time": utc(),
        "kit": kit_version(),
        "git": git_state(_ROOT),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kernel": platform.release(),
        "host": platform.node(),
        "versions": {name: version_of(name) for name in ("torch", "megatron-core", "numpy")},
        "cuda": cuda_state(),
        "gpu": gpu_state(),
        "cpu": {
            "model": machine.cpu_model(),
            "cores": os.cpu_count(),
            "affinity": len(os.sched_getaffinity(0)),  # of this process
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "cgroup": machine.cgroup_limits(),
        "settings": recorder_settings(os.environ),
    }


def version_of(name: str) -> str | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        return str(loaded.__version__)  # includes the build ("+cu130"), which metadata may lack
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cuda_state() -> dict[str, Any]:
    """CUDA and NCCL of this process: the library that was loaded, not the one torch was built with."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {"cuda": None, "nccl": None, "why": "torch is not loaded in this process"}
    if torch.version.cuda is None:
        return {"cuda": None, "nccl": None, "why": "this torch is built without CUDA"}
    if not torch.distributed.is_nccl_available():
        return {"cuda": torch.version.cuda, "nccl": None, "why": "this torch is built without NCCL"}
    return {"cuda": torch.version.cuda, "nccl": nccl.version_text(nccl.running()), "why": None}


def gpu_state() -> dict[str, Any]:
    """Driver and all GPUs of the box. An idle link drops to a lower PCIe generation; `pcie_gen_max` is the highest it can reach."""
    rows, why = machine.query_gpus(*_GPU_FIELDS.values())
    if why is not None:
        return {"driver": machine.gpu_driver(), "gpus": [], "why": _public(why)}
    gpus = [dict(zip(_GPU_FIELDS, map(_plain_cell, row), strict=True)) for row in rows]
    drivers = {gpu.pop("driver") for gpu in gpus}
    return {"driver": drivers.pop() if drivers else None, "gpus": gpus, "why": None}


def _plain_cell(text: str) -> int | str | None:
    if text.startswith("["):  # "[N/A]", "[Not Supported]"
        return None
    return int(text) if text.isdigit() else text


def git_state(root: Path) -> dict[str, Any]:
    """Commit of the kit's own checkout, and whether any file differs from it (ignored files aside)."""
    nothing = {"commit": None, "dirty": None}
    top, why = machine.output("git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD")
    if top is None:
        return {**nothing, "why": why and _public(why)}
    folder, commit = top.splitlines()
    if Path(folder).resolve() != root:  # installed inside somebody else's repository
        return {**nothing, "why": "the kit is not in a git checkout"}
    changed, why = machine.output("git", "--no-optional-locks", "-C", str(root), "status", "--porcelain")
    return {"commit": commit, "dirty": None if changed is None else bool(changed), "why": why and _public(why)}


def recorder_settings(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Pick the variables that change how a run behaves; secret names are dropped, secret values and paths hidden."""
    chosen = (name for name in sorted(environ) if name.startswith(_PREFIXES) or name in _NAMES)
    return {name: _public(environ[name]) for name in chosen if not _SECRET_NAME.search(name)}


def _public(value: str) -> str:
    return _SECRET_VALUE.sub("<hidden>", _PATH.sub("<path>", value))
