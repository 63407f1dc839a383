"""How long serving stops during a sync by the kit's service: rank 0 sends, rank 1 serves while weights arrive, rank 2 sleeps and wakes.

The replicas' own forwards say when none ran: their times are taken outside of the code that sends and receives. A replica stops for the
longest time between the end of a forward and the beginning of the next one; one that wakes, until its first forward. A pass that reads
every byte of the weights comes after each sync: pages that are not mapped yet cost their time there.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs.bench_sync.lab import HOST
from kit.labs.bench_sync.ranks.ways import TIMEOUT_S, host_copy, populated_tensors
from kit.machine import MIB
from kit.measure.host import huge_pages
from kit.measure.turns import seconds_of, turn_by_turn
from kit.sync.adopting import Adopting, let_go
from kit.sync.buckets import Weights, Whole, as_it_is, automatic, lay_out, specs_of
from kit.sync.cache import LARGEST, Cache, KeptMappings, Ring
from kit.sync.hashes import AUTO, digest
from kit.sync.link import Listener, address_of
from kit.sync.receiver import Receiver
from kit.sync.sender import Sender, Target
from kit.sync.serving import Serving
from kit.sync.transports import RankPlace


class Path(NamedTuple):
    """The sender's memory, the state of the receiver, and its rank."""

    memory: str
    state: Literal["serving", "paused", "asleep"]
    to: int


CACHE, RING, ADOPTED, ADOPTED_AGAIN = "cache", "ring", "adopted", "adopted again"
# Replicas that adopt hold memory of their sender, so each has one that nobody else uses.
PATHS = {
    "staged": Path(CACHE, "serving", 1),
    "adopted": Path(ADOPTED, "serving", 1),
    "paused": Path(CACHE, "paused", 1),
    "streamed": Path(RING, "paused", 1),
    "expansion": Path(CACHE, "asleep", 2),
    "adopted expansion": Path(ADOPTED_AGAIN, "asleep", 2),
}
SERVES = 1
WORK = 192  # rows of a forward's matrices: some hundred microseconds
SETTLE_S = 0.05  # forwards run for this long before and after a sync
ALGORITHM = "sha256"
NO_PLACE = RankPlace("here", 0)


class Stall(NamedTuple):
    """Seconds of a sync, seconds without a forward, the forwards served meanwhile, and seconds of the first pass over the weights."""

    total: float
    paused: float
    served: int
    read: float


