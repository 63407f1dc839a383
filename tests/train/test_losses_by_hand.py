"""Numbers that can be worked out on paper, and batches with few or no valid tokens."""

import math

import pytest
import torch

from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood

LOSSES = [
    ClippedPolicyGradient(),
    ClippedPolicyGradient(level="sequences", ratio="sequences", importance="sequences", kl=0.1),
    ClippedPolicyGradient(importance="tokens", truncation="icepop", band_low=0.5, band_high=2, kl=0.1, kl_kind="k2"),
    ClippedPolicyGradient(importance="tokens", truncation="seq-mask-tis", band_low=0.9, band_high=1.1, dual_clip=3),
    ClippedPolicyGradient(cispo=True, kl=0.1, kl_kind="k1"),
    ClippedPolicyGradient(on_policy=True, importance="sequences", truncation="tis", band_high=2),
    NegativeLogLikelihood(),
    NegativeLogLikelihood(level="sequences"),
]
NAMES = [f"{type(loss).__name__}-{index}" for index, loss in enumerate(LOSSES)]


def batch_of(token_mask, sample_mask=None, *, prev=-1.0, gen=-1.0, ref=-1.0, advantage=1.0):
    mask = torch.tensor(token_mask, dtype=torch.float64)

    def full(value):
        return torch.as_tensor(value, dtype=torch.float64).expand_as(mask).clone()

    return {
        "token_mask": mask,
        "sample_mask": torch.tensor(sample_mask or [1.0] * len(mask), dtype=torch.float64),
        "advantages": full(advantage),
        "prev_logprobs": full(prev),
        "generation_logprobs": full(gen),
        "reference_logprobs": full(ref),
    }


def run(loss, cur, batch, tokens=1.0, sequences=1.0):
    cur = torch.as_tensor(cur, dtype=torch.float64).expand_as(batch["token_mask"][:, 1:]).clone().requires_grad_()
    value, seen = loss(cur, batch, tokens=tokens, sequences=sequences)
    value.backward()
    return value.item(), cur.grad, {name: number.item() for name, number in seen.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "value", "slope"),
    [
        (1.1, 2.0, None, -2.2, -2.2),  # inside the band: -A r
        (1.5, 2.0, None, -2.4, 0.0),  # too far in the good direction: clipped, no slope
        (0.5, 2.0, None, -1.0, -1.0),  # too far in the bad direction: not clipped
        (0.5, -2.0, None, 1.6, 0.0),
        (1.5, -2.0, None, 3.0, 3.0),
        (5.0, -2.0, 3.0, 6.0, 0.0),  # dual clipping: at most -A c
        (5.0, 2.0, 3.0, -2.4, 0.0),  # ... only where A is negative
    ],
)
def test_one_token_of_ppo(ratio, advantage, dual_clip, value, slope):
    loss = ClippedPolicyGradient(dual_clip=dual_clip)
    got, gradient, _ = run(loss, -1 + math.log(ratio), batch_of([[0, 1]], advantage=advantage))
    assert got == pytest.approx(value, rel=1e-12)
    assert gradient.item() == pytest.approx(slope, rel=1e-12)


def test_cispo_keeps_the_slope_of_what_it_clips():
    got, gradient, _ = run(ClippedPolicyGradient(cispo=True), -1 + math.log(1.5), batch_of([[0, 1]], advantage=2.0))
    assert gradient.item() == pytest.approx(-2.0 * 1.2)
    assert got == pytest.approx(-2.0 * 1.2 * (-1 + math.log(1.5)))


def test_on_policy_has_ratio_one_and_a_slope():
    got, gradient, seen = run(
        ClippedPolicyGradient(on_policy=True), -3.0, batch_of([[0, 1]], prev=math.nan, advantage=2.0)
    )
    assert (got, gradient.item()) == (-2.0, -2.0)
    assert seen["probs_ratio_min"] == seen["probs_ratio_max"] == 1.0
    assert seen["sampling_importance_ratio"] == pytest.approx(math.exp(-3.0 + 1.0))


def test_a_rows_ratio_is_the_geometric_mean_of_its_tokens():
    batch = batch_of([[0, 1, 1, 0]])
    loss = ClippedPolicyGradient(level="sequences", ratio="sequences", clip_low=5, clip_high=5)
    got, gradient, seen = run(loss, [[-1 + math.log(2), -1 + math.log(8), 7.0]], batch)
    assert got == pytest.approx(-4.0)
    assert gradient[0].tolist() == pytest.approx([-2.0, -2.0, 0.0])
    assert seen["probs_ratio"] == pytest.approx(8.0)  # a sum over two tokens


