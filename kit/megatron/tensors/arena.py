"""Host memory that tensors wait in while they are off the device; made once, reused by every cycle.

On CUDA it is pinned. On the CPU it is a memfd, mapped shared: what moves there leaves the process's anonymous memory,
as it would leave a device, and shows up as shared memory instead. Limits: the arena only grows; `close` gives it back.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_PROT_READ_WRITE = 3
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE = 14
_PAGE = 4096
_ALIGN = 512


def copy(target: int, source: int, size: int) -> None:
    """One plain memory copy between two addresses, without the interpreter's lock."""
    _libc.memcpy(target, source, size)


def huge_pages(address: int, size: int) -> None:
    """Ask for large pages in a fresh range: the kernel supplies them several times faster. Only a hint: it may refuse."""
    start = -(-address // _PAGE) * _PAGE
    length = (address + size - start) // _PAGE * _PAGE
    if length > 0:
        _libc.madvise(start, length, _MADV_HUGEPAGE)


def trim() -> None:
    """Give the memory that the C library keeps after frees back to the system."""
    _libc.malloc_trim(0)


class Arena:
    """A growing block of host memory. `reserve` hands out places; `clear` takes all of them back at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self.used = 0
        self._address = 0
        self._pinned: torch.Tensor | None = None
        self._fd = os.memfd_create("kit-arena") if device.type == "cpu" else -1

    def grow(self, size: int) -> None:
        """Make room for at least so many bytes; nothing may be waiting in the arena."""
        if self.used:
            raise RuntimeError("the arena cannot grow while tensors wait in it")
        if size <= self.size:
            return
        if self.device.type == "cpu":
            self._map(size)
        else:
            self._pinned = None
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.size = size

    def _map(self, size: int) -> None:
        if self._address:
            _libc.munmap(self._address, self.size)
        os.ftruncate(self._fd, size)
        address = _libc.mmap(None, size, _PROT_READ_WRITE, _MAP_SHARED, self._fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"mapping {size} bytes of host arena failed")
        self._address = address
        huge_pages(address, size)

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
            _libc.munmap(self._address, self.size)
        if self._fd >= 0:
            os.close(self._fd)
        self._address, self._fd, self._pinned, self.size = 0, -1, None, 0


def room(sizes: list[int]) -> int:
    """How large an arena has to be for tensors of these sizes."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
