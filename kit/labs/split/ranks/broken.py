"""Everything that goes wrong on purpose: the faults of the lab, and the failures that it rehearses.

A fault is one bug in the kit's split step, or in the loss that the plain and the split step share. Rehearsed failures are aborts, errors in
the middle of a step, non-finite values, and calls in the wrong state. Each rehearsal has a fresh job that has trained one step. It counts
broken promises; 0 is correct. The state is compared by hashes of every tensor, so that "unchanged" means every bit.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.labs.split.lab import KIT_SPLIT, SplitConfig
from kit.labs.split.ranks.backends import WrappedLoss
from kit.labs.split.ranks.oracle import true_counts
from kit.measure.observers.births import Births
from kit.megatron import observe, split
from kit.train import fsdp, protocol
from kit.train.losses import ClippedPolicyGradient
from kit.train.protocol import Batch, Loss, Misuse, Split, SplitContext, StepResult, cut, rows, valid

ELSEWHERE = ("mask-not-shifted", "weights-cancel", "masks-multiply", "unclipped")  # faults of the loss and the job
WITHOUT = {
    "no-reduce": "_reduce",
    "missing-sync": "_synchronise",
    "moe-aux-unscaled": "_correct_aux",
}  # skipped methods
HALF_PRECISION = 2**11  # float16 cannot count beyond it in steps of one
MANY_CALLS = 100


# -- faults ------------------------------------------------------------------------------------------------------------------


def make_split(fault: str | None, given: SplitContext) -> Split:
    """The configured split step; the kit's own with the fault, if one is on."""
    target = given.config.implementation
    if fault is None or fault in ELSEWHERE:
        return protocol.make_split(target, given, "implementation")
    if target != KIT_SPLIT:
        raise BadInput(f"fault {fault!r} is a bug of the kit's own split step: leave out implementation={target}")
    if given.config.backend == "fsdp2":
        if fault != "dummy-bins-counted":
            raise BadInput(f"fault {fault!r} is a bug of the Megatron split step: leave out backend=fsdp2")
        return DummiesCounted(given.job)
    if fault == "dummy-bins-counted":
        raise BadInput("fault 'dummy-bins-counted' is a bug of the FSDP2 split step: set backend=fsdp2")
    return BrokenMegatron(given.job, fault)


