"""Finds the weights that generated each token: recomputes every token's log-probability under the weights of every version.

The oracle is a plain model loaded by tensor names, in float64. It shares no code with generation, training or sync. It follows what the
config promises for the KV cache at a sync: kept, so later tokens attend to keys and values of older weights, or recomputed. A token is
*decidable* if no other version comes within `APART` noises of its stamped version; the noise is that of arithmetic in the dtype that the
samples were computed in, measured with the oracle's models. The batch of each step is also recomputed, from the samples alone. Limits: the
whole model on one rank, once for each version.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kit.actors.samples import SampleRow
from kit.megatron.config import Geometry
from kit.train.arithmetic import END
from kit.train.plain import Cache, PlainModel, from_weights
from kit.train.protocol import Batch

# How many noises no rounding explains. In bfloat16, ten are as much as a small step of training moves a log-probability.
APART = {torch.float32: 10.0, torch.bfloat16: 4.0}


class StampedSpan(NamedTuple):
    """Tokens of an answer, from `first` up to `end`, that have the same stamp."""

    version: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSample:
    """One sample. A list has one entry for each token of its answer.

    All are distances of log-probabilities. `error`: recorded to stamped version. `nearest`: recorded to the closest version, which is
    `closest`. `wrong_gap`: stamped version to the closest other version. `other_policy`: recorded to the stamped version if the sync had
    treated the KV cache the other way; equal to `error` in the first span.
    """

    row: SampleRow
    error: list[float]
    nearest: list[float]
    closest: list[int]
    wrong_gap: list[float]
    other_policy: list[float]
    apart: float = APART[torch.float32]

    def decidable(self, noise: float) -> list[bool]:
        return [gap >= self.apart * noise for gap in self.wrong_gap]

    def policies(self, noise: float) -> tuple[int, int]:
        """How many tokens show how the sync treated the KV cache, and how many of them contradict the config."""
        pairs = [
            (own, opposite)
            for own, opposite in zip(self.error, self.other_policy, strict=True)
            if abs(own - opposite) >= self.apart * noise
        ]
        return len(pairs), sum(opposite < own for own, opposite in pairs)

    def wrong_stamps(self, noise: float) -> list[int]:
        """Decidable tokens with a stamp other than the version that yields their log-probability. If the KV cache is kept, tokens after a
        wrong stamp may count too, because their keys and values are then computed from it."""
        tokens = zip(self.decidable(noise), self.closest, self.row.versions, strict=True)
        return [place for place, (decidable, closest, stamp) in enumerate(tokens) if decidable and closest != stamp]


class Oracle:
    """The models of all versions. `temperature` is that of sampling, `sampled_in` the dtype that engine and trainer compute in; `keeps`
    says whether a sync keeps the KV cache."""

    def __init__(
        self,
        geometry: Geometry,
        weights: Mapping[int, Mapping[str, torch.Tensor]],
        *,
        temperature: float = 1.0,
        keeps: bool = True,
        sampled_in: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.temperature = temperature
        self.sampled_in = sampled_in
        self.apart = APART[sampled_in]
        self.keeps = keeps
        self.versions = sorted(weights)
        self.models = [from_weights(geometry, weights[version], dtype=dtype) for version in self.versions]

    @torch.no_grad()
    def judge(self, row: SampleRow) -> JudgedSample:
        recorded = torch.tensor(row.logprobs, dtype=torch.float64)
        table, opposite = self.recompute(row)
        places = torch.tensor([self._place(stamp) for stamp in row.versions])
        known = torch.tensor([stamp in self.versions for stamp in row.versions])
        stamped = table.gather(0, places[None])[0]
        errors = (table - recorded).abs()
        return JudgedSample(
            row=row,
            error=torch.where(known, (stamped - recorded).abs(), torch.inf).tolist(),
            nearest=errors.min(0).values.tolist(),
            closest=[self.versions[place] for place in errors.argmin(0).tolist()],
            wrong_gap=(table - stamped).abs().scatter(0, places[None], torch.inf).min(0).values.tolist(),
            other_policy=(opposite - recorded).abs().tolist(),
            apart=self.apart,
        )

    @torch.no_grad()
    def recompute(self, row: SampleRow) -> tuple[torch.Tensor, torch.Tensor]:
        """The answer's log-probabilities: [versions, tokens], each span under each version, after the earlier spans as stamped; and
        [tokens] under the stamps with the other treatment of the KV cache."""
        table = torch.empty(len(self.versions), len(row.answer), dtype=torch.float64)
        opposite = torch.empty(len(row.answer), dtype=torch.float64)
        held, cache = 0, self.models[0].empty_cache(1, len(row.tokens))
        for span in stamped_spans(row.versions):
            end = len(row.prompt) + span.end - 1  # the last token of the span is not an input of it
            place = self._place(span.version)
            caches = []
            for number, model in enumerate(self.models):
                caches.append(copied(cache))
                begin = held if self.keeps else 0
                table[number, span.first : span.end] = self._span(model, row, span, caches[-1], (begin, end))
            begin = 0 if self.keeps else held
            opposite[span.first : span.end] = self._span(self.models[place], row, span, copied(cache), (begin, end))
            held, cache = end, caches[place]
        return table, opposite

    @torch.no_grad()
    def from_stale_prompt(self, judged: JudgedSample, noise: float) -> int:
        """How many tokens depend on a prompt's keys and values from an older version instead of their stamp's."""
        row = judged.row
        if max(judged.error, default=0.0) < self.apart * noise:
            return 0
        recorded, own = torch.tensor(row.logprobs, dtype=torch.float64), torch.tensor(judged.error)
        older = [version for version in self.versions if version < max(row.versions)]
        errors = [(self._after_prompt_of(version, row) - recorded).abs() for version in older]
        if not errors:
            return 0
        nearest = torch.stack(errors).min(0).values
        return int(((own >= self.apart * noise) & (nearest < noise)).sum())

    def _after_prompt_of(self, version: int, row: SampleRow) -> torch.Tensor:
        """The answer's log-probabilities under its stamps, after a prompt computed by `version`."""
        begin = held = len(row.prompt)
        prompt = self.models[0].empty_cache(1, len(row.tokens))
        first = self.models[self._place(version)](torch.tensor(row.prompt)[None], cache=prompt, start=0)[0, -1:]
        cache, chosen = copied(prompt), []
        for span in stamped_spans(row.versions):
            if not self.keeps:
                cache, held = copied(prompt), begin
            end = begin + span.end - 1
            logits = first if held == begin else first[:0]
            if end > held:
                ids = torch.tensor(row.tokens[held:end])[None]
                more = self.models[self._place(span.version)](ids, cache=cache, start=held)[0]
                logits = torch.cat([logits, more])
            chosen.append(self._chosen(logits[span.first - span.end :], row, span))
            held = end
        return torch.cat(chosen)

    @torch.no_grad()
    def distributions(self, row: SampleRow) -> torch.Tensor:
        """The probabilities that each token was sampled from, [tokens, vocabulary], under the stamps and the config's KV cache."""
        held, cache = 0, self.models[0].empty_cache(1, len(row.tokens))
        probabilities = []
        for span in stamped_spans(row.versions):
            begin, end = held if self.keeps else 0, len(row.prompt) + span.end - 1
            ids = torch.tensor(row.tokens[begin:end])[None]
            logits = self.models[self._place(span.version)](ids, cache=cache, start=begin)[0]
            probabilities.append(self._after(logits[span.first - span.end :], row, span).exp())
            held = end
        return torch.cat(probabilities)

    @torch.no_grad()
    def plain(self, version: int, row: SampleRow) -> torch.Tensor:
        """The trainer's log-probabilities for the answer under a version: no temperature, minimum length or cache."""
        logits = self.models[self._place(version)](torch.tensor(row.tokens)[None])[0, len(row.prompt) - 1 : -1]
        chosen: torch.Tensor = logits.double().log_softmax(-1).gather(1, torch.tensor(row.answer)[:, None])[:, 0]
        return chosen

    @torch.no_grad()
    def sampled(self, version: int, row: SampleRow) -> torch.Tensor:
        """The answer under one version, as it was sampled (temperature, minimum length), without a cache."""
        logits = self.models[self._place(version)](torch.tensor(row.tokens)[None])[0, len(row.prompt) - 1 : -1]
        return self._chosen(logits, row, StampedSpan(version, 0, len(row.answer)))

    def noise(self, weights: Mapping[int, Mapping[str, torch.Tensor]], rows: Sequence[SampleRow]) -> float:
        """The largest difference that arithmetic in `sampled_in` makes, over these samples and all versions."""
        geometry = self.models[0].geometry
        coarse = Oracle(geometry, weights, temperature=self.temperature, keeps=self.keeps, dtype=self.sampled_in)
        pairs = ((coarse.recompute(row)[0], self.recompute(row)[0]) for row in rows)
        return max((float((rounded - exact).abs().max()) for rounded, exact in pairs), default=0.0)

    def _span(
        self, model: PlainModel, row: SampleRow, span: StampedSpan, cache: list[Cache], fed: tuple[int, int]
    ) -> torch.Tensor:
        """Feed these positions; returns the sampling log-probabilities of the span's tokens."""
        ids = torch.tensor(row.tokens[slice(*fed)])[None]
        return self._chosen(model(ids, cache=cache, start=fed[0])[0, span.first - span.end :], row, span)

    def _chosen(self, logits: torch.Tensor, row: SampleRow, span: StampedSpan) -> torch.Tensor:
        chosen = torch.tensor(row.answer[span.first : span.end])[:, None]
        return self._after(logits, row, span).gather(1, chosen)[:, 0]

    def _after(self, logits: torch.Tensor, row: SampleRow, span: StampedSpan) -> torch.Tensor:
        """The log-probabilities of all tokens at the places of a span, as they are sampled."""
        after = logits.double()
        after[: max(0, row.minimum - span.first), END] = -torch.inf
        return (after / self.temperature).log_softmax(-1)

    def _place(self, version: int) -> int:
        return self.versions.index(version) if version in self.versions else 0


