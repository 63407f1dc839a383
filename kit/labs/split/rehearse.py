"""What a step promises when things do not go well: aborts that leave nothing, hooks put back, calls that do not fit refused.

Everything is counted; right is 0. The state is compared by hashes of every tensor, so that "as before" means every bit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.labs.split.backends import Backend
    from kit.labs.split.config import SplitConfig
    from kit.train.batch import Batch
    from kit.train.protocol import Loss, StepResult


class RehearsedError(RuntimeError):
    """An error that is made on purpose."""


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

    def begin(self, loss: Loss | None = None) -> None:
        self.step.begin(loss or self.loss, self.config.batch, self.config.micro_batch)

    def feed(self, batch: Batch) -> None:
        """A copy: what the code under test does to its rows is its own business."""
        self.step.microbatch({name: value.clone() for name, value in batch.items()})

    def whole(self, batch: Batch) -> StepResult:
        self.begin()
        self.feed(batch)
        result: StepResult = self.step.finish()
        return result

    def lost_hooks(self, before: tuple[Any, ...]) -> int:
        return sum(a is not b and a != b for a, b in zip(before, self.backend.hooks(self.job), strict=True))


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


def all_of_it(scene: Scene) -> dict[str, float]:
    first, second = scene.batches[0], scene.batches[-1]
    hooks = scene.backend.hooks(scene.job)
    scene.whole(first)  # the optimizer has state from here on
    found: dict[str, float] = dict(misuse(scene, second))
    found |= aborted(scene, second, hooks)
    found |= raised(scene, second, hooks)
    after = [found.pop(f"hooks_lost_after_{what}") for what in ("error", "abort")]
    found["hooks_lost"] = scene.lost_hooks(hooks) + sum(after)
    return found


def aborted(scene: Scene, batch: Batch, hooks: tuple[Any, ...]) -> dict[str, float]:
    """Half a step, given up: every bit as before; and the step after it is the one that would have been without it."""
    before, version = scene.backend.state(scene.job), scene.step.version
    scene.begin(DrawingLoss(scene.loss))
    scene.feed(batch)
    scene.step.abort()
    lost = scene.lost_hooks(hooks)
    after = scene.backend.state(scene.job)
    changed = [name for name in before if before[name] != after.get(name)]
    gradients = scene.backend.nonzero_gradients(scene.job)
    for name in changed[:3]:
        print(f"abort changed {name}")
    ticked = int(scene.step.version != version)
    scene.whole(batch)
    unlike = differs_from_control(scene, batch)
    return {
        "abort_changed": len(changed),
        "abort_gradients": gradients,
        "abort_next_differs": unlike,
        "abort_ticked": ticked,
        "hooks_lost_after_abort": lost,
    }


def differs_from_control(scene: Scene, batch: Batch) -> int:
    """Tensors that are not those of a job which did the same steps and never gave one up."""
    control = scene.backend.fresh()
    steadfast = dataclasses.replace(scene, job=control, step=scene.make(control))
    for rows in (scene.batches[0], batch):
        steadfast.whole(rows)
    mine, theirs = scene.backend.state(scene.job), scene.backend.state(control)
    return sum(mine[name] != theirs.get(name) for name in mine if name != "random")


def raised(scene: Scene, batch: Batch, hooks: tuple[Any, ...]) -> dict[str, float]:
    """An error in the middle of microbatch, and one in the middle of finish: hooks are back, and only abort goes on."""
    lost = closed = swallowed = 0
    before, version = scene.backend.state(scene.job), scene.step.version
    for breaks in (broken_microbatch, broken_finish):
        swallowed += not breaks(scene, batch)
        lost += scene.lost_hooks(hooks)
        closed += not refuses(lambda: scene.feed(batch), "open")
        scene.step.abort()
    after = scene.backend.state(scene.job)
    return {
        "hooks_lost_after_error": lost,
        "error_closed": closed,
        "error_changed": sum(before[name] != after.get(name) for name in before),
        "error_ticked": int(scene.step.version != version),
        "error_swallowed": swallowed,
    }


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


def misuse(scene: Scene, batch: Batch) -> dict[str, float]:
    """Calls that do not fit the state must raise and name it; giving up what is closed does nothing."""
    step = scene.step
    version, before = step.version, scene.backend.state(scene.job)
    silent = [not refuses(lambda: scene.feed(batch), "closed"), not refuses(step.finish, "closed")]
    silent.append(raises(step.abort))
    scene.begin()
    silent += [not refuses(scene.begin, "open"), not refuses(step.finish, "open")]
    step.abort()
    changed = scene.backend.state(scene.job) != before or step.version != version
    return {"misuse_silent": sum(silent), "misuse_changed": int(changed)}


def refuses(call: Callable[[], object], state: str) -> bool:
    """Whether the call raises with the state's name in what it says."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - a person's own step raises what it likes
        return state in str(error)
    return False


def raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - as above
        return True
    return False