def broken_loss(fault: str | None, loss: Loss) -> Loss:
    def multiplied(logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        value, seen = loss(logprobs, batch, **counts)
        return value + (logprobs * 0.0).sum(), seen

    def not_shifted(logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        return loss(logprobs, {**batch, "token_mask": batch["token_mask"].roll(1, dims=1)}, **counts)

    if fault == "mask-not-shifted":
        return WrappedLoss(loss, not_shifted)
    if fault == "masks-multiply":
        return WrappedLoss(loss, multiplied)
    if fault == "weights-cancel":
        if not isinstance(loss, ClippedPolicyGradient):
            raise BadInput("fault 'weights-cancel' is a bug of the kit's clipped loss: leave out loss and recipe=nll")
        return Cancelling(**{field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)})
    return loss


def broken_job(fault: str | None, job: Any) -> Any:
    if fault == "unclipped":
        if not hasattr(job.optimizer, "config"):
            raise BadInput("fault 'unclipped' is a bug of a Megatron job: leave out backend=fsdp2")
        job.optimizer.config.clip_grad = 0.0
    return job


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelling(ClippedPolicyGradient):
    """A loss that computes the importance weight as expm1(gap) + 1 in float32."""

    def _weight(self, gap: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lossy = (gap.float().expm1() + 1).double().log()
        return super(Cancelling, self)._weight(lossy, length)


class BrokenMegatron(split.MegatronSplit):
    """The kit's step on Megatron with one bug."""

    def __init__(self, job: split.Job, fault: str) -> None:
        super().__init__(job)
        self.fault = fault
        if fault in WITHOUT:
            setattr(self, WITHOUT[fault], lambda *_: None)

    def begin(self, loss: Loss, gbs: int, mbs: int) -> None:
        right = loss.normalizers()
        if self.fault == "one-scalar-metrics":
            loss = WrappedLoss(loss, names=dict.fromkeys(right, loss.level))
        elif self.fault == "counts-normalised":
            loss = WrappedLoss(loss, names={name: by or loss.level for name, by in right.items()})
        super().begin(loss, gbs, mbs)

    def microbatch(self, data: Batch) -> None:
        if self.fault == "release-mid-step" and self.pieces == 1:
            for buffer in self.job.chunks[0].buffers:
                storage = buffer.grad_data.untyped_storage()
                size = storage.size()
                storage.resize_(0)
                storage.resize_(size)
                buffer.grad_data.zero_()
        super().microbatch(data)

    def abort(self) -> None:
        opened = self.state == "open"
        super().abort()
        if self.fault == "ticks-on-abort" and opened:
            self.version += 1

    def _hook(self) -> None:
        super()._hook()
        if self.fault == "no-sync-leak":
            self.config.no_sync_func = self.saved["no_sync_func"]
        elif self.fault == "per-chunk-finalize":
            self.config.finalize_model_grads_func = self.saved["finalize_model_grads_func"]

    def _restore(self) -> None:
        if self.fault == "hooks-lost-on-error" and self.failed:
            return
        super()._restore()

    def _pieces(self, data: Batch) -> list[Batch]:
        if self.fault == "drops-remainder":
            data = cut(data, 0, rows(data) // self.mbs * self.mbs)
        pieces = super()._pieces(data)
        return pieces[:-1] if self.fault == "drops-last-microbatch" and len(pieces) > 1 else pieces

    def _aux_guess(self, pieces: list[Batch]) -> float:
        return 1.0 if self.fault == "moe-aux-unscaled" else super()._aux_guess(pieces)

    def _metrics(self, sequences: float, tokens: float) -> dict[str, float]:
        if self.fault == "group-per-step":
            self.own_group = dist.new_group()
        table = super()._metrics(sequences, tokens)
        if self.fault == "moe-aux-summed":
            table["moe_aux_loss"] *= self.microbatches
        return table

    def _step_metrics(self, group: Any, sequences: float, tokens: float) -> dict[str, float]:
        if self.fault == "replicas-counted-n-times":
            group = dist.group.WORLD
        table = super()._step_metrics(group, sequences, tokens)
        if self.fault == "metrics-on-rank-0-alone" and dist.get_rank(group) and tokens:
            names = self.loss.normalizers()
            own = protocol.of_microbatches(self.seen, names)
            table = protocol.normalised(own, names, tokens=tokens, sequences=sequences)
        if self.fault == "loses-a-metric":
            del table["num_unmasked_tokens"]
        return table

    def _normalise(self, own: float) -> None:
        if self.fault == "missing-sync":
            late: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(late):
                torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call] # the division is late, and nothing waits for it
                super()._normalise(own)
        else:
            super()._normalise(own)

    def _reduce(self) -> None:
        if self.fault == "double-reduce":
            for group in split.bucket_groups(self.job.chunks[0]):
                group.start_grad_sync()
        super()._reduce()

    def _update(self, sequences: float, tokens: float, table: dict[str, float]) -> StepResult:
        if self.fault == "nan-applied":
            with mock.patch.object(split, "finite_gradients", return_value=True):
                return super()._update(sequences, tokens, table)
        if self.fault == "schedule-by-steps":
            return split.update(self.job, 1, sequences, tokens, table)
        result = super()._update(sequences, tokens, table)
        if self.fault == "late-lr":
            result["lr"] = max(float(group["lr"]) for group in self.job.optimizer.param_groups)
        elif self.fault == "norm-of-sums":
            result["grad_norm"] *= tokens if self.loss.level == "tokens" else sequences
        return result

    def _give_up(self) -> None:
        if self.fault == "abort-keeps-grads":
            self._restore()
            return
        self.random = () if self.fault == "abort-keeps-random" else self.random
        super()._give_up()


class DummiesCounted(fsdp.FsdpSplit):
    """The kit's FSDP2 step that pads with real rows and counts them."""

    def fill(self, pieces: list[Batch], most: int) -> list[Batch]:
        return pieces + pieces[:1] * (most - len(pieces))


# -- rehearsed failures --------------------------------------------------------------------------------------------------------


class RehearsedError(RuntimeError):
    """An error that is raised on purpose."""


@dataclass(kw_only=True, slots=True)
class Scene:
    backend: Any  # of backends.py
    make: Callable[[Any], Any]  # the code under test on another job
    loss: Loss
    batches: list[Batch]
    config: SplitConfig
    job: Any = None
    step: Any = None
    hooks: tuple[Any, ...] = ()
    found: list[tuple[str, float, str, dict[str, Any]]] = field(default_factory=list)  # what `note` was given

    def fresh(self) -> Scene:
        job = self.backend.fresh()
        return dataclasses.replace(self, job=job, step=self.make(job), hooks=self.backend.hooks(job), found=[])

    def begin(self, loss: Loss | None = None) -> None:
        self.step.begin(loss or self.loss, self.config.batch, self.config.micro_batch)

    def feed(self, batch: Batch) -> None:
        """Feed a copy, because the code under test may change its rows."""
        self.step.microbatch({name: value.clone() for name, value in batch.items()})

    def whole(self, batch: Batch) -> StepResult:
        self.begin()
        self.feed(batch)
        result: StepResult = self.step.finish()
        return result

    def changed(self, before: dict[str, str]) -> list[str]:
        after = self.backend.state(self.job)
        return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))

    def note(self, metric: str, value: float, text: str = "", **ids: Any) -> None:
        """A number of broken promises, what was observed, and its ids."""
        self.found.append((metric, value, text, ids))

    def note_changed(self, metric: str, before: dict[str, str], *, but: str = "", **ids: Any) -> None:
        changed = [name for name in self.changed(before) if name != but]
        self.note(metric, len(changed), ", ".join(changed[:3]), **ids)

    def note_hooks(self, after: str) -> None:
        self.note("hooks_lost", hooks_lost(self.hooks, self.backend.hooks(self.job)), after=after)

    def note_refused(self, call: str, function: Callable[[], object], state: str) -> None:
        """Note whether a call is accepted, whether its error does not name the state, whether it is no `Misuse`."""
        error = raised_by(function)
        wrong = {
            "misuse_silent": error is None,
            "misuse_other_words": error is not None and state not in str(error),
            "misuse_other_type": error is not None and not isinstance(error, Misuse),
        }
        for metric, value in wrong.items():
            self.note(metric, int(value), described(error) if value and error else "", call=call)

    def note_rows(
        self, wrong: str, fine: str = "", call: str = "microbatch with rows that do not fill a microbatch"
    ) -> None:
        self.note("misuse_silent", int(bool(wrong)), wrong or fine, call=call)


