"""A gate for many readers or one writer: forwards read the weights, an apply writes them. No forward runs on half-new weights.

A writer waits for the readers inside; later readers wait for the writer, so that a steady stream of forwards cannot block new weights.
Every wait has a deadline, and the error names the threads inside. A reading thread may enter again. Limits: threads of one process only;
the order of waiting writers is undefined; readers wait while writers follow one another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from kit.errors import BadInput, KitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class GateTimeout(KitError):  # noqa: N818 - reads as what happened
    """A deadline passed at the gate. `waiting` is "reader" or "writer"; `inside` are the threads that it waited for."""

    def __init__(self, waiting: str, inside: tuple[str, ...], timeout_s: float) -> None:
        held = f"{', '.join(inside)} inside" if inside else "no thread inside, but a writer was waiting"
        super().__init__(f"a {waiting} waited {timeout_s:g} s at the gate: {held}")
        self.waiting = waiting
        self.inside = inside


class Gate:
    """`with gate.reading():` around a forward, `with gate.writing():` around an apply."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._readers: dict[threading.Thread, int] = {}
        self._writer: threading.Thread | None = None
        self._waiting_writers = 0

    @contextlib.contextmanager
    def reading(self, timeout_s: float | None = None) -> Iterator[None]:
        """Block writers. Waits for a writer inside and for waiting writers."""
        me = threading.current_thread()
        with self._changed:
            if self._writer is me:
                raise BadInput("a thread that writes cannot read at the gate: it would wait for itself")
            if me not in self._readers:
                self._wait("reader", lambda: self._writer is None and not self._waiting_writers, timeout_s)
            self._readers[me] = self._readers.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[me] -= 1
                if not self._readers[me]:
                    del self._readers[me]
                    self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self, timeout_s: float | None = None) -> Iterator[None]:
        """Block all others. Waits for everybody inside; a writer that gives up lets readers in again."""
        me = threading.current_thread()
        with self._changed:
            if me in self._readers or self._writer is me:
                raise BadInput("a thread that is inside the gate cannot write: it would wait for itself")
            self._waiting_writers += 1
            try:
                self._wait("writer", lambda: self._writer is None and not self._readers, timeout_s)
                self._writer = me
            finally:
                self._waiting_writers -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()

    def _wait(self, waiting: str, free: Callable[[], bool], timeout_s: float | None) -> None:
        limit = self.timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + limit
        while not free():
            left = end - time.monotonic()
            if left <= 0:
                inside = [self._writer] if self._writer else self._readers
                raise GateTimeout(waiting, tuple(sorted(thread.name for thread in inside)), limit)
            self._changed.wait(left)
