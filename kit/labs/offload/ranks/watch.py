"""The offload lab's own observation of one job: its groups, tensors and generators before each release and after each reload."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from kit.measure.observers import births, tensors
from kit.measure.observers.births import Births
from kit.measure.observers.settings import settings_now
from kit.measure.observers.tensors import Print, Samples
from kit.measure.phase import resource_counts
from kit.megatron import observe
from kit.megatron.handles import c10d
from kit.nccl import unbound

new_group, destroy_process_group = dist.new_group, dist.destroy_process_group  # torch's own, before any patch


def generators_and_settings() -> dict[str, str]:
    return {**observe.random_state(), **{name: str(value) for name, value in settings_now().items()}}


class JobWatch:
    """It keeps no group alive, and no tensor across a release."""

    def __init__(self, born: Births) -> None:
        self.born = born
        self.old: list[observe.Old] = []
        self.standing = False
        self.mute = False  # a Megatron group did not answer: further training would wait for it
        self.prints: dict[str, Print] = {}
        self.arrived: Samples = {}  # values of every tensor at the moment at which the reload returned
        self.random: dict[str, str] = {}
        self._ranks: dict[str, list[int]] = {}
        self._answered: dict[str, list[int]] = {}
        self._seen = observe.Seen()
        self._world: weakref.ref[Any] | None = None

    def first_talk(self) -> list[str]:
        """Communicate over every group of the new job. The ranks that answer now must answer after every reload."""
        self._ranks, wrong = observe.talk_by_name()
        self.standing = bool(observe.standing())
        return wrong

    def before_release(self, prints: dict[str, Print], **roots: Any) -> None:
        self.prints = prints
        self._seen = observe.look(self._whole(), **roots)
        self._seen.ranks = self._ranks
        self.old = observe.remember()
        self._world = weakref.ref(births.world())
        self.random = generators_and_settings()

    def late(self, changed: set[str], dropped_grads: bool) -> list[str]:
        """What is as before the release now, and was not when the reload returned."""
        names = [name for name in tensors.late(self.prints, self.arrived) if name not in changed]
        return [name for name in names if not (dropped_grads and self.prints[name].kind == "grads")]

    def alive(self) -> list[str]:
        """The groups created since the job began that something still holds."""
        return [str(group.group_desc) for group in self._whole()]

    def _whole(self) -> list[Any]:
        """The living groups of the job, without the backends inside them."""
        return [group for group in self.born.alive() if type(group) is dist.ProcessGroup]

    def world_left(self) -> bool:
        """Whether the default group from before the release still exists."""
        return dist.is_initialized() or (self._world is not None and self._world() is not None)

    def talk(self) -> tuple[int, list[str]]:
        """Return the number of groups that answered, and the errors: a failed collective, or other ranks than before."""
        answered, wrong = observe.talk_by_name()
        self._answered, self.mute = answered, bool(wrong)
        if not wrong:
            wrong = [
                f"{name}: {f'ranks {answered[name]}' if name in answered else 'no ranks'} answer in place of {ranks}"
                for name, ranks in self._ranks.items()
                if answered.get(name) != ranks
            ]
        if ahead := births.names_ahead():
            wrong.append(f"a later group would get the name {ahead[0]!r}, which another group already has")
        return len(answered), wrong

    def use_a_new_group(self) -> list[str]:
        """The error of a group that is made, used and destroyed now, if any. Made below everything that own code may have patched."""
        try:
            with unbound(c10d._world.default_pg):
                made = new_group(backend="gloo")
            wrong = observe.wrong_sum(made, range(dist.get_world_size()))
            destroy_process_group(made)
        except Exception as error:  # noqa: BLE001 - the first group after a reload may fail in any way
            return [f"a new group cannot be made, used and destroyed: {observe.first_line(error)}"]
        return [f"a new group: {wrong}"] if wrong else []

    def held(self) -> dict[str, int]:
        """Descriptors, sockets, threads and groups of this process, registered groups or not."""
        counts = resource_counts()
        kinds = {"descriptors": counts.fds, "sockets": counts.sockets, "threads": counts.threads}
        return {**kinds, "groups": len(self.alive())}

    def after_reload(self, **roots: Any) -> tuple[list[str], list[str], list[str]]:
        """Return names that stand for other ranks than before the release, changed options, and stale handles."""
        after = observe.look(self._whole(), **roots)
        after.ranks = self._answered
        return (
            observe.moved_names(self._seen, after),
            observe.changed(self._seen, after),
            observe.stale_names(self._seen, after),
        )


def any_rank(value: bool) -> bool:
    """Whether the value is true on any rank; communicates over the default group."""
    flag = torch.tensor([int(value)], device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