def hooks_lost(before: tuple[Any, ...], after: tuple[Any, ...]) -> int:
    return sum(a is not b and a != b for a, b in zip(before, after, strict=True))


def raised_by(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        return error
    return None


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"


class DrawingLoss(WrappedLoss):
    """The loss, which also draws random numbers: without dropout the model draws none, so an abort that keeps the state would not show.
    It raises once it is armed."""

    armed = False

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        torch.rand(1)
        torch.rand(1, device=logprobs.device)
        observe.draw_from_tracker(logprobs.device)
        value = super().__call__(logprobs, batch, **counts)
        if self.armed:
            raise RehearsedError("a loss that raises, on purpose")
        return value


def rehearse_all(made: Scene) -> Scene:
    """Every rehearsal, each on its own job; returns the scene with all that was found. An unexpected error ends only its rehearsal."""
    for rehearsal in (misuse, remainder, many_calls, nothing_valid, aborted, raised, not_finite, groups_of_steps):
        scene = made.fresh()
        before = scene.backend.state(scene.job)
        scene.whole(scene.batches[0])  # from here on the optimizer has state
        made.note("state_unseen", unseen(scene.changed(before)), rehearsal=rehearsal.__name__)
        if error := raised_by(lambda: rehearsal(scene, scene.batches[-1])):  # noqa: B023 - called at once
            traceback.print_exception(error)
        else:
            made.found += scene.found
        made.note("rehearsal_raised", int(bool(error)), described(error) if error else "", rehearsal=rehearsal.__name__)
    return made


def unseen(changed: list[str]) -> int:
    """Kinds of state that a whole step did not change. A kind that the hashes do not cover would pass as unchanged after an abort."""
    optimizer = {name for name in changed if "/" in name and not name.startswith(("weights/", "random/"))}
    weights = {*changed} - optimizer - {"scheduler", "random", "random/device"}
    return sum((not weights, not optimizer, "scheduler" not in changed))


def aborted(scene: Scene, batch: Batch) -> None:
    """Abort half a step: every bit must be as before, and the next step must equal one without the abort."""
    before, version = scene.backend.state(scene.job), scene.step.version
    scene.begin(DrawingLoss(scene.loss))
    scene.feed(batch)
    scene.step.abort()
    scene.note_hooks("abort")
    scene.note_changed("abort_changed", before)
    scene.note("abort_gradients", scene.backend.nonzero_gradients(scene.job))
    scene.note("abort_ticked", int(scene.step.version != version))
    scene.whole(batch)
    scene.note("abort_next_differs", differs_from_control(scene, batch))


def differs_from_control(scene: Scene, batch: Batch) -> int:
    """The number of tensors that differ from a job that did the same steps and nothing in between."""
    control = scene.fresh()
    for each in (scene.batches[0], batch):
        control.whole(each)
    mine, theirs = scene.backend.state(scene.job), control.backend.state(control.job)
    return sum(mine[name] != theirs.get(name) for name in mine if name != "random")


def raised(scene: Scene, batch: Batch) -> None:
    """An error in the middle of microbatch, and one in finish: hooks must be restored, and only abort is allowed afterwards."""
    before, version = scene.backend.state(scene.job), scene.step.version
    for call, breaks in (("microbatch", broken_microbatch), ("finish", broken_finish)):
        after = f"error in {call}"
        scene.note("error_swallowed", int(breaks(scene, batch) is None), after=after)
        scene.note_hooks(after)
        scene.note_refused(f"microbatch after an {after}", lambda: scene.feed(batch), "open")
        scene.note_refused(f"finish after an {after}", scene.step.finish, "open")
        scene.step.abort()
    scene.note_changed("error_changed", before)
    scene.note("error_ticked", int(scene.step.version != version))


def broken_microbatch(scene: Scene, batch: Batch) -> Exception | None:
    """With Megatron the second call raises, so that there is something that a wrong step could finish. With FSDP2, which keeps a piece
    back, ranks would not raise at the same piece: the first call does."""
    loss = DrawingLoss(scene.loss)
    scene.begin(loss)
    if scene.config.backend == "megatron":
        scene.feed(batch)
    if scene.config.pp > 1:  # an error inside the schedule would leave other stages waiting, so all ranks get no rows
        return raised_by(lambda: scene.step.microbatch({}))
    loss.armed = True
    return raised_by(lambda: scene.feed(batch))


def broken_finish(scene: Scene, batch: Batch) -> Exception | None:
    scene.begin()
    scene.feed(batch)
    on_purpose = RehearsedError("an optimizer that raises, on purpose")
    with mock.patch.object(scene.job.optimizer, "step", side_effect=on_purpose):
        return raised_by(scene.step.finish)


def not_finite(scene: Scene, batch: Batch) -> None:
    """A non-finite gradient, then a non-finite loss, on one data-parallel rank: nothing may change, and the next step must equal one
    without it.

    With Megatron also one parameter's gradient that is infinite, and with model-parallel ranks one that is NaN, on one rank alone.
    finish() must report that it did not update, or raise; then abort() follows.
    """
    added = {"gradient": 0.0, "loss": 0.0}  # to the gradient of one parameter
    if scene.config.tp * scene.config.pp > 1:
        added["gradient of one rank"] = math.nan
    if scene.config.backend == "megatron":
        added["infinite gradient"] = math.inf
    for kind, more in added.items():
        hook = None
        if more and dist.get_rank() == 0:
            *_, last = scene.job.chunks[0].parameters()  # the first may be an embedding that stages share
            hook = last.register_hook(lambda slope, more=more: slope + more)
        before, version = scene.backend.state(scene.job), scene.step.version
        updated, ticks = False, 0
        scene.begin(scene.loss if more else poisoned(scene.loss, kind))
        scene.feed(batch)
        try:
            updated, ticks = bool(scene.step.finish()["updated"]), 1
        except Exception as error:  # noqa: BLE001 - your own step may raise anything
            print(f"rehearse: finish raised {type(error).__name__} for a non-finite {kind}: {error}")
            scene.step.abort()
        if hook is not None:
            hook.remove()
        scene.note("nonfinite_updated", int(updated), of=kind)
        scene.note_changed("nonfinite_changed", before, but="random", of=kind)
        scene.note("nonfinite_ticks_off", abs(scene.step.version - version - ticks), of=kind)
        scene.note_hooks(f"{kind} not finite")
    scene.whole(batch)
    scene.note("nonfinite_next_differs", differs_from_control(scene, batch))


def poisoned(loss: Loss, kind: str) -> Loss:
    """The loss with a non-finite gradient or value on one data-parallel rank only."""

    def call(logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        value, seen = loss(logprobs, batch, **counts)
        if dist.get_rank(split.data_group()):
            return value, seen
        if kind == "loss":
            return value, {**seen, "loss": seen["loss"] * math.inf}
        logprobs.register_hook(lambda slope: slope + math.nan)  # type: ignore[no-untyped-call]
        return value, seen

    return WrappedLoss(loss, call)


def misuse(scene: Scene, batch: Batch) -> None:
    """Calls in the wrong state must raise an error that names the state; abort on a closed step must do nothing."""
    step = scene.step
    version, before = step.version, scene.backend.state(scene.job)
    scene.note_refused("microbatch while closed", lambda: scene.feed(batch), "closed")
    scene.note_refused("finish while closed", step.finish, "closed")
    scene.note("abort_raised", int(raised_by(step.abort) is not None), call="abort while closed")
    scene.begin()
    scene.note_refused("begin while open", scene.begin, "open")
    scene.note_refused("finish without a microbatch", step.finish, "open")
    step.abort()
    scene.note("misuse_changed", int(scene.backend.state(scene.job) != before or step.version != version))


def remainder(scene: Scene, batch: Batch) -> None:
    """Rows after the last whole microbatch must be refused, or be counted and trained on.

    The step runs twice, with different tokens in these rows. If weights and optimizer then have the same bits, the rows were not trained
    on, whatever the result reports. They have an advantage and no gap to the engine, so that no loss ignores them. Not tried with a
    pipeline: its stages agree on the shape of a microbatch.
    """
    size = scene.config.micro_batch
    if size == 1 or scene.config.pp > 1:
        return
    longest = valid(batch).sum(1).argsort()[1 - size :]
    more = {name: value[longest] for name, value in batch.items()}
    more |= {"advantages": torch.ones_like(more["advantages"]), "generation_logprobs": more["prev_logprobs"]}
    other = {**more, "input_ids": more["input_ids"].roll(1, dims=1)}
    given = [{name: torch.cat([batch[name], end[name]]) for name in batch} for end in (more, other)]
    try:
        (result, state), (_, state_of_others) = (take_step(scene.fresh(), each) for each in given)
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        scene.note_rows("", f"refused with {described(error)}")
        return
    wrong = miscounted(result, torch.tensor(true_counts(given[0]), device=scene.job.device))
    if state == state_of_others and bool(valid(more).any()):
        wrong = wrong or "all rows were counted, but the tokens of the last rows do not change the weights"
    scene.note_rows(wrong)


def many_calls(scene: Scene, batch: Batch) -> None:
    """A step of so many calls that half precision could not hold its number of tokens. Not tried where that takes too many."""
    mine = torch.tensor(true_counts(batch), device=scene.job.device)
    most = mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    calls = HALF_PRECISION // max(int(most[1]), 1) + 1
    if calls > MANY_CALLS or scene.config.pp > 1:
        return
    scene.begin()
    for _ in range(calls):
        scene.feed(batch)
    scene.note_rows(miscounted(scene.step.finish(), calls * mine), call=f"step of {calls} calls")


def nothing_valid(scene: Scene, batch: Batch) -> None:
    """A step in which no token of any rank counts must be refused with an error that means it, or give a finite loss and gradient norm."""
    scene.begin()
    scene.feed({**batch, "token_mask": torch.zeros_like(batch["token_mask"])})
    fine = ""
    try:
        result = scene.step.finish()
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        scene.step.abort()
        fine = f"refused with {described(error)}"
        wrong = fine if isinstance(error, ArithmeticError) else ""  # 0 / 0 refuses nothing
    else:
        numbers = {name: float(value) for name, value in result.items() if name in ("global_loss", "grad_norm")}
        wrong = ", ".join(f"{name} is {value:g}" for name, value in numbers.items() if not math.isfinite(value))
    scene.note_rows(wrong, fine, call="step without any valid token")


def miscounted(result: StepResult, mine: torch.Tensor) -> str:
    """How the counts of a step differ from the sum of each data rank's own sequences and tokens."""
    true = mine.double()
    dist.all_reduce(true, group=split.data_group())
    counted = [float(result["global_valid_seqs"]), float(result["global_valid_toks"])]
    count = "{:g} sequences and {:g} tokens"
    wrong = f"the result counts {count.format(*counted)}, but the rows have {count.format(*true.tolist())}"
    return "" if counted == true.tolist() else wrong


def take_step(scene: Scene, batch: Batch) -> tuple[StepResult, dict[str, str]]:
    result = scene.whole(batch)
    return result, {name: value for name, value in scene.backend.state(scene.job).items() if "random" not in name}


def groups_of_steps(scene: Scene, batch: Batch) -> None:
    """Process groups, in torch's registry or not, that each of two rounds of a finished and an aborted step leaves behind.

    Groups that a trainer creates once and keeps are no leak. Groups that it creates and destroys in each step are none either.
    """
    levels = [0]
    with Births() as born:
        for _ in range(2):
            scene.whole(batch)
            scene.begin()
            scene.feed(batch)
            scene.step.abort()
            gc.collect()
            levels.append(len(born.alive()))
    first, second = levels[1], levels[2] - levels[1]
    text = f"{first} new groups after one round, {levels[2]} after two" if first > 0 else ""
    scene.note("groups_kept", max(0, min(first, second)), text)
