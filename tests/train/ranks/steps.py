"""Functions that test_fsdp.py calls: each runs on all ranks and returns JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.megatron.config import GEOMETRIES
from kit.train import fsdp
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood
from kit.train.options import Settings
from kit.train.plain import from_weights, plain_logprobs
from kit.train.protocol import Batch, counts, cut, rows
from kit.train.rollout import prepare_rollout, uneven

GEOMETRY = dataclasses.replace(GEOMETRIES["tiny"], layers=2)
CPU = torch.device("cpu")
SHARE, MBS = 20, 4  # rows per rank, rows per microbatch
GBS = 2 * SHARE
SETTINGS = Settings(first_lr=1e-4, warmup=4 * GBS, decay=1000 * GBS)
BUDGET = 96
STEPS = 3


@functools.cache
def rollouts() -> tuple[dict[str, torch.Tensor], Batch]:
    return prepare_rollout(GEOMETRY, seed=3, prompts=10, group=4, length=32, warm_steps=8)


def mine(batch: Batch | None = None) -> Batch:
    whole = rollouts()[1] if batch is None else batch
    start = dist.get_rank() * SHARE
    return cut(whole, start, start + SHARE)


def job(batching: str = "fixed", dtype: str = "float32", settings: Settings = SETTINGS) -> fsdp.FsdpJob:
    budget = 0 if batching == "fixed" else BUDGET
    return fsdp.build_fsdp(
        GEOMETRY,
        rollouts()[0],
        settings=settings,
        dtype=getattr(torch, dtype),
        device=CPU,
        batching=batching,  # type: ignore[arg-type]
        token_budget=budget,
    )


def a_loss(level: str) -> ClippedPolicyGradient:
    return ClippedPolicyGradient(level=level, importance="tokens", kl=0.05)  # type: ignore[arg-type]


def feed(step: fsdp.FsdpSplit, data: Batch, calls: int) -> None:
    """The buffers of each call are overwritten afterwards: what a step keeps of its rows it must copy."""
    total = rows(data) // MBS
    ends = [total * index // calls * MBS for index in range(calls + 1)]
    for start, end in itertools.pairwise(ends):
        buffer = {name: value.clone() for name, value in cut(data, start, end).items()}
        step.microbatch(buffer)
        for value in buffer.values():
            value.zero_()


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Relative distance over all tensors."""
    assert found.keys() == wanted.keys()
    apart = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    return float((apart / sum(float(each.double().square().sum()) for each in wanted.values())) ** 0.5)


def metrics_off(found: dict[str, float], wanted: dict[str, float]) -> dict[str, float]:
    """Relative differences, with a denominator of at least 0.05: a loss is a difference of larger float32 sums."""
    assert found.keys() == wanted.keys()
    return {name: abs(found[name] - wanted[name]) / max(abs(wanted[name]), 0.05) for name in wanted}


