"""torch's backend `nccl2` (`torch.distributed.ProcessGroupNCCL2`, in builds after 2.13): whether it is there, and groups made by it.

Under a bound default group every rank of the World takes part when torch makes a communicator, also those outside of the group, which
this backend's first builds cannot do in `new_group` (pytorch/pytorch#192276). So groups are split off WORLD with
`torch.distributed.split_group`, which makes all groups of a partition at once: as many calls as Megatron has kinds of groups, and not
as many as it has groups. What is asked for is learnt from a rehearsal, which makes none. Groups over gloo are made by their members.

Every room may use it, and ranks do; it imports torch only where it is used. Read off pytorch/pytorch#188587 and #190943 and the routing
of NVIDIA/Megatron-LM#6227. No torch with this backend, and no GPU, has run it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kit.nccl import unbound

NAME = "nccl2"
FLAG = "KIT_NCCL2"  # in the environment of ranks that are to use it
WORLD = f"cpu:gloo,cuda:{NAME}"
LACKS = "this torch has no backend nccl2"


REHEARSED = object()  # stands for a group in a rehearsal


class Asked(NamedTuple):
    """One call of `new_group` for a group with a communicator. `how` are its settings, alike for all groups of a partition."""

    ranks: tuple[int, ...]
    how: tuple[Any, ...]


@dataclass
class Partition:
    """Groups that share no rank, made by one call."""

    groups: list[tuple[int, ...]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)  # this rank's group, once it is made


@dataclass
class State:
    """Of this process: the calls of a rehearsal that is under way, or the partitions that it found and the groups made of them."""

    plain: Any = None
    calls: list[Asked] | None = None
    expected: list[tuple[Asked, Partition]] = field(default_factory=list)


state = State()


def requested() -> bool:
    return os.environ.get(FLAG, "") == "1"


def available() -> bool:
    import torch.distributed as dist

    return hasattr(dist, "ProcessGroupNCCL2")


def partitions(calls: Sequence[Asked]) -> list[Partition]:
    """For each call the partition that its group is of: the first with the same settings and none of its ranks."""
    found: list[tuple[tuple[Any, ...], Partition]] = []
    of_calls = []
    for call in calls:
        taken = (one for how, one in found if how == call.how and set(call.ranks).isdisjoint(set().union(*one.groups)))
        partition = next(taken, None)
        if partition is None:
            partition = Partition()
            found.append((call.how, partition))
        partition.groups.append(call.ranks)
        of_calls.append(partition)
    return of_calls


def install() -> None:
    """Make groups by splitting WORLD from now on. Where it was not asked for, nothing is touched."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as module

    c10d: Any = module
    if not requested() or state.plain is not None:
        return
    state.plain = c10d.new_group
    signature = inspect.signature(state.plain)

    @functools.wraps(state.plain)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return made(c10d, call.arguments)

    c10d.new_group = dist.new_group = new_group


def made(c10d: Any, given: dict[str, Any]) -> Any:
    ranks = tuple(range(c10d.get_world_size()) if given["ranks"] is None else sorted(given["ranks"]))
    mine = c10d.get_rank() in ranks
    backend = str(given["backend"] or WORLD).lower()
    call = Asked(ranks, (backend, given["timeout"], given["pg_options"] is None, given["group_desc"]))
    if state.calls is not None:
        if "nccl" in backend:
            state.calls.append(call)
        return REHEARSED if mine else c10d.GroupMember.NON_GROUP_MEMBER
    if "nccl" not in backend:
        with unbound(c10d._get_default_group()):
            return state.plain(**given)
    if state.expected:
        expected, partition = state.expected.pop(0)
        if expected != call:
            raise RuntimeError(
                f"a group of ranks {list(ranks)} was asked for where {list(expected.ranks)} was rehearsed"
            )
    else:
        (partition,) = partitions([call])
    if not partition.made:
        partition.made.append(split(c10d, partition, given, backend))
    return partition.made[0] if mine else c10d.GroupMember.NON_GROUP_MEMBER


def split(c10d: Any, partition: Partition, given: dict[str, Any], backend: str) -> Any:
    """All groups of a partition. What was asked for without a backend has WORLD's, for the host as well."""
    return c10d.split_group(
        split_ranks=[list(ranks) for ranks in partition.groups],
        timeout=given["timeout"],
        pg_options=given["pg_options"],
        group_desc=given["group_desc"],
        backend=None if backend == WORLD else f"cuda:{NAME}",
    )


def planned(act: Callable[[], None], undo: Callable[[], None]) -> None:
    """Run what makes groups, such that each partition is one split: once as a rehearsal, which `undo` takes back, and once for real."""
    state.calls = []
    try:
        act()
    finally:
        calls, state.calls = state.calls, None
        undo()
    state.expected = list(zip(calls, partitions(calls), strict=True))
    try:
        act()
    finally:
        state.expected = []


def describe() -> dict[str, Any]:
    """As `kit.routing.describe` for torchcomms: what was asked for and is in effect, for WORLD and for all groups."""
    import torch.distributed.distributed_c10d as module

    c10d: Any = module
    kinds = {group: kind(group) for group in c10d._world.pg_map}
    world = kinds.get(c10d._world.default_pg, "")
    over_gpus = [one for one in kinds.values() if one]
    effective = world == "ProcessGroupNCCL2"
    reason = "" if effective else "WORLD has no nccl2" if available() else LACKS
    return {
        "requested": requested(),
        "importable": available(),
        "effective": effective,
        "backends": sorted(set(over_gpus)),
        "groups": len(over_gpus),
        "groups_effective": over_gpus.count("ProcessGroupNCCL2"),
        "options_lost": [],
        "reason": reason,
        "why": reason or None,
    }


def kind(group: Any) -> str:
    devices = {getattr(device, "type", str(device)): device for device in group._device_types}
    return type(group._get_backend(devices["cuda"])).__name__ if "cuda" in devices else ""
