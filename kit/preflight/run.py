"""Runs the probes in turn, each in a fresh process with a time limit; prints a line for each and cleans up after it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kit import machine
from kit.errors import signal_name
from kit.results import runs_dir
from kit.results.records import make_folder, utc, write_json
from kit.world import leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import IO, TextIO

Ended = Literal["finished", "cut", "crashed", "interrupted", "not run"]
TOTAL_S = 130.0
TIMES = "preflight.json"  # in the runs folder: what the last `kit doctor --deep` measured, for `kit reference`
SLOWER_ON_CPU = 5.0  # limits are for a box with a GPU; without one they are this many times longer
BUSIEST = 4.0  # largest further factor if other processes use the cores
NAMED = ("cut", "crashed", "interrupted", "not run")
LEAST_S = 2.0  # no probe starts with less of the total time left
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, slots=True)
class Probe:
    """What to run: `target` is module:function; `env` goes to its ranks."""

    number: str
    title: str
    target: str
    limit_s: float = 6.0
    env: Mapping[str, str] = field(default_factory=dict)


PROBES = (
    Probe("1", "seats", "kit.preflight.probes:seats"),
    Probe("2", "all-reduces", "kit.preflight.probes:all_reduces"),
    Probe("3", "groups", "kit.preflight.probes:groups", 12),
    Probe("4", "rebuild", "kit.preflight.probes:rebuild", 12),
    Probe("5", "absent peer", "kit.preflight.probes:absent_peer", 12),
    Probe("6", "host memory", "kit.preflight.probes:host_memory"),
    Probe("7a", "resize", "kit.preflight.probes:resize"),
    Probe("7b", "resize, expandable segments", "kit.preflight.probes:resize", env=EXPANDABLE),
    Probe("8", "driver memory", "kit.preflight.probes:driver_memory"),
    Probe("9a", "ipc", "kit.preflight.probes:ipc"),
    Probe("9b", "ipc, expandable segments", "kit.preflight.probes:ipc", env=EXPANDABLE),
    Probe("10", "jobs", "kit.preflight.probes:jobs", 40),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a probe ended. `at`: its activity when it was cut or crashed."""

    number: str
    title: str
    result: Result
    ended: Ended
    seconds: float = 0.0
    limit_s: float = 0.0
    rows: tuple[Row, ...] = ()
    at: str = ""
    why: str = ""

    def line(self) -> str:
        return f"{self.number:<4}{self.title:<29}{self.result:<16}{self.seconds:5.1f} s  {self.summary()}"

    def summary(self) -> str:
        """The reasons if it did not pass, else its numbers."""
        if self.ended != "finished":
            return self.why
        if failed := [row for row in self.rows if row.result == "fail"]:
            return "; ".join(f"{row.text()}: {row.why}" if row.why else row.text() for row in failed)
        if numbers := [row.text() for row in self.rows if row.value and row.unit]:
            return "; ".join(numbers)
        return self.rows[0].why if self.rows else ""


def deep(
    found: Mapping[str, Any], tell: Callable[[str], None], began: float, probes: Sequence[Probe] | None = None
) -> tuple[dict[str, Any], int]:
    """Run all probes on doctor's findings; returns JSON values and the exit status. The time limit counts from `began`."""
    device = "cuda" if found["ranks"].get("device") == "cuda" else "cpu"
    factor = pace(device)
    total = TOTAL_S * factor
    megatron = bool(found["ranks"].get("megatron.core"))
    outcomes: list[Outcome] = []
    times: dict[str, float] = {}
    stopped = False
    chosen = PROBES if probes is None else probes
    for place, one in enumerate(chosen):
        left = total - AGENT_S - (time.monotonic() - began)
        if stopped or left < LEAST_S:
            why = "not run: " + ("interrupted" if stopped else f"the total limit of {total:.0f} s is used up")
            outcome = Outcome(number=one.number, title=one.title, result="not measurable", ended="not run", why=why)
        else:
            later = sum(other.limit_s for other in chosen[place + 1 :])
            outcome, seconds = run(one, device, allowed(one.limit_s * factor, later * factor, left), megatron=megatron)
            times |= {
                name: min(value, times.get(name, value)) for name, value in seconds.items()
            }  # the fastest of several
        outcomes.append(outcome)
        stopped = stopped or outcome.ended == "interrupted"
        tell(outcome.line())
    tell(summary(outcomes, time.monotonic() - began, total))
    result = {
        "device": device,
        "seconds": round(time.monotonic() - began, 1),
        "limit_s": round(total, 1),
        "probes": [asdict(one) for one in outcomes],
        "times": {**box(found, device), **times},
    }
    make_folder(runs_dir())
    write_json(runs_dir() / TIMES, result["times"])
    return result, 130 if stopped else exit_status(outcomes)


