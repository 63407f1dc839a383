"""What Megatron's groups and globals look like, as plain JSON: enough to make every group again as it was.

A snapshot lists the groups of this rank in the order of their creation with ranks, backend, timeout, options and
description, and every global of `parallel_state` by name, group or not. Scratch buffers are named, not kept.
"""

from __future__ import annotations

import datetime as dt
import types
from typing import Any

import torch
import torch.distributed as dist

from kit import routing
from kit.megatron.groups.handle import WORLD, Handle, c10d, registered, state

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def parallel_state() -> Any:
    """The one module that holds Megatron's groups."""
    from megatron.core import parallel_state as module

    return module


def initialised() -> bool:
    """Whether Megatron's model parallel groups exist in this process."""
    return dist.is_initialized() and bool(parallel_state().model_parallel_is_initialized())


def global_names() -> list[str]:
    """The module's state: private names whose value is data. Functions, classes and modules are not state."""
    return [
        name
        for name, value in vars(parallel_state()).items()
        if name.startswith("_") and not name.startswith("__") and not isinstance(value, _CODE)
    ]


def groups_in(value: Any) -> list[Any]:
    """Every process group inside a global: itself, or in a list, tuple or dict."""
    if isinstance(value, dist.ProcessGroup):
        return [value]
    if isinstance(value, dict):
        return [each for item in value.values() for each in groups_in(item)]
    if isinstance(value, list | tuple):
        return [each for item in value for each in groups_in(item)]
    return []


def megatron_groups() -> list[Any]:
    """Every registered group that Megatron made or holds in its globals, in the order of creation, without WORLD."""
    held = _held()
    default = c10d._world.default_pg
    return [
        group
        for group in registered()
        if group is not default and (id(group) in held or maker(group).startswith("megatron."))
    ]


def current_groups() -> list[Any]:
    """Those that Megatron's globals hold now, so that none is among them that was forgotten and not destroyed."""
    held = _held()
    return [group for group in megatron_groups() if id(group) in held]


def _held() -> set[int]:
    return {id(g) for name in global_names() for g in groups_in(getattr(parallel_state(), name))}


def maker(group: Any) -> str:
    """The module that asked for the group; empty for a plain one."""
    return str(group.kit_facts["maker"]) if isinstance(group, Handle) else ""


def snapshot(*, include_world: bool = False) -> dict[str, Any]:
    """The groups and globals as they are now; empty when Megatron is not initialised."""
    if not initialised():
        return {}
    groups = [g for g in registered() if g is not c10d._world.default_pg] if include_world else megatron_groups()
    index = {id(group): number for number, group in enumerate(groups)}
    default = c10d._world.default_pg
    names = {name: _encode(getattr(parallel_state(), name), index) for name in global_names()}
    return {
        "groups": [describe(group) for group in groups],
        "globals": names,
        "world": describe(default) if include_world else None,
        "group_count": c10d._world.group_count,
        "init_arguments": {
            k: v for k, v in (state.init_arguments or {}).items() if isinstance(v, int | float | str | list | None)
        },
    }


def describe(group: Any) -> dict[str, Any]:
    """One group: everything that is needed to make it again."""
    world = c10d._world
    ranks = world.pg_group_ranks[group]
    backends = {str(device): _backend(group, device) for device in group._device_types}
    bound = group.bound_device_id
    return {
        "name": world.pg_names[group],
        "description": group.group_desc,
        "ranks": sorted(ranks, key=ranks.__getitem__),
        "backend": str(world.pg_map[group][0]),
        "timeout_s": next(iter(backends.values()))["timeout_s"],
        "options": {device: each["options"] for device, each in backends.items()},
        "tag": world.pg_to_tag.get(group),
        "bound_device": str(bound) if bound is not None else None,
        "maker": maker(group) or WORLD,
    }


def _backend(group: Any, device: Any) -> dict[str, Any]:
    options = routing.settings(group) or group._get_backend(torch.device(device)).options
    plain: dict[str, Any] = {}
    if hasattr(options, "config"):
        plain["is_high_priority_stream"] = bool(options.is_high_priority_stream)
        plain["config"] = _settings(options.config)
    return {"timeout_s": options._timeout.total_seconds(), "options": plain}


def _settings(config: Any) -> dict[str, int | str | None]:
    """All that this torch shows of NCCL's configuration, which is more with every version."""
    shown = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    return {name: value for name, value in shown.items() if not callable(value)}


def make_options(plain: dict[str, dict[str, Any]], timeout_s: float) -> Any:
    """NCCL options from their plain form; None where the backend takes none (gloo)."""
    for options in plain.values():
        if options:
            made: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options["is_high_priority_stream"])
            for key, value in options["config"].items():
                if value is not None:
                    setattr(made.config, key, value)
            made._timeout = dt.timedelta(seconds=timeout_s)
            return made
    return None


def _encode(value: Any, index: dict[int, int]) -> Any:
    if id(value) in index:
        return {"group": index[id(value)]}
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(item, index) for item in value]
    if isinstance(value, dict):
        return {"items": [[key, _encode(item, index)] for key, item in value.items()]}
    return {"scratch": type(value).__name__}


def decode(value: Any, groups: list[Any]) -> Any:
    """A global's value from its plain form, with living groups in it and fresh scratch buffers."""
    if isinstance(value, list):
        return [decode(item, groups) for item in value]
    if not isinstance(value, dict):
        return value
    if "group" in value:
        return groups[value["group"]]
    if "items" in value:
        return {key: decode(item, groups) for key, item in value["items"]}
    return getattr(parallel_state(), value["scratch"])()
