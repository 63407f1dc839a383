"""The failures that the lab rehearses: aborts, errors in the middle of a step, non-finite values, and calls in the wrong state.

Each rehearsal has a fresh job that has trained one step. It counts broken promises; 0 is correct. The state is compared by hashes of every
tensor, so that "unchanged" means every bit.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import operator
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from kit.errors import RehearsedError
from kit.labs.split.faults import KIT_SPLIT
from kit.labs.split.lab import SplitConfig
from kit.labs.split.ranks.backends import WrappedLoss
from kit.labs.split.ranks.oracle import NOTHING_SEEN, true_counts
from kit.measure.observers.births import Births
from kit.measure.observers.settings import SETTINGS, settings_now
from kit.measure.observers.tensors import live_bytes, live_graphs
from kit.measure.phase import resource_counts
from kit.megatron import observe, split
from kit.train.protocol import Batch, Loss, Misuse, StepResult, cuts, valid

HALF_PRECISION = 2**11  # float16 cannot count beyond it in steps of one
MANY_CALLS = 100


@dataclass(kw_only=True, slots=True)
class FailingScene:
    backend: Any  # of backends.py
    make: Callable[[Any], Any]  # the code under test on another job
    loss: Loss
    batches: list[Batch]
    config: SplitConfig
    job: Any = None
    step: Any = None
    settings: dict[str, object] = field(default_factory=settings_now)  # before all rehearsals
    replaceable: dict[str, Any] = field(default_factory=dict)  # before a step
    found: list[tuple[str, float, str, dict[str, Any]]] = field(default_factory=list)  # what `note` was given

    def fresh(self) -> FailingScene:
        job = self.backend.fresh()
        step = self.make(job)
        before = replaceable(self.backend, job) | self.settings
        return dataclasses.replace(self, job=job, step=step, replaceable=before, found=[])

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

    def abandon(self, batch: Batch, loss: Loss | None = None) -> None:
        """Half a step: it begins, is fed once, and is aborted."""
        self.begin(loss)
        self.feed(batch)
        self.step.abort()

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
        lost = not_restored(self.replaceable, replaceable(self.backend, self.job))
        self.note("hooks_lost", len(lost), settings_in(lost), after=after)

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


def replaceable(backend: Any, job: Any) -> dict[str, Any]:
    """What a step may replace while it is open, by name: the hooks of its job, the training mode of its modules, settings of torch."""
    return {f"hook {place}": hook for place, hook in enumerate(backend.hooks(job), start=1)} | settings_now()


def settings_in(names: list[str]) -> str:
    return ", ".join(sorted({*names} & {*SETTINGS}))


def not_restored(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [name for name in names if (old := before.get(name)) is not (new := after.get(name)) and old != new]


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """What a call raises; of an interrupt only the rehearsed one."""
    try:
        call()
    except KeyboardInterrupt as error:
        if "on purpose" not in str(error):
            raise
        return error
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        return error
    return None


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"


class DrawingLoss(WrappedLoss):
    """The loss, which also draws random numbers: without dropout the model draws none, so an abort that keeps the state would not show.
    It raises once it is armed."""

    armed = False
    raised = False
    kind: type[BaseException] = RehearsedError

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.drawn: set[str] = set()  # the generators that it drew from

    def __call__(self, logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
        before = observe.random_state()
        torch.rand(1)
        torch.rand(1, device=logprobs.device)
        observe.draw_from_tracker(logprobs.device)
        self.drawn |= {name for name, state in observe.random_state().items() if state != before[name]}
        value = super().__call__(logprobs, batch, **counts)
        if self.armed:
            self.raised = True
            raise self.kind("a loss that raises, on purpose")
        return value


def rehearse_all(made: FailingScene) -> FailingScene:
    """Every rehearsal, each on its own job; returns the scene with all that was found. An unexpected error ends only its rehearsal."""
    for rehearsal in (
        misuse,
        remainder,
        many_calls,
        nothing_valid,
        aborted,
        draws,
        raised,
        not_finite,
        groups_of_steps,
        memory_of_steps,
        *((overwritten, mean_metric, forward_passes) if made.config.implementation == KIT_SPLIT else ()),
    ):
        scene = made.fresh()
        before = scene.backend.state(scene.job)
        scene.whole(scene.batches[0])  # from here on the optimizer has state
        made.note("state_unseen", unchanged_kinds(scene.changed(before)), rehearsal=rehearsal.__name__)
        if error := raised_by(lambda: rehearsal(scene, scene.batches[-1])):  # noqa: B023 - called at once
            traceback.print_exception(error)
        else:
            made.found += scene.found
        made.note("rehearsal_raised", int(bool(error)), described(error) if error else "", rehearsal=rehearsal.__name__)
    return made


def unchanged_kinds(changed: list[str]) -> int:
    """Kinds of state that a whole step did not change. A kind that the hashes do not cover would pass as unchanged after an abort."""
    optimizer = {name for name in changed if "/" in name and not name.startswith("weights/")}
    weights = {*changed} - optimizer - {"scheduler", "random"}
    return sum((not weights, not optimizer, "scheduler" not in changed))


def aborted(scene: FailingScene, batch: Batch) -> None:
    """Abort half a step: every bit must be as before, and the next step must equal one without the abort."""
    before, version = scene.backend.state(scene.job), scene.step.version
    scene.abandon(batch, DrawingLoss(scene.loss))
    scene.note_hooks("abort")
    scene.note_changed("abort_changed", before)
    scene.note("abort_gradients", scene.backend.nonzero_gradients(scene.job))
    scene.note("abort_ticked", int(scene.step.version != version))
    scene.whole(batch)
    scene.note("abort_next_differs", differs_from_control(scene, batch))


def draws(scene: FailingScene, batch: Batch) -> None:
    """Two steps whose loss draws random numbers: no step may put a generator back, or set it to the same state as another step does."""
    states, loss = [observe.random_state()], DrawingLoss(scene.loss)
    for _ in range(2):
        scene.begin(loss)
        scene.feed(batch)
        scene.step.finish()
        states.append(observe.random_state())
    # On a stage of a pipeline without the loss it drew from none.
    repeats = sum(len({state[name] for state in states}) < len(states) for name in loss.drawn)
    text = "a step after which random numbers repeat" if repeats else ""
    scene.note("state_unseen", repeats, text, rehearsal="draws")


def differs_from_control(scene: FailingScene, batch: Batch) -> int:
    """The number of tensors that differ from a job that did the same steps and nothing in between."""
    control = scene.fresh()
    for rows in (scene.batches[0], batch):
        control.whole(rows)
    own, expected = scene.backend.state(scene.job), control.backend.state(control.job)
    return sum(own[name] != expected.get(name) for name in own if name != "random")


def raised(scene: FailingScene, batch: Batch) -> None:
    """Errors in the middle of microbatch, and one in finish: hooks must be restored, and only abort is allowed afterwards."""
    before, version = scene.backend.state(scene.job), scene.step.version
    ways: dict[str, Callable[[], BaseException | None]] = {
        "error in microbatch": lambda: broken_microbatch(scene, batch, RehearsedError),
        "error in finish": lambda: broken_finish(scene, batch),
    }
    if scene.config.pp == 1:  # with a pipeline the loss raises on no rank, see there
        ways["interrupt in microbatch"] = lambda: broken_microbatch(scene, batch, KeyboardInterrupt)
    for after, breaks in ways.items():
        swallowed = breaks() is None
        if after == "error in microbatch" and scene.config.pp > 1 and (swallowed or takes_more(scene, batch)):
            scene.step.abort()
            continue
        scene.note("error_swallowed", int(swallowed), after=after)
        scene.note_hooks(after)
        if swallowed:  # the step has been finished, or is open: what it refuses now says nothing
            scene.step.abort()
            continue
        scene.note_refused(f"microbatch after an {after}", lambda: scene.feed(batch), "open")
        scene.note_refused(f"finish after an {after}", scene.step.finish, "open")
        scene.step.abort()
    scene.note_changed("error_changed", before)
    scene.note("error_ticked", int(scene.step.version != version))


def takes_more(scene: FailingScene, batch: Batch) -> bool:
    """Whether the step goes on after a batch without keys: it may be taken as no rows, or be refused before anything has changed."""
    return raised_by(lambda: scene.feed(batch)) is None


def broken_microbatch(scene: FailingScene, batch: Batch, kind: type[BaseException]) -> BaseException | None:
    """With Megatron the second call raises, so that there is something that a wrong step could finish. With FSDP2, which keeps a piece
    back, ranks would not raise at the same piece: the first call does. A step that stores rows for finish raises there."""
    loss = DrawingLoss(scene.loss)
    loss.kind = kind
    scene.begin(loss)
    if scene.config.backend == "megatron":
        scene.feed(batch)
    if scene.config.pp > 1:  # an error inside the schedule would leave other stages waiting, so all ranks get no rows
        return raised_by(lambda: scene.feed({}))
    loss.armed = True
    error = raised_by(lambda: scene.feed(batch))
    return error if error or loss.raised else raised_by(scene.step.finish)


def broken_finish(scene: FailingScene, batch: Batch) -> BaseException | None:
    scene.begin()
    scene.feed(batch)
    on_purpose = RehearsedError("an optimizer that raises, on purpose")
    with mock.patch.object(scene.job.optimizer, "step", side_effect=on_purpose):
        return raised_by(scene.step.finish)


def not_finite(scene: FailingScene, batch: Batch) -> None:
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
    for kind, addend in added.items():
        hook = None
        if addend and dist.get_rank() == 0:
            *_, last = scene.job.chunks[0].parameters()  # the first may be an embedding that stages share
            hook = last.register_hook(lambda slope, addend=addend: slope + addend)
        before, version = scene.backend.state(scene.job), scene.step.version
        updated, ticks = False, 0
        scene.begin(scene.loss if addend else poisoned_loss(scene.loss, kind))
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


def poisoned_loss(loss: Loss, kind: str) -> Loss:
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


def misuse(scene: FailingScene, batch: Batch) -> None:
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
    scene.note_hooks("refused calls")


def remainder(scene: FailingScene, batch: Batch) -> None:
    """Rows after the last whole microbatch must be refused, or be counted and trained on.

    The step runs twice, with different tokens in these rows. If weights and optimizer then have the same bits, the rows were not trained
    on, whatever the result reports. They have an advantage and no gap to the engine, so that no loss ignores them. Not tried with a
    pipeline: its stages agree on the shape of a microbatch.
    """
    size = scene.config.micro_batch
    if size == 1 or scene.config.pp > 1:
        return
    longest = valid(batch).sum(1).argsort()[1 - size :]
    last_rows = {name: value[longest] for name, value in batch.items()}
    last_rows |= {
        "advantages": torch.ones_like(last_rows["advantages"]),
        "generation_logprobs": last_rows["prev_logprobs"],
    }
    changed = {**last_rows, "input_ids": last_rows["input_ids"].roll(1, dims=1)}
    batches = [{name: torch.cat([batch[name], end[name]]) for name in batch} for end in (last_rows, changed)]
    try:
        (result, state), (_, state_of_others) = (take_step(scene.fresh(), rows) for rows in batches)
    except Exception as error:  # noqa: BLE001 - your own step may raise anything
        scene.note_rows("", f"refused with {described(error)}")
        return
    wrong = miscounted(result, torch.tensor(true_counts(batches[0]), device=scene.job.device))
    if state == state_of_others and bool(valid(last_rows).any()):
        wrong = wrong or "all rows were counted, but the tokens of the last rows do not change the weights"
    scene.note_rows(wrong)


def many_calls(scene: FailingScene, batch: Batch) -> None:
    """A step with a number of tokens that half precision cannot represent. Not tried where that takes too many calls.

    Every token counts, so that few calls reach it. The sum over all data ranks is odd: beyond 2,048 half precision holds even numbers
    only, so an even sum could come out right."""
    rows = with_parity(with_every_token(batch), odd=dist.get_rank(split.data_group()) == 0)
    own_counts = torch.tensor(true_counts(rows), device=scene.job.device)
    least = own_counts.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    calls = (HALF_PRECISION // max(int(least[1]), 1) + 1) | 1
    if calls > MANY_CALLS or scene.config.pp > 1:
        return
    scene.begin()
    for _ in range(calls):
        scene.feed(rows)
    scene.note_rows(miscounted(scene.step.finish(), calls * own_counts), call=f"step of {calls} calls")


def with_every_token(batch: Batch, lengths: torch.Tensor | None = None) -> Batch:
    """The rows with every token counted, those of the prompt too, and no padding; or as many tokens as `lengths` has for each."""
    columns = torch.arange(batch["token_mask"].shape[1], device=batch["token_mask"].device)
    lengths = batch["input_lengths"] if lengths is None else lengths
    inside = (columns < lengths[:, None]).to(batch["token_mask"].dtype)
    return {**batch, "token_mask": inside, "sample_mask": torch.ones_like(batch["sample_mask"])}


def with_equal_rows(batch: Batch, device: torch.device) -> Batch:
    """The rows with as many tokens counted in each as the shortest of all data ranks has. Collective over these, on the job's device."""
    shortest = batch["input_lengths"].min().to(device)
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN, group=split.data_group())
    return with_every_token(batch, shortest.to(batch["input_lengths"].device).expand_as(batch["input_lengths"]))


