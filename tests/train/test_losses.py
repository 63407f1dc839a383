"""Losses compared with an oracle that shares no code with them, and with numbers worked out by hand."""

import math

import pytest
import torch

from kit.labs.split.ranks.oracle import float64_step
from kit.train import protocol
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.protocol import counts, cut

ROWS, LENGTH = 6, 9


def made(seed=0, spread=0.25, dtype=torch.float64, masks="ragged"):
    """Log-probabilities and a batch: prompts, answers, padding; a masked row, and a valid row without a valid token."""
    generator = torch.Generator().manual_seed(seed)

    def near(values):
        return values + spread * torch.randn(values.shape, generator=generator, dtype=torch.float64)

    base = -3 * torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64) - 0.5
    place = torch.arange(LENGTH)
    prompt = torch.tensor([1, 2, 0, 3, 2, 4])[:, None]
    end = torch.tensor([9, 5, 7, 4, 9, 4])[:, None]  # row 3: one token; row 5: none
    token_mask = ((place >= prompt) & (place < end)).double()
    sample_mask = torch.tensor([1.0, 1, 1, 1, 0, 1])
    if masks == "full":
        token_mask, sample_mask = torch.ones(ROWS, LENGTH), torch.ones(ROWS)
    batch = {
        "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "input_lengths": end[:, 0],
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "advantages": torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64),
        "prev_logprobs": near(base),
        "generation_logprobs": near(base),
        "reference_logprobs": near(base),
    }
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    return near(base)[:, 1:].to(dtype).contiguous(), batch


def run(loss, logprobs, batch, **by):
    """Return loss, gradient and metrics as a step would: raw sums divided by the true counts; extremes over nothing are -1."""
    logprobs = logprobs.clone().requires_grad_()
    sequences, tokens = (max(1.0, count) for count in counts(batch).tolist())
    by = by or {"tokens": tokens, "sequences": sequences}
    value, seen = loss(logprobs, batch, **by)
    value.backward()
    raw = protocol.of_microbatches([seen], loss.normalizers())
    return value, logprobs.grad, protocol.normalised(raw, loss.normalizers(), tokens=1, sequences=1)


SURROGATES = [
    {},
    {"clip_low": 0.1, "clip_high": 0.3},
    {"clip_low": 1.5},
    {"dual_clip": 1.05, "clip_low": 0.01, "clip_high": 0.01},
    {"dual_clip": 1.1},
    {"cispo": True},
    {"on_policy": True},
    {"ratio": "none"},
    {"positive_nll": 0.3},
    {"ratio": "sequences", "level": "sequences"},
    {"ratio": "sequences", "level": "sequences", "on_policy": True},
    {"ratio": "sequences", "level": "sequences", "dual_clip": 1.02, "clip_low": 0.01, "clip_high": 0.01},
]
WEIGHTS = [
    {},
    {"importance": "tokens"},
    {"importance": "sequences"},
    *(
        {"importance": importance, "truncation": truncation, "band_low": low, "band_high": high}
        for importance in ("tokens", "sequences")
        for truncation, low, high in (
            ("tis", 0.0, 1.1),
            ("tis", 0.9, 1.2),
            ("icepop", 0.8, 1.25),
            ("icepop", 1.05, 9.0),
        )
    ),
    {"importance": "tokens", "truncation": "seq-mask-tis", "band_low": 0.95, "band_high": 1.05},
]
PENALTIES = [
    {},
    *({"kl": 0.3, "kl_kind": kind} for kind in ("k1", "k2", "k3")),
    *(
        {"kl": 0.3, "kl_kind": kind, "kl_input_clamp": into, "kl_output_clamp": out}
        for kind, into, out in (
            ("k1", 0.2, None),
            ("k1", None, 0.1),
            ("k2", 0.3, 0.02),
            ("k3", 0.3, 0.02),
            ("k3", 0.2, None),
        )
    ),
]
# Every surrogate with every weight at every level. Penalties rotate, so that each meets each surrogate.
CLIPPED = [
    ClippedPolicyGradient(**{"level": level, **surrogate, **weight, **PENALTIES[(first + second) % len(PENALTIES)]})
    for first, surrogate in enumerate(SURROGATES)
    for second, weight in enumerate(WEIGHTS)
    for level in ("tokens", "sequences")
    if level == "sequences" or surrogate.get("ratio") != "sequences"
]
LOSSES = [*CLIPPED, NegativeLogLikelihood(), NegativeLogLikelihood(level="sequences")]


def agree(loss, logprobs, batch, exact, **close):
    value, gradient, table = run(loss, logprobs, batch)
    exact_logprobs = exact[0].clone().requires_grad_()
    wanted, wanted_table = float64_step(loss, exact_logprobs, exact[1])
    wanted.backward()
    assert set(table) == set(wanted_table) == set(loss.normalizers())
    torch.testing.assert_close(value.double(), wanted, **close)
    torch.testing.assert_close(gradient.double(), exact_logprobs.grad, **close)
    for name, number in wanted_table.items():
        assert table[name] == pytest.approx(number, rel=close["rtol"], abs=close["atol"]), name


