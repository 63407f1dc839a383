"""Rehearsed failures of a sync: a receiver that raises or has other weights, changed bytes, a transport that raises."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import KitError
from kit.sync.weights import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.labs.sync.ranks.inference import Inference

EXTRA = "rehearsed.weight"
ALONE = "alone"
PACKED = "packed"
TOO_LATE = "activate"


class RehearsedError(KitError):
    """An error that is raised on purpose."""


@contextlib.contextmanager
def failing(side: Inference, scene: str) -> Iterator[None]:
    """Make the receiver fail in the next sync, as the scene says."""
    receiver = side.receiver
    plain: Any = receiver.calls

    class Failing(plain):  # type: ignore[misc]
        def look(self, index: int, buffer: torch.Tensor) -> None:
            super().look(index, corrupted(self.layout, index, buffer) if scene == "wrong-bytes" else buffer)

        def finalize(self, said: dict[str, Any]) -> None:
            if scene == "late":
                raise RehearsedError("rehearsed failure after all weights are new")
            super().finalize(said)

        def publish(self, said: dict[str, Any]) -> None:
            if scene == "publish":
                receiver.version = said["version"]
                raise RehearsedError("rehearsed failure after others have published")
            super().publish(said)

        def activate(self, said: dict[str, Any]) -> None:
            if scene == TOO_LATE:
                raise RehearsedError("rehearsed failure after the version became active")
            super().activate(said)

    receiver.calls = Failing
    side.cut = functools.partial(CUTS.get(scene, same), max(side.truth))
    try:
        with failing_transport(receiver, scene) if scene in {"transport", "both"} else contextlib.nullcontext():
            yield
    finally:
        receiver.calls, side.cut = plain, functools.partial(same, "")


def same(name: str, weights: Cut) -> Cut:  # noqa: ARG001 - all cuts are called alike
    return weights


def missing(name: str, weights: Cut) -> Cut:
    """The weights without one tensor."""
    return Cut({key: places for key, places in weights.destinations.items() if key != name}, weights.own())


def unsent(name: str, weights: Cut) -> Cut:
    """The weights with one more tensor, which the trainer does not have."""
    return Cut({**weights.destinations, EXTRA: weights.destinations[name]}, weights.own())


def unfit(name: str, weights: Cut) -> Cut:
    """One tensor of another dtype, and one of another shape: a plain copy would silently convert and broadcast."""
    wide = [(into.to(torch.float64), take) for into, take in weights.destinations[name]]
    first = min(weights.destinations)
    more = [(into.new_empty(2, *into.shape), take) for into, take in weights.destinations[first]]
    return Cut({**weights.destinations, name: wide, first: more}, weights.own())


CUTS: dict[str, Callable[[str, Cut], Cut]] = {"missing": missing, "unsent": unsent, "unfit": unfit}


def corrupted(layout: Any, index: int, buffer: torch.Tensor) -> torch.Tensor:
    """Change every piece of a bucket: swap two words, or flip one bit of the first or last byte."""
    buffer = buffer.clone()
    for number, _, size, offset in layout.buckets[index]:
        piece = buffer[offset : offset + size]
        words = piece[: size // 8 * 8].view(-1, 8)
        if number % 3 == 0 and len(words) > 1 and not torch.equal(words[0], words[-1]):
            words[[0, -1]] = words[[-1, 0]]
        else:
            piece[-1 if number % 3 == 1 else 0] ^= 1
    return buffer


class Fails:
    """A transport that raises its own error: a receiver's at the last bucket, the sender's in flush; with ALONE at the second bucket.
    It hides what the links report. With PACKED it flips a bit of the first bucket after packing."""

    def __init__(self, transport: Any, last: int, scene: str) -> None:
        self._transport = transport
        self._last = last
        self._scene = scene
        self._changed: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, index: int, buffer: torch.Tensor) -> None:
        if self._scene == ALONE and index == min(1, self._last):
            raise OSError("rehearsed error of a transport")
        if self._scene == PACKED and index == 0:
            buffer[0] ^= 1
            self._changed = buffer
        self._transport.send(index, buffer)

    def close(self) -> None:
        if self._changed is not None:
            self._changed[0] ^= 1  # the packed bytes may be the only copy of the active version
            self._changed = None
        self._transport.close()

    def flush(self) -> None:
        if self._scene == PACKED:
            self._transport.flush()
            return
        with contextlib.suppress(KitError):
            self._transport.flush()
        raise OSError("rehearsed error of the sender's transport")

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._transport.receive(index, into)
        if index == self._last:
            raise OSError("rehearsed error of the receiver's transport")
        return got


@contextlib.contextmanager
def failing_transport(end: Any, scene: str) -> Iterator[None]:
    """Make the transport of this end (sender or receiver) fail in the next sync."""
    plain = end.make

    def make(kind: Any, ctx: Any, **named: Any) -> Any:
        return Fails(plain(kind, ctx, **named), len(ctx.sizes) - 1, scene)

    end.make = make
    try:
        yield
    finally:
        end.make = plain
