"""What a step promises when things do not go well: aborts that leave nothing, hooks put back, calls that do not fit refused.

Each rehearsal has a fresh job that has trained one step. Everything is counted; right is 0. The state is compared by hashes of every
tensor, so that "as before" means every bit.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.labs.split.oracle import true_counts
from kit.measure.observers.births import Births
from kit.megatron import split
from kit.train.batch import valid
from kit.train.stream import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.labs.split.backends import Backend
    from kit.labs.split.config import SplitConfig
    from kit.train.batch import Batch
    from kit.train.protocol import Loss, StepResult


class RehearsedError(RuntimeError):
    """An error that is made on purpose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A number of broken promises, what it is about, and what was seen."""

    metric: str
    value: float
    text: str = ""
    ids: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A job, its step, and what to feed it."""

    backend: Backend
    job: Any
    step: Any
    make: Callable[[Any], Any]  # the code under test on another job
    loss: Loss
    batches: list[Batch]
    config: SplitConfig
    hooks: tuple[Any, ...] = ()

    def again(self) -> Scene:
        """The same on a fresh job."""
        job = self.backend.fresh()
        return dataclasses.replace(self, job=job, step=self.make(job), hooks=self.backend.hooks(job))

    def begin(self, loss: Loss | None = None) -> None:
        self.step.begin(loss or self.loss, self.config.batch, self.config.micro_batch)

    def feed(self, batch: Batch) -> None:
        """A copy: what the code under test does to its rows is its own business."""
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


class DrawingLoss:
    """The loss, and a random number: a model without dropout draws none, and nobody would see that an abort keeps them."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.level = loss.level

    def normalizers(self) -> Any:
        return self.loss.normalizers()

    def __call__(self, logprobs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        torch.rand(1, device=logprobs.device)
        return self.loss(logprobs, *args, **kwargs)


class RaisingLoss(DrawingLoss):
    """The loss, until it raises."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        super().__call__(*args, **kwargs)
        raise RehearsedError("a loss that raises, on purpose")


class Poisoned(DrawingLoss):
    """The loss, with a gradient or a value that is not finite on one data rank; the others know nothing of it."""

    def __init__(self, loss: Loss, kind: str) -> None:
        super().__init__(loss)
        self.kind = kind

    def __call__(self, logprobs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        value, seen = self.loss(logprobs, *args, **kwargs)
        if dist.get_rank(split.data_group()):
            return value, seen
        if self.kind == "loss":
            return value, {**seen, "loss": seen["loss"] * math.inf}
        logprobs.register_hook(lambda slope: slope + math.nan)  # type: ignore[no-untyped-call]
        return value, seen


def all_of_it(made: Scene) -> list[Finding]:
    """Every rehearsal, each on a job of its own. An error that no rehearsal asks for ends that one alone, and is told."""
    found = []
    for rehearsal in (misuse, remainder, aborted, raised, not_finite, groups_of_steps):
        scene = made.again()
        before = scene.backend.state(scene.job)
        scene.whole(scene.batches[0])  # the optimizer has state from here on
        ids = {"rehearsal": rehearsal.__name__}
        found.append(Finding(metric="state_unseen", value=unseen(scene.changed(before)), ids=ids))
        text = ""
        try:
            found += rehearsal(scene, scene.batches[-1])
        except Exception as error:  # noqa: BLE001 - a person's own step raises what it likes
            text = f"{type(error).__name__}: {str(error)[:120]}"
            traceback.print_exc()
        found.append(Finding(metric="rehearsal_raised", value=int(bool(text)), text=text, ids=ids))
    return found


def unseen(changed: list[str]) -> int:
    """Kinds of state that a whole step changed without its hashes showing it: a state that is not seen would pass as unchanged."""
    optimizer = {name for name in changed if "/" in name and not name.startswith(("weights/", "random/"))}
    weights = {*changed} - optimizer - {"scheduler", "random", "random/device"}
    return sum((not weights, not optimizer, "scheduler" not in changed))


def aborted(scene: Scene, batch: Batch) -> list[Finding]:
    """Half a step, given up: every bit as before; and the step after it is the one that would have been without it."""
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
        Finding(metric="abort_changed", value=len(changed), text=", ".join(changed[:3])),
        Finding(metric="abort_gradients", value=gradients),
        Finding(metric="abort_next_differs", value=differs_from_control(scene, batch)),
        Finding(metric="abort_ticked", value=ticked),
        Finding(metric="hooks_lost", value=lost, ids={"after": "abort"}),
    ]


def differs_from_control(scene: Scene, batch: Batch) -> int:
    """Tensors that are not those of a job which did the same steps and nothing between them."""
    control = scene.again()
    for rows in (scene.batches[0], batch):
        control.whole(rows)
    mine, theirs = scene.backend.state(scene.job), control.backend.state(control.job)
    return sum(mine[name] != theirs.get(name) for name in mine if name != "random")


def raised(scene: Scene, batch: Batch) -> list[Finding]:
    """An error in the middle of microbatch, and one in the middle of finish: hooks are back, and only abort goes on."""
    found = []
    before, version = scene.backend.state(scene.job), scene.step.version
    for call, breaks in (("microbatch", broken_microbatch), ("finish", broken_finish)):
        ids = {"after": f"error in {call}"}
        found.append(Finding(metric="error_swallowed", value=int(not breaks(scene, batch)), ids=ids))
        found.append(Finding(metric="hooks_lost", value=scene.lost_hooks(), ids=ids))
        found += refused(f"microbatch after an error in {call}", lambda: scene.feed(batch), "open")
        scene.step.abort()
    changed = scene.changed(before)
    found.append(Finding(metric="error_changed", value=len(changed), text=", ".join(changed[:3])))
    return [*found, Finding(metric="error_ticked", value=int(scene.step.version != version))]


