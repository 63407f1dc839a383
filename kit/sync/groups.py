"""Transports over a process group that exists for one sync: one broadcast per bucket, among ranks of one World or of several.

The error of a failed collective does not name the cause, so it is replaced with what the links report: a peer that is gone, has failed,
or is behind. Limits: if several receivers wait for the same silent rank, each can only blame the sender or a receiver in
between. The NCCL parts follow torch's ProcessGroupNCCL.cpp and NCCLUtils.cpp, 2.9 to 2.13, and have not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kit.errors import BadInput, KitError
from kit.nccl import unbound
from kit.sync.buckets import ALIGN
from kit.sync.link import PeerSilent, tcp_family
from kit.sync.transports import DEPTH, Transport, TransportContext

c10d: Any = _c10d  # its private functions have no types
LEAVING_S = 2.0
SPIN_S = 0.02


class Grouped(Transport):
    """Creates, uses and releases the group, on the ranks' device. If that is the CPU, it uses host memory directly."""

    group: Any = None
    on_device = True

    def __init__(self, ctx: TransportContext) -> None:
        super().__init__(ctx)
        self.wait = timedelta(seconds=ctx.timeout_s)
        self.name = ""
        self.failed = self.aborted = False
        self.handed = 0  # buckets that went through the group
        self._slots: list[torch.Tensor] = []
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        try:
            self.meet()
        except BaseException:
            self.close()
            raise

    def meet(self) -> None:
        """Enter the group once all ranks have announced that they will: a wait inside it could not name a missing rank."""
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
        self.guarded("its start", lambda: self.begin(offer))

    def begin(self, offer: dict[str, Any]) -> None:
        """Make the group. NCCL creates the communicator at the first collective; run one here, so that no bucket waits for it."""
        self.join(offer)
        if self.ctx.device.type == "cuda":
            within(self.wait, self.first_words)

    def first_words(self) -> None:
        torch.cuda.set_device(self.ctx.device)  # a new thread starts on GPU 0
        wait_on_gpu(self.group.allreduce([torch.zeros(1, device=self.ctx.device)]), self.wait)

    def offer(self) -> dict[str, Any]:
        """Return what receivers need to join, besides the group's name and size."""
        return {}

    @abstractmethod
    def join(self, offer: dict[str, Any]) -> None:
        """Make `group`."""

    def leave(self, group: Any) -> None:
        """Release the group."""

    def send(self, index: int, buffer: torch.Tensor) -> None:
        self.ahead(index)
        if self.ctx.device.type != buffer.device.type:
            buffer = self.slot(index).copy_(buffer)
        self.broadcast(index, buffer)
        self.handed = index + 1

    def receive(self, index: int, into: torch.Tensor) -> torch.Tensor:
        self.say({"kind": "here", "bucket": index})  # if the group gets stuck, the sender knows which receivers joined
        direct = self.ctx.device.type == into.device.type
        there = into if direct else self.slot(index)
        self.broadcast(index, there)
        self.handed = index + 1
        return into if direct else into.copy_(there)

    def broadcast(self, index: int, buffer: torch.Tensor) -> None:
        self.share(index, buffer)

    def share(self, index: int, buffer: torch.Tensor) -> None:
        def act() -> None:
            work = self.group.broadcast([buffer], self._options)
            wait_on_gpu(work, self.wait) if buffer.is_cuda else work.wait()  # gloo applies the group's deadline

        self.guarded(f"bucket {index}", act, index)

    def slot(self, index: int) -> torch.Tensor:
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
        if self.failed or self.handed < len(self.ctx.sizes):
            self.abort()
        group, self.group = self.group, None
        self._slots = []
        if group is not None:
            self.leave(group)

    def abort(self) -> None:
        """Abort an NCCL group. Destroying it would wait for peers that may be gone, and a kernel waiting for them keeps the GPU busy."""
        if self.group is None or self.aborted or self.ctx.device.type != "cuda":
            return
        self.aborted = True
        with contextlib.suppress(RuntimeError):  # close() releases the group anyway
            self.group.abort()

    def guarded(self, action: str, act: Callable[[], None], index: int = -1) -> None:
        try:
            act()
        except RuntimeError as error:
            self.failed = True
            self.abort()
            words = " ".join(str(error).partition("\n")[0].split())
        else:
            return
        # Raised outside the handler: chained to the group's error, it would keep the group and its sockets alive.
        raise self.explained(f"{action} over {self.described()}", words, index)

    def explained(self, awaited: str, words: str, index: int) -> KitError:
        """Return the error that names the culprit, as far as the links show it. A peer that only waited for a silent one is not blamed."""
        ctx, late = self.ctx, "time" in words.lower()  # "Timed out", "timeout"
        reported = self.trouble(awaited)
        if reported is None and not late:
            # A peer that leaves breaks the group; on a busy machine the link may show it later.
            reported = self.trouble(awaited, min(ctx.timeout_s, LEAVING_S))
        absent = self.absent(index) if ctx.role == "sender" else []
        if late and absent and getattr(reported, "peer", None) not in absent:
            return PeerSilent(", ".join(absent), awaited, ctx.timeout_s)
        if reported is not None:
            return reported
        if not late:
            return KitError(f"{awaited} failed: {words}")
        if ctx.role == "sender":
            return PeerSilent(", ".join(sorted(link.peer for link in ctx.links.values())), awaited, ctx.timeout_s)
        between = " or a receiver in between" if len(ctx.ranks) > 2 else ""
        return PeerSilent(f"{ctx.sender.peer}{between}", awaited, ctx.timeout_s)

    def described(self) -> str:
        names = sorted(link.peer for link in self.ctx.links.values())
        ranks = f", ranks {', '.join(map(str, self.ctx.ranks))}" if self.ctx.ranks else ""
        return f"group {self.name} (with {', '.join(names)}{ranks})"


