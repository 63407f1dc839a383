"""What flows back into a sample shows whether, and how often, a trainer learned from it."""

from __future__ import annotations

import pytest
import torch

from kit.actors.samples import Key, SampleRow
from kit.labs.stream.ranks.learned import Flowed, WatchedLoss, times_learned
from kit.labs.stream.ranks.oracle import FedSample
from kit.train.losses import ClippedPolicyGradient
from kit.train.protocol import Batch

PROMPT, LENGTH = (4, 9), 6
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


def flowed(*batches: Batch, scale: float = 1.0) -> list[Flowed]:
    """What a trainer's backward passes over these batches leave behind."""
    watched = WatchedLoss(ClippedPolicyGradient())
    for batch in batches:
        weights = torch.full((len(batch["input_ids"]), batch["input_ids"].shape[1] - 1), -1.0, requires_grad=True)
        value, _ = watched(weights * 1.0, batch, tokens=7.0, sequences=2.0)
        (value * scale).backward()
    return watched.flowed


def learned(*batches: Batch, scale: float = 1.0) -> dict[int, int]:
    times = times_learned(ClippedPolicyGradient(), SAMPLES, flowed(*batches, scale=scale))
    assert {key.group for key in times} <= {0}
    return {key.sample: number for key, number in times.items()}


def test_every_sample_with_an_advantage_is_learned_once_in_any_layout() -> None:
    once = {0: 1, 1: 1, 3: 1}  # sample 2 has none
    assert learned(stacked(SAMPLES)) == once
    assert learned(*(stacked([sample]) for sample in SAMPLES), scale=1e4) == once
    assert learned(stacked(SAMPLES[::-1])) == once
    assert learned(stacked(SAMPLES[1:2], width=4), stacked([SAMPLES[0], *SAMPLES[2:]])) == once  # padding cut off


def test_a_sample_that_is_left_out_masked_or_fed_twice_shows() -> None:
    assert learned(stacked(SAMPLES[:3])) == {0: 1, 1: 1, 3: 0}
    assert learned(stacked(SAMPLES), stacked(SAMPLES[1:2])) == {0: 1, 1: 2, 3: 1}
    masked = stacked(SAMPLES)
    masked["sample_mask"][1] = 0.0
    assert learned(masked) == {0: 1, 1: 0, 3: 1}
    flat = stacked(SAMPLES)
    flat["advantages"][1] = 0.0
    assert learned(flat) == {0: 1, 1: 0, 3: 1}
    reversed_sign = stacked(SAMPLES)
    reversed_sign["advantages"][1] *= -1
    assert learned(reversed_sign) == {0: 1, 1: 0, 3: 1}


def test_a_loss_that_is_never_differentiated_teaches_nothing() -> None:
    assert learned() == {0: 0, 1: 0, 3: 0}
    watched = WatchedLoss(ClippedPolicyGradient())
    with torch.no_grad():
        watched(torch.full((4, LENGTH - 1), -1.0), stacked(SAMPLES), tokens=1.0, sequences=1.0)
    assert watched.flowed == []


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_watched_loss_has_the_numbers_of_the_loss(number: int) -> None:
    plain = ClippedPolicyGradient()
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
    assert [*times_learned(ClippedPolicyGradient(), SAMPLES[:1], flowed(stacked(SAMPLES[:1])))] == [Key(0, 0)]
