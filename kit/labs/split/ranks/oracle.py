"""Losses and optimizer updates in float64 as oracles, with formulas of their own: only settings are shared with the code under test.

`oracle` takes all rows of a step, over all data-parallel ranks, one token at a time, and returns the numbers that the step must give: the
loss with its graph, and every metric, divided by the true counts. It is slow, and meant for some thousand tokens. From the weights before
the first step and the gradients that the optimizer got in each step, `replay` computes the weights afterwards (clipping by the global norm,
AdamW, schedule), and `steps` the numbers that each result must have.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


NOTHING_SEEN = -1.0
EPS = 2.0**-23  # of float32, in which gradients are
Tensors = dict[str, torch.Tensor]


class Token(NamedTuple):
    """One valid token. `now` is the model's log-probability with its graph; the others are plain numbers."""

    now: torch.Tensor
    before: float
    engine: float
    reference: float
    advantage: float


class Judged(NamedTuple):
    """The terms of one valid token in a clipped policy gradient."""

    loss: torch.Tensor
    penalty: float
    ratio: float
    clipped: float
    weight: float
    outside: bool


def oracle(settings: Any, logprobs: torch.Tensor, batch: Tensors) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics of the step. `logprobs[i, t]` belongs to token t + 1 of row i."""
    if logprobs.dtype != torch.float64:
        raise TypeError(f"the oracle needs log-probabilities in float64, not {logprobs.dtype}")
    rows = _valid_rows(settings, logprobs, batch)
    count = max(1, sum(len(row) for row in rows))
    if hasattr(settings, "clip_low"):
        judged = [_judge(settings, row) for row in rows]
        losses = [[token.loss for token in row] for row in judged]
        table = _clipped_table(settings, rows, judged, count)
    else:
        losses = [[-token.now for token in row] for row in rows]
        table = {"positive_nll_loss": _positive(rows)}
    # A step without a valid token still has a graph, with a gradient of exactly 0.
    total = torch.zeros_like(logprobs).mul(logprobs.nan_to_num(0.0, 0.0, 0.0)).sum()
    for row in losses:
        for each in row:
            total = total + (each / count if settings.level == "tokens" else each / len(row) / max(1, len(rows)))
    table |= {
        "loss": total.item(),
        "num_valid_samples": float(len(rows)),
        "num_unmasked_tokens": float(sum(len(row) for row in rows)),
    }
    return total, table


def by_itself(loss: Any, logprobs: torch.Tensor, batch: Tensors) -> tuple[torch.Tensor, dict[str, float]]:
    """For your own loss, whose formulas are unknown: its value over all rows at once, in float64, divided by the true counts."""
    sequences, tokens = true_counts(batch)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    value, _ = loss(logprobs, exact, tokens=float(max(1, tokens)), sequences=float(max(1, sequences)))
    return value, {"loss": value.item()}


def true_counts(batch: Tensors) -> tuple[int, int]:
    """Valid sequences and valid tokens, counted one by one. Nothing predicts a row's first token."""
    rows = zip(batch["sample_mask"].tolist(), batch["token_mask"].tolist(), strict=True)
    kept = [tokens for row, tokens in rows if row]
    return len(kept), sum(1 for tokens in kept for token in tokens[1:] if token)


def _positive(rows: Sequence[Sequence[Token]]) -> float:
    return math.fsum(-token.now.item() for row in rows for token in row if token.advantage > 0)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _valid_rows(settings: Any, logprobs: torch.Tensor, batch: Tensors) -> list[list[Token]]:
    """The valid tokens of each valid row; a row may have none."""
    names = ("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages")

    def token(i: int, place: int) -> Token:
        now = logprobs[i, place - 1]
        before, *others = (batch[name][i, place].item() for name in names)
        return Token(now, now.item() if getattr(settings, "on_policy", False) else before, *others)

    masks = batch["token_mask"].tolist()
    valid = [i for i, row_counts in enumerate(batch["sample_mask"].tolist()) if row_counts]
    return [[token(i, place) for place, counts in enumerate(masks[i]) if place and counts] for i in valid]


def _judge(settings: Any, row: Sequence[Token]) -> list[Judged]:
    if not row:
        return []
    steps = [token.now - token.before for token in row]
    if settings.ratio == "sequences":
        steps = [sum(steps, torch.zeros_like(steps[0])) / len(row)] * len(row)
    engine_steps = [token.before - token.engine for token in row]
    row_outside = False
    if settings.truncation == "seq-mask-tis":
        mean = _exp(math.fsum(engine_steps) / len(row))
        row_outside = not settings.band_low <= mean <= settings.band_high
    done = []
    for token, step, engine_step in zip(row, steps, engine_steps, strict=True):
        weight, outside = _weigh(settings, engine_step, engine_steps, row_outside)
        ratio = torch.exp(step)
        low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
        clipped = ratio if low <= ratio.item() <= high else torch.full_like(ratio, low if ratio.item() < low else high)
        gain = _gain(settings, token, ratio, clipped)
        penalty = _penalty(settings, token) if settings.kl else torch.zeros_like(ratio)
        praise = -settings.positive_nll * token.now if token.advantage > 0 else torch.zeros_like(ratio)
        done.append(
            Judged(
                loss=(gain if settings.importance == "none" else gain * weight) + settings.kl * penalty + praise,
                penalty=penalty.item(),
                ratio=ratio.item(),
                clipped=clipped.item(),
                weight=weight,
                outside=outside,
            )
        )
    return done


