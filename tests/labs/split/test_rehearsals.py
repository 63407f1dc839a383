"""What the lab rehearses for steps that the protocol refuses or that leave something behind, on a job in this process alone."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.labs.split.faults import KIT_SPLIT
from kit.labs.split.lab import SplitConfig
from kit.labs.split.ranks import rehearsals
from kit.megatron import split
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.protocol import Batch, Misuse, SplitStep, StepResult, cuts

ENDS = ("finish", "abort", "error in microbatch", "error in finish")
CONFIG = SplitConfig(ranks=1, steps=1, microbatches=2, micro_batch=3, chunks=(1,), level="tokens", dtype="float32")
ROWS, LENGTH, WORDS = 6, 12, 40


class Bigrams(torch.nn.Module):
    """One table of next-token logits."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table[ids]
        return logits


class Job:
    """A bigram model."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.table = torch.nn.Parameter(torch.sin(torch.arange(float(WORDS * WORDS))).view(WORDS, WORDS))
        net = Bigrams()
        net.table = self.table
        self.chunks = [net]
        self.optimizer = SimpleNamespace(step=lambda: None)


class Step(SplitStep):
    """A right step on that job; the last microbatch may be smaller."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.device)
        self.job = job

    def _pieces(self, data: Batch) -> list[Batch]:
        return list(cuts(data, self.mbs))

    def _open(self) -> None:
        self.job.table.grad = None

    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        seen = []
        for piece in pieces:
            ids = piece["input_ids"]
            message = self.job.chunks[0](ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            value, metrics = self.loss(message, piece, tokens=1.0, sequences=1.0)
            value.backward()  # type: ignore[no-untyped-call]
            seen.append(metrics)
        return seen

    def _close(self) -> Any:
        sequences, tokens, _ = self._true_counts(None)
        self.job.optimizer.step()
        with torch.no_grad():
            self.job.table -= self.job.table.grad
        return {"global_valid_seqs": sequences, "global_valid_toks": tokens}

    def _restore(self) -> None: ...

    def _give_up(self) -> None: ...


class Backend:
    def fresh(self) -> Job:
        return Job()

    def hooks(self, job: Job) -> tuple[Any, ...]:
        return ()

    def state(self, job: Job) -> dict[str, str]:
        return {"table": repr(job.table.tolist()), "random": repr(torch.get_rng_state().tolist())}


def batch() -> Batch:
    """Rows without advantages, with different numbers of valid tokens, one of them without any."""
    place = torch.arange(LENGTH)
    answers = ((place > 2) & (place < torch.tensor([[12], [4], [8], [5], [3], [9]]))).float()
    near = -2 + torch.sin(torch.arange(float(ROWS * LENGTH))).view(ROWS, LENGTH) / 10
    return {
        "input_ids": (torch.arange(ROWS)[:, None] * 7 + place * 3) % WORDS,
        "input_lengths": torch.full((ROWS,), LENGTH),
        "token_mask": answers,
        "sample_mask": torch.tensor([1.0, 1, 1, 0, 1, 1]),
        "advantages": torch.zeros(ROWS, LENGTH),
        "prev_logprobs": near,
        "generation_logprobs": near + 1,
        "reference_logprobs": near,
    }


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Make a default group of this process; at the end no group is left."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "data_group", lambda: dist.group.WORLD)
        yield
    GROUPS.clear()
    dist.destroy_process_group()
    gc.collect()


class Whole(Step):
    """Takes only whole microbatches, as Megatron's step does."""

    def _pieces(self, data: Batch) -> list[Batch]:
        if len(data["input_ids"]) % self.mbs:
            raise Misuse("no whole number of microbatches")
        return super()._pieces(data)


class RefusesLate(Step):
    def finish(self) -> StepResult:
        raise Misuse("rows remain")


class Drops(Step):
    """Ignores the rows after the last whole microbatch."""

    def microbatch(self, data: Batch) -> None:
        whole = len(data["input_ids"]) // self.mbs * self.mbs
        super().microbatch({name: value[:whole] for name, value in data.items()})


class CountsAndDrops(Step):
    """Counts all rows, but trains only on those of whole microbatches."""

    def _pieces(self, data: Batch) -> list[Batch]:
        return [piece for piece in super()._pieces(data) if len(piece["input_ids"]) == self.mbs]


class TrainsAndForgets(Step):
    """Trains on all rows, but counts one valid token too few."""

    def finish(self) -> StepResult:
        result = super().finish()
        return {**result, "global_valid_toks": result["global_valid_toks"] - 1}


class CountsInHalfPrecision(Step):
    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self.counted = self.counted.half()


class Keeps(Step):
    """Makes a group in every step and keeps it."""

    def finish(self) -> StepResult:
        self.group = dist.new_group([0])
        return super().finish()


class KeepsOfAborts(Step):
    def abort(self) -> None:
        super().abort()
        GROUPS.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1))


