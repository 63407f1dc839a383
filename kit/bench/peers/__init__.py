"""Other tools that keep ranks alive between steps, asked the same questions in the same run, where they are installed.

Each peer runs in processes of its own (`trial.py`), a fresh one for every trial: it can neither crash the bench nor be slowed by what
another left. All that a trial starts inherits a mark, is found by it after the death of its head, and is ended. Imports in the notebook's
process are not timed, neither the kit's nor a peer's.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kit import machine
from kit.bench.rows import Row, progress, row, unmeasured
from kit.errors import KitError
from kit.world import leftovers
from kit.world.leftovers import carriers, end_carriers

STARTED = "two ranks to the first all-reduce done, cold"
STEPPED = "one empty step on both ranks"
TOLD = "SIGKILL of a rank to the exception"
VANISHED = "SIGKILL of the notebook's process to nothing left"

ROOT = Path(__file__).resolve().parents[3]
PREFIX = "kit-bench-peer "
TRIAL_S = 120.0
GONE_S = 5.0
Seen = dict[str, list[float]]  # samples by question: seconds, of a step milliseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The distribution a peer needs, and what stands for a step there."""

    needs: str
    step: str = ""


PEERS = {
    "ipyparallel": Library(needs="ipyparallel", step="DirectView.execute('pass')"),
    "monarch": Library(needs="torchmonarch", step="an empty endpoint called on both actors"),
    "nbdistributed": Library(
        needs="nbdistributed",
        step="'pass' sent to all by its manager; its cells, which poll for the answer, take longer",
    ),
    "torchrun": Library(needs="torch"),
}


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
            yield unmeasured(STARTED, f"{library.needs} is not installed", who=name)
            continue
        who = f"{name} {version}"
        progress(f"{who}, {trials} times each")
        seen: dict[str, list[float]] = {what: [] for what in (STARTED, STEPPED, TOLD, VANISHED)}
        notes = {STEPPED: library.step}
        try:
            for number in range(trials):
                ask(name, seen, notes, steps=0 if number else steps)
                outlive(name, seen, notes)
        except KitError as error:
            notes[STARTED] = str(error)
        if not seen[STEPPED]:
            del notes[STEPPED]
        for what, taken in seen.items():
            if taken or notes.get(what):
                yield row(what, taken, who=who, unit="ms" if what == STEPPED else "s", note=notes.get(what, ""))


def ask(name: str, seen: Seen, notes: dict[str, str], *, steps: int) -> None:
    """One trial to its end: start, steps, SIGKILL of rank 1 while rank 0 waits for it."""
    with trial(name, seen, steps=steps, hold=False) as (process, _):
        said = hear(process)
        seen[TOLD].append(said["told"])
        notes[TOLD] = said["words"]


def outlive(name: str, seen: Seen, notes: dict[str, str]) -> None:
    """One trial whose own process is killed: when is everything that it started gone?"""
    with trial(name, seen, steps=0, hold=True) as (process, mark):
        known = carriers(mark.__eq__)
        began = time.perf_counter()
        process.kill()
        took = seconds_until_gone(mark.__eq__, known, began, GONE_S)
        if took is None:
            left = len(carriers(mark.__eq__))
            notes[VANISHED] = f"{left} of {len(known) - 1} processes are still there after {GONE_S:.0f} s"
        else:
            seen[VANISHED].append(took)


@contextlib.contextmanager
def trial(name: str, seen: Seen, *, steps: int, hold: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs one trial, once it has started and stepped, and the mark by which all that it starts is found and ended."""
    mark = leftovers.mark(f"peer-{name}")
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch, (Path(scratch) / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kit.bench.peers.trial", name, json.dumps({"steps": steps, "hold": hold})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=scratch,
            env=of_trial(mark, scratch),
        )
        limit = threading.Timer(
            TRIAL_S, end_carriers, [mark.__eq__]
        )  # ends what is waited for: the reader sees its end
        limit.start()
        try:
            said = hear(process)
            seen[STARTED].append(said["start"])
            seen[STEPPED] += [1e3 * one for one in said["steps"]]
            yield process, mark
        except EOFError:
            raise KitError(f"a trial broke: {last_line(errors)}") from None
        finally:
            limit.cancel()
            end_carriers(mark.__eq__)
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


def environment() -> dict[str, str]:
    """Ours, with the kit to be found wherever this process found it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def of_trial(mark: str, scratch: str) -> dict[str, str]:
    """The CPU only, as for the kit; the kit and this very Python found by whatever looks for them; files go with the trial."""
    return {
        **environment(),
        machine.MARK: mark,
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(Path(scratch) / "ipython"),
        "TMPDIR": scratch,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONUNBUFFERED": "1",
    }


def seconds_until_gone(fits: Callable[[str], bool], known: list[int], since: float, at_most: float) -> float | None:
    """Seconds from `since` until no process has the mark; None if that took longer than `at_most`.

    Only once none of the `known` processes is left is all of /proc searched."""
    while (now := time.perf_counter()) - since < at_most:
        if all(machine.marked(pid) is None for pid in known) and not carriers(fits):
            return now - since
        time.sleep(0.001)
    return None