class Replica:
    """The host of a receiver: weights, a thread with forwards, and the times of these."""

    def __init__(self, rank: int, wanted: dict[str, Any], address: dict[str, Any], *, adopts: bool) -> None:
        self.tensors = populated_tensors(wanted, filled=False)
        self.adopts = adopts
        self.sizes = [tensor.untyped_storage().nbytes() for tensor in self.tensors.values()]
        self.spans: list[tuple[float, float]] = []
        self.matrix = torch.ones(WORK, WORK)
        self.serving = Serving(self.forward, timeout_s=TIMEOUT_S)
        self.kept = {memory: KeptMappings() for memory in (CACHE, RING)}
        self.receiver = Receiver(
            f"rank {rank}",
            self.weights,
            self,
            address=address,
            device=torch.device("cpu"),
            timeout_s=TIMEOUT_S,
            adopts=adopts,
        )

    def weights(self) -> Weights:
        if not self.adopts:
            return Whole(self.tensors)
        places = {name: [(tensor, as_it_is)] for (name, _), tensor in self.tensors.items()}
        return Adopting(places, [*self.tensors.values()])

    def read(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(-1).view(torch.int64).sum()

    def forward(self) -> torch.Tensor:
        began = time.time()
        made = self.matrix @ self.matrix
        self.spans.append((began, time.time()))
        return made[:1]

    def wake(self) -> None:
        for tensor, size in zip(self.tensors.values(), self.sizes, strict=True):
            tensor.untyped_storage().resize_(size)
            huge_pages(tensor.data_ptr(), size)

    def sleep(self) -> None:
        let_go([*self.tensors.values()])
        for tensor in self.tensors.values():
            tensor.untyped_storage().resize_(0)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return self.serving.writing()

    def finalize(self) -> None:
        """Nothing is derived from the weights."""

    def digests(self, algorithm: str) -> dict[str, str]:
        return {name: digest(tensor, algorithm) for (name, _), tensor in self.tensors.items()}


class Ends:
    """A rank's part in syncs by all paths."""

    def __init__(self, wanted: dict[str, Any], meeting: str) -> None:
        self.rank = dist.get_rank()
        self.tensors = populated_tensors(wanted, filled=True) if self.rank == 0 else {}
        self.scope = contextlib.ExitStack()
        self.listener = self.scope.enter_context(Listener(name=meeting)) if self.rank == 0 else None
        dist.barrier()
        self.replicas = {
            adopts: Replica(self.rank, wanted, address_of(meeting), adopts=adopts)
            for adopts in (False, True)
            if self.rank
        }
        size = sum(tensor.nbytes for tensor in populated_tensors(wanted, filled=False).values())
        self.memcpy = host_copy(size) if self.rank == SERVES else lambda: None
        self.senders: dict[str, Sender] = {}
        if self.listener is not None:
            specs = specs_of(self.tensors)
            size = automatic(specs, oversize="split")
            for memory in (CACHE, ADOPTED, ADOPTED_AGAIN):
                self.senders[memory] = self.sender(Cache(lay_out(specs, size, oversize="split")), self.listener)
            ring = Ring(lay_out(specs, min(LARGEST, size), oversize="split"))
            self.senders[RING] = self.sender(ring, self.listener)

    def sender(self, cache: Cache, listener: Listener) -> Sender:
        self.scope.callback(cache.close)
        return Sender(
            cache,
            listener,
            place=NO_PLACE,
            rank=0,
            device=torch.device("cpu"),
            transport="shm",
            verify=AUTO,
            timeout_s=TIMEOUT_S,
        )

    def sync(self, path: str, turn: int) -> Stall:
        """One sync, with forwards before and after it."""
        memory, state, to = PATHS[path]
        replica = self.replicas.get(memory in (ADOPTED, ADOPTED_AGAIN))
        asleep = replica is not None and state == "asleep" and self.rank == to
        if replica is not None:
            replica.spans = []
            replica.receiver.kept = replica.kept.get(memory)
            if asleep:
                replica.sleep()
            elif self.rank == SERVES:
                replica.serving.start()
                replica.serving.next()
        if self.rank == 0 and state == "asleep":
            self.senders[memory].build(self.senders[memory].cache.latest + 1, self.tensors)
        time.sleep(SETTLE_S)
        dist.barrier()
        began = time.time()
        if self.rank == 0:
            sender = self.senders[memory]
            version = sender.version if state == "asleep" else sender.cache.latest + 1
            target = Target(name=f"rank {to}", rank=to, place=NO_PLACE, state=state)
            sender.sync(version, [target], None if state == "asleep" else lambda: self.tensors)
        elif replica is not None and self.rank == to:
            replica.receiver.join()
            if asleep:
                replica.serving.start()
        if replica is not None and self.rank == to:
            replica.serving.next()
        ended = time.time()
        dist.barrier()
        time.sleep(SETTLE_S)
        if replica is not None:
            replica.serving.stop()
        dist.barrier()
        read = seconds_of(replica.read) if replica is not None and self.rank == to else 0.0
        return self.together(replica, path, turn, (began, ended, read))

    def together(self, replica: Replica | None, path: str, turn: int, times: tuple[float, float, float]) -> Stall:
        """What the ranks saw, as one answer on every rank. In the first turn all bytes are compared."""
        to = PATHS[path].to
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (*times, replica.spans if replica else []))
        if turn < 0:
            self.compare(replica, path, to)
        began, ended, read = found[0][0], found[to][1], found[to][2]
        own, served = found[to][3], found[SERVES][3]
        paused = longest_gap(own, began, ended) if to == SERVES else max(0.0, min(start for start, _ in own) - began)
        return Stall(ended - began, paused, sum(began <= end <= ended for _, end in served), read)

    def compare(self, replica: Replica | None, path: str, to: int) -> None:
        mine = replica.tensors if replica else self.tensors
        tables: list[Any] = [None] * dist.get_world_size()
        own = [digest(tensor, ALGORITHM) for tensor in mine.values()] if self.rank in (0, to) else []
        dist.all_gather_object(tables, own)
        if tables[0] != tables[to]:
            raise KitError(f"a sync ({path}) did not bring what was sent")
        if replica is not None and self.rank == to:  # another path must bring everything again
            for tensor in replica.tensors.values():
                tensor.zero_()

    def close(self) -> None:
        for replica in self.replicas.values():
            for kept in replica.kept.values():
                kept.close()
        self.scope.close()


def longest_gap(spans: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """The longest time without a forward, of those that reach into the sync."""
    pairs = itertools.pairwise(spans)
    return max((after - end for (_, end), (after, _) in pairs if after > began and end < ended), default=ended - began)


def stalls(*, mib: int, each_mib: int, meeting: str, rounds: int) -> dict[str, list[Any]]:
    """Every path, turn by turn, and the seconds of one memcpy of the same bytes."""
    ends = Ends({"size": each_mib * MIB, "count": mib // each_mib}, meeting)
    made: dict[str, list[Any]] = {path: [] for path in PATHS}

    def turn_of(path: str, turn: int) -> float:
        if path == HOST:
            dist.barrier()
            return seconds_of(ends.memcpy)
        stall = ends.sync(path, turn)
        if turn >= 0:
            made[path].append(stall)
        return stall.total

    try:
        made[HOST] = turn_by_turn([*PATHS, HOST], rounds, turn_of)[HOST]
    finally:
        ends.close()
    return made