class MakesOne(Step):
    """Makes one group of its own when it first needs it, and one more in each step, which it gives back."""

    group: Any = None

    def finish(self) -> StepResult:
        self.group = self.group or dist.new_group([0])
        dist.destroy_process_group(dist.new_group([0]))
        return super().finish()


class KeepsGraphs(Step):
    """Keeps a small tensor of every step, and with it a graph."""

    def finish(self) -> StepResult:
        vars(self.job).setdefault("values", []).append(self.job.table[:1, :1] * 2)
        return super().finish()


class KeepsBytes(Step):
    def abort(self) -> None:
        super().abort()
        vars(self.job).setdefault("rows", []).append(torch.zeros(2 * rehearsals.KEPT_BYTES))


class KeepsUntilAborted(Step):
    """Keeps a graph of every finished step, until one is aborted."""

    def finish(self) -> StepResult:
        vars(self.job).setdefault("values", []).append(self.job.table[:1, :1] * 2)
        return super().finish()

    def abort(self) -> None:
        super().abort()
        vars(self.job).pop("values", None)


class HooksEveryTime(Step):
    def _open(self) -> None:
        super()._open()
        self.job.chunks[0].register_forward_hook(lambda *_: None)


class OpensAFile(Step):
    """Leaves a file open if a microbatch raises."""

    def microbatch(self, data: Batch) -> None:
        try:
            super().microbatch(data)
        except rehearsals.RehearsedError:
            weakref.finalize(self.job, os.close, os.open(os.devnull, os.O_RDONLY))
            raise


class LeavesAThread(Step):
    """Every abort of an open step starts a thread, which runs until the job is gone."""

    def _give_up(self) -> None:
        over = threading.Event()
        weakref.finalize(self.job, over.set)
        threading.Thread(target=over.wait, daemon=True).start()


class KeepsSomethingOnce(Step):
    """Right: a cache, a hook and a graph that its first step makes, and a number of every step."""

    def _open(self) -> None:
        super()._open()
        job = vars(self.job)
        if "cache" not in job:
            job["cache"] = (torch.zeros(2 * rehearsals.KEPT_BYTES), self.job.table[:1, :1] * 2)
            self.job.chunks[0].register_forward_hook(lambda *_: None)
        job.setdefault("history", []).append(torch.zeros(1))


class SkipsNoRows(Step):
    """Takes data without any key as no rows."""

    def microbatch(self, data: Batch) -> None:
        if data:
            super().microbatch(data)


class LooksFirst(Step):
    """Its own look at the data raises, and the step goes on after it."""

    def microbatch(self, data: Batch) -> None:
        _ = data["input_ids"]
        super().microbatch(data)


class FinishesAnyway(Step):
    """After an error in microbatch it takes no further rows, but can be finished."""

    def microbatch(self, data: Batch) -> None:
        if self.had_error:
            raise Misuse("microbatch: the step is open after an error")
        try:
            _ = data["input_ids"]
        except KeyError:
            self.had_error = True
            raise
        super().microbatch(data)

    def begin(self, *args: Any) -> None:
        self.had_error = False
        super().begin(*args)


