"""The parts of the bench of the split step: what is measured, and what becomes a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from kit.labs.bench import Bench, Part, Samples, ratios, run_part, show_progress
from kit.labs.lab import Drive
from kit.labs.split.lab import SplitConfig, model_config
from kit.machine import MIB

Config = dict[str, Any]
Seconds = dict[str, list[float]]
STEPS = "kit.labs.bench_split.ranks.steps"
RANKS = 2
LONG_ENOUGH = 0.3  # seconds; ratios of shorter steps are too noisy
SLOW = 1800.0  # seconds; time limit of a call with all turns on a busy machine
WORLD: Config = {"preload": ("megatron.core",), "timeout_s": SLOW}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitJob:
    """The model, and one data rank's rows of a step."""

    size: str = "125m"
    layers: int = 1
    length: int = 32
    micro_batch: int = 1
    microbatches: int = 5

    def describe(self) -> str:
        rows = f"{self.microbatches} microbatches of {self.micro_batch} x {self.length}"
        return f"{self.size}, {self.layers} layers, {rows}"


ON_GPU = SplitJob(layers=12, length=512)


def job_of(bench: Bench, *, pipeline: bool = False) -> SplitJob:
    config = bench.config
    if bench.device != "cpu":
        return replace(ON_GPU, microbatches=10) if pipeline else ON_GPU
    return SplitJob(
        size=config.size,
        layers=config.pipeline_layers if pipeline else config.layers,
        length=config.length,
        micro_batch=config.micro_batch,
        microbatches=config.pipeline_microbatches if pipeline else config.microbatches,
    )


def chunks_title(chunks: int) -> str:
    return "every microbatch its own call" if chunks == 0 else f"{chunks} call{'s' * (chunks > 1)}"


def slowest(answers: Sequence[dict[str, Any]]) -> Seconds:
    """Seconds of each way; a step takes as long as its slowest rank."""
    ways = answers[0]["seconds"]
    of_way = {way: zip(*(answer["seconds"][way] for answer in answers), strict=True) for way in ways}
    return {way: [max(turn) for turn in turns] for way, turns in of_way.items()}


def ask_ranks(
    bench: Bench, title: str, function: str, job: SplitJob, layout: Config, **arguments: Any
) -> tuple[Seconds, dict[str, Any]]:
    """Seconds of each way on the slowest rank, and the first rank's whole answer. Fresh processes, because a job leaves its groups."""
    show_progress(title)
    settings = {**asdict(job), "ranks": RANKS, **layout}
    with bench.world(RANKS, **WORLD) as world:
        answers = world.call(f"{STEPS}:{function}", job=settings, rounds=bench.config.rounds, **arguments)
    return slowest(answers), answers[0]


def plain_rows(title: str, seconds: Seconds, apart: float) -> Iterator[Samples]:
    plain = seconds["plain"]
    note = f"losses and norms of all these steps agree within {apart:.1g}"
    if statistics.median(plain) < LONG_ENOUGH:
        note += f"; shorter than {LONG_ENOUGH:g} s, so ratios are noisy"
    yield Samples(what=f"{title}: a step", values=plain, who="plain", note=note)
    yield ratios("plain_over_plain", f"{title}: plain over plain, the empty control", seconds["plain again"], plain)


def data_rank_times(bench: Bench, backend: str) -> Iterator[Samples]:
    """On data ranks only."""
    job = job_of(bench)
    title = f"{backend} dp{RANKS}, {job.describe()}"
    seconds, first = ask_ranks(bench, title, "way_seconds", job, {"backend": backend}, chunks=[1, 5])
    yield from plain_rows(title, seconds, first["apart"])
    for count, rule in ((1, "whole_over_plain"), (5, "five_over_plain")):
        yield ratios(rule, f"{title}: {chunks_title(count)} over plain", seconds[str(count)], seconds["plain"])


def bubbles(bench: Bench) -> Iterator[Samples]:
    """On two pipeline stages. The theory assumes equal stages and covers only the passes."""
    job = job_of(bench, pipeline=True)
    title = f"megatron pp{RANKS}, {job.describe()}"
    cuts = [1, 2, *([5] if job.microbatches > 5 else []), 0]
    seconds, answer = ask_ranks(bench, title, "way_seconds", job, {"pp": RANKS}, chunks=cuts)
    first = share_of_first_stage(job)
    yield from plain_rows(title, seconds, answer["apart"])
    for count in cuts:
        pieces = count or job.microbatches
        alike, unlike = theory(job.microbatches, pieces), theory(job.microbatches, pieces, first)
        note = (
            f"theory: {alike:.3f} with equal stages, {unlike:.3f} with these ({first:.0%} in the first); "
            "the step also includes reduction and update, which have no bubbles"
        )
        about: Config = {"ceiling": alike, "note": note}
        words = f"{title}: {chunks_title(count)} over plain"
        yield ratios("pipelined_over_plain", words, seconds[str(count)], seconds["plain"], **about)


