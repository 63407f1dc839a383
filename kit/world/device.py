"""Which device a rank works on, and why. Runs on the rank, before anything touches CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kit import nccl
from kit.world import cards

if TYPE_CHECKING:
    from collections.abc import Mapping


class Seat(NamedTuple):
    """A rank's device, why it is that one, and what NCCL must find in the environment before its first communicator."""

    device: torch.device
    why: str
    env: Mapping[str, str]


def choose(wanted: str, number: int, neighbours: int) -> Seat:
    """`wanted` is auto, cpu or cuda; `number` counts the ranks of this machine, of which there are `neighbours`.

    Auto takes CUDA where it is usable. Fewer cards than ranks are shared, in a way that the NCCL of this process knows.
    """
    if wanted == "cpu":
        return Seat(torch.device("cpu"), "asked for", {})
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is a build without CUDA"
    elif cards.poisoned():
        reason = (
            "a module that was loaded for the ranks started CUDA before they were forked, so that it is dead in them"
        )
    elif not torch.cuda.is_available():
        reason = "torch finds no usable CUDA device"
    else:
        there = torch.cuda.device_count()
        counted = f"{there} CUDA device{'s' * (there > 1)} for {neighbours} rank{'s' * (neighbours > 1)}"
        if there >= neighbours:
            return Seat(torch.device("cuda", number), counted, {})
        shared = nccl.sharing(nccl.running(), number)
        if shared is not None:
            return Seat(torch.device("cuda", number % there), f"{counted}, shared {shared.told}", shared.env)
        reason = f"{counted}; without NCCL each rank needs its own"
    if wanted == "cuda":
        raise RuntimeError(f"device='cuda' cannot be had: {reason}")
    return Seat(torch.device("cpu"), reason, {})
