"""Process groups behind a wrapper that is not in torch's registry, in the style of slime and ROLL. No pipeline parallelism.
kit run offload --set implementation=docs.examples.reloadable:Reloadable"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


class ReloadableGroup(dist.ProcessGroup):
    """Layers keep this object. The group inside is destroyed and rebuilt; torch sees only the group inside."""

    def __init__(self, inside: Any) -> None:
        super().__init__(inside.rank(), inside.size())
        self.__dict__.update(inside=inside, title=f"{inside.group_desc} {dist.get_process_group_ranks(inside)}")

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        own = self.__dict__
        return own[name] if name in own else getattr(inside(self), name)


def inside(value: Any) -> Any:
    """Return the group inside a wrapper; any other value unchanged."""
    if not isinstance(value, ReloadableGroup):
        return value
    if value.inside is None:
        raise RuntimeError(f"process group {value.title} is destroyed: reload it before using it")
    return value.inside


class Reloadable:
    """Destroys the group inside every wrapper and rebuilds it with the same arguments."""

    unwrap = staticmethod(inside)

    def __init__(self, ctx: Any) -> None:
        self.calls = ctx.around
        self.globals: dict[str, Any] = {}
        self.leaked: list[Any] = []  # for a bug below

    @classmethod
    @contextlib.contextmanager
    def around(cls, ctx: Any) -> Iterator[list[Any]]:  # noqa: ARG003 - the lab passes it
        """Patch new_group, and every function with a group argument, while the job exists."""
        plain = {name: function for name, function in vars(dist).items() if takes_group(function)}
        new_group = dist.new_group
        calls = []  # one per new_group: the call, and its wrapper (None on a rank outside the group)

        def patched(*args: Any, **kwargs: Any) -> Any:
            group = new_group(*args, **kwargs)
            wrapper = ReloadableGroup(group) if isinstance(group, dist.ProcessGroup) else None
            calls.append((functools.partial(new_group, *args, **kwargs), wrapper))
            return wrapper or group

        dist.new_group = patched
        for name, function in plain.items():
            setattr(dist, name, unwrapping(function, cls.unwrap))
        try:
            yield calls
        finally:
            dist.new_group = new_group
            cls.unpatch(plain)
            calls.clear()

    @classmethod
    def unpatch(cls, plain: dict[str, Any]) -> None:
        vars(dist).update(plain)

    def destroy(self) -> None:
        self.globals = {name: value for name, value in vars(parallel_state).items() if name.startswith("_")}
        failed = []
        for _, wrapper in reversed(self.calls):
            if wrapper is not None:
                try:
                    self.destroy_one(wrapper)
                except RuntimeError as error:
                    failed.append(f"{wrapper.title}: {error}")
        parallel_state.destroy_model_parallel()
        if failed:
            raise RuntimeError("not destroyed: " + "; ".join(failed))

    def destroy_one(self, wrapper: Any) -> None:
        dist.destroy_process_group(wrapper.inside)
        wrapper.__dict__["inside"] = None

    def reload(self, _: None) -> None:
        for make, wrapper in self.calls:
            group = self.make_again(make)  # on every rank, also those outside the group
            if wrapper is not None:
                wrapper.__dict__["inside"] = group
        vars(parallel_state).update(self.globals)

    def make_again(self, make: functools.partial[Any]) -> Any:
        return make()


def takes_group(function: Any) -> bool:
    if not inspect.isfunction(function) or function.__name__ in ("new_group", "destroy_process_group"):
        return False
    return bool({"group", "pg"} & set(inspect.signature(function).parameters))


def unwrapping(function: Any, unwrap: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(unwrap, args), **{name: unwrap(value) for name, value in kwargs.items()})

    return call


# -- with one bug each ---------------------------------------------------------------------------------------------------


class ReloadableThatFallsBackToWorld(Reloadable):
    """Passes a destroyed group on as None, which torch takes for WORLD: the collective runs over the wrong ranks."""

    unwrap = staticmethod(lambda value: value.inside if isinstance(value, ReloadableGroup) else value)


class ReloadableThatForgetsTimeouts(Reloadable):
    """Rebuilds groups from ranks, backend and name only: a timeout that the job set becomes torch's default."""

    def make_again(self, make: functools.partial[Any]) -> Any:
        kept = {name: value for name, value in make.keywords.items() if name in ("ranks", "backend", "group_desc")}
        return make.func(*make.args[:1], **kept)


class ReloadableThatLeaksAGroup(Reloadable):
    """Replaces one group in every cycle without destroying the old one."""

    def destroy_one(self, wrapper: Any) -> None:
        if wrapper is self.calls[0][1]:
            self.leaked.append(wrapper.inside)
            wrapper.__dict__["inside"] = None
        else:
            super().destroy_one(wrapper)


class ReloadableThatLeavesItsPatch(Reloadable):
    """Leaves the functions of torch.distributed replaced after the job."""

    @classmethod
    def unpatch(cls, plain: dict[str, Any]) -> None: ...
