"""The controller of an asynchronous RL loop: what to generate, train and drop, and when to sync weights. Standard library only.

`settings` has its settings and samplers, `core` the state machine, `simulated` a whole system on a virtual clock. `judge` has the
checks of a ledger, and uses none of the controller's code.
Versions count from 0, the base. `version` rises by one with each outer step, `updates` with each optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.results import Run
    from kit.stream.simulated import Simulation


def what_if(run: Run, phase: str | None = "stream", **changes: Any) -> Simulation:
    """Simulate a run with its measured durations and changed settings: `what_if(run, sampler="windowed", window=2).seconds`.

    Settings and durations come from the ledger of `phase`; None reads all rows of the run.
    """
    from kit.results.frames import events_of
    from kit.stream.simulated import forecast

    return forecast(events_of(run.frame(), phase), **changes)
