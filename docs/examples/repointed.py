"""Megatron initialises its groups again, and the code replaces the old group in every object that held it.
kit run offload --set implementation=docs.examples.repointed:Repointed"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

LEAVES = (torch.Tensor, str, int, float, type, types.ModuleType, types.FunctionType)


class Released:
    """A placeholder while groups are released. Every use raises an error with the group's name."""

    def __init__(self, key: Any) -> None:
        self.__dict__["key"] = key

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"process group {self.key} is destroyed, but {name} was used: reload it first")


class Repointed:
    """Puts a placeholder into every object that holds a group, and the new group of the same purpose after the reload."""

    def __init__(self, ctx: Any) -> None:
        self.initialise, self.roots = ctx.around, [ctx.chunks, ctx.optimizer]

    @staticmethod
    @contextlib.contextmanager
    def around(ctx: Any) -> Iterator[list[Any]]:  # noqa: ARG004 - the lab passes it
        """Record how the job initialises Megatron."""
        plain, calls = parallel_state.initialize_model_parallel, []

        @functools.wraps(plain)
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            calls.append(functools.partial(plain, *args, **kwargs))
            plain(*args, **kwargs)

        parallel_state.initialize_model_parallel = initialize_model_parallel
        try:
            yield calls
        finally:
            parallel_state.initialize_model_parallel = plain

    def destroy(self) -> None:
        groups = self.groups()
        names = {group: key(group) for group in groups}
        replace(self.roots, lambda value: Released(names[value]) if is_group(value) and value in names else value)
        failed = []
        for group in self.doomed(groups):
            try:
                dist.destroy_process_group(group)
            except RuntimeError as error:
                failed.append(f"{names[group]}: {error}")
        parallel_state.destroy_model_parallel()
        vars(parallel_state).update({name: None for name, value in vars(parallel_state).items() if is_group(value)})
        if failed:
            raise RuntimeError("not destroyed: " + "; ".join(failed))

    def reload(self, _: None) -> None:
        self.initialise[-1]()
        made = {key(group): group for group in self.groups()}
        replace(self.roots, lambda value: made[value.key] if isinstance(value, Released) else value)

    def groups(self) -> list[Any]:
        return [group for group in c10d._world.pg_map if group is not dist.group.WORLD]

    def doomed(self, groups: list[Any]) -> list[Any]:
        return groups


def is_group(value: Any) -> bool:
    return issubclass(type(value), dist.ProcessGroup)  # isinstance would read __class__ of a Released, which raises


def key(group: Any) -> tuple[str, tuple[int, ...], str]:
    """Return description, ranks and backend of a group, which identify its replacement."""
    return group.group_desc, tuple(dist.get_process_group_ranks(group)), dist.get_backend(group)


def replace(root: Any, by: Any) -> None:
    """Replace every value with by(value) in all attributes, lists and dicts that are reachable from the root."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (*LEAVES, Released)) or is_group(value):
            continue
        seen.add(id(value))
        todo += value if isinstance(value, tuple | set) else []
        places = value if isinstance(value, dict | list) else getattr(value, "__dict__", {})
        for name, child in list(enumerate(places) if isinstance(places, list) else places.items()):
            todo.append(child)
            if (new := by(child)) is not child:
                places[name] = new


# -- with one bug each ---------------------------------------------------------------------------------------------------


class RepointedThatForgetsToDestroy(Repointed):
    """Relies on destroy_model_parallel, which forgets the device groups and destroys none: every cycle leaks a whole set."""

    def doomed(self, groups: list[Any]) -> list[Any]:  # noqa: ARG002 - destroys none
        return []


class RepointedThatMissesTheOptimizer(Repointed):
    """The optimizer keeps its old groups: gradient norms are summed over a destroyed group."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.roots = [ctx.chunks]


class RepointedWithDefaultTimeouts(Repointed):
    """Initialises Megatron again from the sizes only: timeouts become the default."""

    def reload(self, _: None) -> None:
        call = self.initialise[-1]
        sizes = {name: value for name, value in call.keywords.items() if name.endswith(("_size", "order", "groups"))}
        self.initialise.append(functools.partial(call.func, *call.args, **sizes))
        super().reload(None)
