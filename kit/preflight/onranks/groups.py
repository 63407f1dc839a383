"""Tiny training jobs, a communicator that is suspended and resumed, groups that are rebuilt, a peer that does not come."""

from __future__ import annotations

import datetime as dt
import gc
import math
import os
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kit import nccl
from kit.measure import counts
from kit.measure.observers.births import facts
from kit.measure.observers.tensors import digest
from kit.measure.phase import timed
from kit.preflight.onranks import device, finish, first_line, held, meet, sums


def twice(*, layout: dict[str, Any], dtypes: list[str]) -> dict[str, Any]:
    """Per number type two jobs of this layout on the same groups, two steps each; seconds of the groups, of a job and of a step."""
    from kit.megatron import groups, model
    from kit.megatron.config import ModelConfig

    measured: dict[str, Any] = {"layout": timed(lambda: model.initialise(ModelConfig(layers=2, **layout)))}
    for dtype in dtypes:
        turns = [one(ModelConfig(layers=2, dtype=dtype, **layout)) for _ in range(2)]
        first, second = (turn.pop("bits") for turn in turns)
        apart = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        measured[dtype] = {**turns[1], "tensors": len(first), "apart": apart[:3]}
    groups.destroy("exact", timeout_s=10.0)
    return measured


def one(config: Any) -> dict[str, Any]:
    """A job of two steps: its losses, gradient norms and tensors as bits, and the second step's seconds."""
    from kit.megatron import model

    start = time.perf_counter()
    job = model.assemble(config, device())
    finish()
    built = time.perf_counter() - start
    steps = job.step(1)
    second = timed(lambda: steps.extend(job.step(1)))
    numbers = {f"step {i} {name}": float(value).hex() for i, step in enumerate(steps) for name, value in step.items()}
    bits = {**numbers, **job.hashes()}
    finite = all(math.isfinite(value) for step in steps for value in step.values())
    job.mover.close()
    return {"bits": bits, "job": built, "step": second, "finite": finite, "loss": steps[-1]["loss"]}


def experts() -> dict[str, Any]:
    """One step of a job with four experts over two ranks."""
    from kit.megatron import groups, model
    from kit.megatron.config import ModelConfig

    job = model.build(ModelConfig(layers=2, experts=4, ep=2))
    (step,) = job.step(1)
    job.mover.close()
    groups.destroy("exact", timeout_s=10.0)
    return {"loss": step["loss"], "finite": math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])}


def suspended() -> dict[str, Any]:
    """One communicator asleep and awake again; why not, where it cannot be."""
    if device().type == "cpu":
        return {"refused": "it needs a GPU, and these ranks work on the host"}
    if why := nccl.no_suspend(nccl.running(), torch.__version__):
        return {"refused": why}
    group: Any = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
    before = sums(device(), group)
    backend = group._get_backend(device())
    try:
        seen: dict[str, Any] = {"stats": [dict(backend.memory_stats())]}
    except (AttributeError, RuntimeError) as error:  # a torch built for an older NCCL, or NCCL's memory manager is off
        return {"refused": f"NCCL's memory statistics: {first_line(error)}"}
    meet()
    levels = [held()]
    meet()
    try:
        seen["suspend"] = timed(backend.suspend)
    except RuntimeError as error:
        return {**seen, "error": first_line(error)}
    meet()
    levels.append(held())
    seen["stats"].append(dict(backend.memory_stats()))
    meet()
    seen["resume"] = timed(backend.resume)
    seen["right"] = before and sums(device(), group)
    seen["freed"] = levels[0] - levels[1]
    dist.destroy_process_group(group)
    return seen


# -- groups destroyed exactly and made anew inside their handles: descriptors, threads, driver, options, bits ----------


MORE = "_MORE_FOR_THE_PREFLIGHT_GROUPS"  # a global among Megatron's own, so that a destroy finds what it holds
NAMES = ("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")


class Ten(NamedTuple):
    """The groups of this rank, and what they were like at first."""

    made: list[Any]
    bits: list[str]
    options: list[dict[str, Any]]


_ten: Ten


def begin(*, n: int) -> dict[str, Any]:
    """Make the groups where Megatron's are; levels before there are any, and with them."""
    global _ten  # noqa: PLW0603 - kept between calls
    from kit.megatron import groups, standin
    from kit.megatron.handles import parallel_state

    groups.install()
    standin.install()
    once = dist.new_group(list(range(dist.get_world_size())))  # what a process keeps of its first group is no leak
    bits(once)
    dist.destroy_process_group(once)
    del once
    before = level()
    made = [make(number) for number in range(n)]
    for name, group in zip(NAMES, made, strict=False):
        setattr(parallel_state(), name, group)
    setattr(parallel_state(), MORE, made[len(NAMES) :])
    _ten = Ten(made, [bits(group) for group in made], [options(group) for group in made])
    return {"without": before, "with": level(), "options": _ten.options[1]}


