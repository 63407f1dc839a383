"""Functions that test_split.py calls: each runs on both ranks and returns JSON."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import BadInput
from kit.megatron import model, ownership, shards, tensors
from kit.megatron.config import ModelConfig
from kit.megatron.split import MegatronSplit, MegatronSync, counting_collectives, random_states, reduced, step_hooks
from kit.train.losses import ClippedPolicyGradient
from kit.train.options import Settings
from kit.train.protocol import Batch, Misuse, cut, rows

ROWS, MBS, LENGTH = 8, 2, 16  # rows per data rank
LOSS = ClippedPolicyGradient(level="sequences", kl=0.05)
SETTINGS = Settings(first_lr=1e-4, warmup=64, decay=1000)
ROUTER = "model.layers.0.mlp.gate.weight"
COEFFICIENT, EXPERTS, TOPK = 0.02, 4, 2
MOE = {"layers": 1, "experts": EXPERTS, "aux_loss": COEFFICIENT, "sum_gradients": False}


@contextlib.contextmanager
def job_of(**settings: Any) -> Iterator[model.Training]:
    with ownership.as_found():
        yield model.build(config_of(**settings), SETTINGS)


def config_of(**settings: Any) -> ModelConfig:
    return ModelConfig(**{"layers": 2, "seq": LENGTH, "sum_gradients": True, **settings})


def batch(of: int, count: int = ROWS, **masks: torch.Tensor) -> Batch:
    """Rows of one data rank: answers of different lengths, masked samples, log-probabilities near those of fresh weights."""
    generator = torch.Generator().manual_seed(100 + of)

    def near(value: float) -> torch.Tensor:
        return value + 0.1 * torch.randn(count, LENGTH, generator=generator)

    ends = torch.randint(6, LENGTH + 1, (count, 1), generator=generator)
    column = torch.arange(LENGTH)[None]
    sample = torch.ones(count)
    sample[of::5] = 0.0
    made = {
        "input_ids": torch.randint(0, 256, (count, LENGTH), generator=generator),
        "input_lengths": ends[:, 0],
        "token_mask": ((column >= 4) & (column < ends)).float(),
        "sample_mask": sample,
        "advantages": near(0.0) * 10,
        "prev_logprobs": near(-5.5),
        "generation_logprobs": near(-5.5),
        "reference_logprobs": near(-5.5),
    }
    return {**made, **masks}


def mine() -> Batch:
    from kit.megatron.split import data_group

    return batch(dist.get_rank(data_group()))


def step(job: Any, pieces: list[Batch], loss: Any = LOSS, made: Any = MegatronSplit) -> Any:
    """Run a whole step with a new split object."""
    split = made(job)
    split.begin(loss, 2 * ROWS, MBS)
    for piece in pieces:
        split.microbatch(piece)
    return split.finish()


def thirds(data: Batch) -> list[Batch]:
    return [cut(data, 0, MBS), cut(data, MBS, rows(data))]


def state(job: Any) -> dict[str, str]:
    named = tensors.hashes(job.chunks, job.optimizer, ("weights", "optimizer"))
    random = tensors.tensor_digest(random_states()[0])
    return {**named, "scheduler": repr(job.scheduler.state_dict()), "random": random}


def differ(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def gradients(job: Any, run: Callable[[], Any], how: Any = None) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the full gradients as the optimizer sees them, and the step's result."""
    found: list[dict[str, torch.Tensor]] = []
    plain = job.optimizer.step

    def look(*args: Any) -> Any:
        found.append(shards.merge(job.chunks, how or reduced(job.chunks[0])))
        return plain(*args)

    job.optimizer.step = look
    result = run()
    job.optimizer.step = plain
    return found[0], result


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors."""
    assert a.keys() == b.keys()
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return float((apart / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5)


def message(call: Callable[[], object], kind: type[Exception] = Misuse) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing"


# -- states --------------------------------------------------------------------------------------------------------------


def states() -> dict[str, Any]:
    with job_of() as job:
        split, data, sentences = MegatronSplit(job), mine(), {}
        sentences["microbatch-closed"] = message(lambda: split.microbatch(data))
        sentences["finish-closed"] = message(split.finish)
        sentences["no-rows-a-microbatch"] = message(lambda: split.begin(LOSS, 16, 0))
        split.abort()
        split.begin(LOSS, 16, MBS)
        sentences["begin-open"] = message(lambda: split.begin(LOSS, 16, MBS))
        sentences["finish-empty"] = message(split.finish)
        sentences["half-a-microbatch"] = message(lambda: split.microbatch(cut(data, 0, 3)))
        sentences["after-an-error"] = message(lambda: split.microbatch(data))
        sentences["finish-after-an-error"] = message(split.finish)
        split.abort()
        split.abort()
        closed, version = split.state, split.version
        split.begin(LOSS, 16, MBS)
        split.microbatch(data)
        result = split.finish()
        after = {"closed": closed, "version": version, "state": split.state}
        return {"message": sentences, **after, "ticked": [split.version, result["version"]]}


def refused() -> dict[str, str]:
    with job_of(**{**MOE, "sum_gradients": True}) as job:
        per_token = message(lambda: MegatronSplit(job), BadInput)
        job.chunks *= 2
        return {"per-token": per_token, "chunks": message(lambda: MegatronSplit(job), BadInput)}


# -- what is no number, what is not there ---------------------------------------------------------------------------------


def not_finite(kind: str) -> dict[str, Any]:
    """One non-finite value on one rank invalidates the step; the next step is normal."""
    with job_of() as job:
        data = mine()
        if dist.get_rank() == 1:
            place = tuple(data["token_mask"].nonzero()[0].tolist())
            data[kind][place] = -torch.inf
        split, before, at = MegatronSplit(job), state(job), step_hooks(job)
        split.begin(LOSS, 16, MBS)
        for piece in thirds(data):
            split.microbatch(piece)
        result = split.finish()
        after = state(job)
        reported = {name: result[name] for name in ("updated", "version")}
        reported["finite"] = [math.isfinite(value) for value in (result["grad_norm"], result["lr"])]
        found, again = gradients(job, lambda: next_step(split, mine()))
        reported["changed"] = differ(before, after)
        reported["hooks_back"] = step_hooks(job) == at
        reported["next"] = [again["updated"], again["version"]]
    with job_of() as job:
        reported["next_as_ever"] = far(found, gradients(job, lambda: step(job, [mine()]))[0])
    return reported


def next_step(split: MegatronSplit, data: Batch) -> Any:
    split.begin(LOSS, 16, MBS)
    split.microbatch(data)
    return split.finish()


def no_rows() -> dict[str, Any]:
    """Compare all rows on the first data rank and none on the second with half of them on each."""
    share = batch(dist.get_rank())
    with job_of() as job:
        wanted, plain = gradients(job, lambda: MegatronSync(job).run(LOSS, share, 16, MBS))
    both = [batch(0), batch(1)]
    all_of_it = {name: torch.cat([one[name] for one in both]) for name in both[0]}
    here = all_of_it if dist.get_rank() == 0 else cut(all_of_it, 0, 0)
    with job_of() as job:
        found, result = gradients(job, lambda: step(job, [here]))
    apart = {name: abs(value - plain["metrics"][name]) for name, value in result["metrics"].items()}
    return {"gradients": far(found, wanted), "metrics": max(apart.values()), "updated": result["updated"]}


def no_valid_token() -> dict[str, Any]:
    data = batch(dist.get_rank())
    data["token_mask"].zero_()
    data["sample_mask"].zero_()
    with job_of() as job:
        found, result = gradients(job, lambda: step(job, thirds(data)))
        largest = max(float(value.abs().max()) for value in found.values())
        return {**result, "largest_gradient": largest}


# -- errors ----------------------------------------------------------------------------------------------------------------


class Breaks:
    """A loss that raises at its second microbatch."""

    level = LOSS.level

    def __init__(self) -> None:
        self.called = 0

    def normalizers(self) -> Any:
        return LOSS.normalizers()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called += 1
        torch.rand(3)
        if self.called > 1:
            raise LookupError("broken in the middle of a chunk")
        return LOSS(*args, **kwargs)


def error_in_a_chunk(**settings: Any) -> dict[str, Any]:
    """A loss raises half-way through a call: report what it left behind, and compare the next steps with those of an undisturbed job."""
    with job_of(**settings) as job:
        split, at = MegatronSplit(job), step_hooks(job)
        next_step(split, mine())
        before = state(job)
        split.begin(Breaks(), 16, MBS)
        reported: dict[str, Any] = {"message": message(lambda: split.microbatch(mine()), LookupError)}
        reported |= {
            "hooks_back": step_hooks(job) == at,
            "state": split.state,
            "then": message(lambda: split.microbatch(mine())),
        }
        split.abort()
        reported |= {"changed": differ(before, state(job)), "version": split.version}
        next_step(split, mine())
        mended = state(job)
    with job_of(**settings) as job:
        control = MegatronSplit(job)
        for _ in range(2):
            next_step(control, mine())
        reported["unlike_control"] = [name for name in differ(mended, state(job)) if name != "random"]
    return reported


def error_after_reduction(**settings: Any) -> dict[str, Any]:
    """The optimizer raises after the reduction."""
    with job_of(**settings) as job:
        split, at = MegatronSplit(job), step_hooks(job)
        before, plain = state(job), job.optimizer.step
        job.optimizer.step = [].pop
        split.begin(LOSS, 16, MBS)
        split.microbatch(mine())
        reported: dict[str, Any] = {"message": message(split.finish, IndexError), "hooks_back": step_hooks(job) == at}
        job.optimizer.step = plain
        split.abort()
        reported |= {"changed": differ(before, state(job)), "version": split.version}
        reported["updated"] = next_step(split, mine())["updated"]
        return reported


# -- reductions ------------------------------------------------------------------------------------------------------------


def reductions(**settings: Any) -> dict[str, Any]:
    """Count each bucket's reductions in three steps of several calls, and compare the gradients that the optimizer sees with a plain
    step's."""
    seen = []
    with job_of(**settings) as job:
        split = MegatronSplit(job)
        with counting_collectives(job.chunks[0]) as counter:
            for _ in range(3):
                counter.update(dict.fromkeys(counter, 0))
                split.begin(LOSS, 16, MBS)
                for piece in thirds(mine()):
                    split.microbatch(piece)
                split.finish()
                seen += counter.values()
    with job_of(**settings) as job:
        found, result = gradients(job, lambda: step(job, thirds(mine())))
    with job_of(**settings) as job:
        plain, same = gradients(job, lambda: MegatronSync(job).run(LOSS, mine(), 16, MBS))
    return {
        "counts": sorted(set(seen)),
        "buckets": len(seen) // 3,
        "gradients": far(found, plain),
        "result": result,
        "metrics_apart": max(abs(result["metrics"][name] - value) for name, value in same["metrics"].items()),
    }


