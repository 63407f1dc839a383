"""A handle that stands in for every process group, so that the group behind it can be destroyed and come back; and a snapshot of them.

`install()` wraps `torch.distributed.new_group` and the default group. It returns a `Handle`: a ProcessGroup that forwards every use to the
group inside. Layers, buckets, optimizers and collections keep the handle; a reload puts a new group into the same handle, so nobody
has to be re-pointed. The handle, not the inner group, is the key in torch's registry, so censuses and plain
`destroy_process_group(handle)` behave as with any group. Limit: groups made before `install()` (other than the default one) stay plain and
cannot be released exactly.

A snapshot is plain JSON: the groups of this rank in the order of their creation, with ranks, backend, timeout, options and description,
and every global of `parallel_state` by name, group or not. Scratch buffers are named, not kept.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d

from kit import routing
from kit.errors import KitError
from kit.nccl import unbound

c10d: Any = _c10d  # torch's registry of groups; its tables and helpers carry no types
WORLD = "WORLD"


class GroupReleased(KitError):  # noqa: N818 - a state, not a mistake of the kit
    """A process group was used while it was destroyed."""


class Handle(dist.ProcessGroup):
    """A process group by reference. `kit_inner` is the living group, or None while released."""

    # The handle answers these itself; every other attribute is the living group's.
    OWN = frozenset({"__class__", "__dict__", "kit_inner", "kit_facts", "__weakref__"})

    def __init__(self, inner: dist.ProcessGroup, *, ranks: list[int], maker: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # the other constructor
        self.__dict__["kit_inner"] = inner
        self.__dict__["kit_facts"] = {
            "name": inner.group_name,
            "description": inner.group_desc,
            "ranks": ranks,
            "rank": ranks[inner.rank()],
            "maker": maker,
        }
        state.made.add(self)

    def __getattribute__(self, name: str) -> Any:
        if name in Handle.OWN:
            return object.__getattribute__(self, name)
        own = object.__getattribute__(self, "__dict__")
        inner = own["kit_inner"]
        if inner is None:
            facts = own["kit_facts"]
            if name == "group_name":
                return facts["name"]
            if name == "group_desc":
                return facts["description"]
            raise GroupReleased(
                f"process group {title(facts)} is released: reload the groups before using it ({name!r} was asked for)"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kit_inner":
            self.__dict__[name] = value
        else:
            setattr(self.__dict__["kit_inner"], name, value)

    def __repr__(self) -> str:
        own = self.__dict__
        # torch puts this into its own errors when a released group is used, so it says what to do.
        released = ": released, reload the groups before using it" if own["kit_inner"] is None else ""
        return f"<Handle of process group {title(own['kit_facts'])}{released}>"


def title(facts: dict[str, Any]) -> str:
    """A group in words: description, name and ranks."""
    return f"{facts['description']} (name {facts['name']!r}, ranks {facts['ranks']})"


class _State:
    installed: ClassVar[list[tuple[Any, str, Any, Any]]] = []  # (owner, name, value before, value now)
    generation = 0
    store: Any = None  # the default group's own store, from which every generation takes a prefix
    init_arguments: dict[str, Any] | None = None  # what initialize_model_parallel was last called with
    made: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # all handles


state = _State()


def _registry() -> tuple[dict[Any, Any], ...]:
    world = c10d._world
    return (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)


def rekey(old: Any, new: Any) -> None:
    """Make `new` the key under which torch's registry knows the group `old`."""
    for table in _registry():
        if old in table:
            # The order of torch's tables is the order of creation, in which groups are destroyed and made again.
            same_order = {new if key is old else key: value for key, value in table.items()}
            table.clear()
            table.update(same_order)
    for tagged in c10d._world.tags_to_pg.values():
        for index, handle in enumerate(tagged):
            if handle is old:
                tagged[index] = new
    if c10d._world.default_pg is old:
        c10d._world.default_pg = new


def forget(handle: Handle) -> None:
    """Take a handle out of torch's registry, as destroy_process_group does, but without touching the group."""
    for table in _registry():
        table.pop(handle, None)
    for tagged in c10d._world.tags_to_pg.values():
        tagged[:] = [group for group in tagged if group is not handle]
    c10d._world.pg_coalesce_state.pop(handle, None)
    c10d._unregister_process_group(handle.group_name)


