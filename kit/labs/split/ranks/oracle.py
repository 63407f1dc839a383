"""The lab's own mathematics: losses and optimizer updates in float64 as oracles, the loss on extreme rows, and distances between tensors.

Nothing of the code under test is imported: only settings are shared with it. `oracle` takes all rows of a step, over all data-parallel
ranks, one token at a time, and returns the numbers that the step must give: the loss with its graph, and every metric, divided by the true
counts. It is slow, and meant for some thousand tokens. From the weights before the first step and the gradients that the optimizer got in
each step, `replay` computes the weights afterwards (clipping by the global norm, AdamW, schedule), and `steps` the numbers that each result
must have. Extreme rows are those that rollouts do not produce: large gaps between trainer and engine, and NaN or infinities in masked
places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

NOTHING_SEEN = -1.0
EPS = 2.0**-23  # of float32, in which gradients are
ROUNDING = 64  # a gradient below this many roundings of the model's largest gradient is noise
GAPS = tuple(sign * size for size in (5.0, 15.0, 17.0, 50.0, 90.0, 100.0, 1000.0) for sign in (1.0, -1.0))
RUBBISH = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PARTIES = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")
ROWS = 8
FAR = math.log(5.0)
FLOOR = 1e-2  # errors of smaller numbers are absolute, as in the checks
SMALLEST = 2.0**-126  # of float32
Tensors = dict[str, torch.Tensor]
Exact = Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, dict[str, float]]]


class Token(NamedTuple):
    """One valid token. `now` is the model's log-probability with its graph; the others are plain numbers."""

    now: torch.Tensor
    before: float
    engine: float
    reference: float
    advantage: float


class JudgedStep(NamedTuple):
    loss: torch.Tensor
    penalty: float
    ratio: float
    clipped: float
    weight: float
    outside: bool


def float64_step(settings: Any, logprobs: torch.Tensor, batch: Tensors) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics of the step. `logprobs[i, t]` belongs to token t + 1 of row i."""
    if logprobs.dtype != torch.float64:
        raise TypeError(f"the oracle needs log-probabilities in float64, not {logprobs.dtype}")
    rows = _valid_rows(settings, logprobs, batch)
    count = max(1, sum(len(row) for row in rows))
    table = {}
    if hasattr(settings, "clip_low"):
        judged = [_judge(settings, row) for row in rows]
        losses = [[token.loss for token in row] for row in judged]
        table = _clipped_table(settings, rows, judged, count)
    else:
        losses = [[-token.now for token in row] for row in rows]
    if getattr(settings, "positive_nll", True):  # always a metric of the negative log-likelihood
        praised = [-token.now.item() for row in rows for token in row if token.advantage > 0]
        table["positive_nll_loss"] = math.fsum(praised)
    # A step without a valid token still has a graph, with a gradient of exactly 0.
    total = torch.zeros_like(logprobs).mul(logprobs.nan_to_num(0.0, 0.0, 0.0)).sum()
    for row in losses:
        for token_loss in row:
            total = total + (
                token_loss / count if settings.level == "tokens" else token_loss / len(row) / max(1, len(rows))
            )
    table |= {
        "loss": total.item(),
        "num_valid_samples": float(len(rows)),
        "num_unmasked_tokens": float(sum(len(row) for row in rows)),
    }
    return total, table


def by_itself(loss: Any, logprobs: torch.Tensor, batch: Tensors) -> tuple[torch.Tensor, dict[str, float]]:
    """For your own loss, with unknown formulas: its value over all rows at once, in float64, divided by the true counts."""
    sequences, tokens = true_counts(batch)
    value, _ = loss(logprobs, widened(batch), tokens=float(max(1, tokens)), sequences=float(max(1, sequences)))
    return value, {"loss": value.item()}


def widened(batch: Tensors) -> Tensors:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def true_counts(batch: Tensors) -> tuple[int, int]:
    """Valid sequences and valid tokens, counted one by one. Nothing predicts a row's first token."""
    rows = zip(batch["sample_mask"].tolist(), batch["token_mask"].tolist(), strict=True)
    kept = [tokens for row, tokens in rows if row]
    return len(kept), sum(1 for tokens in kept for token in tokens[1:] if token)


def _exp(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).exp().item()  # infinite where math.exp overflows