class StoresRows(Step):
    """Trains on the caller's rows, but only in finish."""

    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        self.stored = pieces
        return []

    def _close(self) -> Any:
        self.seen += super()._run(self.stored)
        return super()._close()


class StoresCopies(StoresRows):
    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        return super()._run([{name: value.clone() for name, value in piece.items()} for piece in pieces])


class ReportsMetrics(Step):
    def _close(self) -> Any:
        result = super()._close()
        metrics = self._step_metrics(None, result["global_valid_seqs"], result["global_valid_toks"])
        return {**result, "metrics": metrics}


class AddsMeansUp(ReportsMetrics):
    def _close(self) -> Any:
        result = super()._close()
        result["metrics"]["reward"] *= len(self.seen)
        return result


class Reports(ReportsMetrics):
    """A whole result: with the loss and the norm of the gradients."""

    def _close(self) -> Any:
        result = super()._close()
        return {**result, "global_loss": result["metrics"]["loss"], "grad_norm": float(self.job.table.grad.norm())}


class DividesByNoTokens(Reports):
    """Divides a mean by the count as it is, 0 where no token counts."""

    def _step_metrics(self, *args: Any) -> dict[str, float]:
        table = super()._step_metrics(*args)
        count = torch.tensor(args[-1])
        return {**table, "probs_ratio": float(table["probs_ratio"] * (count / count))}


class LeavesExtremes(Reports):
    """Reports the least ratio of no token as it is, an infinity."""

    def _step_metrics(self, *args: Any) -> dict[str, float]:
        table = super()._step_metrics(*args)
        return table if args[-1] else {**table, "probs_ratio_min": math.inf}


class NoNumberAsLoss(Reports):
    def _close(self) -> Any:
        result = super()._close()
        return result if result["global_valid_toks"] else {**result, "global_loss": math.nan}


class RefusesNoTokens(Reports):
    def _close(self) -> Any:
        if not self._true_counts(None)[1]:
            raise Misuse("no token counts")
        return super()._close()


class StumblesOverNoTokens(Reports):
    def _close(self) -> Any:
        return {**super()._close(), "mean": 1 / self._true_counts(None)[1]}


class Narrow(Step):
    """Has no finally: after an error another dtype is torch's default."""

    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        torch.set_default_dtype(torch.float64)
        seen = super()._run(pieces)
        torch.set_default_dtype(torch.float32)
        return seen


class NoGradAfterAbort(Step):
    def _give_up(self) -> None:
        torch.set_grad_enabled(False)


class Restores(Step):
    """Right: what it sets while a step is open is as before at every end."""

    def _open(self) -> None:
        super()._open()
        self.mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")

    def _restore(self) -> None:
        torch.set_deterministic_debug_mode(self.mode)

    def _give_up(self) -> None:
        self._restore()


class RunsAgain(Step):
    """Right but slow: its microbatches run forward once more to be counted."""

    def _run(self, pieces: list[Batch]) -> list[dict[str, torch.Tensor]]:
        with torch.no_grad():
            for piece in pieces:
                self.job.chunks[0](piece["input_ids"])
        return super()._run(pieces)


GROUPS: list[Any] = []


def scene(step: Callable[[Job], Any], **changed: Any) -> rehearsals.FailingScene:
    backend: Any = Backend()
    whole = rehearsals.FailingScene(
        backend=backend,
        job=None,
        step=None,
        make=step,
        loss=ClippedPolicyGradient(level="tokens"),
        batches=[],
        config=CONFIG,
    )
    return dataclasses.replace(whole, **changed).fresh()


def found(step: Callable[[Job], Any], rehearsal: Any, rows: Batch | None = None, **changed: Any) -> list[float]:
    made = scene(step, **changed)
    rehearsal(made, rows or batch())
    return [value for _, value, _, _ in made.found]


@pytest.mark.parametrize("step", [Step, Whole, RefusesLate])
def test_a_remainder_that_counts_or_is_refused(step: Any) -> None:
    assert found(step, rehearsals.remainder) == [0]


@pytest.mark.parametrize("step", [Drops, CountsAndDrops, TrainsAndForgets])
def test_a_remainder_that_is_lost(step: Any) -> None:
    assert found(step, rehearsals.remainder) == [1]


