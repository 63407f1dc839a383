"""A handle that stands in for every process group, so that the group behind it can be destroyed and come back.

`install()` wraps `torch.distributed.new_group` and the default group. What it hands out is a `Handle`: a ProcessGroup
whose every use goes to the group inside. Layers, buckets, optimizers and collections keep the handle; a reload puts a
new group into the same handle, so nobody has to be re-pointed. The handle, not the inner group, is the key in torch's
registry, so censuses and plain `destroy_process_group(handle)` behave as with any group. Limit: groups made before
`install()` (other than the default one) stay plain and cannot be released exactly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d

from kit import nccl2
from kit.errors import KitError
from kit.nccl import unbound

if TYPE_CHECKING:
    from collections.abc import Callable

c10d: Any = _c10d  # torch's registry of groups; its tables and helpers carry no types
WORLD = "WORLD"


class GroupReleased(KitError):  # noqa: N818 - a state, not a mistake of the kit
    """A process group was used while it was destroyed."""


class Handle(dist.ProcessGroup):
    """A process group by reference. `kit_inner` is the living group, or None while released."""

    # Answered by the handle itself; everything else belongs to the living group.
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

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def title(facts: dict[str, Any]) -> str:
    """A group in words: description, name and ranks."""
    return f"{facts['description']} (name {facts['name']!r}, ranks {facts['ranks']})"


class _State:
    """What a process knows of its handles; one per process."""

    installed: ClassVar[list[tuple[Any, str, Any, Any]]] = []  # (owner, name, what was there, what is there now)
    generation = 0
    store: Any = None  # the default group's own store, from which every generation takes a prefix
    init_arguments: dict[str, Any] | None = None  # what initialize_model_parallel was last called with


state = _State()


def _registry() -> tuple[dict[Any, Any], ...]:
    world = c10d._world
    return (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)


def rekey(old: Any, new: Any) -> None:
    """Make `new` the key under which torch's registry knows the group `old`."""
    for table in _registry():
        if old in table:
            same_order = {new if key is old else key: value for key, value in table.items()}
            table.clear()
            table.update(same_order)
    for tagged in c10d._world.tags_to_pg.values():
        for index, each in enumerate(tagged):
            if each is old:
                tagged[index] = new
    if c10d._world.default_pg is old:
        c10d._world.default_pg = new


def forget(handle: Handle) -> None:
    """Take a handle out of torch's registry, as destroy_process_group does, but without touching the group."""
    for table in _registry():
        table.pop(handle, None)
    for tagged in c10d._world.tags_to_pg.values():
        tagged[:] = [each for each in tagged if each is not handle]
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
    """Hand out handles from now on. Needs an initialised torch.distributed; repeating it changes nothing."""
    adopt_world()
    if state.installed:
        return
    plain = c10d.new_group
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments.get("backend")
        with unbound(c10d._world.default_pg) if over_gloo(asked) else contextlib.nullcontext():
            group = plain(*args, **kwargs)
        # Another wrapper of new_group may sit inside or outside of this one: only a plain, registered group is adopted.
        if isinstance(group, dist.ProcessGroup) and not isinstance(group, Handle) and group in c10d._world.pg_map:
            return adopt(group, maker=str(sys._getframe(1).f_globals.get("__name__", "")))
        return group

    _replace(c10d, "new_group", new_group)
    _replace(dist, "new_group", new_group)
    _send_batches_whole()
    _remember_arguments()


def over_gloo(backend: Any) -> bool:
    """Whether a group is to have nothing of NCCL. Under a default group that is bound to its device torch has those outside of it split
    NCCL's communicator all the same, which waits for those inside (pytorch/pytorch#145376)."""
    return str(backend).lower() in {"gloo", "cpu:gloo"}


def uninstall() -> None:
    """Hand out plain groups again, and give the default group its place back. Handles that are out stay good."""
    while state.installed:
        owner, name, old, new = state.installed.pop()
        if getattr(owner, name) is new:
            setattr(owner, name, old)
    default = c10d._world.default_pg
    if isinstance(default, Handle):
        inner = default.kit_inner
        rekey(default, inner)
        _redirect_defaults(default, inner)


def _replace(owner: Any, name: str, new: Any) -> None:
    state.installed.append((owner, name, getattr(owner, name), new))
    setattr(owner, name, new)


def adopt_world() -> None:
    """Put the default group behind a handle, if there is one and it is plain."""
    default = c10d._world.default_pg
    if default is not None and not isinstance(default, Handle):
        state.store = c10d._world.pg_map[default][1]
        _redirect_defaults(default, adopt(default, maker=WORLD))


def _redirect_defaults(old: Any, new: Any) -> None:
    """Modules imported after the default group came (torch.distributed.nn is one) hold it in their functions' defaults."""
    for function in [each for each in gc.get_objects() if type(each) is types.FunctionType]:
        if function.__defaults__ and any(each is old for each in function.__defaults__):
            function.__defaults__ = tuple(new if each is old else each for each in function.__defaults__)


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
    """What puts a module's globals back as they are now."""
    before = {
        name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in vars(module).items()
    }

    def undo() -> None:
        for name in vars(module).keys() - before.keys():
            delattr(module, name)
        vars(module).update(before)

    return undo


def _remember_arguments() -> None:
    """Keep what Megatron was initialised with: the modes that rebuild through Megatron need it again."""
    from megatron.core import parallel_state

    plain = parallel_state.initialize_model_parallel
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        state.init_arguments = dict(signature.bind(*args, **kwargs).arguments)
        act = functools.partial(plain, *args, **kwargs)
        if nccl2.requested():
            nccl2.planned(act, undo=back_to(parallel_state))
        else:
            act()

    _replace(parallel_state, "initialize_model_parallel", initialize_model_parallel)
