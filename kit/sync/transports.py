"""Transports, which move packed buckets from a sender to its receivers, by name. Messages and acknowledgements use links.

The sender sends one bucket after another and keeps its bytes until every receiver is done with them. A receiver gets each bucket, applies
or stores it, and acknowledges it. The sender is at most `DEPTH` buckets ahead of the slowest receiver, so that packing, sending and
applying overlap and no link fills up.

`Shm`: receivers map the memory that the sender packs into, so nothing is copied on the way or when a receiver stores a bucket. A new
mapping of small pages costs about as much as a copy of its bytes, so a receiver may keep its mappings from sync to sync.

`Serialize`: for receivers that share neither a group nor memory with the sender.

`Ipc`: staging buffers on the sender's GPU; their CUDA handles are sent over the links once. Live weights on that GPU are packed into a
buffer directly, a bucket of the cache is copied from the host. Limits: this has never run on a GPU. Where PyTorch's allocator uses
expandable segments, receivers need permission to take a descriptor from the sender's process, which containers often withhold:
transport=auto does not choose `ipc` then.

Transports with a process group are in kit/sync/groups.py.
"""

from __future__ import annotations

import abc
import base64
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch

from kit.errors import BadInput, KitError
from kit.measure.host import map_pages
from kit.sync.cache import KeptMappings, Segment
from kit.sync.link import FAILED, Link, PeerFailed, PeerGone, PeerSilent, ready
from kit.target import is_target, load

DEPTH = 3
GRACE_S = 0.3  # within this time the link shows that a peer has died


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportContext:
    """`ctx` for a transport: the role of this end and its links. A receiver has one link, to its sender."""

    role: Literal["sender", "receiver"]
    name: str
    links: dict[str, Link]
    sizes: Sequence[int]  # bytes of each bucket
    device: torch.device
    timeout_s: float
    starts: Sequence[int] = ()  # where each bucket begins in the sender's memory
    segment: Segment | None = None  # the sender's: all buckets lie in it
    ranks: tuple[int, ...] = ()  # global ranks, the sender's first, if both ends share a World
    place: int = 0  # the position of this rank in `ranks`
    pieces: Sequence[Sequence[int]] = ()  # bytes of each tensor of each bucket, in order
    pack: Callable[[int, torch.Tensor], None] | None = None  # the sender's: packs a bucket of live weights on their GPU
    kept: KeptMappings | None = None  # a receiver's: mappings kept between syncs
    adopts: bool = False  # whether a receiver's weights will lie in the sender's memory
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def sender(self) -> Link:
        (link,) = self.links.values()
        return link


