"""Large gaps between trainer and engine, and non-finite values at masked positions: still the oracle's numbers, also in float32."""

import math

import pytest
import torch

from kit.labs.split.ranks.oracle import float64_step
from kit.train import protocol
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.protocol import counts

ROWS, LENGTH = 4, 8
GAPS = [sign * size for size in (5.0, 15.0, 17.0, 50.0, 90.0, 100.0) for sign in (1, -1)]
BAND = {"band_low": 0.5, "band_high": 2.0}
LOSSES = {
    "plain": ClippedPolicyGradient(kl=0.05),
    "by-rows": ClippedPolicyGradient(level="sequences", ratio="sequences", kl=0.05),
    "weighted": ClippedPolicyGradient(importance="tokens"),
    "weighted-by-rows": ClippedPolicyGradient(level="sequences", importance="sequences"),
    "tis": ClippedPolicyGradient(importance="tokens", truncation="tis", **BAND),
    "tis-by-rows": ClippedPolicyGradient(importance="sequences", truncation="tis", **BAND),
    "icepop": ClippedPolicyGradient(importance="tokens", truncation="icepop", **BAND),
    "seq-mask-tis": ClippedPolicyGradient(importance="tokens", truncation="seq-mask-tis", **BAND),
    "on-policy": ClippedPolicyGradient(on_policy=True, importance="tokens", truncation="icepop", **BAND),
    "cispo": ClippedPolicyGradient(cispo=True),
    "likelihood": NegativeLogLikelihood(level="sequences"),
}
HIDDEN = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")


def made(gap, party="generation_logprobs"):
    """Float32 rows: a prompt, an answer, a row that does not count; at one token the trainer is `gap` above one party."""
    generator = torch.Generator().manual_seed(3)
    base = -3 * torch.rand(ROWS, LENGTH, generator=generator) - 0.5

    def near():
        return base + 0.1 * torch.randn(base.shape, generator=generator)

    place = torch.arange(LENGTH)
    end = torch.tensor([8, 6, 5, 8])[:, None]
    batch = {
        "token_mask": ((place >= 2) & (place < end)).float(),
        "sample_mask": torch.tensor([1.0, 1, 1, 0]),
        "advantages": torch.randn(ROWS, LENGTH, generator=generator),
        "prev_logprobs": near(),
        "generation_logprobs": near(),
        "reference_logprobs": near(),
    }
    logprobs = near()[:, 1:].contiguous()
    batch["prev_logprobs"][1, 4] = logprobs[1, 3] = min(-0.5, gap - 0.5)
    batch[party][1, 4] = batch["prev_logprobs"][1, 4] - gap
    return logprobs, batch


def run(loss, logprobs, batch):
    logprobs = logprobs.clone().requires_grad_()
    sequences, tokens = counts(batch).tolist()
    value, seen = loss(logprobs, batch, tokens=tokens, sequences=sequences)
    value.backward()
    return value.item(), logprobs.grad, protocol.of_microbatches([seen], loss.normalizers())


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", LOSSES)
def test_float32_rows_give_the_oracles_numbers_at_any_gap(name, gap):
    loss = LOSSES[name]
    logprobs, batch = made(gap)
    value, gradient, table = run(loss, logprobs, batch)
    exact = logprobs.double().requires_grad_()
    wanted, wanted_table = float64_step(loss, exact, {key: each.double() for key, each in batch.items()})
    wanted.backward()
    assert value == pytest.approx(wanted.item(), rel=1e-6)
    assert table == pytest.approx(wanted_table, rel=1e-6, abs=1e-12)
    torch.testing.assert_close(gradient, exact.grad.float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gap", [-100.0, -50.0, 50.0])
@pytest.mark.parametrize("name", ["plain", "by-rows", "cispo"])
def test_a_ratio_may_be_far_from_one_as_well(name, gap):
    loss = LOSSES[name]
    logprobs, batch = made(0.0)
    logprobs[1, 3] = min(-0.5, gap - 0.5)
    batch["prev_logprobs"][1, 4] = batch["generation_logprobs"][1, 4] = logprobs[1, 3] - gap
    value, gradient, table = run(loss, logprobs, batch)
    exact = logprobs.double().requires_grad_()
    wanted, wanted_table = float64_step(loss, exact, {key: each.double() for key, each in batch.items()})
    wanted.backward()
    assert value == pytest.approx(wanted.item(), rel=1e-6)
    assert table == pytest.approx(wanted_table, rel=1e-6, abs=1e-12)
    torch.testing.assert_close(gradient, exact.grad.float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_masked_rubbish_reaches_nothing_at_any_gap(name, rubbish):
    """Also for rows by sequence, where one ratio or weight per row is multiplied with masked positions."""
    loss = LOSSES[name]
    logprobs, batch = made(15.0)
    clean = run(loss, logprobs, batch)
    hidden = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    hidden[:, 0] = True
    for key in HIDDEN:
        batch[key] = batch[key].masked_fill(hidden, rubbish)
    dirty = run(loss, logprobs.masked_fill(hidden[:, 1:], rubbish), batch)
    assert dirty[0] == clean[0]
    assert dirty[2] == clean[2]
    assert torch.equal(dirty[1], clean[1])


@pytest.mark.parametrize("ratio", ["tokens", "sequences"])
@pytest.mark.parametrize("importance", ["none", "tokens", "sequences"])
def test_a_row_that_overflows_leaves_its_masked_places_alone(ratio, importance):
    """Infinity times 0 is NaN: the row's sums are infinite, but its masked positions must have a gradient of 0."""
    loss = ClippedPolicyGradient(level="sequences", ratio=ratio, importance=importance)
    logprobs, batch = made(0.0)
    inside = batch["token_mask"][1, 1:] > 0
    logprobs[1, inside] = -1.0
    for party in ("prev_logprobs", "generation_logprobs"):
        batch[party][1, 1:][inside] = -2000.0
    batch["generation_logprobs"][1, 1:][inside] = -4000.0
    batch["advantages"].fill_(-1.0)
    value, gradient, table = run(loss, logprobs, batch)
    assert value == math.inf
    assert table["probs_ratio"] == table["probs_ratio_max"] == math.inf
    assert table["sampling_importance_ratio"] == math.inf
    assert table["js_divergence_error"] == pytest.approx(4 * (1000 - math.log(2)) / 13, rel=1e-3)
    assert torch.equal(gradient[1, ~inside], torch.zeros(int((~inside).sum())))
    others = torch.arange(ROWS) != 1
    assert bool(gradient[others].isfinite().all())
