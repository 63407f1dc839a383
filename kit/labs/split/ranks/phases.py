"""The split lab on a rank, one method per phase. `backends.py` has jobs, losses and rows, `rehearsals.py` the rehearsed failures."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad

from kit.errors import BadInput
from kit.labs.rankside import Context
from kit.labs.split.faults import KIT_LOSS, KIT_MODEL
from kit.labs.split.lab import Case, SplitConfig, cases
from kit.labs.split.ranks import backends, noise, oracle, rehearsals
from kit.labs.split.ranks.backends import Tensors
from kit.measure.phase import log_steps, now
from kit.megatron import groups, model
from kit.megatron import split as megatron_split
from kit.megatron.split import clear_aux
from kit.target import replaced
from kit.train import rollout
from kit.train.plain import from_weights, plain_logprobs
from kit.train.protocol import Batch, Loss, SplitContext, StepResult, cut, cuts, make_split

NUMBERS = ("global_loss", "grad_norm", "lr", "wd", "global_valid_seqs", "global_valid_toks", "updated")
SAME_DIRECTION = {"float32": 1e-5, "bfloat16": 1e-2}  # the error beyond a factor at which gradients have one
# In torch.nn.utils.clip_grad; clip_grad_norm_ calls the first.
CLIPS = ("_clip_grads_with_norm_", "clip_grads_with_norm_")


@dataclass(kw_only=True, slots=True)
class Trained:
    """The outcome of all steps of one kind: results and gradients of every step, and the final weights."""

    results: list[StepResult] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    routers: Tensors = field(default_factory=dict)  # what routers keep beside their weights, after the first step


class Observed:
    """The updates of a job, whoever calls its optimizer, and the seconds of each call of the last step.

    Earlier steps are not timed, because the clock waits for the device. A split step has to wait for the device itself; to wait when its
    optimizer is called would hide a step that does not.
    """

    def __init__(self, backend: backends.Backend, job: Any, device: str, *, waits: bool) -> None:
        self.backend, self.job, self.device, self.waits = backend, job, device, waits
        self.timed = False
        self.looked = 0.0  # seconds of the current call in which the lab itself read gradients
        self.seconds: list[tuple[str, float]] = []
        self.rates: list[float] = []  # learning rates of this step's updates, and their gradients on rank 0
        self.gradients: list[Tensors] = []
        self.before_clipping: Tensors | None = None  # where a step clips by torch before it calls the optimizer
        self.update = job.optimizer.step
        job.optimizer.step = self.look

    def begin_step(self, *, timed: bool) -> None:
        self.timed = timed
        self.rates.clear()
        self.gradients.clear()
        self.before_clipping = None

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if not self.timed:
            return function(*args)
        self.looked, started = 0.0, now(self.device)
        result = function(*args)
        self.seconds.append((name, now(self.device) - started - self.looked))
        return result

    def look(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, after a look at the learning rate and the gradients that it gets."""
        started = now(self.device) if self.waits and self.timed else time.perf_counter()
        self.rates.append(max(float(group["lr"]) for group in self.job.optimizer.param_groups))
        self.gradients.append(self.read())
        self.looked += time.perf_counter() - started
        return self.update(*args, **kwargs)

    def read(self) -> Tensors:
        """Copies of the gradients as they are, on rank 0; every rank calls it."""
        gradients = self.backend.gradients(self.job)
        return {} if dist.get_rank() else {name: value.clone() for name, value in gradients.items()}

    @contextlib.contextmanager
    def watching_clips(self) -> Iterator[None]:
        """Read gradients before torch clips them, whoever asks it to: afterwards a wrong norm looks like wrong gradients."""

        def door(clip: Callable[..., Any]) -> Callable[..., Any]:
            def clipped(*args: Any, **kwargs: Any) -> Any:
                if self.before_clipping is None and not self.gradients:  # else the optimizer itself clips
                    started = time.perf_counter()
                    self.before_clipping = self.read()
                    self.looked += time.perf_counter() - started
                return clip(*args, **kwargs)

            return clipped

        known = [name for name in CLIPS if hasattr(clip_grad, name)]
        with replaced({f"torch.nn.utils.clip_grad:{name}": door(getattr(clip_grad, name)) for name in known}):
            yield