def put_together() -> dict[str, Any]:
    """Compare the distributed optimizer's joined shards with the all-reduce, and with this rank's shard alone."""
    found = {}
    for distributed in (False, True):
        with job_of(distributed_optimizer=distributed) as job:
            found[distributed], _ = gradients(job, lambda job=job: step(job, [mine()]))
    with job_of(distributed_optimizer=True) as job:
        own, _ = gradients(job, lambda: step(job, [mine()]), lambda param: param.main_grad)
    unequal = [name for name, value in found[False].items() if not torch.equal(value, found[True][name])]
    return {"unequal": unequal, "own_alone": far(own, found[False])}


# -- experts ---------------------------------------------------------------------------------------------------------------

AUX_ALONE = ClippedPolicyGradient(level="sequences")


class Uncorrected(MegatronSplit):
    def _correct_aux(self, own: float) -> None: ...


def uneven() -> Batch:
    """One sequence counts on the first data rank and all but one on the second; all advantages are zero."""
    data = batch(dist.get_rank())
    sample = torch.zeros(ROWS)
    sample[0] = 1.0
    if dist.get_rank() == 1:
        sample = 1.0 - sample
    return {**data, "advantages": torch.zeros(ROWS, LENGTH), "sample_mask": sample}


def aux_alone(level: str, ep: int) -> dict[str, Any]:
    """Only the experts' auxiliary loss: compare its gradient in both steps and without the correction with one computed by hand."""
    loss, data = ClippedPolicyGradient(level=level), uneven()
    settings = {**MOE, "ep": ep}
    with job_of(**settings) as job:
        pieces = by_hand(job, data)
    mean = over_ranks(torch.stack(pieces).sum(0)) / (2 * len(pieces))
    # Without the correction, the pieces of a call are weighted by the call's share of the counts, not equally over all
    # microbatches.
    counts = [one["sample_mask"].sum() if level == "sequences" else valid_tokens(one) for one in thirds(data)]
    whole = over_ranks(torch.stack(counts).sum())
    guessed = over_ranks(counts[0] * pieces[0] + counts[1] / 3 * torch.stack(pieces[1:]).sum(0)) / whole
    found = {}
    for name, run in {
        "sync": lambda job: MegatronSync(job).run(loss, data, 16, MBS),
        "split": lambda job: step(job, thirds(data), loss),
        "uncorrected": lambda job: step(job, thirds(data), loss, Uncorrected),
    }.items():
        with job_of(**settings) as job:
            full, _ = gradients(job, lambda run=run, job=job: run(job))
            found[name] = full[ROUTER]
    return {
        "size": float(mean.norm()),
        "sync": apart(found["sync"], mean),
        "split": apart(found["split"], mean),
        "uncorrected": apart(found["uncorrected"], mean),
        "uncorrected_as_told": apart(found["uncorrected"], guessed),
    }


