"""Host copies of a trainer's weights by version, packed into buckets that transports send unchanged.

There are at most two copies, each in a segment for the whole model: the active version, which receivers run, and the latest one. A new
version goes into the segment that is not active. Version -1 is the base, which has no copy.

One reentrant lock covers building, activating and closing; a transport and its teardown hold it with `held`. Another thread waits for it,
and at its deadline gets an error that names the holder.

Segments are anonymous shared memory by memfd: no name can be left behind, and /dev/shm, which many containers keep at 64 MB, is not
needed. A segment goes to another process as a file descriptor over a Unix socket. Its pages exist as long as any process has a descriptor
or a mapping; a view of `tensor` keeps this process's mapping, so a late reader finds old bytes and never unmapped memory. The size is
sealed: no other holder can truncate the file under a reader.

Limits: Linux, host memory. An old version is overwritten; receivers must be done with it by then, which the end of a transport ensures,
unless they have adopted its memory as weights: such a segment is not used again (kit/sync/adopting.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch

from kit.errors import BadInput, KitError
from kit.machine import free_memory, opened_again
from kit.measure.host import huge_pages, map_shared, populate, unmap
from kit.sync.buckets import Bound, Key, Layout

BASE = -1
SHARE = 0.8  # of the free memory: the limit for both copies
_PAGE = 4096
SLOTS = 2  # one is packed while the other is applied; measured: more do not help, and fill the processor's cache
LARGEST = 4 * 2**20  # of a ring's bucket; measured: smaller ones cost messages, larger ones do not stay in the cache


class Segment:
    """`size` bytes of shared memory; `tensor` views them as uint8. `close` closes the descriptor; the mapping ends with the last view."""

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
        """Map a segment that another process made, and take over the descriptor. On failure the caller keeps the descriptor."""
        segment = cls.__new__(cls)
        segment._map(fd, os.fstat(fd).st_size)
        return segment

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """The same for weights: what is written to them stays in this process, and nobody packs into the segment while they exist."""
        own = opened_again(fd)
        segment = cls.__new__(cls)
        try:
            fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the mapping keeps it
            segment._map(own, os.fstat(own).st_size, private=True)
        except BaseException:
            os.close(own)
            raise
        os.close(fd)
        return segment

    @property
    def adopted(self) -> bool:
        """Whether another process has weights here."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    def _map(self, fd: int, size: int, *, private: bool = False) -> None:
        if size < 1:
            raise BadInput(f"descriptor {fd} has no bytes to map")
        address = map_shared(fd, size, private=private)
        huge_pages(address, size)
        array = (ctypes.c_ubyte * size).from_address(address)
        # Every view of the tensor keeps the array. At exit the system unmaps it, since a tensor may outlive this module.
        weakref.finalize(array, unmap, address, size).atexit = False
        self.fd = fd
        self.size = size
        self._tensor: torch.Tensor | None = torch.frombuffer(array, dtype=torch.uint8)

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise BadInput("the segment is closed")
        return self._tensor

    def populate(self) -> None:
        """Allocate every page now, not when it is first written. Contents do not change."""
        if self._tensor is not None:
            populate(self._tensor.data_ptr(), self.size)

    def close(self) -> None:
        """Release descriptor and tensor. A second call does nothing."""
        if self._tensor is not None:
            os.close(self.fd)
            self.fd, self._tensor = -1, None


class KeptMappings:
    """The last used mappings, kept open: as many as a sender's cache has segments. The owner closes them. Only for a sender that also
    keeps its memory: pages that the sender frees would remain allocated while they are mapped."""

    most = 2

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}  # by inode, which is not reused while it is mapped

    def attach(self, fd: int) -> Segment:
        """Return the segment behind a descriptor, and take over the descriptor."""
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


class CacheBusy(KitError):  # noqa: N818 - it is a state
    """The lock did not become free in time."""


