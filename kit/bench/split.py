"""`kit bench split`: the cost of a split step compared with the plain one.

Both ways use the same job and rows and take turns in changing order; ratios are taken turn by turn. Plain over plain is the empty
control: it shows how far a ratio differs from 1 by chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from kit.bench.session import Bench, Part, Row, Session, over, progress, row
from kit.labs.split.lab import SplitConfig, model_config
from kit.world import World

Config = dict[str, Any]
Seconds = dict[str, list[float]]
ONRANKS = "kit.bench.onranks.jobs"
RANKS = 2
WHOLE, IN_FIVE, MEMORY, METRICS = 1.02, 1.05, 1.01, 1.15
LONG_ENOUGH = 0.3  # seconds; ratios of shorter steps are too noisy
SLOW = 1800.0  # seconds; time limit of a call with all turns on a busy machine
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The model, and one data rank's rows of a step."""

    size: str = "125m"
    layers: int = 1
    length: int = 32
    micro_batch: int = 1
    microbatches: int = 5

    def describe(self) -> str:
        rows = f"{self.microbatches} microbatches of {self.micro_batch} x {self.length}"
        return f"{self.size}, {self.layers} layers, {rows}"


SHORT = Job(size="tiny", layers=4, length=256, micro_batch=2)  # about a third of a second on two cores
ON_GPU = Job(layers=12, length=512)  # a small one would not fill a GPU


def parts(
    device: str,
    *,
    job: Job = Job(),
    pipeline: Job = Job(layers=2, microbatches=10),
    rounds: int = 10,
    trials: int = 1,
    peak_steps: int = 3,
    loss: tuple[int, int] = (8, 4096),
    loss_rounds: int = 22,
) -> dict[str, Part]:
    """Rounds are even, so turns are evenly distributed. `trials` are fresh processes for each way of stepping, to measure its peak."""
    if device != "cpu":
        job, pipeline = ON_GPU, replace(ON_GPU, microbatches=10)
    peaks = partial(memory, job=job, trials=trials, times=peak_steps)
    return {
        "steps.megatron": partial(times, job=job, backend="megatron", rounds=rounds),
        "steps.pipeline": partial(bubbles, job=pipeline, rounds=rounds),
        "steps.fsdp2": partial(times, job=job, backend="fsdp2", rounds=rounds),
        "steps.experts": partial(experts, job=job, rounds=rounds),
        "losses": partial(losses, shape=loss, rounds=loss_rounds),
        "memory.megatron": partial(peaks, backend="megatron"),
        "memory.fsdp2": partial(peaks, backend="fsdp2"),
    }


def ranks(session: Session) -> World:
    """Fresh processes for each part, because a job leaves its groups behind."""
    return session.shared(RANKS, fresh=True, preload=("megatron.core",), timeout_s=SLOW)


def called(chunks: int) -> str:
    return "every microbatch its own call" if chunks == 0 else f"{chunks} call{'s' * (chunks > 1)}"


def slowest(answers: Sequence[dict[str, Any]]) -> Seconds:
    """Seconds of each way; a step takes as long as its slowest rank."""
    ways = answers[0]["seconds"]
    return {way: [max(each) for each in zip(*(one["seconds"][way] for one in answers), strict=True)] for way in ways}


def asked(
    session: Session, what: str, function: str, job: Job, layout: Config, **arguments: Any
) -> tuple[Seconds, dict[str, Any]]:
    """Seconds of each way on the slowest rank, and the first rank's whole answer."""
    progress(what)
    settings = {**asdict(job), "ranks": RANKS, **layout}
    answers = ranks(session).call(f"{ONRANKS}:{function}", job=settings, **arguments)
    return slowest(answers), answers[0]


def plain_rows(what: str, seconds: Seconds, apart: float) -> list[Row]:
    plain = seconds["plain"]
    note = f"losses and norms of all these steps agree within {apart:.1g}"
    if statistics.median(plain) < LONG_ENOUGH:
        note += f"; shorter than {LONG_ENOUGH:g} s, so ratios are noisy"
    times = row(f"{what}: a step", plain, who="plain", note=note)
    return [times, over(f"{what}: plain over plain, the empty control", seconds["plain again"], plain)]


def times(session: Session, *, job: Job, backend: str, rounds: int) -> list[Row]:
    """On data ranks only."""
    what = f"{backend} dp{RANKS}, {job.describe()}"
    seconds, first = asked(session, what, "steps", job, {"backend": backend}, chunks=[1, 5], rounds=rounds)
    limits = {1: WHOLE, 5: IN_FIVE}
    return [
        *plain_rows(what, seconds, first["apart"]),
        *(over(f"{what}: {called(n)} over plain", seconds[str(n)], seconds["plain"], limit=limits[n]) for n in limits),
    ]


