"""The known bugs of the lab `box` on ranks: what a fault puts in place of the right code."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from kit import machine
from kit.labs.box.lab import DEADLINE_S
from kit.labs.box.ranks import probes
from kit.labs.box.ranks.probes import Probes
from kit.megatron import groups, model

exact, weigh = probes.sums_are_exact, probes.weighted_sum
make_groups, train_job = Probes.groups, Probes.job
reload_groups, make_again = groups.reload, groups._make
train = model.Training.step

LONGER_S = 3 * DEADLINE_S
weighed: list[int] = []
trained: list[Any] = []
kept: list[int] = []


def sleeps(lab: Probes, cycle: int) -> None:
    if lab.ctx.rank == lab.ctx.world_size - 1:
        time.sleep(3600)
    make_groups(lab, cycle)


def kills_itself(lab: Probes, cycle: int) -> None:
    if lab.ctx.rank == lab.ctx.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    make_groups(lab, cycle)


def one_too_large(where: torch.device, group: Any = None) -> bool:
    """As if the sum were off by one on the last rank."""
    right = exact(where, group)
    return right and torch.distributed.get_rank() != torch.distributed.get_world_size() - 1


def keeps_its_size(lab: Probes, flat: torch.Tensor, size: int) -> None: ...


def swaps_two_words(view: torch.Tensor) -> int:
    """As if the first two words had changed places before the buffer and its views are looked at for the second time."""
    weighed.append(1)
    if len(weighed) == 5:
        words = view.view(torch.int64)
        words[:2] = words[:2].flip(0).clone()
    return weigh(view)


def gives_up_silently() -> None:
    time.sleep(DEADLINE_S)


def leaves_a_name(lab: Probes) -> None:
    Path(f"{machine.SHM}/torch_{os.getpid()}-left-by-rank-{lab.ctx.rank}").touch()


def keeps_a_descriptor(snapshot: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    stats = reload_groups(snapshot, timeout_s=timeout_s)
    kept.append(os.open(os.devnull, os.O_RDONLY))
    return stats


def drops_timeouts(plain: dict[str, Any], store: Any, default: Any, rank: int) -> Any:
    return make_again({**plain, "timeout_s": 1800.0}, store, default, rank)


def other_seed_at_second(lab: Probes, config: Any) -> dict[str, str]:
    trained.append(config)
    return train_job(lab, dataclasses.replace(config, seed=config.seed + len(trained) % 2))


def loss_is_nan(job: model.Training, n: int = 1) -> list[dict[str, float]]:
    return [{**step, "loss": float("nan")} for step in train(job, n)]
