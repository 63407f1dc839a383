"""Find all references to process groups that are reachable from given roots, and whether each group is alive.

The walk follows attributes, items, closures and bound arguments. Limits: references held only in C++ are not seen; weak references are not
followed.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
import torch.distributed as dist

from kit.megatron.handles import Handle, c10d, groups_in, megatron_globals, parallel_state

_LEAVES = (torch.Tensor, str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A reference to a group: its path, the group, whether the group is registered and usable (`alive`), and whether Megatron uses it
    now (`current`; false for one that was replaced but kept)."""

    path: str
    group: str
    alive: bool
    current: bool


def holders(**roots: Any) -> list[Holder]:
    """Return every reference to a process group that is reachable from the roots and from Megatron's globals."""
    found: list[Holder] = []
    seen: set[int] = set()
    replaced = {
        _identity(group): group for name in megatron_globals() for group in groups_in(getattr(parallel_state(), name))
    }
    globals_ = {name: getattr(parallel_state(), name) for name in megatron_globals()}
    todo: list[tuple[str, Any]] = [("parallel_state", globals_), *roots.items()]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dist.ProcessGroup):
            living = value in c10d._world.pg_map and (not isinstance(value, Handle) or value.kit_inner is not None)
            current = living and replaced.get(_identity(value), value) is value
            found.append(Holder(path=path, group=value.group_desc, alive=living, current=current))
        elif not isinstance(value, _LEAVES) and id(value) not in seen:
            seen.add(id(value))
            todo += [(f"{path}.{key}", child) for key, child in _children(value)]
    return sorted(found, key=lambda h: h.path)


def _identity(group: Any) -> tuple[str, tuple[int, ...]]:
    """A group's purpose as description and ranks: groups with equal values differ only in when they were made."""
    ranks = group.kit_facts["ranks"] if isinstance(group, Handle) else c10d._world.pg_group_ranks.get(group, ())
    return str(group.group_desc), tuple(ranks)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(key)[:60], child) for key, child in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return [(f"closure{i}", c.cell_contents) for i, c in enumerate(cells) if c != types.CellType()]
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    named = [(name, getattr(value, name)) for name in slots if isinstance(name, str) and hasattr(value, name)]
    return [*named, *vars(value).items()] if hasattr(value, "__dict__") else named
