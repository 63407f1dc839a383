"""Process groups, found when they are made rather than in somebody's list; and functions of other modules that were replaced.

`Births` hooks the constructors of torch's own group and backend classes: `new_group`, `init_process_group`, a raw `ProcessGroupGloo(...)`
and a wrapper's `super().__init__` all call them. Groups that C++ makes (`split_group`) are taken from torch's tables. References are
weak, so that watching keeps nothing alive.

A group is identified by what a collective over it reaches: `reach` starts one and stops it before anything is sent. So a wrapper, a
handle and a plain group are treated alike, and a destroyed group that silently falls back to WORLD is found.
Limit: a group that only C++ refers to is not seen here; its sockets and threads are counted with every phase.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

BACKENDS = ("ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupMPI", "ProcessGroupUCC", "ProcessGroupXCCL")


class ReachedError(Exception):
    """Raised in place of a collective, by the group that would have run it."""

    def __init__(self, group: Any) -> None:
        super().__init__("a collective was stopped before it was sent")
        self.group = group


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d


@functools.cache
def _classes() -> tuple[Any, ...]:
    """ProcessGroup, and the backends that this torch was built with."""
    from torch._C import _distributed_c10d as core

    return (core.ProcessGroup, *(getattr(core, name) for name in BACKENDS if hasattr(core, name)))


def is_group(value: Any) -> bool:
    """Whether an object is a process group or stands for one: a subclass, or something that keeps a group and forwards to it."""
    kind = type(value)  # never isinstance: an object that forwards everything forwards __class__ too
    if issubclass(kind, _classes()):
        return True
    if not hasattr(kind, "__getattr__") or not any(
        issubclass(type(held), _classes()) for held in attributes(value).values()
    ):
        return False
    try:
        return callable(value.allreduce)
    except Exception:  # noqa: BLE001 - a stranger's class may raise anything for a name that it does not have
        return False


def is_real(value: Any) -> bool:
    """Whether an object is one of torch's own groups, and not a wrapper."""
    return type(value) in _classes()


def attributes(value: Any) -> dict[str, Any]:
    """An object's own attributes, whatever its class makes of looking them up."""
    try:
        namespace = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return namespace if isinstance(namespace, dict) else {}


