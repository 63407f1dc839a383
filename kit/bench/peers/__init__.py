"""Other tools that keep ranks alive between steps, asked the same questions in the same run, where they are installed.

Each peer is a module here that runs in processes of its own (`trial.py` is their common part), a fresh one for every trial: it can
neither crash the bench nor be slowed by what another left. All that a trial starts inherits a mark and is ended after it. Which
library is used how is in its module; imports in the notebook's process are not timed, neither the kit's nor a peer's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kit import machine
from kit.bench import remains
from kit.bench.report import progress
from kit.bench.rows import Row, row
from kit.errors import KitError
from kit.world import leftovers

STARTED = "two ranks to the first all-reduce done, cold"
STEPPED = "one empty step on both ranks"
TOLD = "SIGKILL of a rank to the exception"
VANISHED = "SIGKILL of the notebook's process to nothing left"

ROOT = Path(__file__).resolve().parents[3]
PREFIX = "kit-bench-peer "
TRIAL_S = 120.0
GONE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The distribution a peer needs, and what stands for a step there."""

    needs: str
    step: str = ""


# by the name of the module here
PEERS = {
    "ipyparallel": Library(needs="ipyparallel", step="DirectView.execute('pass')"),
    "monarch": Library(needs="torchmonarch", step="an empty endpoint called on both actors"),
    "nbdistributed": Library(
        needs="nbdistributed",
        step="'pass' sent to all by its manager; its cells, which poll for the answer, take longer",
    ),
    "torchrun": Library(needs="torch"),
}


@dataclass(slots=True)
class Answers:
    """What one peer's trials came to, in seconds."""

    who: str
    step: str
    start: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    vanished: list[float] = field(default_factory=list)
    words: str = ""
    stayed: str = ""
    failure: str = ""


def installed(library: Library) -> str | None:
    """Its version; None where it is not there."""
    try:
        return importlib.metadata.version(library.needs)
    except importlib.metadata.PackageNotFoundError:
        return None


def peers(*, trials: int, steps: int, wanted: dict[str, Library] = PEERS) -> Iterator[Row]:
    """Rows of every peer; of one that is not installed, a row that says so."""
    for name, library in wanted.items():
        version = installed(library)
        if version is None:
            yield Row(what=STARTED, who=name, note=f"not measured: {library.needs} is not installed")
            continue
        answers = Answers(who=f"{name} {version}", step=library.step)
        progress(f"{answers.who}, {trials} times each")
        try:
            for number in range(trials):
                ask(name, answers, steps=0 if number else steps)
                outlive(name, answers)
        except KitError as error:
            answers.failure = str(error)
        yield from told(answers)


def told(answers: Answers) -> list[Row]:
    """What was measured, and why the rest was not."""
    who = answers.who
    steps = [1e3 * one for one in answers.steps]
    rows = [
        row(STARTED, answers.start, who=who, note=answers.failure),
        row(STEPPED, steps, who=who, unit="ms", note=answers.step if steps else ""),
        row(TOLD, answers.told, who=who, note=answers.words),
        row(VANISHED, answers.vanished, who=who, note=answers.stayed),
    ]
    return [one for one in rows if one.n or one.note]


def ask(name: str, answers: Answers, *, steps: int) -> None:
    """One trial to its end: start, steps, SIGKILL of rank 1 while rank 0 waits for it."""
    with trial(name, steps=steps, hold=False) as (process, _):
        take(process, answers)
        said = hear(process)
        answers.told.append(said["told"])
        answers.words = said["words"]


def outlive(name: str, answers: Answers) -> None:
    """One trial whose own process is killed: when is everything that it started gone?"""
    with trial(name, steps=0, hold=True) as (process, mark):
        take(process, answers)
        known = remains.marked(mark.__eq__)
        began = time.perf_counter()
        process.kill()
        took = remains.seconds_until_gone(mark.__eq__, known, began, GONE_S)
        if took is None:
            left = len(remains.marked(mark.__eq__))
            answers.stayed = f"{left} of {len(known) - 1} processes are still there after {GONE_S:.0f} s"
        else:
            answers.vanished.append(took)


def take(process: subprocess.Popen[str], answers: Answers) -> None:
    said = hear(process)
    answers.start.append(said["start"])
    answers.steps += said["steps"]


@contextlib.contextmanager
def trial(name: str, *, steps: int, hold: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs one trial, and the mark by which all that it starts is found and ended."""
    mark = leftovers.mark(f"peer-{name}")
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch, (Path(scratch) / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", f"kit.bench.peers.{name}", json.dumps({"steps": steps, "hold": hold})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=scratch,
            env=environment(mark, scratch),
        )
        limit = threading.Timer(TRIAL_S, remains.end, [mark.__eq__])  # ends what is waited for: the reader sees its end
        limit.start()
        try:
            yield process, mark
        except EOFError:
            raise KitError(f"a trial broke: {last_line(errors)}") from None
        finally:
            limit.cancel()
            remains.end(mark.__eq__)
            process.communicate()


def hear(process: subprocess.Popen[str]) -> Any:
    """The next thing that the trial tells; what its library prints is passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    raise EOFError


def last_line(errors: IO[str]) -> str:
    errors.seek(0)
    said = [line.strip() for line in errors if line.strip()]
    return said[-1][:200] if said else f"it said nothing within {TRIAL_S:.0f} s"


def environment(mark: str, scratch: str) -> dict[str, str]:
    """The CPU only, as for the kit; the kit and this very Python found by whatever looks for them; files go with the trial."""
    bin_ = str(Path(sys.executable).parent)
    return {
        **os.environ,
        machine.MARK: mark,
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(Path(scratch) / "ipython"),
        "TMPDIR": scratch,
        "PATH": os.pathsep.join([bin_, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
    }
