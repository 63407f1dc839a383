"""A replica that serves while weights arrive: forwards run one after the other on a thread, and a writer enters between two of them.

All ranks of a replica run the same forwards, so a writer must enter between the same two on each rank: before every forward the ranks
agree whether all of them have a waiting writer. The output of each forward is kept as a digest, which identifies its weights. A forward
waits without a deadline while a writer is inside: every step of a sync has one, and the writer leaves after the last step or a failure.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.sync.hashes import algorithms, digest

ALGORITHM = algorithms()[0]


class GateTimeout(KitError):  # noqa: N818 - reads as what happened
    """A deadline passed at the gate. `waiting` is "reader" or "writer"; `inside`: the threads that held the gate."""

    def __init__(self, waiting: str, inside: tuple[str, ...], timeout_s: float) -> None:
        held = f"{', '.join(inside)} inside" if inside else "no thread inside, but a writer was waiting"
        super().__init__(f"a {waiting} waited {timeout_s:g} s at the gate: {held}")
        self.waiting = waiting
        self.inside = inside


class Gate:
    """For many readers or one writer: `with gate.reading():` around a forward, `with gate.writing():` around an apply. No forward runs on
    half-new weights.

    A writer waits for the readers inside; later readers wait for the writer, so that a steady stream of forwards cannot block new weights.
    Every wait has a deadline, and the error names the threads inside. Limits: threads of one process only; no thread enters twice; the
    order of waiting writers is undefined; readers wait while one writer follows another.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._readers: set[threading.Thread] = set()
        self._writer: threading.Thread | None = None
        self._waiting_writers = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Block writers. Waits for a writer inside and for waiting writers."""
        me = threading.current_thread()
        with self._changed:
            self._refuse_inside(me)
            self._wait("reader", lambda: self._writer is None and not self._waiting_writers)
            self._readers.add(me)
        try:
            yield
        finally:
            with self._changed:
                self._readers.remove(me)
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Block all others. Waits until all have left; a writer that times out lets readers in again."""
        me = threading.current_thread()
        with self._changed:
            self._refuse_inside(me)
            self._waiting_writers += 1
            try:
                self._wait("writer", lambda: self._writer is None and not self._readers)
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

    def _refuse_inside(self, me: threading.Thread) -> None:
        if me is self._writer or me in self._readers:
            raise BadInput("a thread that is inside the gate cannot enter again: it would wait for itself")

    def _wait(self, waiting: str, free: Callable[[], bool]) -> None:
        if not self._changed.wait_for(free, self.timeout_s):
            inside = [self._writer] if self._writer else self._readers
            raise GateTimeout(waiting, tuple(sorted(thread.name for thread in inside)), self.timeout_s)


class Serving:
    """Runs forwards on a thread: `start`, `next` for the digest of a new forward, `stop`. `group`: the replica's ranks, if several."""

    def __init__(self, forward: Callable[[], torch.Tensor], *, group: Any = None, timeout_s: float = 60.0) -> None:
        self.forward = forward
        self.gate = Gate(timeout_s)
        self.timeout_s = timeout_s
        self.served: list[str] = []
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = self._wanted = self._open = self._ended = self._writing = False
        self._begun = 0

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def gated(self) -> bool:
        """Whether a writer is inside."""
        return self._writing

    def start(self) -> None:
        if self.running:
            raise BadInput("the replica serves already")
        self.served, self._error, self._begun = [], None, 0
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current forward. Raises the error of a forward."""
        if self._thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(self.timeout_s)
        if self._thread.is_alive():
            raise KitError(f"a forward did not end within {self.timeout_s:g} s")
        self._thread = None
        if self._error is not None:
            raise KitError(f"a forward failed while weights arrived: {self._error}") from self._error

    def next(self) -> str:
        """Return the digest of a forward that began after the call."""
        with self._changed:
            after = self._begun + 1
            self._await(lambda: len(self.served) >= after, "a forward")
            return self.served[after - 1]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep forwards out on every rank of the replica. All its ranks must enter."""
        with self._changed:
            self._wanted = True
        try:
            with self._changed:
                if self._thread is not None and self._group is not None:
                    # If serving has ended without an error, it has ended on all ranks of the replica.
                    self._await(lambda: self._open or (self._ended and not self._error), "a gap between two forwards")
            with self.gate.writing():
                self._writing = True
                yield
        finally:
            with self._changed:
                self._wanted = self._open = self._writing = False
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._all(lambda: self._stopping):
                if self._group is not None and self._all(lambda: self._wanted):
                    with self._changed:
                        self._open = self._wanted  # unless the writer has given up since
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: not self._open)
                    continue
                with self._reading():
                    with self._changed:
                        self._begun += 1
                    made = digest(self.forward(), ALGORITHM)
                with self._changed:
                    self.served.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _all(self, wish: Callable[[], bool]) -> bool:
        """Whether the condition holds on every rank of the replica."""
        if self._group is None:
            return wish()
        flag = torch.tensor([int(wish())])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Enter the gate, however long a writer stays inside. No other thread reads, so nothing else can hold this one up."""
        with contextlib.ExitStack() as scope:
            while True:
                with contextlib.suppress(GateTimeout):
                    scope.enter_context(self.gate.reading())
                    break
            yield

    def _await(self, ready: Callable[[], bool], awaited: str) -> None:
        end = time.monotonic() + self.timeout_s
        while not ready():
            if self._error is not None:
                raise KitError(f"a forward failed while weights arrived: {self._error}") from self._error
            if self._thread is None or self._ended:
                raise KitError(f"waited for {awaited}, but the replica does not serve")
            if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                raise KitError(f"{awaited} did not come within {self.timeout_s:g} s")
