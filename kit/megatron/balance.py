"""The load-balancing loss of experts: the scale of its gradient, and what Megatron keeps of it as a metric."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

AUX_METRIC = "moe_aux_loss"


def balances(config: Any) -> bool:
    return bool(config.num_moe_experts) and bool(config.moe_aux_loss_coeff)


@contextlib.contextmanager
def aux_scale(scale: float) -> Iterator[None]:
    """The gradient of the experts' loss goes in with this factor, whatever the schedule says."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    plain = MoEAuxLossAutoScaler.set_loss_scale
    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(lambda given: plain(torch.full_like(given, scale)))
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.set_loss_scale = staticmethod(plain)


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
