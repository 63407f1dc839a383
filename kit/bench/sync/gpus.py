"""The lab's syncs on CUDA, by each transport, beside plain copies, which are the best that GPUs and the links between them can do.

A rate counts a byte that is copied once, although it is read and written.
A time is the sender's, from when all are ready until the receivers have applied everything, as in the lab's own comparison of transports.
Ceilings are measured in the same ranks just before. Where two ranks share a GPU, NCCL may refuse: then the row says so. Has not run on a
GPU yet; on the CPU the same code runs over shared memory and gloo, in the tests.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kit.bench.session import Row, row, turn_by_turn, unmeasured
from kit.measure import host
from kit.measure.phase import timed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.bench.session import Session
    from kit.results import Run

    Seconds = Mapping[str, list[float]]
    Work = Callable[[], object]

HOST, WITHIN, OUT, BACK, PEER = "memcpy", "within the GPU", "GPU to pinned memory", "pinned memory to GPU", "to GPU"


def memcpy(size: int) -> Work:
    """One copy between two places of host memory that are both there: of zeros the kernel would keep one page for all."""
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return lambda: copy(target, source)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """The one copy by which the host is measured: all bytes at once, by the C library."""
    host.libc.memcpy(target.data_ptr(), source.data_ptr(), source.nbytes)


def on_gpu(device: torch.device, size: int) -> dict[str, Work]:
    """By name, each to be awaited by synchronising the device; `size` bytes a block, of which there are two and one a peer."""
    here, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    works: dict[str, Work] = {
        WITHIN: partial(other.copy_, here, non_blocking=True),
        OUT: partial(pinned.copy_, here, non_blocking=True),
        BACK: partial(here.copy_, pinned, non_blocking=True),
    }
    for number in range(torch.cuda.device_count()):
        if number != device.index and torch.cuda.can_device_access_peer(device, number):
            there = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", number))
            works[f"{PEER} {number}"] = partial(there.copy_, here, non_blocking=True)
            break  # one stands for the others: weights go to one receiver at a time
    return works


def seconds(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Turn by turn, each until the GPU is done; a copy to another GPU is this one's work."""
    return turn_by_turn(list(works), rounds, lambda name, _: timed(works[name]))


def measured(*, size: int, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds for `size` bytes of everything there is here."""
    where = torch.device(device)
    works = {HOST: memcpy(size)}
    if where.type == "cuda":
        works |= on_gpu(where, size)
    return seconds(works, rounds)


RANKS = {"ipc": 2, "shm": 2, "broadcast": 3}  # a group is a proper part of the World: one looks on
VISIBLE = "CUDA_VISIBLE_DEVICES"
BLOCK = 2**28
ROUNDS = 7
GB = 1e9


def rows(session: Session, name: str, *, model: str, cycles: int) -> list[Row]:
    """One transport. Without a GPU a row gives the reason."""
    if session.device == "cpu":
        return [unmeasured(f"on GPUs: {name}", "the CPU was asked for, or this machine has no GPU driver")]
    return by_transport(session, name, model=model, cycles=cycles)


def by_transport(session: Session, name: str, *, model: str, cycles: int) -> list[Row]:
    """Ceilings, then as many versions, in the same ranks; the first version allocates pages and connections, and is not reported."""
    env = {VISIBLE: os.environ.get(VISIBLE, "0").partition(",")[0]} if name == "ipc" else None  # both ends on one GPU
    logs = session.logs / "gpus" / name
    logs.mkdir(parents=True, exist_ok=True)
    with session.world(RANKS[name], logs=logs / "ranks", env=env, preload=("megatron.core",), timeout_s=600) as world:
        seats = [seat["device"] for seat in world.status()]
        plain = world.call(
            "kit.bench.sync.gpus:measured", ranks=[0], size=BLOCK, rounds=ROUNDS, device=seats[0], timeout_s=600
        )[0]
        settings: dict[str, Any] = {"tp": 1, "replicas": 1, "infer_tp": 1, "placement": "apart", "refresh": "paused"}
        settings |= {"transport": name, "verify": "none", "sweep": False, "ranks": RANKS[name], "size": model}
        run = session.lab("sync", logs / "run", world=world, timeout_s=600, cycles=cycles + 1, **settings)
    return told(run, name, plain, same=seats[0] == seats[-1])


def told(run: Run, name: str, plain: Seconds, *, same: bool) -> list[Row]:
    """The transport's time with its ceiling beside it, and the ceilings themselves."""
    from kit.labs.sync.tables import events

    frame = run.frame()
    sent = frame[(frame["phase"] == "refresh") & (frame["rank"] == 0)]
    size = float(sent[sent["metric"] == "bytes"]["value"].max())
    seconds = []
    for cycle in sorted(sent["cycle"].unique())[1:]:
        at = events(frame, "refresh", int(cycle)).query("rank == 0").set_index("event")["seconds"]
        seconds.append(float(at["apply"] - at["ready"]))
    limits = ceiling_of(name, plain, same=same)
    least = {what: statistics.median(plain[what]) * size / BLOCK for what in limits}
    slowest = max(least, key=least.__getitem__)
    rate = size / statistics.median(seconds) / GB
    share = least[slowest] / statistics.median(seconds)
    where = f"{run.config['size']}, 1 receiver on {'the same' if same else 'another'} device"
    note = f"{rate:.2f} GB/s, {share:.2f} of {slowest} at {size / least[slowest] / GB:.2f} GB/s"
    ids: dict[str, str | int | float] = {"transport": name, "bytes": size, "device": "same" if same else "another"}
    made = [row(f"{where}: {name}, from all ready to applied", seconds, ceiling=least[slowest], note=note, ids=ids)]
    return made + [
        row(
            f"{name}: {BLOCK >> 20} MiB, {what}",
            taken,
            who="plain copy",
            note=f"{BLOCK / statistics.median(taken) / GB:.2f} GB/s",
            ids={"transport": name, "bytes": BLOCK, "copy": what},
        )
        for what, taken in plain.items()
    ]


def ceiling_of(name: str, plain: Seconds, *, same: bool) -> list[str]:
    """Which plain copies bound a transport: shared memory goes through the host, NCCL from GPU to GPU."""
    if WITHIN not in plain:
        return [HOST]
    peers = [what for what in plain if what.startswith(PEER)]
    if name == "shm" or not (same or peers):
        return [OUT, BACK]
    return [WITHIN] if same else peers
