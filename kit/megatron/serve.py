"""Serving: a replica of the model without gradients or optimizer, which can sleep, and logits to compare it with a training job by.

A `Replica` is made inside `as_world(group)`, where the group has the ranks of this one replica, and its `logits` are asked for inside of it
too. Equal layouts give the same bits as the training job's `logits`. Limits: pp=1; the whole vocabulary of the last position is gathered,
and nothing is cached between tokens.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput, KitError
from kit.measure.host import huge_pages, trim
from kit.megatron import model
from kit.megatron.groups.handle import parallel_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.megatron.config import ModelConfig


class Replica:
    """An inference model on this rank, with the first weights of a job of the same config. `chunks` holds it, as a job's do.

    `sleep` and `wake` alternate. After `wake` every weight is NaN, so that one that never arrives shows in the logits.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.pp != 1:
            raise BadInput(f"pp={config.pp} is not allowed for a replica: it must be 1")
        self.config = config
        self.device = model.initialise(config)
        self.chunks: list[Any] = [model.network(config, self.device).eval()]
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def asleep(self) -> bool:
        """The weights' memory was given back."""
        return bool(self._away)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows the last of the tokens [rows, length]: float32 [rows, vocabulary], the same on every rank. Collective."""
        if self.asleep:
            raise KitError("this replica is asleep: wake it and fill its weights before it serves")
        tokens = tokens.to(self.device)
        return _last(self.chunks[0](tokens, _positions(tokens), None))

    def sleep(self) -> None:
        """Give the weights' memory back; parameters and their names stay."""
        if self.asleep:
            raise KitError("this replica is asleep already")
        found: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for name, param in self.chunks[0].named_parameters():
            storage = param.untyped_storage()
            if not storage.resizable():
                raise KitError(f"the storage of {name} cannot be resized, so it cannot be released")
            found[storage._cdata] = (storage, storage.nbytes())
        self._away = [*found.values()]
        for storage, _ in self._away:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim()

    def wake(self) -> None:
        """Take the weights' memory again, full of NaN."""
        if not self.asleep:
            raise KitError("this replica is awake already")
        for storage, size in self._away:
            storage.resize_(size)
            if self.device.type == "cpu":
                huge_pages(storage.data_ptr(), size)
        for param in self.chunks[0].parameters():
            param.data.fill_(float("nan"))
        self._away = []


@torch.no_grad()
def logits(job: model.Training, tokens: torch.Tensor) -> torch.Tensor | None:
    """A training job's logits as `Replica.logits` gives them, on the job's rank 0; None elsewhere. Collective.

    One microbatch of the tokens, the same on every rank, goes through Megatron's own schedule. The job stays as it was.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if job.mover.away:
        raise KitError(f"{', '.join(job.mover.away)} are off the device: restore them before asking for logits")
    tokens = tokens.to(job.device)

    def step(_: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        return chunk(tokens, _positions(tokens), None), lambda output, **_: output

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(()),
        model=job.chunks,
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    found = _last(outputs[0]) if parallel_state().is_pipeline_last_stage() else None
    stages = parallel_state().get_pipeline_model_parallel_group()
    if 0 not in dist.get_process_group_ranks(stages):
        return None  # another replica, or another tensor rank
    if dist.get_world_size(stages) == 1:
        return found
    if found is not None:
        dist.send(found, group=stages, group_dst=0)
    elif dist.get_rank() == 0:
        shape = (tokens.shape[0], job.config.geometry.vocab)
        found = torch.empty(shape, dtype=torch.float32, device=job.device)
        dist.recv(found, group=stages, group_src=dist.get_world_size(stages) - 1)
        return found
    return None


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)


def _last(output: torch.Tensor) -> torch.Tensor:
    """The last position's logits from all tensor ranks, each of which has some columns."""
    group = parallel_state().get_tensor_model_parallel_group()
    mine = output[:, -1].float().contiguous()
    columns = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(columns, mine, group=group)
    return torch.cat(columns, dim=-1)


_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def as_world(group: Any) -> Iterator[None]:
    """Inside, the group of this rank's job is what torch and Megatron take for the whole world.

    Megatron's parallel state is made of all ranks of the default group. Where some ranks train and others serve, each job makes its own
    from the group of its ranks, numbered from 0; groups that were made inside keep these numbers. torch names a group by how many a
    process has made, and ranks of other jobs make more or fewer: inside has a count of its own, so that the World's ranks go on agreeing.
    Limits: it holds while the context is open, on the thread that opened it; a job that asks for the default group later asks the World.
    """
    world: Any = c10d._world
    if group not in world.pg_map:
        raise BadInput("as_world takes a process group that this rank belongs to and that was not destroyed")
    ranks = world.pg_group_ranks[group]
    plain, count = world.default_pg, world.group_count
    # The same number on all of its ranks, far from other groups' numbers.
    world.group_count = _counts.get(group, zlib.crc32(world.pg_names[group].encode()) * 10**6)
    world.default_pg = group
    world.pg_group_ranks[group] = {place: place for place in range(dist.get_world_size(group))}
    try:
        yield
    finally:
        _counts[group], world.group_count = world.group_count, count
        world.default_pg = plain
        world.pg_group_ranks[group] = ranks
