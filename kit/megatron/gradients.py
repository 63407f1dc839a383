"""A Megatron job's gradients: as its optimizer finds them, how often each bucket was reduced, and the experts' load-balancing loss.

With the distributed optimizer a reduction leaves each data rank the sum of its own shard alone: `reduced` puts the shards of
all ranks together again, on copies.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from kit.megatron.groups.handle import parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def reduced(chunk: Any) -> Callable[[Any], torch.Tensor]:
    """Where to find a parameter's whole reduced gradient. Collective over data ranks; what it gives are copies."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return lambda param: param.main_grad.detach()
    found: dict[Any, torch.Tensor] = {}
    for group in bucket_groups(chunk):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            whole = bucket.grad_data.clone()
            shards = list(whole.chunk(dist.get_world_size(ranks)))
            dist.all_gather(shards, shards[dist.get_rank(ranks)].clone(), group=ranks)
            for param, (start, end) in bucket.param_to_index.items():
                found[param] = whole[start:end].view(param.shape)
    return lambda param: found[param]


def bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


class Reductions:
    """How often each bucket went through a reduction since the last reset."""

    def __init__(self, chunk: Any) -> None:
        self.buckets = [bucket for group in bucket_groups(chunk) for bucket in group.buckets]
        self.counts = dict.fromkeys(range(len(self.buckets)), 0)

    def saw(self, tensor: Any) -> None:
        """Buckets are asked where they lie now: memory that was released in between may have moved."""
        for index, bucket in enumerate(self.buckets):
            place = bucket.grad_data.data_ptr(), bucket.grad_data.numel()
            if isinstance(tensor, torch.Tensor) and (tensor.data_ptr(), tensor.numel()) == place:
                self.counts[index] += 1

    def reset(self) -> None:
        self.counts = dict.fromkeys(self.counts, 0)


@contextlib.contextmanager
def counted(chunk: Any) -> Iterator[Reductions]:
    """Sees every collective over data ranks that a bucket of gradients goes into, whoever calls it.

    A tied embedding may have a bucket to itself, which pipeline stages then add up as well: that is no reduction over data ranks.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    seen = Reductions(chunk)
    between_stages = parallel_state().get_embedding_group(check_initialized=False)

    def spy(plain: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if between_stages is None or all(each is not between_stages for each in (*args, kwargs.get("group"))):
                seen.saw(args[place] if len(args) > place else kwargs.get(name))
            return plain(*args, **kwargs)

        return call

    scattered = spy(buffers.dist_reduce_scatter_func, 1, "input")
    with (
        mock.patch.object(dist, "all_reduce", spy(dist.all_reduce, 0, "tensor")),
        mock.patch.object(buffers, "dist_reduce_scatter_func", scattered),
    ):
        yield seen


AUX_METRIC = "moe_aux_loss"


def balances(config: Any) -> bool:
    return bool(config.num_moe_experts) and bool(config.moe_aux_loss_coeff)


@contextlib.contextmanager
def aux_scale(scale: float) -> Iterator[None]:
    """The gradient of the experts' loss goes in with this factor, whatever the schedule says."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    plain = MoEAuxLossAutoScaler.set_loss_scale
    scaled = staticmethod(lambda given: plain(torch.full_like(given, scale)))
    with mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale", scaled):
        yield


def clear_aux() -> None:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.clear_aux_losses_tracker()


def aux_metric(config: Any, microbatches: int) -> dict[str, float]:
    """The experts' loss of the step: mean over layers, microbatches and data ranks, without its coefficient."""
    if not balances(config):
        return {}
    from megatron.core.transformer.moe import moe_utils

    moe_utils.reduce_aux_losses_tracker_across_ranks()
    values = moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]
    value = float(values.double().mean()) / microbatches
    clear_aux()
    return {AUX_METRIC: value}
