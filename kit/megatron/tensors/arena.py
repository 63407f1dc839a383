"""Host memory that tensors wait in while they are off the device; made once, reused by every cycle.

It is a memfd, mapped shared: what moves there on the CPU leaves the process's anonymous memory, as it would leave a device, and shows
up as shared memory instead. For CUDA the mapping is pinned as it is: torch's own pinned memory is rounded up to a power of two, and
kept when it is freed. Where the driver does not pin it, torch's is taken. Limits: the arena only grows; `close` gives it back.
How bytes get there and back on the CPU is in `kit.measure.host`, on CUDA in `streams`. Pinning has not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch

from kit.measure.host import huge_pages, map_shared, unmap

_ALIGN = 512


class Arena:
    """A growing block of host memory. `reserve` hands out places; `clear` takes all of them back at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self.used = 0
        self._address = 0
        self._pinned: torch.Tensor | None = None
        self._fd = -1

    def open(self) -> None:
        """Make the file, if it is not there: a job that never leaves its device holds none."""
        if self._fd < 0:
            self._fd = os.memfd_create("kit-arena")

    def __del__(self) -> None:
        if self._fd >= 0:  # a job that is dropped takes its arena along
            self.close()

    def grow(self, size: int) -> bool:
        """Make room for at least so many bytes; nothing may be waiting in the arena. True: its pages are not there yet."""
        if self.used:
            raise RuntimeError("the arena cannot grow while tensors wait in it")
        if size <= self.size:
            return False
        self._unmap()
        self.open()
        os.ftruncate(self._fd, size)
        self._address = map_shared(self._fd, size)
        self.size = size
        if self.device.type == "cuda":
            self._pin()
        return True

    def _pin(self) -> None:
        huge_pages(self._address, self.size)
        if int(_cudart().cudaHostRegister(self._address, self.size, 0)) == 0:
            block = (ctypes.c_ubyte * self.size).from_address(self._address)
            self._pinned = torch.frombuffer(block, dtype=torch.uint8)
            return
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)  # CUDA reports the refusal at the next call: make that call here
        size = self.size
        self._unmap()
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.size = size

    def _unmap(self) -> None:
        if self._address:
            if self._pinned is not None:
                _cudart().cudaHostUnregister(self._address)
            unmap(self._address, self.size)
            os.ftruncate(self._fd, 0)
        self._pinned, self._address, self.size = None, 0, 0

    def reserve(self, size: int) -> int:
        """The offset of the next free place."""
        offset = self.used
        self.used += -(-size // _ALIGN) * _ALIGN
        return offset

    def address(self, offset: int) -> int:
        """Where a place lies in this process; CPU only."""
        return self._address + offset

    def view(self, offset: int, size: int) -> torch.Tensor:
        """A place as pinned bytes; CUDA only. Not to be used once the arena has grown or is closed."""
        assert self._pinned is not None
        return self._pinned[offset : offset + size]

    def clear(self) -> None:
        """Nothing waits any more; the memory stays for the next cycle."""
        self.used = 0

    def close(self) -> None:
        """Give the memory back."""
        self.clear()
        self._unmap()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def room(sizes: list[int]) -> int:
    """How large an arena has to be for tensors of these sizes."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
