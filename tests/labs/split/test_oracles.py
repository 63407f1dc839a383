"""The lab's oracles alone, without ranks: they agree with right results and detect wrong ones."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.labs.split.ranks import noise
from kit.labs.split.ranks import oracle as module
from kit.labs.split.ranks.oracle import by_itself, float64_step, true_counts
from kit.megatron.config import GEOMETRIES
from kit.train.fsdp import Schedule
from kit.train.losses import ClippedPolicyGradient
from kit.train.options import Settings
from kit.train.plain import from_weights, initial_weights, plain_logprobs

TOLD = Settings(
    first_lr=1e-4, last_lr=2e-4, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, clip=0.1, warmup=20, decay=80
)
SEQUENCES = 10
EPS = 2.0**-23
Tensors = dict[str, torch.Tensor]


def trained(reported: Settings, steps: int = 6, *, clip: bool = True, decay_vectors: bool = False) -> tuple[Any, ...]:
    """Return weights before and after steps of torch's own AdamW in float32, and the gradients and learning rate of each step."""
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(*size, generator=generator).requires_grad_() for name, size in (("w", (9, 7)), ("b", (7,)))
    }
    start = {name: value.detach().clone() for name, value in params.items()}
    groups = [
        {"params": [params["w"]], "weight_decay": reported.weight_decay},
        {"params": [params["b"]], "weight_decay": reported.weight_decay if decay_vectors else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=reported.betas, eps=reported.eps)
    schedule = Schedule(optimizer, reported)
    seen, rates = [], []
    for _ in range(steps):
        for value in params.values():
            value.grad = torch.randn(value.shape, generator=generator) * 0.05
        seen.append({name: value.grad.clone() for name, value in params.items() if value.grad is not None})
        rates.append(optimizer.param_groups[0]["lr"])
        if clip:
            torch.nn.utils.clip_grad_norm_(params.values(), reported.clip)
        optimizer.step()
        schedule.step(SEQUENCES)
    return start, {name: value.detach() for name, value in params.items()}, seen, rates


def worst(reported: Settings, start: Tensors, end: Tensors, seen: list[Tensors]) -> float:
    done = module.expected_steps(reported, seen, SEQUENCES)
    return max(module.moved(reported, start, end, seen, done, eps=EPS).values())


def test_the_oracles_import_nothing_of_what_they_check() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not {name for name in names if name and name.split(".")[0] == "kit"}


def test_updates_are_those_of_torch() -> None:
    start, end, seen, rates = trained(TOLD)
    assert worst(TOLD, start, end, seen) < 2e-6
    done = module.expected_steps(TOLD, seen, SEQUENCES)
    assert [step.lr for step in done] == pytest.approx(rates, rel=1e-12)
    assert rates[0] < rates[1] < rates[2] > rates[3] > rates[4]  # up, and down again
    whole = torch.cat([value.flatten() for value in seen[0].values()])
    assert done[0].norm == pytest.approx(float(whole.norm()), rel=1e-6)
    assert done[0].norm > TOLD.clip


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_decay": 0.09},
        {"betas": (0.9, 0.95)},
        {"betas": (0.8, 0.96)},
        {"eps": 1e-8},
        {"clip": 0.2},
        {"first_lr": 2e-4},
        {"lr": 1.001e-3},
        {"warmup": 30},
        {"decay": 90},
        {"last_lr": 1e-4},
    ],
    ids=str,
)
def test_another_setting_is_seen(wrong: dict[str, Any]) -> None:
    start, end, seen, _ = trained(dataclasses.replace(TOLD, **wrong))
    assert worst(TOLD, start, end, seen) > 2e-5


@pytest.mark.parametrize("wrong", [{"clip": False}, {"decay_vectors": True}], ids=str)
def test_a_wrong_update_is_seen(wrong: dict[str, bool]) -> None:
    start, end, seen, _ = trained(TOLD, **wrong)
    assert worst(TOLD, start, end, seen) > 2e-5


def test_a_step_that_was_skipped_moves_nothing() -> None:
    start, end, seen, _ = trained(TOLD)
    assert worst(TOLD, start, end, [seen[0], {}, *seen[1:]]) < 2e-6
    assert worst(TOLD, start, start, [{}, {}]) == 0.0
    assert worst(TOLD, start, end, [{}, {}]) == math.inf


