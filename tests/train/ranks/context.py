"""Functions that test_columns.py calls: each runs on all ranks, two of which share columns, and returns JSON."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.train import fsdp
from kit.train.columns import Columns
from kit.train.plain import PlainModel, from_weights, initial_weights, next_logprobs, plain_logprobs
from kit.train.protocol import Batch, Batching, counts, cut, pack, rows
from kit.train.rollout import uneven
from tests.train.ranks.steps import BUDGET, CPU, GEOMETRY, MBS, SETTINGS, a_loss, attempt, off, oracle, rollouts


@functools.cache
def groups(cp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The data ranks at this rank's place, and its context group of `cp` neighbours. Made once for all tests."""
    ranks, own = range(dist.get_world_size()), dist.get_rank()
    contexts = {first: dist.new_group([*ranks[first : first + cp]]) for first in ranks[::cp]}
    data = {place: dist.new_group([*ranks[place::cp]]) for place in range(cp)}
    return data[own % cp], contexts[own // cp * cp]


def models(cp: int, dtype: torch.dtype = torch.float64) -> tuple[PlainModel, PlainModel]:
    """One that computes whole rows, and one that computes a part of their columns."""
    weights = {name: value * 4 for name, value in initial_weights(GEOMETRY, 1).items()}
    whole, part = (from_weights(GEOMETRY, weights, dtype=dtype) for _ in range(2))
    part.columns = Columns(groups(cp)[1])
    return whole, part


def gradients(model: PlainModel) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def summed(model: PlainModel, cp: int) -> dict[str, torch.Tensor]:
    """Gradients added up over the context group: as FSDP does over all ranks."""
    total = {name: grad.clone() for name, grad in gradients(model).items()}
    for grad in total.values():
        dist.all_reduce(grad, group=groups(cp)[1])
    return total


def ids_of(count: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(1, GEOMETRY.vocab, (count, length), generator=torch.Generator().manual_seed(seed))


def every_length(cp: int, lengths: list[int]) -> dict[str, list[float]]:
    """Rows of each length: the distances of log-probabilities, and of the gradients of a loss with another slope at every place."""
    found: dict[str, list[float]] = {"logprobs": [], "gradients": []}
    for length in lengths:
        whole, part = models(cp)
        ids = ids_of(3, length, seed=length)
        scored = [plain_logprobs(model, ids) for model in (whole, part)]
        assert scored[1].shape == (3, length - 1)
        found["logprobs"].append(float((scored[0] - scored[1]).abs().max()))
        for each in scored:
            (each.square() * torch.arange(1, each.numel() + 1).view_as(each)).sum().backward()
        found["gradients"].append(off(summed(part, cp), gradients(whole)))
    return found


def packed(cp: int, draws: int) -> dict[str, list[float]]:
    """Rows of random lengths in one, some of a single token: the same distances, against each row on its own."""
    found: dict[str, list[float]] = {"logprobs": [], "gradients": []}
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 12, (1 + seed % 5,), generator=generator)
        inside = torch.arange(12)[None] < lengths[:, None]
        batch = {"input_ids": ids_of(len(lengths), 12, seed) * inside, "input_lengths": lengths}
        one = pack(batch)
        whole, part = models(cp)
        apart = plain_logprobs(whole, batch["input_ids"]) * inside[:, 1:]
        together = one.unpack(next_logprobs(part, one.input_ids, one.positions, one.segments))
        found["logprobs"].append(float((apart - together).detach().abs().max()))
        for each in (apart, together):
            (each.square() * torch.arange(1, each.numel() + 1).view_as(each)).sum().backward()
        wanted = gradients(whole)
        silent = not any(grad.any() for grad in wanted.values())
        ours = summed(part, cp)
        found["gradients"].append(float(any(grad.any() for grad in ours.values())) if silent else off(ours, wanted))
    return found


def computed(cp: int) -> dict[str, Any]:
    """How many columns a rank computes, and whether generation with a cache is as without context parallelism."""
    whole, part = models(cp)
    ids = ids_of(2, 7, seed=1)
    with torch.no_grad():
        caches = [model.empty_cache(2, 7) for model in (whole, part)]
        cached = [model(ids, cache=cache) for model, cache in zip((whole, part), caches, strict=True)]
        return {"logits": list(part(ids).shape), "cached_same": torch.equal(*cached)}


def mine(batch: Batch, cp: int) -> Batch:
    share = rows(batch) // (dist.get_world_size() // cp)
    first = dist.get_rank() // cp * share
    return cut(batch, first, first + share)


def job(cp: int, batching: Batching = "fixed", dtype: str = "float32") -> fsdp.FsdpJob:
    data, context = groups(cp)
    return fsdp.build_fsdp(
        GEOMETRY,
        rollouts()[0],
        settings=SETTINGS,
        dtype=getattr(torch, dtype),
        device=CPU,
        batching=batching,
        token_budget=0 if batching == "fixed" else BUDGET,
        data_group=data,
        context_group=context,
    )


def one_step(cp: int, batching: Batching, level: str, dtype: str, *, empty: bool) -> dict[str, Any]:
    """The plain and the split step, against one float64 model over all rows. The data ranks take different numbers of calls."""
    used = cut(rollouts()[1], 0, 24)
    used = uneven(used, dist.get_world_size() // cp) if empty else used
    loss, own, gbs = a_loss(level), mine(used, cp), rows(used)
    plain, here = job(cp, batching, dtype), job(cp, batching, dtype)
    found: dict[str, Any] = {"counts": counts(used).tolist()}
    seen: dict[str, torch.Tensor] = {}

    def look(each: fsdp.FsdpJob) -> None:
        update = each.optimizer.step
        each.optimizer.step = lambda: (seen.update(fsdp.full_gradients(each)), update())[1]  # type: ignore[method-assign]

    look(plain)
    result = fsdp.FsdpSync(plain).run(loss, own, gbs, MBS)
    wanted = oracle(loss, used)
    found["plain"] = {"off": off(seen, wanted), "result": result}
    step = fsdp.FsdpSplit(here)
    look(here)
    step.begin(loss, gbs, MBS)
    step.microbatch(cut(own, 0, MBS))
    step.microbatch(cut(own, MBS, rows(own)))
    result = step.finish()
    norm = sum(float(each.double().square().sum()) for each in seen.values()) ** 0.5
    return {**found, "split": {"off": off(seen, wanted), "result": result}, "norm": norm}


def refused(cp: int) -> str:
    """One rank alone refuses rows that the others of its context group take."""
    here = job(cp, "packed")
    if dist.get_rank() == dist.get_world_size() - 1:
        here.token_budget = 8
    step = fsdp.FsdpSplit(here)
    step.begin(a_loss("tokens"), 8, MBS)
    message = attempt(lambda: step.microbatch(mine(rollouts()[1], cp)))
    step.abort()
    return message


def half_of_the_groups() -> str:
    try:
        fsdp.build_fsdp(GEOMETRY, rollouts()[0], settings=SETTINGS, device=CPU, data_group=groups(2)[0])
    except KitError as error:
        return str(error)
    return ""
