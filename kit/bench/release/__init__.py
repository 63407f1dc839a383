"""`kit bench release`: ways of giving communicators back, side by side, by the number of groups and of ranks.

Ways take turns, each in fresh ranks, since two of them leave groups behind. A time is the slowest rank's; what is given back the
least of any rank's, and what is left at the end the most. Each row names the mechanism that made its communicators again, and ways are
judged against ways with the same one. Ranks import this package too, so that it asks for little.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kit.bench.cost import Cost, crowd
from kit.bench.release import ways
from kit.bench.release.ways import table

if TYPE_CHECKING:
    from kit.bench.session import Part, Session

__all__ = ["QUICK", "Sizes", "costs", "parts", "table"]

OWN = 22  # about as many groups as Megatron makes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    groups: tuple[int, ...] = (0, 40, 80)  # 0: as many as Megatron makes
    ranks: int = 2  # of these
    more_ranks: tuple[int, ...] = (4, 8)  # with as many groups as Megatron makes
    trials: int = 3  # fresh ranks for each way and number
    cycles: int = 3  # in each


QUICK = Sizes(groups=(0, 40), more_ranks=(), trials=1, cycles=2)


def parts(session: Session, sizes: Sizes) -> dict[str, Part]:
    few = {"trials": sizes.trials, "cycles": sizes.cycles}
    made: dict[str, Part] = {}
    for total in sizes.groups:
        made[f"groups.{total or 'own'}"] = partial(ways.rows, session, sizes.ranks, total, **few)
    for more in sizes.more_ranks:
        made[f"ranks.{more}"] = partial(ways.rows, session, more, 0, most_a_gpu=sizes.ranks, **few)
    return made


def costs(sizes: Sizes) -> dict[str, Cost]:
    """Ranks are fresh for each trial of each way. Making a group and giving it back are one primitive."""

    def part(ranks: int, total: int) -> Cost:
        rounds = len(ways.WAYS) * sizes.trials
        once = Cost(job=1.2) + Cost(group=(total or OWN) * sizes.cycles)
        return (Cost(megatron=1) + once * rounds) * crowd(ranks)

    made = {f"groups.{total or 'own'}": part(sizes.ranks, total) for total in sizes.groups}
    return made | {f"ranks.{more}": part(more, 0) for more in sizes.more_ranks}
