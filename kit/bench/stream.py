"""`kit bench stream`: what asynchrony gains over the plain loop, against what it could gain; what the recomputation can tell.

Ranks are paced: they wait for each token and each trained sample, as they would with a larger model, so that the loop is measured and not
how ranks share this machine's cores. Every row is of one run of the lab, plain loop and stream beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.bench.session import Row, Session, progress, row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kit.results import Run

RANKS: dict[str, Any] = {"ranks": 3, "replicas": 2, "groups": 4, "group": 4}
DECIDABLE = 10_000  # tokens that the stamps are judged by
# A sample has 16 tokens, and a replica writes 4 of all its samples in a call: as long as a step of 16 samples trains.
PACED: dict[str, Any] = {**RANKS, "answer": (16, 16), "decode": 4, "pace_ms": 60.0, "train_pace_ms": 60.0, "window": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    steps: int = 5
    paced_steps: int = 9
    decidable: int = DECIDABLE


QUICK = Sizes(steps=2, paced_steps=3, decidable=100)


def parts(sizes: Sizes, _: str) -> dict[str, Callable[[Session], Iterator[Row]]]:
    return {part.__name__: partial(part, sizes=sizes) for part in (lockstep, stamps, paced)}


def lockstep(session: Session, sizes: Sizes) -> Iterator[Row]:
    progress("lockstep beside plain")
    run = session.lab("stream", session.logs / "lockstep", **RANKS, steps=sizes.steps)
    answer = next(each for each in run.verdict() if each.check == "equals_plain")
    yield row(
        "outcomes of the loop with staleness 0 that differ from the plain loop",
        [] if answer.measured is None else [answer.measured],
        unit="1",
        limit=0.0,
        note=answer.why,
    )


def stamps(session: Session, sizes: Sizes) -> Iterator[Row]:
    """Runs with another seed each, until enough tokens were decidable."""
    from kit.labs.stream.checks import verified  # here, as what tables are made of is not the ranks' to have

    total: dict[str, float] = {}
    turn = 0
    while total.get("decidable", 0.0) < sizes.decidable:
        progress(f"stamps, run {turn + 1}: {total.get('decidable', 0.0):.0f} of {sizes.decidable} decidable tokens")
        run = session.lab("stream", session.logs / f"stamps-{turn}", **RANKS, steps=sizes.steps, seed=1234 + turn)
        found = verified(run.frame())
        total = {name: total.get(name, 0.0) + value for name, value in found.items()}
        turn += 1
        note = f"{total['tokens']:.0f} tokens of {total['samples']:.0f} samples in {turn} runs"
        yield row("wrong stamps among decidable tokens", [total["wrong_stamps"]], unit="1", limit=0.0, note=note)
        yield share("undecidable tokens", 1 - total["decidable"] / total["tokens"], 0.5, note)
        yield share("samples without a sync inside", 1 - total["samples_over_syncs"] / total["samples"], 0.9, note)
        yield share(
            "wrong stamps of a control that were not found", 1 - total["shuffled_found"] / total["shuffled"], 0.01, note
        )


def share(what: str, value: float, limit: float, note: str) -> Row:
    return row(f"share of {what}", [value], unit="ratio", limit=limit, note=note)


def paced(session: Session, sizes: Sizes) -> Iterator[Row]:
    """K steps whose generation takes as long as their training: at best 2K / (K + 1) times as fast as one after the other."""
    steps = sizes.paced_steps
    progress(f"{steps} paced steps, plain and streamed")
    run = session.lab("stream", session.logs / "paced", **PACED, steps=steps)
    taken = seconds(run)
    gain, possible = taken["plain"] / taken["stream"], 2 * steps / (steps + 1)
    note = f"K={steps}, window 1, plain {taken['plain']:.1f} s, streamed {taken['stream']:.1f} s; paced: no times of a product"
    yield row("possible over reached speed-up of streaming", [possible / gain], unit="ratio", limit=1 / 0.9, note=note)


def seconds(run: Run) -> Mapping[str, float]:
    """Of each loop, by the slowest rank."""
    frame = run.frame()
    rows = frame[frame["metric"] == "seconds"]
    found: dict[Any, float] = rows.groupby("phase")["value"].max().to_dict()
    return found