def oracle(loss: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Gradients of a step over all rows by one plain float64 model, without ranks or microbatches."""
    model = from_weights(GEOMETRY, rollouts()[0], dtype=torch.float64)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    sequences, tokens = counts(batch).tolist()
    loss(plain_logprobs(model, wide["input_ids"]), wide, tokens=tokens, sequences=sequences)[0].backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@contextlib.contextmanager
def reduce_scatters() -> Iterator[list[int]]:
    """Record the input sizes of all reduce-scatters, under either name of torch's function."""
    names = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
    plain = {name: getattr(dist, name) for name in names}
    seen: list[int] = []

    def spy(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("input", kwargs.get("input_tensor"))
            seen.append((args[1] if given is None else given).numel())
            return plain[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, spy(name))
    try:
        yield seen
    finally:
        for name in names:
            setattr(dist, name, plain[name])


def parity(level: str, batching: str, dtype: str) -> dict[str, Any]:
    """Compare several plain steps with the same steps in 1, 2 and 5 calls."""
    loss, plain = a_loss(level), job(batching, dtype)
    sync = fsdp.FsdpSync(plain)
    wanted = [sync.run(loss, mine(), GBS, MBS) for _ in range(STEPS)]
    gradients, weights = fsdp.full_gradients(plain), fsdp.full_parameters(plain)
    found: dict[str, Any] = {}
    bits = set()
    for calls in (1, 2, 5):
        here = job(batching, dtype)
        step = fsdp.FsdpSplit(here)
        results = []
        reductions: list[int] = []
        with fsdp.counted_reductions(here) as counter, reduce_scatters() as scattered:
            for _ in range(STEPS):
                counter.update(dict.fromkeys(counter, 0))
                step.begin(loss, GBS, MBS)
                feed(step, mine(), calls)
                assert not any(counter.values())
                results.append(step.finish())
                reductions += counter.values()
        bits.add(repr(sorted(fsdp.state(here).items())))
        found[str(calls)] = {
            "gradients": off(fsdp.full_gradients(here), gradients),
            "parameters": off(fsdp.full_parameters(here), weights),
            "loss": max(abs(a["global_loss"] - b["global_loss"]) for a, b in zip(results, wanted, strict=True)),
            "metrics": [metrics_off(a["metrics"], b["metrics"]) for a, b in zip(results, wanted, strict=True)],
            "same": [
                {key: a[key] == b[key] for key in ("lr", "wd", "global_valid_seqs", "global_valid_toks", "version")}  # type: ignore[literal-required]
                for a, b in zip(results, wanted, strict=True)
            ],
            "norms": [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(results, wanted, strict=True)],
            "reductions": reductions,
            "scattered": len(scattered),
            "groups": len(fsdp.sharded(here.model)),
        }
    return {"calls": found, "different_bits": len(bits), "results": [{**each} for each in wanted]}


def one_step(batching: str, level: str, masks: str, cuts: list[list[int]]) -> dict[str, Any]:
    """Compare a split step's gradients with the oracle's. `cuts`: for each rank the rows of each call."""
    whole = rollouts()[1]
    batch = uneven(whole, 2) if masks == "empty-rank" else whole
    own = cuts[dist.get_rank()]
    before = sum(sum(each) for each in cuts[: dist.get_rank()])
    used = cut(batch, 0, sum(sum(each) for each in cuts))
    loss, here = a_loss(level), job(batching)
    step = fsdp.FsdpSplit(here)
    step.begin(loss, GBS, MBS)
    for size in own:
        step.microbatch(cut(batch, before, before + size))
        before += size
    found: dict[str, torch.Tensor] = {}
    plain = here.optimizer.step
    here.optimizer.step = lambda: (found.update(fsdp.full_gradients(here)), plain())[1]  # type: ignore[method-assign]
    result = step.finish()
    return {"off": off(found, oracle(loss, used)), "result": result, "counts": counts(used).tolist()}


def nothing_valid() -> dict[str, Any]:
    batch = {**mine(), "sample_mask": torch.zeros(SHARE)}
    here = job()
    before = fsdp.full_parameters(here)
    step = fsdp.FsdpSplit(here)
    step.begin(a_loss("tokens"), GBS, MBS)
    feed(step, batch, 2)
    result = step.finish()
    zero = all(not each.any() for each in fsdp.full_gradients(here).values())
    # Only weight decay then moves weights, as in a plain step.
    other = job()
    fsdp.FsdpSync(other).run(a_loss("tokens"), batch, GBS, MBS)
    return {
        "result": result,
        "zero": zero,
        "as_plain": off(fsdp.full_parameters(here), fsdp.full_parameters(other)),
        "shrunk": {
            name: off({name: value}, {name: before[name]}) for name, value in fsdp.full_parameters(here).items()
        },
    }


def no_rows_at_all() -> dict[str, Any]:
    step = fsdp.FsdpSplit(job())
    step.begin(NegativeLogLikelihood(), GBS, MBS)
    step.microbatch(cut(mine(), 0, 0))
    return {**step.finish()}


class Breaks:
    """A loss that raises at its n-th call, in the forward pass or during the backward pass."""

    def __init__(self, level: str, at: int, where: str) -> None:
        self.inner, self.at, self.where = a_loss(level), at, where
        self.level = self.inner.level

    def normalizers(self) -> Any:
        return self.inner.normalizers()

    def __call__(self, found: torch.Tensor, batch: Batch, **by: float) -> Any:
        self.at -= 1
        if self.at == 0 and self.where == "loss":
            raise ArithmeticError("broken")
        if self.at == 0 and self.where == "nan":
            found = found * float("nan")
        return self.inner(found, batch, **by)


@contextlib.contextmanager
def broken_layer(here: fsdp.FsdpJob, where: str) -> Iterator[None]:
    """Make the first layer's MLP raise in its forward or its backward pass."""
    mlp = here.model.model.layers[0].mlp

    def boom(*_: Any) -> None:
        raise ArithmeticError("broken")

    hook = mlp.register_forward_hook(boom) if where == "forward" else mlp.register_full_backward_hook(boom)
    try:
        yield
    finally:
        hook.remove()


def attempt(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told
        return f"{type(error).__name__}: {error}"
    return ""


def _step(here: fsdp.FsdpJob, step: fsdp.FsdpSplit) -> dict[str, Any]:
    step.begin(a_loss("tokens"), GBS, MBS)
    feed(step, mine(), 2)
    return {**step.finish(), "state": fsdp.state(here)}


def abort(where: str, dtype: str) -> dict[str, Any]:
    """Abort or break a step between two others; report what it left, and compare the next step with an undisturbed job's."""
    calm = job(dtype=dtype)
    steady = fsdp.FsdpSplit(calm)
    _step(calm, steady)
    expected = _step(calm, steady)

    here = job(dtype=dtype)
    step = fsdp.FsdpSplit(here)
    _step(here, step)
    hooks, before = fsdp.hooks(here), fsdp.state(here)
    loss: Any = Breaks("tokens", 3, where) if where == "loss" else a_loss("tokens")
    step.begin(loss, GBS, MBS)
    feed(step, cut(mine(), 0, 2 * MBS), 2)
    torch.rand(3)
    error = ""
    if where == "loss":
        error = attempt(lambda: feed(step, cut(mine(), 0, 2 * MBS), 1))
    elif where in ("forward", "backward"):
        with broken_layer(here, where):
            error = attempt(lambda: feed(step, cut(mine(), 0, 2 * MBS), 1))
    again = [attempt(step.finish), attempt(lambda: step.microbatch(mine()))] if error else []
    hooks_after = fsdp.hooks(here)
    step.abort()
    after = fsdp.state(here)
    left = [name for name, param in here.model.named_parameters() if param.grad is not None]
    version = step.version
    step.abort()
    now = _step(here, step)
    return {
        "error": error,
        "again": again,
        "hooks_back": hooks_after == hooks if error else fsdp.hooks(here) == hooks,
        "same": after == before,
        "left": left,
        "version": version,
        "next_same": now == expected,
        "moved": now["state"] != before,
    }


def misuse() -> dict[str, str]:
    step = fsdp.FsdpSplit(job())
    message = {"microbatch closed": attempt(lambda: step.microbatch(mine())), "finish closed": attempt(step.finish)}
    message["abort closed"] = attempt(step.abort)
    step.begin(a_loss("tokens"), GBS, MBS)
    message["begin open"] = attempt(lambda: step.begin(a_loss("tokens"), GBS, MBS))
    message["finish empty"] = attempt(step.finish)
    step.abort()
    return message


def not_finite() -> dict[str, Any]:
    here = job()
    step = fsdp.FsdpSplit(here)
    _step(here, step)
    before = fsdp.state(here)
    step.begin(Breaks("tokens", 2, "nan" if dist.get_rank() else "never"), GBS, MBS)
    feed(step, mine(), 1)
    result = step.finish()
    skipped = fsdp.state(here) == before
    other = job()
    plain = fsdp.FsdpSync(other)
    plain.run(a_loss("tokens"), mine(), GBS, MBS)
    same = plain.run(Breaks("tokens", 2, "nan" if dist.get_rank() else "never"), mine(), GBS, MBS)
    return {
        "updated": [result["updated"], same["updated"]],
        "version": [result["version"], same["version"]],
        "finite": result["grad_norm"] < float("inf"),
        "skipped": skipped,
        "rates": [result["lr"], same["lr"]],
        "steps": [here.scheduler.steps, other.scheduler.steps],
        "next": _step(here, step)["updated"],
    }


def refused() -> list[str]:
    """One rank has a sequence that exceeds its token budget."""
    here = job("packed")
    if dist.get_rank():
        here.token_budget = 8
    step = fsdp.FsdpSplit(here)
    step.begin(a_loss("tokens"), GBS, MBS)
    message = [attempt(lambda: step.microbatch(mine()))]
    step.abort()
    here.token_budget = BUDGET
    message.append(str(_step(here, step)["updated"]))
    return message


def clipping() -> dict[str, Any]:
    """With a low limit the weights get the clipped gradient, and full_gradients returns it afterwards."""
    here = job(settings=Settings(first_lr=1e-3, warmup=0, clip=0.01))
    result = fsdp.FsdpSync(here).run(a_loss("tokens"), mine(), GBS, MBS)
    after = sum(float(each.square().sum()) for each in fsdp.full_gradients(here).values()) ** 0.5
    loose = job(settings=Settings(first_lr=1e-3, warmup=0, clip=0.0))
    fsdp.FsdpSync(loose).run(a_loss("tokens"), mine(), GBS, MBS)
    whole = sum(float(each.square().sum()) for each in fsdp.full_gradients(loose).values()) ** 0.5
    return {"norm": result["grad_norm"], "after": after, "loose": whole}


def unchanged_inputs() -> bool:
    """The caller may reuse its tensors as soon as microbatch() returns."""
    first, second = job(), job()
    a, b = fsdp.FsdpSplit(first), fsdp.FsdpSplit(second)
    for step, spoil in ((a, False), (b, True)):
        step.begin(a_loss("tokens"), GBS, MBS)
        for start in range(0, SHARE, MBS):
            piece = {name: value.clone() for name, value in cut(mine(), start, start + MBS).items()}
            step.microbatch(piece)
            if spoil:
                for value in piece.values():
                    value.zero_()
        step.finish()
    return fsdp.state(first) == fsdp.state(second)


def fixed_in_size_by_hashing() -> list[str]:
    """Return the tensors that can be resized before they are hashed but not afterwards."""
    here = job()
    fsdp.FsdpSync(here).run(a_loss("tokens"), mine(), GBS, MBS)
    shards = {name: param.to_local() for name, param in here.model.named_parameters()}
    resizable = [name for name, shard in shards.items() if shard.untyped_storage().resizable()]
    assert resizable, "no shard could be resized in the first place"
    fsdp.state(here)
    return [name for name in resizable if not shards[name].untyped_storage().resizable()]


def build_needs_a_budget() -> str:
    try:
        fsdp.build_fsdp(GEOMETRY, rollouts()[0], settings=SETTINGS, device=CPU, batching="packed")
    except KitError as error:
        return str(error)
    return ""
