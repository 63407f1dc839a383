"""What breaks on purpose in the offload lab: the kit's releaser with one bug each, bugs put into a job that has come back, and rehearsals
of a group that cannot be destroyed and of errors inside a borrowed state."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from kit.labs.offload.ranks.releaser import KitReleaser, State
from kit.measure.observers import births
from kit.megatron import groups, observe, ownership
from kit.megatron.groups import DestroyFailed
from kit.megatron.handles import Handle, c10d, groups_in, megatron_groups, parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.labs.offload.ranks.job import JobContext
    from kit.labs.rankside import Context

REFUSED = "refused on purpose"


@contextlib.contextmanager
def replaced(name: str, new: Any, *owners: Any) -> Iterator[None]:
    """An attribute of these modules or classes is another one meanwhile."""
    plain = [vars(owner)[name] for owner in owners]
    for owner in owners:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, before in zip(owners, plain, strict=True):
            setattr(owner, name, before)


@contextlib.contextmanager
def refusing(victim: Any) -> Iterator[list[str]]:
    """While entered, one group cannot be destroyed, however that is asked for: by torch's own call, or by its shutdown or abort. It is
    known by what a collective reaches, so that a wrapper or handle around it is refused alike. Gives what was asked so far."""
    asked: list[str] = []

    def refuse(name: str) -> None:
        asked.append(name)
        raise RuntimeError(REFUSED)

    def is_victim(group: Any) -> bool:
        try:
            with births.doors():
                return births.reach(group) is victim
        except Exception:  # noqa: BLE001 - what reaches no group is none
            return False

    def destroyer(plain: Callable[..., None]) -> Callable[..., None]:
        def destroy(group: Any = None) -> None:
            if group is not None and is_victim(group):
                refuse("destroy_process_group")
            plain(group)

        return destroy

    def method(name: str) -> Callable[..., None]:
        plain = vars(dist.ProcessGroup)[name]

        def refused(group: Any) -> None:
            if group is victim:
                refuse(name)
            plain.__get__(group)()

        return refused

    with contextlib.ExitStack() as stack:
        for module in (dist, c10d):
            stack.enter_context(replaced("destroy_process_group", destroyer(module.destroy_process_group), module))
        for name in ("shutdown", "abort"):
            stack.enter_context(replaced(name, method(name), dist.ProcessGroup))
        yield asked


def failure_raises(releaser: Any) -> bool | None:
    """Whether a release raises and names the group if one group cannot be destroyed; None if no one tried to destroy it."""
    with births.doors():
        victim = births.reach(next(iter(observe.standing().values())))
    name = str(victim.group_desc)
    raised = None
    with refusing(victim) as asked:
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
    return False if raised is None and asked else raised


class OnPurposeError(Exception):
    """Raised by the rehearsal; whatever surfaces in its place hides it."""


def not_as_found(ctx: Context, before_build: dict[str, Any]) -> list[str]:
    """What is not as it was found: after the lab's own job, and after rehearsed bodies that end well or with an error."""
    wrong = differs(before_build)
    theirs = dist.new_group(backend="gloo", group_desc="of the caller")
    for fails in (False, True):
        wrong += borrowed(ctx, own_group, fails=fails)
        wrong += silent(theirs)
    with contextlib.suppress(ValueError):  # it is gone already, which was counted
        dist.destroy_process_group(theirs)
    for fails in (False, True):
        with without_default_group():
            wrong += borrowed(ctx, default_group, fails=fails)
    return wrong


def silent(group: Any) -> list[str]:
    """What is wrong with a group of the caller's: an all-reduce that raises, or a wrong sum."""
    total = torch.ones(1)
    try:
        dist.all_reduce(total, group=group)
    except Exception as error:  # noqa: BLE001 - a group that was destroyed may raise anything
        return [f"a group of the caller's no longer works: {type(error).__name__}: {error}"]
    return [] if total.item() == dist.get_world_size() else [f"a group of the caller's sums {total.item():g} ranks"]


def borrowed(ctx: Context, body: Callable[[bool], None], *, fails: bool) -> list[str]:
    """Run a body inside `as_found`, which then ends well or with an error, with the fault if one is on; what is wrong afterwards."""
    before = ownership.describe()
    wrong = []
    try:
        with scope(ctx.fault):
            body(fails)
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
    """`as_found`, or a common mistake in its place."""
    if fault == "leaves-default-group" and not dist.is_initialized():
        yield
        return
    log = logging.getLogger(ownership.__name__)  # the rehearsed error is logged by design; it is no news
    with replaced("disabled", True, log), ownership.as_found():
        try:
            yield
        except OnPurposeError:
            if fault == "masks-original-error":
                raise RuntimeError("cleaning up failed") from None
            raise


def own_group(fails: bool) -> None:
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.rand(1), group=group)  # the caller's random numbers are to stay where they are
    if fails:
        raise OnPurposeError


def default_group(fails: bool) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    if fails:
        raise OnPurposeError


@contextlib.contextmanager
def without_default_group() -> Iterator[None]:
    """torch.distributed as in a process that has not initialised it; the caller's groups wait aside."""
    world = c10d._world
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
    tables = [getattr(world, name) for name in names]
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


# -- the faults --------------------------------------------------------------------------------------------------------


LEAK_BYTES = 16 * 2**20
SLOW_S = 1.5


