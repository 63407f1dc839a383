"""A rank's place in its pipeline, and the device that it acquires and releases."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kit import machine
from kit.errors import KitError
from kit.labs.rankside import Context
from kit.labs.share.lab import LOCK, PipelineConfig, member_name
from kit.results.records import Row


@dataclass(kw_only=True, slots=True)
class PipelineContext(Context):
    """A context with the ranks, roles and config of a single pipeline, as the actors of a loop expect them. Its records have the
    id `pipeline`. `place` is this rank's number in its role."""

    pipeline: str
    place: int

    def _send(self, row: Row) -> None:
        Context._send(self, replace(row, ids={**row.ids, "pipeline": self.pipeline}))

    @property
    def owner(self) -> str:
        return f"{self.pipeline}.{self.role}"


def loop_of(ctx: Context, pipeline: str) -> PipelineConfig:
    loop: PipelineConfig = ctx.config.loops[pipeline]
    return loop


def context_of(ctx: Context) -> PipelineContext:
    pipeline, _, role = ctx.role.partition(" ")
    mine = {name.partition(" ")[2]: ranks for name, ranks in ctx.roles.items() if name.startswith(f"{pipeline} ")}
    first = min(rank for ranks in mine.values() for rank in ranks)
    size = sum(map(len, mine.values()))
    return PipelineContext(
        pipeline=pipeline,
        place=ctx.roles[ctx.role].index(ctx.rank),
        rank=ctx.rank - first,
        world_size=size,
        world_sizes=tuple(map(len, mine.values())),
        world=[*mine].index(role),
        role=role,
        roles={name: tuple(rank - first for rank in ranks) for name, ranks in mine.items()},
        meeting=f"{ctx.meeting}-{pipeline}",
        device=ctx.device,
        config=loop_of(ctx, pipeline),
        devices=ctx.devices[first : first + size],
        nodes=ctx.nodes[first : first + size],
        hosts=ctx.hosts[first : first + size],
        certificate=ctx.certificate,
        ports=ctx.ports,
    )


class DeviceLock:
    """A device held by this rank: a lock on a file, which the kernel frees if the rank dies, and on the CPU one core.

    `together`: other ranks may hold the device at the same time if all set this flag. With fewer cores than devices, some devices share
    a core.
    """

    def __init__(self, ctx: PipelineContext) -> None:
        self.ctx = ctx
        self.device = ctx.config.on_devices(ctx.role)[ctx.place]
        self.cores = sorted(os.sched_getaffinity(0))
        self.threads = torch.get_num_threads()
        self._fd = -1

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def take(self, folder: Path, *, together: bool = False) -> None:
        """Raises at once if another rank holds the device, with the name of that rank."""
        if self.held:
            raise KitError(f"{self.ctx.owner} already holds device {self.device}")
        fd = os.open(folder / LOCK.format(self.device), os.O_RDWR | os.O_CLOEXEC)  # the observer made it
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if together else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode(errors="replace") or "an unnamed process"
            os.close(fd)
            raise KitError(f"{self.ctx.owner} cannot take device {self.device}: {holder} holds it") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, self.ctx.owner.encode(), 0)
        self._fd = fd
        self._pin([self.cores[self.device % len(self.cores)]], threads=1)
        self._note("taken")

    def free(self) -> None:
        if self.held:
            self._pin(self.cores, threads=self.threads)
            self._note("freed")
            os.close(self._fd)
            self._fd = -1

    def _pin(self, cores: list[int], *, threads: int) -> None:
        if self.ctx.device.type == "cpu":
            torch.set_num_threads(threads)
            with contextlib.suppress(PermissionError):  # an observer sees what a container does not allow
                machine.pin(cores)

    def _note(self, event: str) -> None:
        self.ctx.record("lease", None, text=self.ctx.owner, device=self.device, event=event)

    def note_resident(self, state: str) -> None:
        """Record this rank's memory and state: `awake` or `held` with a device, `asleep` without. On a GPU: what the allocator reserves."""
        if self.ctx.device.type == "cuda":
            name = member_name(self.ctx.owner, self.ctx.place, len(self.ctx.roles[self.ctx.role]))
            self.ctx.record("reserved", torch.cuda.memory_reserved(self.ctx.device), "B", who=name, state=state)
        else:
            self.ctx.record("resident", machine.status()["VmRSS"], "B", who=self.ctx.owner, state=state)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """A part of a hand-over as a record with its span."""
        began = time.time()
        yield
        self.ctx.record("handing_over", time.time() - began, "s", start=began, what=what, who=self.ctx.owner)