def _valid_rows(settings: Any, logprobs: torch.Tensor, batch: Tensors) -> list[list[Token]]:
    """The valid tokens of each valid row; a row may have none."""
    names = ("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages")

    def token(i: int, place: int) -> Token:
        now = logprobs[i, place - 1]
        before, *numbers = (batch[name][i, place].item() for name in names)
        return Token(now, now.item() if getattr(settings, "on_policy", False) else before, *numbers)

    masks = zip(batch["sample_mask"].tolist(), batch["token_mask"].tolist(), strict=True)
    return [
        [token(i, place) for place, counts in enumerate(row) if place and counts]
        for i, (row_counts, row) in enumerate(masks)
        if row_counts
    ]


def _judge(settings: Any, row: Sequence[Token]) -> list[JudgedStep]:
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
            JudgedStep(
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
    settings: Any, rows: Sequence[Sequence[Token]], judged: Sequence[Sequence[JudgedStep]], count: int
) -> dict[str, float]:
    done = [token for row in judged for token in row]
    ratios, clipped = [part.ratio for part in done], [part.clipped for part in done]
    n_rows = max(1, len(rows))
    numbers = [[token.now.item(), token.before, token.engine] for row in rows for token in row]
    now, before, engine = torch.tensor(numbers, dtype=torch.float64).view(-1, 3).unbind(1)
    mixture = torch.logaddexp(before, engine) - math.log(2)

    def mean(values: Sequence[float] | torch.Tensor) -> float:
        return torch.as_tensor(values, dtype=torch.float64).sum().item() / count

    penalty, weight = mean([part.penalty for part in done]), mean([part.weight for part in done])
    outside = mean([part.outside for part in done])
    if settings.level == "sequences":
        penalty = math.fsum(sum(part.penalty for part in row) / len(row) for row in judged if row) / n_rows
    if settings.importance == "sequences":
        # An empty row's weight is an empty product, which truncation treats as any other.
        weights = [row[0].weight if row else _weigh(settings, 0.0, [], row_outside=False)[0] for row in judged]
        weight = math.fsum(weights) / n_rows
    if settings.truncation == "seq-mask-tis":
        outside = sum(row[0].outside for row in judged if row) / n_rows
    return {
        "kl_penalty": penalty,
        "probs_ratio": mean(ratios),
        "probs_ratio_clamped": mean(clipped),
        "probs_ratio_min": min(ratios, default=NOTHING_SEEN),
        "probs_ratio_max": max(ratios, default=NOTHING_SEEN),
        "probs_ratio_clamped_min": min(clipped, default=NOTHING_SEEN),
        "probs_ratio_clamped_max": max(clipped, default=NOTHING_SEEN),
        "token_mult_prob_error": mean((engine - before).abs().exp()),
        "gen_kl_error": mean(_k3(before - engine)),
        "policy_kl_error": mean(_k3(engine - before)),
        "js_divergence_error": mean((_k3(before - mixture) + _k3(engine - mixture)) / 2),
        "approx_entropy": mean(-(now - engine).exp() * now),
        "sampling_importance_ratio": weight,
        "is_oob_ratio": outside,
    }


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.expm1() - log_ratio


class ExpectedStep(NamedTuple):
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


def expected_steps(
    settings: Any, gradients: Sequence[Mapping[str, torch.Tensor]], sequences: int
) -> list[ExpectedStep]:
    """Norm, learning rate and decay of every step. A step without gradients was skipped and does not advance the schedule."""
    made, seen = [], 0
    for tensors in gradients:
        squares = [torch.dot(flat, flat).item() for flat in (value.double().flatten() for value in tensors.values())]
        norm = math.sqrt(math.fsum(squares)) if tensors else math.nan
        lr = learning_rate(settings, seen)
        made.append(ExpectedStep(norm=norm, norm_rounding=norm_rounding(tensors), lr=lr, wd=settings.weight_decay))
        seen += sequences if tensors else 0
    return made


def norm_rounding(tensors: Mapping[str, torch.Tensor]) -> float:
    """The relative error that rounding allows for a norm that is summed in float32, tensor by tensor, in any order.

    Each of n additions rounds by at most half an EPS, up or down. The error of the sum is about sqrt(n) of these, and that of its root
    half as much. Four times that is allowed. torch's own norm of 16384 elements uses a tenth of it, 1.5e-6.
    """
    return EPS * math.sqrt(max((value.numel() for value in tensors.values()), default=0))


def unclipped(settings: Any, gradients: Tensors, norm: float) -> Tensors:
    """Gradients before clipping, also if the step clips them before it calls the optimizer.

    Clipped gradients have exactly the norm that clipping leaves, while the step reports a larger one. They are multiplied in float64 by
    the factor that follows from the reported `norm`; if that is wrong, so are they. Other gradients are returned unchanged.
    """
    factor = (norm + 1e-6) / settings.clip
    if not gradients or not factor > 1:
        return gradients
    (now,) = expected_steps(settings, [gradients], 0)
    if relative(now.norm, norm / factor) > now.norm_rounding + EPS:
        return gradients
    return {name: value.double() * factor for name, value in gradients.items()}


