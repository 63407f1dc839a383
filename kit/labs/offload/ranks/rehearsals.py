"""Failures that the offload lab rehearses: a group that cannot be destroyed, an allocation of a reload that fails on one rank, and errors
in code that borrows the caller's state."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from kit.errors import KitError, RehearsedError
from kit.labs.offload.ranks.job import JobContext
from kit.labs.offload.ranks.releaser import KitReleaser
from kit.measure.observers import births
from kit.measure.observers.tensors import TensorState, live_bytes, tensor_differences
from kit.megatron import groups, observe, ownership
from kit.megatron.groups import DestroyFailed
from kit.megatron.handles import c10d
from kit.target import load, replaced

# -- a group that cannot be destroyed --------------------------------------------------------------------------------------


class Finding(NamedTuple):
    metric: str
    value: float
    text: str = ""


def destroy_fails(releaser: Any) -> Iterator[Finding]:
    if (raised := failure_raises(releaser)) is not None:
        yield Finding("failure_hidden", int(not raised))


def failure_raises(releaser: Any) -> bool | None:
    """Whether a release raises and names the group if one group cannot be destroyed; None if no one tried to destroy it."""
    if not (standing := observe.standing()):
        return None  # an earlier failure was hidden, and nothing came back
    with births.doors():
        victim = births.reach(next(iter(standing.values())))
    del standing
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
            if isinstance(releaser, KitReleaser):
                releaser.restore_tensors()
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


# -- a rank that is late for a meeting -------------------------------------------------------------------------------------

SHORT_S = 0.5


def arrivals_left(ctx: JobContext, timeout_s: float) -> list[str]:
    """What is left of a meeting that the last rank missed: all must meet at the next try, and after another such meeting the late rank must
    not meet alone."""

    wrong: list[str] = []

    def meets(seconds: float) -> bool:
        try:
            groups.meet("rehearsal", ctx.rank, ctx.world_size, seconds)
        except KitError:
            return False
        except Exception as error:  # noqa: BLE001 - the others wait at the next barrier
            wrong.append(f"a meeting raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return False
        return True

    late = ctx.rank == ctx.world_size - 1
    if not late and meets(SHORT_S):
        wrong.append("the ranks that came met without the late one")
    dist.barrier()
    if not meets(timeout_s):
        wrong.append("at the next try the ranks do not meet")
    if not late:
        meets(SHORT_S)
    dist.barrier()
    if late and meets(SHORT_S):
        wrong.append("the late rank met the arrivals of ranks that had given up")
    dist.barrier()
    return wrong


# -- an allocation of a reload that fails on one rank ----------------------------------------------------------------------


def restore_fails(ctx: JobContext, releaser: Any, look: Callable[[], TensorState]) -> Iterator[Finding]:
    """Let the middle allocation of a reload fail on the last rank. Every rank must raise and free its tensors again, the error must name
    rank and tensor, and a retry must bring every bit back."""
    state = look()
    before, names = state.prints(), state.names_by_storage()
    count = sum(item.kind in ctx.config.kinds for item in state.resident(ctx.device.type))
    del state
    released = releaser.release()
    gc.collect()
    level, last = live_bytes(), ctx.world_size - 1
    with refusing_allocation(count // 2 + 1 if ctx.rank == last else 0) as refused:
        error = error_text(lambda: releaser.restore(released))
    gc.collect()
    yield Finding("restore_refused", len(refused))
    yield Finding("restore_silent", int(error is None))
    yield Finding("restore_kept", max(0, live_bytes() - level))

    # The refused tensor is known on the rank that refused it alone.
    own_names = [name for storage in refused for name in names.get(storage, [])]
    words = error or ""
    names_both = f"rank {last}" in words and (not own_names or any(is_named(name, words) for name in own_names))
    yield Finding("restore_unnamed", int(error is not None and not names_both), words)

    second_error = error_text(lambda: releaser.restore(released))
    yield Finding("retry_raised", int(second_error is not None), second_error or "")
    differing = tensor_differences(before, look().prints())
    yield Finding("retry_differs", len(differing), "; ".join(map(str, differing[:2])))


def is_named(path: str, words: str) -> bool:
    """Whether words name a tensor by the last part of its path: your own code may come to it by another way. Of a tensor in a list they
    have its number, after the list's name or its singular."""
    parts = path.split(".")
    number = parts[-1] if parts[-1].isdigit() else ""
    last = next((part for part in reversed(parts) if not part.isdigit()), "")
    if not number:
        return last in words
    return re.search(rf"{re.escape(last.removesuffix('s'))}.*?(?<!\d){number}(?!\d)", words) is not None


