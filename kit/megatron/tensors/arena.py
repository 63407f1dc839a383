"""Host memory that tensors wait in while they are off the device; made once, reused by every cycle.

On CUDA it is pinned. On the CPU it is a memfd, mapped shared: what moves there leaves the process's anonymous memory,
as it would leave a device, and shows up as shared memory instead. Limits: the arena only grows; `close` gives it back.
How bytes get there and back on the CPU is in `kit.measure.host`.
"""

from __future__ import annotations

import os

import torch

from kit.measure.host import map_shared, unmap

_ALIGN = 512


class Arena:
    """A growing block of host memory. `reserve` hands out places; `clear` takes all of them back at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self.used = 0
        self._address = 0
        self._pinned: torch.Tensor | None = None
        self._fd = os.memfd_create("kit-arena") if device.type == "cpu" else -1

    def grow(self, size: int) -> bool:
        """Make room for at least so many bytes; nothing may be waiting in the arena. True: its pages are not there yet."""
        if self.used:
            raise RuntimeError("the arena cannot grow while tensors wait in it")
        if size <= self.size:
            return False
        if self.device.type == "cpu":
            self._map(size)
        else:
            self._pinned = None
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.size = size
        return True

    def _map(self, size: int) -> None:
        if self._address:
            unmap(self._address, self.size)
        os.ftruncate(self._fd, size)
        self._address = map_shared(self._fd, size)

    def reserve(self, size: int) -> int:
        """The offset of the next free place."""
        offset = self.used
        self.used += -(-size // _ALIGN) * _ALIGN
        return offset

    def address(self, offset: int) -> int:
        """Where a place lies in this process; CPU only."""
        return self._address + offset

    def view(self, offset: int, size: int) -> torch.Tensor:
        """A place as pinned bytes; CUDA only."""
        assert self._pinned is not None
        return self._pinned[offset : offset + size]

    def clear(self) -> None:
        """Nothing waits any more; the memory stays for the next cycle."""
        self.used = 0

    def close(self) -> None:
        """Give the memory back."""
        self.clear()
        if self._address:
            unmap(self._address, self.size)
        if self._fd >= 0:
            os.close(self._fd)
        self._address, self._fd, self._pinned, self.size = 0, -1, None, 0


def room(sizes: list[int]) -> int:
    """How large an arena has to be for tensors of these sizes."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
