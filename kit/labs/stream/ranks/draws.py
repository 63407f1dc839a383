"""Tests whether tokens were drawn independently and from the distributions that the recomputation gives.

A token's probability is the width of its interval of the cumulative distribution, which holds the random number that chose it. Each
*suspicion* is another law of these numbers, such as one number for all positions of a sample. Its evidence is the probability of the
sampled tokens under that law, divided by their probability under independent uniform numbers. Under right sampling the expectation of
each evidence is 1, and so is that of their mean; by Markov's inequality the mean exceeds 10^k in at most one of 10^k runs, for any k.
This holds exactly, whatever the model, the lengths and the order of the vocabulary, for groups that are chosen before they are sampled.
Which groups are trained may depend on their answers (slow ones are dropped), so the rule divides by the number of ways to choose them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

ROUNDING = 1e-6  # how far the float32 arithmetic of sampling moves the ends of an interval, at least
DOUBT = 0.5  # the share of samples that a suspicion takes to be drawn rightly
LN10 = math.log(10)


class Interval(NamedTuple):
    """The part of [0, 1) that chooses a token."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return max(self.high - self.low, 1e-300)


class Drawn(NamedTuple):
    """A sample: the probabilities of each position, [tokens, vocabulary], and the tokens."""

    probabilities: torch.Tensor
    answer: Sequence[int]

    def intervals(self) -> list[Interval]:
        ends = self.probabilities.cumsum(-1)
        chosen = self.probabilities.gather(1, torch.tensor(self.answer)[:, None])[:, 0]
        highs = ends.gather(1, torch.tensor(self.answer)[:, None])[:, 0]
        return [Interval(high - width, high) for high, width in zip(highs.tolist(), chosen.tolist(), strict=True)]


# Densities of the random number that are not uniform, on four equal parts of [0, 1).
SHAPES = {
    "numbers below one half": (1.5, 1.5, 0.5, 0.5),
    "numbers above one half": (0.5, 0.5, 1.5, 1.5),
    "numbers near one half": (0.5, 1.5, 1.5, 0.5),
    "numbers far from one half": (1.5, 0.5, 0.5, 1.5),
}
POWERS = {"a lower temperature": 2.0, "a higher temperature": 0.5}


def evidence(samples: Mapping[int, Sequence[Drawn]], noise: float = 0.0) -> dict[str, float]:
    """For each suspicion, log10 of its evidence. `samples`: those of each group; `noise`: that of their log-probabilities."""
    rounding = max(ROUNDING, noise)
    drawn = [sample for group in samples.values() for sample in group]
    intervals = {group: [sample.intervals() for sample in of_group] for group, of_group in samples.items()}
    apart = [sample for of_group in intervals.values() for sample in of_group]
    logs = {
        "one number for all positions of a sample": doubted(shared_evidence(sample, rounding) for sample in apart),
        "one number for two neighbouring positions": doubted(
            shared_evidence(sample[place : place + 2], rounding)
            for sample in apart
            for place in range(0, len(sample), 2)
        ),
        "one number for all samples of a group at a position": doubted(
            math.fsum(shared_evidence(row, rounding) for row in samples_by_position(of_group))
            for of_group in intervals.values()
        ),
        **{
            name: math.fsum(math.log(mass(shape, part) / part.width) for sample in apart for part in sample)
            for name, shape in SHAPES.items()
        },
        **{name: math.fsum(tempered(sample, power) for sample in drawn) for name, power in POWERS.items()},
    }
    return {name: value / LN10 for name, value in logs.items()}


def mean_evidence(logs: Iterable[float]) -> float:
    """log10 of the mean of evidences."""
    values = [*logs]
    most = max(values)
    return most + math.log10(math.fsum(10 ** (value - most) for value in values) / len(values))


def shared_evidence(intervals: Sequence[Interval], rounding: float) -> float:
    """The logarithm of the evidence that one number lies in all of these intervals."""
    common = min(part.high for part in intervals) - max(part.low for part in intervals)
    if len(intervals) > 1:
        common -= 2 * rounding  # so that rounding only lowers the evidence
    return math.log(common) - math.fsum(math.log(part.width) for part in intervals) if common > 0 else -math.inf


def doubted(logs: Iterable[float]) -> float:
    """The logarithm of the product of evidences, each of which is taken to be 1 with the probability `DOUBT`."""
    return math.fsum(
        max(log, 0.0) + math.log(DOUBT * math.exp(-max(log, 0.0)) + (1 - DOUBT) * math.exp(min(log, 0.0)))
        for log in logs
    )


def samples_by_position(samples: Sequence[Sequence[Interval]]) -> list[list[Interval]]:
    rows: defaultdict[int, list[Interval]] = defaultdict(list)
    for sample in samples:
        for place, part in enumerate(sample):
            rows[place].append(part)
    return [*rows.values()]


def mass(shape: Sequence[float], part: Interval) -> float:
    """The probability of an interval under a density that is constant on equal parts of [0, 1)."""
    size = 1 / len(shape)
    overlaps = (
        max(0.0, min(part.high, (place + 1) * size) - max(part.low, place * size)) for place in range(len(shape))
    )
    return max(
        math.fsum(height * width for height, width in zip(shape, overlaps, strict=True)), min(shape) * part.width
    )


def tempered(sample: Drawn, power: float) -> float:
    """The logarithm of the evidence for probabilities that are raised to a power."""
    raised = sample.probabilities**power
    scaled = (raised / raised.sum(-1, keepdim=True)).gather(1, torch.tensor(sample.answer)[:, None])[:, 0]
    plain = sample.probabilities.gather(1, torch.tensor(sample.answer)[:, None])[:, 0]
    return float((scaled.clamp_min(1e-300).log() - plain.clamp_min(1e-300).log()).sum())
