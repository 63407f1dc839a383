"""Runs of the split lab for all tests of a module, on ranks that stay alive and can import the tests' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kit
from tests.holdings import nothing_added

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"steps": 2, "layers": 2, "microbatches": 4, "chunks": [1, 2, 0], "timeout_s": 150.0}  # below pytest's limit
OWN = '''
import math
import types
import torch
import torch.distributed as dist
from kit.megatron import model, split
from kit.megatron.config import ModelConfig
from kit.megatron.split import MegatronSplit
from kit.train.losses import ClippedPolicyGradient
from kit.train.plain import plain_logprobs
from fsdp_loop import Loop
from own_split import Trainer


class LoopOnColumns(Loop):
    """Right: rows are whole where the loss sees them, and counted over the data ranks."""
    def __init__(self, ctx):
        super().__init__(ctx)
        self.group = ctx.job.group
    def logprobs(self, ids):
        return plain_logprobs(self.model, ids)
    def over_ranks(self, values, op=dist.ReduceOp.SUM):
        there = values.to(self.device)
        dist.all_reduce(there, op=op, group=self.group)
        return there.cpu()


class LoopThatCountsContextRanks(LoopOnColumns):
    def over_ranks(self, values, op=dist.ReduceOp.SUM):
        return Loop.over_ranks(self, values, op)


class Forgets(Trainer):
    """No gradient of another data rank arrives."""
    def reduce(self): ...


class Raises(Trainer):
    def finish(self):
        raise LookupError("my own finish failed")


class Empty:
    def __init__(self, ctx): ...


class HalfOfIt:
    version = 0
    def __init__(self, ctx): ...
    def begin(self, loss, gbs, mbs): ...
    def microbatch(self, data): ...


class Kit(MegatronSplit):
    def __init__(self, ctx):
        super().__init__(ctx.job)

    def finish(self):
        return self.changed(super().finish())

    def changed(self, result):
        return result


class Consumes(Kit):
    """Takes its rows to pieces once it is done with them, which is its right."""
    def microbatch(self, data):
        super().microbatch(data)
        for value in data.values():
            value.zero_()


class Lacks(Kit):
    def changed(self, result):
        return {name: value for name, value in result.items() if name not in ("lr", "global_valid_seqs")}


class Nothing(Kit):
    def changed(self, result): ...


class Words(Kit):
    def changed(self, result):
        return {**result, "metrics": {**result["metrics"], "loss": "small"}}


class RankLies(Kit):
    def changed(self, result):
        return {**result, "grad_norm": result["grad_norm"] + dist.get_rank()}


class NotANumber(Kit):
    def changed(self, result):
        return {**result, "metrics": dict.fromkeys(result["metrics"], float("nan"))}


class NoRate(Kit):
    def changed(self, result):
        return {**result, "lr": float("nan")}


class NeverUpdated(Kit):
    """Says so, which would have nobody ask for its rate."""
    def changed(self, result):
        return {**result, "updated": False, "lr": 1.0}


class NoDecay(Kit):
    def changed(self, result):
        return {**result, "wd": 0.0}


class StrayReplica(Kit):
    """All numbers are right; the weights of one rank are not."""
    def changed(self, result):
        if dist.get_rank() == 1:
            with torch.no_grad():
                for param in self.job.chunks[0].parameters():
                    param.add_(1e-3)
        return result


class OwnUpdate(Kit):
    """Goes round the optimizer that it was given."""
    def finish(self):
        inside = self.job.optimizer.step
        self.job.optimizer.step = lambda: (True, 0.5, None)
        try:
            return super().finish()
        finally:
            self.job.optimizer.step = inside


class ClipsItself(Kit):
    """Right: clips by torch before it calls the optimizer, whose own clipping is off."""
    factor = 1.0
    def _update(self, *args):
        self.job.optimizer.config.clip_grad = 0.0
        for param in self.job.chunks[0].parameters():
            param.grad = param.main_grad
        norm = torch.nn.utils.clip_grad_norm_(self.job.chunks[0].parameters(), 0.1 * self.factor)
        result = super()._update(*args)
        for param in self.job.chunks[0].parameters():
            param.grad = None
        return {**result, "grad_norm": float(norm)}


class ClipsToHalf(ClipsItself):
    factor = 0.5


class LateVersion(Kit):
    """The result has it right; the object itself does not."""
    @property
    def version(self):
        return max(self._version - 1, 0)
    @version.setter
    def version(self, value):
        self._version = value
    def changed(self, result):
        return {**result, "version": self._version}


class AbortMoves(Kit):
    def abort(self):
        was_open = self.state == "open"
        super().abort()
        if was_open:
            with torch.no_grad():
                next(self.job.chunks[0].parameters()).add_(1e-7)


class AbortLosesHooks(Kit):
    """They come back with the next finish, not with the abort."""
    def _give_up(self):
        self.kept = self.kept or self.saved
        self.saved = {}
        super()._give_up()
    def _hook(self):
        super()._hook()
        self.saved = self.kept or self.saved
        self.kept = {}
    kept = {}


class StaysDeterministic(Kit):
    """An error in a microbatch leaves torch's kernels deterministic: there is no finally."""
    def microbatch(self, data):
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")
        super().microbatch(data)
        torch.set_deterministic_debug_mode(before)


class KeepsRandom(Kit):
    def _give_up(self):
        self.random = ()
        super()._give_up()


class Swallows(Kit):
    """An error is nobody's business."""
    def microbatch(self, data):
        try:
            super().microbatch(data)
        except RuntimeError:
            pass


