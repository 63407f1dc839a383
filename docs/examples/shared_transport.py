"""Weights through POSIX shared memory, one named segment per bucket. One machine.
kit run sync --set transport=docs.examples.shared_transport:Shared"""

import contextlib
import secrets
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from kit.sync.transports import Transport


class Shared(Transport):
    """The sender makes and unlinks segments; receivers attach, copy and detach."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.segments: list[SharedMemory] = []

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        segment = make(len(buffer))
        self.segments.append(segment)
        segment.buf[: len(buffer)] = memoryview(buffer.numpy())
        self.say({"kind": "segment", "name": segment.name})

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the sender names the segment
        message, _ = self.ctx.sender.expect("segment")
        segment = attach(message["name"])
        memoryview(into.numpy())[:] = segment.buf[: len(into)]
        self.detach(segment)
        return into

    def detach(self, segment: SharedMemory) -> None:
        segment.close()

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
            self.unlink(segment)
        self.segments.clear()

    def unlink(self, segment: SharedMemory) -> None:
        segment.unlink()


def make(size: int) -> SharedMemory:
    return SharedMemory(f"example-weights-{secrets.token_hex(4)}", create=True, size=size)


def attach(name: str) -> SharedMemory:
    """Attach without Python's resource tracker, which would unlink the segment when this process ends."""
    with contextlib.suppress(TypeError):
        return SharedMemory(name, track=False)  # type: ignore[call-arg]  # from Python 3.13 on
    segment = SharedMemory(name)
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    return segment


# -- with one bug each ---------------------------------------------------------------------------------------------------


class SharedThatIsNeverUnlinked(Shared):
    """Leaves the last segment of every sync in /dev/shm."""

    def unlink(self, segment: SharedMemory) -> None:
        if segment is not self.segments[-1]:
            super().unlink(segment)


class SharedThatIsNeverDetached(Shared):
    """Receivers keep the first segment mapped: its memory stays although it has no name any more."""

    kept: list[SharedMemory] = []  # noqa: RUF012 - as real code often has it

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        self.first = index == 0
        return super().receive(index, into)

    def detach(self, segment: SharedMemory) -> None:
        if self.first:
            self.kept.append(segment)
        else:
            super().detach(segment)


class SharedWithOneSegment(Shared):
    """Reuses one segment as soon as a bucket is sent, although receivers may not have read it yet."""

    def send(self, index: int, buffer: torch.Tensor) -> None:  # noqa: ARG002 - all buckets use one segment
        if not self.segments:
            self.segments.append(make(max(self.ctx.sizes)))
        self.segments[0].buf[: len(buffer)] = memoryview(buffer.numpy())
        self.say({"kind": "segment", "name": self.segments[0].name})