def replay_tensor(
    settings: Any, start: torch.Tensor, gradients: Sequence[torch.Tensor | None], done: Sequence[ExpectedStep]
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
    settings: Any,
    start: Tensors,
    end: Tensors,
    gradients: Sequence[Tensors],
    done: Sequence[ExpectedStep],
    *,
    eps: float,
) -> dict[str, float]:
    """The error of every tensor after all steps, relative to the distance that it had to move. Rounding is excluded; `eps` is the relative
    rounding of the dtype of the weights."""
    errors = {}
    for name, before in start.items():
        must = replay_tensor(settings, before, [step.get(name) if step else None for step in gradients], done)
        rounding = len(gradients) * eps * must.abs()
        beyond = ((end[name].double() - must).abs() - rounding).clamp(min=0)
        errors[name] = relative_distance(float(beyond.norm()), float((must - before.double()).norm()))
    return errors


def relative(value: float, exact: float, floor: float = SMALLEST) -> float:
    """Relative error, absolute below the floor; infinite if either number is not finite."""
    error = abs(value - exact) / max(abs(exact), floor)
    return error if math.isfinite(error) else math.inf


def apart(value: float, exact: float, floor: float) -> float:
    """The same, but equal infinities and NaN on both sides have no error."""
    same = value == exact or (math.isnan(value) and math.isnan(exact))
    return 0.0 if same else relative(value, exact, floor)


# -- the loss on extreme rows ------------------------------------------------------------------------------------------------


