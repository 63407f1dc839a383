"""`kit bench release`: ways of giving communicators back, side by side, by the number of groups and of ranks.

Ways take turns, each in fresh ranks, since two of them leave groups behind. A time is the slowest rank's; what is given back the
least of any rank's, and what is left at the end the most. Ranks import this package too, so that it asks for little.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from kit.bench.release import ways
from kit.bench.report import tell
from kit.bench.rows import Row
from kit.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    groups: tuple[int, ...] = (0, 40, 80)  # 0: as many as Megatron makes
    ranks: int = 2  # of these
    more_ranks: tuple[int, ...] = (4, 8)  # with as many groups as Megatron makes
    trials: int = 3  # fresh ranks for each way and number
    cycles: int = 3  # in each


QUICK = Sizes(groups=(0, 40), more_ranks=(), trials=1, cycles=2)


def main(as_json: bool, sizes: Sizes = Sizes()) -> int:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch:
        logs = Path(scratch)
        with World(1, logs=logs) as world:
            provenance = world.call("kit.measure:provenance")[0]
            cards = len(provenance["gpu"]["gpus"]) if world.device.startswith("cuda") else None
        try:
            for ranks, totals in ((sizes.ranks, sizes.groups), *((more, (0,)) for more in sizes.more_ranks)):
                if cards is not None and ranks > max(cards, sizes.ranks):
                    rows.append(Row(what=f"groups, {ranks} ranks", note=f"not measured: there are {cards} cards"))
                    continue
                ways.measure(rows, ranks, totals, logs, trials=sizes.trials, cycles=sizes.cycles)
        except KeyboardInterrupt:  # what was measured before is told
            rows.append(Row(what="the rest", note="not measured: interrupted"))
    tell("release", rows, provenance, as_json=as_json, shown=ways.table(rows))
    return 0
