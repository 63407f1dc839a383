"""The probes that only the notebook side can make: a rank that comes late, and a rank that is killed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from kit import machine
from kit.errors import KitError, RankDied, RankTimeout
from kit.labs.lab import Drive

LATE_S, PATIENCE_S = 3.0, 1.5  # how late a rank enters an all-reduce, and when the notebook gives up waiting
NOTICE_S = 10.0
# Names that torch, NCCL, CUDA, Python's multiprocessing and the kit use in /dev/shm.
SHARED_NAMES = ("torch_", "nccl-", "cuda.shm.", "psm_", "sem.mp", "kit")


def absent_peer(drive: Drive) -> None:
    """The last rank enters an all-reduce late: it must be named. Then ranks wait for peers that never come."""
    ranks = range(drive.config.ranks)
    late_rank = ranks[-1]
    call = drive.submit("come_late", args={"rank": late_rank, "seconds": LATE_S}, ranks=ranks, timeout_s=PATIENCE_S)
    try:
        call.result()
        drive.record("late_rank_missed", 1, text="the call returned before the late rank entered")
    except RankTimeout as error:
        named = ", ".join(map(str, error.culprits)) or "none"
        drive.record("late_rank_missed", error.culprits != (late_rank,), text=f"named: {named}; late: {late_rank}")
    call.result(timeout_s=drive.config.timeout_s)

    drive.submit("prepare_to_wait", ranks=ranks).result()
    drive.submit("wait_in_vain", ranks=ranks).result()
    if not all(drive.submit("survive", ranks=ranks).result()):
        drive.renew()


def killed_rank(drive: Drive) -> None:
    """SIGKILL for the last rank, which holds memory of rank 0 where there is a GPU. It must be noticed, and nothing of it may stay."""
    before = machine.shm_names(SHARED_NAMES)
    ranks = range(drive.config.ranks)
    drive.submit("hold", ranks=ranks).result()
    began = time.monotonic()
    drive.world.kill_rank(ranks[-1])
    try:
        drive.submit("meet", ranks=ranks, timeout_s=NOTICE_S).result()
        drive.record("death_missed", 1, text="a call to the killed rank returned")
    except KitError as error:
        missed = not (isinstance(error, RankDied) and error.rank == ranks[-1] and error.signal == "SIGKILL")
        drive.record("death_missed", missed, text=str(error).partition("\n")[0])
    drive.record("notice_seconds", time.monotonic() - began, "s")

    drive.renew()
    names = machine.shm_names(SHARED_NAMES) - before
    names -= machine.shm_in_use(names, machine.pids())  # another process works with these
    drive.record("names_left", len(names), text=", ".join(sorted(names)))
    for name in names:
        with contextlib.suppress(OSError):
            Path(machine.SHM, name).unlink()
