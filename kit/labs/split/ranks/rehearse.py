"""Rehearsed failures of a split step: aborts, errors in the middle, non-finite values, calls in the wrong state.

Each rehearsal has a fresh job that has trained one step. It counts broken promises; 0 is correct. The state is compared by hashes of
every tensor, so that "unchanged" means every bit.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from kit.labs.split.ranks.losses import WrappedLoss
from kit.labs.split.ranks.oracle import true_counts
from kit.measure.observers.births import Births
from kit.megatron import observe, split
from kit.train.protocol import Misuse, valid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.labs.split.config import SplitConfig
    from kit.train.protocol import Batch, Loss, StepResult


HALF_PRECISION = 2**11  # float16 cannot count beyond it in steps of one
MANY_CALLS = 100


class RehearsedError(RuntimeError):
    """An error that is raised on purpose."""


class Finding(NamedTuple):
    """A number of broken promises, what was observed, and its ids."""

    metric: str
    value: float
    text: str = ""
    ids: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A job, its step, and the rows to feed it."""

    backend: Any  # of backends.py
    make: Callable[[Any], Any]  # the code under test on another job
    loss: Loss
    batches: list[Batch]
    config: SplitConfig
    job: Any = None
    step: Any = None
    hooks: tuple[Any, ...] = ()

    def fresh(self) -> Scene:
        """The same scene on a fresh job."""
        job = self.backend.fresh()
        return dataclasses.replace(self, job=job, step=self.make(job), hooks=self.backend.hooks(job))

    def begin(self, loss: Loss | None = None) -> None:
        self.step.begin(loss or self.loss, self.config.batch, self.config.micro_batch)

    def feed(self, batch: Batch) -> None:
        """Feed a copy, because the code under test may change its rows."""
        self.step.microbatch({name: value.clone() for name, value in batch.items()})

    def whole(self, batch: Batch, loss: Loss | None = None) -> StepResult:
        self.begin(loss)
        self.feed(batch)
        result: StepResult = self.step.finish()
        return result

    def lost_hooks(self) -> int:
        return sum(a is not b and a != b for a, b in zip(self.hooks, self.backend.hooks(self.job), strict=True))

    def changed(self, before: dict[str, str]) -> list[str]:
        after = self.backend.state(self.job)
        return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


class DrawingLoss(WrappedLoss):
    """The loss, which also draws random numbers: without dropout the model draws none, so an abort that keeps the state would not show."""

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        torch.rand(1)
        torch.rand(1, device=logprobs.device)
        observe.draw_from_tracker(logprobs.device)
        return super().__call__(logprobs, batch, **counts)


class RaisingLoss(DrawingLoss):
    """The loss, which raises once it is armed."""

    armed = False

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        value = super().__call__(logprobs, batch, **counts)
        if self.armed:
            raise RehearsedError("a loss that raises, on purpose")
        return value


class Poisoned(WrappedLoss):
    """The loss with a non-finite gradient or value on one data-parallel rank only."""

    def __init__(self, loss: Loss, kind: str) -> None:
        super().__init__(loss)
        self.kind = kind

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        value, seen = self.loss(logprobs, batch, **counts)
        if dist.get_rank(split.data_group()):
            return value, seen
        if self.kind == "loss":
            return value, {**seen, "loss": seen["loss"] * math.inf}
        logprobs.register_hook(lambda slope: slope + math.nan)  # type: ignore[no-untyped-call]
        return value, seen


def rehearse_all(made: Scene) -> list[Finding]:
    """Every rehearsal, each on its own job. An unexpected error ends only its rehearsal and is recorded."""
    found = []
    for rehearsal in (misuse, remainder, many_calls, nothing_valid, aborted, raised, not_finite, groups_of_steps):
        scene = made.fresh()
        before = scene.backend.state(scene.job)
        scene.whole(scene.batches[0])  # from here on the optimizer has state
        ids = {"rehearsal": rehearsal.__name__}
        found.append(Finding("state_unseen", unseen(scene.changed(before)), ids=ids))
        text = ""
        try:
            found += rehearsal(scene, scene.batches[-1])
        except Exception as error:  # noqa: BLE001 - your own step may raise anything
            text = described(error)
            traceback.print_exc()
        found.append(Finding("rehearsal_raised", int(bool(text)), text, ids))
    return found


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"