def valid_tokens(data: Batch) -> torch.Tensor:
    return (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()


def over_ranks(value: torch.Tensor) -> torch.Tensor:
    whole = value.double().clone()
    dist.all_reduce(whole)
    return whole


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def by_hand(job: Any, data: Batch) -> list[torch.Tensor]:
    """The gradient of coefficient * E * sum(f P) with respect to the router, for each of this rank's microbatches.

    f: the share of choices that went to an expert; P: its mean probability. With one layer, nothing else contributes.
    """
    from kit.megatron.split import forward_backward, nothing

    router = next(module for name, module in job.chunks[0].named_modules() if name.endswith("mlp.router"))
    seen: list[torch.Tensor] = []
    hook = router.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().flatten(0, -2)))
    forward_backward(job, [cut(data, at, at + MBS) for at in range(0, ROWS, MBS)], nothing)
    hook.remove()
    done = []
    for hidden in seen:
        weight = router.weight.detach().double().requires_grad_()
        chances = (hidden.double() @ weight.T).softmax(-1)
        chosen = torch.zeros_like(chances).scatter(-1, chances.topk(TOPK).indices, 1.0)
        share = chosen.sum(0) / (TOPK * len(hidden))
        (COEFFICIENT * EXPERTS * (share * chances.mean(0)).sum()).backward()
        assert weight.grad is not None
        done.append(weight.grad)
    return done