def bubbles(session: Session, *, job: Job, rounds: int) -> list[Row]:
    """On two pipeline stages. The theory assumes equal stages and covers only the passes."""
    what = f"megatron pp{RANKS}, {job.describe()}"
    cuts = [1, 2, *([5] if job.microbatches > 5 else []), 0]
    seconds, answer = asked(session, what, "steps", job, {"pp": RANKS}, chunks=cuts, rounds=rounds)
    first = share_of_first_stage(job)
    made = plain_rows(what, seconds, answer["apart"])
    for count in cuts:
        pieces = count or job.microbatches
        alike, unlike = theory(job.microbatches, pieces), theory(job.microbatches, pieces, first)
        note = (
            f"theory: {alike:.3f} with equal stages, {unlike:.3f} with these ({first:.0%} in the first); "
            "the step also includes reduction and update, which have no bubbles"
        )
        about: Config = {"ceiling": alike, "note": note}
        made.append(over(f"{what}: {called(count)} over plain", seconds[str(count)], seconds["plain"], **about))
    return made


def theory(microbatches: int, chunks: int, first: float = 0.5) -> float:
    """Time of a step's passes in several chunks over that in one, on two stages. The longer stage never waits within a chunk and waits
    for the shorter one once per chunk; for equal stages this is (M + c (p - 1)) / (M + p - 1)."""
    short, long = sorted((first, 1 - first))
    return (microbatches * long + chunks * short) / (microbatches * long + short)


def share_of_first_stage(job: Job) -> float:
    """The first stage's share of multiplications; the last stage has the vocabulary."""
    g = model_config(SplitConfig(**asdict(job))).geometry
    head = g.hidden // g.heads
    layer = g.hidden * (2 * g.hidden + 2 * g.kv_heads * head) + 3 * g.hidden * g.ffn
    half = g.layers // RANKS * layer
    return half / (2 * half + g.hidden * g.vocab)


def experts(session: Session, *, job: Job, rounds: int) -> list[Row]:
    """The cost of an extra pass for the experts' loss, if the counts of rows require it."""
    what = f"megatron ep{RANKS}, 4 experts, {job.describe()}"
    layout = {"ep": RANKS, "experts": 4, "reduce": "mean"}
    seconds, answer = asked(session, what, "experts", job, layout, rounds=rounds)
    note = "{corrected} forward passes of a microbatch against {uncorrected}".format(**answer["passes"])
    return [
        *plain_rows(what, seconds, answer["apart"]),
        over(f"{what}: uncorrected over plain", seconds["uncorrected"], seconds["plain"]),
        over(f"{what}: corrected over uncorrected", seconds["corrected"], seconds["uncorrected"], note=note),
    ]


def memory(session: Session, *, job: Job, backend: str, trials: int, times: int) -> Iterator[Row]:
    """Peaks in fresh processes, each with one way of stepping; trials are pairs; the larger rank counts."""
    what = f"{backend} dp{RANKS}, {job.describe()}: peak"
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
    return [
        row(
            what, [value / MIB for value in seen["plain"]], who="plain", unit="MiB", note="of the process that has most"
        ),
        over(f"{what}, plain over plain, the empty control", seen["plain again"], seen["plain"]),
        *(over(f"{what}, {called(n)} over plain", seen[str(n)], seen["plain"], limit=MEMORY) for n in (1, 5)),
    ]


def losses(session: Session, *, shape: tuple[int, int], rounds: int) -> list[Row]:
    """Every recipe: with metrics over bare; on the host, on one thread."""
    what = f"loss at {list(shape)}, forward and backward"
    progress(what)
    env, (rows, length) = {"OMP_NUM_THREADS": "1"}, shape
    with session.world(1, env=env, preload=("megatron.core",), timeout_s=SLOW) as world:
        (seen,) = world.call(f"{ONRANKS}:losses", rows=rows, length=length, rounds=rounds)
    made = []
    for recipe, seconds in seen.items():
        bare = row("", [1e3 * value for value in seconds["bare"]])
        note = f"bare {bare.median:.2f} ms ({bare.low:.2f} to {bare.high:.2f})"
        words = f"{what}, {recipe}: with metrics over bare"
        made.append(over(words, seconds["metrics"], seconds["bare"], limit=METRICS, note=note))
    return made


QUICK: Config = {"job": SHORT, "pipeline": SHORT, "rounds": 4, "peak_steps": 1, "loss": (4, 2048), "loss_rounds": 4}
SPLIT = Bench(parts, QUICK)
