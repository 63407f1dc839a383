"""The split lab on a rank, one method per phase. `broken.py` has the faults, `backends.py` the backends."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.labs.split.config import KIT_LOSS, KIT_MODEL, Case, SplitConfig, cases
from kit.labs.split.ranks import backends, losses, oracle, rehearse
from kit.labs.split.ranks.broken import NUMBERS, broken_job, broken_loss, make_split, whole_result
from kit.measure.phase import log_steps, now
from kit.megatron import groups
from kit.megatron import split as megatron_split
from kit.megatron.split import clear_aux
from kit.train.plain import from_weights, logprobs
from kit.train.protocol import SplitContext, cuts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.labs.rankside import Context
    from kit.labs.split.ranks.backends import Tensors
    from kit.train.protocol import Batch, Loss, StepResult

ROUNDING = 64  # a gradient below this many roundings of the model's largest gradient is noise


@dataclass(kw_only=True, slots=True)
class Trained:
    """The outcome of all steps of one kind: results and gradients of every step, and the final weights."""

    results: list[StepResult] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Calls:
    """Seconds of each call of the last step. Earlier steps are not timed, because the clock waits for the device."""

    device: str
    on: bool = False
    looked: float = 0.0  # seconds of the current call in which the lab itself read gradients
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def time(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if not self.on:
            return function(*args)
        self.looked, started = 0.0, now(self.device)
        result = function(*args)
        self.seconds.append((name, now(self.device) - started - self.looked))
        return result


class Split:
    """The plain step, the split step, and their comparison."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.config: SplitConfig = ctx.config
        self.cases = {case.cycle: case for case in cases(self.config)}
        self.plain = self.cut = Trained()
        self.first: Tensors = {}  # the gradients of the first number of chunks at this level
        self.losses: dict[str, Loss] = {}  # by level

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """Weights, rollouts and groups. Model-parallel ranks of one replica get the same rows."""
        config = self.config
        self.weights, whole = backends.rollouts(config, self.ctx.device)
        self.megatron = backends.Megatron(config, self.weights if config.has_twin else {})
        self.backend: backends.Backend = self.megatron
        if config.backend == "fsdp2":
            self.backend = backends.Fsdp2(config, self.weights, self.megatron.device)
        self.whole = backends.steps(config, whole)
        if not config.has_twin:
            self.whole = [backends.shifted(self.megatron, step) for step in self.whole]
        self.batches = [backends.share(config, step) for step in self.whole]
        for step, batch in enumerate(self.whole, start=1):
            sequences, tokens = oracle.true_counts(batch)
            self.ctx.record("result", sequences, step=step, name="sequences")
            self.ctx.record("result", tokens, step=step, name="tokens")
        self.ctx.record("rows", config.batch * config.steps)
        self.ctx.record("ratios_off_one", backends.ratios_off_one(whole))

    def sync(self, cycle: int) -> None:
        """The plain step."""
        case = self.cases[cycle]
        self.first = {}
        self.plain = self._drive(self.backend, case, plain=True)
        self._record_results(self.plain)
        for name, by in self._loss(case.level).normalizers().items():
            self.ctx.record("normalizer", None, text=by or "none", name=name)

    def oracle(self, cycle: int) -> None:
        """The first step in float64 on a plain model with separate formulas; then the loss alone on extreme rows.

        With experts: their load-balancing loss.
        """
        if self.config.balances:
            exact_balance = balance_of_step(self.megatron.fresh(), self.batches[0], self.config.micro_batch)
            self.ctx.record("balance", exact_balance)
        if self.ctx.rank:
            return
        level, step = self.cases[cycle].level, self.whole[0]
        formulas = oracle.oracle if self.config.loss == KIT_LOSS else oracle.by_itself
        exact = functools.partial(formulas, self._loss(level, sound=True))
        loss = self._loss(level)
        for gap in losses.GAPS:
            error, name = losses.gap_error(loss, exact, step, gap)
            self.ctx.record("gap_error", error, text=name, gap=int(gap))
        for name, rubbish in losses.RUBBISH.items():
            reached = losses.masked_reach(loss, step, rubbish)
            self.ctx.record("masked_reach", len(reached), text=", ".join(reached[:3]), rubbish=name)
        if not self.config.has_twin:
            return
        net = from_weights(self.megatron.model_config.geometry, self.weights, dtype=torch.float64)
        value, table = exact(logprobs(net, step["input_ids"]), step)
        value.backward()  # type: ignore[no-untyped-call]
        slopes = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
        self.ctx.record("gradient_error", overall(self.plain.gradients[0], slopes))
        for name, number in table.items():
            self.ctx.record("result", number, step=1, name=name)

    def other_backend(self, cycle: int) -> None:
        """Megatron's plain step on the same weights and rows."""
        other = self._drive(self.megatron, self.cases[cycle], plain=True)
        self._record_results(other)
        if self.ctx.rank == 0:
            for step, (a, b) in enumerate(zip(self.plain.gradients, other.gradients, strict=True), start=1):
                self.ctx.record("gradient_error", overall(a, b), step=step)
            self.ctx.record("parameter_error", overall(self.plain.weights, other.weights))

    def split(self, cycle: int) -> None:
        """The split step."""
        self.cut = self._drive(self.backend, self.cases[cycle], plain=False)
        self._record_results(self.cut)

    def compare(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Weights on every rank, since one replica may differ; gradients and tensors on rank 0, which has all of them."""
        cut, plain, record = self.cut, self.plain, self.ctx.record
        record("parameter_error", overall(cut.weights, plain.weights))
        if self.ctx.rank:
            return
        sure: dict[str, torch.Tensor] = {}
        for step, (a, b) in enumerate(zip(cut.gradients, plain.gradients, strict=True), start=1):
            distances = by_tensor(a, b)
            record("gradient_error", overall(a, b), step=step)
            record("gradients_same", sum(each.same for each in distances) / max(len(distances), 1), step=step)
            sure |= {name: mask & sure.get(name, mask) for name, mask in certain(b).items()}
            if step == 1:
                for each in distances:
                    record("tensor_gradient_error", each.error, tensor=each.name)
                    record("tensor_gradient_index", each.index, tensor=each.name)
                    record("tensor_gradient_worst", each.worst, tensor=each.name)
        self.first = self.first or cut.gradients[0]
        record("chunk_error", overall(cut.gradients[0], self.first))
        sure = sure or {name: torch.ones_like(value, dtype=torch.bool) for name, value in plain.weights.items()}
        for name, these in (("parameter", True), ("uncertain", False)):
            a, b = only(cut.weights, sure, those=these), only(plain.weights, sure, those=these)
            for each in by_tensor(a, b):
                record(f"tensor_{name}_error", each.error, tensor=each.name)
                record(f"tensor_{name}_worst", each.worst, tensor=each.name)
        record("uncertain_elements", sum(int((~mask).sum()) for mask in sure.values()))
        record("elements", sum(mask.numel() for mask in sure.values()))

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """The promises of the protocol about aborts, errors in the middle of a step, and calls in the wrong state."""
        scene = rehearse.Scene(
            backend=self.backend,
            make=self._make,
            loss=self._loss(self.config.levels[0]),
            batches=self.batches,
            config=self.config,
        )
        for found in rehearse.rehearse_all(scene):
            self.ctx.record(found.metric, found.value, text=found.text, **found.ids)
            if found.value:
                print(f"rehearse: {found.metric} {found.ids} is {found.value:g} {found.text}")

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.plain = self.cut = Trained()
        groups.destroy()

    def _loss(self, level: Any, *, sound: bool = False) -> Loss:
        if level not in self.losses:
            ctx = losses.LossContext(
                rank=self.ctx.rank,
                world_size=self.ctx.world_size,
                device=self.megatron.device,
                config=self.config,
                level=level,
            )
            self.losses[level] = losses.make_loss(ctx)
        return self.losses[level] if sound else broken_loss(self.ctx.fault, self.losses[level])

    def _judge_updates(self, way: str, start: Tensors, found: Trained) -> None:
        """Clipping, AdamW and schedule of all steps against float64, from the observed weights and gradients."""
        if self.ctx.rank or self.config.model != KIT_MODEL:
            return
        settings = backends.settings(self.config)
        done = oracle.steps(settings, found.gradients, self.config.batch)
        eps = torch.finfo(backends.weights_dtype(self.config)).eps
        moved = oracle.moved(settings, start, found.weights, found.gradients, done, eps=eps)
        worst = max(moved, key=lambda name: moved[name])
        self.ctx.record("update_error", moved[worst], text=worst, way=way)
        for number, (result, must) in enumerate(zip(found.results, done, strict=True), start=1):
            if not found.gradients[number - 1]:
                continue
            for metric, value, exact, rounding in (
                ("update_norm_error", result["grad_norm"], must.norm, must.norm_rounding),
                ("update_rate_error", result["lr"], must.lr, 0.0),
                ("update_decay_error", result["wd"], must.wd, 0.0),
            ):
                error = max(0.0, oracle.relative(float(value), exact) - rounding)
                self.ctx.record(metric, error, way=way, step=number)

    def _make(self, job: Any) -> Any:
        """The code under test for a job."""
        ctx = SplitContext(
            rank=self.ctx.rank,
            world_size=self.ctx.world_size,
            device=self.megatron.device,
            config=self.config,
            chunks=job.chunks,
            optimizer=job.optimizer,
            scheduler=job.scheduler,
            settings=backends.settings(self.config),
            groups=groups.snapshot().get("groups", []),
            job=job,
        )
        return make_split(self.ctx, ctx)

    def _drive(self, backend: backends.Backend, case: Case, *, plain: bool) -> Trained:
        """All plain or all split steps on a fresh job. Rank 0 keeps the gradients that the optimizer gets."""
        job, trained, config = broken_job(self.ctx.fault, backend.fresh()), Trained(), self.config
        used: list[float] = []  # learning rates of this step's updates, and the gradients on rank 0
        seen: list[Tensors] = []
        calls = Calls(device=str(self.megatron.device))

        def look() -> None:
            # A split step has to wait for the device itself; waiting here would hide a step that does not.
            started = now(calls.device) if plain and calls.on else time.perf_counter()
            used.append(max(float(group["lr"]) for group in job.optimizer.param_groups))
            found = backend.gradients(job)
            if self.ctx.rank == 0:
                seen.append({name: value.clone() for name, value in found.items()})
            calls.looked += time.perf_counter() - started

        backends.watch_optimizer(job, look)
        loss, before = self._loss(case.level), backend.hooks(job)
        start = {name: value.clone() for name, value in backend.parameters(job).items()}
        step: Any = backend.sync(job) if plain else self._make(job)
        hooks_lost = wrong_versions = 0
        rate_off = 0.0
        reductions: list[int] = []
        with backend.counted(job) as counter:
            for number, batch in enumerate(self.batches, start=1):
                counter.update(dict.fromkeys(counter, 0))
                used.clear()
                seen.clear()
                calls.on = number == len(self.batches)
                began = time.perf_counter()
                if plain:
                    result = calls.time("run", step.run, loss, batch, config.batch, config.micro_batch)
                else:
                    # Copies, because the code under test may change its rows, and the plain step of another level needs them.
                    own = {name: value.clone() for name, value in batch.items()}
                    chunks = backends.chunks_of(own, case.chunks, config.micro_batch)
                    result = whole_result(config, run_in_chunks(step, loss, chunks, config, calls))
                    wrong_versions += step.version != number
                what = f"plain step, level {case.level}" if plain else f"level {case.level}, chunks {case.chunks}"
                took = time.perf_counter() - began
                log_steps([dict(result)], done=number, seconds=took, device=calls.device, what=what)
                reductions += counter.values()
                trained.results.append(result)
                trained.gradients.append(self._unclipped(seen[-1], result) if seen else {})
                hooks_lost += sum(a is not b and a != b for a, b in zip(before, backend.hooks(job), strict=True))
                wrong_versions += result["version"] != number
                if result["updated"]:
                    off = abs(result["lr"] - used[-1]) / used[-1] if used else math.inf
                    rate_off = max(rate_off, math.inf if math.isnan(off) else off)
                    if not used:
                        print(f"step {number} reports updated=True, but ctx.optimizer.step was not called")
        trained.weights = backend.parameters(job)
        self._judge_updates("plain" if plain else "split", start, trained)
        numbers = {
            "reductions_least": min(reductions),
            "reductions_most": max(reductions),
            "hooks_lost": hooks_lost,
            "rate_off": rate_off,
            "wrong_versions": wrong_versions,
            "norm_rounding": oracle.norm_rounding(trained.weights),
        }
        for name, value in numbers.items():
            self.ctx.record(name, value)
        for index, (name, seconds) in enumerate(calls.seconds):
            self.ctx.record("call_seconds", seconds, "s", call=name, order=index)
        return trained

    def _unclipped(self, found: Tensors, result: StepResult) -> Tensors:
        """Gradients before clipping. How your own model clips is unknown: its gradients stay unchanged."""
        if self.config.model != KIT_MODEL:
            return found
        return oracle.unclipped(backends.settings(self.config), found, float(result["grad_norm"]))

    def _record_results(self, trained: Trained) -> None:
        """The numbers of every step, on every rank, since all ranks must report the same."""
        for step, result in enumerate(trained.results, start=1):
            for key in NUMBERS:
                self.ctx.record("result", float(result[key]), step=step, name=key)  # type: ignore[literal-required]
            for metric, value in result["metrics"].items():
                self.ctx.record("result", value, step=step, name=metric)
            if not math.isfinite(result["global_loss"]):
                print(f"the loss of step {step} is {result['global_loss']}")


def run_in_chunks(step: Any, loss: Loss, chunks: list[Batch], config: SplitConfig, calls: Calls) -> StepResult:
    calls.time("begin", step.begin, loss, config.batch, config.micro_batch)
    for chunk in chunks:
        calls.time("microbatch", step.microbatch, chunk)
    result: StepResult = calls.time("finish", step.finish)
    return result


# -- the load-balancing loss in float64, independent of the code that reports it ---------------------------------------------


def balance(hidden: torch.Tensor, weight: torch.Tensor, choices: int) -> float:
    """E * sum(f P) for the router of one layer and one microbatch: f is the share of choices of each of the E experts, P the mean of
    its softmax probability."""
    tokens = hidden.double().flatten(0, -2)
    chances = torch.softmax(tokens @ weight.double().T, dim=-1)
    chosen = chances.argsort(dim=-1, descending=True)[:, :choices]
    share = torch.bincount(chosen.flatten(), minlength=len(weight)).double() / chosen.numel()
    return float(len(weight) * torch.dot(share, chances.mean(0)))


def balance_of_step(job: Any, batch: Batch, micro_batch: int) -> float:
    """The mean over layers, microbatches and data-parallel ranks, on the initial weights. Every rank calls it with its own rows."""
    found: list[float] = []

    def look(router: Any, given: Any) -> None:
        found.append(balance(given[0].detach(), router.weight.detach(), router.topk))

    modules = [module for chunk in job.chunks for name, module in chunk.named_modules() if name.endswith("mlp.router")]
    hooks = [module.register_forward_pre_hook(look) for module in modules]
    megatron_split.forward_backward(job, list(cuts(batch, micro_batch)), megatron_split.nothing)
    for hook in hooks:
        hook.remove()
    clear_aux()
    total = torch.tensor([sum(found), len(found)], dtype=torch.float64, device=job.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


@dataclass(frozen=True, slots=True)
class Distance:
    """One tensor: ||a - b|| / ||b||, the element that differs most, and whether all bits are the same."""

    name: str
    error: float
    index: int
    worst: float
    same: bool


def overall(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors; infinite if a tensor is missing or not finite."""
    if set(a) != set(b):
        return math.inf
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    whole = sum(float(b[name].double().square().sum()) for name in b)
    if not (math.isfinite(apart) and math.isfinite(whole)):
        return math.inf
    return (apart / whole) ** 0.5 if whole else (math.inf if apart else 0.0)


def by_tensor(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[Distance]:
    """Every tensor; the error of one that `a` or `b` lacks is infinite."""
    both = [_distance(name, a[name].double(), b[name].double()) for name in b if name in a]
    return both + [Distance(name, math.inf, 0, math.inf, same=False) for name in sorted(set(a) ^ set(b))]


def certain(gradients: Tensors) -> dict[str, torch.Tensor]:
    """The elements whose gradient is above rounding. Adam turns the noise of the others into whole steps."""
    largest = max((float(value.abs().max()) for value in gradients.values()), default=0.0)
    return {name: value.abs() > ROUNDING * oracle.EPS * largest for name, value in gradients.items()}


def only(tensors: Tensors, chosen: Mapping[str, torch.Tensor], *, those: bool = True) -> Tensors:
    """The tensors with the other elements set to zero."""
    return {name: torch.where(chosen[name] == those, value, 0.0) for name, value in tensors.items()}


def _distance(name: str, a: torch.Tensor, b: torch.Tensor) -> Distance:
    difference = (a - b).abs().flatten()
    whole, error = float(b.norm()), float(difference.norm())
    index = int(difference.argmax())
    relative = error / whole if whole else (math.inf if error else 0.0)
    return Distance(name, relative, index, float(difference[index]), same=torch.equal(a, b))
