"""What a rank does in the split lab. One method a phase; faults are in `broken.py`, the backends in `backends.py`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kit.labs.split import backends, compare, data, rehearse
from kit.labs.split.broken import NUMBERS, broken_loss, make_split, whole_result
from kit.labs.split.config import NORMALIZERS, Case, SplitConfig, cases
from kit.labs.split.oracle import oracle
from kit.labs.split.recipes import RECIPES
from kit.measure import clock
from kit.megatron import groups
from kit.train.batch import counts
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.plain import from_weights, logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.labs.rankside import Context
    from kit.train.batch import Batch
    from kit.train.protocol import Loss, StepResult


@dataclass(kw_only=True, slots=True)
class Way:
    """What one way of stepping came to: a result, gradients and a rate for every step, and the weights at the end."""

    results: list[StepResult] = field(default_factory=list)
    gradients: list[compare.Tensors] = field(default_factory=list)
    weights: compare.Tensors = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Calls:
    """Seconds of each call of the last step. Earlier steps run without a clock that waits for the device."""

    device: str
    on: bool = False
    looked: float = 0.0  # seconds that the lab itself took to look at gradients, inside of a call
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def time(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if not self.on:
            return function(*args)
        self.looked, started = 0.0, clock.now(self.device)
        result = function(*args)
        self.seconds.append((name, clock.now(self.device) - started - self.looked))
        return result


class Split:
    """The plain step, the piece-wise one, and what is between them."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.config: SplitConfig = ctx.config
        self.cases = {case.cycle: case for case in cases(self.config)}
        self.backend: Any
        self.batches: list[Batch]
        self.plain = Way()
        self.cut = Way()
        self.first: compare.Tensors = {}  # the gradients of the level's first cut

    # -- what is trained, and on what ----------------------------------------------------------------------------------

    def prepare(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        """Weights, rollouts and groups; both ranks of a pair of replicas see the same rows."""
        config = self.config
        self.weights, whole = data.rollouts(config, self.ctx.device)
        self.megatron = backends.Megatron(config, {} if config.experts else self.weights)
        self.backend = (
            self.megatron
            if config.backend == "megatron"
            else backends.Fsdp2(config, self.weights, self.megatron.device)
        )
        self.whole = data.steps(config, whole)
        if config.experts:
            self.whole = [data.shifted(self.megatron, step) for step in self.whole]
        self.batches = [data.share(config, step) for step in self.whole]
        for step, batch in enumerate(self.whole, start=1):
            sequences, tokens = counts(batch).tolist()
            self.ctx.record(f"true/{step}/sequences", sequences)
            self.ctx.record(f"true/{step}/tokens", tokens)
        self.ctx.record("rows", config.batch * config.steps)
        self.ctx.record("ratios_off_one", data.ratios_off_one(whole))

    def sync(self, cycle: int) -> None:
        """The plain step."""
        case = self.cases[cycle]
        self.first = {}
        self.plain = self._drive(self.backend, case, plain=True)
        self._tell("sync", self.plain)
        for name, by in self._loss(case.level).normalizers().items():
            self.ctx.record(f"normalizer/{name}", NORMALIZERS.index(by))

    def oracle(self, cycle: int) -> None:
        """The first step once more, in float64 on a plain model, by formulas of its own."""
        if self.config.experts or self.ctx.rank:
            return
        loss = self._loss(self.cases[cycle].level, sound=True)
        net = from_weights(self._geometry(), self.weights, dtype=torch.float64)
        step = self.whole[0]
        value, table = oracle(loss, logprobs(net, step["input_ids"]), step)
        value.backward()  # type: ignore[no-untyped-call]
        exact = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
        self.ctx.record("oracle/gradient_error", compare.overall(self.plain.gradients[0], exact))
        for name, number in table.items():
            self.ctx.record(f"oracle/1/{name}", number)

    def other_backend(self, cycle: int) -> None:
        """Megatron's plain step on the same weights and rows."""
        other = self._drive(self.megatron, self.cases[cycle], plain=True)
        self._tell("other", other)
        if self.ctx.rank == 0:
            for step, (a, b) in enumerate(zip(self.plain.gradients, other.gradients, strict=True), start=1):
                self.ctx.record(f"other/gradient_error/{step}", compare.overall(a, b))
            self.ctx.record("other/parameter_error", compare.overall(self.plain.weights, other.weights))

    def split(self, cycle: int) -> None:
        """The piece-wise step."""
        self.cut = self._drive(self.backend, self.cases[cycle], plain=False)
        self._tell("split", self.cut)

    def compare(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Weights on every rank, since a replica may be left behind; what they were made of on rank 0, which has it all."""
        cut, plain, record = self.cut, self.plain, self.ctx.record
        record("parameter_error", compare.overall(cut.weights, plain.weights))
        if self.ctx.rank:
            return
        sure: dict[str, torch.Tensor] = {}
        for step, (a, b) in enumerate(zip(cut.gradients, plain.gradients, strict=True), start=1):
            apart = compare.by_tensor(a, b)
            record(f"gradient_error/{step}", compare.overall(a, b))
            record(f"gradients_same/{step}", sum(each.same for each in apart) / max(len(apart), 1))
            sure |= {name: mask & sure.get(name, mask) for name, mask in compare.certain(b).items()}
            if step == 1:
                for each in apart:
                    record(f"gradient/{each.name}/error", each.error)
                    record(f"gradient/{each.name}/index", each.index)
                    record(f"gradient/{each.name}/worst", each.worst)
        self.first = self.first or cut.gradients[0]
        record("chunk_error", compare.overall(cut.gradients[0], self.first))
        sure = sure or {name: torch.ones_like(value, dtype=torch.bool) for name, value in plain.weights.items()}
        for name, these in (("parameter", True), ("uncertain", False)):
            a, b = compare.only(cut.weights, sure, those=these), compare.only(plain.weights, sure, those=these)
            for each in compare.by_tensor(a, b):
                record(f"{name}/{each.name}/error", each.error)
                record(f"{name}/{each.name}/worst", each.worst)
        record("uncertain_elements", sum(int((~mask).sum()) for mask in sure.values()))
        record("elements", sum(mask.numel() for mask in sure.values()))

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """What is promised of aborts, of errors in the middle, and of calls that do not fit."""
        job = self.backend.fresh()
        scene = rehearse.Scene(
            backend=self.backend,
            job=job,
            step=self._make(job),
            make=self._make,
            loss=self._loss(self.config.levels[0]),
            batches=self.batches,
            config=self.config,
        )
        for name, number in rehearse.all_of_it(scene).items():
            self.ctx.record(name, number)
            if number:
                print(f"rehearse: {name} is {number:g}")

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.plain = self.cut = Way()
        groups.destroy()

    # -- how -----------------------------------------------------------------------------------------------------------

    def _loss(self, level: Any, *, sound: bool = False) -> Loss:
        recipe = self.config.recipe
        loss: Any = (
            NegativeLogLikelihood(level=level)
            if recipe == "nll"
            else ClippedPolicyGradient(level=level, **RECIPES[recipe])
        )
        return loss if sound else broken_loss(self.ctx.fault, loss)

    def _geometry(self) -> Any:
        return self.megatron.model_config.geometry

    def _make(self, job: Any) -> Any:
        """The code under test, on a job."""
        return make_split(self.ctx, self._context(job))

    def _context(self, job: Any) -> backends.SplitContext:
        return backends.SplitContext(
            rank=self.ctx.rank,
            world_size=self.ctx.world_size,
            device=self.megatron.device,
            config=self.config,
            chunks=job.chunks,
            optimizer=job.optimizer,
            scheduler=job.scheduler,
            groups=groups.snapshot().get("groups", []),
            job=job,
        )

    def _drive(self, backend: backends.Backend, case: Case, *, plain: bool) -> Way:
        """All steps of one way on a fresh job; what the optimizer finds is kept on rank 0."""
        job, way, config = backend.fresh(), Way(), self.config
        used: list[float] = []  # rates, and gradients on rank 0, of this step's updates
        seen: list[compare.Tensors] = []
        calls = Calls(device=str(self.megatron.device))

        def look() -> None:
            # A piece-wise step has to wait for the device by itself; waiting here would hide that one does not.
            started = clock.now(calls.device) if plain and calls.on else time.perf_counter()
            used.append(max(float(group["lr"]) for group in job.optimizer.param_groups))
            found = backend.gradients(job)
            if self.ctx.rank == 0:
                seen.append({name: value.clone() for name, value in found.items()})
            calls.looked += time.perf_counter() - started

        backends.watch_optimizer(job, look)
        loss, before = self._loss(case.level), backend.hooks(job)
        step: Any = backend.sync(job) if plain else self._make(job)
        hooks_lost = wrong_versions = 0
        rate_off = 0.0
        reductions: list[int] = []
        with backend.counted(job) as counter:
            for number, batch in enumerate(self.batches, start=1):
                counter.reset()
                used.clear()
                seen.clear()
                calls.on = number == len(self.batches)
                if plain:
                    result = calls.time("run", step.run, loss, batch, config.batch, config.micro_batch)
                else:
                    # Copies: what the code under test does to its rows must not reach the plain step of another level.
                    own = {name: value.clone() for name, value in batch.items()}
                    pieces = backends.chunks_of(own, case.chunks, config.micro_batch)
                    result = whole_result(config, run_in_pieces(step, loss, pieces, config, calls))
                    wrong_versions += step.version != number
                reductions += counter.counts.values()
                way.results.append(result)
                way.gradients.append(seen[-1] if seen else {})
                hooks_lost += sum(a is not b and a != b for a, b in zip(before, backend.hooks(job), strict=True))
                wrong_versions += result["version"] != number
                if result["updated"]:
                    off = abs(result["lr"] - used[-1]) / used[-1] if used else math.inf
                    rate_off = max(rate_off, math.inf if math.isnan(off) else off)
                    if not used:
                        print(f"step {number} calls itself updated, and ctx.optimizer.step was not called")
        way.weights = backend.parameters(job)
        record = self.ctx.record
        record("reductions_least", min(reductions))
        record("reductions_most", max(reductions))
        record("hooks_lost", hooks_lost)
        record("rate_off", rate_off)
        record("wrong_versions", wrong_versions)
        for index, (name, seconds) in enumerate(calls.seconds):
            record(f"call/{index}/{name}", seconds, "s")
        return way

    def _tell(self, name: str, way: Way) -> None:
        """The numbers of every step, on every rank: they must be the same everywhere."""
        for step, result in enumerate(way.results, start=1):
            for key in NUMBERS:
                self.ctx.record(f"{name}/{step}/{key}", float(result[key]))  # type: ignore[literal-required]
            for metric, value in result["metrics"].items():
                self.ctx.record(f"{name}/{step}/{metric}", value)
            if not math.isfinite(result["global_loss"]):
                print(f"{name}: the loss of step {step} is {result['global_loss']}")


def run_in_pieces(step: Any, loss: Loss, pieces: list[Batch], config: SplitConfig, calls: Calls) -> StepResult:
    calls.time("begin", step.begin, loss, config.batch, config.micro_batch)
    for piece in pieces:
        calls.time("microbatch", step.microbatch, piece)
    result: StepResult = calls.time("finish", step.finish)
    return result