class Broken(KitReleaser):
    """The kit's releaser with the configured fault."""

    def __init__(self, ctx: JobContext) -> None:
        super().__init__(ctx)
        self.kept: list[Any] = []
        self.reloads = 0
        if ctx.fault == "patch-left":
            dist.barrier = functools.partial(dist.barrier)
        self.last = ctx.rank == ctx.world_size - 1

    def destroy(self) -> State:  # noqa: PLR0911 - a way out for each fault
        if not self.ctx.config.groups:
            return super().destroy()
        fault = self.ctx.fault
        if fault == "leak-gloo":
            self.kept.append(dist.new_group(backend="gloo"))
        elif fault == "leak-device":
            self.kept.append(dist.new_group())
        elif fault == "kept-handle":
            self.kept.append(next(g.kit_inner for g in megatron_groups() if isinstance(g, Handle)))
        elif fault == "stale-globals":
            return {"snapshot": forget_groups_only()}
        elif fault == "missing-rank-in-destroy" and self.last:
            return {"snapshot": groups.snapshot()}
        if fault == "kept-world":
            return groups.destroy(self.ctx.config.mode, timeout_s=self.ctx.config.meet_timeout_s)
        if fault == "swallowed-failure":
            try:
                return super().destroy()
            except DestroyFailed as failure:
                return failure.stats
        return super().destroy()

    def reload(self, stats: State) -> State:
        if not self.ctx.config.groups:
            return super().reload(stats)
        fault, snapshot = self.ctx.fault, stats["snapshot"]
        if fault == "dropped-timeout":
            with default_timeouts():
                return super().reload(stats)
        if fault in {"lossy-snapshot", "stale-globals"}:
            lossy = {key: snapshot["init_arguments"][key] for key in LOSSY if key in snapshot["init_arguments"]}
            parallel_state().initialize_model_parallel(**lossy)
            return {}
        done = super().reload(stats)
        if fault == "stale-handles":
            self.leave_a_stale_handle()
        return done

    def restore_tensors(self) -> State:
        fault = self.ctx.fault
        if fault == "slow-leak":
            self.kept.append(bytearray(b"x" * LEAK_BYTES))
        done = super().restore_tensors()
        self.reloads += 1
        if fault == "reseeded":
            torch.manual_seed(self.ctx.config.seed)
        elif fault == "leaked-file":  # in shared memory, not open or mapped anywhere; removed when the job ends
            fd, path = tempfile.mkstemp(prefix="kit-fault-", dir="/dev/shm")
            os.close(fd)
            weakref.finalize(self, os.unlink, path)
        elif fault == "slow-at-last" and self.reloads in (self.ctx.config.cycles - 1, self.ctx.config.cycles):
            time.sleep(SLOW_S)
        elif fault == "double-copy":
            _ = [item.storage.clone() for item in self.ctx.mover.items()]
        elif fault == "bit-flip" and self.last:
            next(self.ctx.chunks[0].module.parameters()).data.view(-1)[:1].view(torch.uint8)[0] ^= 1
        elif fault == "lost-optimizer-state":
            for item in self.ctx.mover.items():
                if item.name.endswith("exp_avg"):
                    item.storage.fill_(0)
        elif fault == "alias-broken":
            parameter = next(self.ctx.chunks[0].module.parameters())
            parameter.main_grad = parameter.main_grad.clone()
        elif fault == "grads-not-zeroed":  # once, the next step's zeroing of the gradient buffers does nothing
            for chunk in self.ctx.chunks:
                chunk.zero_grad_buffer = functools.partial(delattr, chunk, "zero_grad_buffer")
        return done

    def leave_a_stale_handle(self) -> None:
        """The first module that keeps a group gets one that is destroyed."""
        dead = dist.new_group()
        dist.destroy_process_group(dead)
        for module in self.ctx.chunks[0].modules():
            for name, value in vars(module).items():
                if isinstance(value, dist.ProcessGroup):
                    setattr(module, name, dead)
                    return
        raise RuntimeError("no layer keeps a process group, so none can go stale")


LOSSY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


@contextlib.contextmanager
def default_timeouts() -> Iterator[None]:
    """Groups are made with torch's default timeout, whatever was asked for: what leaving the argument out comes to."""
    plain = c10d._new_process_group_helper

    def helper(*args: Any, backend_options: Any = None, **kwargs: Any) -> Any:
        default = c10d._get_default_timeout(c10d.Backend(str(args[3]).rpartition(":")[2]))
        if backend_options is not None:
            backend_options._timeout = default
        return plain(*args, backend_options=backend_options, **kwargs | {"timeout": default})

    with replaced("_new_process_group_helper", helper, c10d):
        yield


def forget_groups_only() -> State:
    """Destroy what the group globals hold and null those alone: the bug of many a home-made helper."""
    snapshot = groups.snapshot()
    module = parallel_state()
    for name in [n for n in vars(module) if n.startswith("_") and "_GROUP" in n]:
        for group in groups_in(getattr(module, name)):
            if group in c10d._world.pg_map:
                dist.destroy_process_group(group)
        setattr(module, name, None)
    return snapshot


@contextlib.contextmanager
def double_patched() -> Iterator[None]:
    """new_group patched by a second wrapper that makes a group of its own beside the inner one and forgets it."""
    plain = dist.new_group

    def twice(*args: Any, **kwargs: Any) -> Any:
        plain(*args, **kwargs)
        return plain(*args, **kwargs)

    with replaced("new_group", twice, dist, c10d):
        yield
