"""A replica's ranks: a single-threaded actor. Each call takes new orders, decodes a few tokens and reports events.

Complete samples go directly to the trainer. A replica receives weights between two calls, so no forward uses half-new weights. `at_sync`
decides what happens to requests in flight and to the KV cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kit.actors.common import ActorContext, address_for, base_weights, rest
from kit.actors.samples import Key, Outbox, SampleRow
from kit.megatron import serve, shards
from kit.megatron.groups import destroy
from kit.megatron.serve import Answer, Engine, PromptRequest
from kit.sync.buckets import Cut
from kit.sync.hashes import differing_digests, digest
from kit.sync.receiver import Receiver
from kit.train.arithmetic import END, encode, min_tokens, problem, reward
from kit.train.draws import answer_length, tool_stalls
from kit.train.rollout import Problem

Happened = dict[str, int | str]
TOOLS_ASKED_EVERY_S = 0.05  # while all requests wait for tools; new orders wait as long


class ReplicaActor:
    """One rank of a replica, and the host of its receiver. `sequential`: its pace is that of one token after the other, so that two
    replicas are twice as fast as one; else requests are decoded together, one token of each at a time."""

    def __init__(self, ctx: ActorContext, *, sequential: bool = False) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.sequential = sequential
        self.name = ctx.role
        self.first = ctx.rank == ctx.roles[ctx.role][0]
        self.scope = contextlib.ExitStack()
        self.attempts: dict[Key, int] = {}
        # By request: the seconds of its tool calls by the number of tokens before each, and when its last call is answered.
        self.tools: dict[str, dict[int, float]] = {}
        self.answered: dict[str, float] = {}
        self.replica: serve.ServingModel
        self.engine: Engine
        self.receiver: Receiver
        self.outbox: Outbox

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        self.base = base_weights(self.config)
        self.make_model()
        if self.first:
            self.outbox = Outbox(address_for(self.ctx, "rows"), self.name, self.config.deadline_s)
            self.scope.callback(self.outbox.close)

    def make_model(self) -> None:
        self.replica = serve.ServingModel(self.config.replica_model)

    def load_base(self) -> None:
        """Version 0, and no request in flight."""
        shards.load_full(self.replica.chunks, self.base)
        self.engine = Engine(self.replica)

    def reset(self) -> None:
        self.load_base()
        self.attempts, self.tools, self.answered = {}, {}, {}
        self.receiver = Receiver(
            f"rank {self.ctx.rank}",
            self.weights,
            self,
            address=address_for(self.ctx, "sync"),
            device=self.ctx.device,
            timeout_s=self.config.deadline_s,
        )

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.scope.close()
        destroy()

    # -- calls ----------------------------------------------------------------------------------------------------------

    def decode(self, orders: Sequence[dict[str, Any]]) -> list[Happened]:
        began = time.monotonic()
        happened = [self.take(order) for order in orders]
        before = self.engine.in_flight
        answers, called = self.write_tokens()
        after = self.engine.in_flight | {answer.request.id: len(answer.tokens) for answer in answers}
        written = 0
        for name, first in before.items():
            count = after[name] - first
            if not count:  # it waits for a tool
                continue
            written += count
            happened.append(
                {
                    "event": "tokens",
                    **request_key(name)._asdict(),
                    "version": self.engine.version,
                    "first": first,
                    "count": count,
                }
            )
        happened += [self.complete(answer) for answer in answers]
        if written:
            rest(began, self.config.pace_ms * (written if self.sequential else self.config.decode))
        elif before:
            time.sleep(TOOLS_ASKED_EVERY_S)
        return happened + [self.call_tool(name, after[name]) for name in called]

    def write_tokens(self) -> tuple[list[Answer], list[str]]:
        """Decode requests that wait for no tool, each until it calls one. Return the answers that ended, and the requests that call."""
        now = time.monotonic()
        ready = {name for name in self.engine.in_flight if self.answered.get(name, now) <= now}
        answers, called = list[Answer](), list[str]()
        for _ in range(self.config.decode):
            answers += self.engine.decode(1, ready)
            called += [name for name in self.engine.in_flight if name in ready and self.at_a_tool(name)]
            ready -= {*called}
        return answers, called

    def at_a_tool(self, name: str) -> bool:
        return self.engine.in_flight[name] in self.tools.get(name, ())

    def call_tool(self, name: str, tokens: int) -> Happened:
        seconds = self.tools[name][tokens]
        self.answered[name] = time.monotonic() + seconds
        return {"event": "tool_called", **request_key(name)._asdict(), "ms": round(1000 * seconds)}

    def take(self, order: dict[str, Any]) -> Happened:
        key = Key(order["group"], order["sample"])
        if order["order"] == "cancel":
            if request_name(key) not in self.engine.in_flight:  # it ended while the order was on its way
                return {"event": "cancelled", **key._asdict(), "tokens": 0}
            return {"event": "cancelled", **key._asdict(), "tokens": len(self.engine.cancel(request_name(key)).tokens)}
        self.attempts[key] = order["attempt"]
        self.tools[request_name(key)] = tool_stalls(self.config, *key)
        self.answered.pop(request_name(key), None)
        self.engine.start(self.request(key))
        return {"event": "started", **key._asdict(), "version": self.engine.version}

    def problem(self, key: Key) -> Problem:
        return problem(self.config.seed, key.group, self.config.numbers)

    def request(self, key: Key) -> PromptRequest:
        """The request of a sample: a function of the seed, its group and its number."""
        seed, (low, high) = self.config.seed, self.config.answer
        if self.config.tail:
            least = high = answer_length(self.config, *key)
        else:
            least = min_tokens(seed, key.group, key.sample, low=low, high=high - 1)
        return PromptRequest(
            id=request_name(key),
            prompt=tuple(encode(self.problem(key).prompt)),
            sample=key.sample,
            seed=seed + key.group,
            end=END,
            max_tokens=high,
            min_tokens=least,
            temperature=self.config.temperature,
        )

    def complete(self, answer: Answer) -> Happened:
        key = request_key(answer.request.id)
        gained = reward(self.problem(key), [*answer.tokens])
        versions = [span.version for span in answer.spans for _ in range(span.count)]
        row = SampleRow(
            **key._asdict(),
            attempt=self.attempts[key],
            replica=self.name,
            prompt=answer.request.prompt,
            answer=answer.tokens,
            logprobs=answer.logprobs,
            versions=tuple(versions),
            minimum=answer.request.min_tokens,
            reward=gained,
        )
        if self.first:
            self.ctx.record("sampled", None, text=row.digest, **key._asdict(), attempt=row.attempt)
            self.outbox.send(row)
        return {
            "event": "completed",
            **key._asdict(),
            "version": min(versions),
            "newest": max(versions),
            "length": len(answer.tokens),
            "reward": repr(gained),
            "digest": hashlib.sha256(repr(answer.tokens).encode()).hexdigest()[:16],
        }

    def sync(self, version: int, at_sync: str, replicas: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002 - as the trainer's
        """Receive a version; version 0 only compares digests."""
        self.receiver.join()
        if version:
            self.engine.weights_changed(version, at_sync)  # type: ignore[arg-type]
        return {}

    # -- the receiver's host --------------------------------------------------------------------------------------------

    def weights(self) -> Cut:
        return Cut(shards.destinations(self.replica.chunks), [p.data for p in self.replica.chunks[0].parameters()])

    def wake(self) -> None:
        """Called for every replica that gets a version from the cache; most of them are awake."""
        if self.replica.asleep:
            self.replica.wake()

    def sleep(self) -> None:
        """Also called after a failed sync, when the weights are unknown."""
        if not self.replica.asleep:
            self.replica.sleep()

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """No forward runs while this rank is in a sync: it has one thread."""
        return contextlib.nullcontext()

    def finalize(self) -> None:
        """Nothing is derived from these weights."""

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return shards.full_tensors(self.replica.chunks)

    def digests(self, algorithm: str) -> dict[str, str]:
        """Digests of every full tensor, on each rank of the replica. Collective over the replica."""
        of_tensor = functools.partial(digest, algorithm=algorithm)
        own = differing_digests((name, of_tensor(tensor)) for name, tensor in self.full_tensors())
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, own)
        table: dict[str, str] = tables[0]
        return table


def request_name(key: Key) -> str:
    return f"{key.group}.{key.sample}"


def request_key(name: str) -> Key:
    group, sample = name.split(".")
    return Key(int(group), int(sample))
