"""What flows back into a sample shows whether, and how often, a trainer learned from it."""

from __future__ import annotations

import pytest
import torch

from kit.actors.samples import Key, SampleRow
from kit.labs.stream.ranks.learned import Flowed, Learned, WatchedLoss, learned
from kit.labs.stream.ranks.oracle import FedSample
from kit.train.losses import ClippedPolicyGradient
from kit.train.protocol import Batch, Loss

PROMPT, LENGTH = (4, 9), 6
ALLOWED = 1e-5
LOSS = ClippedPolicyGradient(importance="tokens", kl=0.05)  # it reads every column
ADVANTAGES = {0: 1.0, 1: -0.5, 2: 0.0, 3: -0.5}


def fed(sample: int, answer: tuple[int, ...] = (1, 2, 3)) -> FedSample:
    row = SampleRow(
        group=0,
        sample=sample,
        attempt=0,
        replica="replica 0",
        prompt=PROMPT,
        answer=answer,
        logprobs=(-1.0,) * len(answer),
        versions=(0,) * len(answer),
        minimum=0,
        reward=0.0,
    )
    ids = torch.zeros(LENGTH, dtype=torch.long)
    ids[: len(row.tokens)] = torch.tensor(row.tokens)
    mask = torch.zeros(LENGTH)
    mask[len(PROMPT) : len(row.tokens)] = 1.0
    old = torch.full((LENGTH,), -1.0) * mask
    batch = {
        "input_ids": ids,
        "input_lengths": torch.tensor(len(row.tokens)),
        "token_mask": mask,
        "sample_mask": torch.tensor(1.0),
        "advantages": ADVANTAGES[sample] * mask,
        "prev_logprobs": old,
        "generation_logprobs": old,
        "reference_logprobs": old,
    }
    return FedSample(row, 0, batch)


SAMPLES = [fed(0), fed(1, (5, 6)), fed(2, (7, 8, 9, 10)), fed(3)]  # the first and the last have the same tokens


def stacked(samples: list[FedSample], width: int = LENGTH) -> Batch:
    rows = {name: torch.stack([sample.batch[name] for sample in samples]) for name in samples[0].batch}
    return {name: value[:, :width] if value.dim() > 1 else value for name, value in rows.items()}


def flowed(*batches: Batch, scale: float = 1.0, loss: Loss = LOSS) -> list[Flowed]:
    """What a trainer's backward passes over these batches leave behind."""
    watched = WatchedLoss(loss)
    for batch in batches:
        weights = torch.full((len(batch["input_ids"]), batch["input_ids"].shape[1] - 1), -1.0, requires_grad=True)
        value, _ = watched(weights * 1.0, batch, tokens=7.0, sequences=2.0)
        (value * scale).backward()
    return watched.flowed


def came_of(*batches: Batch, scale: float = 1.0) -> dict[int, Learned]:
    samples = learned(LOSS, SAMPLES, flowed(*batches, scale=scale), ALLOWED)
    assert {key.group for key in samples} <= {0}
    return {key.sample: sample for key, sample in samples.items()}


def times_of(*batches: Batch, scale: float = 1.0) -> dict[int, int]:
    samples = came_of(*batches, scale=scale)
    assert not any(sample.changed for sample in samples.values())
    return {number: sample.times for number, sample in samples.items()}


def test_every_sample_with_an_advantage_is_learned_once_in_any_layout() -> None:
    once = {0: 1, 1: 1, 3: 1}  # sample 2 has none
    assert times_of(stacked(SAMPLES)) == once
    assert times_of(*(stacked([sample]) for sample in SAMPLES), scale=1e4) == once
    assert times_of(stacked(SAMPLES[::-1])) == once
    assert times_of(stacked(SAMPLES[1:2], width=4), stacked([SAMPLES[0], *SAMPLES[2:]])) == once  # padding cut off


def test_a_sample_that_is_left_out_masked_or_fed_twice_shows() -> None:
    assert times_of(stacked(SAMPLES[:3])) == {0: 1, 1: 1, 3: 0}
    assert times_of(stacked(SAMPLES), stacked(SAMPLES[1:2])) == {0: 1, 1: 2, 3: 1}
    masked = stacked(SAMPLES)
    masked["sample_mask"][1] = 0.0
    assert times_of(masked) == {0: 1, 1: 0, 3: 1}
    flat = stacked(SAMPLES)
    flat["advantages"][1] = 0.0
    assert times_of(flat) == {0: 1, 1: 0, 3: 1}
    reversed_sign = stacked(SAMPLES)
    reversed_sign["advantages"][1] *= -1
    assert times_of(reversed_sign) == {0: 1, 1: 0, 3: 1}