def with_parity(batch: Batch, *, odd: bool) -> Batch:
    """The rows with an odd or even number of valid tokens: where it is the other, the last one is masked."""
    counted = valid(batch)
    if bool(counted.sum() % 2) == odd or not counted.any():
        return batch
    mask = batch["token_mask"].clone()
    row, place = counted.nonzero()[-1]
    mask[row, place + 1] = 0  # nothing predicts the first token
    return {**batch, "token_mask": mask}


def nothing_valid(scene: FailingScene, batch: Batch) -> None:
    """A step in which no token of any rank counts must be refused with an error that means it, or give finite numbers."""
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
        named = {**result["metrics"], **{name: result[name] for name in ("global_loss", "grad_norm")}}
        numbers = {name: float(value) for name, value in named.items()}
        extremes = tuple(name for name in numbers if name.endswith(("_min", "_max")))  # of nothing: may be infinite
        broken = {
            name: value
            for name, value in numbers.items()
            if math.isnan(value) or (math.isinf(value) and name not in extremes)
        }
        if scene.config.implementation == KIT_SPLIT:
            broken |= {name: numbers[name] for name in extremes if numbers[name] != NOTHING_SEEN}
        wrong = ", ".join(f"{name} is {value:g}" for name, value in broken.items())
    scene.note_rows(wrong, fine, call="step without any valid token")


