"""The rank side of the probes: standard library, torch and Megatron only. Ranks measure and return plain numbers; `probes` judges."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import datetime as dt
import gc
import math
import os
import pickle
import resource
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.multiprocessing import reductions

from kit import nccl
from kit.measure import counts
from kit.measure.host import map_shared, populate, trim, unmap
from kit.measure.observers.births import facts
from kit.measure.observers.tensors import digest
from kit.measure.phase import current_device, device_memory, host_memory, synchronize, timed

WATCHED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_HOSTID",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_RAS_ENABLE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)


def device() -> torch.device:
    """The rank's device; a World on the host hides the GPUs from its ranks."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def finish() -> None:
    """Wait until the GPU has finished all work."""
    synchronize(current_device())


def meet() -> None:
    """A barrier over the host, without work on the GPU."""
    dist.all_reduce(torch.zeros(1))


def place() -> dict[str, Any]:
    """This rank's device, and whether a kernel runs there."""
    here = device()
    numbers = torch.arange(1000, device=here, dtype=torch.float64)
    seat: dict[str, Any] = {
        "device": str(here),
        "torch": torch.__version__,
        "nccl": nccl.written(nccl.running()),
        "env": {name: os.environ[name] for name in WATCHED if name in os.environ},
        "poisoned": bool(torch.cuda._is_in_bad_fork()),
        "sum": float((numbers * 2).sum().item()),
    }
    if here.type == "cuda":
        about = torch.cuda.get_device_properties(here)
        seat |= {"name": about.name, "capability": list(torch.cuda.get_device_capability(here))}
        seat["built_for"] = torch.cuda.get_arch_list()
    return seat


def ready_at_once() -> bool | None:
    """Whether WORLD has its communicator before the first collective; None on the host."""
    if device().type == "cpu":
        return None
    ask = getattr(dist.distributed_c10d._get_default_group()._get_backend(device()), "_is_initialized", None)
    return None if ask is None else bool(ask())


def all_reduces(*, n: int) -> dict[str, Any]:
    """Seconds per small all-reduce on the rank's device and on the host, and whether the sums are correct."""
    measured: dict[str, Any] = {}
    for name, where in {"device": device(), "host": torch.device("cpu")}.items():
        first = sums(where)
        meet()
        value = torch.ones(1, device=where)
        seconds = timed(lambda value=value: [dist.all_reduce(value) for _ in range(n)])  # type: ignore[misc]
        measured[name] = {"seconds": seconds / n, "right": first and sums(where)}
    return measured


def sums(where: torch.device, group: Any = None) -> bool:
    """An all-reduce with values that depend on the rank, compared with the exact sum."""
    size, rank = dist.get_world_size(), dist.get_rank()
    value = torch.tensor([(rank + 1) ** 2, rank], dtype=torch.float64, device=where)
    dist.all_reduce(value, group=group)
    return value.tolist() == [sum((r + 1) ** 2 for r in range(size)), sum(range(size))]


def make_groups(*, backend: str, n: int) -> dict[str, Any]:
    """Make groups of all ranks, use them once and destroy them: seconds of each step per group, and whether every sum is correct."""
    where = device() if backend == "nccl" else torch.device("cpu")
    everyone = list(range(dist.get_world_size()))
    made: list[Any] = []
    right: list[bool] = []
    meet()
    make = timed(lambda: made.extend(dist.new_group(everyone, backend=backend) for _ in range(n)))
    use = timed(lambda: right.extend(sums(where, group) for group in made))
    meet()
    destroy = timed(lambda: [dist.destroy_process_group(group) for group in made])
    made.clear()
    return {"make": make / n, "use": use / n, "destroy": destroy / n, "right": all(right)}


# -- memory: what a GPU copies from, storage resized to zero and back, the driver's numbers ----------------------------


PIECE = 64 * 2**20


def registered(*, size: int) -> dict[str, Any]:
    """Map, populate and copy a memfd of this size, and register it with CUDA if there is a GPU. Returns seconds of each."""
    with contextlib.ExitStack() as undo:
        fd = os.memfd_create("kit-preflight")
        undo.callback(os.close, fd)
        os.ftruncate(fd, size)
        address = map_shared(fd, size)
        undo.callback(unmap, address, size)
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        measured: dict[str, Any] = {"memlock": None if soft == resource.RLIM_INFINITY else soft}
        measured["populate"] = timed(lambda: populate(address, size))
        there = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
        if device().type == "cuda":
            return measured | copies(address, there)
        other = torch.ones(size, dtype=torch.uint8)
        return {**measured, "copy_in": best(there, other), "copy_out": best(other, there)}