def passes(masks: str) -> int:
    """Count the forward passes of a step: four microbatches, and four more if a correction is needed."""
    data = batch(dist.get_rank())
    if masks == "alike":
        data["sample_mask"], data["token_mask"] = torch.ones(ROWS), torch.ones(ROWS, LENGTH)
    with job_of(**MOE, ep=2) as job:
        calls: list[int] = []
        job.chunks[0].module.register_forward_hook(lambda *_: calls.append(1))
        step(job, thirds(data))
        return len(calls)


def reused_buffers(ep: int) -> list[str]:
    """Overwrite the tensors after passing them; return the names of gradients that differ from those without overwriting."""
    found = []
    for overwrite in (False, True):
        with job_of(**MOE, ep=ep) as job:
            split = MegatronSplit(job)
            split.begin(LOSS, 16, MBS)
            for piece in thirds(uneven() | {"advantages": mine()["advantages"]}):
                given = {name: value.clone() for name, value in piece.items()}
                split.microbatch(given)
                if overwrite:
                    for value in given.values():
                        value.zero_()
            split.finish()
            found.append(state(job))
    return differ(*found)


def uneven_microbatches() -> dict[str, Any]:
    with job_of(**MOE) as job:
        split, before, at = MegatronSplit(job), state(job), step_hooks(job)
        split.begin(LOSS, 16, MBS)
        split.microbatch(cut(mine(), 0, ROWS if dist.get_rank() == 0 else MBS))
        reported = {"message": message(split.finish), "hooks_back": step_hooks(job) == at}
        split.abort()
        return {**reported, "changed": differ(before, state(job)), "updated": next_step(split, mine())["updated"]}


def both_ways(pieces: int) -> dict[str, float]:
    """Compare plain and split steps with experts and an ordinary loss over two steps, including the experts' metric."""
    found = []
    for plain in (True, False):
        with job_of(**MOE, ep=2) as job:
            sync, split = MegatronSync(job), MegatronSplit(job)
            for _ in range(2):
                if plain:
                    result: Any = sync.run(LOSS, mine(), 16, MBS)
                else:
                    split.begin(LOSS, 16, MBS)
                    each = ROWS // pieces
                    for at in range(0, ROWS, each):
                        split.microbatch(cut(mine(), at, at + each))
                    result = split.finish()
            found.append((shards.merge(job.chunks), result["metrics"]))
    (weights, metrics), (others, reported) = found
    return {"weights": far(others, weights), **{name: abs(reported[name] - metrics[name]) for name in metrics}}
