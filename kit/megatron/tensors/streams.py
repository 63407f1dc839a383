"""Copies between a GPU and pinned host memory, by pieces on streams of their own.

Small tensors follow each other without a gap, since while one stream's copy ends the next one's has begun; large ones are cut, so that
no stream is left with most of the bytes. What any stream of the GPU has still to do is waited for first, and every copy is
done at the end: nothing is left for the caller to order. Has not run on a GPU yet.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Pair = tuple[torch.Tensor, torch.Tensor]  # flat bytes: to, from

PIECE = 64 * 2**20
STREAMS = 2


def copy(pairs: Iterable[Pair], device: torch.device) -> None:
    """Copy each second to its first. One end of a pair is on the device, the other pinned."""
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
    try:
        for (target, source), stream in zip(pieces(pairs), itertools.cycle(streams), strict=False):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    finally:  # where a copy cannot be begun, those before it are under way
        for stream in streams:
            stream.synchronize()


def pieces(pairs: Iterable[Pair], size: int = PIECE) -> Iterator[Pair]:
    """The same copies, none of more than so many bytes."""
    for target, source in pairs:
        for start in range(0, target.numel(), size):
            yield target[start : start + size], source[start : start + size]
