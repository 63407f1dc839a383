"""The loss of a run: that of the recipe, or your own, whose declared metrics are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import BadInput
from kit.labs.split.config import KIT_LOSS, NORMALIZERS, loss_settings
from kit.target import load
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.labs.split.config import SplitConfig
    from kit.train.options import Level
    from kit.train.protocol import Loss, Normalizer


@dataclass(kw_only=True, slots=True)
class LossContext:
    """`ctx` for your own loss, which is made once for each level of the run."""

    rank: int
    world_size: int
    device: torch.device
    config: SplitConfig
    level: Level


def of_recipe(ctx: LossContext) -> Loss:
    """The kit's loss with the recipe and options of the config."""
    if ctx.config.recipe == "nll":
        return NegativeLogLikelihood(level=ctx.level)
    return ClippedPolicyGradient(level=ctx.level, **loss_settings(ctx.config))


def make_loss(ctx: LossContext) -> Loss:
    target = ctx.config.loss
    loss: Any = load(target)(ctx)
    return loss if target == KIT_LOSS else OwnLoss(target, loss, ctx.level)


class OwnLoss:
    """Your own loss, checked against the level and the metrics that it declares."""

    def __init__(self, target: str, loss: Any, level: Level) -> None:
        missing = [name for name in ("level", "normalizers", "__call__") if not hasattr(loss, name)]
        if missing:
            raise BadInput(f"loss={target}: the object it returned lacks {', '.join(missing)}")
        if loss.level != level:
            raise BadInput(
                f"loss={target}: its level is {loss.level!r} but ctx.level is {level!r}; use level={loss.level}"
            )
        self.target, self.loss, self.level = target, loss, level
        self.names: dict[str, Normalizer] = dict(loss.normalizers())
        wrong = {name: by for name, by in self.names.items() if by not in NORMALIZERS}
        if wrong:
            raise BadInput(
                f"loss={target}: normalizers() returned {wrong}; a normalizer must be 'tokens', 'sequences' or None"
            )
        if "loss" not in self.names:
            raise BadInput(f"loss={target}: normalizers() lacks 'loss', the metric that every step reports")

    def normalizers(self) -> Mapping[str, Normalizer]:
        return self.names

    def __call__(
        self, logprobs: torch.Tensor, batch: Any, *, tokens: float, sequences: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, seen = self.loss(logprobs, batch, tokens=tokens, sequences=sequences)
        odd = sorted(set(seen) ^ set(self.names))
        if odd:
            raise BadInput(
                f"loss={self.target}: normalizers() and the returned metrics differ in {', '.join(odd)}; they must have the same names"
            )
        return value, {name: torch.as_tensor(number) for name, number in seen.items()}
