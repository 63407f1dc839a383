"""Steps that are cut beside plain ones: their time, their memory, and what the experts' loss and the metrics cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kit.bench.report import progress
from kit.bench.rows import Row, row
from kit.labs.split.config import SplitConfig, model_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kit.bench.session import Session
    from kit.world import World

ONRANKS = "kit.bench.split.onranks"
RANKS = 2
WHOLE, IN_FIVE, MEMORY, METRICS = 1.02, 1.05, 1.01, 1.15
WARM = 1  # turn before the first that is timed
LONG_ENOUGH = 0.3  # seconds of a step whose ratios say something
SLOW = 1800.0  # for a call that makes all turns, on a busy machine
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The model, and one data rank's rows of a step."""

    size: str = "125m"
    layers: int = 1
    length: int = 32
    micro_batch: int = 1
    microbatches: int = 5

    def weight(self) -> float:
        """Its step, in steps of the tiny job of the offload lab. Of 125m most goes to the vocabulary, whatever the tokens."""
        if self.size == "tiny":
            return 1 + self.microbatches * self.micro_batch * self.length / 1100
        return 15 + 2.4 * self.microbatches * self.micro_batch * self.length / 32

    def told(self) -> str:
        rows = f"{self.microbatches} microbatches of {self.micro_batch} x {self.length}"
        return f"{self.size}, {self.layers} layers, {rows}"


def ranks(session: Session) -> World:
    """Fresh processes for each part: a job leaves its groups."""
    return session.fresh(RANKS, preload=("megatron.core",), timeout_s=SLOW)


def called(chunks: int) -> str:
    return f"{'every microbatch its own call' if chunks == 0 else f'{chunks} calls' if chunks > 1 else '1 call'}"