def cycle() -> dict[str, Any]:
    """Destroy all and make them anew: levels in between and after, seconds for one group, and what is not as at first."""
    from kit.megatron import groups

    n = len(_ten.made)
    meet()
    start = time.perf_counter()
    stats = groups.destroy("exact", timeout_s=5.0)
    finish()
    seconds = {"destroy": (time.perf_counter() - start) / n}
    without = level()
    seconds["reload"] = timed(lambda: groups.reload(stats["snapshot"], timeout_s=5.0)) / n
    again: list[str] = []
    seconds["use"] = timed(lambda: again.extend(bits(group) for group in _ten.made)) / n
    return {
        "without": without,
        "with": level(),
        "seconds": seconds,
        "alive": len(stats["alive"]),
        "same_bits": again == _ten.bits,
        "changed_options": sorted(differences(_ten.options, [options(group) for group in _ten.made])),
    }


def make(number: int) -> Any:
    """Every other group with options that are not the defaults."""
    everyone = list(range(dist.get_world_size()))
    odd = number % 2 == 1
    given: Any = (
        dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if odd and device().type == "cuda" else None
    )
    seconds = dt.timedelta(seconds=600 + number)
    if given is not None:
        given._timeout = seconds
    return dist.new_group(everyone, timeout=seconds, pg_options=given, group_desc=f"PREFLIGHT_{number}")


def bits(group: Any) -> str:
    """The bits that an all-reduce of this rank's own random numbers gives."""
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    value = torch.randn(4096, generator=generator).to(device())
    dist.all_reduce(value, group=group)
    return digest(value)


def options(group: Any) -> dict[str, Any]:
    """What the group's own backend says of its options, asked of torch and not of the snapshot."""
    seen = facts(group)
    return {**seen["backends"][device().type], "description": seen["description"]}


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    return {
        f"group {number}: {name} {one.get(name)} -> {other.get(name)}"
        for number, (one, other) in enumerate(zip(before, after, strict=True))
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    }


def level() -> dict[str, int]:
    """What this process holds once all ranks have come here."""
    gc.collect()
    finish()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    meet()
    seen = counts()._asdict()
    if torch.cuda.is_available():
        seen["driver"] = held()
    meet()
    return seen


# -- a peer that does not come ------------------------------------------------------------------------------------------


_group: Any = None


def come_late(*, rank: int, seconds: float) -> None:
    """An all-reduce for which one rank comes late."""
    if dist.get_rank() == rank:
        time.sleep(seconds)
    value = torch.ones(1, device=device())
    dist.all_reduce(value)
    finish()


def prepare(*, deadline_s: float) -> bool:
    """A group of both ranks that works, with a deadline."""
    global _group  # noqa: PLW0603 - kept between two calls
    _group = dist.new_group(
        list(range(dist.get_world_size())),
        backend="nccl" if device().type == "cuda" else "gloo",
        timeout=dt.timedelta(seconds=deadline_s),
    )
    right = sums(device(), _group)
    finish()
    meet()
    return right


def wait_in_vain(*, deadline_s: float) -> dict[str, Any]:
    """Both ranks wait, each for the other: rank 0 in a collective of a group that works, the other one where a group begins."""
    act = collective if dist.get_rank() == 0 else join
    start = time.perf_counter()
    words = ""
    try:
        act(deadline_s)
    except Exception as error:  # noqa: BLE001 - how it ends is what is asked
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    return {"way": act.__name__, "seconds": time.perf_counter() - start, "error": words}


def collective(deadline_s: float) -> None:
    value = torch.ones(1, device=device())
    work = dist.all_reduce(value, group=_group, async_op=True)
    # gloo keeps the group's own deadline
    work.wait(dt.timedelta(seconds=deadline_s)) if value.is_cuda else work.wait()


def join(deadline_s: float) -> None:
    """As the second of two, where the first, which has to hand out the communicator's id (NCCL) or its address (gloo), is absent."""
    wait = dt.timedelta(seconds=deadline_s)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=wait)
    made: Any = dist.ProcessGroupNCCL if device().type == "cuda" else dist.ProcessGroupGloo
    group = made(PrefixStore("kit-preflight-absent", store), 1, 2, wait)
    try:
        group.allreduce([torch.ones(1, device=device())]).wait()
    finally:
        if device().type == "cuda":
            group.abort()


def survive() -> dict[str, Any]:
    """Give the group up, as after a failure, and use WORLD again."""
    global _group
    group, _group = _group, None
    start = time.perf_counter()
    if device().type == "cuda":
        group.abort()
    dist.destroy_process_group(group)
    given_up = time.perf_counter() - start
    return {"give_up": given_up, "host": sums(torch.device("cpu")), "device": sums(device())}