def test_a_remainder_under_other_losses() -> None:
    nll: Any = NegativeLogLikelihood(level="sequences")
    assert found(CountsAndDrops, rehearsals.remainder, loss=nll) == [1]
    assert found(Step, rehearsals.remainder, loss=nll) == [0]


def test_a_remainder_of_rows_of_which_one_counts() -> None:
    few = {**batch(), "sample_mask": torch.eye(ROWS)[2]}
    assert found(Step, rehearsals.remainder, few) == [0]
    assert found(CountsAndDrops, rehearsals.remainder, few) == [1]


def test_rows_of_one_leave_no_remainder() -> None:
    assert found(Drops, rehearsals.remainder, config=dataclasses.replace(CONFIG, micro_batch=1)) == []


@pytest.mark.drawn(1, of="counts")
@pytest.mark.parametrize("last", [0.0, 1.0])  # with an odd and an even number of tokens
def test_counts_beyond_half_precision(last: float) -> None:
    rows = batch()
    rows["token_mask"][:] = 1.0
    rows["token_mask"][0, -1] = last
    assert found(Step, rehearsals.many_calls, rows) == [0]
    assert found(CountsInHalfPrecision, rehearsals.many_calls, rows) == [1]


@pytest.mark.parametrize(("step", "kept"), [(Step, 0), (MakesOne, 0), (Keeps, 1), (KeepsOfAborts, 1)])
def test_groups_of_steps_are_counted(step: Any, kept: int) -> None:
    assert found(step, rehearsals.groups_of_steps) == [kept]


@pytest.mark.drawn(3, of="leftovers")
@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (Step, ()),
        (KeepsSomethingOnce, ()),
        (KeepsGraphs, ("graphs_kept finish", "graphs_kept error in finish")),
        (KeepsUntilAborted, ("graphs_kept finish",)),
        (KeepsBytes, tuple(f"bytes_kept {end}" for end in ENDS[1:])),
        (HooksEveryTime, tuple(f"hooks_kept {end}" for end in ENDS)),
        (OpensAFile, ("fds_kept error in microbatch",)),
        (LeavesAThread, ("threads_kept abort", "threads_kept error in microbatch", "threads_kept error in finish")),
    ],
)
def test_what_steps_leave_behind_is_named(step: Any, kept: tuple[str, ...]) -> None:
    made = scene(step)
    rehearsals.memory_of_steps(made, batch())
    assert [metric for metric, value, _, _ in made.found] == [f"{name}_kept" for name in rehearsals.Kept._fields] * 4
    assert tuple(f"{metric} {ids['end']}" for metric, value, _, ids in made.found if value) == kept


@pytest.mark.parametrize("step", [Step, SkipsNoRows, LooksFirst])
def test_what_follows_an_error_in_a_pipeline(step: Any) -> None:
    made = scene(step, config=dataclasses.replace(CONFIG, ranks=2, pp=2))
    rehearsals.raised(made, batch())
    restores_nothing = {"error_changed"}  # the abort of this job
    assert {metric for metric, value, *_ in made.found if value} <= restores_nothing
    refused = {ids["call"] for metric, _, _, ids in made.found if metric == "misuse_silent"}
    judged = {"microbatch after an error in microbatch"} & refused
    assert bool(judged) == (step is Step)


def test_a_pipelines_step_that_finishes_after_an_error_is_named() -> None:
    made = scene(FinishesAnyway, config=dataclasses.replace(CONFIG, ranks=2, pp=2))
    rehearsals.raised(made, batch())
    accepted = {ids["call"] for metric, value, _, ids in made.found if value and metric == "misuse_silent"}
    assert accepted == {"finish after an error in microbatch"}


@pytest.mark.parametrize(("step", "differs"), [(Step, False), (StoresCopies, False), (StoresRows, True)])
def test_rows_that_the_caller_overwrites(step: Any, differs: bool) -> None:
    made = scene(step, batches=[batch()], loss=NegativeLogLikelihood(level="tokens"))
    made.whole(made.batches[0])
    rehearsals.overwritten(made, batch())
    assert [bool(value) for _, value, *_ in made.found] == [differs]


