"""A limit of wall time for code that should return at once, in any thread: `with time_limit(5.0, MyError): ...` raises it there."""

from __future__ import annotations

import bdb
import contextlib
import ctypes
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from kit.errors import KitError

T = TypeVar("T")
TURN_S = 30.0  # wall time of a core's turn; one takes microseconds to milliseconds
AGAIN_S = 1.0  # after the limit it is raised again and again: code may catch whatever is raised in it
_ends = threading.local()  # `at`: when the innermost limit of this thread ends


class HangsError(BaseException):
    """No `Exception`: own code that catches those must not go on."""


class NeverReturned(KitError):  # noqa: N818 - reads as what happened
    """A core, or what it calls, kept a turn for too long."""


def returned(act: Callable[[], T], who: Callable[[], str]) -> T:
    """What own code that must return at once returns. `who` is called only if it does not."""
    limit = time_limit(TURN_S, HangsError)
    try:
        with limit:
            return act()
    except HangsError:
        raise NeverReturned(f"{who()} never returned: it took more than {TURN_S:g} s") from None
    finally:
        limit.end()


class time_limit:  # noqa: N801 - reads as a statement
    """Raise an exception in this block after `seconds`. An outer block that ends sooner is its limit too.

    In the main thread a signal also interrupts what waits; another thread is interrupted at its next line of Python.
    While this process has had less than half of that time on a processor, as on a busy machine, the limit is `at_most` seconds.
    If it rings as the block ends, CPython raises it before the first line of `__exit__`: code that continues afterwards must call `end`.
    """

    def __init__(self, seconds: float, error: type[BaseException], *, at_most: float = 0.0) -> None:
        self.seconds = seconds
        self.error = error
        self.at_most = at_most
        self.limits = False

    def __enter__(self) -> None:
        self.began = time.monotonic()
        self.outer = getattr(_ends, "at", math.inf)
        if self.began + self.seconds < self.outer:
            self.busy = time.process_time()  # slow enough to notice in every turn of a core
            self.bell: BySignal | ByThread
            self.bell = BySignal() if threading.current_thread() is threading.main_thread() else ByThread()
            self.limits = True  # from here on `end` can take it back, also if a Ctrl-C ends this method
            _ends.at = self.began + self.seconds
            self.bell.start(self.seconds, self.error, self.is_over)

    def is_over(self) -> bool:
        took, worked = time.monotonic() - self.began, time.process_time() - self.busy
        return took >= self.at_most or worked >= self.seconds / 2

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the limit back, if it was not yet."""
        if self.limits:
            self.bell.stop(time.monotonic() - self.began)
            _ends.at = self.outer
            self.limits = False


def debugging() -> bool:
    """Whether a person looks at this thread in a debugger, so that no limit applies."""
    return isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb)


class BySignal:
    def __init__(self) -> None:
        self.before: Any = signal.getsignal(signal.SIGALRM)
        self.left = self.every = 0.0

    def start(self, seconds: float, error: type[BaseException], is_over: Callable[[], bool]) -> None:
        def ring(_: int, __: FrameType | None) -> None:
            if is_over() and not debugging():
                raise error

        self.before = signal.signal(signal.SIGALRM, ring)
        self.left, self.every = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)

    def stop(self, took: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
        if self.left:  # somebody else's alarm
            signal.setitimer(signal.ITIMER_REAL, max(self.left - took, 0.001), self.every)


class ByThread:
    def start(self, seconds: float, error: type[BaseException], is_over: Callable[[], bool]) -> None:
        self.error, self.is_over, self.who = error, is_over, threading.get_ident()
        self.due = time.monotonic() + seconds
        _watcher.add(self)

    def ring(self) -> None:
        if self.is_over():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.who), ctypes.py_object(self.error))

    def stop(self, _: float) -> None:
        # What was thrown at the end is let out here. Taking it back instead would leave CPython 3.11 looking for it for ever.
        try:
            _watcher.forget(self)
            for _ in range(3):
                pass
        except self.error:
            _watcher.forget(self)


class Watcher:
    """One thread for the limits of all others: to start one for every turn of a core would take longer than the turn, and a turn that
    begins must not wake it. What it rings may be raised in `add` or `forget`; CPython raises nothing between taking a lock by `with`
    and the block that gives it back."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.bells: set[ByThread] = set()
        self.sooner: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.looks_at = math.inf
        self.thread: threading.Thread | None = None

    def add(self, bell: ByThread) -> None:
        with self.lock:
            self.bells.add(bell)
            if self.thread is None:
                self.thread = threading.Thread(target=self.watch, daemon=True, name="time limits")
                self.thread.start()
            elif bell.due < self.looks_at:
                self.sooner.put(None)

    def forget(self, bell: ByThread) -> None:
        with self.lock:
            self.bells.discard(bell)

    def watch(self) -> None:
        while True:
            with self.lock:
                now = time.monotonic()
                for bell in self.bells:
                    if bell.due <= now:
                        bell.due = now + AGAIN_S
                        bell.ring()
                self.looks_at = min((bell.due for bell in self.bells), default=math.inf)
                left = None if self.looks_at == math.inf else self.looks_at - now
            with contextlib.suppress(queue.Empty):
                self.sooner.get(timeout=left)


_watcher = Watcher()


# In a forked process the lock may be held by a thread that is gone, as are those that the bells are for.
os.register_at_fork(after_in_child=_watcher.begin)