def measure(found: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The times of the last probe, which resembles the labs most, and the box that they come from."""
    limit = 2 * PROBES[-1].limit_s * pace(device)
    return {**box(found, device), **run(PROBES[-1], device, limit, megatron=True)[1]}


def allowed(own_s: float, later_s: float, left_s: float) -> float:
    """A probe's limit, up to doubled with spare time, so a slow start is not cut and later probes lose nothing."""
    return min(left_s, max(own_s, min(2 * own_s, left_s - later_s)))


def pace(device: str) -> float:
    """The factor of all limits: 1 with a GPU; without one larger, for a slow machine and its other load."""
    if device == "cuda":
        return 1.0
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return SLOWER_ON_CPU * min(BUSIEST, max(1.0, busy))


def run(probe: Probe, device: str, limit_s: float, *, megatron: bool) -> tuple[Outcome, dict[str, float]]:
    """Run one probe in a fresh process and clean up after it; returns the outcome and the measured times."""
    before, began = shm_names(), time.monotonic()
    settings = json.dumps({"env": dict(probe.env), "megatron": megatron})
    command = [sys.executable, "-m", "kit.preflight.run", probe.target, device, settings]
    findings = Findings()
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        )
        started = machine.start_time(process.pid) or 0
        assert process.stdout is not None
        reader = threading.Thread(target=findings.listen, args=(process.stdout,), daemon=True)
        reader.start()
        ended: Ended = "finished"
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = "cut"
        except KeyboardInterrupt:  # measurements so far are still reported
            ended = "interrupted"
        if process.poll() is None:
            leftovers.end_group(process.pid)
            process.wait()
        left = clean(process.pid, started, findings.pids, before)
        seconds = time.monotonic() - began
        reader.join(5.0)
        complaints.seek(0)
        last = (complaints.read().strip().splitlines() or [""])[-1]
    if left:
        findings.rows.append(Row(what="left behind, now removed", result="fail", value=len(left), why=", ".join(left)))
    if ended == "finished" and (process.returncode or not findings.done):
        ended = "crashed"
    code = process.returncode
    status = f"killed by {signal_name(-code)}" if code < 0 else f"exit status {code} without a result"
    why = {
        "finished": "",
        "cut": f"cut after {limit_s:.3g} s, during: {findings.at}",
        "crashed": f"crashed during {findings.at}: {findings.failed or last or status}",
        "interrupted": f"interrupted during {findings.at}",
    }[ended]
    outcome = Outcome(
        number=probe.number,
        title=probe.title,
        result=judged(findings.rows) if ended == "finished" else "fail",
        ended=ended,
        seconds=round(seconds, 2),
        limit_s=limit_s,
        rows=tuple(findings.rows),
        at="" if ended == "finished" else findings.at,
        why=why,
    )
    return outcome, findings.times


def judged(rows: Sequence[Row]) -> Result:
    """Fail if any row failed, else pass if any passed, else not measurable."""
    results = {row.result for row in rows}
    return "fail" if "fail" in results else "pass" if "pass" in results else "not measurable"


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """3 if a probe was cut or crashed, 1 if one failed. Rows that are not measurable do not fail."""
    if any(one.ended in {"cut", "crashed"} for one in outcomes):
        return 3
    return int(any(one.result == "fail" for one in outcomes))


def summary(outcomes: Sequence[Outcome], seconds: float, total_s: float) -> str:
    results = [one.result for one in outcomes]
    counts = ", ".join(f"{results.count(name)} {name}" for name in get_args(Result))
    named = {end: [f"{one.number} {one.title}" for one in outcomes if one.ended == end] for end in NAMED}
    parts = [f"{len(outcomes)} probes in {seconds:.0f} s (limit {total_s:.0f} s): {counts}"]
    parts += [f"{ended}: {', '.join(names)}" for ended, names in named.items() if names]
    return "; ".join(parts)