def stamped_spans(versions: Sequence[int]) -> Iterator[StampedSpan]:
    first = 0
    for version, tokens in itertools.groupby(versions):
        end = first + len([*tokens])
        yield StampedSpan(version, first, end)
        first = end


def copied(cache: list[Cache]) -> list[Cache]:
    return [(keys.clone(), values.clone()) for keys, values in cache]


class FedSample(NamedTuple):
    """A sample as it was sent, the version while it was trained, and its row of the batch."""

    row: SampleRow
    version: int
    batch: Batch

    def answer(self, name: str) -> torch.Tensor:
        """A column of the batch, at the places of the answer."""
        begin = len(self.row.prompt)
        return self.batch[name][begin : begin + len(self.row.answer)].double()


def advantage_errors(fed: Sequence[FedSample]) -> Iterator[float]:
    """For each sample: the advantage in the batch minus the one computed from the rewards of its group."""
    for sample in fed:
        group = [
            peer.row.reward for peer in fed if peer.row.group == sample.row.group and peer.version == sample.version
        ]
        mean = math.fsum(group) / len(group)
        deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in group) / len(group))
        wanted = (sample.row.reward - mean) / (deviation + 1e-6)
        yield float((sample.answer("advantages") - wanted).abs().max())


def previous_error(oracle: Oracle, fed: FedSample, previous: str) -> float:
    """`recomputed`: those of the version while the sample was trained. `recorded`: those that came with the sample."""
    given = fed.answer("prev_logprobs")
    wanted = oracle.plain(fed.version, fed.row) if previous == "recomputed" else torch.tensor(fed.row.logprobs).double()
    return float((given - wanted).abs().max())


def token_drift(oracle: Oracle, fed: Sequence[FedSample]) -> Mapping[tuple[int, int], list[float]]:
    """By lag and position: the log-probability of each token under the version that it was trained on, minus the recorded one."""
    differences: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in fed:
        now = oracle.sampled(sample.version, sample.row).tolist()
        for position, (new, old, stamp) in enumerate(zip(now, sample.row.logprobs, sample.row.versions, strict=True)):
            differences[sample.version - stamp, position].append(new - old)
    return dict(sorted(differences.items()))


def recorded_error(fed: FedSample) -> float:
    """The engine's recorded log-probabilities, which the importance weights use, and the mask of tokens that count."""
    wanted = torch.tensor(fed.row.logprobs).double()
    length, begin = len(fed.row.tokens), len(fed.row.prompt)
    mask = torch.zeros_like(fed.batch["token_mask"])
    mask[begin:length] = 1.0
    tokens = torch.equal(fed.batch["input_ids"][:length], torch.tensor(fed.row.tokens))
    if not (tokens and torch.equal(fed.batch["token_mask"], mask)):
        return math.inf
    return float((fed.answer("generation_logprobs") - wanted).abs().max())
