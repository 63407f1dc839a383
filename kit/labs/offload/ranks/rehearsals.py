"""Failures that the offload lab rehearses: a group that cannot be destroyed, and errors in code that borrows the caller's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from kit.measure.observers import births
from kit.megatron import groups, observe, ownership
from kit.megatron.groups import DestroyFailed
from kit.megatron.handles import c10d
from kit.target import load, replaced

# -- a group that cannot be destroyed --------------------------------------------------------------------------------------


def failure_raises(releaser: Any) -> bool | None:
    """Whether a release raises and names the group if one group cannot be destroyed; None if no one tried to destroy it."""
    with births.doors():
        victim = births.reach(next(iter(observe.standing().values())))
    name = str(victim.group_desc)
    raised = None
    with refusing(victim) as attempts:
        del victim
        try:
            state = releaser.release()
            if not dist.is_initialized():
                releaser.restore(state)
        except DestroyFailed as failure:
            raised = name in str(failure)
            groups.reload(failure.stats["snapshot"])
        except Exception as error:  # noqa: BLE001 - any error will do, if it names the group
            raised = any(name in str(link) for link in births.chain(error))
    return False if raised is None and attempts else raised


@contextlib.contextmanager
def refusing(victim: Any) -> Iterator[list[str]]:
    """Refuse to destroy one group, however that is asked for: by torch's own call, or by the group's shutdown or abort. It is
    recognised by what a collective reaches, so that a wrapper or handle around it is refused alike. Gives the attempts so far."""
    attempts: list[str] = []

    def reaches_victim(group: Any) -> bool:
        try:
            with births.doors():
                return group is not None and births.reach(group) is victim
        except Exception:  # noqa: BLE001 - a group that reaches nothing does not reach the victim
            return False

    def guarded(place: str, is_victim: Callable[[Any], bool]) -> Callable[[Any], None]:
        plain = load(place)  # now, and not on import: own code may have put a wrapper there

        def call(group: Any = None) -> None:
            if is_victim(group):
                attempts.append(place)
                raise RuntimeError("refused on purpose")
            plain(group)

        return call

    calls = ("torch.distributed:destroy_process_group", "torch.distributed.distributed_c10d:destroy_process_group")
    methods = ("torch.distributed:ProcessGroup.shutdown", "torch.distributed:ProcessGroup.abort")
    patch = {place: guarded(place, reaches_victim) for place in calls}
    patch |= {place: guarded(place, lambda group: group is victim) for place in methods}
    with replaced(patch):
        yield attempts


# -- the caller's groups, globals and random state, after success and after an error ------------------------------------------


class OnPurposeError(Exception):
    """Raised by the rehearsal; whatever surfaces in its place hides it."""


def not_as_found(before_build: dict[str, Any]) -> list[str]:
    """What is not as it was found: after the lab's own job, and after rehearsed bodies that end well or with an error, with and without a
    default group of the caller."""
    wrong = changes_since(before_build)
    of_the_caller = dist.new_group(backend="gloo", group_desc="of the caller")
    for fails in (False, True):
        wrong += borrowing(make_a_group, fails=fails)
        wrong += silence_of(of_the_caller)
    with contextlib.suppress(ValueError):  # already gone, and counted
        dist.destroy_process_group(of_the_caller)
    for fails in (False, True):
        with without_default_group():
            wrong += borrowing(make_a_default_group, fails=fails)
    return wrong


def borrowing(body: Callable[[], None], *, fails: bool) -> list[str]:
    """Run a body inside `as_found`, which then ends well or with an error; return what is wrong afterwards."""
    before = ownership.describe()
    wrong = []
    quiet = {"kit.megatron.ownership:log.error": f"{__name__}:say_nothing"}  # the rehearsed error is logged by design
    try:
        with replaced(quiet), ownership.as_found():
            body()
            if fails:
                raise OnPurposeError  # noqa: TRY301 - the rehearsed error
    except OnPurposeError:
        pass
    except Exception as error:  # noqa: BLE001 - which error surfaces is the question
        wrong.append(f"the original error was hidden by {type(error).__name__}: {error}")
    return [*wrong, *changes_since(before)]


def say_nothing(*args: object, **kwargs: object) -> None: ...


def make_a_group() -> None:
    dist.all_reduce(torch.rand(1), group=dist.new_group(backend="gloo"))  # the caller's random numbers must not change


def make_a_default_group() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))


def silence_of(group: Any) -> list[str]:
    """What is wrong with a caller's group: an all-reduce that raises, or a wrong sum."""
    total = torch.ones(1)
    try:
        dist.all_reduce(total, group=group)
    except Exception as error:  # noqa: BLE001 - a group that was destroyed may raise anything
        return [f"a caller's group no longer works: {type(error).__name__}: {error}"]
    return [] if total.item() == dist.get_world_size() else [f"a caller's group sums {total.item():g} ranks"]


def changes_since(before: dict[str, Any]) -> list[str]:
    after = ownership.describe()
    return [f"{key}: {before[key]!r} became {after[key]!r}" for key in before if before[key] != after[key]]


@contextlib.contextmanager
def without_default_group() -> Iterator[None]:
    """Make torch.distributed look uninitialised; the caller's groups are set aside."""
    world = c10d._world
    default, count = world.default_pg, world.group_count
    try:
        with contextlib.ExitStack() as aside:
            for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
                aside.enter_context(mock.patch.dict(getattr(world, name), clear=True))
            c10d._update_default_pg(None)
            c10d._unregister_all_process_groups()
            yield
    finally:
        c10d._unregister_all_process_groups()
        c10d._update_default_pg(default)
        world.group_count = count
        for group, name in world.pg_names.items():
            c10d._register_process_group(name, group)