def miscounted(result: StepResult, own_counts: torch.Tensor) -> str:
    """How the counts of a step differ from the sum of each data rank's own sequences and tokens."""
    true = own_counts.double()
    dist.all_reduce(true, group=split.data_group())
    counted = [float(result["global_valid_seqs"]), float(result["global_valid_toks"])]
    count = "{:g} sequences and {:g} tokens"
    wrong = f"the result counts {count.format(*counted)}, but the rows have {count.format(*true.tolist())}"
    return "" if counted == true.tolist() else wrong


def take_step(scene: FailingScene, batch: Batch) -> tuple[StepResult, dict[str, str]]:
    result = scene.whole(batch)
    return result, {name: value for name, value in scene.backend.state(scene.job).items() if "random" not in name}


def groups_of_steps(scene: FailingScene, batch: Batch) -> None:
    """Process groups, in torch's registry or not, that each of two rounds of a finished and an aborted step leaves behind.

    Groups that a trainer creates once and keeps are no leak. Groups that it creates and destroys in each step are none either.
    """
    levels = [0]
    with Births() as born:
        for _ in range(2):
            scene.whole(batch)
            scene.abandon(batch)
            gc.collect()
            levels.append(len(born.alive()))
    first, second = levels[1], levels[2] - levels[1]
    text = f"{first} new groups after one round, {levels[2]} after two" if first > 0 else ""
    scene.note("groups_kept", max(0, min(first, second)), text)


