"""Several Worlds driven as one, as a trainer and its inference replicas are: each a torchrun job and a process group of its own.

A rank's number counts through all of them, in calls, answers, errors and logs. When a rank dies, all Worlds end, as one World does;
with `isolate=True` only its own World ends, and the others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from kit.errors import BadInput, KitError
from kit.world.asked import Part, check_chosen, check_devices, check_layout, check_ranks
from kit.world.calls import Call
from kit.world.pending import Observer
from kit.world.world import TIMEOUT_S, Printer, Ranks, World


class Worlds(Ranks):
    """Live ranks in as many Worlds as there are sizes; the part of World's interface that a lab needs."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        names: Sequence[str] = (),
        isolate: bool = False,
        devices: Sequence[Sequence[int]] = (),
        timeout_s: float = TIMEOUT_S,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        """`devices` has a list of GPU numbers for each World; `options` are World's."""
        if not sizes:
            raise BadInput("Worlds need at least one size, a number of ranks")
        for size in sizes:
            check_layout(size, 1, "")
        check_ranks(sum(sizes))
        if devices and len(devices) != len(sizes):
            raise BadInput(f"devices has {len(devices)} lists for {len(sizes)} Worlds; give one list per World")
        for size, places in zip(sizes, devices, strict=False):
            check_devices(places, size)
        self.names = tuple(names) or tuple(f"World {n}" for n in range(len(sizes)))
        self.isolate = isolate
        self.timeout_s = timeout_s
        self.worlds: list[World] = []
        self._observer: Observer = observer or Printer()
        self._lock = threading.RLock()
        self._turn = threading.RLock()
        try:
            for number, (first, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False)):
                made = World(
                    size,
                    timeout_s=timeout_s,
                    observer=self.observer,
                    devices=devices[number] if devices else (),
                    part=Part(first, sum(sizes)),
                    **options,
                )
                made.share_lock(self._lock)
                if not isolate:
                    made.on_death = self._end_all
                self.worlds.append(made)
            for world in self.worlds:  # while one launches, the agents of the others load torch
                world.launch()
        except BaseException:
            self.close()
            raise

    def _calls(self, what: dict[str, Any], phase: str, ranks: Sequence[int] | None) -> list[Call]:
        chosen = check_chosen(ranks, range(self.ranks))
        parts = [(world, mine) for world in self.worlds if (mine := [n for n in chosen if n in world.numbers])]
        ready = [(world, world.ready(mine)) for world, mine in parts]  # all of them, before one is asked
        return [world.prepare(what, phase, members) for world, members in ready]

    def restart(self) -> None:
        """End all ranks, whatever they do, and start fresh ones."""
        with self._turn:
            for world in self.worlds:
                world.restart()

    def close(self) -> None:
        """End all ranks of all Worlds and wait until they are gone. May be called again."""
        for world in self.worlds:
            world.close()

    def stacks(self) -> dict[int, str]:
        """What each rank is doing right now."""
        return {rank: stack for world in self.worlds for rank, stack in world.stacks().items()}

    def status(self) -> list[dict[str, Any]]:
        """A row per rank, as World's."""
        return [row for world in self.worlds for row in world.status()]

    @property
    def observer(self) -> Observer:
        return self._observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self._observer = observer
        for world in self.worlds:
            world.observer = observer

    @property
    def pids(self) -> list[int]:
        return [pid for world in self.worlds for pid in world.pids]

    @property
    def ranks(self) -> int:
        return sum(world.ranks for world in self.worlds)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(world.ranks for world in self.worlds)

    @property
    def device(self) -> str:
        return self.worlds[0].device

    @property
    def state(self) -> str:
        """idle, busy, dead or closed: of the Worlds' states the last in this order."""
        return max((world.state for world in self.worlds), key=("idle", "busy", "dead", "closed").index)

    def _end_all(self, why: str, error: KitError | None) -> None:
        """One World is dead: the others end too, since what they were doing they did with it."""
        for world in self.worlds:
            world.die(why, error)

    def __repr__(self) -> str:
        rows = "; ".join(f"{name}: {world!r}" for name, world in zip(self.names, self.worlds, strict=True))
        return f"<Worlds of {' and '.join(map(str, self.sizes))} ranks, {self.state}: {rows}>"