class Transport(abc.ABC):
    """One end of a transport. The sender closes first; closing twice does nothing.

    `on_device`: bytes arrive on the receiver's device, so buckets should be received there.
    """

    on_device = False

    def __init__(self, ctx: TransportContext) -> None:
        self.ctx = ctx
        self._acknowledged = dict.fromkeys(ctx.links, -1)
        self._reached = dict.fromkeys(ctx.links, -1)  # the last bucket that it waits for, or is done with

    # -- the sender ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def send(self, index: int, buffer: torch.Tensor) -> None:
        """Send bucket `index`. Its bytes are on the host and do not change until every receiver is done with it."""

    def flush(self) -> None:
        self.wait_for(len(self.ctx.sizes) - 1)

    def ahead(self, index: int, depth: int = DEPTH) -> None:
        """Wait until bucket `index` is not too far ahead of the slowest receiver."""
        self.wait_for(index - depth)

    def wait_for(self, index: int) -> None:
        """Wait until every receiver is done with this bucket. A failure is noticed even while another receiver is slow."""
        links = self.ctx.links
        while late := [name for name in links if self._acknowledged[name] < index]:
            there = ready([links[name] for name in late], self.ctx.timeout_s)
            if not there:
                raise PeerSilent(", ".join(links[name].peer for name in late), "done", self.ctx.timeout_s)
            for name in [name for name in late if links[name] in there]:
                try:
                    self._hear(name)
                except PeerFailed as error:
                    gone = self.trouble(f"done with bucket {index}", 0.0, but=name)
                    raise (gone if isinstance(gone, PeerGone) else error) from None

    # -- a receiver ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        """Return the bytes of bucket `index`: in `into`, which has exactly their size, or where they already are. Those are valid until
        `close`, or with a ring until `done`."""

    def done(self, index: int) -> None:
        self.say({"kind": "done", "bucket": index})

    # -- both ------------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """Release groups, segments and memory, without waiting for the other ends."""

    def collect(self) -> None:  # noqa: B027 - most have nothing to collect
        """On the sender, once every receiver has closed: release what they had kept alive."""

    def say(self, message: dict[str, Any], fds: list[int] | None = None, data: memoryview | None = None) -> None:
        """Send to every other end in turn. If one is gone, raise the reason that it sent before it left."""
        for link in self.ctx.links.values():
            try:
                link.send(message, fds)
                if data is not None:
                    link.send_bytes(data)
            except PeerGone as error:
                raise (self.trouble(f"room for {message['kind']}", 0.0) or error) from None

    def trouble(self, awaited: str, seconds: float = GRACE_S, but: str = "") -> KitError | None:
        """Return the failure that the links report within `seconds`, not counting peer `but`. Peers that are gone come first, because
        others fail as a consequence; a peer that sent its reason and then left counts as failed."""
        end = time.monotonic() + seconds
        gone: list[KitError] = []
        failed: list[KitError] = []
        over = {but}
        while True:
            for name in [name for name in self.ctx.links if name not in over]:
                link = self.ctx.links[name]
                try:
                    while link.waits():
                        self._hear(name)
                except PeerGone:
                    over.add(name)
                    if self._acknowledged[name] < len(self.ctx.sizes) - 1:  # otherwise it has all buckets and may leave
                        gone.append(PeerGone(link.peer, awaited))
                except PeerFailed as error:
                    over.add(name)
                    failed.append(error)
            if gone or time.monotonic() >= end:
                return next(iter(gone + failed), None)
            time.sleep(0.005)

    def absent(self, index: int) -> list[str]:
        """Return the receivers that have not announced that they wait for this bucket."""
        return [self.ctx.links[name].peer for name, last in self._reached.items() if last < index]

    def _hear(self, name: str) -> None:
        link = self.ctx.links[name]
        message = link.message("done")
        kind, bucket = message.get("kind"), int(message.get("bucket", -1))
        if kind == "done":
            self._acknowledged[name] = bucket
        elif self.ctx.role == "receiver" and kind != FAILED:
            self.skip(message)
            return
        elif kind != "here":
            raise PeerFailed(link.peer, "done", message)
        self._reached[name] = bucket

    def skip(self, message: dict[str, Any]) -> None:  # noqa: B027 - most transports have nothing to do
        """Drop a message that the sender sent before it left, with the bytes that follow it."""


def received(transport: Transport, index: int, into: torch.Tensor) -> torch.Tensor:
    """Receive a bucket and check that the transport returned exactly its bytes."""
    got: object = transport.receive(index, into)
    if not isinstance(got, torch.Tensor) or got.dtype != torch.uint8 or got.shape != into.shape:
        kind = f"{got.dtype} of {list(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__
        raise KitError(f"receive returned {kind} for bucket {index} instead of torch.uint8 of [{len(into)}]")
    return got


Make = Callable[[TransportContext], Transport]


# -- the choice of a transport -----------------------------------------------------------------------------------------

NAMES = {
    "shm": "kit.sync.transports:Shm",
    "broadcast": "kit.sync.groups:Broadcast",
    "rendezvous": "kit.sync.groups:Rendezvous",
    "serialize": "kit.sync.transports:Serialize",
    "ipc": "kit.sync.transports:Ipc",
    "per-tensor": "kit.sync.groups:PerTensor",
}
CALLS = ("send", "flush", "receive", "done", "close")


class RankPlace(NamedTuple):
    """The location of a rank. `gpu` identifies its GPU on the host, as a UUID does; empty without one."""

    host: str
    world: int | str
    gpu: str = ""


def best_transport(sender: RankPlace, receiver: RankPlace, *, fds: bool = True) -> str:
    """Return the best transport between two ranks; `fds` says whether their link carries descriptors, which `shm` needs. `serialize` and
    `per-tensor` are used on request only: `serialize` if the ends cannot share a group (different builds of torch, only one open port),
    `per-tensor` for comparison."""
    if sender.host == receiver.host:
        return "ipc" if sender.gpu and sender.gpu == receiver.gpu else "shm" if fds else "rendezvous"
    return "broadcast" if sender.world == receiver.world else "rendezvous"


def by_name(name: str) -> Make:
    """Return the transport with this name, or your own at `module:attr`. It is called with a context on each end."""
    target = NAMES.get(name, name)
    if not is_target(target):
        raise BadInput(f"unknown transport {name!r}: use {', '.join(NAMES)} or module:attr")
    try:
        made = load(target)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"transport {name} cannot be loaded on this rank: {error}") from error
    if not callable(made):
        raise BadInput(f"transport {name} is {made!r}, which cannot be called with a TransportContext")
    return cast("Make", made)


def make(kind: str | Make, ctx: TransportContext, *, ring: bool = False) -> Transport:
    """Make this end of a transport, given by name or as a callable. With a ring the sender also needs `ahead`. A version without buckets,
    in which nothing changed, needs no transport: `serialize` sends nothing."""
    if not ctx.sizes:
        return Serialize(ctx)
    made = (by_name(kind) if isinstance(kind, str) else kind)(ctx)
    if lacks := [name for name in (*CALLS, *["ahead"] * ring) if not callable(getattr(made, name, None))]:
        why = ", which a ring needs" if lacks == ["ahead"] else ""
        raise BadInput(f"transport {kind}: the object it returned lacks {', '.join(lacks)}{why}")
    return made


# -- transports without a process group --------------------------------------------------------------------------------

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
    """Views of the sender's segment, which the caller owns. Its descriptor is sent over the links once."""

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
        bucket = self.segment.tensor[start : start + self.ctx.sizes[index]]
        if self.ctx.adopts:
            map_pages(bucket.data_ptr(), bucket.numel())  # here, where serving goes on
        return bucket

    def close(self) -> None:
        if self.segment is not None and (self.ctx.kept is None or self.ctx.adopts):
            self.segment.close()
        self.segment = None


