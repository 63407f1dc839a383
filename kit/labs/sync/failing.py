"""The ways in which a rehearsed sync fails: a receiver that raises or knows other weights, bytes that changed, a transport with errors of
its own."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from kit.errors import KitError
from kit.sync.weights import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.labs.sync.inference import Inference

EXTRA = "rehearsed.weight"
ALONE = "alone"
PACKED = "packed"
TOO_LATE = "activate"


class RehearsedError(KitError):
    """An error that a rehearsal wants."""


@contextlib.contextmanager
def failing(side: Inference, scene: str) -> Iterator[None]:
    """The receiver fails in the next sync, in this way."""
    receiver = side.receiver
    plain: Any = receiver.calls

    class Failing(plain):  # type: ignore[misc]
        def look(self, index: int, buffer: torch.Tensor) -> None:
            super().look(index, corrupted(self.layout, index, buffer) if scene == "wrong-bytes" else buffer)

        def finalize(self, said: dict[str, Any]) -> None:
            if scene == "late":
                raise RehearsedError("the rehearsed failure after all weights were new")
            super().finalize(said)

        def publish(self, said: dict[str, Any]) -> None:
            if scene == "publish":
                receiver.version = said["version"]
                raise RehearsedError("the rehearsed failure when others have published")
            super().publish(said)

        def activate(self, said: dict[str, Any]) -> None:
            if scene == TOO_LATE:
                raise RehearsedError("the rehearsed failure when the version is active already")
            super().activate(said)

    receiver.calls = Failing
    side.cut = functools.partial(CUTS.get(scene, same), max(side.truth))
    try:
        with failing_transport(receiver, scene) if scene in {"transport", "both"} else contextlib.nullcontext():
            yield
    finally:
        receiver.calls, side.cut = plain, functools.partial(same, "")


def same(name: str, weights: Cut) -> Cut:  # noqa: ARG001 - as those below
    return weights


def missing(name: str, weights: Cut) -> Cut:
    """The same weights, which do not know one tensor."""
    return Cut({key: places for key, places in weights.destinations.items() if key != name}, weights.own())


def unsent(name: str, weights: Cut) -> Cut:
    """With one more, which the trainer does not have."""
    return Cut({**weights.destinations, EXTRA: weights.destinations[name]}, weights.own())


def unfit(name: str, weights: Cut) -> Cut:
    """One tensor has another dtype here, and one another shape: a copy would convert and repeat without a word."""
    wide = [(into.to(torch.float64), take) for into, take in weights.destinations[name]]
    first = min(weights.destinations)
    more = [(into.new_empty(2, *into.shape), take) for into, take in weights.destinations[first]]
    return Cut({**weights.destinations, name: wide, first: more}, weights.own())


CUTS: dict[str, Callable[[str, Cut], Cut]] = {"missing": missing, "unsent": unsent, "unfit": unfit}


def corrupted(layout: Any, index: int, buffer: torch.Tensor) -> torch.Tensor:
    """Other bytes in every piece of a bucket: two words that change places, or one bit of the first or of the last byte."""
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
    """A transport that raises an error of its own: a receiver's with the last bucket, the sender's when it waits for all; alone, with the
    second bucket. What links say of others it swallows. Or the first bucket has another bit than was packed."""

    def __init__(self, transport: Any, last: int, scene: str) -> None:
        self._transport = transport
        self._last = last
        self._scene = scene
        self._changed: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, index: int, buffer: torch.Tensor) -> None:
        if self._scene == ALONE and index == min(1, self._last):
            raise OSError("the rehearsed error of a transport")
        if self._scene == PACKED and index == 0:
            buffer[0] ^= 1
            self._changed = buffer
        self._transport.send(index, buffer)

    def close(self) -> None:
        if self._changed is not None:
            self._changed[0] ^= 1  # what is packed may be the only copy of the active version
            self._changed = None
        self._transport.close()

    def flush(self) -> None:
        if self._scene == PACKED:
            self._transport.flush()
            return
        with contextlib.suppress(KitError):
            self._transport.flush()
        raise OSError("the rehearsed error of the sender's end")

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._transport.receive(index, into)
        if index == self._last:
            raise OSError("the rehearsed error of a receiver's end")
        return got


@contextlib.contextmanager
def failing_transport(end: Any, scene: str) -> Iterator[None]:
    """The end's transport, a sender's or a receiver's, fails in the next sync."""
    plain = end.make

    def make(kind: Any, ctx: Any, **named: Any) -> Any:
        return Fails(plain(kind, ctx, **named), len(ctx.sizes) - 1, scene)

    end.make = make
    try:
        yield
    finally:
        end.make = plain
