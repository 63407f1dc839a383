"""What the offload lab sees of groups and memory, whatever code releases them."""

from __future__ import annotations

import datetime as dt
import weakref
from typing import Any

import torch
import torch.distributed as dist

from kit.megatron import groups
from kit.megatron.groups.handle import Handle, c10d
from kit.megatron.groups.snapshot import describe, global_names, groups_in, megatron_groups, parallel_state

STALE_WAIT = dt.timedelta(seconds=5)


class Births:
    """Every group that torch makes while this is entered, by name and weak reference: the group itself, whatever wraps it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, weakref.ref[Any]]] = []

    def __enter__(self) -> Births:
        self._plain = c10d._new_process_group_helper
        c10d._new_process_group_helper = self._make
        return self

    def __exit__(self, *_: object) -> None:
        c10d._new_process_group_helper = self._plain

    def forget_dead(self) -> None:
        self.made = [(name, one) for name, one in self.made if one() is not None]

    def _make(self, *args: Any, **kwargs: Any) -> Any:
        made = self._plain(*args, **kwargs)
        if isinstance(made[0], dist.ProcessGroup):
            self.made.append((made[0].group_name, weakref.ref(made[0])))
        return made


class Watched:
    """Megatron's groups as they are now, held so that holding them keeps none alive."""

    def __init__(self, births: Births) -> None:
        births.forget_dead()
        live = megatron_groups()
        self.facts = {facts["name"]: facts for facts in map(describe, live)}
        self.members = membership()
        # Handles too: one that nobody has emptied, as in `manual`, holds its group, which must not live on because of this list.
        self.handles = [(describe(g), weakref.ref(g)) for g in live]
        self.inner = [(name, one) for name, one in births.made if name in self.facts]

    def alive(self) -> list[str]:
        """Old groups that something still holds."""
        return [name for name, reference in self.inner if reference() is not None]

    def still_usable(self, *, but_kept: bool = False) -> list[str]:
        """Old groups over which a collective still goes through. The right answer is an error in Python that names the group.
        `but_kept`: not those that were left as they are, on purpose."""
        usable = []
        for facts, held in self.handles:
            group = held()
            if group is None:
                continue  # nobody can use what is gone
            if but_kept and isinstance(group, Handle) and group.kit_inner is not None:
                continue
            try:
                work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
                if work is not None:
                    work.wait(STALE_WAIT)
            except Exception as error:  # noqa: BLE001 - whatever it raises, the question is whether the group is named
                if facts["description"] in str(error):  # its name is a bare number, which any message may hold
                    continue
            usable.append(facts["description"])
            del group
        return usable


def membership() -> dict[str, Any]:
    """Which ranks each of Megatron's names stands for, groups and lists of ranks alike."""
    found: dict[str, Any] = {}
    for name in global_names():
        value = getattr(parallel_state(), name)
        if live := groups_in(value):
            found[name] = [sorted(c10d._world.pg_group_ranks.get(group, {})) for group in live]
        elif "RANKS" in name or "SIZE" in name:
            found[name] = value
    return found


def options(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: facts[key] for key in ("description", "backend", "timeout_s", "options")}


def compare_groups(before: Watched) -> tuple[int, int, list[str]]:
    """(names that stand for other ranks, groups with other options, what differs) against how it was."""
    members = membership()
    moved = sorted(n for n in {*before.members, *members} if before.members.get(n) != members.get(n))
    old = sorted(str((facts["ranks"], options(facts))) for facts in before.facts.values())
    new = sorted(str((facts["ranks"], options(facts))) for facts in map(describe, megatron_groups()))
    changed = sum(1 for facts in old if facts not in new)
    return len(moved), changed, [*moved, *(facts for facts in old if facts not in new)][:5]


def stale_holders(**roots: Any) -> list[str]:
    """Places that hold a group which is dead or was replaced."""
    return [
        f"{holder.path} ({holder.group})" for holder in groups.holders(**roots) if not (holder.alive and holder.current)
    ]


def any_rank(value: bool) -> bool:
    """Whether it is so on any rank; over the default group."""
    flag = torch.tensor([int(value)])
    if "nccl" in dist.get_backend():
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def differences(one: Any, other: Any) -> int:
    """How many entries are not exactly the same, those that only one has included. NaN is never the same."""
    if isinstance(one, list):
        return sum(bool(a != b) for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
    return sum(bool(one.get(key) != other.get(key)) for key in {*one, *other})
