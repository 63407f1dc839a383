"""Rehearsals of what must hold when things go wrong: a group that cannot be destroyed, and errors inside a borrowed state."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from kit.measure.observers import births
from kit.megatron import groups, observe, ownership
from kit.megatron.groups.exact import DestroyFailed
from kit.megatron.groups.handle import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.labs.rankside import Context

REFUSED = "refused on purpose"


class Refusal:
    """While entered, one group cannot be destroyed, however that is asked for: by torch's own call, or by its shutdown or abort. It is
    known by what a collective reaches, so that a wrapper or handle around it is refused alike. `asked` tells whether anybody tried."""

    def __init__(self, victim: Any) -> None:
        self.victim = victim
        self.asked = False
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Refusal:
        self._replace(dist, "destroy_process_group", self._unless_refused(dist.destroy_process_group))
        self._replace(c10d, "destroy_process_group", self._unless_refused(c10d.destroy_process_group))
        for name in ("shutdown", "abort"):
            self._replace(dist.ProcessGroup, name, self._method(vars(dist.ProcessGroup)[name]))
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            owner, name, plain = self._undo.pop()
            setattr(owner, name, plain)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def _unless_refused(self, plain: Callable[..., None]) -> Callable[..., None]:
        def destroy(group: Any = None) -> None:
            if group is not None and self._is_victim(group):
                self._refuse()
            plain(group)

        return destroy

    def _method(self, plain: Any) -> Callable[..., None]:
        def method(group: Any) -> None:
            if group is self.victim:
                self._refuse()
            plain.__get__(group)()

        return method

    def _is_victim(self, group: Any) -> bool:
        try:
            with births.doors():
                return births.reach(group) is self.victim
        except Exception:  # noqa: BLE001 - what reaches no group is none
            return False

    def _refuse(self) -> None:
        self.asked = True
        raise RuntimeError(REFUSED)


def failure_raises(releaser: Any) -> bool | None:
    """Does a release in which one group refuses to be destroyed raise, and name that group? None: nobody tried to destroy it."""
    with births.doors():
        victim = births.reach(next(iter(observe.standing().values())))
    name = str(victim.group_desc)
    raised = None
    with Refusal(victim) as refusal:
        del victim
        try:
            state = releaser.release()
            if not dist.is_initialized():
                releaser.restore(state)
        except DestroyFailed as failure:
            raised = name in str(failure)
            groups.reload(failure.stats["snapshot"])
        except Exception as error:  # noqa: BLE001 - any error will do, if it names the group
            raised = any(name in str(one) for one in births.chain(error))
    return False if raised is None and refusal.asked else raised


class OnPurposeError(Exception):
    """Raised by the rehearsal; whatever surfaces in its place hides it."""


def not_as_found(ctx: Context, before_build: dict[str, Any]) -> list[str]:
    """What is not as it was found: after the lab's own job, and after rehearsed bodies that end well or with an error."""
    wrong = differs(before_build)
    theirs = dist.new_group(backend="gloo", group_desc="of the caller")
    for body in (own_group, failing):
        wrong += borrowed(ctx, body)
        wrong += silent(theirs)
    with contextlib.suppress(ValueError):  # it is gone already, which was counted
        dist.destroy_process_group(theirs)
    for body in (default_group, failing_default_group):
        with without_default_group():
            wrong += borrowed(ctx, body)
    return wrong


def silent(group: Any) -> list[str]:
    """What is wrong with a group of the caller's: an all-reduce that raises, or a wrong sum."""
    total = torch.ones(1)
    try:
        dist.all_reduce(total, group=group)
    except Exception as error:  # noqa: BLE001 - a group that was destroyed may raise anything
        return [f"a group of the caller's no longer works: {type(error).__name__}: {error}"]
    return [] if total.item() == dist.get_world_size() else [f"a group of the caller's sums {total.item():g} ranks"]


def borrowed(ctx: Context, body: Callable[[], None]) -> list[str]:
    """Run a body inside `as_found`, with the fault if one is on; what is wrong afterwards."""
    before = ownership.describe()
    wrong = []
    try:
        with scope(ctx.fault):
            body()
    except OnPurposeError:
        pass
    except Exception as error:  # noqa: BLE001 - which error surfaces is the question
        wrong.append(f"the original error was hidden by {type(error).__name__}: {error}")
    return [*wrong, *differs(before)]


def differs(before: dict[str, Any]) -> list[str]:
    now = ownership.describe()
    return [f"{key}: {before[key]!r} became {now[key]!r}" for key in before if before[key] != now[key]]


@contextlib.contextmanager
def scope(fault: str | None) -> Iterator[None]:
    """`as_found`, or one of the ways in which people get it wrong."""
    if fault == "leaves-default-group" and not dist.is_initialized():
        yield
        return
    with quiet(), ownership.as_found():
        try:
            yield
        except OnPurposeError:
            if fault == "masks-original-error":
                raise RuntimeError("cleaning up failed") from None
            raise


def own_group() -> None:
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.rand(1), group=group)  # the caller's random numbers are to stay where they are


def failing() -> None:
    own_group()
    raise OnPurposeError


def default_group() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))


def failing_default_group() -> None:
    default_group()
    raise OnPurposeError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The rehearsed error is logged by design; it is no news."""
    log = logging.getLogger(ownership.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def without_default_group() -> Iterator[None]:
    """torch.distributed as in a process that has not initialised it; the caller's groups wait aside."""
    world = c10d._world
    tables = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
    )
    aside = [dict(table) for table in tables]
    default, count = world.default_pg, world.group_count
    for table in tables:
        table.clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    try:
        yield
    finally:
        for table, entries in zip(tables, aside, strict=True):
            table.clear()
            table.update(entries)
        c10d._unregister_all_process_groups()
        c10d._update_default_pg(default)
        world.group_count = count
        for group, name in world.pg_names.items():
            c10d._register_process_group(name, group)
