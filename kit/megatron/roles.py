"""Several jobs in one World: inside of `as_world(group)` that group is what torch and Megatron take for the whole world.

Megatron's parallel state is made of all ranks of the default group. Where some ranks train and others serve, each job makes its own
from the group of its ranks, numbered from 0; groups that were made inside keep these numbers. Limits: it holds while the
context is open, on the thread that opened it; a job that asks for the default group later asks the World.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def as_world(group: Any) -> Iterator[None]:
    """The group of this rank's job in place of the default group."""
    world: Any = c10d._world
    if group not in world.pg_map:
        raise BadInput("as_world takes a process group that this rank belongs to and that was not destroyed")
    ranks = world.pg_group_ranks[group]
    plain = world.default_pg
    world.default_pg = group
    world.pg_group_ranks[group] = {place: place for place in range(dist.get_world_size(group))}
    try:
        yield
    finally:
        world.default_pg = plain
        world.pg_group_ranks[group] = ranks
