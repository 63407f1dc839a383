"""One sync of made-up buckets over any transport, as run by a rank of a World, a process, or a thread of a test."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.measure import resource_counts
from kit.sync.buckets import ALIGN
from kit.sync.cache import Segment
from kit.sync.link import Listener, call
from kit.sync.transports import Transport, TransportContext, make
from tests.holdings import memory_files

PIECES = [[4096], [1000, 512, 8], [512], [3584, 100, 412], [0], [2048], [64 * 1024] * 8]
SIZES = [sum(-(-size // ALIGN) * ALIGN for size in row[:-1]) + row[-1] for row in PIECES]
STARTS = [4096 * sum(-(-size // 4096) for size in SIZES[:index]) for index in range(len(SIZES))]
KILLED_AT = 3
Act = Callable[[Transport], Any]


def bucket(index: int) -> torch.Tensor:
    """Return the content of a bucket. Gaps between pieces belong to no tensor and stay zero, since tensors sent one by one leave them
    out."""
    made = torch.zeros(SIZES[index], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(index)
    start = 0
    for size in PIECES[index]:
        made[start : start + size] = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        start += -(-size // ALIGN) * ALIGN
    return made


def context(role: Any, links: Any, timeout_s: float, **more: Any) -> TransportContext:
    given = {"sizes": SIZES, "starts": STARTS, "pieces": PIECES, "device": torch.device("cpu"), **more}
    return TransportContext(role=role, name=role, links=links, timeout_s=timeout_s, **given)


def send(transport: Transport, indices: Sequence[int] = range(len(SIZES))) -> None:
    """Pack each bucket into the segment and hand it over."""
    segment = transport.ctx.segment
    assert segment is not None
    for index in indices:
        into = segment.tensor[STARTS[index] : STARTS[index] + SIZES[index]]
        transport.send(index, into.copy_(bucket(index)))
    transport.flush()


def receive(transport: Transport, indices: Sequence[int] = range(len(SIZES))) -> list[int]:
    """Return the buckets that arrived changed. They are compared only when all have arrived."""
    got = []
    for index in indices:
        got.append(transport.receive(index, torch.zeros(SIZES[index], dtype=torch.uint8)))
        transport.done(index)
    return [index for index, one in zip(indices, got, strict=True) if not torch.equal(one, bucket(index))]


def as_sender(kind: Any, listener: Listener, names: list[str], timeout_s: float, act: Act = send, **more: Any) -> Any:
    links = listener.accept(names, 30.0)
    try:
        for link in links.values():
            link._sock.settimeout(timeout_s)
            link.timeout_s = timeout_s
            link.send({"kind": "begin"})
        with contextlib.closing(Segment(STARTS[-1] + SIZES[-1], name="kit-test")) as segment:
            given = context("sender", links, timeout_s, segment=segment, **more)
            with contextlib.closing(make(kind, given)) as transport:
                return act(transport)
    finally:
        for link in links.values():
            link.close()


def as_receiver(
    kind: Any, address: dict[str, Any], name: str, timeout_s: float, act: Act = receive, **more: Any
) -> Any:
    """Act as a receiver, which reports a failure to the sender before it leaves."""
    with call(address, name, peer="the sender", timeout_s=timeout_s) as link:
        link._sock.settimeout(30.0)  # the sender may have to wait for all receivers to call
        link.expect("begin")
        link._sock.settimeout(timeout_s)
        try:
            with contextlib.closing(
                make(kind, context("receiver", {"the sender": link}, timeout_s, **more))
            ) as transport:
                return act(transport)
        except KitError as error:
            with contextlib.suppress(KitError):
                link.send({"kind": "failed", "why": str(error)})
            raise


# -- what a test calls on ranks ------------------------------------------------------------------------------------------

LISTENER: list[Listener] = []


def listen() -> dict[str, Any]:
    LISTENER.append(Listener())
    return LISTENER[-1].address


def held() -> dict[str, int]:
    gc.collect()
    return {**resource_counts()._asdict(), "segments": len(memory_files())}


def sync(
    *,
    kind: str,
    address: dict[str, Any],
    part: list[int],
    offset: int = 0,
    stalls: int | None = None,
    dies: int | None = None,
    deadline_s: float = 20.0,
) -> dict[str, Any]:
    """Run this rank's part and return the outcome. `part` lists sender and receivers, counted from `offset`; other ranks return {}."""
    rank = dist.get_rank() + offset
    if rank not in part:
        return {}
    before = held()
    place = part.index(rank)
    more = {"ranks": tuple(part), "place": place}
    began = time.monotonic()
    result: dict[str, Any] = {"error": None}
    if place == 0:
        before["fds"], before["sockets"] = before["fds"] - 1, before["sockets"] - 1  # the listener is closed at the end
    try:
        if place == 0:
            with LISTENER.pop() as listener:
                as_sender(kind, listener, [f"receiver {other}" for other in part[1:]], deadline_s, **more)
        else:
            act = {stalls: stall, dies: die}.get(rank, receive)
            result["differ"] = as_receiver(kind, address, f"receiver {rank}", deadline_s, act, **more)
    except KitError as error:
        result["error"] = [type(error).__name__, str(error), getattr(error, "peer", None)]
    result["seconds"] = time.monotonic() - began
    after = held()
    return {**result, "left": {key: after[key] - before[key] for key in after if after[key] != before[key]}}


def stall(transport: Transport) -> None:
    """Receive some buckets, then nothing more until the sender has given up."""
    receive(transport, range(KILLED_AT))
    ended = select.poll()
    ended.register(transport.ctx.sender._sock, select.POLLRDHUP)
    ended.poll(60_000)


def die(transport: Transport) -> None:
    """Receive some buckets, then be killed."""
    receive(transport, range(KILLED_AT))
    os.kill(os.getpid(), signal.SIGKILL)


def process(rank: int, size: int, folder: Path, kind: str) -> None:
    """Run a rank without torchrun, which would end all ranks when one dies. In the second sync the last receiver is killed."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    part = list(range(size - 1))  # one rank takes no part
    for attempt in range(2):
        if rank == 0:
            (folder / "address").write_text(json.dumps(listen()))
        dist.barrier()
        address = json.loads((folder / "address").read_text())
        dist.barrier()
        message = sync(kind=kind, address=address, part=part, dies=part[-1] if attempt else None)
        (folder / f"rank{rank}-{attempt}.json").write_text(json.dumps(message))
    os._exit(0)  # the World has lost a rank, so there is no orderly end


if __name__ == "__main__":
    process(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
