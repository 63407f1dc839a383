"""The known bugs of the lab `stream` on its ranks: what a fault puts in place of the right replica, engine or trainer."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kit.actors.replica import Happened, request_name
from kit.actors.samples import Key, SampleRow, advantages
from kit.engines.hugging import TransformersModel
from kit.engines.vllm import VllmModel
from kit.labs.stream.ranks.oracle import Oracle
from kit.labs.stream.ranks.replica import Replica
from kit.labs.stream.ranks.trainer import Trainer
from kit.megatron.serve import (
    Answer,
    AnswerSpan,
    AtSync,
    Ended,
    Engine,
    Flight,
    Prefix,
    PrefixCache,
    PromptRequest,
    distribution,
    pick,
)
from kit.train.draws import uniform
from kit.train.protocol import Batch, SplitStep

Tokens = tuple[int, ...]
# The right code, before a fault replaces it.
leave, weights_changed = Engine._leave, Engine.weights_changed
get_prefix, put_prefix = PrefixCache.get, PrefixCache.put
reset, sync, decode, request = Replica.reset, Replica.sync, Replica.decode, Replica.request
record, pause, pause_vllm = TransformersModel.recorded, TransformersModel.pause, VllmModel.pause
split_microbatch = SplitStep.microbatch
microbatch, assemble, batch_of, load_saved = Trainer.microbatch, Trainer.assemble, Trainer.batch_of, Trainer.load


# -- the kit's engine ----------------------------------------------------------------------------------------------------------


def stamps_the_end(engine: Engine, name: str, ended: Ended) -> Answer:
    flight = engine._flights[name]
    flight.spans = [AnswerSpan(engine.version, 0, len(flight.tokens))]
    return leave(engine, name, ended)


def stamps_the_start(engine: Engine, name: str, ended: Ended) -> Answer:
    flight = engine._flights[name]
    flight.spans = [AnswerSpan(flight.spans[0].version, 0, len(flight.tokens))] if flight.spans else []
    return leave(engine, name, ended)


def records_untempered(engine: Engine, flight: Flight) -> None:
    asked, written = flight.request, len(flight.tokens)
    logits = engine._feed(flight)
    number = uniform(asked.seed, asked.prompt, asked.sample, len(asked.prompt) + written)
    token = pick(distribution(logits, asked, written), number)
    recorded = distribution(logits, dataclasses.replace(asked, temperature=1.0), written)
    flight.write(token, float(recorded[token]), engine.version)


def draws_once(engine: Engine, flight: Flight) -> None:
    asked, written = flight.request, len(flight.tokens)
    after = distribution(engine._feed(flight), asked, written)
    token = pick(after, uniform(asked.seed, asked.prompt, asked.sample))
    flight.write(token, float(after[token]), engine.version)


def gets_any_version(cache: PrefixCache, version: int, tokens: Tokens, *adapter: int) -> Prefix | None:  # noqa: ARG001 - the bug ignores it
    return get_prefix(cache, 0, tokens, *adapter)


def puts_any_version(cache: PrefixCache, version: int, tokens: Tokens, prefix: Prefix, *adapter: int) -> None:  # noqa: ARG001 - as above
    put_prefix(cache, 0, tokens, prefix, *adapter)


def keeps_prefixes(cache: PrefixCache) -> None:
    """No sync clears the cached prefixes."""


def keeps_cache(engine: Engine, version: int, at_sync: AtSync) -> list[Answer]:  # noqa: ARG001 - as above
    return weights_changed(engine, version, "keep")


# -- engines of other makers ----------------------------------------------------------------------------------------------

RAW = "raw_logprobs"  # vLLM's default


def records_raw(engine: TransformersModel, logits: torch.Tensor, request: PromptRequest, written: int) -> torch.Tensor:
    return record(engine, logits, dataclasses.replace(request, temperature=1.0), written)


def pauses_and_keeps(engine: TransformersModel, at_sync: str) -> None:  # noqa: ARG001 - the bug ignores it
    pause(engine, "keep")


def pauses_vllm_and_keeps(engine: VllmModel, at_sync: str) -> None:  # noqa: ARG001 - as above
    pause_vllm(engine, "keep")


# -- replicas -------------------------------------------------------------------------------------------------------------

late: dict[Replica, int] = {}  # versions that are stamped only after the next call
torn: dict[Replica, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # parameters with old values, and their new ones


def decoded(happened: Sequence[Happened]) -> bool:
    return any(row["event"] == "tokens" for row in happened)


def stamps_late_after_sync(replica: Replica, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
    late.pop(replica, None)
    before = replica.engine.version
    result = sync(replica, version, at_sync, replicas)
    if version:
        late[replica], replica.engine.version = version, before
    return result


def stamps_late(replica: Replica, orders: Sequence[dict[str, Any]]) -> list[Happened]:
    happened = decode(replica, orders)
    if replica in late and decoded(happened):
        replica.engine.version = late.pop(replica)
    return happened


def tears_weights(replica: Replica, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:
    mend(replica)
    half = [param.data for param in replica.replica.chunks[0].parameters()][::2]
    before = [tensor.clone() for tensor in half]
    result = sync(replica, version, at_sync, replicas)
    if version:
        torn[replica] = [(tensor, tensor.clone()) for tensor in half]
        for tensor, old in zip(half, before, strict=True):
            tensor.copy_(old)
    return result


def decodes_torn(replica: Replica, orders: Sequence[dict[str, Any]]) -> list[Happened]:
    happened = decode(replica, orders)
    if decoded(happened):
        mend(replica)
    return happened


def resets_torn(replica: Replica) -> None:
    torn.pop(replica, None)
    reset(replica)


def mend(replica: Replica) -> None:
    for tensor, new in torn.pop(replica, ()):
        tensor.copy_(new)


def draws_the_same(replica: Replica, key: Key) -> PromptRequest:
    return dataclasses.replace(request(replica, Key(key.group, 0)), id=request_name(key))


def is_last_with_new_weights(replica: Replica) -> bool:
    return replica.name == f"replica {replica.config.replicas - 1}" and bool(replica.engine.version)


def replica_dies(replica: Replica, orders: Sequence[dict[str, Any]]) -> list[Happened]:
    if is_last_with_new_weights(replica):
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(replica, orders)


def stalls(replica: Replica, orders: Sequence[dict[str, Any]]) -> list[Happened]:
    if is_last_with_new_weights(replica):
        time.sleep(10 * replica.config.deadline_s)
    return decode(replica, orders)


# -- trainers -------------------------------------------------------------------------------------------------------------


def scores_again(trainer: Trainer, step: int, update: int, groups: Sequence[int]) -> dict[str, Any]:
    """Previous log-probabilities are computed when a chunk is trained, so later updates use newer weights."""
    if update:
        trainer.logprobs(step, groups, "previous")
    return microbatch(trainer, step, update, groups)


def by_position(rewards: Mapping[Key, float]) -> dict[Key, float]:
    """Samples are ordered by their numbers across groups and then split into groups by position."""
    arrived = sorted(rewards, key=lambda key: (key.sample, key.group))
    size = len(rewards) // len({key.group for key in rewards})
    places = {key: Key(*divmod(place, size)) for place, key in enumerate(arrived)}
    by_place = advantages({places[key]: rewards[key] for key in arrived})
    return {key: by_place[places[key]] for key in rewards}


def with_rejected(rewards: Mapping[Key, float]) -> dict[Key, float]:
    rejected = {Key(key.group, -1): 0.0 for key in rewards}
    with_them = advantages({**rewards, **rejected})
    return {key: with_them[key] for key in rewards}


def masks_the_last(trainer: Trainer, rows: Sequence[SampleRow]) -> Batch:
    batch = assemble(trainer, rows)
    batch["sample_mask"][trainer.config.group - 1 :: trainer.config.group] = 0.0
    return batch


def whitens(step: SplitStep, data: Batch) -> None:
    inside = data["token_mask"] > 0
    got = data["advantages"][inside]
    whitened = torch.zeros_like(data["advantages"])
    whitened[inside] = (got - got.mean()) / (got.std() + 1e-6)
    split_microbatch(step, {**data, "advantages": whitened})


def divides_by_previous(trainer: Trainer, rows: Sequence[SampleRow]) -> Batch:
    batch = assemble(trainer, rows)
    return {**batch, "generation_logprobs": batch["prev_logprobs"]}


def loads_without_the_schedule(trainer: Trainer, version: int) -> None:
    weights, optimizer, _ = trainer.saved
    trainer.saved = weights, optimizer, trainer.job.scheduler.state_dict()
    load_saved(trainer, version)


def rescores(trainer: Trainer, groups: Sequence[int]) -> Batch:
    """Samples get the current version as their stamp, with its log-probabilities, so the recomputation looks right."""
    oracle = Oracle(
        trainer.config.trainer_model.geometry,
        {trainer.version: trainer.weights[trainer.version]},
        temperature=trainer.config.temperature,
    )
    for row in trainer.inbox.take(trainer.keys(groups)):
        restamped = dataclasses.replace(row, versions=(trainer.version,) * len(row.answer))
        logprobs = oracle.recompute(restamped)[0][0].tolist()
        trainer.inbox.put(dataclasses.replace(restamped, logprobs=tuple(logprobs)))
    return batch_of(trainer, groups)