class Broadcast(Grouped):
    """A temporary group of the sender and receivers: a proper subset of their World, with its own name, destroyed after each sync."""

    def meet(self) -> None:
        ranks, world = self.ctx.ranks, dist.get_world_size()
        if len(ranks) >= world:
            raise BadInput(
                f"broadcast needs at least one rank outside the sync group: {len(ranks)} of {world} ranks are the whole World"
            )
        super().meet()

    def join(self, offer: dict[str, Any]) -> None:
        """Make the group under the sender's name. `new_group` would derive the name from these ranks and a count of groups that differs
        between ranks: the names would not match, or would match an earlier group's addresses in the store."""
        ranks, name, default = list(self.ctx.ranks), offer["name"], c10d._get_default_group()
        store, backend = c10d._world.pg_map[default][1], "gloo"
        if self.ctx.device.type == "cuda":
            store, backend = hurried(store, self.wait), "nccl"
        make = c10d._new_process_group_helper
        with unbound(default):
            args = len(ranks), self.ctx.place, ranks, backend, store, name
            self.group, _ = make(*args, timeout=self.wait, group_desc=name)
        c10d._world.pg_group_ranks[self.group] = {rank: place for place, rank in enumerate(ranks)}

    def leave(self, group: Any) -> None:
        dist.destroy_process_group(group)


class PerTensor(Broadcast):
    """The simple way, for comparison: one broadcast per tensor."""

    def broadcast(self, index: int, buffer: torch.Tensor) -> None:
        start = 0
        for size in self.ctx.pieces[index]:
            if size:
                self.share(index, buffer[start : start + size])
            start += -(-size // ALIGN) * ALIGN


class Rendezvous(Grouped):
    """For a sender and receivers of different Worlds, which meet at a fresh store in the sender's process. Receivers reach it at `host`
    of the config. The group is not in torch's registry."""

    store: Any = None

    def offer(self) -> dict[str, Any]:
        host = self.ctx.config.get("host", "127.0.0.1")
        # By itself the store would listen at every address of this machine.
        door = socket.create_server((host, 0), family=tcp_family(host))
        port = door.getsockname()[1]
        self.store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.wait,
            master_listen_fd=door.detach(),
        )
        return {"host": host, "port": port}

    def join(self, offer: dict[str, Any]) -> None:
        if self.store is None:
            self.store = TCPStore(
                offer["host"], offer["port"], is_master=False, wait_for_workers=False, timeout=self.wait
            )
        made: Any = dist.ProcessGroupNCCL if self.ctx.device.type == "cuda" else dist.ProcessGroupGloo
        self.group = made(PrefixStore(offer["name"], self.store), self.ctx.place, offer["size"], self.wait)

    def leave(self, group: Any) -> None:
        group.shutdown()

    def close(self) -> None:
        super().close()
        self.store = None


def wait_on_gpu(work: Any, wait: timedelta) -> None:
    """Wait for a collective on a GPU. torch's wait with a deadline sleeps between two polls (WorkNCCL::wait: 1 ms or more), which alone
    limits a bucket of 64 MiB to 60 GB/s. So poll without a pause first. A late or failed collective is left to torch's wait, which aborts
    the communicator and raises."""
    end = time.monotonic() + SPIN_S
    while not work.is_completed() and time.monotonic() < end:
        pass
    work.wait(wait)


def within(wait: timedelta, act: Callable[[], None]) -> None:
    """Run `act` on a thread with a deadline: creating a communicator waits for its peers without one (ncclCommInitRankConfig). Limits: a
    thread that misses the deadline lives until the process ends."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=body, daemon=True, name="kit-sync-start")
    thread.start()
    thread.join(wait.total_seconds())
    if thread.is_alive():
        raise RuntimeError(f"timed out after {wait.total_seconds():g} s: a peer did not join the communicator")
    if failed:
        raise failed.pop()  # a reference left here would keep it and the group alive until garbage collection


def hurried(store: Any, wait: timedelta) -> Any:
    """Return a clone of the store with its own connection and deadline. Creating a communicator asks the store for its id with the deadline
    of the store's client (broadcastUniqueNCCLID): half an hour for the World's store."""
    own = store.clone()
    own.set_timeout(wait)
    return own
