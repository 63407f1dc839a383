"""What the NCCL that a process runs can do: read from the library itself, decided from its version, so that it can be asked without a GPU.

Every room may use it, and ranks do. Nothing here touches a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LIBRARY = "libnccl.so.2"  # torch has loaded it under this name, wherever it lies
SUSPENDS = (2, 29, 7)
SUSPENDS_TORCH = (2, 12)
SHARES_GPUS = (2, 30, 0)
SHARED_GPU = "shared GPU, not a product number"  # stands beside every time of communication among ranks that share one
# The first release that compiles its kernels for a generation of GPUs, by the major number of the compute capability, and the oldest
# capability that it compiles them for with CUDA 13 (makefiles/common.mk; the history of that file for the releases).
COMPILED_SINCE = {9: (2, 15, 1), 10: (2, 25, 1), 11: (2, 27, 5), 12: (2, 25, 1)}
OLDEST_WITH_CUDA_13 = (7, 5)
MOST_CTAS = "4"  # a communicator's kernels must fit on the GPU beside those of the ranks it waits for

Version = tuple[int, int, int]


def running() -> Version | None:
    """The version of the library in this process, which a preload may have changed; None where torch brought none."""
    try:
        library = ctypes.CDLL(LIBRARY)
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return inside_torch()
    return decoded(number.value)


def inside_torch() -> Version | None:
    """What torch was built with: one that has NCCL inside of itself loads no library of that name."""
    try:
        major, minor, patch = sys.modules["torch"].cuda.nccl.version()[:3]
    except (KeyError, AttributeError):
        return None
    return major, minor, patch


def decoded(number: int) -> Version:
    """NCCL's own number as a version: 22907 is 2.29.7, and before 2.9 the parts were of one digit."""
    if number < 10_000:
        return number // 1000, number // 100 % 10, number % 100
    return number // 10_000, number // 100 % 100, number % 100


def written(version: Version | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def no_suspend(nccl: Version | None, torch: str, *, gpus: int | None = None) -> str:
    """Why communicators cannot be suspended; empty where they can. Without a number of GPUs only versions are judged."""
    if gpus == 0:
        return "it needs a GPU (NCCL)"
    if nccl is None:
        return "there is no NCCL: this torch is built without CUDA"
    if nccl < SUSPENDS:
        return f"NCCL {written(nccl)} cannot suspend communicators: {written(SUSPENDS)} or newer is needed"
    if release(torch) < SUSPENDS_TORCH:
        return f"torch {torch} does not show how communicators are suspended: 2.12 or newer is needed"
    return ""


def no_code(nccl: Version | None, cuda: str, capability: tuple[int, int]) -> str:
    """What this NCCL lacks for a GPU of this compute capability; empty where nothing. `cuda` is the version that it was built with.

    For a generation that it does not know there is PTX of the one before, which the driver compiles when NCCL is first used.
    """
    if nccl is None:
        return ""
    here = f"sm_{capability[0]}{capability[1]}"
    since = COMPILED_SINCE.get(capability[0])
    if since is not None and nccl < since:
        return f"NCCL {written(nccl)} has no kernels for {here}, only what the driver can compile; {written(since)} and newer have"
    if int(cuda.partition(".")[0]) >= 13 and capability < OLDEST_WITH_CUDA_13:
        return f"NCCL {written(nccl)} for CUDA {cuda} has no kernels for {here}: use a build for CUDA 12"
    return ""


def release(version: str) -> tuple[int, int]:
    """2.13.0+cu130 as (2, 13)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@contextlib.contextmanager
def unbound(default: Any) -> Iterator[None]:
    """While entered, new groups get communicators of their own, made by their members alone.

    Under a default group that is bound to its device torch would split each off the default one's communicator, which every rank of
    the World must take part in (`_new_process_group_helper` in torch/distributed/distributed_c10d.py, 2.9 to 2.13).
    """
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


class Sharing(NamedTuple):
    env: Mapping[str, str]
    words: str  # for people


def sharing(nccl: Version | None, number: int) -> Sharing | None:
    """For rank `number`; None where there is no NCCL at all.

    From 2.30 on NCCL has a flag for it. Before, it refuses two ranks that see the same GPU on the same host, so that each rank
    calls itself a host of its own, and their data goes over sockets. On a machine of a multi-node NVLink domain NCCL would take
    such hosts for its parts and let them meet over NVLink all the same (src/init.cc, ncclMnnvlCheck), so that is switched off.
    """
    if nccl is None:
        return None
    if nccl >= SHARES_GPUS:
        env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": MOST_CTAS, "NCCL_NVLS_ENABLE": "0"}
        return Sharing(env, f"by the multi-rank flag of NCCL {written(nccl)}")
    env = {"NCCL_HOSTID": f"{os.uname().nodename}-kit-{number}", "NCCL_NET": "Socket", "NCCL_MAX_CTAS": MOST_CTAS}
    env["NCCL_MNNVL_ENABLE"] = "0"
    return Sharing(env, f"by ranks that call themselves hosts of their own: NCCL {written(nccl)} has no flag for it")
