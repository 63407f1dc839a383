"""The limit of wall time: it ends what does not return, in the main thread and in others, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit.loop import limit
from kit.loop.limit import NeverReturned, returned, time_limit


class OverError(BaseException):
    pass


class InnerError(BaseException):
    pass


def spins() -> None:
    while True:
        pass


def catches_once() -> None:
    try:
        spins()
    except BaseException:  # noqa: BLE001 - as own code may
        spins()


def in_main(act: Callable[[], object]) -> object:
    return act()


def in_another(act: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


THREADS = pytest.mark.parametrize("thread", [in_main, in_another])


@THREADS
@pytest.mark.parametrize("act", [spins, catches_once])
def test_what_does_not_return_is_ended(
    thread: Callable[..., object], act: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "AGAIN_S", 0.05)

    def limited() -> None:
        with time_limit(0.05, OverError):
            act()

    with pytest.raises(OverError):
        thread(limited)


@THREADS
def test_of_two_limits_the_one_that_ends_first_holds(thread: Callable[..., object]) -> None:
    def outer_first() -> None:
        with time_limit(0.05, OverError), time_limit(60.0, InnerError):
            spins()

    def inner_first() -> None:
        with time_limit(0.2, OverError):
            with pytest.raises(InnerError), time_limit(0.05, InnerError):
                spins()
            spins()

    for act in (outer_first, inner_first):
        with pytest.raises(OverError):
            thread(act)


@THREADS
def test_the_limit_is_gone_after_the_block(thread: Callable[..., object]) -> None:
    before = signal.getsignal(signal.SIGALRM)

    def short() -> str:
        with time_limit(0.05, OverError):
            pass
        until = time.monotonic() + 0.08  # an alarm left behind would ring by now
        while time.monotonic() < until:
            pass
        return "went on"

    assert thread(short) == "went on"
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_ctrl_c_as_a_limit_begins_is_a_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGALRM)

    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    for place, name in ((time, "process_time"), (signal, "setitimer")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, interrupted)
            if name == "setitimer":
                patched.setattr(limit.BySignal, "stop", lambda *_: signal.signal(signal.SIGALRM, before))
            with pytest.raises(KeyboardInterrupt):
                returned(lambda: None, lambda: "the sampler")
        assert returned(lambda: "returned", lambda: "the sampler") == "returned"
    assert signal.getsignal(signal.SIGALRM) is before


@THREADS
def test_a_limit_that_rings_as_its_block_ends_is_taken_back(
    thread: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator is one instruction: what rings in it is raised as `__exit__` begins.

    The watcher of another thread must be given a processor while the operator lasts, so it takes longer each time until that was so."""
    monkeypatch.setattr(limit, "TURN_S", 0.01)
    monkeypatch.setattr(limit, "AGAIN_S", 0.5)

    def ends_late(power: int, base: int = 3) -> int:
        return base**power

    def rings() -> None:
        for doubled in range(20, 25):
            returned(lambda power=2**doubled: ends_late(power), lambda: "the sampler")  # type: ignore[misc]

    def late_and_on() -> str:
        with pytest.raises(NeverReturned):
            rings()
        until = time.monotonic() + 0.6  # an alarm left behind would ring by now
        while time.monotonic() < until:
            pass
        return f"went on, the limit ends at {limit._ends.at}"

    assert thread(late_and_on) == "went on, the limit ends at inf"


def test_somebody_elses_alarm_rings_after_the_block() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with time_limit(30.0, OverError):
            pass
        until = time.monotonic() + 20
        while len(rung) < 2 and time.monotonic() < until:
            pass
        assert len(rung) >= 2
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left)


def test_limits_of_other_threads_share_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start one takes longer than a turn of a core, which has such a limit."""
    started: list[str] = []
    start = threading.Thread.start

    def count(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    def many() -> int:
        monkeypatch.setattr(threading.Thread, "start", count)
        for _ in range(100):
            with time_limit(30.0, OverError):
                pass
        monkeypatch.undo()
        return len(started)

    assert in_another(many) in (0, 1)


def test_a_limit_that_ends_sooner_than_that_of_another_thread_holds() -> None:
    begun, over = threading.Event(), threading.Event()

    def patient() -> str:
        with time_limit(60.0, OverError):
            begun.set()
            return "over" if over.wait(30) else "the other thread was not ended"

    def short() -> None:
        assert begun.wait(30)
        with time_limit(0.05, InnerError):
            until = time.monotonic() + 20
            while time.monotonic() < until:
                pass

    with ThreadPoolExecutor(2) as pool:
        waits, ended = pool.submit(patient), pool.submit(short)
        with pytest.raises(InnerError):
            ended.result()
        over.set()
        assert waits.result() == "over"


FORKED = """
import os, threading, time
from kit.loop import limit
def limited(seconds, spins_s, begun=None):
    try:
        with limit.time_limit(seconds, RuntimeError):
            if begun: begun.set()
            until = time.monotonic() + spins_s
            while time.monotonic() < until: pass
        if not begun: print("went on", flush=True)
    except RuntimeError:
        print("ended", flush=True)
def in_thread(*args):
    thread = threading.Thread(target=limited, args=args)
    thread.start()
    return thread
"""
IN_CHILD = """
if child:
    print("child", flush=True)
    in_thread(*spins).join()
else:
    os.wait()
"""


@pytest.mark.parametrize(
    ("fork", "says"),
    [
        ("with limit._watcher.lock: child = os.fork() == 0\nspins = 0.05, 20.0", "ended"),
        (
            "begun = threading.Event()\nin_thread(0.2, 0.1, begun)\nbegun.wait()\nchild = os.fork() == 0\nspins = 60.0, 1.0",
            "went on",
        ),
    ],
    ids=["while another thread holds the lock", "while another thread is in a limit"],
)
def test_a_limit_holds_in_a_forked_process(fork: str, says: str) -> None:
    """The thread of the fork's first limit may have the identity of one that was in a limit before the fork.

    That one prints nothing: a fork would copy the lock of the output."""
    code = f"{FORKED}\nin_thread(60.0, 0.0).join()\n{fork}\n{IN_CHILD}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.partition("child\n")[2].splitlines()[0] == says, done.stderr


def test_own_code_that_never_returns_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "TURN_S", 0.05)
    with pytest.raises(NeverReturned, match=r"the sampler never returned: it took more than 0.05 s"):
        returned(spins, lambda: "the sampler")


def test_a_limit_in_a_thread_leaves_an_interpreter_that_can_be_profiled() -> None:
    """CPython 3.11 looks for a thread's exception for ever if one was taken back, and then no profiled function begins."""
    code = (
        "import sys, threading\n"
        "from kit.loop.limit import time_limit\n"
        "def limited():\n    with time_limit(5.0, RuntimeError): pass\n"
        "thread = threading.Thread(target=limited)\nthread.start()\nthread.join()\n"
        "sys.setprofile(lambda *_: None)\nthread.is_alive()\nsys.setprofile(None)\nprint('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr
