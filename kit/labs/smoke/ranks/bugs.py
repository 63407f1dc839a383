"""The known bugs of the lab `smoke`: what a fault puts in place of the right code."""

from __future__ import annotations

from typing import Any

import torch

from kit.labs.smoke.ranks.phases import Smoke

destroy, message = Smoke.destroy, Smoke.message
forgotten: list[Any] = []


def forgets_a_group(lab: Smoke, cycle: int) -> None:
    forgotten.append(lab.groups.pop())
    destroy(lab, cycle)


def one_number_too_large(lab: Smoke, index: int) -> torch.Tensor:
    right = message(lab, index)
    last_group = index == len(lab.groups) - 1 and lab.cycle == lab.ctx.config.cycles
    if last_group and lab.ctx.rank == lab.ctx.world_size - 1:
        right[-1] += 1
    return right
