"""Failures that the offload lab rehearses: a group that cannot be destroyed, allocations of a reload that fail on one rank, and errors
in code that borrows the caller's state."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
            if isinstance(releaser, KitReleaser):  # it moved the tensors for your own pair, which raised
                releaser.ctx.mover.restore()
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


@contextlib.contextmanager
def without_socket_warnings() -> Iterator[None]:
    """torch's C++ code warns on descriptor 2 of every wait that times out, which is rehearsed here. All other output passes."""
    before = os.dup(2)
    with os.fdopen(os.memfd_create("rehearsed"), "w+b") as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            caught.seek(0)
            with os.fdopen(2, "wb", closefd=False) as out:  # a pipe may take only a part at once
                out.writelines(line for line in caught if b"waitForInput" not in line)


def arrivals_left(ctx: JobContext, timeout_s: float) -> list[str]:
    """What is left of a meeting that the last rank missed: all must meet at the next try, and after another such meeting the late rank must
    not meet alone."""

    wrong: list[str] = []

    def meets(seconds: float) -> bool:
        try:
            with without_socket_warnings():
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

SCALAR_BYTES = 8  # such as a step count: optimizers keep it on the host


def restore_fails(ctx: JobContext, releaser: Any, look: Callable[[], TensorState]) -> Iterator[Finding]:
    """Let the first, the middle and the last allocation of a reload fail on the last rank, in turn on the same released state. Every rank
    must raise and free its tensors each time, the error must name rank and tensor, and a retry must bring every bit back. After a finding
    comes the retry at once: from there on the ranks may be at different places."""
    names = StateNames(look())
    released = releaser.release()
    with allocations(names, ctx.device.type) as usual:
        releaser.restore(released)
    state = look()
    before, names, last = state.prints(), StateNames(state), ctx.world_size - 1
    del state
    released = releaser.release()
    gc.collect()
    level = live_bytes()
    refused, findings = 0, [Finding("restore_silent", 0), Finding("restore_kept", 0), Finding("restore_unnamed", 0)]
    places = [("first", 1), ("middle", usual.made // 2 + 1), ("last", max(1, usual.made))]
    while True:
        place, number = places.pop(0) if places else ("", 0)
        with allocations(names, ctx.device.type, number if ctx.rank == last else 0) as tried:
            error = error_text(lambda: releaser.restore(released))
        if not on_any_rank(ctx, bool(tried.refused)):
            break  # it was a retry: there are no more places, or this reload made fewer allocations
        refused += len(tried.refused)
        gc.collect()
        findings = failure_findings(place, error, max(0, live_bytes() - level), tried.refused, last)
        if on_any_rank(ctx, any(finding.value for finding in findings)):
            places = []
    yield Finding("restore_refused", refused)
    yield from findings
    yield Finding("retry_raised", int(error is not None), error or "")
    differing = tensor_differences(before, look().prints())
    yield Finding("retry_differs", len(differing), "; ".join(map(str, differing[:2])))


def failure_findings(place: str, error: str | None, kept: int, refused: list[list[str]], last: int) -> list[Finding]:
    """What a rank did wrong when an allocation failed. The refused tensor is known on the rank that refused it alone."""
    words = error or ""
    unnamed = [] if re.search(rf"rank {last}\b", words) else [f"rank {last}"]
    own_names = [name for possible in refused for name in possible]
    if own_names and not any(is_named(name, words) for name in own_names):
        unnamed.append("the tensor")
    if not error:
        unnamed = []
    where = f"the {place} allocation failed"
    return [
        Finding("restore_silent", int(error is None), where),
        Finding("restore_kept", kept, where),
        Finding("restore_unnamed", len(unnamed), f"{' and '.join(unnamed)} in: {words}" if unnamed else words),
    ]


def on_any_rank(ctx: JobContext, value: bool) -> bool:
    """Whether the value is true on any rank. The ranks meet at the store: after a reload that failed there may be no group."""
    if ctx.world_size == 1:
        return value
    return "yes" in groups.reports("refused", "yes" * value, ctx.rank, ctx.world_size, ctx.config.timeout_s)


def is_named(path: str, words: str) -> bool:
    """Whether words name a tensor by the last part of its path: your own code may come to it by another way. Of a tensor in a list they
    have its number, after the list's name or its singular."""
    parts = path.split(".")
    number = parts[-1] if parts[-1].isdigit() else ""
    last = next((part for part in reversed(parts) if not part.isdigit()), "")
    if not number:
        return last in words
    name = re.escape(last.removesuffix("s"))
    return re.search(rf"{name}\w*?\W{{0,4}}(?<!\d){number}(?!\d)", words) is not None


def error_text(call: Callable[[], object]) -> str | None:
    """What a call raises, with what that was raised on top of, as text: the error itself would keep tensors alive."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the code under test may raise anything
        return "; ".join(map(str, births.chain(error)))
    return None


class StateNames:
    """The names of the state's tensors by storage, and by size and type. It keeps no tensor alive."""

    def __init__(self, state: TensorState) -> None:
        self.by_storage = state.names_by_storage()
        self.by_size: dict[tuple[int, torch.dtype], list[str]] = {}
        for _, _, tensor in state.tensors:
            if tensor.nbytes > SCALAR_BYTES:
                names = self.by_storage[int(tensor.untyped_storage()._cdata)]
                self.by_size.setdefault((tensor.nbytes, tensor.dtype), []).extend(names)


@dataclass(slots=True)
class Allocations:
    """How many allocations were made for tensors of the state, and the names that a refused one may have had."""

    refused_at: int
    made: int = 0
    refused: list[list[str]] = field(default_factory=list)

    def count(self, names: list[str], size: int) -> None:
        self.made += 1
        if self.made == self.refused_at:
            self.refused.append(names)
            raise torch.OutOfMemoryError(f"no memory for {size} bytes, on purpose")


@contextlib.contextmanager
def allocations(names: StateNames, device: str, refused_at: int = 0) -> Iterator[Allocations]:
    """Count the storages that get memory again, and new tensors of the size and type of one of the state's; refuse one of them, or none."""
    seen = Allocations(refused_at)
    plain: Any = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        if size > storage.nbytes():
            seen.count(names.by_storage.get(int(storage._cdata), []), size)
        return plain(storage, size)

    with replaced({"torch:UntypedStorage.resize_": resize}), NewTensors(seen, names, device):
        yield seen


class NewTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors that operations of torch make on this thread; not what other threads or libraries allocate."""

    def __init__(self, seen: Allocations, names: StateNames, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.names, self.device = seen, names, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in strided_tensors((args, kwargs))}
        for tensor in strided_tensors(made):
            names = self.names.by_size.get((tensor.nbytes, tensor.dtype))
            if names and tensor.device.type == self.device and tensor.untyped_storage()._cdata not in given:
                self.seen.count(names, tensor.nbytes)
        return made


def strided_tensors(values: Any) -> list[torch.Tensor]:
    """The tensors with a storage in nested arguments or results of an operation."""
    leaves = tree_leaves(values)
    return [value for value in leaves if isinstance(value, torch.Tensor) and value.layout == torch.strided]


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