def _weigh(settings: Any, own: float, whole_row: Sequence[float], row_outside: bool) -> tuple[float, bool]:
    weight = _exp(math.fsum(whole_row) if settings.importance == "sequences" else own)
    if settings.truncation == "none":
        return weight, False
    if settings.truncation == "seq-mask-tis":
        return (0.0 if row_outside else weight), row_outside
    if settings.band_low <= weight <= settings.band_high:
        return weight, False
    if settings.truncation == "icepop":
        return 0.0, True
    return (settings.band_low if weight < settings.band_low else settings.band_high), True


def _gain(settings: Any, token: Token, ratio: torch.Tensor, clipped: torch.Tensor) -> torch.Tensor:
    """What one token adds to the loss before it is weighted: the worse of two, and no worse than dual clipping allows."""
    if settings.ratio == "none":
        return -token.advantage * token.now
    if settings.cispo:
        return -token.advantage * clipped.item() * token.now
    free, held = -token.advantage * ratio, -token.advantage * clipped
    worse = free if free.item() >= held.item() else held
    if settings.dual_clip is not None and token.advantage < 0:
        bound = -token.advantage * settings.dual_clip
        if bound < worse.item():
            return torch.full_like(worse, bound)
    return worse


def _penalty(settings: Any, token: Token) -> torch.Tensor:
    apart = _clamped(token.reference - token.now, settings.kl_input_clamp)
    estimates = {"k1": lambda: -apart, "k2": lambda: apart.square() / 2, "k3": lambda: apart.exp() - apart - 1}
    return _clamped(estimates[settings.kl_kind](), settings.kl_output_clamp)


def _clamped(value: torch.Tensor, limit: float | None) -> torch.Tensor:
    if limit is not None and abs(value.item()) > limit:
        return torch.full_like(value, math.copysign(limit, value.item()))
    return value


def _clipped_table(
    settings: Any, rows: Sequence[Sequence[Token]], judged: Sequence[Sequence[Judged]], count: int
) -> dict[str, float]:
    tokens = [token for row in rows for token in row]
    results = [token for row in judged for token in row]
    ratios, clipped = [each.ratio for each in results], [each.clipped for each in results]
    n_rows = max(1, len(rows))

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / count

    if settings.level == "tokens":
        penalty = mean([each.penalty for each in results])
    else:
        penalty = math.fsum(sum(each.penalty for each in row) / len(row) for row in judged if row) / n_rows
    if settings.importance == "sequences":
        # An empty row's weight is an empty product, which truncation treats as any other.
        weights = [row[0].weight if row else _weigh(settings, 0.0, [], row_outside=False)[0] for row in judged]
        weight = math.fsum(weights) / n_rows
    else:
        weight = mean([each.weight for each in results])
    if settings.truncation == "seq-mask-tis":
        outside = sum(row[0].outside for row in judged if row) / n_rows
    else:
        outside = sum(each.outside for each in results) / count
    praised = {"positive_nll_loss": _positive(rows)} if settings.positive_nll else {}
    return praised | {
        "kl_penalty": penalty,
        "probs_ratio": mean(ratios),
        "probs_ratio_clamped": mean(clipped),
        "probs_ratio_min": min(ratios, default=NOTHING_SEEN),
        "probs_ratio_max": max(ratios, default=NOTHING_SEEN),
        "probs_ratio_clamped_min": min(clipped, default=NOTHING_SEEN),
        "probs_ratio_clamped_max": max(clipped, default=NOTHING_SEEN),
        "token_mult_prob_error": mean([_exp(abs(token.engine - token.before)) for token in tokens]),
        "gen_kl_error": mean([_k3(token.before - token.engine) for token in tokens]),
        "policy_kl_error": mean([_k3(token.engine - token.before) for token in tokens]),
        "js_divergence_error": mean([_to_mixture(token.before, token.engine) for token in tokens]),
        "approx_entropy": mean([-_exp(t.now.item() - t.engine) * t.now.item() for t in tokens]),
        "sampling_importance_ratio": weight,
        "is_oob_ratio": outside,
    }