def box(found: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Identifies the box of the times, which do not apply to another box."""
    ranks, gpus = found["ranks"], found["gpu"]["gpus"]
    gpu = str(gpus[0]["name"]) if gpus and device == "cuda" else ""
    versions = {name: ranks.get(name) for name in ("torch", "nccl")}
    return {"device": device, "host": platform.node(), "gpu": gpu, **versions, "measured": utc()}


# -- what a probe may leave behind when it is cut -----------------------------------------------------------------------


# Names that torch, NCCL, CUDA, Python's multiprocessing and the kit use there.
PREFIXES = ("torch_", "nccl-", "cuda.shm.", "psm_", "sem.mp", "kit")
AGENT_S = 3.0  # time for a World's agent that lost its notebook to end its ranks and clean up
shm_names = functools.partial(machine.shm_names, PREFIXES)


def clean(pid: int, started: int, ranks: Iterable[int], before: set[str]) -> list[str]:
    """Clean up after a finished probe's process and name everything it left behind. A World's agent first gets a moment to end its ranks
    itself."""
    owner = f":{pid}:{started}"

    def ours(mark: str) -> bool:
        return mark.endswith(owner)

    deadline = time.monotonic() + AGENT_S
    while (alive := leftovers.carriers(ours)) and time.monotonic() < deadline:
        time.sleep(0.03)
    left = [f"process {number} ({machine.command(number)})" for number in alive]
    leftovers.end_carriers(ours)
    for folder in [path for path in leftovers.base().iterdir() if path.name.endswith(owner)]:
        shutil.rmtree(folder, ignore_errors=True)
    leftovers.forget_shared(ranks)
    new = shm_names() - before
    new -= machine.shm_in_use(new, machine.pids())  # another process uses these
    for name in new:
        with contextlib.suppress(OSError):
            Path(machine.SHM, name).unlink()
    return [*left, *(f"{machine.SHM}/{name}" for name in sorted(new))]


Result = Literal["pass", "fail", "not measurable"]


# -- what a probe reports: a line of JSON for each finding, at once, so that a probe that is cut keeps what it measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One finding. `value` is a number with its unit, if any; `why` states what was compared or what is missing."""

    what: str
    result: Result
    value: float | None = None
    unit: str = ""
    why: str = ""

    def text(self) -> str:
        return self.what if self.value is None else f"{self.what} {shown(self.value)} {self.unit}".rstrip()


@dataclass(kw_only=True, slots=True)
class Findings:
    """Everything that a probe reported before it ended."""

    rows: list[Row] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)  # of ranks, for the clean-up
    at: str = "start"
    failed: str = ""
    done: bool = False

    def listen(self, out: IO[str]) -> None:
        for line in out:
            self.hear(line)
        out.close()

    def hear(self, line: str) -> None:
        """Parse a line; other output is skipped."""
        try:
            message: dict[str, Any] = json.loads(line)
            kind, value = message["kind"], message["value"]
        except (ValueError, KeyError, TypeError):
            return
        if kind == "row":
            self.rows.append(Row(**value))
        elif kind == "time":
            self.times |= value
        elif kind == "pids":
            self.pids += value
        elif kind in {"at", "failed", "done"}:
            setattr(self, kind, value)


class Report:
    """The probe's side of the report."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def say(self, kind: str, value: Any) -> None:
        print(json.dumps({"kind": kind, "value": value}), file=self.out, flush=True)

    def at(self, what: str) -> None:
        """Announce the next activity, which is named if it does not end."""
        self.say("at", what)

    def row(self, what: str, passed: bool | None, why: str = "", value: float | None = None, unit: str = "") -> None:
        if value is not None and not math.isfinite(value):
            value, why = None, f"measured {value}; {why}".removesuffix("; ")
        result: Result = "not measurable" if passed is None else "pass" if passed else "fail"
        self.say("row", asdict(Row(what=what, result=result, value=value, unit=unit, why=why)))

    def needs_gpu(self, *what: str) -> None:
        for one in what:
            self.row(one, None, why="needs a GPU, but these ranks run on the CPU")

    def time(self, **seconds: float) -> None:
        """Seconds of one of each: a World, a group, a step."""
        self.say("time", seconds)

    def pids(self, pids: Sequence[int]) -> None:
        self.say("pids", list(pids))


def shown(value: float) -> str:
    """Three significant digits; integers unchanged."""
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def main(target: str, device: str, settings: str) -> int:
    leftovers.die_with_parent()
    report = Report(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(report, device, json.loads(settings))
    except Exception as error:  # noqa: BLE001 - the probe reports any exception
        lines = str(error).strip().splitlines() or [""]
        first, last = lines[0].strip(), lines[-1].strip()
        words = first if first == last else f"{first} {last}"
        report.say("failed", f"{type(error).__name__}: {words}"[:600])
        traceback.print_exc()
        return 1
    report.say("done", value=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
