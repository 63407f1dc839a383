"""Transports without a process group: shared memory, raw bytes over the links, and GPU memory of one device.

`Shm`: receivers map the memory that the sender packs into, so nothing is copied on the way or when a receiver stores a bucket. A new
mapping of small pages costs about as much as a copy of its bytes, so a receiver may keep its mappings from sync to sync.

`Serialize`: for receivers that share neither a group nor memory with the sender.

`Ipc`: the sender's staging buffers on a GPU, whose CUDA handles go over the links once. Live weights of that GPU are packed into a buffer
directly, a bucket of the cache is copied from the host. Limits: this has never run on a GPU. Where PyTorch's allocator uses expandable
segments, receivers need the right to take a descriptor from the sender's process, which containers often withhold: transport=auto does not
choose `ipc` then.
"""

from __future__ import annotations

import base64
import ctypes
import os
from typing import Any

import torch

from kit.errors import BadInput, KitError
from kit.sync.cache import Segment
from kit.sync.transports.base import DEPTH, Transport, TransportContext

MESSAGES = 64  # buckets that Shm may be ahead: nothing is overwritten, so this only keeps links from filling up
PIDFD = (
    "with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF a process shares GPU memory by a descriptor that another may only take "
    "with the permission to trace it (kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE); use expandable_segments:False, or transport=shm"
)


def await_bucket(ctx: TransportContext, kind: str, index: int) -> None:
    """Wait for the sender's message that bucket `index` can be read."""
    message, _ = ctx.sender.expect(kind)
    if message["bucket"] != index:
        raise KitError(f"{ctx.sender.peer} sent bucket {message['bucket']} instead of bucket {index}")


class Shm(Transport):
    """Views of the sender's segment, which belongs to the caller. Its descriptor goes over the links once."""

    segment: Segment | None = None

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        if ctx.role == "receiver":
            self.segment = attach(ctx)
            return
        if ctx.segment is None:
            raise BadInput("shm needs ctx.segment, the memory that holds the buckets")
        self.say({"kind": "segment"}, [ctx.segment.fd])

    def send(self, index: int, buffer: torch.Tensor) -> None:  # noqa: ARG002 - it lies in the segment
        self.ahead(index, MESSAGES)
        self.say({"kind": "packed", "bucket": index})

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the bytes are there already
        await_bucket(self.ctx, "packed", index)
        if self.segment is None:
            raise KitError("the transport is closed")
        start = self.ctx.starts[index]
        return self.segment.tensor[start : start + self.ctx.sizes[index]]

    def close(self) -> None:
        segment, self.segment = self.segment, None
        if segment is not None and self.ctx.kept is None:
            segment.close()


def attach(ctx: TransportContext) -> Segment:
    """The sender's segment, mapped here."""
    _, fds = ctx.sender.expect("segment")
    try:
        (fd,) = fds
        segment = Segment.attach(fd) if ctx.kept is None else ctx.kept.attach(fd)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    needed = max((start + size for start, size in zip(ctx.starts, ctx.sizes, strict=True)), default=0)
    if segment.size < needed:
        if ctx.kept is None:
            segment.close()
        raise KitError(f"{ctx.sender.peer} sent a segment of {segment.size} bytes, but the buckets need {needed}")
    return segment


class Serialize(Transport):
    """One message and its bytes per bucket, to each receiver in turn."""

    _host: torch.Tensor | None = None

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        self.say({"kind": "bytes", "bucket": index, "size": buffer.numel()}, data=memory(buffer))

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        message, _ = self.ctx.sender.expect("bytes")
        if (message["bucket"], message["size"]) != (index, into.numel()):
            raise KitError(
                f"{self.ctx.sender.peer} sent {message['size']} bytes of bucket {message['bucket']} instead of "
                f"{into.numel()} bytes of bucket {index}"
            )
        there = self.host(into)
        self.ctx.sender.receive_bytes(memory(there))
        return into if there is into else into.copy_(there)

    def skip(self, message: dict[str, Any]) -> None:
        if message.get("kind") == "bytes":
            self.ctx.sender.receive_bytes(memoryview(bytearray(message["size"])))

    def host(self, into: torch.Tensor) -> torch.Tensor:
        """Host memory that a socket can write to."""
        if into.is_cpu:
            return into
        if self._host is None:
            self._host = torch.empty(max(self.ctx.sizes), dtype=torch.uint8)
        return self._host[: into.numel()]

    def close(self) -> None:
        self._host = None


def memory(buffer: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, without a copy."""
    return memoryview((ctypes.c_char * buffer.numel()).from_address(buffer.data_ptr())).cast("B")


class Ipc(Transport):
    """A ring of `DEPTH` buffers on the GPU, written again when every receiver is done with them."""

    on_device = True

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        self.slots: list[torch.Tensor] = []
        if ctx.device.type != "cuda" or not torch.cuda.is_available():
            raise BadInput(f"ipc shares GPU memory, but {ctx.name} is on {ctx.device.type}: use shm")
        if ctx.role == "receiver":
            message, _ = ctx.sender.expect("handles")
            self.slots = [opened(handle) for handle in message["slots"]]
            return
        largest = max([1, *ctx.sizes])
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=ctx.device) for _ in range(DEPTH)]
        for link in ctx.links.values():  # a handle for each receiver: each counts as one use
            link.send({"kind": "handles", "slots": [handle_of(slot) for slot in self.slots]})

    def slot(self, index: int) -> torch.Tensor:
        return self.slots[index % DEPTH][: self.ctx.sizes[index]]

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        if self.ctx.pack is not None:
            self.ctx.pack(index, self.slot(index))
        else:
            self.slot(index).copy_(buffer)
        torch.cuda.current_stream(self.ctx.device).synchronize()
        self.say({"kind": "staged", "bucket": index})

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        await_bucket(self.ctx, "staged", index)
        return into.copy_(self.slot(index))

    def done(self, index: int) -> None:
        torch.cuda.current_stream(self.ctx.device).synchronize()
        super().done(index)

    def close(self) -> None:
        if self.slots:
            self.slots = []
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def needs_permission() -> bool:
    """Whether memory of this process is shared by descriptors, which not every receiver may take (see PIDFD)."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in one.replace(" ", "").lower() for one in settings)


def handle_of(slot: torch.Tensor) -> list[Any]:
    """What another process needs to open the memory, as JSON."""
    shared: tuple[Any, ...] = slot.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return [{"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in shared]


def opened(handle: list[Any]) -> torch.Tensor:
    """The other process's memory."""
    parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
    except RuntimeError as error:
        words = " ".join(str(error).partition("\n")[0].split())
        # torch's CUDACachingAllocator.cpp (ExpandableSegment::fromShared), 2.9 to 2.13: "pidfd_open:..." and "pidfd_getfd: ..."
        why = f": {PIDFD}" if "pidfd" in words else ""
        raise KitError(f"the sender's GPU memory cannot be opened here ({words}){why}") from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
