"""The controller of an asynchronous RL loop: who may start, what is trained, what is too old, when weights move. Standard library only.

`settings` are its settings, `core` the state machine, `samplers` the rules of staleness, `simulated` a whole system on a virtual clock.
Versions count from 0, the base: `version` rises by one with each outer step, `updates` with each optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Protocol

    from kit.stream.simulated import Simulation

    class Run(Protocol):
        @property
        def dir(self) -> Path: ...
        @property
        def config(self) -> Mapping[str, Any]: ...


def what_if(run: Run, **changes: Any) -> Simulation:
    """Simulate a run with its own durations and some settings changed: `what_if(run, sampler="windowed", window=2).seconds`."""
    from dataclasses import fields

    from kit.loop.ledger import read
    from kit.results.records import PATTERN
    from kit.stream.forecast import forecast
    from kit.stream.settings import Settings

    known = {field.name for field in fields(Settings)}
    settings = Settings(**{name: value for name, value in run.config.items() if name in known})
    rows = [row for path in sorted(run.dir.glob(PATTERN)) for row in read(path)[0]]
    return forecast(rows, settings, **changes)
