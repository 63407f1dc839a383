"""`kit bench routing`: the offload lab with collectives through torch's own backends and through torchcomms, turn by turn.

The results of the job (losses, gradient norms, a digest of all tensors) must be bit-identical; a time is a ratio, on over off. Each run has
fresh ranks. Where routing has no effect, nothing is measured and the rows say why.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kit.bench.session import Part, Row, Session, progress, row, unmeasured
from kit.routing import FLAG

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.results import Run

WAYS = ("torch", "torchcomms")
PHASES = ("build", "train", "release", "reload", "talk")
NUMBERS = "losses, gradient norms and digests that differ, on against off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    turns: int = 5
    cycles: int = 3


QUICK = Sizes(turns=1, cycles=1)


def parts(sizes: Sizes, _: str) -> dict[str, Part]:
    return {"offload": partial(offload, sizes=sizes)}


def offload(session: Session, sizes: Sizes) -> Iterator[Row]:
    with session.world(1, env={FLAG: "1"}) as world:
        said = world.call("kit.routing:describe")[0]
    yield from side_by_side(session, sizes) if said["effective"] else not_measured(str(said["why"]))


def not_measured(why: str) -> list[Row]:
    times = [unmeasured(f"{phase}, time on over off", why, unit="ratio") for phase in PHASES]
    return [unmeasured(NUMBERS, why, unit="1", limit=0.0), *times]


def side_by_side(session: Session, sizes: Sizes) -> Iterator[Row]:
    """After each turn the rows of all turns so far."""
    from kit.results import outcomes  # here, since the ranks' interpreter need not have what tables are made of

    differ = 0
    ratios: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(sizes.turns):
        progress(f"offload through torch and through torchcomms, turn {turn + 1} of {sizes.turns}")
        order = WAYS if turn % 2 == 0 else WAYS[::-1]  # so that neither way profits from its place
        runs = {way: once(session, session.logs / f"{turn}-{way}", way, sizes) for way in order}
        off, on = (runs[way] for way in WAYS)
        if missed := [row.why for row in on.verdict() if row.check == "routing_effective" and not row.passed]:
            yield from not_measured(missed[0])
            return
        compared, found = outcomes(off, on)
        if not compared:
            yield from not_measured("the runs came to no number that could be compared")
            return
        differ += found  # over all turns: one is enough
        note = f"{compared} numbers in each turn; turns: {turn + 1}"
        yield row(NUMBERS, [float(differ)], unit="1", limit=0.0, note=note)
        for phase, some in ratios.items():
            some.append(seconds(on, phase) / seconds(off, phase))
            yield row(f"{phase}, time on over off", some, unit="ratio")


def once(session: Session, out: Path, way: str, sizes: Sizes) -> Run:
    return session.lab("offload", out, routing=way, cycles=sizes.cycles, steps=1)


def seconds(run: Run, phase: str) -> float:
    """All cycles of a phase, by the slowest rank of each."""
    frame = run.frame()
    taken = frame[(frame["phase"] == phase) & (frame["metric"] == "seconds")]
    return float(taken.groupby("cycle")["value"].max().sum())
