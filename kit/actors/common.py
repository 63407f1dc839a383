"""What a trainer and its replicas have in common: their context, base weights, addresses and locations."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from kit.megatron.model import DTYPES
from kit.sync.link import Listener, address_of
from kit.sync.transports import RankPlace
from kit.tls import Certificate
from kit.train.arithmetic import END, encode, problem
from kit.train.options import Settings
from kit.train.plain import from_weights, initial_weights
from kit.train.rollout import Pupil


class ActorContext(Protocol):
    """This rank, the ranks of every role of its loop, and the loop's config. Ranks meet under the name `meeting`."""

    @property
    def rank(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def roles(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def meeting(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def config(self) -> Any: ...
    @property
    def host(self) -> str: ...
    @property
    def certificate(self) -> Certificate | None: ...
    @property
    def ports(self) -> dict[str, int]: ...
    def machine_of(self, rank: int) -> str: ...
    def world_of(self, rank: int) -> str: ...
    def record(self, metric: str, value: float | None, unit: str = "1", *, text: str = "", **ids: Any) -> None: ...


Weights = dict[str, torch.Tensor]
DIGEST = "sha256"  # of weights
LESSON = 16  # problems of one supervised update


def name_for(ctx: ActorContext, purpose: str) -> str:
    return f"{ctx.meeting}-{purpose}"


def listen(ctx: ActorContext, purpose: str) -> Listener:
    """On rank 0: where samples arrive ("rows"), or receivers of weights ("sync") or of an adapter call."""
    name = name_for(ctx, purpose)
    listener = Listener(name=name, tcp_host=ctx.host or None, certificate=ctx.certificate)
    if ctx.host:
        ctx.ports[name] = listener.address["port"]
    return listener


def address_for(ctx: ActorContext, purpose: str) -> dict[str, Any]:
    """Where this rank calls rank 0: by name on its machine, where links carry descriptors too, else by its port."""
    name = name_for(ctx, purpose)
    if ctx.certificate is None or ctx.machine_of(ctx.rank) == ctx.machine_of(0):
        return address_of(name)
    certificate = ctx.certificate.fingerprint
    return {"host": ctx.host, "port": ctx.ports[name], "secret": name, "certificate": certificate}


def rest(began: float, pace_ms: float) -> None:
    """Wait until the work has taken as long as a larger model would take."""
    time.sleep(max(0.0, began + pace_ms / 1000 - time.monotonic()))


def lesson(seed: int, update: int, numbers: int = 10) -> list[tuple[list[int], list[int]]]:
    """Prompts with right answers for a supervised update, drawn separately from those of the loops."""
    asked = [problem(seed, -1 - update * LESSON - number, numbers) for number in range(LESSON)]
    return [(encode(task.prompt), [*encode(task.answer), END]) for task in asked]


def base_weights(config: Any) -> Weights:
    """Version 0: a plain model after `warm` updates on right answers, the same bits on every rank of a machine."""
    model = config.trainer_model
    plain = from_weights(model.geometry, initial_weights(model.geometry, config.seed))
    Pupil(plain, config.seed, functools.partial(lesson, numbers=config.numbers)).learn(config.warm)
    return {name: value.detach().to(DTYPES[model.dtype]) for name, value in plain.named_parameters()}


def optimizer_settings(config: Any, steps: int) -> Settings:
    """Every update moves the weights far enough for versions to differ, and has another learning rate, so a lost schedule shows."""
    samples = steps * config.groups * config.group
    return Settings(lr=config.lr, first_lr=config.lr, last_lr=config.lr / 2, warmup=0, decay=samples)


def place_of(ctx: ActorContext, rank: int) -> RankPlace:
    """The location of a rank: this machine and its World. Each replica is a separate World."""
    return RankPlace(host=ctx.machine_of(rank), world=ctx.world_of(rank))


class Idle:
    """No call is made to these ranks."""

    def __init__(self, ctx: ActorContext) -> None:
        self.ctx = ctx
