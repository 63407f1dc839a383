"""What a trainer and its replicas have in common: their context, base weights, addresses and locations."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from kit.machine import host
from kit.megatron.model import DTYPES
from kit.sync.transports import RankPlace
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
    def world_of(self, rank: int) -> str: ...
    def record(self, metric: str, value: float | None, unit: str = "1", *, text: str = "", **ids: Any) -> None: ...


Weights = dict[str, torch.Tensor]
DIGEST = "sha256"  # of weights
LESSON = 16  # problems of one supervised update


def rows_address(meeting: str) -> str:
    """Where samples arrive."""
    return f"{meeting}-rows"


def syncs_address(meeting: str) -> str:
    """Where receivers of weights call."""
    return f"{meeting}-sync"


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


def optimizer_settings(config: Any) -> Settings:
    """Every update moves the weights far enough for versions to differ, and has another learning rate, so a lost schedule shows."""
    samples = config.steps * config.groups * config.group
    return Settings(lr=config.lr, first_lr=config.lr, last_lr=config.lr / 2, warmup=0, decay=samples)


def place_of(ctx: ActorContext, rank: int) -> RankPlace:
    """The location of a rank: this machine and its World. Each replica is a separate World."""
    return RankPlace(host=host(), world=ctx.world_of(rank))


class Idle:
    """No call is made to these ranks."""

    def __init__(self, ctx: ActorContext) -> None:
        self.ctx = ctx
