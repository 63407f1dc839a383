"""A lab on a rank: its phases object lives here between calls; every phase is measured, also one that raises.

The notebook calls `begin` once, `step` for each phase, `last` to learn what was measured of a phase that raised, and `end`.
"""

from __future__ import annotations

import importlib
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kit import routing
from kit.errors import BadInput
from kit.measure import Metric, PhaseMeter, provenance, pss
from kit.measure.snapshot import History


@dataclass(kw_only=True, slots=True)
class Context:
    """What a lab's phases have to work with. `record` adds a number of their own to the phase that runs.

    `rank` and `world_size` count through all Worlds of the run, of which this rank is in number `world`. `meeting` is a fresh name,
    the same on all ranks, by which those of several Worlds find each other.
    """

    rank: int
    world_size: int
    world_sizes: tuple[int, ...]
    world: int
    meeting: str
    device: torch.device
    config: Any
    fault: str | None
    metrics: list[Metric] = field(default_factory=list)

    def record(self, metric: str, value: float, unit: str = "1") -> None:
        self.metrics.append(Metric(metric, float(value), unit))

    def implementation(self, target: str) -> Any:
        """The code under test: `module:attr`, called once with this context."""
        return load(target)(self)


@dataclass(kw_only=True, slots=True)
class Session:
    """One lab on this rank."""

    context: Context
    phases: Any
    history: History | None
    last: dict[str, Any] | None = None


_session: Session | None = None


def begin(
    *,
    phases: str,
    config_type: str,
    config: dict[str, Any],
    fault: str | None,
    devices: list[str],
    world_sizes: list[int],
    meeting: str,
    snapshots: str | None = None,
) -> dict[str, Any]:
    """Make the lab's phases object. Returns this rank's proportional memory, and on rank 0 what it knows of its software.

    `snapshots` is a folder for this rank's history of CUDA memory, which is kept only then.
    """
    global _session  # noqa: PLW0603 - one rank is one process, and it works for one lab
    rank = int(os.environ["KIT_RANK"])
    context = Context(
        rank=rank,
        world_size=sum(world_sizes),
        world_sizes=tuple(world_sizes),
        world=sum(rank >= end for end in itertools.accumulate(world_sizes)),
        meeting=meeting,
        device=torch.device(devices[rank]),
        config=load(config_type)(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}),
        fault=fault,
    )
    if context.config.routing == "torch" and routing.effective():
        raise BadInput(
            f"routing=torch, and these ranks go through torchcomms: make the World without {routing.FLAG}, or ask for routing=torchcomms"
        )
    about = provenance() if rank == 0 else None
    history = History(Path(snapshots) / f"rank{rank}.pickle") if snapshots else None
    _session = Session(context=context, phases=load(phases)(context), history=history)
    if history is not None:
        history.start()
    return {"provenance": about, "pss": pss(), **routed(context.config)}


def step(*, cycle: int, name: str) -> dict[str, Any]:
    """Run one phase and measure it."""
    session = _running()
    session.last = None
    session.context.metrics = []
    meter = PhaseMeter(str(session.context.device))
    failed = [Metric("failed", 1, "1")]
    try:
        with meter:
            getattr(session.phases, name)(cycle)
        failed = []
    except BaseException:
        snapshot()  # now: memory of what raised is given back when the error is answered
        raise
    finally:
        metrics = [*meter.metrics, *session.context.metrics, *failed]
        session.last = {"cycle": cycle, "name": name, "metrics": metrics, "ended": meter.ended}
    return session.last


def last() -> dict[str, Any] | None:
    """What the latest phase left behind, whether or not it raised."""
    return _running().last


def snapshot() -> None:
    """Write this rank's history of CUDA memory, if it keeps one, and keep it no longer."""
    session = _running()
    if session.history is not None:
        session.history.write()
        session.history.stop()
        session.history = None


def end() -> dict[str, Any]:
    """Let go of the lab."""
    global _session  # noqa: PLW0603 - as above
    snapshot()
    about = routed(_running().context.config)
    _session = None
    return {"pss": pss(), **about}


def routed(config: Any) -> dict[str, Any]:
    """What is in effect of a routing that was asked for; where none was, nothing is said of it."""
    return {"routing": routing.describe()} if config.routing == "torchcomms" else {}


def load(target: str) -> Any:
    """`module:attr` or `module:attr.attr`."""
    module, _, names = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _running() -> Session:
    if _session is None:
        raise RuntimeError("no lab was begun on this rank")
    return _session
