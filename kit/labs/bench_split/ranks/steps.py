"""Steps of a job, whole and in pieces, and losses alone. What is compared takes turns within one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from kit.errors import KitError
from kit.labs.split.lab import RECIPES, Recipe, SplitConfig, model_config
from kit.labs.split.ranks.backends import chunks_of
from kit.measure.phase import device_memory, host_memory_metrics, reset_peaks, seconds_on_device
from kit.measure.turns import turn_by_turn
from kit.megatron import groups, model, split
from kit.train import fsdp
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.options import Settings
from kit.train.plain import initial_weights
from kit.train.protocol import Batch, StepResult

PLAIN, AGAIN = "plain", "plain again"
WORDS = 1000  # a model has 50 to 150 times as many
AT_ONCE = 10  # passes of a loss in one sample: a single one takes about a millisecond
# So small a rate that every step meets the same loss: the ways can be seen to do the same work.
STILL = Settings(lr=1e-12, first_lr=1e-12, last_lr=1e-12)


class Stepper:
    """A job, and the ways to step it."""

    def __init__(self, config: SplitConfig) -> None:
        self.config = config
        wanted = model_config(config)
        self.device = model.initialise(wanted)
        self.plain: Any
        self.pieces: Any
        if config.backend == "fsdp2":
            weights = initial_weights(wanted.geometry, config.seed)
            sharded = fsdp.build_fsdp(wanted.geometry, weights, settings=STILL, device=self.device)
            self.plain, self.pieces = fsdp.FsdpSync(sharded), fsdp.FsdpSplit(sharded)
        else:
            self.job = model.assemble_job(wanted, self.device, STILL)
            self.plain, self.pieces = split.MegatronSync(self.job), split.MegatronSplit(self.job)
        self.loss = ClippedPolicyGradient(**RECIPES["grpo"])
        self.results: dict[str, list[StepResult]] = {}

    def data(self, *, full: bool = False) -> Batch:
        """Rows of this data rank, noise: answers of half a row to a whole one, or whole rows only."""
        vocab = model_config(self.config).geometry.vocab
        count = self.config.microbatches * self.config.micro_batch
        return noise(count, self.config.length, vocab, dist.get_rank(split.data_group()), full=full)

    def way(self, name: str, data: Batch, chunks: int | None) -> Callable[[], None]:
        """A whole step: plain, or in `chunks` calls (0: one per microbatch). The rows are cut beforehand."""
        config, results = self.config, self.results.setdefault(name, [])
        if chunks is None:
            return lambda: results.append(self.plain.run(self.loss, data, config.batch, config.micro_batch))
        pieces = chunks_of(data, chunks, config.micro_batch)

        def step() -> None:
            self.pieces.begin(self.loss, config.batch, config.micro_batch)
            for piece in pieces:
                self.pieces.microbatch(piece)
            results.append(self.pieces.finish())

        return step

    def apart(self, *names: str) -> float:
        """How far losses and norms of these ways are from each other, relative: a time without a content check is worth little."""
        results = [result for name in names for result in self.results[name]]
        if not all(result["updated"] for result in results):
            raise KitError("a step that was timed made no update: its gradients are not finite")
        numbers = [[result["global_loss"] for result in results], [result["grad_norm"] for result in results]]
        return max((max(values) - min(values)) / max(map(abs, values)) for values in numbers)


def noise(count: int, length: int, vocab: int, seed: int, *, full: bool = False) -> Batch:
    """Rows as a loss wants them, with log-probabilities about where those of an untrained model are."""
    generator = torch.Generator().manual_seed(seed)

    def near(middle: float) -> torch.Tensor:
        return middle + 0.1 * torch.randn(count, length, generator=generator)

    ids = torch.randint(0, vocab, (count, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)
    lengths = torch.full((count,), length) if full else lengths
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": (torch.arange(length)[None] < lengths[:, None]).float(),
        "sample_mask": torch.ones(count),
        "advantages": near(0.0) * 10,
        "prev_logprobs": near(-math.log(vocab)),
        "generation_logprobs": near(-math.log(vocab)),
        "reference_logprobs": near(-math.log(vocab)),
    }


def turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, turn by turn. All ranks begin each work together."""

    def once(name: str, _: int) -> float:
        dist.barrier()
        return seconds_on_device(works[name])

    return turn_by_turn(list(works), rounds, once)


