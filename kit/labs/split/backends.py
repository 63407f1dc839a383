"""What trains, by one set of names: a fresh job on the starting weights, its plain and its piece-wise step, what is looked at.

`split_step(ctx)` is the code under test where no other is named.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kit.labs.split.config import model_config
from kit.megatron import model, shards, split, tensors
from kit.megatron.gradients import Reductions, counted, reduced
from kit.train import fsdp
from kit.train.batch import Batch, cut, rows
from kit.train.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.labs.split.config import SplitConfig
    from kit.train.protocol import Loss, Split, StepResult

Tensors = dict[str, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class SplitContext:
    """`ctx` for code under test: the job, and where it runs. `groups` describes Megatron's groups as plain JSON."""

    rank: int
    world_size: int
    device: torch.device
    config: SplitConfig
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    groups: list[dict[str, Any]]
    job: Any


class Sync(Protocol):
    def run(self, loss: Loss, data: Batch, gbs: int, mbs: int) -> StepResult: ...


class Backend(Protocol):
    """One of the two, for one config."""

    def fresh(self) -> Any:
        """A job on the starting weights, with chunks, optimizer and scheduler."""

    def sync(self, job: Any) -> Sync: ...
    def split(self, job: Any) -> Split: ...
    def parameters(self, job: Any) -> Tensors:
        """Full tensors by their Hugging Face names, on the host. Collective."""

    def gradients(self, job: Any) -> Tensors:
        """As the optimizer finds them. Collective."""

    def counted(self, job: Any) -> contextlib.AbstractContextManager[Counter]: ...
    def hooks(self, job: Any) -> tuple[Any, ...]:
        """What a step replaces and must put back."""

    def state(self, job: Any) -> dict[str, str]:
        """Hashes of weights, optimizer state, scheduler and random numbers."""

    def nonzero_gradients(self, job: Any) -> int: ...


class Counter(Protocol):
    """Reductions of each bucket since the last reset."""

    @property
    def counts(self) -> Mapping[Any, int]: ...
    def reset(self) -> None: ...


def settings(config: SplitConfig) -> Settings:
    """The rate moves in every step, so that it can be told which step's rate a result speaks of."""
    return Settings(first_lr=1e-4, warmup=4 * config.batch, decay=1000 * config.batch)


class Megatron:
    """kit.megatron.model on groups that are made once."""

    def __init__(self, config: SplitConfig, weights: Tensors) -> None:
        self.config = config
        self.weights = weights
        self.model_config = model_config(config)
        self.device = model.initialise(self.model_config)

    def fresh(self) -> model.Training:
        job = model.assemble(self.model_config, self.device, settings(self.config))
        if self.weights:
            shards.load_full(job.chunks, self.weights)
            job.optimizer.reload_model_params()
        return job

    def sync(self, job: Any) -> split.MegatronSync:
        return split.MegatronSync(job)

    def split(self, job: Any) -> split.MegatronSplit:
        return split.MegatronSplit(job)

    def parameters(self, job: Any) -> Tensors:
        return shards.merge(job.chunks)

    def gradients(self, job: Any) -> Tensors:
        return shards.merge(job.chunks, reduced(job.chunks[0]))

    def counted(self, job: Any) -> contextlib.AbstractContextManager[Reductions]:
        return counted(job.chunks[0])

    def hooks(self, job: Any) -> tuple[Any, ...]:
        return split.hooks(job)

    def state(self, job: Any) -> dict[str, str]:
        named = tensors.hashes(job.chunks, job.optimizer, ("weights", "optimizer"))
        return {**named, "scheduler": repr(job.scheduler.state_dict()), "random": digests(split.random_states())}

    def nonzero_gradients(self, job: Any) -> int:
        chunk = job.chunks[0]
        buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
        return sum(int(torch.count_nonzero(buffer.grad_data)) for buffer in buffers)


class Fsdp2:
    """kit.train.fsdp over all ranks."""

    def __init__(self, config: SplitConfig, weights: Tensors, device: torch.device) -> None:
        self.config = config
        self.weights = weights
        self.device = device
        self.geometry = model_config(config).geometry

    def fresh(self) -> fsdp.FsdpJob:
        return fsdp.build(
            self.geometry,
            self.weights,
            settings=settings(self.config),
            dtype=model.DTYPES[self.config.dtype],
            device=self.device,
            batching=self.config.batching,
            token_budget=self.config.token_budget,
        )

    def sync(self, job: Any) -> fsdp.FsdpSync:
        return fsdp.FsdpSync(job)

    def split(self, job: Any) -> fsdp.FsdpSplit:
        return fsdp.FsdpSplit(job)

    def parameters(self, job: Any) -> Tensors:
        return fsdp.full_parameters(job)

    def gradients(self, job: Any) -> Tensors:
        return fsdp.full_gradients(job)

    def counted(self, job: Any) -> contextlib.AbstractContextManager[fsdp.Reductions]:
        return fsdp.counted(job)

    def hooks(self, job: Any) -> tuple[Any, ...]:
        return fsdp.hooks(job)

    def state(self, job: Any) -> dict[str, str]:
        return fsdp.state(job)

    def nonzero_gradients(self, job: Any) -> int:
        return sum(
            int(torch.count_nonzero(param.grad.to_local()))
            for param in job.model.parameters()
            if param.grad is not None
        )


def split_step(ctx: SplitContext) -> Split:
    """The kit's own piece-wise step for the configured backend."""
    if ctx.config.backend == "fsdp2":
        return fsdp.FsdpSplit(ctx.job)
    return split.MegatronSplit(ctx.job)


def digests(values: Any) -> str:
    return tensors.digest(torch.cat([value.flatten().cpu() for value in flat(values)]))


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        return flat(list(values.values()))
    return [each for value in values or () for each in flat(value)]


def chunks_of(data: Batch, chunks: int, mbs: int) -> list[Batch]:
    """A step's rows in so many calls of whole microbatches, as even as can be; 0: a microbatch a call."""
    total = rows(data) // mbs
    count = chunks or total
    ends = [total * index // count * mbs for index in range(count + 1)]
    return [cut(data, start, end) for start, end in itertools.pairwise(ends)]


def watch_optimizer(job: Any, look: Callable[[], None]) -> None:
    """Have a look at the gradients when the optimizer is called, whoever calls it."""
    plain = job.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        look()
        return plain(*args, **kwargs)

    job.optimizer.step = step
