"""What a rank does in the offload lab. One method a phase; `watch.py` observes, `rehearsals.py` has what fails on purpose.

The phases between `release` and `reload`, and around them, are the observers': nothing of them is in the times of the code under test.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from kit.labs.bystander import Bystander
from kit.labs.offload.faults import KIT_RELEASER
from kit.labs.offload.lab import KIT_MODEL
from kit.labs.offload.ranks import oracle, rehearsals
from kit.labs.offload.ranks.job import JobContext, context_for
from kit.labs.offload.ranks.oracle import Steps, unequal
from kit.labs.offload.ranks.releaser import KitReleaser, around, make_releaser, reported
from kit.labs.offload.ranks.watch import JobWatch, any_rank, generators_and_settings
from kit.labs.rankside import Context, digest_of_hashes
from kit.measure.observers.births import Births, Names, replaced_names, take_names
from kit.measure.observers.tensors import (
    KINDS,
    Resident,
    TensorState,
    children_of,
    held_bytes,
    live_bytes,
    tensor_differences,
)
from kit.measure.phase import log_steps, looking
from kit.megatron import groups, observe, ownership, standin, tensors
from kit.target import load

PATCHABLE = ("torch.distributed", "megatron.core")  # their functions must be the original ones at the end
NAMED = 5  # tensors that differ, in records of their own
SHOWN = 2  # of what differs, in a text
CLOSED_S = 1.0  # what is still open then does not close by itself
MOST_TIMES = 4  # that a failure is rehearsed, while each time adds something
NOTHING: Mapping[str, int] = MappingProxyType({})


class Offload:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.job: Any = None
        self.job_context: JobContext | None = None
        self.releaser: Any = None
        self.released: Any = None  # the state that the releaser wants back
        self.controls: list[tuple[Steps, dict[str, str]]] = []
        self.steps: Steps = []
        self.watch = JobWatch(Births())
        self.names: Names = {}
        self.broken = False  # handles went stale on some rank: training on would use dead groups
        self.on_entry: dict[str, Any] = {}
        self.borrowed: list[str] = []  # what was not as found while the job lived
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
        self.make_job()

    def control(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._train("control")
        self.ctx.record("tensor_bytes", live_bytes(), "B")

    def control_end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.controls.append((self.steps, self._hashes()))
        if self.config.model == KIT_MODEL:
            groups.destroy(timeout_s=self.config.meet_timeout_s)  # all at once; leaving alone takes them one by one
        self._leave()

    def second_control(self, cycle: int) -> None:
        """Run the control again: if two runs without a release differ, a run with releases proves nothing."""
        self.control_build(cycle)
        for _ in range(self.config.cycles + 1):
            self.control(cycle)
        self.control_end(cycle)
        (first_steps, first), (second_steps, second) = self.controls
        differing = oracle.steps_that_differ(first_steps, second_steps) + len(unequal(first, second))
        self.ctx.record("controls_differ", differing)

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
        self.watch = JobWatch(self.scope.enter_context(Births()))
        yielded = self.scope.enter_context(around(self.ctx))
        self.make_job()
        self.job_context = context_for(self.ctx, self.job, yielded)
        before = self._beside()
        self.releaser = make_releaser(self.job_context)
        self.ctx.record("made_bytes", self._beside() - before, "B")
        wrong = self.watch.first_talk()  # over NCCL a communicator is there only after its first collective
        assert not wrong, wrong

    def train(self, cycle: int) -> None:
        """The last training follows one more reload at once: what would arrive during the checks is late for it."""
        if self.broken:
            return
        if cycle > self.config.cycles:
            with looking():
                self.releaser.restore(self.releaser.release())
        self._train("released job")
        self.ctx.record("trained_steps", len(self.steps))
        for name in ("loss", "grad_norm"):
            if name in self.steps[-1]:
                self.ctx.record(name, self.steps[-1][name])

    def fingerprint(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Record every tensor, group, holder and generator before a release."""
        prints = self._state().prints() if self.config.hashes else {}
        self.watch.before_release(prints, **self._roots())
        self.ctx.record("groups_watched", len(self.watch.old))

        resident, expected = self._resident(), oracle.expected_bytes(self.job, self.ctx.world_size)
        for kind in KINDS:
            self.ctx.record("state_bytes", sum(item.size for item in resident if item.kind == kind), "B", kind=kind)
            if kind in expected:
                self.ctx.record("state_arithmetic", expected[kind], "B", kind=kind)
        self.ctx.record("resident_bytes", sum(item.size for item in resident if self._must_leave(item)), "B")
        self.ctx.record("beside_bytes", self._beside(), "B")
        self._communicators()

    def release(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.released = self.releaser.release()
        self._record(reported(self.released))

    def idle(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Measure while released: the numbers of this phase show what a release frees."""
        gc.collect()  # here and not in release: the lab's own clean-up must not be timed
        self.ctx.record("tensor_bytes", live_bytes(), "B")
        self.ctx.record("beside_bytes", self._beside(), "B")

        left = sorted(filter(self._must_leave, self._resident()), key=lambda item: -item.size)
        self.ctx.record("left_bytes", sum(item.size for item in left), "B")
        counted = [item for item in left if item.kind in self.config.kinds and item.size > rehearsals.SCALAR_BYTES]
        self._count("left_tensors", counted)

        if self.config.groups:
            self._count("old_groups_alive", self.watch.alive())
            # Suspended gloo groups stay usable.
            usable = observe.usable(self.watch.old, but_gloo=self.config.mode in groups.KEEPING)
            self._count("stale_usable", usable)
            # Megatron may stay initialised if each of its groups raises an error with its name.
            self.ctx.record(
                "initialised", int(observe.model_parallel_exists() and (bool(usable) or not self.watch.old))
            )
            self.ctx.record("world_left", int(self.watch.world_left()))
            self._communicators()
        self._ask_bystander()

    def reload(self, cycle: int) -> None:  # noqa: ARG002 - as above
        stats = self.releaser.restore(self.released)
        if self.config.hashes:
            with looking():  # at once: copies that are still under way would end during the phases that follow
                self.watch.arrived = self._state().samples()
        self._record(reported(stats))
        self.released = None

    def talk(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """The first collectives after a reload, over every group, with values that depend on the rank."""
        talked, wrong = self.watch.talk()
        self.ctx.record("talked_groups", talked)
        self._count("wrong_groups", [*wrong, *(() if wrong else self.watch.use_a_new_group())])

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Record everything again after a reload, random numbers first."""
        self.ctx.record("unchecked", int(not self.config.hashes))
        if self.config.groups or self.config.kinds:
            self._count("generators_moved", unequal(self.watch.random, generators_and_settings()))

        moved, options, stale = self.watch.after_reload(**self._roots())
        self._count("membership_changed", moved)
        self._count("options_changed", options)
        self._count("stale_holders", stale)

        if self.config.hashes:
            state = self._state()
            after, zeroed = state.prints(), self.config.dropped_grads
            different = tensor_differences(self.watch.prints, after, zeroed=zeroed, shared=state.shared)
            del state
            self.ctx.record("tensors_hashed", len(after))
            self._count("tensors_changed", different)
            self._count(
                "tensors_late", self.watch.late({tensor.name for tensor in different}, self.config.dropped_grads)
            )
            for tensor in different[:NAMED]:
                self.ctx.record(
                    "tensor_differs", tensor.largest, text=tensor.what, tensor=tensor.name, kind=tensor.kind
                )
        self.watch.prints, self.watch.arrived = {}, {}

        if not self.broken and (wrong := [*moved, *options, *stale]):
            print(f"groups, options and handles that differ: {len(wrong)}, first: {wrong[0]}")
        self.broken = self.broken or any_rank(bool(stale or self.watch.mute))
        self.ctx.record("broken", int(self.broken))
        self._ask_bystander()

    def compare(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.broken:
            return
        expected_steps, expected = self.controls[0]
        self.ctx.record("steps_compared", len(self.steps))
        self.ctx.record("steps_differ", oracle.steps_that_differ(self.steps, expected_steps))
        if departure := oracle.first_departure(self.steps, expected_steps):
            step, difference = departure
            self.ctx.record("departs", step, text=difference, cycle_of_step=-(-step // self.config.steps))
        hashes = self._hashes()
        self._count("tensors_differ", unequal(hashes, expected))
        self.ctx.record("digest", None, text=digest_of_hashes(hashes))

    def rehearse_restore(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Make allocations of a reload fail on one rank, twice."""
        # Where the kit moves the tensors, `restore` may be called again after an error.
        may_retry = isinstance(self.releaser, KitReleaser) or self._promises_retries()
        if may_retry and self.config.kinds and not self.broken:
            assert self.job_context
            self._repeat("restore-fails", rehearsals.restore_fails, self.job_context, self.releaser, self._state)

    def rehearse_failure(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Make one group impossible to destroy: the release must raise an error that names it. Twice, if it may be tried again; and for the
        kit's own release a rank is late for a meeting."""
        if self.broken:
            return
        kits = self.config.implementation == KIT_RELEASER
        if kits:  # your own may have replaced what makes groups
            assert self.job_context
            self.borrowed = rehearsals.borrow_from_the_job(self.job_context)
        if not (self.config.groups and self.config.mode in groups.EXACT and self.watch.standing):
            return
        if kits and self.ctx.world_size > 1:
            assert self.job_context
            wrong = rehearsals.arrivals_left(self.job_context, self.config.meet_timeout_s)
            text = findings_in_words(wrong)
            self.ctx.record("rehearsal_left", len(wrong), text=text, scene="late-rank", kind="arrivals")
        if kits or self._promises_retries():
            self._repeat("destroy-fails", rehearsals.destroy_fails, self.releaser, returns=kits)
        else:
            self._findings("destroy-fails", rehearsals.destroy_fails(self.releaser))

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._leave()
        self._count("names_replaced", replaced_names(self.names))
        if self.bystander is not None:
            self.bystander.close()

    def ownership(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Are the caller's groups unchanged after success and after an error, with and without a default group of the caller?"""
        if wrong := [*self.borrowed, *rehearsals.not_as_found(self.on_entry)]:
            print(f"not as found: {findings_in_words(wrong)}")
        self.ctx.record("not_as_found", len(wrong))

    # -- how ----------------------------------------------------------------------------------------------------------

    def make_job(self) -> None:
        self.steps, self.job = [], load(self.config.model)(self.ctx)

    def _enter(self) -> None:
        if not self.on_entry:  # before the first control, so that what the control leaves behind shows too
            self.on_entry = ownership.describe_state()
        self.scope = contextlib.ExitStack()
        self.scope.enter_context(ownership.as_found(timeout_s=self.config.meet_timeout_s))
        groups.install()  # handles first, so that what a person patches lies around them and not below
        standin.install()

    def _promises_retries(self) -> bool:
        return bool(getattr(getattr(self.releaser, "own", self.releaser), "retries", False))

    def _repeat(
        self, scene: str, rehearse: Callable[..., Iterable[rehearsals.Finding]], *args: Any, returns: bool = True
    ) -> None:
        """Rehearse a failure twice: what the second time adds to descriptors, sockets, threads and groups was leaked. If it `returns`
        everything, the level before counts too, and later times must add it as well: gloo connects late, but each failure leaks. Otherwise
        the second time may go wrong in another way, which proves nothing."""
        assert self.job_context
        highest = self._held() if returns else {}
        left: dict[str, int] = {}
        for before in range(MOST_TIMES if returns else 2):
            findings = [*rehearse(*args)]
            if not returns and before and (not findings or any(finding.value for finding in findings)):
                return
            self._findings(scene, findings)
            held = self._held(highest if before else NOTHING)
            if before:
                added = {kind: max(0, held[kind] - most) for kind, most in highest.items()}
                left = {kind: min(left.get(kind, number), number) for kind, number in added.items()}
                texts = {
                    kind: f"{most} until time {before}, {held[kind]} after the next" for kind, most in highest.items()
                }
                if not returns or not rehearsals.on_any_rank(self.job_context, any(left.values())):
                    break
            highest = {kind: max(number, highest.get(kind, 0)) for kind, number in held.items()}
        for kind, number in left.items():
            self.ctx.record("rehearsal_left", number, text=texts[kind] if number else "", scene=scene, kind=kind)

    def _held(self, most: Mapping[str, int] = NOTHING) -> dict[str, int]:
        """What this process holds. More than `most` has a while to close: a group closes its connections on a thread of its own."""
        end = time.monotonic() + CLOSED_S
        while True:
            gc.collect()
            held = self.watch.held()
            if time.monotonic() > end or all(held[kind] <= number for kind, number in most.items()):
                return held
            time.sleep(0.01)

    def _findings(self, scene: str, findings: Iterable[rehearsals.Finding]) -> None:
        for metric, value, text in findings:
            self.ctx.record(metric, value, text=text, scene=scene)
            if value and metric != "restore_refused":
                print(f"rehearse: {metric} is {value:g} in scene {scene}: {text}")

    def _train(self, purpose: str) -> None:
        began = time.perf_counter()
        trained = list(self.job.step(self.config.steps))
        self.steps += trained
        seconds = time.perf_counter() - began
        log_steps(trained, done=len(self.steps), seconds=seconds, device=str(self.ctx.device), what=purpose)

    def _leave(self) -> None:
        if mover := self.job_context.mover if self.job_context else getattr(self.job, "mover", None):
            mover.close()
        del mover
        self.job = self.releaser = self.released = self.job_context = None
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

    def _count(self, metric: str, findings: Sequence[Any]) -> None:
        """Record the number of findings, with the first of them as text."""
        self.ctx.record(metric, len(findings), text=findings_in_words(findings))

    def _roots(self) -> dict[str, Any]:
        """Where the walk begins: chunks and optimizer, for short names, then whatever else the job keeps."""
        own = {name: value for name, value in children_of(self.job) if not isinstance(value, tensors.Mover)}
        return {"chunks": self.job.chunks, "optimizer": self.job.optimizer, "job": own}

    def _state(self) -> TensorState:
        return TensorState(**self._roots())

    def _hashes(self) -> dict[str, str]:
        """Return a digest of every tensor of the state except scratch memory, by kind and name."""
        prints = self._state().prints()
        return {f"{tensor.kind}/{name}": tensor.digest for name, tensor in prints.items() if tensor.kind != "other"}

    def _must_leave(self, item: Resident) -> bool:
        """Whether a tensor must be released: its kind is configured, or all kinds are, which includes tensors of no kind."""
        kinds = self.config.kinds
        return item.kind in kinds or len(kinds) == len(tensors.KINDS)

    def _beside(self) -> int:
        """Bytes that this process holds beside the job's state: its copy on the host, and whatever else the job and the releaser keep."""
        gc.collect()
        return held_bytes() - sum(item.size for item in self._resident())

    def _resident(self) -> list[Resident]:
        return self._state().resident(self.ctx.device.type)


def findings_in_words(findings: Sequence[Any]) -> str:
    omitted = f"; and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
    return "; ".join(map(str, findings[:SHOWN])) + omitted