class Stores(Kit):
    """Right: stores its rows and computes in finish, where an error in the loss comes up."""
    def begin(self, loss, gbs, mbs):
        super().begin(loss, gbs, mbs)
        self.rows = []
    def microbatch(self, data):
        self._need("open", "microbatch")
        self.rows.append(data)
    def finish(self):
        self._need("open", "finish")
        self.compute()
        return super().finish()
    def compute(self):
        for data in self.rows:
            super().microbatch(data)
        self.rows = []


class StoresAndSwallows(Stores):
    """Leaves out rows of which the loss raises."""
    def compute(self):
        try:
            super().compute()
        except RuntimeError:
            self.failed = ""


class AppliesNaN(Kit):
    """What is not a number is trained on like the rest."""
    def _update(self, *args):
        kept, split.finite_gradients = split.finite_gradients, lambda job: True
        try:
            return super()._update(*args)
        finally:
            split.finite_gradients = kept


class RaisesOnNaN(Kit):
    """Refuses a step that is not finite by an error, which abort clears up."""
    def _update(self, *args):
        if not split.finite_gradients(self.job) or not math.isfinite(args[2]["loss"]):
            raise FloatingPointError("a gradient or the loss is not finite")
        return super()._update(*args)


class OtherWords(Kit):
    """Refuses what it must, and does not say in which state it is."""
    def _need(self, state, call):
        try:
            super()._need(state, call)
        except Exception:
            raise RuntimeError("not now") from None


class BreaksAfterAbort(Kit):
    """Cannot be used once it was aborted."""
    def abort(self):
        was_open = self.state == "open"
        super().abort()
        if was_open:
            self.failed = "was aborted"


class RaisesWhenClosed(Kit):
    def abort(self):
        if self.state == "closed":
            raise RuntimeError("nothing to abort")
        super().abort()


class Reinforce:
    """A loss from nothing: -A log p, a mean by its level, in float32."""
    def __init__(self, ctx):
        self.level = ctx.level

    def normalizers(self):
        return {"loss": self.level, "entropy": "tokens", "rows": None}

    def __call__(self, logprobs, data, *, tokens, sequences):
        inside = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) > 0
        each = -torch.where(inside, data["advantages"][:, 1:], 0.0) * torch.where(inside, logprobs, 0.0)
        own = torch.where(inside, -logprobs.detach(), 0.0).sum().double() / tokens
        total = each.double().sum(1)
        if self.level == "sequences":
            total = total / inside.sum(1).clamp(min=1)
        loss = total.sum() / (tokens if self.level == "tokens" else sequences)
        return loss, {"loss": loss.detach(), "entropy": own, "rows": data["sample_mask"].sum()}


class WrongNormalizer(Reinforce):
    def normalizers(self):
        return {**super().normalizers(), "entropy": "sequences"}


class DividesAgain(Reinforce):
    """By its own rows as well: the gradient hangs on how a step is cut."""
    def __call__(self, logprobs, data, **by):
        loss, seen = super().__call__(logprobs, data, **by)
        return loss / len(logprobs), seen


class ByMultiplying(Reinforce):
    """Masked places are multiplied by 0."""
    def __call__(self, logprobs, data, *, tokens, sequences):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = (-data["advantages"][:, 1:] * logprobs * mask).sum() / tokens
        return loss, {"loss": loss.detach(), "entropy": loss.detach() * 0, "rows": data["sample_mask"].sum()}


class OneLevel(Reinforce):
    def __init__(self, ctx):
        self.level = "tokens"


class UnknownMetric(Reinforce):
    def __call__(self, *args, **kwargs):
        loss, seen = super().__call__(*args, **kwargs)
        return loss, {**seen, "extra": loss.detach()}


class OddNormalizer(Reinforce):
    def normalizers(self):
        return {"loss": "rows"}


def own_model(ctx):
    """Megatron's model again, wider, with another optimizer."""
    config = ModelConfig(layers=2, tp=ctx.config.tp, pp=ctx.config.pp, seq=ctx.config.length, sum_gradients=True, seed=7)
    job = model.assemble_job(config, ctx.device, ctx.settings)
    return types.SimpleNamespace(chunks=job.chunks, optimizer=job.optimizer, scheduler=job.scheduler)


def model_without_scheduler(ctx):
    made = own_model(ctx)
    del made.scheduler
    return made


def model_that_never_reduces(ctx):
    made = own_model(ctx)
    made.chunks[0].config.finalize_model_grads_func = None
    return made
'''


@pytest.fixture(scope="module", autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in a folder of the module, where ranks can import `mine` and the docs' example; nothing may be left behind."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "mine.py").write_text(OWN)
    for name in ("own_split.py", "fsdp_loop.py"):
        (folder / name).write_text((ROOT / "docs" / "examples" / name).read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.chdir(folder)
        with nothing_added():
            yield


@pytest.fixture(scope="module")
def world(_places: None) -> Iterator[kit.World]:
    """Two ranks that all runs of the module use in turn."""
    with kit.World(2, env={"OMP_NUM_THREADS": "1"}, preload=("megatron.core",)) as made:
        yield made


@pytest.fixture(scope="module")
def split(world: kit.World) -> Callable[..., kit.Run]:
    """split(**config) returns a finished small run, the same one for equal arguments. A run that breaks may leave a call behind."""
    made: dict[str, kit.Run] = {}

    def run(fault: str | None = None, **config: object) -> kit.Run:
        key = repr((fault, sorted(config.items())))
        if key not in made:
            try:
                made[key] = kit.run("split", fault=fault, world=world, **{**SMALL, **config})
            except BaseException:
                world.restart()
                raise
        return made[key]

    return run