KEPT_BYTES = 4096  # that each step may leave: a trainer's own history of numbers
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Kept(NamedTuple):
    """What is held between two steps: bytes of tensors, tensors with a graph behind them, hooks of modules and parameters of a job; and
    descriptors, sockets among them, and threads of the process."""

    bytes: int
    graphs: int
    hooks: int
    fds: int
    sockets: int
    threads: int


def kept_by(job: Any) -> Kept:
    gc.collect()
    modules = [module for chunk in job.chunks for module in chunk.modules()]
    hooks = sum(len(getattr(module, name)) for module in modules for name in HOOKS)
    hooks += sum(len(param._post_accumulate_grad_hooks or ()) for chunk in job.chunks for param in chunk.parameters())
    hooks += sum(len(param._backward_hooks or ()) for chunk in job.chunks for param in chunk.parameters())
    counts = resource_counts()
    return Kept(live_bytes(), live_graphs(), hooks, counts.fds, counts.sockets, counts.threads)


def memory_of_steps(scene: FailingScene, batch: Batch) -> None:
    """What each of two finished steps leaves behind, after a first that may make what stays; then aborted steps, and aborts after an error.
    Apart, because one kind of end may clear what the other leaves."""
    ends: dict[str, Callable[[], object]] = {
        "finish": lambda: scene.whole(batch),
        "abort": lambda: scene.abandon(batch),
        "error in microbatch": lambda: (broken_microbatch(scene, batch, RehearsedError), scene.step.abort()),
        "error in finish": lambda: (broken_finish(scene, batch), scene.step.abort()),
    }
    for end, take in ends.items():
        levels = []
        for _ in range(3):
            take()
            levels.append(kept_by(scene.job))
        steps = [Kept(*map(operator.sub, after, before)) for before, after in itertools.pairwise(levels)]
        for name in Kept._fields:
            least = KEPT_BYTES if name == "bytes" else 0
            grown = min(getattr(step, name) for step in steps)
            counts = f"{getattr(levels[0], name)} after the first {end}, {getattr(levels[2], name)} after the third"
            scene.note(f"{name}_kept", max(0, grown - least), counts if grown > least else "", end=end)