def adopt(group: dist.ProcessGroup, *, maker: str) -> Handle:
    """A handle for a registered plain group, put in its place in torch's registry."""
    ranks = c10d._world.pg_group_ranks[group]
    handle = Handle(group, ranks=sorted(ranks, key=ranks.__getitem__), maker=maker)
    rekey(group, handle)
    return handle


def registered() -> list[Any]:
    """Every group that torch has in its registry now, in the order of creation."""
    return list(c10d._world.pg_map)


def install() -> None:
    """From now on, new groups are handles. Needs an initialised torch.distributed; a repeated call changes nothing."""
    default = c10d._world.default_pg
    if default is not None and not isinstance(default, Handle):
        state.store = c10d._world.pg_map[default][1]
        redirect_defaults(default, adopt(default, maker=WORLD))
    if state.installed:
        return
    plain = c10d.new_group
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        asked = str(signature.bind(*args, **kwargs).arguments.get("backend")).lower()
        # Under a default group that is bound to its device torch has the ranks outside of a group over gloo split NCCL's communicator
        # all the same, which waits for those inside (pytorch/pytorch#145376).
        with unbound(c10d._world.default_pg) if asked in {"gloo", "cpu:gloo"} else contextlib.nullcontext():
            group = plain(*args, **kwargs)
        # Another wrapper of new_group may sit inside or outside of this one: only a plain, registered group is adopted.
        if isinstance(group, dist.ProcessGroup) and not isinstance(group, Handle) and group in c10d._world.pg_map:
            return adopt(group, maker=str(sys._getframe(1).f_globals.get("__name__", "")))
        return group

    _replace(c10d, "new_group", new_group)
    _replace(dist, "new_group", new_group)
    _send_batches_whole()
    _remember_arguments()


def uninstall() -> None:
    """New groups are plain again, and so is the default group. Existing handles stay valid."""
    while state.installed:
        owner, name, old, new = state.installed.pop()
        if getattr(owner, name) is new:
            setattr(owner, name, old)
    default = c10d._world.default_pg
    if isinstance(default, Handle):
        inner = default.kit_inner
        rekey(default, inner)
        redirect_defaults(default, inner)


def _replace(owner: Any, name: str, new: Any) -> None:
    state.installed.append((owner, name, getattr(owner, name), new))
    setattr(owner, name, new)


def all_functions() -> list[types.FunctionType]:
    """Those that a walk over all objects finds; and, where such walks pass over what was imported before, those of modules and classes."""
    # Asked by type: `isinstance` would ask proxies for their class, which may warn or raise.
    found = {id(kept): kept for kept in gc.get_objects() if type(kept) is types.FunctionType}
    if not gc.get_freeze_count():
        return [*found.values()]
    modules = [dict(vars(module)) for module in [*sys.modules.values()] if issubclass(type(module), types.ModuleType)]
    classes = [dict(vars(kind)) for names in modules for kind in names.values() if issubclass(type(kind), type)]
    waiting = [value for names in (*modules, *classes) for value in names.values()]
    while waiting:
        value = waiting.pop()
        if type(value) is types.FunctionType and id(value) not in found:
            found[id(value)] = value
            waiting.append(getattr(value, "__wrapped__", None))
    return [*found.values()]


def redirect_defaults(old: Any, new: Any) -> None:
    """Modules imported after the default group came (torch.distributed.nn is one) hold it in their functions' defaults."""
    for function in all_functions():
        if function.__defaults__ and any(default is old for default in function.__defaults__):
            function.__defaults__ = tuple(new if default is old else default for default in function.__defaults__)


def _send_batches_whole() -> None:
    """torch sends a batch as one only over groups that are of the type ProcessGroup itself. Over NCCL a batch in pieces can stop for
    ever: both ends send before either receives. So it is given the groups inside."""
    plain = c10d.batch_isend_irecv

    @functools.wraps(plain)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        ours = [(op, op.group) for op in p2p_op_list if isinstance(getattr(op, "group", None), Handle)]
        for op, handle in ours:
            handle.size()  # raises by name where it is released
            op.group = handle.kit_inner
        try:
            return plain(p2p_op_list)
        finally:
            for op, handle in ours:
                op.group = handle

    _replace(c10d, "batch_isend_irecv", batch_isend_irecv)
    _replace(dist, "batch_isend_irecv", batch_isend_irecv)