def unseen(changed: list[str]) -> int:
    """Kinds of state that a whole step did not change. A kind that the hashes do not cover would pass as unchanged after an abort."""
    optimizer = {name for name in changed if "/" in name and not name.startswith(("weights/", "random/"))}
    weights = {*changed} - optimizer - {"scheduler", "random", "random/device"}
    return sum((not weights, not optimizer, "scheduler" not in changed))


def aborted(scene: Scene, batch: Batch) -> list[Finding]:
    """Abort half a step: every bit must be as before, and the next step must equal one without the abort."""
    before, version = scene.backend.state(scene.job), scene.step.version
    scene.begin(DrawingLoss(scene.loss))
    scene.feed(batch)
    scene.step.abort()
    lost = scene.lost_hooks()
    changed = scene.changed(before)
    gradients = scene.backend.nonzero_gradients(scene.job)
    ticked = int(scene.step.version != version)
    scene.whole(batch)
    return [
        Finding("abort_changed", len(changed), text=", ".join(changed[:3])),
        Finding("abort_gradients", gradients),
        Finding("abort_next_differs", differs_from_control(scene, batch)),
        Finding("abort_ticked", ticked),
        Finding("hooks_lost", lost, ids={"after": "abort"}),
    ]


def differs_from_control(scene: Scene, batch: Batch) -> int:
    """The number of tensors that differ from a job that did the same steps and nothing in between."""
    control = scene.fresh()
    for rows in (scene.batches[0], batch):
        control.whole(rows)
    mine, theirs = scene.backend.state(scene.job), control.backend.state(control.job)
    return sum(mine[name] != theirs.get(name) for name in mine if name != "random")


def raised(scene: Scene, batch: Batch) -> list[Finding]:
    """An error in the middle of microbatch, and one in finish: hooks must be restored, and only abort is allowed afterwards."""
    found = []
    before, version = scene.backend.state(scene.job), scene.step.version
    for call, breaks in (("microbatch", broken_microbatch), ("finish", broken_finish)):
        ids = {"after": f"error in {call}"}
        found.append(Finding("error_swallowed", int(not breaks(scene, batch)), ids=ids))
        found.append(Finding("hooks_lost", scene.lost_hooks(), ids=ids))
        found += refused(f"microbatch after an error in {call}", lambda: scene.feed(batch), "open")
        found += refused(f"finish after an error in {call}", scene.step.finish, "open")
        scene.step.abort()
    changed = scene.changed(before)
    found.append(Finding("error_changed", len(changed), text=", ".join(changed[:3])))
    return [*found, Finding("error_ticked", int(scene.step.version != version))]


def broken_microbatch(scene: Scene, batch: Batch) -> bool:
    """With Megatron the second call raises, so that there is something that a wrong step could finish. With FSDP2, which keeps a piece
    back, ranks would not raise at the same piece: the first call does."""
    loss = RaisingLoss(scene.loss)
    scene.begin(loss)
    if scene.config.backend == "megatron":
        scene.feed(batch)
    if scene.config.pp > 1:  # an error inside the schedule would leave other stages waiting, so all ranks get no rows
        return raises(lambda: scene.step.microbatch({}))
    loss.armed = True
    return raises(lambda: scene.feed(batch))


def broken_finish(scene: Scene, batch: Batch) -> bool:
    scene.begin()
    scene.feed(batch)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RehearsedError("an optimizer that raises, on purpose")

    plain = scene.job.optimizer.step
    scene.job.optimizer.step = refuse
    raised = raises(scene.step.finish)
    scene.job.optimizer.step = plain
    return raised


