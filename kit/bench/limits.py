"""`kit bench limits`: how near the arithmetic of `kit reference` is: parts are run, and what they took is held against what was predicted.

The pace is measured first, and all parts are run with it. A row is the larger of measured over predicted and its inverse, so that 1 is
exact, and tells both. On the CPU: what a GPU takes is not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kit.bench import pace
from kit.bench.reference import bench, is_settled, lab, on_cpu, perform, split
from kit.bench.rows import Row, row, unmeasured
from kit.bench.session import Part, Session

if TYPE_CHECKING:
    from kit.bench.pace import Pace
    from kit.bench.reference import Part as Referenced

WITHIN = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Which parts of a reference, or some like them."""

    parts: tuple[Referenced, ...] = field(default_factory=on_cpu)


QUICK = Sizes(
    parts=(
        next(part for part in on_cpu() if part.name == "lab-smoke"),
        split("split", 6, steps=2, chunks=[1, 5], level="tokens"),
        lab("sync", cost=next(part for part in on_cpu() if part.name == "lab-sync").cost, cycles=3),
        bench("release", "groups.own", quick=True),
        bench("split", "steps.megatron", quick=True),
    )
)


def parts(sizes: Sizes, _: str) -> dict[str, Part]:
    measured: list[Pace] = []

    def held(session: Session, part: Referenced) -> list[Row]:
        if not measured:
            measured.append(pace.measure("cpu"))
        return against(session, part, measured[0])

    return {part.name: Part(partial(held, part=part), part.cost) for part in sizes.parts}


def against(session: Session, part: Referenced, at: Pace) -> list[Row]:
    predicted = part.cost.seconds(at)
    told = perform(session.logs / "reference", part, part.cost.limit(at), predicted)
    if told["timed_out"] or not is_settled(told):
        return [unmeasured(part.name, f"{told['state']}: {told['complaint']}")]
    over = told["seconds"] / predicted
    note = f"took {told['seconds']:.1f} s, predicted {predicted:.1f} s"
    ids = {"part": part.name, "seconds": told["seconds"], "predicted": round(predicted, 1)}
    what = f"{part.name}: measured against predicted"
    return [row(what, [max(over, 1 / over)], unit="x", limit=WITHIN, note=note, ids=ids)]