def copies(address: int, there: torch.Tensor) -> dict[str, Any]:
    """Copies to the GPU and back: from the registered mapping, from torch's pinned memory, and from pageable memory."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    size = there.numel()
    on_gpu = torch.zeros(size, dtype=torch.uint8, device=device())
    there.fill_(3)
    finish()
    start = time.perf_counter()
    status = int(cudart.cudaHostRegister(address, size, 0))
    measured: dict[str, Any] = {"register": time.perf_counter() - start, "status": status}
    if status:
        measured["reason"] = refused_because()
    else:
        try:
            measured["h2d"] = best(on_gpu, there)
            arrived = bool((on_gpu == 3).all().item())
            on_gpu.fill_(5)
            measured["d2h"] = best(there, on_gpu)
            measured["right"] = arrived and bool((there[::512] == 5).all())  # one of 512 bytes: the host is slow
        finally:
            finish()
            measured["unregister"] = int(cudart.cudaHostUnregister(address))
    part = on_gpu[: size // 4]  # enough for a rate; populating more pages takes longer than copying them
    for name, host in (
        ("pinned", torch.empty(part.numel(), dtype=torch.uint8, pin_memory=True)),
        ("pageable", torch.ones(part.numel(), dtype=torch.uint8)),
    ):
        measured[f"{name}_h2d"], measured[f"{name}_d2h"] = 4 * best(part, host), 4 * best(host, part)
    return measured


def best(target: torch.Tensor, source: torch.Tensor) -> float:
    return min(timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(2))


def refused_because() -> str:
    """Clear the last CUDA error, which the next call would report again."""
    try:
        torch.ones(1, device=device()).sum().item()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "CUDA gives no reason"


def resized(*, size: int) -> dict[str, Any]:
    """Resize the storage of a flat buffer with views to nothing and back: bytes freed and taken, and whether every view has its bits."""
    flat = torch.empty(size, dtype=torch.uint8, device=device())
    for number, piece in enumerate(pieces(flat)):
        piece.view(torch.int64).copy_(torch.arange(piece.numel() // 8, device=flat.device) * (2 * number + 3))
    half = size // 2 // 8 * 8
    views = [flat[:half].view(torch.bfloat16), flat[half : half + PIECE].view(torch.float32), flat.view(torch.int64)]
    before = digests(flat, views)
    kept = flat.clone()  # on the same device, because another probe measures copies to the host
    storage = flat.untyped_storage()
    let_go()
    full = held()
    out = timed(lambda: storage.resize_(0)) + timed(let_go)
    empty = held()
    back = timed(lambda: storage.resize_(size))
    flat.copy_(kept)
    return {
        "left": full - empty,
        "came": held() - empty,
        "same": digests(flat, views) == before
        and all(v.untyped_storage().data_ptr() == flat.data_ptr() for v in views),
        "out": out,
        "back": back,
    }


def pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def digests(flat: torch.Tensor, views: list[torch.Tensor]) -> list[int]:
    """Sums weighted by position, so moved bytes show; in pieces, because each product needs memory."""

    def weighed(piece: torch.Tensor) -> int:
        words = piece.view(torch.int64)
        return int((words * (torch.arange(1, words.numel() + 1, device=words.device) * 2 + 1)).sum().item())

    everything = (one.reshape(-1).view(torch.uint8) for one in (flat, *views))
    return [sum(number * weighed(piece) for number, piece in enumerate(pieces(one), 1)) for one in everything]


def let_go() -> None:
    """Return freed blocks to the driver or to the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        trim()


def held() -> int:
    """Bytes of the GPU in use, as reported by the driver; without a GPU this process's anonymous memory."""
    finish()
    seen = device_memory(current_device())
    return seen.driver_used if seen else host_memory().get("anon_rss", 0)


def driver_view() -> dict[str, Any] | None:
    """The readings of the driver and the allocator after a little work; None on the host."""
    where = device()
    if where.type == "cpu":
        return None
    block = torch.ones(256 * 2**20, dtype=torch.uint8, device=where)
    finish()
    meet()
    seen = device_memory(str(where))
    meet()  # both ranks must read while both have their block
    assert seen is not None
    del block
    return {"pid": os.getpid(), "device": str(where), **seen._asdict()}


# -- memory of one GPU that two ranks use -------------------------------------------------------------------------------


_kept: list[Any] = []


