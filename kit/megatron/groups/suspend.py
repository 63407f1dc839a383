"""Give communicators' memory back and keep the communicators: NCCL's suspend and resume, a third way beside destroying.

All ranks meet, then every group that can be suspended is, in the order of creation, since it is collective. A group that never ran a
collective has no communicator yet, and one over gloo none on the GPU: they are skipped, and listed. While suspended a group's handle
is empty, so that a use raises in Python: nothing in NCCL guards it, and the GPU could fault.

Limits: NCCL keeps what it cannot give back (`persist` in its statistics) and refuses communicators that share their memory with others.
Has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kit import nccl
from kit.errors import BadInput
from kit.megatron.groups.exact import meet
from kit.megatron.groups.handle import Handle, c10d, registered, title
from kit.megatron.groups.snapshot import megatron_groups

STATS = ("suspend", "persist", "total")  # bytes; NCCL also reports whether it is suspended now
UNUSED = "not initialized"  # in what NCCL's statistics say of a communicator that is not there yet
NEVER_USED = "never used, so that it has no communicator"

# Handles between suspend and resume, in the order in which both go.
_asleep: list[tuple[Handle, Any]] = []


def refuse() -> None:
    """Where this process cannot suspend anything: by the versions that run, and by what torch was built with, which WORLD's statistics
    tell. A torch that was built for an older NCCL refuses whatever runs (TORCH_CHECK in torch/csrc/distributed/c10d/NCCLUtils.cpp)."""
    why = nccl.no_suspend(nccl.running(), torch.__version__, gpus=torch.cuda.device_count()) or unbuilt()
    if why:
        raise BadInput(f"mode=suspend cannot be had: {why}")


def unbuilt() -> str:
    """Why this torch shows no statistics of WORLD's communicator; empty where it does, or where there is no such WORLD to ask."""
    world = c10d._world.default_pg
    backend = None if world is None else on_gpu(world)
    if backend is None:
        return ""
    try:
        backend.memory_stats()
    except AttributeError:
        return f"torch {torch.__version__} shows no statistics of communicators"
    except RuntimeError as error:
        if UNUSED not in str(error):
            return f"torch {torch.__version__} cannot ask NCCL: {brief(error)}"
    return ""


def brief(error: BaseException) -> str:
    return " ".join(str(error).partition("\n")[0].split())


def suspend(*, include_world: bool, timeout_s: float) -> dict[str, Any]:
    """Suspend; gives what was suspended with the library's statistics before and after, what was skipped and why, what failed and why."""
    default = c10d._world.default_pg
    targets = [*([default] if include_world else []), *megatron_groups()]
    meet("suspend", dist.get_rank(), dist.get_world_size(), timeout_s)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    done: list[dict[str, Any]] = []
    skipped: list[tuple[str, str]] = []
    failed: list[tuple[str, str]] = []
    for handle in targets:
        name, backend = title(handle.kit_facts), on_gpu(handle)
        if backend is None:
            skipped.append((name, "over gloo"))
            continue
        try:
            before = backend.memory_stats()
        except RuntimeError as error:
            if UNUSED not in str(error):
                raise
            skipped.append((name, NEVER_USED))
            continue
        try:
            backend.suspend()
        except RuntimeError as error:
            failed.append((name, brief(error)))
            continue
        after = backend.memory_stats()
        done.append({"group": name, "before": picked(before), "after": picked(after)})
        _asleep.append((handle, handle.kit_inner))
        handle.kit_inner = None
    return {"suspended": done, "skipped": skipped, "failed": failed}


def resume(*, timeout_s: float) -> int:
    """Bring every suspended group back into its handle, in the same order; gives how many."""
    meet("resume", dist.get_rank(), dist.get_world_size(), timeout_s)
    count = len(_asleep)
    while _asleep:
        handle, inner = _asleep[0]
        handle.kit_inner = inner
        try:
            on_gpu(handle).resume()
        except BaseException:
            handle.kit_inner = None  # still asleep: a use would fault
            raise
        _asleep.pop(0)
    return count


def asleep() -> int:
    """How many groups are suspended now."""
    return len(_asleep)


def communicators() -> dict[str, int]:
    """What NCCL says that this process's communicators take, summed over every registered group; empty where it says nothing:
    without NCCL, or with one or a torch that keeps no such statistics."""
    asleep = {id(handle): inner for handle, inner in _asleep}
    found: list[dict[str, int]] = []
    for group in registered():
        inner = asleep.get(id(group), group)
        if "nccl" in str(c10d._world.pg_backend_config.get(group, "")):
            try:
                found.append(picked(inner._get_backend(torch.device("cuda")).memory_stats()))
            except AttributeError:
                return {}  # a torch that cannot ask
            except RuntimeError as error:
                if UNUSED not in str(error):
                    return {}  # a sum without one of them would pass for that of all
    return {name: sum(one.get(name, 0) for one in found) for name in STATS} if found else {}


def on_gpu(handle: Any) -> Any:
    """The group's NCCL part; None where it has none."""
    if "nccl" not in str(c10d._world.pg_backend_config.get(handle, "")):
        return None
    return handle._get_backend(torch.device("cuda"))


def picked(stats: dict[str, int]) -> dict[str, int]:
    """Bytes that are on the GPU now. NCCL's own sums go on counting what is suspended: only allocating and freeing changes them
    (ncclCommMemStats and ncclCommMemSuspend in its src/mem_manager.cc, 2.29.7 to 2.30.7)."""
    there = {name: stats[name] for name in STATS if name in stats}
    if stats.get("suspended"):
        there |= {"suspend": 0, "total": there.get("persist", 0)}
    return there