COLUMNS = ("advantages", "generation_logprobs", "prev_logprobs", "reference_logprobs")


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_that_the_loss_gets_changed_is_named(column: str) -> None:
    batch = stacked(SAMPLES)
    batch[column][1] *= 1.01
    assert {number: sample.changed for number, sample in came_of(batch).items()} == {0: set(), 1: {column}, 3: set()}


@pytest.mark.parametrize("place", [1, 3])
def test_a_mask_that_is_changed_at_one_token_is_named(place: int) -> None:
    batch = stacked(SAMPLES)  # sample 1: tokens 0 and 1 are its prompt, 2 and 3 its answer
    batch["token_mask"][1, place] = 1.0 - batch["token_mask"][1, place]
    assert came_of(batch)[1] == (1, {"token_mask"})


def test_what_no_loss_reads_may_change() -> None:
    batch = stacked(SAMPLES)
    batch["token_mask"][:, 0] = 1.0  # nothing predicts the first token
    for column in COLUMNS:
        batch[column] = torch.where(stacked(SAMPLES)["token_mask"] > 0, batch[column] + 1e-6, torch.nan)
    assert times_of(batch) == {0: 1, 1: 1, 3: 1}


def test_a_column_that_this_loss_does_not_use_may_change() -> None:
    batch = stacked(SAMPLES)
    batch["generation_logprobs"] *= 2
    del batch["reference_logprobs"]
    plain = ClippedPolicyGradient()
    samples = learned(plain, SAMPLES, flowed(batch, loss=plain), ALLOWED)
    assert {key.sample: sample.changed for key, sample in samples.items()} == {0: set(), 1: set(), 3: set()}


@pytest.mark.parametrize(("column", "factor", "is_seen"), [("prev_logprobs", 1.05, False), ("advantages", 1.05, True)])
def test_only_what_a_trainer_may_recompute_has_the_noise_of_a_low_precision(
    column: str, factor: float, is_seen: bool
) -> None:
    batch = stacked(SAMPLES)
    batch[column] *= factor
    samples = learned(LOSS, SAMPLES, flowed(batch), 0.1)
    assert all(bool(sample.changed) is is_seen for sample in samples.values())


def test_columns_may_be_rounded_to_a_lower_precision() -> None:
    fine = [fed(0), fed(1, (5, 6))]
    for sample in fine:
        sample.batch["advantages"] *= 1 / 3
    batch = stacked(fine)
    batch["advantages"] = batch["advantages"].bfloat16()
    assert not any(sample.changed for sample in learned(LOSS, fine, flowed(batch), ALLOWED).values())


def test_of_samples_with_the_same_tokens_each_gets_its_own_pass() -> None:
    twins = [fed(1, (1, 2, 3)), fed(3)]
    twins[0].batch["advantages"] *= 2
    batch = stacked(twins)
    for order in ([0, 1], [1, 0]):
        shuffled = {name: value[order] for name, value in batch.items()}
        samples = learned(LOSS, twins, flowed(shuffled), ALLOWED)
        assert {*samples.values()} == {Learned(1, frozenset())}
    batch["advantages"] *= 2
    samples = learned(LOSS, twins, flowed(batch), ALLOWED)
    assert any("advantages" in sample.changed for sample in samples.values())


def test_a_loss_that_is_never_differentiated_teaches_nothing() -> None:
    assert times_of() == {0: 0, 1: 0, 3: 0}
    watched = WatchedLoss(LOSS)
    with torch.no_grad():
        watched(torch.full((4, LENGTH - 1), -1.0), stacked(SAMPLES), tokens=1.0, sequences=1.0)
    assert watched.flowed == []


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_watched_loss_has_the_numbers_of_the_loss(number: int) -> None:
    plain = LOSS
    watched = WatchedLoss(plain)
    assert (watched.level, watched.normalizers()) == (plain.level, plain.normalizers())
    logprobs, batch = torch.full((1, LENGTH - 1), -0.5), stacked([SAMPLES[number]])
    for wanted, seen in zip(
        plain(logprobs, batch, tokens=3.0, sequences=1.0),
        watched(logprobs, batch, tokens=3.0, sequences=1.0),
        strict=True,
    ):
        assert repr(wanted) == repr(seen)


def test_a_sample_is_named_by_group_and_number() -> None:
    assert [*learned(LOSS, SAMPLES[:1], flowed(stacked(SAMPLES[:1])), ALLOWED)] == [Key(0, 0)]
