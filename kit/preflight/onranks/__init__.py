"""What ranks do for the probes: standard library, torch and Megatron only. They measure and return plain numbers; `probes` judges. Here:
a rank's device, times of collectives and groups, memory of the host and of a GPU. In `groups`: rebuilt groups, an absent peer, jobs."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import os
import pickle
import resource
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit import nccl
from kit.measure.host import map_shared, populate, trim, unmap
from kit.measure.phase import current_device, device_memory, host_memory, synchronize, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """The rank's own; a World on the host hides the GPUs from its ranks."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def finish() -> None:
    """Until the GPU has done all that it was given."""
    synchronize(current_device())


def meet() -> None:
    """All ranks are here; over the host, so that nothing happens on the GPU."""
    dist.all_reduce(torch.zeros(1))


def place() -> dict[str, Any]:
    """This rank's seat, and that a kernel runs there."""
    here = device()
    seat: dict[str, Any] = {
        "device": str(here),
        "torch": torch.__version__,
        "nccl": nccl.written(nccl.running()),
        "env": {name: os.environ[name] for name in WATCHED if name in os.environ},
        "poisoned": bool(torch.cuda._is_in_bad_fork()),
    }
    if here.type == "cuda":
        about = torch.cuda.get_device_properties(here)
        seat |= {"name": about.name, "capability": list(torch.cuda.get_device_capability(here))}
        seat["built_for"] = torch.cuda.get_arch_list()
    numbers = torch.arange(1000, device=here, dtype=torch.float64)
    seat["sum"] = float((numbers * 2).sum().item())
    return seat


def ready_at_once() -> bool | None:
    """Whether WORLD has its communicator before the first collective; None on the host."""
    if device().type == "cpu":
        return None
    world: Any = dist.distributed_c10d._get_default_group()
    ask = getattr(world._get_backend(device()), "_is_initialized", None)
    return None if ask is None else bool(ask())


def all_reduces(*, n: int) -> dict[str, Any]:
    """Seconds of one small all-reduce of many, on the rank's device and on the host, and whether the sums are right."""
    measured: dict[str, Any] = {}
    for name, where in {"device": device(), "host": torch.device("cpu")}.items():
        first = sums(where)
        meet()
        value = torch.ones(1, device=where)
        seconds = timed(lambda value=value: [dist.all_reduce(value) for _ in range(n)])  # type: ignore[misc]
        measured[name] = {"seconds": seconds / n, "right": first and sums(where)}
    return measured


def sums(where: torch.device, group: Any = None) -> bool:
    """An all-reduce with values that depend on the rank, against the exact sum."""
    size, rank = dist.get_world_size(), dist.get_rank()
    value = torch.tensor([(rank + 1) ** 2, rank], dtype=torch.float64, device=where)
    dist.all_reduce(value, group=group)
    return value.tolist() == [sum((r + 1) ** 2 for r in range(size)), sum(range(size))]


def make_groups(*, backend: str, n: int) -> dict[str, Any]:
    """Groups of all ranks made, used once and destroyed: seconds of each for one, and whether every sum is right."""
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