def broken_microbatch(scene: Scene, batch: Batch) -> bool:
    if scene.config.pp > 1:  # a stage that raises inside the schedule would leave the others waiting: all miss all rows
        scene.begin()
        return raises(lambda: scene.step.microbatch({}))
    scene.begin(RaisingLoss(scene.loss))
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
    """A gradient, and a loss, that is not finite on one data rank: nothing moves, and the next step is the one without it.

    With model-parallel ranks also a gradient that is NaN on one of them alone. finish() either says that it did not update, or raises;
    then abort() goes on.
    """
    found = []
    for kind in ("gradient", "loss", "gradient of one rank"):
        hook = None
        if kind == "gradient of one rank":
            if scene.config.tp * scene.config.pp == 1:
                continue
            if dist.get_rank() == 0:
                *_, last = scene.job.chunks[0].parameters()  # the first may be an embedding that stages share
                hook = last.register_hook(lambda slope: slope + math.nan)
        ids = {"of": kind}
        before, version = scene.backend.state(scene.job), scene.step.version
        updated, ticks = False, 0
        scene.begin(scene.loss if kind == "gradient of one rank" else Poisoned(scene.loss, kind))
        scene.feed(batch)
        try:
            updated, ticks = bool(scene.step.finish()["updated"]), 1
        except Exception as error:  # noqa: BLE001 - a person's own step raises what it likes
            print(f"a {kind} that is not finite: finish raised {type(error).__name__}: {error}")
            scene.step.abort()
        if hook is not None:
            hook.remove()
        changed = [name for name in scene.changed(before) if name != "random"]
        found += [
            Finding(metric="nonfinite_updated", value=int(updated), ids=ids),
            Finding(metric="nonfinite_changed", value=len(changed), text=", ".join(changed[:3]), ids=ids),
            Finding(metric="nonfinite_ticks_off", value=abs(scene.step.version - version - ticks), ids=ids),
            Finding(metric="hooks_lost", value=scene.lost_hooks(), ids={"after": f"{kind} not finite"}),
        ]
    scene.whole(batch)
    return [*found, Finding(metric="nonfinite_next_differs", value=differs_from_control(scene, batch))]


def misuse(scene: Scene, batch: Batch) -> list[Finding]:
    """Calls that do not fit the state must raise and name it; giving up what is closed does nothing."""
    step = scene.step
    version, before = step.version, scene.backend.state(scene.job)
    found = refused("microbatch while closed", lambda: scene.feed(batch), "closed")
    found += refused("finish while closed", step.finish, "closed")
    found.append(Finding(metric="abort_raised", value=int(raises(step.abort)), ids={"call": "abort while closed"}))
    scene.begin()
    found += refused("begin while open", scene.begin, "open")
    found += refused("finish without a microbatch", step.finish, "open")
    step.abort()
    changed = scene.backend.state(scene.job) != before or step.version != version
    return [*found, Finding(metric="misuse_changed", value=int(changed))]


def remainder(scene: Scene, batch: Batch) -> list[Finding]:
    """Rows beyond the last whole microbatch are refused, or they count: in the result, and in what is learnt.

    The step is taken twice, with other tokens in the rows that remain: if weights and optimizer then have the same bits, those rows
    were not trained on, whatever the result says. They have an advantage and no gap to the engine, so that no loss leaves them out by
    itself. Not tried where a pipeline's stages agree on a microbatch's shape.
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
        taken = [taken_step(scene.again(), each) for each in given]
    except Exception as error:  # noqa: BLE001 - a person's own step raises what it likes
        return [lost_rows("", f"refused with {type(error).__name__}: {str(error)[:120]}")]
    true = torch.tensor(true_counts(given[0]), dtype=torch.float64, device=scene.job.device)
    dist.all_reduce(true, group=split.data_group())
    (result, state), (_, state_of_others) = taken
    counted = [float(result["global_valid_seqs"]), float(result["global_valid_toks"])]
    if counted != true.tolist():
        what = "{:g} sequences and {:g} tokens"
        return [lost_rows(f"{what.format(*counted)} were counted, and there are {what.format(*true.tolist())}")]
    untouched = state == state_of_others and bool(valid(more).any())
    return [lost_rows("all rows were counted, and what stands in the last does not reach weights" if untouched else "")]


def lost_rows(wrong: str, fine: str = "") -> Finding:
    ids = {"call": "microbatch of rows that are no whole microbatches"}
    return Finding(metric="misuse_silent", value=int(bool(wrong)), text=wrong or fine, ids=ids)


def taken_step(scene: Scene, batch: Batch) -> tuple[StepResult, dict[str, str]]:
    """One step on a fresh job: its result, and what weights and optimizer are then."""
    result = scene.whole(batch)
    return result, {name: value for name, value in scene.backend.state(scene.job).items() if "random" not in name}


def groups_of_steps(scene: Scene, batch: Batch) -> list[Finding]:
    """Process groups, in torch's tables or not, of which there are more after each of two rounds of a step and an aborted one.

    What a trainer makes once and keeps is no leak, and neither is what it makes anew for each step and destroys.
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
    return [
        Finding(
            metric="groups_kept",
            value=max(0, min(first, second)),
            text=f"{first} more after one round, {levels[2]} after two" if first > 0 else "",
        )
    ]


def refused(call: str, function: Callable[[], object], state: str) -> list[Finding]:
    """Whether a call raises, whether what it raises names the state, and whether it is the kit's own error: three numbers."""
    text, silent, other_words, other_type = "", 0, 0, 0
    try:
        function()
        silent = 1
    except Exception as error:  # noqa: BLE001 - a person's own step raises what it likes
        text = f"{type(error).__name__}: {str(error)[:120]}"
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