def theory(microbatches: int, chunks: int, first: float = 0.5) -> float:
    """Time of a step's passes in several chunks over that in one, on two stages. The longer stage never waits within a chunk and waits
    for the shorter one once per chunk; for equal stages this is (M + c (p - 1)) / (M + p - 1)."""
    short, long = sorted((first, 1 - first))
    return (microbatches * long + chunks * short) / (microbatches * long + short)


def share_of_first_stage(job: SplitJob) -> float:
    """The first stage's share of multiplications; the last stage has the vocabulary."""
    g = model_config(SplitConfig(**asdict(job))).geometry
    head = g.hidden // g.heads
    layer = g.hidden * (2 * g.hidden + 2 * g.kv_heads * head) + 3 * g.hidden * g.ffn
    half = g.layers // RANKS * layer
    return half / (2 * half + g.hidden * g.vocab)


def expert_passes(bench: Bench) -> Iterator[Samples]:
    """The cost of an extra pass for the experts' loss, if the counts of rows require it."""
    job = job_of(bench)
    title = f"megatron ep{RANKS}, 4 experts, {job.describe()}"
    seconds, answer = ask_ranks(bench, title, "experts", job, {"ep": RANKS, "experts": 4, "reduce": "mean"})
    note = "{corrected} forward passes of a microbatch against {uncorrected}".format(**answer["passes"])
    yield from plain_rows(title, seconds, answer["apart"])
    words = f"{title}: uncorrected over plain"
    yield ratios("uncorrected_over_plain", words, seconds["uncorrected"], seconds["plain"])
    words = f"{title}: corrected over uncorrected"
    yield ratios("corrected_over_uncorrected", words, seconds["corrected"], seconds["uncorrected"], note=note)


def step_peaks(bench: Bench, backend: str) -> Iterator[Samples]:
    """Peaks in fresh processes, each with one way of stepping; trials are pairs; the larger rank counts."""
    job, trials = job_of(bench), bench.config.trials
    title = f"{backend} dp{RANKS}, {job.describe()}: peak"
    asked = {"job": {**asdict(job), "ranks": RANKS, "backend": backend}, "steps": bench.config.peak_steps}
    ways: dict[str, int | None] = {"plain": None, "plain again": None, "1": 1, "5": 5}
    with bench.world(RANKS, **WORLD) as world:
        for trial in range(trials):
            bytes_of = {}
            for name, chunks in ways.items():
                show_progress(f"{title}, {name}, {trial + 1} of {trials}")
                bytes_of[name] = [float(max(world.call(f"{STEPS}:peak", **asked, chunks=chunks)))]
                world.restart()
            yield from peaks(title, bytes_of)


def peaks(title: str, bytes_of: dict[str, list[float]]) -> Iterator[Samples]:
    plain = bytes_of["plain"]
    about: Config = {"who": "plain", "unit": "MiB", "note": "of the process that has most"}
    yield Samples(what=title, values=[size / MIB for size in plain], metric="peak", **about)
    yield ratios("plain_over_plain", f"{title}, plain over plain, the empty control", bytes_of["plain again"], plain)
    for count in (1, 5):
        yield ratios("peak_over_plain", f"{title}, {chunks_title(count)} over plain", bytes_of[str(count)], plain)


def loss_times(bench: Bench) -> Iterator[Samples]:
    """Every recipe: with metrics over bare; on the host, on one thread."""
    config = bench.config
    title = f"loss at {[config.loss_rows, config.loss_length]}, forward and backward"
    sizes = {"rows": config.loss_rows, "length": config.loss_length, "rounds": config.loss_rounds}
    with bench.world(1, env={"OMP_NUM_THREADS": "1"}, **WORLD) as world:
        (answer,) = world.call(f"{STEPS}:losses", **sizes)
    for recipe, seconds in answer.items():
        low, middle, high = (1e3 * ends(seconds["bare"]) for ends in (min, statistics.median, max))
        note = f"bare {middle:.2f} ms ({low:.2f} to {high:.2f})"
        words = f"{title}, {recipe}: with metrics over bare"
        yield ratios("metrics_over_bare", words, seconds["metrics"], seconds["bare"], note=note)


PARTS: dict[str, Part] = {
    "steps.megatron": partial(data_rank_times, backend="megatron"),
    "steps.pipeline": bubbles,
    "steps.fsdp2": partial(data_rank_times, backend="fsdp2"),
    "steps.experts": expert_passes,
    "losses": loss_times,
    "memory.megatron": partial(step_peaks, backend="megatron"),
    "memory.fsdp2": partial(step_peaks, backend="fsdp2"),
}


def measure_split(drive: Drive) -> None:
    run_part(drive, PARTS[drive.phase])
