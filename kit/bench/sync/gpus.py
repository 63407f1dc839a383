"""The lab's syncs on CUDA, by each transport, beside what GPUs and the links between them do at best.

A time is the sender's, from when all are ready until the receivers have applied everything, as in the lab's own comparison of transports.
Ceilings are measured in the same ranks just before. Where two ranks share a GPU, NCCL may refuse: then the row says so. Has not run on a
GPU yet; on the CPU the same code runs over shared memory and gloo, in the tests.
"""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, Any

from kit.bench import ceilings
from kit.bench.rows import Row, row, unmeasured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.bench.session import Session
    from kit.results import Run

    Seconds = Mapping[str, list[float]]

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
            "kit.bench.ceilings:measured", ranks=[0], size=BLOCK, rounds=ROUNDS, device=seats[0], timeout_s=600
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
    if ceilings.WITHIN not in plain:
        return [ceilings.HOST]
    peers = [what for what in plain if what.startswith(ceilings.PEER)]
    if name == "shm" or not (same or peers):
        return [ceilings.OUT, ceilings.BACK]
    return [ceilings.WITHIN] if same else peers