def odd_gradients(seed: int) -> Tensors:
    """Gradients with elements of very different size, as an embedding has."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embedding": (256, 64), "bias": (64,)}
    return {
        name: torch.randn(size, generator=generator) * torch.exp(2 * torch.randn(size, generator=generator))
        for name, size in sizes.items()
    }


def test_a_float32_norm_is_within_its_rounding() -> None:
    """torch's norm of 16384 elements is off by more than 1e-6, whole or in shards; without a small tensor it is off by even more."""
    off = []
    for seed in range(5):
        found = odd_gradients(seed)
        (step,) = module.expected_steps(TOLD, [found], SEQUENCES)
        whole = torch.nn.utils.get_total_norm(found.values()).item()
        shards = torch.nn.utils.get_total_norm([half for value in found.values() for half in value.chunk(2)]).item()
        off += [module.relative(norm, step.norm) for norm in (whole, shards)]
        assert max(off) < step.norm_rounding < 2e-5
        assert module.relative(found["embedding"].double().norm().item(), step.norm) > step.norm_rounding
    assert max(off) > 1e-6


def test_a_number_that_is_no_number_is_no_match() -> None:
    """Equal non-finite numbers match only for losses on extreme rows, where both may be infinite."""
    for value in (math.nan, math.inf):
        assert module.relative(value, value) == math.inf
        assert module.apart(value, value, 1.0) == 0.0
        assert module.apart(1.0, value, 1.0) == module.apart(value, 1.0, 1.0) == math.inf


def clipped_first(found: Tensors, limit: float) -> tuple[Tensors, float]:
    """Return gradients as torch's clip_grad_norm_ leaves them, and the norm that it returns."""
    made = [value.clone().requires_grad_() for value in found.values()]
    for one, value in zip(made, found.values(), strict=True):
        one.grad = value.clone()
    norm = torch.nn.utils.clip_grad_norm_(made, limit).item()
    return {name: one.grad for name, one in zip(found, made, strict=True) if one.grad is not None}, norm


def test_gradients_that_were_clipped_first_are_made_whole() -> None:
    found = odd_gradients(0)
    clipped, norm = clipped_first(found, TOLD.clip)
    assert module.overall(clipped, found) > 0.9
    assert module.overall(module.unclipped(TOLD, clipped, norm), found) < 1e-7
    assert module.unclipped(TOLD, found, norm) is found  # the optimizer clips
    small = {name: value * (0.01 / norm) for name, value in found.items()}
    assert module.unclipped(TOLD, small, 0.01) is small  # nothing to clip
    assert module.unclipped(TOLD, {}, math.nan) == {}


def test_gradients_that_were_clipped_wrongly_stay_wrong() -> None:
    found = odd_gradients(0)
    other, norm = clipped_first(found, TOLD.clip * 1.001)
    assert module.unclipped(TOLD, other, norm) is other
    clipped, norm = clipped_first({**found, "bias": found["bias"] * 1.01}, TOLD.clip)
    assert module.overall(module.unclipped(TOLD, clipped, norm), found) > 1e-5
    doubled, norm = clipped_first({name: value * 2 for name, value in found.items()}, TOLD.clip)
    assert module.overall(module.unclipped(TOLD, doubled, norm), found) == pytest.approx(1.0, rel=1e-5)


def rows(count: int = 8, length: int = 10) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    place = torch.arange(length)
    end = torch.randint(5, length + 1, (count, 1), generator=generator)
    mask = ((place >= 3) & (place < end)).float()
    mask[::4, [0, -1]] = 1.0
    sample = torch.ones(count)
    sample[1] = 0.0

    def near() -> torch.Tensor:
        return -2 + 0.1 * torch.randn(count, length, generator=generator)

    return {
        "token_mask": mask,
        "sample_mask": sample,
        "advantages": 10 * (near() + 2),
        "prev_logprobs": near(),
        "generation_logprobs": near(),
        "reference_logprobs": near(),
    }