class SplitSide:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.record = ctx.record
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
        self.device = self.megatron.device
        self.settings = backends.visible_settings(config)
        self.backend: backends.Backend = self.megatron
        if config.backend == "fsdp2":
            self.backend = backends.Fsdp2(config, self.weights, self.device)
        self.whole = list(cuts(whole, config.batch))
        if config.masks == "empty-rank":
            self.whole = [rollout.uneven(step, config.data_ranks) for step in self.whole]
        self.of_the_twin = self.whole  # a plain model's rows
        if not config.has_twin:
            self.whole = [backends.shifted(self.megatron, step) for step in self.whole]
        own, rank = config.batch // config.data_ranks, dist.get_rank(megatron_split.data_group())
        self.batches = [cut(step, rank * own, (rank + 1) * own) for step in self.whole]
        for step, batch in enumerate(self.whole, start=1):
            for name, count in zip(("sequences", "tokens"), oracle.true_counts(batch), strict=True):
                self.record("result", count, step=step, name=name)
        self.record("rows", config.batch * config.steps)
        self.record("ratios_off_one", backends.ratios_off_one(whole))

    def sync(self, cycle: int) -> None:
        self.first = {}
        self.plain = self._drive(self.backend, self.cases[cycle], plain=True)
        for name, by in self._loss(self.cases[cycle].level).normalizers().items():
            self.record("normalizer", None, text=by or "none", name=name)

    def oracle(self, cycle: int) -> None:
        """The first step in float64 on a plain model with separate formulas; then the loss alone on extreme rows.

        With experts: their load-balancing loss.
        """
        if self.config.balancing_loss:
            self.record("balance", balance_of_step(self.megatron.fresh(), self.batches[0], self.config.micro_batch))
        if self.ctx.rank:
            return
        level, step = self.cases[cycle].level, self.whole[0]
        formulas = oracle.float64_step if self.config.loss == KIT_LOSS else oracle.by_itself
        loss = self._loss(level)
        exact = functools.partial(formulas, loss)
        for gap in oracle.GAPS:
            error, name = oracle.gap_error(loss, exact, step, gap)
            self.record("gap_error", error, text=name, gap=int(gap))
        for name, rubbish in oracle.RUBBISH.items():
            reached = oracle.masked_reach(loss, step, rubbish)
            self.record("masked_reach", len(reached), text=", ".join(reached[:3]), rubbish=name)
        self._note_noise(level)
        if not self.config.has_twin:
            return
        net = from_weights(self.megatron.model_config.geometry, self.weights, dtype=torch.float64)
        value, table = exact(plain_logprobs(net, step["input_ids"]), step)
        value.backward()  # type: ignore[no-untyped-call]
        slopes = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
        self.record("gradient_error", oracle.overall(self.plain.gradients[0], slopes))
        for name, number in table.items():
            self.record("result", number, step=1, name=name)

    def _note_noise(self, level: Any) -> None:
        """Where the dtype is coarse, limits follow from the noise of the dense plain model."""
        if self.config.dtype == "float32":
            return
        ctx = backends.LossContext(
            rank=0, world_size=self.ctx.world_size, device=self.device, config=self.config, level=level
        )
        coarse = noise.OracleTraining(
            geometry=self.megatron.model_config.geometry,
            exact=functools.partial(oracle.float64_step, backends.of_recipe(ctx)),
            settings=self.settings,
            dtype=model.DTYPES[self.config.dtype],
            device=self.device,
            batch=self.config.batch,
            micro_batch=self.config.micro_batch,
        )
        floor = oracle.FLOOR if self.config.batching == "fixed" else noise.WHOLE
        for name, number in noise.measure(coarse, self.weights, self.of_the_twin, floor=floor).items():
            self.record("noise", number.rounding, of=name)
            self.record("reach", number.reach, of=name)

    def other_backend(self, cycle: int) -> None:
        """Megatron's plain step on the same weights and rows."""
        megatron = self._drive(self.megatron, self.cases[cycle], plain=True)
        if self.ctx.rank == 0:
            for step, (a, b) in enumerate(zip(self.plain.gradients, megatron.gradients, strict=True), start=1):
                self.record("gradient_error", oracle.overall(a, b), step=step)
            self.record("parameter_error", oracle.overall(self.plain.weights, megatron.weights))

    def split(self, cycle: int) -> None:
        self.cut = self._drive(self.backend, self.cases[cycle], plain=False)

    def compare(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """Weights on every rank, since one replica may differ; gradients and tensors on rank 0, which has all of them."""
        cut, plain = self.cut, self.plain
        self.record("parameter_error", oracle.overall(cut.weights, plain.weights))
        if self.config.router_bias:
            moved = sum(int(torch.count_nonzero(values)) for values in plain.routers.values())
            wrong = [name for name, values in plain.routers.items() if not torch.equal(values, cut.routers[name])]
            self.record("routers_moved", moved)
            self.record("routers_differ", len(wrong), text=", ".join(wrong[:3]))
        if self.ctx.rank:
            return
        sure: Tensors = {}
        for step, (a, b) in enumerate(zip(cut.gradients, plain.gradients, strict=True), start=1):
            distances = oracle.by_tensor(a, b)
            self.record("gradient_error", oracle.overall(a, b), step=step)
            same = sum(distance.error == 0 for distance in distances.values())
            if step == 1 and (factor := oracle.common_factor(a, b, SAME_DIRECTION[self.config.dtype])) is not None:
                self.record("gradient_factor", factor)
            self.record("gradients_same", same / max(len(distances), 1), step=step)
            sure |= {name: mask & sure.get(name, mask) for name, mask in oracle.certain(b).items()}
            for name, distance in distances.items() if step == 1 else ():
                self.record("tensor_gradient_error", distance.error, tensor=name)
                self.record("tensor_gradient_index", distance.place, tensor=name)
                self.record("tensor_gradient_worst", distance.worst, tensor=name)
        self.first = self.first or cut.gradients[0]
        self.record("chunk_error", oracle.overall(cut.gradients[0], self.first))
        sure = sure or {name: torch.ones_like(value, dtype=torch.bool) for name, value in plain.weights.items()}
        for kind, certain in (("parameter", True), ("uncertain", False)):
            a, b = (
                {name: torch.where(sure[name] == certain, value, 0.0) for name, value in weights.items()}
                for weights in (cut.weights, plain.weights)
            )
            for name, distance in oracle.by_tensor(a, b).items():
                self.record(f"tensor_{kind}_error", distance.error, tensor=name)
                self.record(f"tensor_{kind}_worst", distance.worst, tensor=name)
        self.record("uncertain_elements", sum(int((~mask).sum()) for mask in sure.values()))
        self.record("elements", sum(mask.numel() for mask in sure.values()))

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        """The promises of the protocol about aborts, errors in the middle of a step, and calls in the wrong state."""
        scene = rehearsals.FailingScene(
            backend=self.backend,
            make=self._make,
            loss=self._loss(self.config.levels[0]),
            batches=self.batches,
            config=self.config,
        )
        for metric, value, text, ids in rehearsals.rehearse_all(scene).found:
            self.record(metric, value, text=text, **ids)
        if self.config.model == KIT_MODEL:
            self._step_below_the_clip_limit()

    def _step_below_the_clip_limit(self) -> None:
        """A step with gradients of a fifth of the norm to clip to, then a clipped one: of one step alone Adam forgets the scale."""
        case = self.cases[max(self.cases)]
        loss, norm = self._loss(case.level), float(self.plain.results[0]["grad_norm"])
        scale = 0.2 * self.settings.clip / norm if norm > 0 else 1.0

        def small(logprobs: torch.Tensor, batch: Batch, **counts: float) -> Any:
            value, seen = loss(logprobs, batch, **counts)
            return value * scale, seen

        trained = self._drive(self.backend, case, plain=False, first_loss=backends.WrappedLoss(loss, small))
        if self.ctx.rank == 0 and not self.config.balancing_loss:  # that loss is not scaled with the other
            # The gradients of the judged step may be wrong; what counts is that they scale with the loss.
            expected = {name: value * scale for name, value in self.cut.gradients[0].items()}
            self.record("small_gradient_error", oracle.overall(trained.gradients[0], expected))

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as above
        self.plain = self.cut = Trained()
        groups.destroy()

    def _loss(self, level: Any) -> Loss:
        if level not in self.losses:
            ctx = backends.LossContext(
                rank=self.ctx.rank,
                world_size=self.ctx.world_size,
                device=self.device,
                config=self.config,
                level=level,
            )
            self.losses[level] = backends.make_loss(ctx)
        return self.losses[level]

    def _make(self, job: Any) -> Any:
        """The code under test for a job."""
        ctx = SplitContext(
            rank=self.ctx.rank,
            world_size=self.ctx.world_size,
            device=self.device,
            config=self.config,
            chunks=job.chunks,
            optimizer=job.optimizer,
            scheduler=job.scheduler,
            settings=self.settings,
            groups=groups.snapshot().get("groups", []),
            job=job,
        )
        return make_split(self.config.implementation, ctx, "implementation")

    def _drive(self, backend: backends.Backend, case: Case, *, plain: bool, first_loss: Loss | None = None) -> Trained:
        """All steps of a fresh job; or with `first_loss` two steps, of which the first has that loss."""
        job: Any = backend.fresh()
        trained, config = Trained(), self.config
        title = f"plain step, level {case.level}" if plain else f"level {case.level}, chunks {case.chunks}"
        batches = [self.batches[0], self.batches[-1]] if first_loss else self.batches
        observed = Observed(backend, job, str(self.device), waits=plain)
        loss, start = self._loss(case.level), {name: value.clone() for name, value in backend.parameters(job).items()}
        step: Any = backend.sync(job) if plain else self._make(job)
        before = rehearsals.replaceable(backend, job)
        hooks_lost: list[str] = []
        wrong_versions = 0
        rate_off = 0.0
        reductions: list[int] = []
        with backend.counted(job) as counter, contextlib.nullcontext() if plain else observed.watching_clips():
            for number, batch in enumerate(batches, start=1):
                counter.update(dict.fromkeys(counter, 0))
                observed.begin_step(timed=number == len(batches))
                step_loss = first_loss if first_loss and number == 1 else loss
                began = time.perf_counter()
                if plain:
                    result = observed.call("run", step.run, step_loss, batch, config.batch, config.micro_batch)
                else:
                    result = self._in_chunks(step, observed, step_loss, batch, case.chunks)
                    wrong_versions += step.version != number
                took = time.perf_counter() - began
                log_steps([dict(result)], done=number, seconds=took, device=observed.device, what=title)
                reductions += counter.values()
                gradients = observed.gradients[-1] if observed.gradients else {}
                if observed.before_clipping is not None:
                    gradients = observed.before_clipping
                elif config.model == KIT_MODEL:  # how your own model clips is unknown
                    gradients = oracle.unclipped(self.settings, gradients, float(result["grad_norm"]))
                if number == 1 and self.config.router_bias:
                    trained.routers = backends.buffers_of_routers(job)
                trained.results.append(result)
                trained.gradients.append(gradients)
                hooks_lost += rehearsals.not_restored(before, rehearsals.replaceable(backend, job))
                wrong_versions += result["version"] != number
                if result["updated"]:
                    rate_off = max(rate_off, rate_error(result["lr"], observed.rates, number))
        trained.weights = backend.parameters(job)
        way = "plain" if plain else "split"
        self._judge_updates(f"{way} step below the clip limit, then" if first_loss else way, start, trained)
        self.record("reductions_least", min(reductions))
        self.record("reductions_most", max(reductions))
        self.record("hooks_lost", len(hooks_lost), text=rehearsals.settings_in(hooks_lost))
        self.record("rate_off", rate_off)
        self.record("wrong_versions", wrong_versions)
        self.record("norm_rounding", oracle.norm_rounding(trained.weights))
        for index, (name, seconds) in enumerate(observed.seconds):
            self.record("call_seconds", seconds, "s", call=name, order=index)
        for number, result in enumerate(trained.results, start=1):
            self._record_result(number, result)
        return trained

    def _in_chunks(self, step: Any, observed: Observed, loss: Loss, batch: Batch, chunks: int) -> StepResult:
        """One split step on copies, because the code under test may change its rows, and the plain step of another level needs them."""
        own = {name: value.clone() for name, value in batch.items()}
        observed.call("begin", step.begin, loss, self.config.batch, self.config.micro_batch)
        for chunk in backends.chunks_of(own, chunks, self.config.micro_batch):
            observed.call("microbatch", step.microbatch, chunk)
        return whole_result(self.config, observed.call("finish", step.finish))

    def _record_result(self, step: int, result: StepResult) -> None:
        """The numbers of a step, on every rank, since all ranks must report the same."""
        numbers = {key: float(result[key]) for key in NUMBERS}  # type: ignore[literal-required]
        for name, value in {**numbers, **result["metrics"]}.items():
            self.record("result", value, step=step, name=name)
        if not math.isfinite(result["global_loss"]):
            print(f"the loss of step {step} is {result['global_loss']}")

    def _judge_updates(self, way: str, start: Tensors, trained: Trained) -> None:
        """Clipping, AdamW and schedule of all steps against float64, from the observed weights and gradients."""
        if self.ctx.rank or self.config.model != KIT_MODEL:
            return
        done = oracle.expected_steps(self.settings, trained.gradients, self.config.batch)
        # FSDP2 keeps float32 weights, whatever it computes in.
        dtype = torch.float32 if self.config.backend == "fsdp2" else model.DTYPES[self.config.dtype]
        eps = torch.finfo(dtype).eps
        moved = oracle.moved(self.settings, start, trained.weights, trained.gradients, done, eps=eps)
        worst = max(moved, key=lambda name: moved[name])
        self.record("update_error", moved[worst], text=worst, way=way)
        for number, (result, must) in enumerate(zip(trained.results, done, strict=True), start=1):
            if not trained.gradients[number - 1]:
                continue
            for metric, value, exact, rounding in (
                ("update_norm_error", result["grad_norm"], must.norm, must.norm_rounding),
                ("update_rate_error", result["lr"], must.lr, 0.0),
                ("update_decay_error", result["wd"], must.wd, 0.0),
            ):
                error = max(0.0, oracle.relative(float(value), exact) - rounding)
                self.record(metric, error, way=way, step=number)


def rate_error(lr: float, used: list[float], step: int) -> float:
    """The relative error of the learning rate in a result against that of the step's last update."""
    if not used:
        print(f"step {step} reports updated=True, but ctx.optimizer.step was not called")
        return math.inf
    off = abs(lr - used[-1]) / used[-1]
    return math.inf if math.isnan(off) else off


def whole_result(config: SplitConfig, result: Any) -> StepResult:
    required = f"implementation={config.implementation}: finish() must return a dict with {', '.join(NUMBERS)}, version, metrics"
    if not isinstance(result, dict):
        raise BadInput(f"{required}; it returned {type(result).__name__}")
    if missing := [name for name in (*NUMBERS, "version", "metrics") if name not in result]:
        raise BadInput(f"{required}; it lacks {', '.join(missing)}")
    table = result["metrics"]
    if not isinstance(table, dict):
        raise BadInput(f"{required}; metrics is a {type(table).__name__} and must be a dict from names to numbers")
    values = {name: result[name] for name in (*NUMBERS, "version")} | table
    for name, value in values.items():
        if not (isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
            raise BadInput(f"{required}; not a number: {name}={value!r}")
    return cast("StepResult", result)


def balance_of_step(job: Any, batch: Batch, micro_batch: int) -> float:
    """The load-balancing loss of experts in float64, independent of the code that reports it: the mean over layers, microbatches and
    data-parallel ranks, on the initial weights. Every rank calls it with its own rows."""
    balances: list[float] = []

    def look(router: Any, inputs: Any) -> None:
        balances.append(oracle.balance(inputs[0].detach(), router.weight.detach(), router.topk))

    modules = [module for chunk in job.chunks for name, module in chunk.named_modules() if name.endswith("mlp.router")]
    hooks = [module.register_forward_pre_hook(look) for module in modules]
    megatron_split.forward_backward(job, list(cuts(batch, micro_batch)), megatron_split.nothing)
    for hook in hooks:
        hook.remove()
    clear_aux()
    total = torch.tensor([sum(balances), len(balances)], dtype=torch.float64, device=job.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])