def _k3(log_ratio: float) -> float:
    try:
        return math.expm1(log_ratio) - log_ratio
    except OverflowError:
        return math.inf


def _to_mixture(one: float, other: float) -> float:
    """The mean distance of two probabilities to their half and half mixture."""
    top = max(one, other)
    mixture = top + math.log(0.5 * math.exp(one - top) + 0.5 * math.exp(other - top))
    return 0.5 * _k3(one - mixture) + 0.5 * _k3(other - mixture)


class Step(NamedTuple):
    """The numbers that the result of one step must have, and the relative rounding that a float32 norm may have."""

    norm: float
    norm_rounding: float
    lr: float
    wd: float


def learning_rate(settings: Any, seen: int) -> float:
    """The learning rate of a step after `seen` trained sequences: linear warm-up, then half a cosine down."""
    if seen < settings.warmup:
        part = seen / settings.warmup
        return float((1 - part) * settings.first_lr + part * settings.lr)
    part = min(1.0, (seen - settings.warmup) / (settings.decay - settings.warmup))
    return float(settings.last_lr + (settings.lr - settings.last_lr) * math.cos(part * math.pi / 2) ** 2)


def steps(settings: Any, gradients: Sequence[Mapping[str, torch.Tensor]], sequences: int) -> list[Step]:
    """Norm, learning rate and decay of every step. A step without gradients was skipped and does not advance the schedule."""
    made, seen = [], 0
    for found in gradients:
        squares = [torch.dot(flat, flat).item() for flat in (value.double().flatten() for value in found.values())]
        norm = math.sqrt(math.fsum(squares)) if found else math.nan
        lr = learning_rate(settings, seen)
        made.append(Step(norm=norm, norm_rounding=norm_rounding(found), lr=lr, wd=settings.weight_decay))
        seen += sequences if found else 0
    return made


def norm_rounding(tensors: Mapping[str, torch.Tensor]) -> float:
    """The relative error that rounding allows for a norm that is summed in float32, tensor by tensor, in any order.

    Each of n additions rounds by at most half an EPS, up or down. The error of the sum is about sqrt(n) of these, and that of its root
    half as much. Four times that is allowed. torch's own norm of 16384 elements uses a tenth of it, 1.5e-6.
    """
    return EPS * math.sqrt(max((value.numel() for value in tensors.values()), default=0))


def unclipped(settings: Any, found: Tensors, norm: float) -> Tensors:
    """Gradients before clipping, also if the step clips them before it calls the optimizer.

    Clipped gradients have exactly the norm that clipping leaves, while the step reports a larger one. They are multiplied in float64 by
    the factor that follows from the reported `norm`; if that is wrong, so are they. Other gradients are returned unchanged.
    """
    factor = (norm + 1e-6) / settings.clip
    if not found or not factor > 1:
        return found
    (now,) = steps(settings, [found], 0)
    if relative(now.norm, norm / factor) > now.norm_rounding + EPS:
        return found
    return {name: value.double() * factor for name, value in found.items()}


def replay(
    settings: Any, start: torch.Tensor, gradients: Sequence[torch.Tensor | None], done: Sequence[Step]
) -> torch.Tensor:
    """One tensor after all steps, in float64. Only matrices decay."""
    b1, b2 = settings.betas
    weight = start.double().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    count = 0
    for gradient, step in zip(gradients, done, strict=True):
        if gradient is None:
            continue
        count += 1
        held = gradient.double() * min(1.0, settings.clip / (step.norm + 1e-6))
        first += (held - first) * (1 - b1)
        second += (held**2 - second) * (1 - b2)
        direction = first / (1 - b1**count) / ((second / (1 - b2**count)) ** 0.5 + settings.eps)
        pulled = step.wd * weight if start.dim() > 1 else 0.0
        weight = weight - step.lr * (direction + pulled)
    return weight


def moved(
    settings: Any, start: Tensors, end: Tensors, gradients: Sequence[Tensors], done: Sequence[Step], *, eps: float
) -> dict[str, float]:
    """The error of every tensor after all steps, relative to the distance that it had to move. Rounding is excluded; `eps` is the relative
    rounding of the dtype of the weights."""
    found = {}
    for name, before in start.items():
        must = replay(settings, before, [step.get(name) if step else None for step in gradients], done)
        rounding = len(gradients) * eps * must.abs()
        beyond = ((end[name].double() - must).abs() - rounding).clamp(min=0)
        whole = float((must - before.double()).norm())
        off = float(beyond.norm())
        error = off / whole if whole else (math.inf if off else 0.0)
        found[name] = error if math.isfinite(error) else math.inf
    return found


def relative(value: float, exact: float) -> float:
    """|value - exact| / |exact|; infinite if that is not a number."""
    error = abs(value - exact) / abs(exact) if exact else float(value != exact)
    return error if math.isfinite(error) else math.inf
