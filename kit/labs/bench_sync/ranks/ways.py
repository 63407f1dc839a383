"""What the ranks of the bench of weight transfer do: rank 0 sends, the next ones receive, the others look on, so that groups are real
parts.

What is compared brings the same weights to the same receivers and takes turns within one loop; in a turn before those it is seen that
every byte arrived. A time goes from when all are ready until the last receiver has applied everything; the making of the transport is
in it, its end is not. Pages, plans of copies and mappings stay from turn to turn, as they do from step to step.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs.bench_sync.lab import BACK, FILES, HOST, OUT, PEER, WITHIN, place_for
from kit.machine import MIB
from kit.measure import host
from kit.measure.phase import seconds_on_device
from kit.measure.turns import seconds_of, turn_by_turn
from kit.megatron.config import GEOMETRIES
from kit.sync.buckets import Bound, Layout, automatic, lay_out, live, specs_of
from kit.sync.cache import LARGEST, SLOTS, Cache, KeptMappings, Segment, starts
from kit.sync.hashes import NONE, Digests, algorithms, digest
from kit.sync.link import Link, Listener, address_of, call
from kit.sync.transports import Transport, TransportContext, make
from kit.target import load, shipped
from kit.train.plain import PlainModel

Tensors = Mapping[tuple[str, int], torch.Tensor]
Work = Callable[[], object]
PAGE = 4096
NOISE = 8 * MIB
TIMEOUT_S = 120.0
SENDER = "the sender"
EXTRAS = ("cache", "expand", "whole", "fresh", "one")
SEGMENT = "segment"
# From which shared memory is sent: a cache that gets each version, one that has it, one segment.
MEMORIES = ("cache", "expand", SEGMENT)
COPYING = ("memcpy", "copies")  # they bring nothing


def shapes_of(wanted: dict[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of a model's parameters, or of `count` tensors of `each` bytes; bfloat16."""
    if "model" in wanted:
        return [tuple(weight.shape) for weight in PlainModel(GEOMETRIES[wanted["model"]], device="meta").parameters()]
    return [(wanted["size"] // 2,)] * wanted["count"]


def populated_tensors(wanted: dict[str, Any], *, filled: bool) -> dict[tuple[str, int], torch.Tensor]:
    """Tensors with memory of their own and all pages populated: noise, or zeros."""
    noise = torch.randint(0, 256, (NOISE + PAGE,), dtype=torch.uint8)
    made: dict[tuple[str, int], torch.Tensor] = {}
    for number, shape in enumerate(shapes_of(wanted)):
        made[f"weight{number}", 0] = tensor = torch.empty(shape, dtype=torch.bfloat16)
        flat = tensor.view(-1).view(torch.uint8).zero_()
        for part in flat.split(NOISE) if filled else ():  # type: ignore[no-untyped-call]
            part.copy_(noise[number % PAGE :][: part.numel()])
    return made


class Laid(NamedTuple):
    """The tensors in buckets of one size, with what is worked out once: bytes of the pieces of buckets, and plans of copies."""

    layout: Layout
    pieces: list[list[int]]
    bound: Bound


class Ways:
    """A rank's part in all ways: the weights, a link to the other end, and one segment into which every layout packs."""

    def __init__(self, wanted: dict[str, Any], receivers: int, meeting: str) -> None:
        self.rank = dist.get_rank()
        self.part = tuple(range(receivers + 1))
        self.taking_part = self.part  # the ranks that take part in the current way
        self.tensors = populated_tensors(wanted, filled=self.rank == 0) if self.taking else {}
        self.total = sum(tensor.nbytes for tensor in self.tensors.values())
        self.all_links = self.links = self.meet(meeting)
        self.opened: list[Transport | Digests] = []
        # Apart for each memory, so that mappings of one do not displace those of another.
        self.kept = {memory: KeptMappings() for memory in MEMORIES}
        self.segment: Segment | None = None
        self.cache: Cache | None = None
        self.kept_version: Cache | None = None
        self._laid: dict[int, Laid] = {}
        self._room = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.Tensor | None = None

    @property
    def taking(self) -> bool:
        return self.rank in self.taking_part

    def begin(self, name: str) -> None:
        """Restrict a way to the first receiver if its name says so."""
        self.taking_part = self.part[:2] if "one" in name.split("+") else self.part
        self.links = dict(itertools.islice(self.all_links.items(), len(self.taking_part) - 1))

    def meet(self, meeting: str) -> dict[str, Link]:
        names = [f"receiver {rank}" for rank in self.part[1:]]
        if self.rank == 0:
            with Listener(name=meeting) as listener:
                dist.barrier()
                return listener.accept(names, TIMEOUT_S)
        dist.barrier()
        if not self.taking:
            return {}
        return {SENDER: call(address_of(meeting), names[self.rank - 1], peer=SENDER, timeout_s=TIMEOUT_S)}

    def laid(self, size: int) -> Laid:
        """Buckets of this size, 0 for the automatic one: laid out once."""
        if size not in self._laid:
            specs = specs_of(self.tensors)
            layout = lay_out(specs, size or automatic(specs, oversize="split"), oversize="split")
            pieces = [[piece.size for piece in bucket] for bucket in layout.buckets]
            self._laid[size] = Laid(layout, pieces, Bound(layout, self.tensors))
        return self._laid[size]

    # -- ways --------------------------------------------------------------------------------------------------------------

    def way(self, name: str) -> Callable[[], None]:
        """`memcpy`, `copies`, `file:NAME`, or `TRANSPORT[+cache][+expand][+whole][+fresh][+one][+ALGORITHM][@MIB]`. `shm` goes
        through a ring, as for receivers that pause, but for `cache`, `expand`, whose cache has the version already, and `whole`, which
        is one segment with room for all. `one`: to the first receiver only."""
        plain = {"memcpy": self.memcpy, "copies": self.copies}
        if name in plain:
            return plain[name]
        if name.startswith("file:"):
            sys.path.append(str(shipped("docs").parent))  # an installed kit has its examples elsewhere
            return partial(bring, load(FILES[name]), self.tensors, self.links, sends=self.rank == 0)
        rest, _, mib = name.partition("@")
        kind, *extras = rest.split("+")
        algorithm = next((extra for extra in extras if extra not in EXTRAS), NONE)
        size = int(float(mib or 0) * MIB)
        slots = SLOTS if kind == "shm" and not {"cache", "expand", "whole"} & set(extras) else 0
        if slots and not size:
            size = min(LARGEST, self.laid(0).layout.bucket_bytes) if self.taking else 0
        if self.rank == 0:
            if "cache" in extras:
                return lambda: self.send_cached(kind, size, algorithm)
            if "expand" in extras:
                return lambda: self.send_again(kind, size, algorithm)
            return lambda: self.send_bound(kind, size, algorithm, slots=slots)
        memory = next(memory for memory in MEMORIES if memory in [*extras, SEGMENT])
        kept = None if "fresh" in extras else self.kept[memory]
        return lambda: self.receive(kind, size, algorithm, slots=slots, kept=kept)

    def memcpy(self) -> None:
        """One copy of all bytes at once, on the sender: what the machine could do at best."""
        if self.rank == 0:
            self.copy()

    def copies(self) -> None:
        """One such copy on each end at the same time: the least for bytes that one end packs while the other applies them."""
        self.copy()
        self.exchange({"kind": "copied"}, "copied")

    def exchange(self, message: dict[str, Any], answer: str) -> None:
        """Send to every other end, then wait for each of them."""
        for link in self.links.values():
            link.send(message)
        for link in self.links.values():
            link.expect(answer)

    def copy(self) -> None:
        if self._copied is None:
            self._copied = torch.zeros(self.total, dtype=torch.uint8)
        copy(self._copied, self.memory(self.total).tensor[: self.total])

    def memory(self, size: int) -> Segment:
        if self.segment is None or self.segment.size < size:
            if self.segment is not None:
                self.segment.close()
            self.segment = Segment(size + size // 8 + 64 * MIB, name="kit-bench")
            self.segment.populate()
        return self.segment

    def send_bound(self, kind: str, size: int, algorithm: str, *, slots: int = 0) -> None:
        """Tensors that stay where they are: looked up and checked once."""
        layout, _, bound = self.laid(size)
        places, room = starts(layout.sizes, slots)
        segment = self.memory(room)
        transport, digests = self.open(kind, size, algorithm, segment=segment, places=places)
        for index, (start, count) in enumerate(zip(places, layout.sizes, strict=True)):
            if slots:
                transport.ahead(index, slots)
            out = segment.tensor[start : start + count]
            bound.pack(index, out, hot=slots > 0)
            if digests:
                digests.add(index, live(layout, index, self.tensors))
            transport.send(index, out)
        self.finish(transport, digests)

    def send_cached(self, kind: str, size: int, algorithm: str) -> None:
        """Through the cache, which takes the tensors for new ones in every version."""
        layout = self.laid(size).layout
        if self.cache is None or self.cache.layout != layout:
            self.cache = Cache(layout)
        cache, version = self.cache, self.cache.latest + 1
        opened: list[tuple[Transport, Digests | None]] = []

        def packed(index: int) -> None:
            if not opened:
                opened.append(self.open(kind, size, algorithm, segment=cache.segment(version), places=cache.starts))
            transport, digests = opened[0]
            out = cache.bucket(version, index)
            if digests:
                digests.add_packed(index, out)
            transport.send(index, out)

        cache.build(version, self.tensors, packed=packed)
        self.finish(*opened[0])

    def send_again(self, kind: str, size: int, algorithm: str) -> None:
        """The version that is in the cache, as to a replica that wakes."""
        layout = self.laid(size).layout
        if self.kept_version is None:
            self.kept_version = Cache(layout)
            self.kept_version.build(0, self.tensors)
        cache = self.kept_version
        transport, digests = self.open(kind, size, algorithm, segment=cache.segment(0), places=cache.starts)
        for index in range(len(layout.buckets)):
            transport.send(index, cache.bucket(0, index))
        self.finish(transport, digests)

    def finish(self, transport: Transport, digests: Digests | None) -> None:
        transport.flush()
        if digests:
            self.exchange({"kind": "digests", "table": digests.table()}, "same")

    def receive(self, kind: str, size: int, algorithm: str, *, slots: int, kept: KeptMappings | None) -> None:
        layout, _, bound = self.laid(size)
        if self._room.numel() < max(layout.sizes):
            self._room = torch.zeros(max(layout.sizes), dtype=torch.uint8)
        places = starts(layout.sizes, slots)[0]
        transport, digests = self.open(kind, size, algorithm, segment=None, places=places, kept=kept)
        for index, count in enumerate(layout.sizes):
            buffer = transport.receive(index, self._room[:count])
            if digests:
                digests.add_packed(index, buffer)
            bound.apply(index, buffer)
            if digests and (slots or buffer.data_ptr() == self._room.data_ptr()):
                digests.wait(index)  # another bucket comes to the same place
            transport.done(index)
        if digests:
            sent, _ = self.links[SENDER].expect("digests")
            if digests.differences(layout, sent["table"]):
                raise KitError(f"{kind} brought other bytes than were sent")
            self.links[SENDER].send({"kind": "same"})

    def open(
        self,
        kind: str,
        size: int,
        algorithm: str,
        *,
        segment: Segment | None,
        places: Sequence[int],
        kept: KeptMappings | None = None,
    ) -> tuple[Transport, Digests | None]:
        layout, pieces, _ = self.laid(size)
        digests = None if algorithm == NONE else Digests(layout, 0, algorithm=algorithm)
        context = TransportContext(
            role="receiver" if self.rank else "sender",
            name=f"rank {self.rank}",
            links=self.links,
            sizes=layout.sizes,
            starts=places,
            segment=segment,
            device=torch.device("cpu"),
            timeout_s=TIMEOUT_S,
            ranks=self.part,
            place=self.rank,
            pieces=pieces,
            kept=kept,
        )
        transport = make(kind, context)
        self.opened += [transport] if digests is None else [transport, digests]
        return transport, digests

    # -- around them -------------------------------------------------------------------------------------------------------

    def close_opened(self) -> None:
        while self.opened:
            self.opened.pop(0).close()

    def close(self) -> None:
        self.close_opened()
        for holder in (*self.kept.values(), self.segment, self.cache, self.kept_version, *self.all_links.values()):
            if holder is not None:
                holder.close()

    def content(self) -> str:
        """A digest of all weights."""
        text = str([digest(tensor, algorithms()[0]) for tensor in self.tensors.values()])
        return digest(torch.tensor(list(text.encode()), dtype=torch.uint8), "sha256")


def transfer_seconds(
    *, shape: dict[str, Any], receivers: int, meeting: str, ways: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Seconds of each way, turn by turn, as the sender saw them."""
    end = Ways(shape, receivers, meeting)
    works = {name: end.way(name) for name in ways}
    try:
        seconds = turn_by_turn(ways, rounds, lambda name, turn: one_turn(end, name, works[name], first=turn < 0))
    finally:
        end.close()
    automatic = end.laid(0).layout.bucket_bytes if end.rank in end.part else 0
    return {"bytes": end.total, "automatic": automatic, "seconds": seconds}


def seconds_by_shape(
    *, shapes: Sequence[dict[str, Any]], meeting: str, ways: Sequence[str], rounds: int
) -> list[dict[str, list[float]]]:
    """The same to one receiver for each of several shapes, all in one loop."""
    ends = [Ways(shape, 1, f"{meeting}-{number}") for number, shape in enumerate(shapes)]
    works = {(at, name): end.way(name) for at, end in enumerate(ends) for name in ways}
    try:
        seconds = turn_by_turn(
            [*works], rounds, lambda key, turn: one_turn(ends[key[0]], key[1], works[key], first=turn < 0)
        )
    finally:
        for end in ends:
            end.close()
    return [{name: seconds[at, name] for name in ways} for at in range(len(ends))]


def seconds_together(end: Ways, work: Callable[[], None]) -> float:
    """The time of this rank's part in a transfer that all begin together, and the end of what it opened."""
    dist.barrier()
    taken = seconds_of(work)
    if end.rank == 0:  # the sender's end is the first to close
        end.close_opened()
    dist.barrier()
    end.close_opened()
    return taken


def one_turn(end: Ways, name: str, work: Callable[[], None], *, first: bool) -> float:
    end.begin(name)
    if first:
        for tensor in end.tensors.values() if end.rank else ():  # what was received is forgotten
            tensor.zero_()
    taken = seconds_together(end, work if end.taking else lambda: None)
    if first and name not in COPYING:
        contents: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(contents, end.content())
        if len({contents[rank] for rank in end.taking_part}) > 1:
            raise KitError(f"{name} did not bring what was sent")
    return taken


def hash_seconds(*, size: int, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per 10^9 bytes of every algorithm, on the first rank."""
    if dist.get_rank():
        return {}
    tensors = populated_tensors({"size": size, "count": count}, filled=True).values()
    scale = 1e9 / sum(tensor.nbytes for tensor in tensors)

    def taken(algorithm: str, _: int) -> float:
        return scale * seconds_of(lambda: [digest(tensor, algorithm) for tensor in tensors])

    return turn_by_turn(algorithms(), rounds, taken)


# -- through files: written whole by the sender, read and copied by receivers -------------------------------------------


def bring(files: Any, tensors: Tensors, links: Mapping[str, Link], *, sends: bool) -> None:
    """One sync: the sender's file lives until every receiver has read it."""
    named = {name: tensor for (name, _), tensor in tensors.items()}
    if not sends:
        (link,) = links.values()
        files.read(Path(link.expect("written")[0]["folder"]), named)
        link.send({"kind": "read"})
        return
    with tempfile.TemporaryDirectory(
        prefix="kit-bench-", dir=place_for(sum(tensor.nbytes for tensor in named.values()))
    ) as folder:
        files.write(Path(folder), named)
        for link in links.values():
            link.send({"kind": "written", "folder": folder})
        for link in links.values():
            link.expect("read")


# -- plain copies, which are the best that GPUs and the links between them can do -----------------------------------------


def host_copy(size: int) -> Work:
    """One copy between two places of host memory that both have pages: of zeros the kernel would keep one page for all."""
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return lambda: copy(target, source)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """The one copy by which the host is measured: all bytes at once, by the C library."""
    host.libc.memcpy(target.data_ptr(), source.data_ptr(), source.nbytes)


def gpu_copies(device: torch.device, size: int) -> dict[str, Work]:
    """By name, each to be awaited by synchronising the device; `size` bytes a block, of which there are two and one a peer."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    works: dict[str, Work] = {
        WITHIN: partial(target.copy_, source, non_blocking=True),
        OUT: partial(pinned.copy_, source, non_blocking=True),
        BACK: partial(source.copy_, pinned, non_blocking=True),
    }
    for number in range(torch.cuda.device_count()):
        if number != device.index and torch.cuda.can_device_access_peer(device, number):
            peer = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", number))
            works[f"{PEER} {number}"] = partial(peer.copy_, source, non_blocking=True)
            break  # one stands for the others: weights go to one receiver at a time
    return works


def ceiling_copies(*, size: int, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds for `size` bytes of each plain copy that this machine can do, turn by turn, each until the GPU is done; a copy to
    another GPU is this one's work."""
    where = torch.device(device)
    works = {HOST: host_copy(size)}
    if where.type == "cuda":
        works |= gpu_copies(where, size)
    return turn_by_turn(list(works), rounds, lambda name, _: seconds_on_device(works[name]))