def not_finite(scene: Scene, batch: Batch) -> list[Finding]:
    """A non-finite gradient, then a non-finite loss, on one data-parallel rank: nothing may change, and the next step must equal one
    without it.

    With Megatron also one parameter's gradient that is infinite, and with model-parallel ranks one that is NaN, on one rank alone.
    finish() must report that it did not update, or raise; then abort() follows.
    """
    config, found = scene.config, []
    of_one_rank = {
        "gradient of one rank": math.nan if config.tp * config.pp > 1 else None,
        "infinite gradient": math.inf if config.backend == "megatron" else None,
    }
    for kind in ("gradient", "loss", *(name for name, added in of_one_rank.items() if added is not None)):
        hook, added = None, of_one_rank.get(kind)
        if added is not None and dist.get_rank() == 0:
            *_, last = scene.job.chunks[0].parameters()  # the first may be an embedding that stages share
            hook = last.register_hook(lambda slope, added=added: slope + added)
        ids = {"of": kind}
        before, version = scene.backend.state(scene.job), scene.step.version
        updated, ticks = False, 0
        scene.begin(scene.loss if kind in of_one_rank else Poisoned(scene.loss, kind))
        scene.feed(batch)
        try:
            updated, ticks = bool(scene.step.finish()["updated"]), 1
        except Exception as error:  # noqa: BLE001 - your own step may raise anything
            print(f"rehearse: finish raised {type(error).__name__} for a non-finite {kind}: {error}")
            scene.step.abort()
        if hook is not None:
            hook.remove()
        changed = [name for name in scene.changed(before) if name != "random"]
        found += [
            Finding("nonfinite_updated", int(updated), ids=ids),
            Finding("nonfinite_changed", len(changed), text=", ".join(changed[:3]), ids=ids),
            Finding("nonfinite_ticks_off", abs(scene.step.version - version - ticks), ids=ids),
            Finding("hooks_lost", scene.lost_hooks(), ids={"after": f"{kind} not finite"}),
        ]
    scene.whole(batch)
    return [*found, Finding("nonfinite_next_differs", differs_from_control(scene, batch))]


def misuse(scene: Scene, batch: Batch) -> list[Finding]:
    """Calls in the wrong state must raise an error that names the state; abort on a closed step must do nothing."""
    step = scene.step
    version, before = step.version, scene.backend.state(scene.job)
    found = refused("microbatch while closed", lambda: scene.feed(batch), "closed")
    found += refused("finish while closed", step.finish, "closed")
    found.append(Finding("abort_raised", int(raises(step.abort)), ids={"call": "abort while closed"}))
    scene.begin()
    found += refused("begin while open", scene.begin, "open")
    found += refused("finish without a microbatch", step.finish, "open")
    step.abort()
    changed = scene.backend.state(scene.job) != before or step.version != version
    return [*found, Finding("misuse_changed", int(changed))]


def remainder(scene: Scene, batch: Batch) -> list[Finding]:
    """Rows after the last whole microbatch must be refused, or be counted and trained on.

    The step runs twice, with different tokens in these rows. If weights and optimizer then have the same bits, the rows were not trained
    on, whatever the result reports. They have an advantage and no gap to the engine, so that no loss ignores them. Not tried with a
    pipeline, whose stages agree on the shape of a microbatch.
    """
    size = scene.config.micro_batch
    if size == 1 or scene.config.pp > 1:
        return []
    longest = valid(batch).sum(1).argsort()[1 - size :]
    more = {name: value[longest] for name, value in batch.items()}
    more |= {"advantages": torch.ones_like(more["advantages"]), "generation_logprobs": more["prev_logprobs"]}
    other = {**more, "input_ids": more["input_ids"].roll(1, dims=1)}
    given = [{name: torch.cat([batch[name], end[name]]) for name in batch} for end in (more, other)]
    try:
        (result, state), (_, state_of_others) = (take_step(scene.fresh(), each) for each in given)
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        return [lost_rows("", f"refused with {described(error)}")]
    if wrong := miscounted(result, torch.tensor(true_counts(given[0]), device=scene.job.device)):
        return [lost_rows(wrong)]
    untouched = state == state_of_others and bool(valid(more).any())
    why = "all rows were counted, but the tokens of the last rows do not change the weights"
    return [lost_rows(why if untouched else "")]


