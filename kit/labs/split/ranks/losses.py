"""The loss of a run: that of the recipe, or your own, whose declared metrics are checked. And the loss on rows that rollouts do not
produce: large gaps between trainer and engine, and NaN or infinities in masked places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import BadInput
from kit.labs.split.config import KIT_LOSS, NORMALIZERS, loss_settings
from kit.target import load
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.labs.split.config import SplitConfig
    from kit.train.options import Level
    from kit.train.protocol import Batch, Loss, Normalizer

    Exact = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, dict[str, float]]]


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


class WrappedLoss:
    """A loss around another one."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.level = loss.level

    def normalizers(self) -> Mapping[str, Normalizer]:
        return self.loss.normalizers()

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        return self.loss(logprobs, batch, **counts)


class OwnLoss(WrappedLoss):
    """Your own loss, checked against the level and the metrics that it declares."""

    def __init__(self, target: str, loss: Any, level: Level) -> None:
        if missing := [name for name in ("level", "normalizers", "__call__") if not hasattr(loss, name)]:
            raise BadInput(f"loss={target}: the object it returned lacks {', '.join(missing)}")
        if loss.level != level:
            raise BadInput(
                f"loss={target}: its level is {loss.level!r} but ctx.level is {level!r}; use level={loss.level}"
            )
        super().__init__(loss)
        self.target = target
        self.names: dict[str, Normalizer] = dict(loss.normalizers())
        if wrong := {name: by for name, by in self.names.items() if by not in NORMALIZERS}:
            raise BadInput(
                f"loss={target}: normalizers() returned {wrong}; a normalizer must be 'tokens', 'sequences' or None"
            )
        if "loss" not in self.names:
            raise BadInput(f"loss={target}: normalizers() lacks 'loss', the metric that every step reports")

    def normalizers(self) -> Mapping[str, Normalizer]:
        return self.names

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        value, seen = self.loss(logprobs, batch, **counts)
        if odd := sorted(set(seen) ^ set(self.names)):
            raise BadInput(
                f"loss={self.target}: normalizers() and the returned metrics differ in {', '.join(odd)}; they must have the same names"
            )
        return value, {name: torch.as_tensor(number) for name, number in seen.items()}


GAPS = tuple(sign * size for size in (5.0, 15.0, 17.0, 50.0, 90.0, 100.0, 1000.0) for sign in (1.0, -1.0))
RUBBISH = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PARTIES = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")
ROWS = 8
FAR = math.log(5.0)
FLOOR = 1e-2  # errors below it are absolute, as in `parity`
SMALLEST = 2.0**-126  # of float32


def rows_of(batch: Batch, gap: float = 0.0, *, alone: bool = False) -> tuple[torch.Tensor, Batch]:
    """A few rows of a step on the host, and float32 log-probabilities near the trainer's; one token in seven is off by a factor of 5.

    For one token the engine is `gap` below the trainer; with `alone` no other token counts, so that no sum hides it.
    """
    some = {name: value[:ROWS].cpu().clone() for name, value in batch.items()}
    place = torch.arange(some["prev_logprobs"].numel()).view_as(some["prev_logprobs"])
    near = torch.sin(place) / 10 + torch.where(place % 7 == 0, FAR, 0.0) * torch.sign(torch.sin(3.0 * place))
    inside = some["token_mask"] * some["sample_mask"][:, None] > 0
    inside[:, 0] = False
    found = inside.nonzero().tolist()
    if gap and found:
        row, column = found[len(found) // 2]
        some["prev_logprobs"][row, column] = min(-0.5, gap - 0.5)
        some["generation_logprobs"][row, column] = some["prev_logprobs"][row, column] - gap
        some["reference_logprobs"][row, column] = some["prev_logprobs"][row, column]
        if alone:
            some["token_mask"].zero_()
            some["token_mask"][row, column] = 1.0
    return (some["prev_logprobs"] + near)[:, 1:].contiguous(), some


def gap_error(loss: Loss, exact: Exact, batch: Batch, gap: float) -> tuple[float, str]:
    """The largest error of loss, metrics and gradient against `exact(logprobs, batch)` at a gap, and the name of that number."""
    among = errors_at(loss, exact, *rows_of(batch, gap), FLOOR)
    alone = errors_at(loss, exact, *rows_of(batch, gap, alone=True), SMALLEST)
    errors = {**among, **{f"{name} of that token alone": error for name, error in alone.items()}}
    name = max(errors, key=lambda each: errors[each])
    return errors[name], name


def errors_at(loss: Loss, exact: Exact, logprobs: torch.Tensor, batch: Batch, floor: float) -> dict[str, float]:
    value, table, gradient = trained(loss, logprobs, batch)
    sharp = logprobs.double().requires_grad_()
    wide = {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}
    wanted, wanted_table = exact(sharp, wide)
    wanted.backward()  # type: ignore[no-untyped-call]
    assert sharp.grad is not None
    errors = {name: apart(table.get(name, math.nan), number, floor) for name, number in wanted_table.items()}
    errors["value to differentiate"] = apart(value, wanted.item(), floor)
    return {**errors, "gradient": gradient_error(gradient, sharp.grad.to(gradient.dtype), floor)}


def masked_reach(loss: Loss, batch: Batch, rubbish: float) -> list[str]:
    """The numbers that change if masked places hold `rubbish`. None may change, not by one bit."""
    logprobs, some = rows_of(batch)
    clean = trained(loss, logprobs, some)
    if any(map(math.isnan, clean[1].values())):
        return ["metrics are NaN even without it"]
    hidden = some["token_mask"] * some["sample_mask"][:, None] == 0
    hidden[:, 0] = True
    dirty = {name: value.masked_fill(hidden, rubbish) if name in PARTIES else value for name, value in some.items()}
    value, table, gradient = trained(loss, logprobs.masked_fill(hidden[:, 1:], rubbish), dirty)
    reached = [name for name, number in table.items() if number != clean[1].get(name)]
    reached += ["value to differentiate"] if value != clean[0] else []
    return reached + ([] if torch.equal(gradient, clean[2]) else ["gradient"])


def trained(loss: Loss, logprobs: torch.Tensor, batch: Batch) -> tuple[float, dict[str, float], torch.Tensor]:
    """Value, metrics and gradient, divided by the true counts; an extreme without values is -1."""
    own = logprobs.clone().requires_grad_()
    kept = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    tokens, sequences = max(1.0, kept.sum().item()), max(1.0, batch["sample_mask"].sum().item())
    value, seen = loss(own, batch, tokens=tokens, sequences=sequences)
    value.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    table = {name: float(number) for name, number in seen.items()}
    empty = {name: -1.0 for name, number in table.items() if name.endswith(("_min", "_max")) and math.isinf(number)}
    return value.item(), {**table, **empty}, own.grad


def gradient_error(value: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """||dg|| / ||g||; equal infinities count as equal elements."""
    off = torch.where(value == wanted, 0.0, value - wanted).double().norm().item()
    whole = wanted[wanted.isfinite()].double().norm().item()
    return off / max(whole, floor) if math.isfinite(off) else math.inf


def apart(value: float, wanted: float, floor: float) -> float:
    """Relative error, absolute below the floor; infinite if a number is not finite and the two differ."""
    if value == wanted or (math.isnan(value) and math.isnan(wanted)):
        return 0.0
    error = abs(value - wanted) / max(abs(wanted), floor)
    return error if math.isfinite(error) else math.inf
