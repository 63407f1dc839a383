"""Measure one phase: wall time; memory before, after and at its peak; groups, descriptors and threads before and after.

`PhaseMeter` is a context manager; its `metrics` are there after the block whether or not it raised. The time of sampling is not in
`seconds` but in `overhead_seconds`. Meters may nest: an inner meter resets the process's peaks, so it first passes what it saw to the
outer ones. Peaks are of the process and include threads that work beside the phase.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from kit import machine
from kit.measure.memory import device_memory, host_memory, reset_peaks
from kit.measure.observers.births import registered
from kit.measure.observers.holdings import BYTES, holdings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType


class Metric(NamedTuple):
    """One measured number. Units: "s", "B" for bytes, "1" for counts."""

    metric: str
    value: float
    unit: str


def current_device() -> str:
    """Return "cuda:N" once this process has initialised CUDA, else "cpu": asking must not put a context on a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def synchronize(device: str) -> None:
    """Wait until the device has finished all its work. An error of an earlier kernel is raised here."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def now(device: str = "cpu") -> float:
    """Seconds of a monotonic clock (for differences), read after the device has finished its work: a kernel launch returns at once."""
    synchronize(device)
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    """Seconds of this work, without what the device had to finish before it and with what the work started there."""
    start = now(current_device())
    work()
    return now(current_device()) - start


_open: list[PhaseMeter] = []
_PEAKS = ("peak_rss", "peak_allocated")


class PhaseMeter:
    """`with PhaseMeter(device) as m: ...`, then `m.metrics`.

    `device` None means "cuda:N" once this process has initialised CUDA, else "cpu". `peak_refused` says why there is
    no `peak_rss`, `device_error` holds what the device raised at the end of a phase that had failed already, and
    `ended` is the Unix time of the end.
    """

    def __init__(self, device: str | None = None) -> None:
        self.metrics: list[Metric] = []
        self.peak_refused: str | None = None
        self.device_error: Exception | None = None
        self.ended = time.time()
        self._device = device
        self._peaks = dict.fromkeys(_PEAKS, 0)

    def __enter__(self) -> PhaseMeter:
        device = self._device or current_device()
        synchronize(device)
        began = time.perf_counter()
        self._before = _levels(device)
        for meter in _open:
            meter._fold(self._before)
        self.peak_refused = reset_peaks(device)
        _open.append(self)
        self._start = time.perf_counter()
        self._overhead = self._start - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        device = self._device or current_device()
        failure: Exception | None = None
        try:
            synchronize(device)
        except RuntimeError as raised:  # a kernel of the phase failed and took the device along; the host can be read
            failure, device = raised, "cpu"
        end = time.perf_counter()
        self.ended = time.time()
        _open.remove(self)
        after = _levels(device)
        self._fold(after)
        self.metrics = self._summary(end - self._start, after)
        overhead = self._overhead + time.perf_counter() - end
        self.metrics.append(Metric("overhead_seconds", overhead, "s"))
        if failure is not None and error is None:
            raise failure
        self.device_error = failure

    def _fold(self, seen: dict[str, int]) -> None:
        for name in _PEAKS:
            self._peaks[name] = max(self._peaks[name], seen.get(name, 0))

    def _summary(self, seconds: float, after: dict[str, int]) -> list[Metric]:
        levels = {name: self._peaks.get(name, value) for name, value in after.items()}
        if self.peak_refused:
            levels.pop("peak_rss", None)
        before = {f"{name}_before": value for name, value in self._before.items() if name not in _PEAKS}
        rows = [Metric(name, value, _unit(name)) for name, value in (levels | before).items()]
        return [Metric("seconds", seconds, "s"), *rows]


def between_phases(device: str) -> list[Metric]:
    """What this process holds beside tensors, and how long it took to look: taken outside a phase, of whose time it is no part."""
    start = time.perf_counter()
    held = holdings(device)
    rows = [Metric(name, float(value), "B" if name in BYTES else "1") for name, value in held.items()]
    return [*rows, Metric("observers_seconds", time.perf_counter() - start, "s")]


class Counts(NamedTuple):
    """What this process holds open: registered process groups, file descriptors (sockets are a part of them), native threads."""

    groups: int
    fds: int
    sockets: int
    threads: int


def counts(status: Mapping[str, int] | None = None) -> Counts:
    """Costs some 30 us. A communicator that was not destroyed shows here even where no GPU reports its memory."""
    status = machine.status() if status is None else status
    return Counts(len(registered()), *machine.descriptors(), status["Threads"])


def _unit(name: str) -> str:
    return "1" if name.removesuffix("_before") in Counts._fields else "B"


def _levels(device: str) -> dict[str, int]:
    """Take every cheap source once, under the names the records carry. A source that is not here has no key."""
    status = machine.status()
    host = host_memory(status)
    seen = {"rss": host.rss, "anon_rss": host.anon, "shared_rss": host.shared, "peak_rss": host.peak}
    levels = {name: value for name, value in seen.items() if value is not None}
    levels.update(counts(status)._asdict())
    on_device = device_memory(device)
    if on_device is not None:
        levels.update((name, value) for name, value in on_device._asdict().items() if value is not None)
    return levels
