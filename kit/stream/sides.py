"""What a loop runs on: a side has the clock, the ports and the ledger, of live ranks or of simulated ones. The loop is run the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kit.loop.messages import Sink
from kit.loop.runner import A_SECOND, Core, Port, Runner, RunnerClock
from kit.results.records import Row
from kit.stream.ports import Foreign, Meter, StepLog, Watched
from kit.stream.settings import Resume, StreamSettings, opening

Logger = Callable[[dict[str, float], int], object]


def silent(_: dict[str, float], __: int) -> None:
    """A logger that drops everything, since the ledger has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSide:
    """`ports`: all but "log" and "sampler", by address. `deadline_s`: the longest wait for an event."""

    clock: RunnerClock
    ports: Mapping[str, Port]
    ledger: Sink
    deadline_s: float
    a_second: int = A_SECOND


def run_loop(
    core: Core[Any],
    settings: StreamSettings,
    side: LoopSide,
    *,
    pipeline: str = "",
    start: Resume | None = None,
    sampler: Any = None,
    logger: Logger = silent,
) -> Runner:
    """Run a controller to its end; returns the runner, which has its end and its last state. `start`: where it resumes. `sampler`: a class
    with NeMo-RL's protocol, for a core that asks the port "sampler"."""
    meter = Meter()
    ledger = Watched(side.ledger, meter)
    for name, ids in opening(settings, start):  # the meter's time begins here, however late the loop begins
        ledger.write(Row(metric=name, time=side.clock.now(), ids=ids))
    ports: dict[str, Port] = {**side.ports, "log": StepLog(meter, logger)}
    with contextlib.ExitStack() as scope:
        if sampler is not None:
            foreign = ports["sampler"] = Foreign(sampler, settings, pipeline=pipeline, resume=start)
            scope.callback(foreign.close)
            ledger.watchers.append(foreign)
        runner = Runner(
            {pipeline: core}, ports, clock=side.clock, ledger=ledger, deadline_s=side.deadline_s, a_second=side.a_second
        )
        runner.run()
    return runner
