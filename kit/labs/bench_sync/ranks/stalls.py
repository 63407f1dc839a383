"""How long serving stops during a sync by the kit's service: rank 0 sends, rank 1 serves while weights arrive, rank 2 sleeps and wakes.

The replicas' own forwards say when none ran: their times are taken outside of the code that sends and receives. A replica stops for the
longest time between the end of a forward and the beginning of the next one; one that wakes, until its first forward.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.labs.bench_sync.ranks.ways import MIB, TIMEOUT_S, populated_tensors
from kit.measure.turns import turn_by_turn
from kit.sync.buckets import Whole, automatic, lay_out, specs_of
from kit.sync.cache import LARGEST, Cache, KeptMappings, Ring
from kit.sync.hashes import AUTO, digest
from kit.sync.link import Listener, address_of
from kit.sync.receiver import Receiver
from kit.sync.sender import Sender, Target
from kit.sync.serving import Serving
from kit.sync.transports import RankPlace

# A path: whether its versions go through a ring, the state of its receiver, and the receiver's rank.
PATHS = {
    "staged": (False, "serving", 1),
    "paused": (False, "paused", 1),
    "streamed": (True, "paused", 1),
    "expansion": (False, "asleep", 2),
}
SERVES = 1
WORK = 192  # rows of a forward's matrices: some hundred microseconds
SETTLE_S = 0.05  # forwards run for this long before and after a sync
ALGORITHM = "sha256"
NO_PLACE = RankPlace("here", 0)


class Stall(NamedTuple):
    """Seconds of a sync, seconds without a forward, and the forwards served meanwhile."""

    total: float
    paused: float
    served: int


class Replica:
    """The host of a receiver: weights, a thread with forwards, and the times of these."""

    def __init__(self, rank: int, wanted: dict[str, Any], address: dict[str, Any]) -> None:
        self.tensors = populated_tensors(wanted, filled=False)
        self.sizes = [tensor.untyped_storage().nbytes() for tensor in self.tensors.values()]
        self.spans: list[tuple[float, float]] = []
        self.matrix = torch.ones(WORK, WORK)
        self.serving = Serving(self.forward, timeout_s=TIMEOUT_S)
        self.kept = {ring: KeptMappings() for ring in (False, True)}  # each sender has memory of its own
        self.receiver = Receiver(
            f"rank {rank}",
            lambda: Whole(self.tensors),
            self,
            address=address,
            device=torch.device("cpu"),
            timeout_s=TIMEOUT_S,
        )

    def forward(self) -> torch.Tensor:
        began = time.time()
        made = self.matrix @ self.matrix
        self.spans.append((began, time.time()))
        return made[:1]

    def wake(self) -> None:
        for tensor, size in zip(self.tensors.values(), self.sizes, strict=True):
            tensor.untyped_storage().resize_(size)

    def sleep(self) -> None:
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
        self.replica = Replica(self.rank, wanted, address_of(meeting)) if self.rank else None
        self.senders: dict[bool, Sender] = {}
        if self.listener is not None:
            specs = specs_of(self.tensors)
            size = automatic(specs, oversize="split")
            self.senders = {
                False: self.sender(Cache(lay_out(specs, size, oversize="split")), self.listener),
                True: self.sender(Ring(lay_out(specs, min(LARGEST, size), oversize="split")), self.listener),
            }

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
        ring, state, to = PATHS[path]
        replica = self.replica
        asleep = replica is not None and state == "asleep" and self.rank == to
        if replica is not None:
            replica.spans = []
            replica.receiver.kept = replica.kept[ring]
            if asleep:
                replica.sleep()
            elif self.rank == SERVES:
                replica.serving.start()
                replica.serving.next()
        if self.rank == 0 and state == "asleep":
            self.senders[ring].build(self.senders[ring].cache.latest + 1, self.tensors)
        time.sleep(SETTLE_S)
        dist.barrier()
        began = time.time()
        if self.rank == 0:
            sender = self.senders[ring]
            version = sender.version if state == "asleep" else sender.cache.latest + 1
            target = Target(name=f"rank {to}", rank=to, place=NO_PLACE, state=state)  # type: ignore[arg-type]
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
        return self.together(path, turn, began, ended)

    def together(self, path: str, turn: int, began: float, ended: float) -> Stall:
        """What the ranks saw, as one answer on every rank. In the first turn all bytes are compared."""
        to = PATHS[path][2]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (began, ended, self.replica.spans if self.replica else []))
        if turn < 0:
            self.compare(path, to)
        began, ended = found[0][0], found[to][1]
        own, served = found[to][2], found[SERVES][2]
        paused = longest_gap(own, began, ended) if to == SERVES else max(0.0, min(start for start, _ in own) - began)
        return Stall(ended - began, paused, sum(began <= end <= ended for _, end in served))

    def compare(self, path: str, to: int) -> None:
        mine = self.replica.tensors if self.replica else self.tensors
        tables: list[Any] = [None] * dist.get_world_size()
        own = [digest(tensor, ALGORITHM) for tensor in mine.values()] if self.rank in (0, to) else []
        dist.all_gather_object(tables, own)
        if tables[0] != tables[to]:
            raise KitError(f"a sync ({path}) did not bring what was sent")
        if self.replica is not None and self.rank == to:  # another path must bring everything again
            for tensor in self.replica.tensors.values():
                tensor.zero_()

    def close(self) -> None:
        if self.replica is not None:
            for kept in self.replica.kept.values():
                kept.close()
        self.scope.close()


def longest_gap(spans: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """The longest time without a forward, of those that reach into the sync."""
    pairs = itertools.pairwise(spans)
    return max((after - end for (_, end), (after, _) in pairs if after > began and end < ended), default=ended - began)


def stalls(*, mib: int, each_mib: int, meeting: str, rounds: int) -> dict[str, list[Stall]]:
    """Every path, turn by turn."""
    ends = Ends({"size": each_mib * MIB, "count": mib // each_mib}, meeting)
    made: dict[str, list[Stall]] = {path: [] for path in PATHS}

    def turn_of(path: str, turn: int) -> float:
        stall = ends.sync(path, turn)
        if turn >= 0:
            made[path].append(stall)
        return stall.total

    try:
        turn_by_turn([*PATHS], rounds, turn_of)
    finally:
        ends.close()
    return made
