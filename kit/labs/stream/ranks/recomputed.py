"""The batch that a step was given, against what it must hold: computed again from the samples alone, sample by sample."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kit.labs.stream.ranks.oracle import Oracle
    from kit.labs.stream.ranks.rows import Row
    from kit.train.batch import Batch


class Fed(NamedTuple):
    """A sample as it was sent, the version while it was trained, and its row of the batch."""

    row: Row
    version: int
    batch: Batch

    def answer(self, name: str) -> torch.Tensor:
        """A column of the batch, at the places of the answer."""
        begin = len(self.row.prompt)
        return self.batch[name][begin : begin + len(self.row.answer)].double()


def advantage_errors(fed: Sequence[Fed], kind: str) -> Iterator[float]:
    """Of each sample: the difference of the advantages in the batch to those of its reward among the rewards of its group."""
    for one in fed:
        group = [other.row.reward for other in fed if other.row.group == one.row.group and other.version == one.version]
        mean = math.fsum(group) / len(group)
        if kind == "leave-one-out":
            wanted = one.row.reward - (math.fsum(group) - one.row.reward) / max(1, len(group) - 1)
        else:
            wanted = (one.row.reward - mean) / (
                math.sqrt(math.fsum((each - mean) ** 2 for each in group) / len(group)) + 1e-6
            )
        yield float((one.answer("advantages") - wanted).abs().max())


def previous_error(oracle: Oracle, fed: Fed, previous: str) -> float:
    """Recomputed by the trainer: those of the version while the sample was trained. Recorded: those that came with the sample."""
    given = fed.answer("prev_logprobs")
    wanted = oracle.plain(fed.version, fed.row) if previous == "recomputed" else torch.tensor(fed.row.logprobs).double()
    return float((given - wanted).abs().max())


def drift(oracle: Oracle, fed: Sequence[Fed]) -> Mapping[tuple[int, int], list[float]]:
    """By lag and position: the log-probability of each token under the version that it was trained on, minus the recorded one."""
    found: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for one in fed:
        now = oracle.sampled(one.version, one.row).tolist()
        for position, (new, old, stamp) in enumerate(zip(now, one.row.logprobs, one.row.versions, strict=True)):
            found[one.version - stamp, position].append(new - old)
    return dict(sorted(found.items()))


def recorded_error(fed: Fed) -> float:
    """The engine's log-probabilities, which the importance weights are made of, as the replica recorded them; and which tokens count."""
    wanted = torch.tensor(fed.row.logprobs).double()
    length, begin = len(fed.row.tokens), len(fed.row.prompt)
    mask = torch.zeros_like(fed.batch["token_mask"])
    mask[begin:length] = 1.0
    tokens = torch.equal(fed.batch["input_ids"][:length], torch.tensor(fed.row.tokens))
    if not (tokens and torch.equal(fed.batch["token_mask"], mask)):
        return math.inf
    return float((fed.answer("generation_logprobs") - wanted).abs().max())