class Cache:
    """`latest` was built last, `active` is the version that receivers run; both start as the base, -1.

    Both copies must fit into `SHARE` of the free memory. The memory of a discarded version is kept for the next build, which costs one
    model between syncs. `slots`: the number of buckets with memory; 0: all.
    """

    slots = 0

    def __init__(self, layout: Layout, *, timeout_s: float = 60.0) -> None:
        self.layout = layout
        self.latest = self.active = BASE
        self.timeout_s = timeout_s
        self._sizes = layout.sizes
        self.starts, self._size = starts(self._sizes, self.slots)  # of each bucket in a version's memory
        self._segments: dict[int, Segment] = {}  # by version, including one that is being built
        self._spare: list[Segment] = []
        self._lock = threading.RLock()
        self._holder: list[str] = []
        self._closed = False
        self._check_room()

    @property
    def blocks(self) -> int:
        return len(self._segments) + len(self._spare)

    @property
    def copies(self) -> int:
        """The number of copies of the model in memory, including kept memory."""
        return 0 if self.slots else self.blocks

    @property
    def nbytes(self) -> int:
        return self.blocks * self._size

    @contextlib.contextmanager
    def held(self, purpose: str, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the lock, so that no other thread can build, activate or close."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        if not self._lock.acquire(timeout=limit):
            holder = self._holder[-1] if self._holder else "a moment"
            raise CacheBusy(f"{purpose} waited {limit:g} s for the bucket cache, which is held for {holder}")
        self._holder.append(f"{purpose} ({threading.current_thread().name})")
        try:
            yield
        finally:
            self._holder.pop()
            self._lock.release()

    def build(
        self,
        version: int,
        tensors: Mapping[Key, torch.Tensor] | Bound,
        packed: Callable[[int], None] | None = None,
    ) -> None:
        """Pack a new version. Pass tensors that persist as `Bound`, so that they are looked up once. `packed` is called with the number of
        each bucket as soon as its bytes are in place, so that it can be sent. After an error the version does not exist, and `latest`
        is the active one."""
        with self.held(f"the build of version {version}"):
            self._refuse_closed()
            if version <= self.latest:
                raise BadInput(
                    f"version {version} cannot be built: version {self.latest} exists, and versions only grow from {BASE} on"
                )
            bound = tensors if isinstance(tensors, Bound) else Bound(self.layout, tensors)
            if bound.layout != self.layout:
                raise BadInput("the weights are bound to another layout than the cache's: bind them to `cache.layout`")
            self._refuse_emptied(bound.tensors)
            self._check_room()
            segment, fresh = self._free_segment()
            self._segments[version] = segment
            try:
                for index in range(len(self._sizes)):
                    bound.pack(index, self._bytes(segment, index), fresh=fresh, hot=self.slots > 0)
                    if packed is not None:
                        packed(index)
            except BaseException:
                self.latest = self.active
                self._segments.pop(version).close()
                raise
            self.latest = version

    def discard(self, version: int) -> None:
        """Drop a version that did not reach its receivers, built or not. The active version is kept."""
        with self.held(f"the end of version {version}"):
            if version == self.latest != self.active:
                self._give_up(version)
                self.latest = self.active

    def segment(self, version: int) -> Segment:
        """Return the memory of a version, even one that is being built; its descriptor can be sent."""
        if version not in self._segments:
            raise BadInput(f"no copy of version {version}: the cache has {sorted(self._segments) or 'none'}")
        return self._segments[version]

    def bucket(self, version: int, index: int) -> torch.Tensor:
        return self._bytes(self.segment(version), index)

    def activate(self, version: int) -> None:
        """Make this the version that receivers run. The memory of other versions, except the latest, is kept for the next build."""
        with self.held(f"the activation of version {version}"):
            self._refuse_closed()
            if version not in (self.latest, self.active):
                raise BadInput(
                    f"version {version} cannot be activated: the latest is {self.latest} and {self.active} is active"
                )
            self.active = version
            for old in [version for version in self._segments if version not in (self.latest, self.active)]:
                self._give_up(old)

    def close(self) -> None:
        """Free everything, once the lock is free. The cache cannot be used again."""
        with self.held("the close"):
            for segment in [*self._segments.values(), *self._spare]:
                segment.close()
            self._segments, self._spare = {}, []
            self._closed = True

    def _free_segment(self) -> tuple[Segment, bool]:
        """Return memory for the next version, and whether its pages still have to be allocated."""
        if self.latest != self.active:
            self._give_up(self.latest)
        while self._spare:
            segment = self._spare.pop()
            if not segment.adopted:
                return segment, False
            segment.close()  # whoever has weights in it keeps its pages
        return Segment(self._size, name="kit-buckets"), True

    def _bytes(self, segment: Segment, index: int) -> torch.Tensor:
        start = self.starts[index]
        return segment.tensor[start : start + self._sizes[index]]

    def _give_up(self, version: int) -> None:
        self._spare.append(self._segments.pop(version))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise BadInput("the bucket cache is closed")

    def _refuse_emptied(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        if empty := [name for (name, _), t in tensors.items() if t.numel() and not t.untyped_storage().nbytes()]:
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            raise BadInput(
                f"the storage of {', '.join(empty[:5])}{more} is empty: the weights were offloaded; build before that, or reload them"
            )

    def _check_room(self) -> None:
        """Raise `BadInput` if two copies, minus the memory allocated already, exceed `SHARE` of the free memory."""
        wanted, free = 2 * self._size - self.nbytes, free_memory()
        if wanted > SHARE * free:
            held = f", {_gib(self.nbytes)} of it allocated already" if self.nbytes else ""
            raise BadInput(
                f"two copies of {_gib(self._size)} do not fit: they need {_gib(2 * self._size)}{held}; {_gib(wanted)} exceeds "
                f"{_gib(SHARE * free)}, which is {SHARE:.0%} of the {_gib(free)} of free memory"
            )


class Ring(Cache):
    """Shared memory for a few buckets, through which versions stream without a copy. Use it if all receivers pause: the host holds no copy
    of the weights, and a packed bucket is still in the processor's cache when receivers on the same host copy it out. `latest` and
    `active` are versions that were sent; their bytes are gone. A build packs every bucket; `packed` returns when the place of the next
    one is free. Limits: a version is sent once, while it is built. Receivers that wake would need it later, serving ones all of it at once.
    """

    def __init__(self, layout: Layout, *, slots: int = SLOTS, timeout_s: float = 60.0) -> None:
        if slots < 1:
            raise BadInput(f"a ring of {slots} slots is too small: use at least 1")
        self.slots = slots
        super().__init__(layout, timeout_s=timeout_s)

    def _free_segment(self) -> tuple[Segment, bool]:
        for version in list(self._segments):
            self._give_up(version)
        self.latest = self.active
        segment, fresh = super()._free_segment()
        if fresh:
            segment.populate()
        return segment, False


def starts(sizes: Sequence[int], slots: int = 0) -> tuple[tuple[int, ...], int]:
    """Return the page-aligned start of each bucket and the total size: buckets lie one after another, or take turns in `slots` places."""
    if slots:
        room = -(-max(sizes, default=0) // _PAGE) * _PAGE
        return tuple(index % slots * room for index in range(len(sizes))), slots * room
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _PAGE) * _PAGE
    return tuple(starts), max(end, _PAGE)


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
