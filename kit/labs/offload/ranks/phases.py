"""What a rank does in the offload lab. One method a phase; what is observed is in `Watch`, known bugs are in `releaser.py`.

The phases between `release` and `reload`, and around them, are the observers': nothing of them is in the times of the code under test.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from kit.labs.bystander import Bystander
from kit.labs.offload.lab import KIT_MODEL
from kit.labs.offload.ranks.job import JobContext, arithmetic, context_for
from kit.labs.offload.ranks.releaser import around, double_patched, make_releaser, reported
from kit.labs.rankside import Context, digest
from kit.measure.observers import births
from kit.measure.observers.births import Births, Names, replaced_names, take_names
from kit.measure.observers.tensors import KINDS, Print, Resident, State, children, differences, live_bytes
from kit.measure.phase import log_steps
from kit.megatron import groups, observe, ownership, standin, tensors
from kit.megatron.groups import DestroyFailed
from kit.megatron.handles import c10d
from kit.target import load

Log = list[dict[str, float]]
PATCHABLE = ("torch.distributed", "megatron.core")  # their functions must be the original ones at the end
NAMED = 5  # tensors that differ, in records of their own
SHOWN = 2  # of what differs, in a text
SCALAR_BYTES = 8  # such as a step count: optimizers keep it on the host


class Offload:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.job: Any = None
        self.of: JobContext | None = None
        self.releaser: Any = None
        self.controls: list[tuple[Log, dict[str, str]]] = []
        self.log: Log = []
        self.state: Any = None
        self.watch = Watch(Births())
        self.names: Names = {}
        self.broken = False  # handles went stale on some rank: training on would use dead groups
        self.found: dict[str, Any] = {}
        self.scope = contextlib.ExitStack()
        self.bystander: Bystander | None = None
        if self.config.mode in groups.KEEPING:
            groups.refuse_keeping()

    # -- the controls: the same job without a break -------------------------------------------------------------------

    def start(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """Create what exists before the lab starts: one process group; on CUDA also a context, one matmul and a bystander."""
        if self.ctx.device.type == "cuda":
            square = torch.ones(1024, 1024, device=self.ctx.device)
            (square @ square).sum().item()
            del square
            torch.cuda.empty_cache()
            self.bystander = Bystander(str(self.ctx.device))
            self._ask_bystander()
        dist.barrier()

    def control_build(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._enter()
        self._build()

    def control(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._train("control")
        self.ctx.record("tensor_bytes", live_bytes(), "B")

    def control_end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.controls.append((self.log, self._hashes()))
        if self.config.model == KIT_MODEL:
            groups.destroy(timeout_s=self.config.meet_timeout_s)  # all at once; leaving alone takes them one by one
        self._leave()

    def second_control(self, cycle: int) -> None:
        """Run the control again: if two runs without a release differ, a run with releases proves nothing."""
        self.control_build(cycle)
        for _ in range(self.config.cycles + 1):
            self.control(cycle)
        self.control_end(cycle)
        (first_log, first), (second_log, second) = self.controls
        self.ctx.record("controls_differ", differing(first_log, second_log) + len(apart(first, second)))

    # -- the job that is released -------------------------------------------------------------------------------------

    def baseline(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Record what this process holds without the job, after a job has existed once."""
        gc.collect()
        tensors.trim()
        dist.barrier()
        self._communicators()
        self.names = take_names(*PATCHABLE)

    def build(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._enter()
        self.watch = Watch(self.scope.enter_context(Births()))
        given = self.scope.enter_context(around(self.ctx))
        with double_patched() if self.ctx.fault == "double-patch" else contextlib.nullcontext():
            self._build()
        self.of = context_for(self.ctx, self.job, given)
        self.releaser = make_releaser(self.of)
        wrong = self.watch.first_talk()  # over NCCL a communicator is there only after its first collective
        assert not wrong, wrong

    def train(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.broken:
            return
        self._train("released job")
        self.ctx.record("trained_steps", len(self.log))
        for name in ("loss", "grad_norm"):
            if name in self.log[-1]:
                self.ctx.record(name, self.log[-1][name])

    def fingerprint(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Record every tensor, group, holder and generator before a release."""
        self.watch.before(self._state().prints() if self.config.hashes else {}, **self._roots())
        self.ctx.record("groups_watched", len(self.watch.old))
        there, wanted = self._resident(), arithmetic(self.job, self.ctx.world_size)
        for kind in KINDS:
            self.ctx.record("state_bytes", sum(each.size for each in there if each.kind == kind), "B", kind=kind)
            if kind in wanted:
                self.ctx.record("state_arithmetic", wanted[kind], "B", kind=kind)
        self.ctx.record("resident_bytes", sum(each.size for each in there if self._to_go(each)), "B")
        self._communicators()

    def release(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.state = self.releaser.release()
        self._record(reported(self.state))

    def idle(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Measure while released: the numbers of this phase show what a release frees."""
        gc.collect()  # here and not in release: the lab's own clean-up must not be timed
        self.ctx.record("tensor_bytes", live_bytes(), "B")
        left = sorted(filter(self._to_go, self._resident()), key=lambda each: -each.size)
        self.ctx.record("left_bytes", sum(each.size for each in left), "B")
        kept = [each for each in left if each.kind in self.config.kinds and each.size > SCALAR_BYTES]
        self._found("left_tensors", kept)
        if self.config.groups:
            self._found("old_groups_alive", self.watch.alive())
            # Suspended gloo groups stay usable.
            usable = observe.usable(self.watch.old, but_gloo=self.config.mode in groups.KEEPING)
            self._found("stale_usable", usable)
            # Megatron may stay initialised if each of its groups raises an error with its name.
            self.ctx.record("initialised", int(observe.initialised() and (bool(usable) or not self.watch.old)))
            self.ctx.record("world_left", int(self.watch.world_left()))
            self._communicators()
        self._ask_bystander()

    def reload(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._record(reported(self.releaser.restore(self.state)))
        self.state = None

    def talk(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """The first collectives after a reload, over every group, with values that depend on the rank."""
        talked, wrong = self.watch.talk()
        self.ctx.record("talked_groups", talked)
        self._found("wrong_groups", wrong)

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Record everything again after a reload, random numbers first."""
        self.ctx.record("unchecked", int(not self.config.hashes))
        if self.config.groups or self.config.kinds:
            self._found("generators_moved", apart(self.watch.random, observe.random_state()))
        moved, options, stale = self.watch.after(**self._roots())
        self._found("membership_changed", moved)
        self._found("options_changed", options)
        self._found("stale_holders", stale)
        if self.config.hashes:
            after = self._state().prints()
            different = differences(self.watch.prints, after, zeroed=self.config.dropped_grads)
            self.ctx.record("tensors_hashed", len(after))
            self._found("tensors_changed", different)
            for one in different[:NAMED]:
                self.ctx.record("tensor_differs", one.largest, text=one.what, tensor=one.name, kind=one.kind)
        self.watch.prints = {}
        if not self.broken and (wrong := [*moved, *options, *stale]):
            print(f"groups, options and handles that differ: {len(wrong)}, first: {wrong[0]}")
        self.broken = self.broken or any_rank(bool(stale or self.watch.mute))
        self.ctx.record("broken", int(self.broken))
        self._ask_bystander()

    def compare(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.broken:
            return
        log, hashes = self.controls[0]
        self.ctx.record("steps_compared", len(self.log))
        self.ctx.record("steps_differ", differing(self.log, log))
        if first := departs(self.log, log):
            step, what = first
            self.ctx.record("departs", step, text=what, cycle_of_step=-(-step // self.config.steps))
        after = self._hashes()
        self._found("tensors_differ", apart(after, hashes))
        self.ctx.record("digest", None, text=digest(after))

    def rehearse_failure(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Make one group impossible to destroy: the release must raise an error that names it."""
        able = self.config.groups and self.config.mode in groups.EXACT and not self.broken and self.watch.standing
        if able and (raised := failure_raises(self.releaser)) is not None:
            self.ctx.record("failure_hidden", int(not raised))

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._leave()
        self._found("names_replaced", replaced_names(self.names))
        if self.bystander is not None:
            self.bystander.close()

    def ownership(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Are the caller's groups unchanged after success and after an error, with and without a default group of the caller?"""
        if wrong := not_as_found(self.ctx, self.found):
            print(f"not as found: {shown(wrong)}")
        self.ctx.record("not_as_found", len(wrong))

    # -- how ----------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.found = self.found or ownership.describe()  # before the first control, so that what one leaves shows too
        self.scope = contextlib.ExitStack()
        self.scope.enter_context(ownership.as_found(timeout_s=self.config.meet_timeout_s))
        groups.install()  # handles first, so that what a person patches lies around them and not below
        standin.install()

    def _build(self) -> None:
        self.log, self.job = [], load(self.config.model)(self.ctx)

    def _train(self, what: str) -> None:
        began = time.perf_counter()
        made = list(self.job.step(self.config.steps))
        self.log += made
        seconds = time.perf_counter() - began
        log_steps(made, done=len(self.log), seconds=seconds, device=str(self.ctx.device), what=what)

    def _leave(self) -> None:
        if mover := self.of.mover if self.of else getattr(self.job, "mover", None):
            mover.close()
        del mover
        self.job = self.releaser = self.state = self.of = None
        gc.collect()
        self.scope.close()
        tensors.trim()

    def _ask_bystander(self) -> None:
        if self.bystander is not None:
            self._record((metric, value, "B") for metric, value in self.bystander.ask().items())

    def _communicators(self) -> None:
        self._record((f"communicators_{name}", size, "B") for name, size in groups.communicators().items())

    def _record(self, rows: Iterable[tuple[str, float, str]]) -> None:
        for row in rows:
            self.ctx.record(*row)

    def _found(self, metric: str, found: Sequence[Any]) -> None:
        """Record the number of findings, with the first of them as text."""
        self.ctx.record(metric, len(found), text=shown(found))

    def _roots(self) -> dict[str, Any]:
        """Where the walk begins: chunks and optimizer, for short names, then whatever else the job keeps."""
        own = {name: value for name, value in children(self.job) if not isinstance(value, tensors.Mover)}
        return {"chunks": self.job.chunks, "optimizer": self.job.optimizer, "job": own}

    def _state(self) -> State:
        return State(**self._roots())

    def _hashes(self) -> dict[str, str]:
        """Return a digest of every tensor of the state except scratch memory, by kind and name."""
        found = self._state().prints()
        return {f"{one.kind}/{name}": one.digest for name, one in found.items() if one.kind != "other"}

    def _to_go(self, each: Resident) -> bool:
        """Whether a tensor must be released: its kind is configured, or all kinds are, which includes tensors of no kind."""
        kinds = self.config.kinds
        return each.kind in kinds or len(kinds) == len(tensors.KINDS)

    def _resident(self) -> list[Resident]:
        return self._state().resident(self.ctx.device.type)


def shown(found: Iterable[Any]) -> str:
    every = [str(one) for one in found]
    more = f"; and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return "; ".join(every[:SHOWN]) + more


def apart(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


class Watch:
    """One job's groups, tensors and generators, before each release and after each reload. It keeps no group alive, and no tensor
    across a release."""

    def __init__(self, born: Births) -> None:
        self.born = born
        self.old: list[observe.Old] = []
        self.standing = False
        self.mute = False  # a Megatron group did not answer: further training would wait for it
        self.prints: dict[str, Print] = {}
        self.random: dict[str, str] = {}
        self._ranks: dict[str, list[int]] = {}
        self._answered: dict[str, list[int]] = {}
        self._seen = observe.Seen()
        self._world: weakref.ref[Any] | None = None

    def first_talk(self) -> list[str]:
        """Communicate over every group of the new job. The ranks that answer now must answer after every reload."""
        self._ranks, wrong = observe.talk()
        self.standing = bool(observe.standing())
        return wrong

    def before(self, prints: dict[str, Print], **roots: Any) -> None:
        self.prints = prints
        self._seen = observe.look(self._whole(), **roots)
        self._seen.ranks = self._ranks
        self.old = observe.remember()
        self._world = weakref.ref(births.world())
        self.random = observe.random_state()

    def alive(self) -> list[str]:
        """The groups created since the job began that something still holds."""
        return [str(group.group_desc) for group in self._whole()]

    def _whole(self) -> list[Any]:
        """The living groups of the job, without the backends inside them."""
        return [group for group in self.born.alive() if type(group) is dist.ProcessGroup]

    def world_left(self) -> bool:
        """Whether the default group from before the release still exists."""
        return dist.is_initialized() or (self._world is not None and self._world() is not None)

    def talk(self) -> tuple[int, list[str]]:
        """Return the number of groups that answered, and the errors: a failed collective, or other ranks than before."""
        answered, wrong = observe.talk()
        self._answered, self.mute = answered, bool(wrong)
        if not wrong:
            wrong = [
                f"{name}: {f'ranks {answered[name]}' if name in answered else 'no ranks'} answer in place of {ranks}"
                for name, ranks in self._ranks.items()
                if answered.get(name) != ranks
            ]
        if name := births.taken_name():
            wrong.append(f"the next group would get the name {name!r}, which another group already has")
        return len(answered), wrong

    def after(self, **roots: Any) -> tuple[list[str], list[str], list[str]]:
        """Return names that stand for other ranks than before the release, changed options, and stale handles."""
        now = observe.look(self._whole(), **roots)
        now.ranks = self._answered
        return observe.moved(self._seen, now), observe.changed(self._seen, now), observe.stale(self._seen, now)


def any_rank(value: bool) -> bool:
    """Whether the value is true on any rank; communicates over the default group."""
    flag = torch.tensor([int(value)], device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def differing(log: Log, control: Log) -> int:
    return sum(a != b for a, b in zip(log, control, strict=False)) + abs(len(log) - len(control))


def departs(log: list[dict[str, float]], control: list[dict[str, float]]) -> tuple[int, str] | None:
    """The first step, counted from 1, at which training differs from training without a release, and the difference."""
    for number, (mine, theirs) in enumerate(zip(log, control, strict=False), 1):
        if mine != theirs:
            names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            return number, ", ".join(f"{name} {mine.get(name)} vs {theirs.get(name)}" for name in names)
    if len(log) != len(control):
        return min(len(log), len(control)) + 1, f"{len(log)} steps vs {len(control)}"
    return None


# -- rehearsals: a group that cannot be destroyed, and errors inside a borrowed state -------------------------------------


@contextlib.contextmanager
def refusing(victim: Any) -> Iterator[list[str]]:
    """While entered, one group cannot be destroyed, however that is asked for: by torch's own call, or by its shutdown or abort. It is
    known by what a collective reaches, so that a wrapper or handle around it is refused alike. Gives what was asked so far."""
    asked: list[str] = []

    def reaches_victim(group: Any) -> bool:
        try:
            with births.doors():
                return group is not None and births.reach(group) is victim
        except Exception:  # noqa: BLE001 - what reaches no group is none
            return False

    def guarded(plain: Callable[[Any], None], name: str, hit: Callable[[Any], bool]) -> Callable[[Any], None]:
        def call(group: Any = None) -> None:
            if hit(group):
                asked.append(name)
                raise RuntimeError("refused on purpose")
            plain(group)

        return call

    doors: list[tuple[Any, str, Callable[[Any], bool]]] = [
        *((module, "destroy_process_group", reaches_victim) for module in (dist, c10d)),
        *((dist.ProcessGroup, name, lambda group: group is victim) for name in ("shutdown", "abort")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, hit in doors:
            stack.enter_context(mock.patch.object(owner, name, guarded(getattr(owner, name), name, hit)))
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
    with contextlib.suppress(ValueError):  # already gone, and counted
        dist.destroy_process_group(theirs)
    for fails in (False, True):
        with without_default_group():
            wrong += borrowed(ctx, default_group, fails=fails)
    return wrong


def silent(group: Any) -> list[str]:
    """The error of a caller's group: an all-reduce that raises, or a wrong sum."""
    total = torch.ones(1)
    try:
        dist.all_reduce(total, group=group)
    except Exception as error:  # noqa: BLE001 - a group that was destroyed may raise anything
        return [f"a caller's group no longer works: {type(error).__name__}: {error}"]
    return [] if total.item() == dist.get_world_size() else [f"a caller's group sums {total.item():g} ranks"]


def borrowed(ctx: Context, body: Callable[[], None], *, fails: bool) -> list[str]:
    """Run a body inside `as_found`, which then ends well or with an error, with the fault if one is on; what is wrong afterwards."""
    before = ownership.describe()
    wrong = []
    try:
        with scope(ctx.fault):
            body()
            if fails:
                raise OnPurposeError  # noqa: TRY301 - the rehearsed error
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
    log = logging.getLogger(ownership.__name__)  # the rehearsed error is logged by design
    with mock.patch.object(log, "disabled", new=True), ownership.as_found():
        try:
            yield
        except OnPurposeError:
            if fault == "masks-original-error":
                raise RuntimeError("cleaning up failed") from None
            raise


def own_group() -> None:
    dist.all_reduce(torch.rand(1), group=dist.new_group(backend="gloo"))  # the caller's random numbers must not change


def default_group() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))


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