def memlock() -> int | None:
    """Bytes that this process may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def registered(*, size: int) -> dict[str, Any]:
    """A memfd of this size, mapped, supplied with pages and copied; registered with CUDA where there is a GPU. Seconds of each."""
    with contextlib.ExitStack() as undo:
        fd = os.memfd_create("kit-preflight")
        undo.callback(os.close, fd)
        os.ftruncate(fd, size)
        address = map_shared(fd, size)
        undo.callback(unmap, address, size)
        measured: dict[str, Any] = {"memlock": memlock(), "populate": timed(lambda: populate(address, size))}
        there = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
        if device().type == "cuda":
            return measured | copies(address, there)
        other = torch.ones(size, dtype=torch.uint8)
        return {**measured, "copy_in": best(there, other), "copy_out": best(other, there)}


def copies(address: int, there: torch.Tensor) -> dict[str, Any]:
    """To the GPU and back: from the registered mapping, from torch's pinned memory, and from pageable memory."""
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
    part = on_gpu[: size // 4]  # enough for a rate; supplying more pages takes longer than copying them
    for name, host in (
        ("pinned", torch.empty(part.numel(), dtype=torch.uint8, pin_memory=True)),
        ("pageable", torch.ones(part.numel(), dtype=torch.uint8)),
    ):
        measured[f"{name}_h2d"], measured[f"{name}_d2h"] = 4 * best(part, host), 4 * best(host, part)
    return measured


def best(target: torch.Tensor, source: torch.Tensor) -> float:
    return min(timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(2))


def refused_because() -> str:
    """CUDA reports a refusal again at the next call."""
    try:
        torch.ones(1, device=device()).sum().item()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "CUDA gives no reason"


def resized(*, size: int) -> dict[str, Any]:
    """A flat buffer with views: its storage to nothing and back. Bytes that left and came, and whether every view has its bits."""
    where = device()
    flat = torch.empty(size, dtype=torch.uint8, device=where)
    for number, piece in enumerate(pieces(flat)):
        piece.view(torch.int64).copy_(torch.arange(piece.numel() // 8, device=where) * (2 * number + 3))
    half = size // 2 // 8 * 8
    views = [flat[:half].view(torch.bfloat16), flat[half : half + PIECE].view(torch.float32), flat.view(torch.int64)]
    before = digests(flat, views)
    kept = flat.clone()  # on the same device: copies to the host are another probe's question
    storage = flat.untyped_storage()
    let_go()
    levels = [held()]
    out = timed(lambda: storage.resize_(0)) + timed(let_go)
    levels.append(held())
    back = timed(lambda: storage.resize_(size))
    flat.copy_(kept)
    finish()
    levels.append(held())
    return {
        "left": levels[0] - levels[1],
        "came": levels[2] - levels[1],
        "same": digests(flat, views) == before
        and all(v.untyped_storage().data_ptr() == flat.data_ptr() for v in views),
        "out": out,
        "back": back,
    }


def pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def digests(flat: torch.Tensor, views: list[torch.Tensor]) -> list[int]:
    """Sums with a weight for each place, so that moved bytes show; in pieces, since each needs room for its product."""
    sums = []
    for one in (flat, *views):
        total = 0
        for number, piece in enumerate(pieces(one.reshape(-1).view(torch.uint8))):
            words = piece.view(torch.int64)
            weights = torch.arange(1, words.numel() + 1, device=words.device) * 2 + 1
            total += (number + 1) * int((words * weights).sum().item())
        sums.append(total)
    return sums


def let_go() -> None:
    """Freed blocks back to the driver, or to the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        trim()


def held() -> int:
    """Bytes of the GPU in use, as the driver reports it; without a GPU this process's anonymous memory."""
    finish()
    seen = device_memory(current_device())
    return seen.driver_used if seen else host_memory().get("anon_rss", 0)


def driver_view() -> dict[str, Any] | None:
    """What the driver and the allocator tell after a little work; None on the host."""
    where = device()
    if where.type == "cpu":
        return None
    block = torch.ones(256 * 2**20, dtype=torch.uint8, device=where)
    finish()
    meet()
    seen = device_memory(str(where))
    meet()  # both have read while both have their block
    assert seen is not None
    del block
    return {"pid": os.getpid(), "device": str(where), **seen._asdict()}


# -- memory of one GPU that two ranks use -------------------------------------------------------------------------------


_kept: list[Any] = []


def offer(*, size: int) -> dict[str, Any]:
    """Memory with a pattern, and what the other rank needs to open it."""
    from torch.multiprocessing.reductions import reduce_tensor

    value = torch.arange(size // 8, dtype=torch.int64, device=device()) * 7 + 1
    finish()
    try:
        _, arguments = reduce_tensor(value)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return {"error": first_line(error)}
    _kept.append(value)
    return {"handle": base64.b64encode(pickle.dumps(arguments)).decode()}


def take(*, handle: str, size: int, keep: bool) -> dict[str, Any]:
    """Open it, read every bit, write a first word that its owner can see; let it go again or keep it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = pickle.loads(base64.b64decode(handle))  # noqa: S301 - made by the rank beside this one
    try:
        value = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        same = bool(torch.equal(value, torch.arange(size // 8, dtype=torch.int64, device=value.device) * 7 + 1))
        value[0] = -1
        if value.is_cuda:
            torch.cuda.synchronize(value.device)  # its owner's GPU, which may be another one than this rank's
    except RuntimeError as error:
        return {"error": first_line(error)}
    if keep:
        _kept.append(value)
    del value
    gc.collect()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return {"same": same}


def written() -> bool:
    """Whether the other rank's word has come."""
    finish()
    return bool(int(_kept[-1][0].item()) == -1)


def close() -> int:
    """Let go of everything; bytes that the allocator still counts."""
    _kept.clear()
    gc.collect()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
