"""`kit bench offload`: how fast a job's tensors leave the device and come back, and what is left after many cycles.

The plain copies that a move is compared with are of the same bytes and take turns with it in the same processes. A ratio is
of times: 1.43 times memcpy's time is 0.7 of its speed. Ranks import this package too, so that it asks for little.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kit.bench.cost import Cost
from kit.bench.offload import lab, tensors

if TYPE_CHECKING:
    from kit.bench.session import Part, Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    models: tuple[str, ...] = ("125m", "qwen2.5-0.5b")
    trials: int = 2  # fresh processes for each model: as many first cycles
    cycles: int = 5  # steady ones in each trial
    leak_cycles: int = 20
    grid: tuple[str, ...] = tuple(lab.GRID)


QUICK = Sizes(models=("125m",), trials=1, cycles=3, leak_cycles=5, grid=("tp2", "dp2 with the distributed optimizer"))


def parts(session: Session, sizes: Sizes) -> dict[str, Part]:
    made: dict[str, Part] = {}
    for model in sizes.models:
        made[f"tensors.{model}"] = partial(tensors.rows, session, model, trials=sizes.trials, cycles=sizes.cycles)
    for model in sizes.models:
        made[f"saver.{model}"] = partial(tensors.saved, session, model, trials=sizes.trials, cycles=sizes.cycles)
    made["leaks"] = partial(lab.leaks, session, cycles=sizes.leak_cycles)
    for name in sizes.grid:
        made[f"bitwise.{slug(name)}"] = partial(lab.bitwise, session, name)
    return made


def costs(sizes: Sizes) -> dict[str, Cost]:
    made: dict[str, Cost] = {}
    for model in sizes.models:
        copies = tensors.gib(model) * sizes.trials * (12 + 4 * sizes.cycles)
        made[f"tensors.{model}"] = Cost(megatron=1, job=1.5 * sizes.trials, step=15 * sizes.trials, copy=copies)
        made[f"saver.{model}"] = Cost()
    made["leaks"] = lab.cost(ranks=4, cycles=sizes.leak_cycles)
    for name in sizes.grid:
        made[f"bitwise.{slug(name)}"] = lab.cost(ranks=lab.GRID[name]["ranks"], cycles=2)
    return made


def slug(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")