def back_to(module: Any) -> Callable[[], None]:
    """Return a function that restores a module's globals to their present values."""
    before = {
        name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in vars(module).items()
    }

    def undo() -> None:
        for name in vars(module).keys() - before.keys():
            delattr(module, name)
        vars(module).update(before)

    return undo


def _remember_arguments() -> None:
    """Record the arguments of Megatron's initialisation: the modes that rebuild through Megatron need them again."""
    module = parallel_state()
    plain = module.initialize_model_parallel
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        state.init_arguments = dict(signature.bind(*args, **kwargs).arguments)
        act = functools.partial(plain, *args, **kwargs)
        if routing.requested(routing.NCCL2):
            routing.planned(act, undo=back_to(module))
        else:
            act()

    _replace(module, "initialize_model_parallel", initialize_model_parallel)


_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def parallel_state() -> Any:
    from megatron.core import parallel_state as module

    return module


def initialised() -> bool:
    return dist.is_initialized() and bool(parallel_state().model_parallel_is_initialized())


def megatron_globals() -> dict[str, Any]:
    """The module's state: private names that hold data. Functions, classes and modules are not state."""
    return {
        name: value
        for name, value in vars(parallel_state()).items()
        if name.startswith("_") and not name.startswith("__") and not isinstance(value, _CODE)
    }


def groups_in(value: Any) -> list[Any]:
    """Every process group inside a global: itself, or in a list, tuple or dict."""
    if isinstance(value, dist.ProcessGroup):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [group for item in items for group in groups_in(item)]


def megatron_groups() -> list[Any]:
    """Every registered group that Megatron made or holds in its globals, in the order of creation, without WORLD."""
    held, default = _held(), c10d._world.default_pg
    made = [group for group in registered() if group is not default]
    return [group for group in made if id(group) in held or maker(group).startswith("megatron.")]


def current_groups() -> list[Any]:
    """The groups that Megatron's globals hold now; groups that were forgotten but not destroyed are not among them."""
    held = _held()
    return [group for group in megatron_groups() if id(group) in held]


def _held() -> set[int]:
    return {id(group) for group in groups_in(megatron_globals())}


def maker(group: Any) -> str:
    """The module that asked for the group; empty for a plain one."""
    return str(group.kit_facts["maker"]) if isinstance(group, Handle) else ""


def snapshot(*, include_world: bool = False) -> dict[str, Any]:
    """Record the present groups and globals; empty when Megatron is not initialised."""
    if not initialised():
        return {}
    groups = [g for g in registered() if g is not c10d._world.default_pg] if include_world else megatron_groups()
    index = {id(group): number for number, group in enumerate(groups)}
    default = c10d._world.default_pg
    return {
        "groups": [describe_group(group) for group in groups],
        "globals": {name: _encode(value, index) for name, value in megatron_globals().items()},
        "world": describe_group(default) if include_world else None,
        "group_count": c10d._world.group_count,
        "init_arguments": {
            k: v for k, v in (state.init_arguments or {}).items() if isinstance(v, int | float | str | list | None)
        },
    }


def describe_group(group: Any) -> dict[str, Any]:
    """Return everything that is needed to make one group again."""
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
        "options": {device: backend["options"] for device, backend in backends.items()},
        "tag": world.pg_to_tag.get(group),
        "bound_device": str(bound) if bound is not None else None,
        "maker": maker(group) or WORLD,
    }


def _backend(group: Any, device: Any) -> dict[str, Any]:
    options = routing.made_with(group) or group._get_backend(torch.device(device)).options
    plain: dict[str, Any] = {}
    if hasattr(options, "config"):
        plain["is_high_priority_stream"] = bool(options.is_high_priority_stream)
        plain["config"] = _settings(options.config)
    return {"timeout_s": options._timeout.total_seconds(), "options": plain}


def _settings(config: Any) -> dict[str, int | str | None]:
    """Return every setting of NCCL's configuration that this torch shows; each version shows more."""
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
    """Rebuild a global's value from its plain form, with living groups and new scratch buffers."""
    if isinstance(value, list):
        return [decode(item, groups) for item in value]
    if not isinstance(value, dict):
        return value
    if "group" in value:
        return groups[value["group"]]
    if "items" in value:
        return {key: decode(item, groups) for key, item in value["items"]}
    return getattr(parallel_state(), value["scratch"])()
