"""Copies within host memory, on as many threads as this rank has cores, into pages that may not exist yet.

The kernel must supply released memory again, page by page, and that takes longer than the copy. So the kit first asks for large pages
in the range, and populates each piece just before it fills it, while it is in the cache. Limits: both requests are hints, and an older
kernel refuses them; then the copy itself brings the pages in, more slowly.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kit.machine import has_thread

libc: Any = ctypes.CDLL(None, use_errno=True)  # its calls let go of the interpreter's lock
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
MAP_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = 3  # PROT_READ | PROT_WRITE
_MAP_SHARED, _MAP_PRIVATE = 1, 2
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_PAGE = 4096
_PIECE = 8 * 2**20  # populated and filled in one go; measured: 2 MiB and 64 MiB are both slower
_WORKERS = 4  # more do not copy faster: memory is the limit


class Move(NamedTuple):
    """`size` bytes from one address to another."""

    target: int
    source: int
    size: int


def copy_threads() -> int:
    """How many threads this rank may copy with: its share of the cores, since the other ranks copy at the same time."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_WORKERS, len(os.sched_getaffinity(0)) // ranks))


def transfer(moves: Sequence[Move], *, fresh: bool, threads: int) -> None:
    """Make every move. `fresh`: the targets' pages do not exist yet and are populated on the way."""
    # Pieces share the work and stay in the cache. One thread into pages that are there wants neither, and
    # the C library's memcpy is fastest when it sees how much there is.
    cut = fresh or threads > 1
    if fresh:
        moves = sorted(moves)
        for start, end in _runs(moves):
            huge_pages(start, end - start)
    pieces = iter([piece for move in moves for piece in (_pieces(move) if cut else [move])])
    if threads == 1:
        _work(pieces, fresh=fresh)
        return
    crew = [
        threading.Thread(target=_work, args=(pieces,), kwargs={"fresh": fresh}, name="kit-copy") for _ in range(threads)
    ]
    for thread in crew:
        thread.start()
    join_threads(crew)


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait until the threads are gone for the kernel too: Python's join comes back a moment earlier, and a census would
    still count them."""
    for thread in threads:
        thread.join()
        while has_thread(thread.native_id):
            time.sleep(0)


def _runs(moves: Sequence[Move]) -> Iterator[tuple[int, int]]:
    """The ranges that targets in ascending order cover together: tensors too small for a large page share one."""
    start = end = 0
    for move in moves:
        if move.target - end > _PAGE:
            yield start, end
            start = move.target
        end = move.target + move.size
    yield start, end


def _pieces(move: Move) -> Iterator[Move]:
    """A move cut where its target crosses a piece's boundary, so that no two threads supply one large page."""
    target, source, left = move
    while left:
        size = min(left, _PIECE - target % _PIECE)
        yield Move(target, source, size)
        target, source, left = target + size, source + size, left - size


def _work(pieces: Iterator[Move], *, fresh: bool) -> None:
    for target, source, size in pieces:  # a list's iterator: each next() is whole under the interpreter's lock
        if fresh:
            populate(target, size)
        libc.memcpy(target, source, size)


def map_shared(fd: int, size: int, *, private: bool = False) -> int:
    """`private`: what is written to the mapping is copied first, and no other process sees it."""
    address: int = libc.mmap(None, size, _READ_WRITE, _MAP_PRIVATE if private else _MAP_SHARED, fd, 0)
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"mapping {size} bytes of shared memory failed")
    return address


def unmap(address: int, size: int) -> None:
    libc.munmap(address, size)


def huge_pages(address: int, size: int) -> None:
    """Ask for large pages in a range: the kernel supplies them several times faster. Only a hint: it may refuse."""
    _advise(address, size, _MADV_HUGEPAGE)


def populate(address: int, size: int) -> None:
    """Supply the pages of a range now and keep their contents. Only a hint, as above."""
    _advise(address, size, _MADV_POPULATE_WRITE)


def map_pages(address: int, size: int) -> None:
    """Map the pages that a range has already, which the first read of each would do one by one. Only a hint, as above."""
    _advise(address, size, _MADV_POPULATE_READ)


def _advise(address: int, size: int, advice: int) -> None:
    start = -(-address // _PAGE) * _PAGE
    length = (address + size - start) // _PAGE * _PAGE
    if length > 0:
        libc.madvise(start, length, advice)


def trim() -> None:
    """Return the memory that the C library keeps after frees to the system."""
    libc.malloc_trim(0)
