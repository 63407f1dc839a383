"""Over a process group that lives for one sync: a broadcast a bucket among ranks that share a World.

A collective that fails tells little of why. So its error is told anew, by what the links say: who is gone, who has failed, or who has
said least. Limits: where several receivers wait for the same silent rank, each of them can only name the sender or one between.
"""

from __future__ import annotations

import contextlib
import secrets
from abc import abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d

from kit.errors import BadInput, KitError
from kit.sync.layout import ALIGN
from kit.sync.link import PeerSilent
from kit.sync.transports.base import DEPTH, Transport, TransportContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

c10d: Any = _c10d  # what is needed of it carries no types


class Grouped(Transport):
    """The group's life and its broadcasts, on the ranks' device. Buckets go from and to host memory directly where that is the host."""

    group: Any = None

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        self.wait = timedelta(seconds=ctx.timeout_s)
        self.name = ""
        self.failed = False
        self._slots: list[torch.Tensor] = []
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        try:
            self.meet()
        except BaseException:
            self.close()
            raise

    def meet(self) -> None:
        """Nobody enters the group before all said that they would: a wait inside it could not tell for whom."""
        links = self.ctx.links.values()
        if self.ctx.role == "sender":
            offer = {"name": f"kit-sync-{secrets.token_hex(4)}", "size": 1 + len(links), **self.offer()}
            self.name = offer["name"]
            self.say({"kind": "group", **offer})
            for link in links:
                link.expect("joining")
            self.say({"kind": "join"})
        else:
            offer = self.ctx.sender.expect("group")[0]
            self.name = offer["name"]
            self.say({"kind": "joining"})
            self.ctx.sender.expect("join")
        self.guarded("its start", lambda: self.join(offer))

    def offer(self) -> dict[str, Any]:
        """What receivers must know to join, beside the name and how many there are."""
        return {}

    @abstractmethod
    def join(self, offer: dict[str, Any]) -> None:
        """Make `group`."""

    def leave(self, group: Any) -> None:
        """Give the group back."""

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        if self.ctx.device.type != buffer.device.type:
            buffer = self.slot(index).copy_(buffer)
        self.broadcast(index, buffer)

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        self.say({"kind": "here", "bucket": index})  # where the group gets stuck, the sender knows who came
        direct = self.ctx.device.type == into.device.type
        there = into if direct else self.slot(index)
        self.broadcast(index, there)
        return into if direct else into.copy_(there)

    def broadcast(self, index: int, buffer: torch.Tensor) -> None:
        self.share(index, buffer)

    def share(self, index: int, buffer: torch.Tensor) -> None:
        def act() -> None:
            work = self.group.broadcast([buffer], self._options)
            # gloo keeps the group's own deadline; NCCL's watchdog would end the process, unless somebody waits with one.
            work.wait(self.wait) if buffer.is_cuda else work.wait()

        self.guarded(f"bucket {index}", act, index)

    def slot(self, index: int) -> torch.Tensor:
        """Memory on the device for a bucket."""
        if not self._slots:
            count = DEPTH if self.ctx.role == "sender" else 1
            largest = max(self.ctx.sizes)
            self._slots = [torch.empty(largest, dtype=torch.uint8, device=self.ctx.device) for _ in range(count)]
        return self._slots[index % len(self._slots)][: self.ctx.sizes[index]]

    def done(self, index: int) -> None:
        if self.ctx.device.type == "cuda":
            torch.cuda.current_stream(self.ctx.device).synchronize()
        super().done(index)

    def close(self) -> None:
        group, self.group = self.group, None
        self._slots = []
        if group is not None:
            self.leave(group)

    def guarded(self, what: str, act: Callable[[], None], index: int = -1) -> None:
        try:
            act()
        except RuntimeError as error:
            self.failed = True
            words = " ".join(str(error).partition("\n")[0].split())
        else:
            return
        # Outside of the handler: an error that remembers the group's own would keep the group, and its sockets, alive.
        raise self.explained(f"{what} by {self.told()}", words, index)

    def explained(self, awaited: str, words: str, index: int) -> KitError:
        """Who is to blame, as far as the links tell. Whoever waited in vain for a silent one says so, too, and is not the one."""
        ctx, late = self.ctx, "time" in words.lower()  # "Timed out", "timeout"
        told = self.trouble(awaited)
        absent = self.absent(index) if ctx.role == "sender" else []
        if late and absent and getattr(told, "peer", None) not in absent:
            return PeerSilent(", ".join(absent), awaited, ctx.timeout_s)
        if told is not None:
            return told
        if not late:
            return KitError(f"{awaited} failed: {words}")
        if ctx.role == "sender":
            return PeerSilent(", ".join(sorted(link.peer for link in ctx.links.values())), awaited, ctx.timeout_s)
        between = " or a receiver between" if len(ctx.ranks) > 2 else ""
        return PeerSilent(f"{ctx.sender.peer}{between}", awaited, ctx.timeout_s)

    def told(self) -> str:
        """The group and who is in it."""
        names = sorted(link.peer for link in self.ctx.links.values())
        ranks = f", ranks {', '.join(map(str, self.ctx.ranks))}" if self.ctx.ranks else ""
        return f"group {self.name} (with {', '.join(names)}{ranks})"


class Broadcast(Grouped):
    """A temporary group of sender and receivers in their World: a proper part of it, of a name of its own, destroyed each time."""

    def meet(self) -> None:
        ranks, world = self.ctx.ranks, dist.get_world_size()
        if len(ranks) >= world:
            raise BadInput(
                f"broadcast needs a rank that takes no part: {len(ranks)} of {world} would be the whole World"
            )
        super().meet()

    def join(self, offer: dict[str, Any]) -> None:
        """`new_group` of these ranks alone would name the group after them and a count of groups that differs from rank to rank:
        names that do not meet, or that are met again with the last group's addresses in the store."""
        ranks = list(self.ctx.ranks)
        default = c10d._get_default_group()
        store = c10d._world.pg_map[default][1]
        with unbound(default):
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                self.ctx.place,
                ranks,
                "nccl" if self.ctx.device.type == "cuda" else "gloo",
                store,
                offer["name"],
                timeout=self.wait,
                group_desc=offer["name"],
            )
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self.group = group

    def leave(self, group: Any) -> None:
        if self.failed and self.ctx.device.type == "cuda":
            group.abort()  # destroying would wait for peers that are gone
        dist.destroy_process_group(group)


class PerTensor(Broadcast):
    """The plain way: a broadcast for every tensor."""

    def broadcast(self, index: int, buffer: torch.Tensor) -> None:
        start = 0
        for size in self.ctx.pieces[index]:
            if size:
                self.share(index, buffer[start : start + size])
            start += -(-size // ALIGN) * ALIGN


@contextlib.contextmanager
def unbound(default: Any) -> Iterator[None]:
    """Where the World is bound to its device, a new communicator would be split off its own, and every rank would have to take part."""
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