@pytest.mark.parametrize(("step", "wrong"), [(ReportsMetrics, 0), (AddsMeansUp, 1)])
def test_a_metric_that_is_a_mean(step: Any, wrong: int) -> None:
    assert found(step, rehearsals.mean_metric) == [wrong]


@pytest.mark.parametrize(
    ("step", "implementation", "wrong", "told"),
    [
        (Reports, KIT_SPLIT, 0, ""),
        (DividesByNoTokens, KIT_SPLIT, 1, "probs_ratio is nan"),
        (NoNumberAsLoss, KIT_SPLIT, 1, "global_loss is nan"),
        (LeavesExtremes, KIT_SPLIT, 1, "probs_ratio_min is inf"),
        (LeavesExtremes, "mine:Step", 0, ""),  # own code may leave an extreme of nothing infinite
        (RefusesNoTokens, KIT_SPLIT, 0, "refused with Misuse: no token counts"),
        (StumblesOverNoTokens, KIT_SPLIT, 1, "refused with ZeroDivisionError: "),
    ],
)
def test_a_step_without_any_valid_token(step: Any, implementation: str, wrong: int, told: str) -> None:
    made = scene(step, config=dataclasses.replace(CONFIG, implementation=implementation))
    rehearsals.nothing_valid(made, batch())
    ((metric, value, text, ids),) = made.found
    assert (metric, value, ids) == ("misuse_silent", wrong, {"call": "step without any valid token"})
    assert text.startswith(told)
    assert bool(text) == bool(told)


@pytest.mark.drawn(3, of="settings")
@pytest.mark.parametrize(
    ("step", "lost"),
    [
        (Step, {}),
        (Restores, {}),
        (Narrow, dict.fromkeys(("error in microbatch", "abort"), "torch.get_default_dtype()")),
        (NoGradAfterAbort, {"abort": "torch.is_grad_enabled()"}),
    ],
)
def test_settings_of_torch_that_a_step_leaves_changed_are_named(step: Any, lost: dict[str, str]) -> None:
    made = scene(step, batches=[batch()])
    grad, dtype, mode = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    try:
        assert rehearsals.broken_microbatch(made, batch(), rehearsals.RehearsedError) is not None
        made.note_hooks("error in microbatch")
        made.step.abort()
        made.note_hooks("abort")
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_deterministic_debug_mode(mode)
    named = {ids["after"]: text for metric, value, text, ids in made.found if metric == "hooks_lost" and value}
    assert named == lost


def test_what_an_earlier_rehearsal_left_changed_is_still_seen() -> None:
    made = scene(Step)
    with torch.inference_mode():
        later = made.fresh()
        later.note_hooks("abort")
    assert [text for _, _, text, _ in later.found] == ["torch.is_grad_enabled(), torch.is_inference_mode_enabled()"]


@pytest.mark.parametrize(("step", "repeated"), [(Step, 0), (StoresCopies, 0), (RunsAgain, 2)])
def test_forward_passes_are_counted(step: Any, repeated: int) -> None:
    assert found(step, rehearsals.forward_passes) == [repeated]


class Reseeds(Step):
    """Every microbatch begins with the same random numbers."""

    def microbatch(self, data: Batch) -> None:
        torch.manual_seed(1234)
        super().microbatch(data)


class PutsRandomNumbersBack(Step):
    """After a step that was finished, as an abort does."""

    def begin(self, *args: Any) -> None:
        self.generator = torch.get_rng_state()
        super().begin(*args)

    def finish(self) -> StepResult:
        result = super().finish()
        torch.set_rng_state(self.generator)
        return result


@pytest.mark.parametrize(("step", "repeats"), [(Step, 0), (Reseeds, 1), (PutsRandomNumbersBack, 1)])
def test_random_numbers_that_repeat_after_a_step(step: Any, repeats: int) -> None:
    assert found(step, rehearsals.draws) == [repeats]
