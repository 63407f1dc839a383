"""`kit bench limits`: how near the predictions of `kit reference` are. Parts run, and their seconds are compared with the predicted ones.

This box's factor is measured first. A row is the larger of measured over predicted and its inverse, so that 1 is exact. On the CPU: the
seconds for a GPU are assumed until one has run a reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

from kit import doctor
from kit.bench.reference import Part, bench, is_settled, lab, on_cpu, perform, scale
from kit.bench.session import row, unmeasured
from kit.preflight.run import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kit.bench.session import Row, Session

WITHIN = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Which parts of a reference, or some like them."""

    parts: tuple[Part, ...] = field(default_factory=on_cpu)


QUICK = Sizes(
    parts=(
        next(part for part in on_cpu() if part.name == "lab-smoke"),
        next(part for part in on_cpu() if part.name == "lab-sync"),
        lab("split", 13, steps=2, chunks=[1, 5], level="tokens"),
        bench("release", 7, "groups.own", quick=True),
        bench("split", 10, "steps.megatron", quick=True),
    )
)


def parts(sizes: Sizes, _: str) -> Mapping[str, Callable[[Session], Iterator[Row]]]:
    factor = cache(lambda: scale(measure(doctor.examine(), "cpu"), "cpu")[0])
    return {part.name: partial(against, part=part, factor=factor) for part in sizes.parts}


def against(session: Session, part: Part, factor: Callable[[], float]) -> Iterator[Row]:
    times = factor()
    predicted = times * part.seconds
    ended = perform(session.logs / "reference", part, part.limit(times), predicted)
    if ended["timed_out"] or not is_settled(ended):
        yield unmeasured(part.name, f"{ended['state']}: {ended['complaint']}")
        return
    over = ended["seconds"] / predicted
    note = f"took {ended['seconds']:.1f} s, predicted {predicted:.1f} s"
    ids = {"part": part.name, "seconds": ended["seconds"], "predicted": round(predicted, 1)}
    what = f"{part.name}: measured against predicted"
    yield row(what, [max(over, 1 / over)], unit="x", limit=WITHIN, note=note, ids=ids)
