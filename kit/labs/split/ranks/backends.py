"""The two training backends under one interface: fresh jobs, their plain and split steps, and the tensors that are compared.

`split_step(ctx)` is the code under test unless `implementation` names another.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.labs.split.config import KIT_MODEL, model_config
from kit.megatron import model, observe, shards, split, tensors
from kit.megatron.gradients import Reductions, counted, reduced
from kit.target import load
from kit.train import fsdp
from kit.train.batch import Batch, cut, rows
from kit.train.options import Settings
from kit.train.protocol import SplitContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.labs.split.config import SplitConfig
    from kit.train.protocol import Loss, Split, StepResult

Tensors = dict[str, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class ModelContext:
    """`ctx` for your own model. Megatron's groups exist already; `settings` are those of the kit's optimizer."""

    rank: int
    world_size: int
    device: torch.device
    config: SplitConfig
    settings: Settings


class Sync(Protocol):
    def run(self, loss: Loss, data: Batch, gbs: int, mbs: int) -> StepResult: ...


class Backend(Protocol):
    """A training backend for one config."""

    def fresh(self) -> Any:
        """A job on the starting weights, with chunks, optimizer and scheduler."""

    def sync(self, job: Any) -> Sync: ...
    def split(self, job: Any) -> Split: ...
    def parameters(self, job: Any) -> Tensors:
        """Full tensors by their Hugging Face names, on the host. Collective."""

    def gradients(self, job: Any) -> Tensors:
        """The gradients that the optimizer gets. Collective."""

    def counted(self, job: Any) -> contextlib.AbstractContextManager[Counter]: ...
    def hooks(self, job: Any) -> tuple[Any, ...]:
        """The hooks that a step replaces and must restore."""

    def state(self, job: Any) -> dict[str, str]:
        """Hashes of weights, optimizer state, scheduler and random numbers."""

    def nonzero_gradients(self, job: Any) -> int: ...


class Counter(Protocol):
    """Number of reductions of each bucket since the last reset."""

    @property
    def counts(self) -> Mapping[Any, int]: ...
    def reset(self) -> None: ...


def settings(config: SplitConfig) -> Settings:
    """Settings whose effect shows: the learning rate changes in every step, gradients are clipped, weights decay visibly."""
    return Settings(
        first_lr=1e-4,
        last_lr=2e-4,
        weight_decay=0.1,
        betas=(0.8, 0.95),
        eps=1e-6,
        clip=0.1,
        warmup=2 * config.batch,
        decay=8 * config.batch,
    )


def weights_dtype(config: SplitConfig) -> torch.dtype:
    """The dtype of the compared weights: FSDP2 keeps float32, whatever it computes in."""
    return torch.float32 if config.backend == "fsdp2" else model.DTYPES[config.dtype]


@dataclass(kw_only=True, slots=True)
class OwnJob:
    """The job that `model=module:attr` built, in the form that steps need."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    device: torch.device


def own_job(target: str, built: Any, device: torch.device) -> OwnJob:
    """The job that your own code built, if it has what a step needs."""
    missing = [name for name in ("chunks", "optimizer", "scheduler") if not hasattr(built, name)]
    if missing:
        raise BadInput(f"model={target}: the object it returned lacks {', '.join(missing)}")
    chunks = list(built.chunks)
    if not all(hasattr(chunk, "scale_gradients") for chunk in chunks):
        raise BadInput(
            f"model={target}: chunks are not wrapped in Megatron's DistributedDataParallel; wrap each of them"
        )
    if any(chunk.config.finalize_model_grads_func is None for chunk in chunks):
        raise BadInput(
            f"model={target}: finalize_model_grads_func in the config of a chunk is None, so gradients would not be reduced; "
            "set it to megatron.core.distributed.finalize_model_grads"
        )
    return OwnJob(chunks=chunks, optimizer=built.optimizer, scheduler=built.scheduler, device=device)


def assemble(ctx: ModelContext) -> model.Training:
    """The kit's own job."""
    return model.assemble(model_config(ctx.config), ctx.device, settings(ctx.config))


class Megatron:
    """kit.megatron.model on groups that are created once."""

    def __init__(self, config: SplitConfig, weights: Tensors) -> None:
        self.config = config
        self.weights = weights
        self.model_config = model_config(config)
        self.device = model.initialise(self.model_config)

    def fresh(self) -> Any:
        target = self.config.model
        built = load(target)(
            ModelContext(
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                device=self.device,
                config=self.config,
                settings=settings(self.config),
            )
        )
        if target != KIT_MODEL:
            return own_job(target, built, self.device)
        if self.weights:
            shards.load_full(built.chunks, self.weights)
            built.optimizer.reload_model_params()
        return built

    def sync(self, job: Any) -> split.MegatronSync:
        return split.MegatronSync(job)

    def split(self, job: Any) -> split.MegatronSplit:
        return split.MegatronSplit(job)

    def parameters(self, job: Any) -> Tensors:
        return self._whole(job, lambda param: param.data)

    def gradients(self, job: Any) -> Tensors:
        return self._whole(job, reduced(job.chunks[0]))

    def _whole(self, job: Any, tensor: Callable[[Any], torch.Tensor]) -> Tensors:
        return (
            shards.merge(job.chunks, tensor) if self.config.model == KIT_MODEL else shards.by_rank(job.chunks, tensor)
        )

    def counted(self, job: Any) -> contextlib.AbstractContextManager[Reductions]:
        return counted(job.chunks[0])

    def hooks(self, job: Any) -> tuple[Any, ...]:
        return split.hooks(job)

    def state(self, job: Any) -> dict[str, str]:
        named = tensors.hashes(job.chunks, job.optimizer, ("weights", "optimizer"))
        return {**named, "scheduler": repr(job.scheduler.state_dict()), "random": str(observe.random_state())}

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
        return fsdp.nonzero_gradients(job)


def split_step(ctx: SplitContext) -> Split:
    """The kit's own split step for the configured backend."""
    if ctx.config.backend == "fsdp2":
        return fsdp.FsdpSplit(ctx.job)
    return split.MegatronSplit(ctx.job)


def chunks_of(data: Batch, chunks: int, mbs: int) -> list[Batch]:
    """The rows of a step in `chunks` parts of whole microbatches, as even as possible; 0: one microbatch per part."""
    total = rows(data) // mbs
    count = chunks or total
    ends = [total * index // count * mbs for index in range(count + 1)]
    return [cut(data, start, end) for start, end in itertools.pairwise(ends)]


def watch_optimizer(job: Any, look: Callable[[], None]) -> None:
    """Call `look` before each step of the optimizer, whoever calls it."""
    plain = job.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        look()
        return plain(*args, **kwargs)

    job.optimizer.step = step
