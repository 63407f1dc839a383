"""The kill matrix: each kind of death or hang is named correctly and leaves nothing, and fresh ranks work afterwards.

Each kind runs once in the slow part, and five times at different moments with --every.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kit.errors import KitError, RankDied, RankError, RankTimeout
from kit.world import World
from tests.faults.matrix.kinds import descendants, each, moment
from tests.holdings import holdings, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


# -- what rank 1 does to itself while rank 0 waits for it
# -----------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """An exception with these attributes, or None if the step succeeds."""

    error: type[KitError] | None
    fields: dict[str, object]


def died(signal_name: str | None = None, exitcode: int | None = None) -> Expected:
    return Expected(RankDied, {"rank": 1, "signal": signal_name, "exitcode": exitcode, "phase": "run"})


RAISED = Expected(RankError, {"rank": 1, "ranks": (1,), "phase": "run"})
HANGS = Expected(RankTimeout, {"ranks": (0, 1), "culprits": (1,), "phase": "run"})
FINE = Expected(None, {})
GONE = Expected(RankDied, {"rank": 1, "phase": "run"})  # ended by the kit or by a gloo error, whichever comes first

STEPS: dict[str, tuple[str, Expected]] = {
    **{
        f"{name} to itself": (f"os.kill(os.getpid(), signal.{name}); time.sleep(60)", died(name))
        for name in (
            "SIGKILL",
            "SIGTERM",
            "SIGHUP",
            "SIGQUIT",
            "SIGSEGV",
            "SIGBUS",
            "SIGFPE",
            "SIGILL",
            "SIGABRT",
            "SIGUSR1",
        )
    },
    "SIGKILL to its group": ("os.killpg(0, signal.SIGKILL)", died("SIGKILL")),
    "SIGINT to itself": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", RAISED),
    "a null pointer": ("ctypes.string_at(0)", died("SIGSEGV")),
    "abort": ("os.abort()", died("SIGABRT")),
    "os._exit(0)": ("os._exit(0)", died(exitcode=0)),
    "os._exit(5)": ("os._exit(5)", died(exitcode=5)),
    "os._exit in a thread": ("threading.Thread(target=os._exit, args=(4,)).start(); time.sleep(60)", died(exitcode=4)),
    "sys.exit(3)": ("sys.exit(3)", died(exitcode=3)),
    "another program": ("os.execv('/bin/false', ['false'])", died(exitcode=1)),
    "an exception": ("raise ValueError('mine')", RAISED),
    "endless recursion": ("f = lambda: f(); f()", RAISED),
    "no memory": ("resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); bytearray(2**40)", RAISED),
    "no descriptors": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50)); x = [open('/dev/null') for _ in range(99)]",
        RAISED,
    ),
    "all descriptors closed": ("os.closerange(3, 4096); time.sleep(60)", GONE),
    "a full disk": ("resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); print('x' * 10_000)", FINE),
    "asleep": ("time.sleep(60)", HANGS),
    "a busy loop": ("while True: pass", HANGS),
    "a hang in C": ("ctypes.CDLL(None).sleep(60)", HANGS),
    "a hang in C that holds the interpreter": ("ctypes.PyDLL(None).sleep(60)", HANGS),
    "a lock nobody opens": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", HANGS),
    "a pipe nobody writes to": ("os.read(os.pipe()[0], 1)", HANGS),
    "waiting for a child": ("subprocess.run(['sleep', '60'])", HANGS),
    "SIGSTOP to itself": ("os.kill(os.getpid(), signal.SIGSTOP)", HANGS),
    "another collective": ("dist.recv(torch.ones(1), src=0)", Expected(RankTimeout, {"ranks": (0, 1), "culprits": ()})),
    "a child that holds the channel": ("if not os.fork(): time.sleep(60)\nelse: os._exit(6)", died(exitcode=6)),
    "a child in a session of its own": (
        "if not os.fork():\n    os.setsid(); os.execve('/bin/sleep', ['sleep', '60'], {})\nos.kill(os.getpid(), 9)",
        died("SIGKILL"),
    ),
}
IMPORTS = "import ctypes, os, resource, signal, subprocess, sys, threading, time\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(2, device="cpu", logs=tmp_path_factory.mktemp("logs")) as made:
        yield made
    assert holdings(os.getpid())["processes"] == []


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """Fresh ranks before the test; afterwards only the agent and fresh ranks may exist."""
    shared.restart()
    yield shared
    shared.restart()
    agent = shared.torchrun_pid
    assert agent is not None
    assert wait_for(lambda: set(descendants(agent)) == set(shared.pids))
    shared.run("t = torch.ones(1); dist.all_reduce(t)")
    assert shared.eval("t.item()") == [2.0, 2.0]


def meets(expected: Expected, act: Callable[[], object]) -> None:
    if expected.error is None:
        act()
        return
    with pytest.raises(expected.error) as caught:
        act()
    assert {name: getattr(caught.value, name) for name in expected.fields} == expected.fields, str(caught.value)


@each(STEPS)  # type: ignore[arg-type]
def test_a_step(world: World, kind: str, n: int) -> None:
    code, expected = STEPS[kind]
    wait = moment(kind, n, 0.3)
    body = "".join(f"    {line}\n" for line in code.split("\n"))
    late = 2.0 if expected.error is RankTimeout else 30.0
    meets(
        expected,
        lambda: world.run(
            f"{IMPORTS}time.sleep({wait})\nif rank == 1:\n{body}dist.barrier()"
            if expected is not FINE
            else f"{IMPORTS}if rank == 1:\n{body}",
            timeout_s=late,
        ),
    )


def test_what_ends_cpp_is_in_the_error(world: World) -> None:
    code = f"{IMPORTS}if rank == 1: ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()\ndist.barrier()"
    with pytest.raises(RankDied, match=r"terminate called without an active exception\n.*Aborted") as caught:
        world.run(code, timeout_s=30.0)
    assert "<module>" in str(caught.value)  # where it was called
    assert "Extension modules" not in str(caught.value)


# -- what happens to ranks and torchrun from outside, in the middle of a step ---------------------------------------------

OUTSIDE: dict[str, tuple[signal.Signals, bool, Expected]] = {
    "SIGKILL of a rank": (signal.SIGKILL, False, died("SIGKILL")),
    "SIGTERM of a rank": (signal.SIGTERM, False, died("SIGTERM")),
    "SIGSEGV of a rank": (signal.SIGSEGV, False, died("SIGSEGV")),
    "SIGSTOP of a rank": (signal.SIGSTOP, False, HANGS),
    "SIGKILL of torchrun": (
        signal.SIGKILL,
        True,
        Expected(RankDied, {"rank": -1, "signal": "SIGKILL", "phase": "run"}),
    ),
    "SIGABRT of torchrun": (
        signal.SIGABRT,
        True,
        Expected(RankDied, {"rank": -1, "signal": "SIGABRT", "phase": "run"}),
    ),
}


@each(OUTSIDE)  # type: ignore[arg-type]
def test_from_outside(world: World, kind: str, n: int) -> None:
    number, torchrun, expected = OUTSIDE[kind]
    victim = world.torchrun_pid if torchrun else world.pids[1]
    assert victim is not None
    timer = threading.Timer(moment(kind, n, 0.5), os.kill, (victim, number))
    timer.start()
    late = 2.0 if expected is HANGS else 30.0
    meets(expected, lambda: world.run("import time\nif rank == 1: time.sleep(60)\ndist.barrier()", timeout_s=late))
    timer.join()
