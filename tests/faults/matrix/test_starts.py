"""The kill matrix, continued: deaths and hangs at random moments of a start, and of the notebook in start, step and close."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.errors import KitError, RankDied
from kit.world import World
from kit.world.asked import CREWS
from kit.world.world import Printer
from tests.faults.matrix.kinds import descendants, each, moment
from tests.holdings import holdings, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
NOTHING = {"processes": [], "folders": []}


def nothing_of(owner: int) -> bool:
    return {name: holdings(owner)[name] for name in NOTHING} == NOTHING


# -- the start ---------------------------------------------------------------------------------------------------------


class Strikes(Printer):
    """Send a signal to the agent or to one of its children at a given moment of the start."""

    def __init__(self, number: signal.Signals, *, rank: bool, after_s: float) -> None:
        self.number, self.rank, self.after_s = number, rank, after_s
        self.began: float | None = None
        self.struck = 0

    def tick(self, answered: object) -> None:
        victims = self.victims()
        self.began = self.began or (time.monotonic() if victims else None)
        if not self.struck and victims and self.began and time.monotonic() - self.began >= self.after_s:
            self.strike(victims[-1])

    def victims(self) -> list[int]:
        agents = [crew.torchrun_pid for crew in CREWS if crew._process and crew._process.poll() is None]
        found = [pid for agent in agents if agent for pid in [agent, *descendants(agent)]]
        return [pid for pid in found if (pid not in agents) == self.rank and b"agent.py" in command(pid)]

    def strike(self, victim: int) -> None:
        self.struck = victim
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, self.number)


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


STARTS: dict[str, tuple[signal.Signals, bool, float]] = {
    "SIGKILL of torchrun while it starts": (signal.SIGKILL, False, 1.5),
    "SIGTERM of torchrun while it starts": (signal.SIGTERM, False, 1.5),
    "SIGKILL of a rank while it starts": (signal.SIGKILL, True, 0.02),
    "SIGTERM of a rank while it starts": (signal.SIGTERM, True, 0.02),
    "SIGSTOP of a rank while it starts": (signal.SIGSTOP, True, 0.0),
    "SIGSTOP of torchrun while it starts": (signal.SIGSTOP, False, 0.5),
}


def start(logs: Path, strikes: Strikes) -> None:
    with World(2, device="cpu", logs=logs, observer=strikes, start_timeout_s=8) as world:
        if not strikes.struck:  # the World was up before the moment came
            strikes.strike(strikes.victims()[-1])
        world.run("dist.barrier()\nimport time; time.sleep(2)", timeout_s=4)


@each(STARTS)  # type: ignore[arg-type]
def test_a_start(tmp_path: Path, kind: str, n: int) -> None:
    """Either the start fails with a clear error, or the World is up and its first call names who is gone."""
    number, rank, most_s = STARTS[kind]
    strikes = Strikes(number, rank=rank, after_s=moment(kind, n, most_s))
    # Ranks that run do not need torchrun, so one that is stopped after it started them hinders nobody.
    may_go_on = number == signal.SIGSTOP and not rank
    with pytest.raises(KitError) if not may_go_on else contextlib.suppress(KitError) as caught:
        start(tmp_path, strikes)
    assert strikes.struck
    assert nothing_of(os.getpid())
    if caught and isinstance(caught.value, RankDied) and rank:
        assert caught.value.signal == number.name
    with World(1, device="cpu", logs=tmp_path) as after:
        assert after.eval("rank") == [0]


# -- the notebook --------------------------------------------------------------------------------------------------------

NOTEBOOK = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests, nohup for one, may ignore it
from kit.world import World
print("start", flush=True)
world = World(2, device="cpu", logs=sys.argv[1])
print("step", flush=True)
if sys.argv[2] == "step":
    world.run("import time\\nif rank == 1: time.sleep(60)\\ndist.barrier()")
world.run("dist.barrier()")
print("close", flush=True)
world.close()
print("closed", flush=True)
"""
NOTEBOOKS = {
    f"{name} of the notebook in its {where}": (getattr(signal, name), where, most_s)
    for name in ("SIGKILL", "SIGINT", "SIGTERM", "SIGHUP")
    for where, most_s in (("start", 3.0), ("step", 0.5), ("close", 0.05))
}


@each(NOTEBOOKS)  # type: ignore[arg-type]
def test_the_notebook(tmp_path: Path, kind: str, n: int) -> None:
    """However the notebook ends, its World leaves nothing; after a SIGKILL of both at once, `kit clean` removes the rest."""
    number, where, most_s = NOTEBOOKS[kind]
    command = [sys.executable, "-c", NOTEBOOK, str(tmp_path), where]
    notebook = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert notebook.stdout is not None
    while notebook.stdout.readline().strip() != where:
        assert notebook.poll() is None
    with contextlib.suppress(subprocess.TimeoutExpired):
        notebook.wait(moment(kind, n, most_s))
    notebook.send_signal(number)
    rest, _ = notebook.communicate(timeout=60)
    assert notebook.returncode != 0 or "closed" in rest
    wait_for(lambda: nothing_of(notebook.pid), 30.0)
    assert {name: holdings(notebook.pid)[name] for name in NOTHING} == NOTHING
