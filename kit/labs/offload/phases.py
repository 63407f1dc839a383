"""What a rank does in the offload lab. One method a phase; faults are in `broken.py`, what is looked at in `watch.py`."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.labs.bystander import Bystander
from kit.labs.offload import rehearse
from kit.labs.offload.broken import double_patched
from kit.labs.offload.config import KIT_MODEL
from kit.labs.offload.job import JobContext, context_for
from kit.labs.offload.releaser import around, make_releaser, told
from kit.labs.offload.watch import Births, Watched, any_rank, compare_groups, differences, stale_holders
from kit.labs.outcome import digest
from kit.labs.rankside import load
from kit.megatron import groups, ownership, standin, tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kit.labs.rankside import Context

Log = list[dict[str, float]]


class Offload:
    """The job, its controls, and what is known of it between phases."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.job: Any = None
        self.of: JobContext | None = None
        self.releaser: Any = None
        self.controls: list[tuple[Log, dict[str, str]]] = []
        self.log: Log = []
        self.state: Any = None
        self.births = Births()
        self.watched: Watched
        self.before: dict[str, str] = {}
        self.broken = False  # handles went stale on some rank: training on would use dead groups
        self.found: dict[str, Any] = {}
        self.scope = contextlib.ExitStack()
        self.bystander: Bystander | None = None
        if self.config.mode in groups.KEEPING:
            groups.refuse_keeping()

    # -- the controls: the same job without a break -------------------------------------------------------------------

    def start(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """What there is before anything of the lab: one process group; on CUDA a context, one matmul and a bystander too."""
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
        self.log += self.job.step(self.config.steps)

    def control_end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.controls.append((self.log, self._hashes()))
        if self.config.model == KIT_MODEL:
            groups.destroy(timeout_s=self.config.meet_timeout_s)  # all at once; leaving alone takes them one by one
        self._leave()

    def second_control(self, cycle: int) -> None:
        """Once more: if two runs without any release differ, a run with releases proves nothing."""
        self.control_build(cycle)
        for _ in range(self.config.cycles + 1):
            self.control(cycle)
        self.control_end(cycle)
        (first_log, first), (second_log, second) = self.controls
        self.ctx.record("controls_differ", differences(first_log, second_log) + differences(first, second))

    # -- the job that is released -------------------------------------------------------------------------------------

    def baseline(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """After everything was there once: what this process holds without the job."""
        gc.collect()
        tensors.trim()
        dist.barrier()
        self._communicators()

    def build(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._enter()
        self.births = self.scope.enter_context(Births())
        given = self.scope.enter_context(around(self.ctx))
        with double_patched() if self.ctx.fault == "double-patch" else contextlib.nullcontext():
            self._build()
        self.of = context_for(self.ctx, self.job, given)
        self.releaser = make_releaser(self.of)
        for row in groups.talk():  # over NCCL a communicator is there only after its first collective
            assert row["exact"], row

    def train(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.broken:
            return
        self.log += self.job.step(self.config.steps)
        self.ctx.record("trained_steps", len(self.log))
        for name in ("loss", "grad_norm"):
            if name in self.log[-1]:
                self.ctx.record(name, self.log[-1][name])

    def fingerprint(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.before = self._hashes() if self.config.hashes else {}
        self.watched = Watched(self.births)
        self.ctx.record("groups_watched", len(self.watched.facts))
        self.ctx.record("resident_bytes", self._resident(), "B")
        self._communicators()

    def release(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.state = self.releaser.release()
        self._record(told(self.state))

    def idle(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Nothing is held. What is measured of this phase is what a release is worth."""
        gc.collect()  # here and not in release: what the lab does to see clearly is no part of what it times
        self.ctx.record("left_bytes", self._resident(), "B")
        if self.config.groups:
            self.ctx.record("initialised", int(groups.initialised()))
            self.ctx.record("old_groups_alive", len(self.watched.alive()))
            kept = self.config.mode in groups.KEEPING  # some groups cannot be suspended, and stay in use
            self.ctx.record("stale_usable", len(self.watched.still_usable(but_kept=kept)))
            self._communicators()
        self._ask_bystander()

    def reload(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._record(told(self.releaser.restore(self.state)))
        self.state = None

    def talk(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """The first collective after a reload, over every group, with values that depend on the rank."""
        rows = groups.talk()
        self.ctx.record("talked_groups", len(rows))
        self.ctx.record("wrong_groups", sum(not row["exact"] for row in rows))

    def verify(self, cycle: int) -> None:  # noqa: ARG002 - as above
        moved, changed, what = compare_groups(self.watched)
        self.ctx.record("membership_changed", moved)
        self.ctx.record("options_changed", changed)
        stale = stale_holders(chunks=self.job.chunks, optimizer=self.job.optimizer)
        self.ctx.record("stale_holders", len(stale))
        self.ctx.record("unchecked", int(not self.config.hashes))
        if self.config.hashes:
            after = self._hashes()
            self.ctx.record("tensors_hashed", len(after))
            self.ctx.record("tensors_changed", differences(self.before, after))
        if not self.broken:
            for line in [*what, *stale[:3], *([f"... and {len(stale) - 3} more"] if len(stale) > 3 else [])]:
                print("differs:", line)
        self.broken = self.broken or any_rank(bool(stale))
        self.ctx.record("broken", int(self.broken))
        self._ask_bystander()

    def compare(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Against the control: every loss, gradient norm, weight and optimizer state."""
        if self.broken:
            return
        log, hashes = self.controls[0]
        self.ctx.record("steps_compared", len(self.log))
        self.ctx.record("steps_differ", differences(self.log, log))
        after = self._hashes()
        self.ctx.record("tensors_differ", differences(after, hashes))
        self.ctx.record("digest", digest(after))

    def rehearse_failure(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """A group that cannot be destroyed: the release must say so, by name."""
        if self.config.groups and self.config.mode in groups.EXACT and not self.broken and groups.initialised():
            raised = rehearse.failure_raises(self.releaser)
            if raised is not None:
                self.ctx.record("failure_hidden", int(not raised))

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self._leave()
        if self.bystander is not None:
            self.bystander.close()

    def ownership(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Whose group is it: after success and after an error, with and without a default group of the caller's."""
        wrong = rehearse.not_as_found(self.ctx, self.found)
        for line in wrong:
            print("not as found:", line)
        self.ctx.record("not_as_found", len(wrong))

    # -- how ----------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.found = ownership.describe()
        self.scope = contextlib.ExitStack()
        self.scope.enter_context(ownership.as_found(timeout_s=self.config.meet_timeout_s))
        groups.install()  # handles first, so that what a person patches lies around them and not below
        standin.install()

    def _build(self) -> None:
        self.log = []
        self.job = load(self.config.model)(self.ctx)

    def _leave(self) -> None:
        """Let go of the job and put the state back as it was found."""
        mover = self.of.mover if self.of else getattr(self.job, "mover", None)
        if mover is not None:
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
        """What the library itself says that communicators take, beside what the driver says."""
        self._record((f"communicators_{name}", size, "B") for name, size in groups.communicators().items())

    def _record(self, rows: Iterable[tuple[str, float, str]]) -> None:
        for row in rows:
            self.ctx.record(*row)

    def _hashes(self) -> dict[str, str]:
        return tensors.hashes(self.job.chunks, self.job.optimizer)

    def _resident(self) -> int:
        """Bytes of the job's tensors that are on the device and were to be given back."""
        assert self.of is not None
        kinds: tuple[str, ...] = self.config.kinds
        return sum(item.size for item in self.of.mover.items() if item.kind in kinds)
