"""Several jobs in one World: inside of `as_world(group)` that group is what torch and Megatron take for the whole world.

Megatron's parallel state is made of all ranks of the default group. Where some ranks train and others serve, each job makes its own
from the group of its ranks, numbered from 0; groups that were made inside keep these numbers. torch names a group by how many a process
has made, and ranks of other jobs make more or fewer: inside has a count of its own, so that the World's ranks go on agreeing. Limits:
it holds while the context is open, on the thread that opened it; a job that asks for the default group later asks the World.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def as_world(group: Any) -> Iterator[None]:
    """The group of this rank's job in place of the default group."""
    world: Any = c10d._world
    if group not in world.pg_map:
        raise BadInput("as_world takes a process group that this rank belongs to and that was not destroyed")
    ranks = world.pg_group_ranks[group]
    plain, count = world.default_pg, world.group_count
    # The same number on all of its ranks, far from other groups' numbers.
    world.group_count = _counts.get(group, zlib.crc32(world.pg_names[group].encode()) * 10**6)
    world.default_pg = group
    world.pg_group_ranks[group] = {place: place for place in range(dist.get_world_size(group))}
    try:
        yield
    finally:
        _counts[group], world.group_count = world.group_count, count
        world.default_pg = plain
        world.pg_group_ranks[group] = ranks