@pytest.mark.parametrize("masks", ["ragged", "full"])
@pytest.mark.parametrize("part", range(6))
def test_formulas_are_the_oracles(part, masks):
    """In float64, so that rounding hides no difference."""
    logprobs, batch = made(seed=part, masks=masks)
    for loss in CLIPPED[part::6]:
        agree(loss, logprobs, batch, (logprobs, batch), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("level", ["tokens", "sequences"])
def test_likelihood_is_the_oracles(level):
    logprobs, batch = made()
    agree(NegativeLogLikelihood(level=level), logprobs, batch, (logprobs, batch), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spread", [1e-3, 0.05, 0.5])
def test_float32_is_as_near_as_float32_can_be(spread):
    logprobs, batch = made(spread=spread, dtype=torch.float32)
    exact = logprobs.double(), {name: value.double() for name, value in batch.items()}
    for loss in LOSSES[::7]:
        agree(loss, logprobs, batch, exact, rtol=2e-6, atol=3e-7)


def test_the_grid_reaches_every_branch():
    """Otherwise the comparisons above would cover little."""
    logprobs, batch = made()
    cut_some = {
        (loss.truncation, loss.importance)
        for loss in CLIPPED
        if loss.truncation != "none" and 0 < run(loss, logprobs, batch)[2]["is_oob_ratio"] < 1
    }
    assert cut_some == {(kind, by) for kind in ("tis", "icepop") for by in ("tokens", "sequences")} | {
        ("seq-mask-tis", "tokens")
    }
    table = run(ClippedPolicyGradient(), logprobs, batch)[2]
    assert table["probs_ratio_min"] < table["probs_ratio_clamped_min"] == pytest.approx(0.8)
    assert table["probs_ratio_max"] > table["probs_ratio_clamped_max"] == pytest.approx(1.2)


@pytest.mark.parametrize("loss", LOSSES[::9], ids=str)
@pytest.mark.parametrize("pieces", [[1] * ROWS, [2, 4], [5, 1], [3, 3]], ids=str)
def test_raw_sums_of_any_pieces_are_those_of_the_whole(loss, pieces):
    logprobs, batch = made(dtype=torch.float32)
    whole_value, whole_gradient, whole = run(loss, logprobs, batch, tokens=1.0, sequences=1.0)
    values, gradients, seen, start = [], [], [], 0
    for size in pieces:
        piece = logprobs[start : start + size].clone().requires_grad_()
        value, table = loss(piece, cut(batch, start, start + size), tokens=1.0, sequences=1.0)
        value.backward()
        values.append(value.item())
        gradients.append(piece.grad)
        seen.append(table)
        start += size
    raw = protocol.of_microbatches(seen, loss.normalizers())
    together = protocol.normalised(raw, loss.normalizers(), tokens=1.0, sequences=1.0)
    assert math.fsum(values) == pytest.approx(whole_value.item(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(torch.cat(gradients), whole_gradient, rtol=0, atol=0)
    assert together == pytest.approx(whole, rel=1e-14)


@pytest.mark.parametrize("loss", LOSSES[::9], ids=str)
def test_dividing_first_or_last_is_the_same(loss):
    """A plain step knows the true counts before, a split one only at its end; dividing late works because each metric has one
    normalizer."""
    logprobs, batch = made(dtype=torch.float32)
    sequences, tokens = counts(batch).tolist()
    first = run(loss, logprobs, batch)[2]
    raw = {name: value.item() for name, value in loss(logprobs, batch, tokens=1.0, sequences=1.0)[1].items()}
    last = protocol.normalised(raw, loss.normalizers(), tokens=tokens, sequences=sequences)
    assert last == pytest.approx(first, rel=1e-14)


@pytest.mark.parametrize(
    "loss", [ClippedPolicyGradient(kl=0.1), NegativeLogLikelihood()], ids=["clipped", "likelihood"]
)
def test_without_metrics_there_is_the_same_loss(loss):
    logprobs, batch = made()
    bare = type(loss)(
        **{name: getattr(loss, name) for name in loss.__dataclass_fields__ if name != "metrics"}, metrics=False
    )
    value, gradient, table = run(bare, logprobs, batch)
    wanted, wanted_gradient, wanted_table = run(loss, logprobs, batch)
    assert value == wanted
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=0)
    assert set(table) == set(bare.normalizers()) == {"loss"}
    assert table["loss"] == pytest.approx(wanted_table["loss"], rel=1e-14)


def test_metrics_have_no_graph():
    logprobs, batch = made()
    for loss in LOSSES[::9]:
        _, seen = loss(logprobs.requires_grad_(), batch, tokens=1.0, sequences=1.0)
        assert not any(value.requires_grad for value in seen.values())