def offer(*, size: int) -> dict[str, Any]:
    """Memory with a pattern, and the handle with which the other rank opens it."""
    value = torch.arange(size // 8, dtype=torch.int64, device=device()) * 7 + 1
    finish()
    try:
        _, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return {"error": first_line(error)}
    _kept.append(value)
    return {"handle": base64.b64encode(pickle.dumps(arguments)).decode()}


def take(*, handle: str, size: int, keep: bool) -> dict[str, Any]:
    """Open it, read every bit, write a first word for its owner to see, then release or keep it."""
    arguments = pickle.loads(base64.b64decode(handle))  # noqa: S301 - made by the other rank
    try:
        value = reductions.rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        same = bool(torch.equal(value, torch.arange(size // 8, dtype=torch.int64, device=value.device) * 7 + 1))
        value[0] = -1
        if value.is_cuda:
            torch.cuda.synchronize(value.device)  # its owner's GPU, which may not be this rank's
    except RuntimeError as error:
        return {"error": first_line(error)}
    if keep:
        _kept.append(value)
    del value
    gc.collect()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return {"same": same}


def written() -> bool:
    """Whether the other rank's word has arrived."""
    finish()
    return bool(int(_kept[-1][0].item()) == -1)


def close() -> int:
    """Release everything; returns the bytes that the allocator still counts."""
    _kept.clear()
    gc.collect()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- tiny training jobs, and a communicator that is suspended and resumed (Megatron may be missing: it is imported where it is used) --


def twice(*, layout: dict[str, Any], dtypes: list[str]) -> dict[str, Any]:
    """For each dtype two jobs of this layout on the same groups, two steps each; seconds of the groups, of a job and of a step."""
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
    """Suspend and resume one communicator, or give the reason why that is impossible."""
    if device().type == "cpu":
        return {"refused": "needs a GPU, but these ranks run on the CPU"}
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


MORE = "_MORE_FOR_THE_PREFLIGHT_GROUPS"  # a global in Megatron's module, so a destroy finds its groups
NAMES = ("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")


class Ten(NamedTuple):
    """The groups of this rank and their initial state."""

    made: list[Any]
    bits: list[str]
    options: list[dict[str, Any]]


_ten: Ten


def begin(*, n: int) -> dict[str, Any]:
    """Make the groups in Megatron's module; returns levels before and after."""
    global _ten  # noqa: PLW0603 - kept between calls
    from kit.megatron import groups, standin
    from kit.megatron.handles import parallel_state

    groups.install()
    standin.install()
    once = dist.new_group(list(range(dist.get_world_size())))  # what a process keeps of its first group is not a leak
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
    """Destroy all groups and make them again: levels in between and after, seconds per group, and differences from the initial state."""
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
    seconds, given = dt.timedelta(seconds=600 + number), None
    if number % 2 and device().type == "cuda":
        given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        given._timeout = seconds
    return dist.new_group(everyone, timeout=seconds, pg_options=given, group_desc=f"PREFLIGHT_{number}")


def bits(group: Any) -> str:
    """The bits of an all-reduce of this rank's random numbers."""
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    value = torch.randn(4096, generator=generator).to(device())
    dist.all_reduce(value, group=group)
    return digest(value)


def options(group: Any) -> dict[str, Any]:
    """The options of the group's backend, read from torch and not from the snapshot."""
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
    """What this process holds once all ranks have reached this point."""
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
    """An all-reduce that one rank enters late."""
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
    """Both ranks wait for each other: rank 0 in a collective of a working group, rank 1 in the creation of a group."""
    act = collective if dist.get_rank() == 0 else join
    start, words = time.perf_counter(), ""
    try:
        act(deadline_s)
    except Exception as error:  # noqa: BLE001 - the probe reports any exception
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    return {"way": act.__name__, "seconds": time.perf_counter() - start, "error": words}


def collective(deadline_s: float) -> None:
    value = torch.ones(1, device=device())
    work = dist.all_reduce(value, group=_group, async_op=True)
    # gloo keeps the group's own deadline
    work.wait(dt.timedelta(seconds=deadline_s)) if value.is_cuda else work.wait()


def join(deadline_s: float) -> None:
    """Create a group as the second of two ranks while the first, which provides the id (NCCL) or address (gloo), is absent."""
    wait, where = dt.timedelta(seconds=deadline_s), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=wait)
    made: Any = dist.ProcessGroupNCCL if device().type == "cuda" else dist.ProcessGroupGloo
    group = made(PrefixStore("kit-preflight-absent", store), 1, 2, wait)
    try:
        group.allreduce([torch.ones(1, device=device())]).wait()
    finally:
        if device().type == "cuda":
            group.abort()


def survive() -> dict[str, Any]:
    """Abandon the group, as after a failure, and use WORLD again."""
    global _group
    group, _group = _group, None
    start = time.perf_counter()
    if device().type == "cuda":
        group.abort()
    dist.destroy_process_group(group)
    given_up = time.perf_counter() - start
    return {"give_up": given_up, "host": sums(torch.device("cpu")), "device": sums(device())}