def few_rows(batch: Tensors, gap: float = 0.0, *, alone: bool = False) -> tuple[torch.Tensor, Tensors]:
    """A few rows of a step on the host, and float32 log-probabilities near the trainer's; one token in seven is off by a factor of 5.

    For one token the engine is `gap` below the trainer; with `alone` no other token counts, so that no sum hides it.
    """
    few = {name: value[:ROWS].cpu().clone() for name, value in batch.items()}
    place = torch.arange(few["prev_logprobs"].numel()).view_as(few["prev_logprobs"])
    near = torch.sin(place) / 10 + torch.where(place % 7 == 0, FAR, 0.0) * torch.sign(torch.sin(3.0 * place))
    valid_places = (~masked(few)).nonzero().tolist()
    if gap and valid_places:
        row, column = valid_places[len(valid_places) // 2]
        few["prev_logprobs"][row, column] = min(-0.5, gap - 0.5)
        few["generation_logprobs"][row, column] = few["prev_logprobs"][row, column] - gap
        few["reference_logprobs"][row, column] = few["prev_logprobs"][row, column]
        if alone:
            few["token_mask"].zero_()
            few["token_mask"][row, column] = 1.0
    return (few["prev_logprobs"] + near)[:, 1:].contiguous(), few


def masked(batch: Tensors) -> torch.Tensor:
    """The places that do not count; nothing predicts a row's first token."""
    hidden = batch["token_mask"] * batch["sample_mask"][:, None] == 0
    hidden[:, 0] = True
    return hidden


def gap_error(loss: Any, exact: Exact, batch: Tensors, gap: float) -> tuple[float, str]:
    """The largest error of loss, metrics and gradient against `exact(logprobs, batch)` at a gap, and the name of that number."""
    among = errors_at(loss, exact, *few_rows(batch, gap), FLOOR)
    alone = errors_at(loss, exact, *few_rows(batch, gap, alone=True), SMALLEST)
    errors = {**among, **{f"{name} of that token alone": error for name, error in alone.items()}}
    name = max(errors, key=lambda number: errors[number])
    return errors[name], name


def errors_at(loss: Any, exact: Exact, logprobs: torch.Tensor, batch: Tensors, floor: float) -> dict[str, float]:
    value, table, gradient = trained(loss, logprobs, batch)
    sharp = logprobs.double().requires_grad_()
    wanted, wanted_table = exact(sharp, widened(batch))
    (slope,) = torch.autograd.grad(wanted, sharp)
    slope = slope.to(gradient.dtype)
    errors = {name: apart(table.get(name, math.nan), number, floor) for name, number in wanted_table.items()}
    errors["value to differentiate"] = apart(value, wanted.item(), floor)
    off = torch.where(gradient == slope, 0.0, gradient - slope).double().norm().item()  # equal infinities are equal
    whole = slope[slope.isfinite()].double().norm().item()
    return {**errors, "gradient": off / max(whole, floor) if math.isfinite(off) else math.inf}


def masked_reach(loss: Any, batch: Tensors, rubbish: float) -> list[str]:
    """The numbers that change if masked places hold `rubbish`. None may change, not by one bit."""
    logprobs, few = few_rows(batch)
    clean, clean_table, clean_gradient = trained(loss, logprobs, few)
    if any(map(math.isnan, clean_table.values())):
        return ["metrics are NaN even without it"]
    hidden = masked(few)
    dirty = {name: value.masked_fill(hidden, rubbish) if name in PARTIES else value for name, value in few.items()}
    value, table, gradient = trained(loss, logprobs.masked_fill(hidden[:, 1:], rubbish), dirty)
    reached = [name for name, number in table.items() if number != clean_table.get(name)]
    reached += ["value to differentiate"] if value != clean else []
    return reached + ([] if torch.equal(gradient, clean_gradient) else ["gradient"])


def trained(loss: Any, logprobs: torch.Tensor, batch: Tensors) -> tuple[float, dict[str, float], torch.Tensor]:
    """Value, metrics and gradient, divided by the true counts; an extreme without values is -1."""
    own = logprobs.clone().requires_grad_()
    kept = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    tokens, sequences = max(1.0, kept.sum().item()), max(1.0, batch["sample_mask"].sum().item())
    value, seen = loss(own, batch, tokens=tokens, sequences=sequences)
    (gradient,) = torch.autograd.grad(value, own)
    table = {name: float(number) for name, number in seen.items()}
    empty = {name: -1.0 for name, number in table.items() if name.endswith(("_min", "_max")) and math.isinf(number)}
    return value.item(), {**table, **empty}, gradient


# -- the load-balancing loss of experts --------------------------------------------------------------------------------------


def balance(hidden: torch.Tensor, weight: torch.Tensor, choices: int) -> float:
    """E * sum(f P) for the router of one layer and one microbatch: f is the share of choices of each of the E experts, P the mean of
    its softmax probability."""
    tokens = hidden.double().flatten(0, -2)
    chances = torch.softmax(tokens @ weight.double().T, dim=-1)
    chosen = chances.argsort(dim=-1, descending=True)[:, :choices]
    share = torch.bincount(chosen.flatten(), minlength=len(weight)).double() / chosen.numel()
    return float(len(weight) * torch.dot(share, chances.mean(0)))


# -- distances between tensors -----------------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """One tensor: ||a - b|| / ||b||, and the element that differs most."""

    error: float
    place: int
    worst: float


def overall(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors; infinite if a tensor is missing or not finite."""
    if set(a) != set(b):
        return math.inf
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    whole = sum(float(b[name].double().square().sum()) for name in b)
    return relative_distance(apart**0.5, whole**0.5)


def common_factor(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], allowed: float) -> float | None:
    """The number of which `a` is that many times `b`, over all tensors, or None where there is no such number but 0."""
    if set(a) != set(b):
        return None
    along = math.fsum(float((a[name].double() * b[name].double()).sum()) for name in b)
    whole = math.fsum(float(b[name].double().square().sum()) for name in b)
    factor = along / whole if whole else 0.0
    if not factor or not math.isfinite(factor):
        return None
    scaled = {name: value.double() * factor for name, value in b.items()}
    return factor if overall(a, scaled) <= allowed else None


def relative_distance(apart: float, whole: float) -> float:
    """apart / whole; infinite if a number is not finite, or if only `whole` is 0."""
    if not (math.isfinite(apart) and math.isfinite(whole)):
        return math.inf
    return apart / whole if whole else (math.inf if apart else 0.0)


def by_tensor(a: Tensors, b: Tensors) -> dict[str, Distance]:
    """The distance of every tensor; infinite if `a` or `b` lacks it."""
    distances = {}
    for name in (name for name in b if name in a):
        left, right = a[name].double(), b[name].double()
        apart = (left - right).abs().flatten()
        index = int(apart.argmax())
        distances[name] = Distance(
            relative_distance(float(apart.norm()), float(right.norm())), index, float(apart[index])
        )
    return distances | dict.fromkeys(sorted(set(a) ^ set(b)), Distance(math.inf, 0, math.inf))


def certain(gradients: Tensors) -> Tensors:
    """Masks of the elements with a gradient above rounding. Adam turns the noise of the others into whole steps."""
    largest = max((float(value.abs().max()) for value in gradients.values()), default=0.0)
    return {name: value.abs() > ROUNDING * EPS * largest for name, value in gradients.items()}