def test_a_mean_over_rows_weighs_each_row_once():
    batch = batch_of([[0, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
    cur = [[-1.0] * 4, [-3.0] * 4]
    assert run(NegativeLogLikelihood(), cur, batch, tokens=5.0)[0] == pytest.approx(7 / 5)
    assert run(NegativeLogLikelihood(level="sequences"), cur, batch, sequences=2.0)[0] == pytest.approx(2.0)


def test_masks_speak_of_tokens_and_predictions_come_one_before():
    batch = batch_of([[1, 0, 0, 1]])
    got, gradient, seen = run(NegativeLogLikelihood(), [[-1.0, -10.0, -100.0]], batch)
    assert (got, seen["num_unmasked_tokens"]) == (100.0, 1.0)
    assert gradient[0].tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(("kind", "value"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_penalties(kind, value):
    """One token with a reference log-probability half a nat higher."""
    got, _, seen = run(ClippedPolicyGradient(kl=0.1, kl_kind=kind), -1.0, batch_of([[0, 1]], ref=-0.5, advantage=0.0))
    assert got == pytest.approx(0.1 * value)
    assert seen["kl_penalty"] == pytest.approx(value)  # without its coefficient


def test_penalties_are_clamped_before_and_after():
    batch = batch_of([[0, 1]], ref=4.0, advantage=0.0)
    before = ClippedPolicyGradient(kl=1, kl_input_clamp=2)
    assert run(before, -1.0, batch)[0] == pytest.approx(math.exp(2) - 3)
    after = ClippedPolicyGradient(kl=1, kl_output_clamp=10)
    assert run(after, -1.0, batch)[:2] == (10.0, torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("truncation", "loss", "ratio", "outside"),
    [
        # Weights 2 and 1/2 in the first row, 1 and 3 in the second; the band is 0.75 to 2.5.
        ({}, -6.5, 6.5, 0),
        ({"truncation": "tis"}, -6.25, 6.25, 2),
        ({"truncation": "icepop"}, -3.0, 3.0, 2),
        ({"truncation": "seq-mask-tis", "band_high": 1.5}, -2.5, 2.5, 1),  # geometric means 1 and 1.73
    ],
    ids=str,
)
def test_weights_of_tokens(truncation, loss, ratio, outside):
    band = {"band_low": 0.75, "band_high": 2.5} if truncation else {}
    batch = batch_of([[0, 1, 1], [0, 1, 1]])
    batch["generation_logprobs"][:, 1:] = -1 - torch.tensor([[2, 0.5], [1, 3]], dtype=torch.float64).log()
    got, _, seen = run(ClippedPolicyGradient(importance="tokens", **{**band, **truncation}), -1.0, batch)
    assert got == pytest.approx(loss)
    assert seen["sampling_importance_ratio"] == pytest.approx(ratio)
    assert seen["is_oob_ratio"] == outside


def test_weights_of_rows_multiply_over_their_tokens():
    batch = batch_of([[0, 1, 1], [0, 1, 1], [0, 0, 0]])
    batch["generation_logprobs"][:2, 1:] = -1 - torch.tensor([[2, 0.5], [1, 3]], dtype=torch.float64).log()
    got, _, seen = run(ClippedPolicyGradient(importance="sequences"), -1.0, batch)
    assert got == pytest.approx(-1 - 1 - 3 - 3)
    assert seen["sampling_importance_ratio"] == pytest.approx(1 + 3 + 1)  # for the empty row, the empty product
    _, _, seen = run(ClippedPolicyGradient(importance="sequences", truncation="tis", band_high=2), -1.0, batch)
    assert seen["is_oob_ratio"] == 2  # counted in tokens: both of the second row


def test_how_far_engine_and_trainer_are_apart():
    d = math.log(2)
    _, _, seen = run(ClippedPolicyGradient(), -1.5, batch_of([[0, 1]], prev=-1.0, gen=-1.0 - d))
    assert seen["token_mult_prob_error"] == pytest.approx(2.0)
    assert seen["gen_kl_error"] == pytest.approx(1 - d)
    assert seen["policy_kl_error"] == pytest.approx(d - 0.5)
    assert seen["js_divergence_error"] == pytest.approx(math.log(math.cosh(d / 2)))
    assert seen["approx_entropy"] == pytest.approx(1.5 * math.exp(d - 0.5))


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize(
    ("token_mask", "sample_mask"),
    [([[0, 0, 0]] * 2, [1, 1]), ([[0, 1, 1]] * 2, [0, 0]), ([[1, 0, 0]] * 2, [1, 0]), ([[1]] * 2, [1, 1])],
    ids=["no token", "no row", "nothing but a first token", "rows of one token, which nothing predicts"],
)
def test_nothing_valid_is_exactly_nothing(loss, token_mask, sample_mask):
    """A data rank without a valid token takes part in everything and contributes 0."""
    batch = batch_of(token_mask, sample_mask, prev=math.nan, gen=-math.inf, ref=math.nan, advantage=math.inf)
    value, gradient, seen = run(loss, math.nan, batch)
    assert value == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    rows = float(sum(sample_mask))
    for name, number in seen.items():
        if name.endswith("_min"):
            assert number == math.inf
        elif name.endswith("_max"):
            assert number == -math.inf
        elif name == "num_valid_samples" or (name == "sampling_importance_ratio" and loss.importance == "sequences"):
            assert number == rows
        else:
            assert number == 0.0, name


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_what_stands_in_masked_places_is_not_seen(loss, rubbish):
    token_mask = [[1, 1, 0, 1], [1, 1, 1, 1]]
    cur = torch.tensor([[-1.0, rubbish, -1.1], [rubbish] * 3], dtype=torch.float64)
    batch = batch_of(token_mask, [1, 0], prev=-1.05, gen=-1.02)
    clean = run(loss, cur.nan_to_num(0.0, 0.0, 0.0), batch)
    masked = batch["token_mask"] * batch["sample_mask"][:, None] == 0
    masked[:, 0] = True
    for name in ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs"):
        batch[name][masked] = rubbish
    dirty = run(loss, cur, batch)
    assert dirty[0] == clean[0]
    assert math.isfinite(dirty[0])
    assert torch.equal(dirty[1], clean[1])
    assert dirty[2] == clean[2]


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_a_row_of_one_token_and_an_empty_row(loss):
    batch = batch_of([[0, 1, 0], [0, 0, 0]], prev=-1.05, gen=-1.02)
    value, gradient, seen = run(loss, -1.0, batch)
    alone = run(loss, -1.0, {name: tensor[:1] for name, tensor in batch.items()})
    assert value == alone[0] != 0
    assert gradient[0, 0] != 0
    assert torch.count_nonzero(gradient) == 1
    assert (seen["num_valid_samples"], seen["num_unmasked_tokens"]) == (2, 1)


@pytest.mark.parametrize(
    ("places", "loss_is_finite", "gradient_is_finite"),
    [
        ({"prev": -math.inf}, True, False),  # the ratio is infinite; clipping limits the loss, not the gradient
        ({"prev": -math.inf, "advantage": -1.0}, False, False),
        ({"gen": -math.inf}, False, False),  # the weight is infinite
        ({"ref": -math.inf}, False, True),  # the penalty is infinite but its slope goes to 1: only the loss shows it
        ({"advantage": math.inf}, False, False),
        ({"prev": math.nan}, False, False),
    ],
    ids=str,
)
def test_infinities_that_count_are_not_hidden(places, loss_is_finite, gradient_is_finite):
    """A non-finite gradient has a non-finite norm, so the update is skipped."""
    value, gradient, _ = run(ClippedPolicyGradient(importance="tokens", kl=0.1), -1.0, batch_of([[0, 1]], **places))
    assert math.isfinite(value) == loss_is_finite
    assert bool(gradient.isfinite().all()) == gradient_is_finite


def test_a_token_that_the_model_has_ruled_out():
    """The token's ratio is 0, which the loss can handle; its entropy is NaN."""
    value, gradient, seen = run(ClippedPolicyGradient(), -math.inf, batch_of([[0, 1]], advantage=-1.0))
    assert (value, gradient.item()) == (pytest.approx(0.8), 0.0)
    assert seen["probs_ratio_min"] == 0.0
    assert math.isnan(seen["approx_entropy"])
    assert run(NegativeLogLikelihood(), -math.inf, batch_of([[0, 1]]))[0] == math.inf