def way_seconds(*, job: dict[str, Any], chunks: list[int], rounds: int) -> dict[str, Any]:
    """The plain step, the same once more, and the step in several calls."""
    stepper = Stepper(SplitConfig(chunks=tuple(chunks), **job))
    data = stepper.data()
    ways: dict[str, int | None] = {PLAIN: None, AGAIN: None} | {str(count): count for count in chunks}
    seconds = turns({name: stepper.way(name, data, count) for name, count in ways.items()}, rounds)
    groups.destroy()
    return {"seconds": seconds, "apart": stepper.apart(*ways)}


def experts(*, job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The plain step, and the one in pieces: on rows that are all alike, and on rows that need a correction of the experts' loss."""
    stepper = Stepper(SplitConfig(chunks=(1,), **job))
    alike, ragged = stepper.data(full=True), stepper.data()
    passes: list[object] = []
    stepper.job.chunks[0].register_forward_pre_hook(lambda *_: passes.append(None))
    works = {
        PLAIN: stepper.way(PLAIN, ragged, None),
        AGAIN: stepper.way(AGAIN, ragged, None),
        "uncorrected": stepper.way("uncorrected", alike, 1),
        "corrected": stepper.way("corrected", ragged, 1),
    }
    seen = {}
    for name, work in works.items():
        passes.clear()
        work()
        seen[name] = len(passes)
    seconds = turns(works, rounds)
    groups.destroy()
    return {"seconds": seconds, "apart": stepper.apart(PLAIN, AGAIN, "corrected"), "passes": seen}


def peak(*, job: dict[str, Any], chunks: int | None, steps: int) -> int:
    """The most bytes that this process had, from when the job stood: of the device's allocator, or resident on the host."""
    stepper = Stepper(SplitConfig(chunks=(chunks or 1,), **job))
    work = stepper.way("alone", stepper.data(), chunks)
    refused = reset_peaks(str(stepper.device))
    if refused and stepper.device.type == "cpu":
        raise KitError(f"peaks of memory cannot be set back here: {refused}")
    for _ in range(steps):
        work()
    stepper.apart("alone")
    on_device = device_memory(str(stepper.device))
    most = on_device.peak_allocated if on_device else host_memory_metrics().get("peak_rss")
    groups.destroy()
    if most is None:
        raise KitError("this kernel does not report a process's peak memory (VmHWM)")
    return most


def losses(*, rows: int, length: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Each loss forward and backward, bare and with its metrics: nothing but the loss; and one from the logits of a small vocabulary."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    batch = {name: value.to(device) for name, value in noise(rows, length + 1, 1000, 0).items()}
    current = (batch["prev_logprobs"][:, 1:] + 0.1).requires_grad_()
    logits = torch.randn(rows * length, WORDS, device=device).requires_grad_()
    answer = batch["input_ids"][:, 1:].flatten()

    def from_logits() -> torch.Tensor:
        return -functional.cross_entropy(logits, answer, reduction="none").view(rows, length)

    def passes(loss: Any, leaf: torch.Tensor, logprobs: Callable[[], torch.Tensor], n: int) -> None:
        for _ in range(n):
            leaf.grad = None
            value, _ = loss(logprobs(), batch, tokens=1000.0, sequences=8.0)
            value.backward()

    kinds: dict[str, tuple[Recipe, torch.Tensor, Callable[[], torch.Tensor], int]]
    kinds = {str(recipe): (recipe, current, lambda: current, AT_ONCE) for recipe in RECIPES}
    kinds[f"grpo from logits of {WORDS} words"] = ("grpo", logits, from_logits, 1)
    seen = {}
    for name, (recipe, leaf, logprobs, n) in kinds.items():
        ways = {"bare": loss_of(recipe, metrics=False), "metrics": loss_of(recipe, metrics=True)}
        taken = turns({way: partial(passes, loss, leaf, logprobs, n) for way, loss in ways.items()}, rounds)
        seen[name] = {way: [duration / n for duration in seconds] for way, seconds in taken.items()}
    return seen


def loss_of(recipe: Recipe, *, metrics: bool) -> Any:
    if recipe == "nll":
        return NegativeLogLikelihood(metrics=metrics)
    level: Any = "sequences" if recipe == "gspo" else "tokens"
    return ClippedPolicyGradient(level=level, metrics=metrics, **RECIPES[recipe])