@dataclass
class Births:
    """Every group that is made while this is entered. `alive()` are those of torch's own that something still refers to."""

    made: list[weakref.ref[Any]] = field(default_factory=list)
    _before: list[weakref.ref[Any]] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> Births:
        self._before = [weakref.ref(group) for group in registered_groups()]
        for kind in _classes():
            self._hook(kind)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def look(self) -> None:
        """Add groups of torch's tables that no constructor made, and forget those that are gone."""
        self.made = [reference for reference in self.made if reference() is not None]
        known = {id(reference()) for reference in (*self.made, *self._before)}
        self.made += [weakref.ref(group) for group in registered_groups() if is_real(group) and id(group) not in known]

    def alive(self) -> list[Any]:
        """torch's own groups made here that are still there."""
        self.look()
        return [group for reference in self.made if (group := reference()) is not None and is_real(group)]

    def _hook(self, kind: Any) -> None:
        plain = vars(kind)["__init__"]  # not by attribute: torch's own come bound to nothing, and could not be put back

        def __init__(group: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes this method's place
            plain.__get__(group)(*args, **kwargs)
            self.made.append(weakref.ref(group))

        kind.__init__ = __init__
        self._undo.append(functools.partial(setattr, kind, "__init__", plain))


def registered_groups() -> list[Any]:
    """Every group in torch's tables, in the order of registration."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if c10d is None else list(c10d._world.pg_map)


@contextlib.contextmanager
def doors() -> Iterator[None]:
    """Inside, an all-reduce over any of torch's groups on this thread raises `ReachedError` in place of running."""
    thread = threading.get_ident()
    undo: list[tuple[Any, Any]] = []

    def closed(plain: Any) -> Any:
        def allreduce(group: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise ReachedError(group)
            return plain(group, *args, **kwargs)

        return allreduce

    for kind in dict.fromkeys(base for group_class in _classes() for base in group_class.__mro__):
        if "allreduce" in vars(kind):
            undo.append((kind, vars(kind)["allreduce"]))
            kind.allreduce = closed(vars(kind)["allreduce"])
    try:
        yield
    finally:
        for kind, plain in undo:
            kind.allreduce = plain


def reach(group: Any) -> Any:
    """The group of torch's that a collective over this object would run over. Raises what the object raises where it would not
    run. Only inside `doors()`."""
    import torch
    import torch.distributed as dist

    try:
        dist.all_reduce(torch.zeros(1), group=group)  # by its name at this moment: others may have replaced it
    except Exception as error:
        # torch's logger asks for more of a group that has raised, and a wrapper in no table makes it raise once more.
        for link in chain(error):
            if isinstance(link, ReachedError):
                return link.group
        raise
    raise RuntimeError("a collective over it returned and ran over no process group")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised on top of, as a traceback shows them."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def world() -> Any:
    """The group that a collective without a group runs over; None where torch.distributed is not initialised."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    with doors():
        return reach(_c10d()._world.default_pg)


def names_ahead() -> list[str]:
    """Names that torch, which counts groups, would give to later ones, and that groups have already: making those would raise."""
    tables = _c10d()._world
    names = [str(name) for name in tables.pg_names.values()]
    return sorted((name for name in names if name.isdecimal() and int(name) >= tables.group_count), key=int)


def group_facts(group: Any) -> dict[str, Any]:
    """What a group was made with, as torch reports it: description, backends, timeout, options by device."""
    backends = {}
    for device in sorted(group._device_types, key=str):
        backend = group._get_backend(device)
        options = backend.options
        plain: dict[str, Any] = {"backend": type(backend).__name__, "timeout_s": options._timeout.total_seconds()}
        if hasattr(options, "config"):
            plain["is_high_priority_stream"] = bool(options.is_high_priority_stream)
            shown = {name: getattr(options.config, name) for name in dir(options.config) if not name.startswith("_")}
            plain |= {name: value for name, value in shown.items() if not callable(value)}
        backends[str(device)] = plain
    return {"description": str(group.group_desc), "bound": str(group.bound_device_id), "backends": backends}


_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_DATA = (int, float, str, bytes, type(None), tuple, list, dict, set, frozenset)


class Name(NamedTuple):
    """A name in a module, or of a class in it."""

    owner: Any
    name: str
    value: Any


Names = dict[str, Name]


def take_names(*prefixes: str) -> Names:
    """Every function and class in the loaded modules of these packages, and every method of their classes, by dotted name."""
    names: Names = {}
    classes: dict[int, str] = {}
    for module in _modules(prefixes):
        for name, value in list(vars(module).items()):
            if issubclass(type(value), (*_FUNCTIONS, type)):  # isinstance would wake names that warn of their end
                names[f"{module.__name__}.{name}"] = Name(module, name, value)
            if issubclass(type(value), type) and str(value.__module__).startswith((*prefixes, "torch._C")):
                title = classes.setdefault(id(value), f"{module.__name__}.{name}")
                for member, attribute in list(vars(value).items()):
                    if not isinstance(attribute, _DATA):
                        names.setdefault(f"{title}.{member}", Name(value, member, attribute))
    return names


def replaced_names(before: Names) -> list[str]:
    """Names with another value now, or gone. Modules loaded since are ignored."""
    missing = object()
    return [title for title, name in before.items() if vars(name.owner).get(name.name, missing) is not name.value]


def _modules(prefixes: tuple[str, ...]) -> list[ModuleType]:
    inside = tuple(f"{prefix}." for prefix in prefixes)
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and f"{name}.".startswith(inside)
    ]