# -- what the kit's own step promises beyond the protocol ---------------------------------------------------------------------


def overwritten(scene: FailingScene, batch: Batch) -> None:
    """The caller overwrites its rows between microbatch and finish: the step must equal one with rows that stay."""
    scene.begin()
    passed = {name: value.clone() for name, value in batch.items()}
    scene.step.microbatch(passed)
    for value in passed.values():
        value.zero_()
    scene.step.finish()
    scene.note("overwritten_differs", differs_from_control(scene, batch))


def mean_metric(scene: FailingScene, batch: Batch) -> None:
    """The loss also reports `reward`, which is a mean over microbatches and data ranks. Not tried where other microbatches than these are
    made of the rows."""
    if scene.config.batching != "fixed":
        return

    def mean(rows: Batch) -> torch.Tensor:
        return rows["input_ids"].double().mean()

    def with_mean(logprobs: torch.Tensor, rows: Batch, **counts: float) -> Any:
        value, seen = scene.loss(logprobs, rows, **counts)
        return value, {**seen, "reward": mean(rows)}

    scene.begin(WrappedLoss(scene.loss, with_mean, {**scene.loss.normalizers(), "reward": None}))
    scene.feed(batch)
    reported = scene.step.finish()["metrics"]["reward"]
    pieces = list(cuts(batch, scene.config.micro_batch))
    total = torch.stack([*map(mean, pieces)]).sum().to(scene.job.device)
    dist.all_reduce(total, group=split.data_group())
    expected = float(total) / len(pieces) / dist.get_world_size(split.data_group())
    wrong = (
        f"reward is {reported:g} instead of {expected:g}" if not math.isclose(reported, expected, rel_tol=1e-6) else ""
    )
    scene.note("mean_wrong", int(bool(wrong)), wrong)


def forward_passes(scene: FailingScene, batch: Batch) -> None:
    """Rows of equally many tokens: each microbatch needs one forward pass. Not tried where other microbatches than these are made of
    the rows."""
    if scene.config.batching != "fixed":
        return
    passes: list[int] = []
    hook = scene.job.chunks[0].register_forward_pre_hook(lambda *_: passes.append(1))
    scene.begin()
    scene.feed(with_equal_rows(batch, scene.job.device))
    scene.step.finish()
    hook.remove()
    needed = len([*cuts(batch, scene.config.micro_batch)])
    text = f"{len(passes)} for {needed} microbatches" if len(passes) > needed else ""
    scene.note("passes_repeated", max(0, len(passes) - needed), text)
