"""The controller of an asynchronous RL loop: who may start, what is trained, what is too old, when weights move. Standard library only.

`settings` are its settings, `core` the state machine, `samplers` the rules of staleness, `simulated` a whole system on a virtual clock.
Versions count from 0, the base: `version` rises by one with each outer step, `updates` with each optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Protocol

    from kit.stream.simulated import Simulation

    class Run(Protocol):
        @property
        def dir(self) -> Path: ...


def what_if(run: Run, phase: str | None = "stream", **changes: Any) -> Simulation:
    """Simulate a run with its own durations and some settings changed: `what_if(run, sampler="windowed", window=2).seconds`.

    `phase` is the loop whose ledger tells settings and durations; None takes all rows of the run.
    """
    from kit.stream.simulated import forecast, rows_of

    return forecast(rows_of(run.dir, phase), **changes)
