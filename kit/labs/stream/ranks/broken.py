"""The faults of ranks: a replica, its engine or a trainer with one bug each."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from kit.labs.rankside import Context
from kit.labs.stream.lab import trainer_model
from kit.labs.stream.ranks import Key, Row, advantages, trainer
from kit.labs.stream.ranks.oracle import Oracle
from kit.labs.stream.ranks.replica import Happened, Replica, name_of
from kit.labs.stream.ranks.trainer import Trainer
from kit.megatron.serve import (
    Answer,
    AtSync,
    Ended,
    Engine,
    Flight,
    Prefix,
    PrefixCache,
    Request,
    Span,
    distribution,
    pick,
)
from kit.train.arithmetic import uniform
from kit.train.protocol import Batch

PLAIN = 1  # loops that run before the first with a controller


def replica(ctx: Context) -> Replica:
    return REPLICAS.get(ctx.fault, Replica)(ctx)


def train(ctx: Context) -> Trainer:
    return TRAINERS.get(ctx.fault, Trainer)(ctx)


# -- engines --------------------------------------------------------------------------------------------------------------


class StampsReplies(Engine):
    def _leave(self, name: str, ended: Ended) -> Answer:
        flight = self._flights[name]
        flight.spans = [Span(self.version, 0, len(flight.tokens))]
        return super()._leave(name, ended)


class StampsStarts(Engine):
    def _leave(self, name: str, ended: Ended) -> Answer:
        flight = self._flights[name]
        flight.spans = [Span(flight.spans[0].version, 0, len(flight.tokens))] if flight.spans else []
        return super()._leave(name, ended)


class Untempered(Engine):
    def _sample(self, flight: Flight) -> None:
        asked, written = flight.request, len(flight.tokens)
        logits = self._feed(flight)
        number = uniform(asked.seed, asked.prompt, asked.sample, len(asked.prompt) + written)
        token = pick(distribution(logits, asked, written), number)
        recorded = distribution(logits, dataclasses.replace(asked, temperature=1.0), written)
        flight.write(token, float(recorded[token]), self.version)


class Unversioned(PrefixCache):
    """Prefixes by tokens alone, which no sync clears."""

    def get(self, version: int, tokens: tuple[int, ...]) -> Prefix | None:  # noqa: ARG002 - the fault ignores it
        return super().get(0, tokens)

    def put(self, version: int, tokens: tuple[int, ...], prefix: Prefix) -> None:  # noqa: ARG002 - as above
        super().put(0, tokens, prefix)

    def clear(self) -> None:
        pass


class KeepsPrefixes(Engine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.prefixes = Unversioned(self.prefixes.limit)


class KeepsCache(Engine):
    def weights_changed(self, version: int, at_sync: AtSync) -> list[Answer]:  # noqa: ARG002 - the fault ignores it
        return super().weights_changed(version, "keep")


# -- replicas -------------------------------------------------------------------------------------------------------------


class Wrong(Replica):
    def reset(self) -> None:
        super().reset()
        self.engine = ENGINES[str(self.ctx.fault)](self.replica)


class StampsLate(Replica):
    late = 0

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        self.late = 0
        before = self.engine.version
        done = super().sync(version, at_sync, replicas)
        if version:
            self.late, self.engine.version = version, before
        return done

    def decode(self, orders: Sequence[dict[str, Any]]) -> list[Happened]:
        happened = super().decode(orders)
        if self.late and any(what["event"] == "tokens" for what in happened):
            self.late, self.engine.version = 0, self.late
        return happened


class Torn(Replica):
    rest: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def reset(self) -> None:
        self.rest = ()
        super().reset()

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
        self.mend()
        half = [param.data for param in self.replica.chunks[0].parameters()][::2]
        before = [one.clone() for one in half]
        done = super().sync(version, at_sync, replicas)
        if version:
            self.rest = [(one, one.clone()) for one in half]
            for one, old in zip(half, before, strict=True):
                one.copy_(old)
        return done

    def decode(self, orders: Sequence[dict[str, Any]]) -> list[Happened]:
        happened = super().decode(orders)
        if any(what["event"] == "tokens" for what in happened):
            self.mend()
        return happened

    def mend(self) -> None:
        for one, new in self.rest:
            one.copy_(new)
        self.rest = ()


class SameNumbers(Replica):
    def request(self, key: Key) -> Request:
        return dataclasses.replace(super().request(Key(key.group, 0)), id=name_of(key))


class Breaks(Replica):
    """The last replica stops in the first loop with a controller, once it has new weights."""

    loops = 0

    def reset(self) -> None:
        super().reset()
        self.loops += 1

    def decode(self, orders: Sequence[dict[str, Any]]) -> list[Happened]:
        last = f"replica {self.config.replicas - 1}"
        if self.name == last and self.loops > PLAIN and self.engine.version:
            self.stop()
        return super().decode(orders)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stalls(Breaks):
    def stop(self) -> None:
        time.sleep(10 * self.config.deadline_s)


# -- trainers -------------------------------------------------------------------------------------------------------------


class ScoresAgain(Trainer):
    """Previous log-probabilities are computed when a chunk is trained, so later updates use newer weights."""

    def microbatch(self, step: int, update: int, groups: Sequence[int]) -> dict[str, Any]:
        if update:
            self.logprobs(step, groups, "previous")
        return super().microbatch(step, update, groups)


class OtherAdvantages(Trainer):
    def assemble(self, rows: Sequence[Row]) -> Batch:
        with patch.object(trainer, "advantages", ADVANTAGES[str(self.ctx.fault)]):
            return super().assemble(rows)


def by_position(rewards: Mapping[Key, float], kind: str) -> dict[Key, float]:
    """Samples are ordered by their numbers across groups and then split into groups by position."""
    arrived = sorted(rewards, key=lambda key: (key.sample, key.group))
    size = len(rewards) // len({key.group for key in rewards})
    places = {key: Key(*divmod(place, size)) for place, key in enumerate(arrived)}
    found = advantages({places[key]: rewards[key] for key in arrived}, kind)
    return {key: found[places[key]] for key in rewards}


def with_rejected(rewards: Mapping[Key, float], kind: str) -> dict[Key, float]:
    rejected = {Key(key.group, -1): 0.0 for key in rewards}
    found = advantages({**rewards, **rejected}, kind)
    return {key: found[key] for key in rewards}


class OtherDenominator(Trainer):
    def assemble(self, rows: Sequence[Row]) -> Batch:
        batch = super().assemble(rows)
        return {**batch, "generation_logprobs": batch["prev_logprobs"]}


class Rescores(Trainer):
    """Samples get the current version as their stamp, with its log-probabilities, so the recomputation looks right."""

    def batch_of(self, groups: Sequence[int]) -> Batch:
        oracle = Oracle(
            trainer_model(self.config).geometry,
            {self.version: self.weights[self.version]},
            temperature=self.config.temperature,
        )
        for row in self.inbox.take(self.keys(groups)):
            now = dataclasses.replace(row, versions=(self.version,) * len(row.answer))
            self.inbox.put(dataclasses.replace(now, logprobs=tuple(oracle.recompute(now)[0][0].tolist())))
        return super().batch_of(groups)


ENGINES: Mapping[str, type[Engine]] = {
    "stamp-after-reply": StampsReplies,
    "one-stamp-per-group": StampsStarts,
    "temperature-mismatch": Untempered,
    "prefix-cache-survives": KeepsPrefixes,
    "keeps-kv-silently": KeepsCache,
}
REPLICAS: Mapping[str | None, type[Replica]] = {
    **dict.fromkeys(ENGINES, Wrong),
    "stamp-at-publish": StampsLate,
    "torn-read": Torn,
    "rng-reset": SameNumbers,
    "rollout-dies": Breaks,
    "rollout-stalls": Stalls,
}
ADVANTAGES = {"positional-groups": by_position, "rejected-row-counts": with_rejected}
TRAINERS: Mapping[str | None, type[Trainer]] = {
    **dict.fromkeys(ADVANTAGES, OtherAdvantages),
    "prev-by-new-weights": ScoresAgain,
    "wrong-denominator": OtherDenominator,
    "rescores-samples": Rescores,
}
