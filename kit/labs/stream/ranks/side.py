"""What the trainer and the replicas of the lab `stream` share: base weights, names of meetings, locations."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from kit.labs.stream.config import trainer_model
from kit.machine import host
from kit.megatron.model import DTYPES
from kit.sync.buckets import automatic, lay_out, specs_of
from kit.sync.transports import Place
from kit.train.arithmetic import END, encode, problem
from kit.train.options import Settings
from kit.train.plain import from_weights, initial_weights
from kit.train.rollout import Pupil

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.labs.rankside import Context
    from kit.labs.stream.config import StreamConfig
    from kit.sync.buckets import Layout

Weights = dict[str, torch.Tensor]
DIGEST = "sha256"  # of weights
LESSON = 16  # problems of one supervised update


def rows_of(meeting: str) -> str:
    """Where samples arrive."""
    return f"{meeting}-rows"


def syncs_of(meeting: str) -> str:
    """Where receivers of weights call."""
    return f"{meeting}-sync"


def rest(began: float, pace_ms: float) -> None:
    """Wait until the work that began then has taken as long as a larger model would take."""
    time.sleep(max(0.0, began + pace_ms / 1000 - time.monotonic()))


def lesson(seed: int, update: int, numbers: int = 10) -> list[tuple[list[int], list[int]]]:
    """Prompts with their right answers, for a supervised update: other draws than those that a loop asks."""
    asked = [problem(seed, -1 - update * LESSON - number, numbers) for number in range(LESSON)]
    return [(encode(each.prompt), [*encode(each.answer), END]) for each in asked]


def base_weights(config: StreamConfig) -> Weights:
    """Version 0: a plain model after `warm` updates on right answers, the same bits on every rank of a machine."""
    model = trainer_model(config)
    plain = from_weights(model.geometry, initial_weights(model.geometry, config.seed))
    Pupil(plain, config.seed, functools.partial(lesson, numbers=config.numbers)).learn(config.warm)
    return {name: value.detach().to(DTYPES[model.dtype]) for name, value in plain.named_parameters()}


def optimizer_settings(config: StreamConfig) -> Settings:
    """A constant learning rate: every update moves the weights far enough for versions to differ."""
    return Settings(lr=config.lr, first_lr=config.lr, last_lr=config.lr, warmup=0, decay=1_000_000)


def layout_of(tensors: Mapping[Any, torch.Tensor]) -> Layout:
    specs = specs_of(tensors)
    return lay_out(specs, automatic(specs))


def place_of(ctx: Context, rank: int) -> Place:
    """The location of a rank: this machine, and the World that it is in. Each replica is a World of its own."""
    return Place(host=host(), world=ctx.world_of(rank))