def test_counts_are_of_what_is_predicted() -> None:
    batch = {
        "token_mask": torch.tensor([[1.0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]),
        "sample_mask": torch.tensor([1.0, 1, 0]),
    }
    assert true_counts(batch) == (2, 2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cancels(ClippedPolicyGradient):
    """Computes exp as expm1 + 1, in float32."""

    def _weight(self, gap: torch.Tensor, length: torch.Tensor) -> Any:
        return super(Cancels, self)._weight((gap.float().expm1() + 1).double().log(), length)


@pytest.mark.parametrize("gap", module.GAPS)
def test_the_losses_hold_at_every_gap(gap: float) -> None:
    for options in ({"kl": 0.05}, {"importance": "sequences"}, {"dual_clip": 3.0}, {"ratio": "none"}):
        loss = ClippedPolicyGradient(**options)
        error, name = module.gap_error(loss, functools.partial(float64_step, loss), rows(), gap)
        assert error < 1e-6, (options, name)


def test_a_cancellation_is_seen() -> None:
    loss = Cancels(importance="tokens")
    assert module.gap_error(loss, functools.partial(float64_step, loss), rows(), -15.0)[0] > 1e-3
    assert module.gap_error(loss, functools.partial(by_itself, loss), rows(), 17.0)[0] < 1e-5


def test_rows_reach_what_a_ratio_is_clipped_for() -> None:
    """Otherwise a missing dual clip would not show."""
    plain, bounded = ClippedPolicyGradient(), ClippedPolicyGradient(dual_clip=3.0)
    logprobs, batch = module.few_rows(rows(16))
    assert module.trained(plain, logprobs, batch)[0] != module.trained(bounded, logprobs, batch)[0]


class Multiplies:
    """Multiplies masked positions by 0."""

    level = "tokens"

    def normalizers(self) -> dict[str, Any]:
        return {"loss": "tokens"}

    def __call__(self, logprobs: torch.Tensor, batch: Tensors, *, tokens: float, **_: float) -> Any:
        loss = -(logprobs * batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum() / tokens
        return loss, {"loss": loss.detach()}


@pytest.mark.parametrize("rubbish", module.RUBBISH.values())
def test_what_reaches_masked_places_is_named(rubbish: float) -> None:
    wrong: Any = Multiplies()
    assert module.masked_reach(wrong, rows(), rubbish) == ["loss", "value to differentiate"]
    assert module.masked_reach(ClippedPolicyGradient(kl=0.1), rows(), rubbish) == []


def test_a_balance_by_hand() -> None:
    """Each token takes two of three experts; every choice and every probability is counted one by one."""
    hidden, weight = torch.sin(torch.arange(40.0)).view(5, 2, 4), torch.cos(torch.arange(12.0)).view(3, 4)
    choices, chances = [0.0] * 3, [0.0] * 3
    for token in hidden.flatten(0, 1).tolist():
        slopes = [math.exp(sum(a * b for a, b in zip(token, row, strict=True))) for row in weight.tolist()]
        for expert, slope in enumerate(slopes):
            chances[expert] += slope / sum(slopes) / 10
            choices[expert] += (slope > min(slopes)) / 20
    wanted = 3 * sum(share * chance for share, chance in zip(choices, chances, strict=True))
    assert module.balance(hidden, weight, 2) == pytest.approx(wanted, rel=1e-12)
    assert module.balance(hidden, torch.zeros(3, 4), 3) == pytest.approx(1.0, rel=1e-12)  # perfectly balanced


def test_gradients_that_differ_by_a_factor_alone_have_it() -> None:
    exact = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[3.0]])}
    assert module.common_factor({name: 2 * value for name, value in exact.items()}, exact, 1e-5) == 2
    assert module.common_factor({name: -value / 8 for name, value in exact.items()}, exact, 1e-5) == -0.125
    assert module.common_factor({**exact, "b": 2 * exact["b"]}, exact, 1e-5) is None
    assert module.common_factor({"a": exact["a"]}, exact, 1e-5) is None
    assert module.common_factor(exact, {name: value * 0 for name, value in exact.items()}, 1e-5) is None


def noise_in(dtype: torch.dtype, steps: int = 2) -> dict[str, noise.Noise]:
    """The noise of a small model on made-up rows, of which some have ratios at the clipping threshold."""
    geometry = dataclasses.replace(GEOMETRIES["tiny"], layers=1, vocab=32)
    generator = torch.Generator().manual_seed(1)
    weights = initial_weights(geometry, 1)
    shape = (4, 12)
    rows = {
        "input_ids": torch.randint(32, shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator),
        "token_mask": torch.ones(shape),
        "sample_mask": torch.ones(4),
    }
    now = torch.nn.functional.pad(plain_logprobs(from_weights(geometry, weights), rows["input_ids"]).detach(), (1, 0))
    for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs"):
        rows[name] = now - math.log(1.2) * (torch.arange(12) % 4 == 0)
    arithmetic = noise.OracleTraining(
        geometry=geometry,
        exact=functools.partial(float64_step, ClippedPolicyGradient(level="tokens")),
        settings=TOLD,
        dtype=dtype,
        device=torch.device("cpu"),
        batch=4,
        micro_batch=2,
    )
    return noise.measure(arithmetic, weights, [rows] * steps, floor=module.FLOOR)


def test_the_noise_of_a_step_is_that_of_its_dtype() -> None:
    """A step scaled by 3 differs by rounding only, and a token at the threshold of clipping may lose its slope."""
    fine, coarse = noise_in(torch.float32), noise_in(torch.bfloat16)
    assert coarse.keys() == fine.keys() == {"gradients", "weights", "later", "exact"}
    for name in fine:
        assert 0 < fine[name].rounding < 1e-5
        assert 1e-4 < coarse[name].rounding < 0.3
    assert coarse["exact"].reach > 0.1
    assert coarse["gradients"].reach == 0


def test_one_step_has_no_later_noise() -> None:
    assert noise_in(torch.bfloat16, steps=1)["later"] == noise.Noise(0.0, 0.0)