def many_calls(scene: Scene, batch: Batch) -> list[Finding]:
    """A step of so many calls that half precision could not hold its number of tokens. Not tried where that takes too many."""
    mine = torch.tensor(true_counts(batch), device=scene.job.device)
    most = mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    calls = HALF_PRECISION // max(int(most[1]), 1) + 1
    if calls > MANY_CALLS or scene.config.pp > 1:
        return []
    scene.begin()
    for _ in range(calls):
        scene.feed(batch)
    return [lost_rows(miscounted(scene.step.finish(), calls * mine), call=f"step of {calls} calls")]


def nothing_valid(scene: Scene, batch: Batch) -> list[Finding]:
    """A step in which no token of any rank counts must be refused with an error that means it, or give a finite loss and gradient norm."""
    scene.begin()
    scene.feed({**batch, "token_mask": torch.zeros_like(batch["token_mask"])})
    call = "step without any valid token"
    try:
        result = scene.step.finish()
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        scene.step.abort()
        why = f"refused with {described(error)}"
        return [lost_rows(why if isinstance(error, ArithmeticError) else "", why, call=call)]  # 0 / 0 refuses nothing
    numbers = {name: float(value) for name, value in result.items() if name in ("global_loss", "grad_norm")}
    wrong = ", ".join(f"{name} is {value:g}" for name, value in numbers.items() if not math.isfinite(value))
    return [lost_rows(wrong, call=call)]


def miscounted(result: StepResult, mine: torch.Tensor) -> str:
    """How the counts of a step differ from the sum of each data rank's own sequences and tokens."""
    true = mine.double()
    dist.all_reduce(true, group=split.data_group())
    counted = [float(result["global_valid_seqs"]), float(result["global_valid_toks"])]
    count = "{:g} sequences and {:g} tokens"
    wrong = f"the result counts {count.format(*counted)}, but the rows have {count.format(*true.tolist())}"
    return "" if counted == true.tolist() else wrong


def lost_rows(wrong: str, fine: str = "", call: str = "microbatch with rows that do not fill a microbatch") -> Finding:
    return Finding("misuse_silent", int(bool(wrong)), wrong or fine, {"call": call})


def take_step(scene: Scene, batch: Batch) -> tuple[StepResult, dict[str, str]]:
    """One step: its result, and the state of weights and optimizer afterwards."""
    result = scene.whole(batch)
    return result, {name: value for name, value in scene.backend.state(scene.job).items() if "random" not in name}


def groups_of_steps(scene: Scene, batch: Batch) -> list[Finding]:
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
    return [Finding("groups_kept", max(0, min(first, second)), text)]


def refused(call: str, function: Callable[[], object], state: str) -> list[Finding]:
    """Three numbers: whether a call is accepted, whether its error does not name the state, whether it is no `Misuse`."""
    text, silent, other_words, other_type = "", 0, 0, 0
    try:
        function()
        silent = 1
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        text = described(error)
        other_words = int(state not in str(error))
        other_type = int(not isinstance(error, Misuse))
    numbers = {"misuse_silent": silent, "misuse_other_words": other_words, "misuse_other_type": other_type}
    ids = {"call": call}
    return [Finding(metric=name, value=value, text=text if value else "", ids=ids) for name, value in numbers.items()]


def raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - as above
        return True
    return False