def error_text(call: Callable[[], object]) -> str | None:
    """What a call raises, with what that was raised on top of, as text: the error itself would keep tensors alive."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the code under test may raise anything
        return "; ".join(map(str, births.chain(error)))
    return None


@contextlib.contextmanager
def refusing_allocation(at: int) -> Iterator[list[int]]:
    """Refuse the memory of one storage, the `at`-th that asks for some; 0: of none. Gives the storages that were refused."""
    plain: Any = torch.UntypedStorage.resize_
    calls, refused = itertools.count(1), []

    def resize(storage: Any, size: int) -> Any:
        if size and next(calls) == at:
            refused.append(int(storage._cdata))
            raise torch.OutOfMemoryError(f"no memory for {size} bytes, on purpose")
        return plain(storage, size)

    with replaced({"torch:UntypedStorage.resize_": resize}):
        yield refused


# -- the caller's groups, globals and random state, after success and after an error ------------------------------------------


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
            wrong += keeping_a_handle(make_a_default_group, fails=fails)
    return wrong


def borrowing(body: Callable[[], None], *, fails: bool) -> list[str]:
    """Run a body inside `as_found`, which then ends well or with an error; return what is wrong afterwards."""
    before = ownership.describe_state()
    wrong = []
    quiet = {"kit.megatron.ownership:log.error": lambda *_, **__: None}  # the rehearsed error is logged by design
    try:
        with replaced(quiet), ownership.as_found():
            body()
            if fails:
                raise RehearsedError  # noqa: TRY301 - whatever surfaces in its place hides it
    except RehearsedError:
        pass
    except Exception as error:  # noqa: BLE001 - which error surfaces is the question
        wrong.append(f"the original error was hidden by {type(error).__name__}: {error}")
    return [*wrong, *changes_since(before)]


def make_a_group() -> None:
    dist.all_reduce(torch.rand(1), group=dist.new_group(backend="gloo"))  # the caller's random numbers must not change


def borrow_from_the_job(ctx: JobContext) -> list[str]:
    """What is not as it was found while the job lives, after bodies that draw from its generators and make a group."""

    def draw_and_make_a_group() -> Any:
        observe.draw_from_tracker(ctx.device)
        return dist.new_group(backend="gloo", group_desc="kept")

    wrong: list[str] = []
    for fails in (False, True):
        before = observe.random_state()
        wrong += keeping_a_handle(draw_and_make_a_group, fails=fails)
        moved = [name for name, digest in observe.random_state().items() if before.get(name) != digest]
        wrong += [f"{name} is in another state after {'an error' if fails else 'success'}" for name in moved]
    return wrong


def keeping_a_handle(make: Callable[[], Any], *, fails: bool) -> list[str]:
    """`borrowing` with a body that makes a group and keeps its handle: the group must die, although over gloo it would live as long as
    anything refers to it."""
    handles: list[Any] = []
    inside: list[weakref.ref[Any]] = []

    def body() -> None:
        handles.append(make())
        with births.doors():
            inside.append(weakref.ref(births.reach(handles[0])))

    wrong = borrowing(body, fails=fails)
    gc.collect()
    ended = "an error" if fails else "success"
    alive = [group for group in inside if group() is not None]
    return wrong + [f"a group lives on after {ended} because its handle is kept" for _ in alive]


def make_a_default_group() -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    groups.install()
    dist.all_reduce(torch.ones(1))
    return dist.group.WORLD


def silence_of(group: Any) -> list[str]:
    """What is wrong with a caller's group: an all-reduce that raises, or a wrong sum."""
    total = torch.ones(1)
    try:
        dist.all_reduce(total, group=group)
    except Exception as error:  # noqa: BLE001 - a group that was destroyed may raise anything
        return [f"a caller's group no longer works: {type(error).__name__}: {error}"]
    return [] if total.item() == dist.get_world_size() else [f"a caller's group sums {total.item():g} ranks"]


def changes_since(before: dict[str, Any]) -> list[str]:
    after = ownership.describe_state()
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
