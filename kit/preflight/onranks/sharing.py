"""Memory of one GPU that two ranks use, by the handles of torch's own multiprocessing."""

from __future__ import annotations

import base64
import gc
import pickle
from typing import Any

import torch

from kit.preflight.onranks.talk import device, finish

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
