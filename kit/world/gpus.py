"""Counting GPUs in the process that forks the ranks, without starting CUDA's driver there.

A driver that was started before a fork is dead after it: every rank would be told that there is no GPU. torchrun's own config
counts GPUs before it forks, and so do modules that are loaded for the ranks. `spare` has a child count, which is gone afterwards.
Limits: a module that asks a GPU for more than its presence starts the driver all the same; `poisoned` tells.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

_C: Any = torch._C
COUNT = "_cuda_getDeviceCount"
_plain = getattr(_C, COUNT, None)  # a build without CUDA has none


def spare(device: str) -> None:
    """From now on, for ranks on this device: cpu, for which there are no GPUs, or another one."""
    if _plain is not None:
        setattr(_C, COUNT, (lambda: 0) if device == "cpu" else counted_by_a_child)


def restore() -> None:
    """In a rank, whose driver is its own."""
    if _plain is not None:
        setattr(_C, COUNT, _plain)


def poisoned() -> bool:
    """Whether CUDA was started in this process's parent before the fork."""
    return bool(torch.cuda._is_in_bad_fork())


@functools.cache
def counted_by_a_child() -> int:
    assert _plain is not None
    child = os.fork()
    if not child:
        count = 0
        try:
            count = _plain()
        finally:
            os._exit(min(count, 255))
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
