"""Memory of one GPU that two processes use: the sender's staging buffers, whose CUDA handles go over the links once.

The sender packs live weights of that GPU straight into a buffer, and a bucket of its cache by a copy from the host. Receivers copy
on the GPU and need not wait for each other: what a receiver applies at once stays there, and so does what it stores, if twice the room
is free. Limits: this has never run on a GPU. Where PyTorch's allocator uses expandable segments, receivers need the right to take a
descriptor from the sender's process, which containers often withhold: transport=auto does not choose `ipc` then.
"""

from __future__ import annotations

import base64
import os
from typing import Any

import torch

from kit.errors import BadInput, KitError
from kit.sync.transports.base import DEPTH, Transport, TransportContext

PIDFD = (
    "with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF a process shares GPU memory by a descriptor that another may only take "
    "with the permission to trace it (kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE); use expandable_segments:False, or transport=shm"
)


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
        message, _ = self.ctx.sender.expect("staged")
        if message["bucket"] != index:
            raise KitError(f"{self.ctx.sender.peer} sent bucket {message['bucket']} instead of bucket {index}")
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
