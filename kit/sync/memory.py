"""Anonymous shared memory by memfd: it has no name that could be left behind, and needs no /dev/shm, which many containers keep at 64 MB.

A segment is handed to another process as a file descriptor over a Unix socket. Its pages are there for as long as anybody has a
descriptor or a mapping; a view of `tensor` keeps this process's mapping, so that a late reader meets old bytes and never a hole. The
size is sealed: no other holder can cut the file short under a reader. Limits: Linux, host memory; large pages only where the
system allows them for shared memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref
from typing import Self

import torch

from kit.errors import BadInput
from kit.measure.host import huge_pages, map_shared, populate, unmap


class Segment:
    """`size` bytes; `tensor` are they, as uint8. With `close` the descriptor goes, and the mapping with the last view of it."""

    def __init__(self, size: int, *, name: str = "kit-segment") -> None:
        if size < 1:
            raise BadInput(f"a segment of {size} bytes is too small: use at least 1")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map a segment that another process made. The descriptor is this segment's from here on; where it is refused, the caller's."""
        segment = cls.__new__(cls)
        segment._map(fd, os.fstat(fd).st_size)
        return segment

    def _map(self, fd: int, size: int) -> None:
        if size < 1:
            raise BadInput(f"descriptor {fd} has no bytes to map")
        address = map_shared(fd, size)
        huge_pages(address, size)
        array = (ctypes.c_ubyte * size).from_address(address)
        # Every view of the tensor holds the array. At exit the system takes the mapping: a tensor may outlive this module.
        weakref.finalize(array, unmap, address, size).atexit = False
        self.fd = fd
        self.size = size
        self._address = address
        self._tensor: torch.Tensor | None = torch.frombuffer(array, dtype=torch.uint8)

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise BadInput("the segment is closed")
        return self._tensor

    def populate(self) -> None:
        """Have every page supplied now, not when it is first written. What is in them stays."""
        if self._tensor is not None:
            populate(self._address, self.size)

    def close(self) -> None:
        """Give up descriptor and tensor. A second time does nothing."""
        if self._tensor is not None:
            os.close(self.fd)
            self.fd, self._tensor = -1, None


class Kept:
    """Mappings that stay, the last used ones: as many as a sender's cache has places. Its owner closes it. Only for a sender that
    keeps its memory, too: pages that it gave up would stay with whoever maps them."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self._segments: dict[int, Segment] = {}  # by inode, which is nobody else's while it is mapped here

    def attach(self, fd: int) -> Segment:
        """The segment behind a descriptor, which is taken over."""
        inode = os.fstat(fd).st_ino
        segment = self._segments.pop(inode, None)
        if segment is None:
            segment = Segment.attach(fd)
        else:
            os.close(fd)
        self._segments[inode] = segment
        while len(self._segments) > self.most:
            self._segments.pop(next(iter(self._segments))).close()
        return segment

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments = {}