def slowest(answers: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each way; a step took what its slowest rank took."""
    ways = answers[0]["seconds"]
    return {way: [max(each) for each in zip(*(one["seconds"][way] for one in answers), strict=True)] for way in ways}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Turn by turn: what disturbs the machine disturbs both."""
    return [a / b for a, b in zip(above, below, strict=True)]


def plain_rows(what: str, seconds: dict[str, list[float]], apart: float) -> list[Row]:
    plain = seconds["plain"]
    note = f"losses and norms of all these steps are within {apart:.1g} of each other"
    times = row(f"{what}: a step", plain, who="plain", note=note)
    if times.median is not None and times.median < LONG_ENOUGH:
        times = row(
            f"{what}: a step", plain, who="plain", note=f"{note}; shorter than {LONG_ENOUGH:g} s: of little worth"
        )
    control = row(f"{what}: plain over plain, the empty control", ratios(seconds["plain again"], plain), unit="x")
    return [times, control]


def times(session: Session, job: Job, backend: str, *, rounds: int) -> list[Row]:
    """On data ranks alone."""
    what = f"{backend} dp{RANKS}, {job.told()}"
    progress(what)
    world = ranks(session)
    answers = world.call(
        f"{ONRANKS}:steps", job={**asdict(job), "ranks": RANKS, "backend": backend}, chunks=[1, 5], rounds=rounds
    )
    seconds = slowest(answers)
    return [
        *plain_rows(what, seconds, answers[0]["apart"]),
        *(
            row(
                f"{what}: {called(count)} over plain",
                ratios(seconds[str(count)], seconds["plain"]),
                unit="x",
                limit=limit,
            )
            for count, limit in ((1, WHOLE), (5, IN_FIVE))
        ),
    ]


def bubbles(session: Session, job: Job, *, rounds: int) -> list[Row]:
    """On two pipeline stages. Theory is of stages that take alike, and of the passes alone."""
    what = f"megatron pp{RANKS}, {job.told()}"
    progress(what)
    settings = {**asdict(job), "ranks": RANKS, "pp": RANKS}
    cuts = [1, 2, *([5] if job.microbatches > 5 else []), 0]
    world = ranks(session)
    answers = world.call(f"{ONRANKS}:steps", job=settings, chunks=cuts, rounds=rounds)
    seconds = slowest(answers)
    first = share_of_first_stage(job)
    made = plain_rows(what, seconds, answers[0]["apart"])
    for count in cuts:
        pieces = count or job.microbatches
        alike, unlike = theory(job.microbatches, pieces), theory(job.microbatches, pieces, first)
        made.append(
            row(
                f"{what}: {called(count)} over plain",
                ratios(seconds[str(count)], seconds["plain"]),
                unit="x",
                ceiling=alike,
                note=f"bubbles of stages that take alike give {alike:.3f}, of these ({first:.0%} in the first) {unlike:.3f}; "
                "the step has reduction and update in it, which have none",
            )
        )
    return made


def theory(microbatches: int, chunks: int, first: float = 0.5) -> float:
    """The passes of a step in so many chunks over those in one, on two stages. The longer stage never waits within a chunk, and
    waits for the shorter one once in each; for stages alike this is (M + c (p - 1)) / (M + p - 1)."""
    short, long = sorted((first, 1 - first))
    return (microbatches * long + chunks * short) / (microbatches * long + short)


def share_of_first_stage(job: Job) -> float:
    """Of the multiplications of both: the last one has the vocabulary."""
    g = model_config(SplitConfig(**asdict(job))).geometry
    head = g.hidden // g.heads
    layer = g.hidden * (2 * g.hidden + 2 * g.kv_heads * head) + 3 * g.hidden * g.ffn
    half = g.layers // RANKS * layer
    return half / (2 * half + g.hidden * g.vocab)


def experts(session: Session, job: Job, *, rounds: int) -> list[Row]:
    """What one more pass for the experts' loss costs, where the counts of rows ask for it."""
    what = f"megatron ep{RANKS}, 4 experts, {job.told()}"
    progress(what)
    settings = {**asdict(job), "ranks": RANKS, "ep": RANKS, "experts": 4, "reduce": "mean"}
    world = ranks(session)
    answers = world.call(f"{ONRANKS}:experts", job=settings, rounds=rounds)
    seconds, passes = slowest(answers), answers[0]["passes"]
    note = f"{passes['corrected']} forward passes of a microbatch against {passes['uncorrected']}"
    return [
        *plain_rows(what, seconds, answers[0]["apart"]),
        row(f"{what}: uncorrected over plain", ratios(seconds["uncorrected"], seconds["plain"]), unit="x"),
        row(
            f"{what}: corrected over uncorrected",
            ratios(seconds["corrected"], seconds["uncorrected"]),
            unit="x",
            note=note,
        ),
    ]


def memory(session: Session, job: Job, backend: str, *, trials: int, times: int) -> Iterator[Row]:
    """Peaks in fresh processes, each with one way of stepping; trials are pairs, and the larger rank speaks for both."""
    what = f"{backend} dp{RANKS}, {job.told()}: peak"
    settings = {**asdict(job), "ranks": RANKS, "backend": backend}
    ways: dict[str, int | None] = {"plain": None, "plain again": None, "1": 1, "5": 5}
    seen: dict[str, list[float]] = {name: [] for name in ways}
    world = ranks(session)
    for trial in range(trials):
        for name, chunks in ways.items():
            progress(f"{what}, {name}, {trial + 1} of {trials}")
            seen[name].append(max(world.call(f"{ONRANKS}:peak", job=settings, chunks=chunks, steps=times)))
            world.restart()
        yield from peaks(what, seen)


def peaks(what: str, seen: dict[str, list[float]]) -> list[Row]:
    mib = [value / MIB for value in seen["plain"]]
    return [
        row(what, mib, who="plain", unit="MiB", note="of the process that has most"),
        row(f"{what}, plain over plain, the empty control", ratios(seen["plain again"], seen["plain"]), unit="x"),
        *(
            row(f"{what}, {called(count)} over plain", ratios(seen[str(count)], seen["plain"]), unit="x", limit=MEMORY)
            for count in (1, 5)
        ),
    ]


def losses(session: Session, *, shape: tuple[int, int], rounds: int) -> list[Row]:
    """Every recipe, with its metrics over bare; on the host on one thread."""
    what = f"loss at {list(shape)}, forward and backward"
    progress(what)
    alone = {"OMP_NUM_THREADS": "1"}
    with session.world(1, env=alone, preload=("megatron.core",), timeout_s=SLOW) as world:
        (seen,) = world.call(f"{ONRANKS}:losses", rows=shape[0], length=shape[1], rounds=rounds)
    made = []
    for recipe, seconds in seen.items():
        bare = row("", [1e3 * value for value in seconds["bare"]])
        note = f"bare {bare.median:.2f} ms ({bare.low:.2f} to {bare.high:.2f})"
        over = ratios(seconds["metrics"], seconds["bare"])
        made.append(row(f"{what}, {recipe}: with metrics over bare", over, unit="x", limit=METRICS, note=note))
    return made