def attach(ctx: TransportContext) -> Segment:
    _, fds = ctx.sender.expect("segment")
    try:
        (fd,) = fds
        attach_to = Segment.adopt if ctx.adopts else Segment.attach if ctx.kept is None else ctx.kept.attach
        segment = attach_to(fd)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    needed = max((start + size for start, size in zip(ctx.starts, ctx.sizes, strict=True)), default=0)
    if segment.size < needed:
        if ctx.kept is None or ctx.adopts:
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
    """A ring of `DEPTH` buffers on the GPU, reused when every receiver is done with them."""

    on_device = True

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        self.slots: list[torch.Tensor] = []
        if ctx.device.type != "cuda" or not torch.cuda.is_available():
            raise BadInput(f"ipc shares GPU memory, but {ctx.name} is on {ctx.device.type}: use shm")
        if ctx.role == "receiver":
            message, _ = ctx.sender.expect("handles")
            self.slots = [opened_block(handle) for handle in message["slots"]]
            return
        self.collect()  # what the receivers of a failed sync had kept alive
        largest = max([1, *ctx.sizes])
        self.slots = [torch.empty(largest, dtype=torch.uint8, device=ctx.device) for _ in range(DEPTH)]
        for link in ctx.links.values():  # one handle per receiver, because each counts as one use
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
        self.slots = []
        self.collect()

    def collect(self) -> None:
        # torch keeps a block that was sent alive until no receiver has it open, and looks for such blocks only here.
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def needs_permission() -> bool:
    """Whether this process shares GPU memory by descriptors, which receivers may not be allowed to take (see PIDFD)."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in setting.replace(" ", "").lower() for setting in settings)


def handle_of(slot: torch.Tensor) -> list[Any]:
    shared: tuple[Any, ...] = slot.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return [{"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in shared]


def opened_block(handle: list[Any]) -> torch.Tensor:
    parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in handle]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
    except RuntimeError as error:
        words = " ".join(str(error).partition("\n")[0].split())
        # torch's CUDACachingAllocator.cpp (ExpandableSegment::fromShared), 2.9 to 2.13: "pidfd_open:..." and "pidfd_getfd: ..."
        why = f": {PIDFD}" if "pidfd" in words else ""
        raise KitError(f"the sender's GPU memory cannot be opened here ({words}){why}") from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
