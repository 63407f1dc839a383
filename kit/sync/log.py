"""The events of a sync and the busy time of each stage. Stages overlap, so their sum may exceed the elapsed time."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Log:
    """`seconds` by stage; `events` in order, by the system clock, which all ranks of a machine share."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.events: list[tuple[str, float]] = []

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def event(self, name: str) -> None:
        self.events.append((name, time.time()))
