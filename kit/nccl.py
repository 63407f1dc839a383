"""What this process's NCCL can do, decided from the version that the library itself reports; this needs no GPU.

Every room may use it, and ranks do. Nothing here touches a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LIBRARY = "libnccl.so.2"  # torch loads it under this name, wherever the file is
SUSPENDS = (2, 29, 7)
SUSPENDS_TORCH = (2, 12)
SHARES_GPUS = (2, 30, 0)
SHARED_GPU = "shared GPU, not a product number"  # the note beside communication times of ranks that share a GPU
# The first release with kernels compiled for a generation of GPUs, by major compute capability, and the oldest capability with compiled
# kernels under CUDA 13 (from makefiles/common.mk; the releases are from the history of that file).
COMPILED_SINCE = {9: (2, 15, 1), 10: (2, 25, 1), 11: (2, 27, 5), 12: (2, 25, 1)}
OLDEST_WITH_CUDA_13 = (7, 5)
MOST_CTAS = "4"  # a communicator's kernels must fit on the GPU beside those of the ranks it waits for

Version = tuple[int, int, int]


def running() -> Version | None:
    """Return the version of the NCCL in this process, which a preload may have changed; None if torch brought none."""
    try:
        library = ctypes.CDLL(LIBRARY)
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return inside_torch()
    return decode_version(number.value)


def inside_torch() -> Version | None:
    """Return the NCCL version that torch was built with: a torch with NCCL linked in loads no library of that name."""
    try:
        major, minor, patch = sys.modules["torch"].cuda.nccl.version()[:3]
    except (KeyError, AttributeError):
        return None
    return major, minor, patch


def decode_version(number: int) -> Version:
    """Decode NCCL's version number: 22907 is 2.29.7; before 2.9 the minor version had one digit (2804 is 2.8.4)."""
    if number < 10_000:
        return number // 1000, number // 100 % 10, number % 100
    return number // 10_000, number // 100 % 100, number % 100


def version_text(version: Version | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def no_suspend(nccl: Version | None, torch: str, *, gpus: int | None = None) -> str:
    """Return why communicators cannot be suspended; empty if they can. With `gpus` None only the versions are judged."""
    if gpus == 0:
        return "it needs a GPU (NCCL)"
    if nccl is None:
        return "there is no NCCL: this torch is built without CUDA"
    if nccl < SUSPENDS:
        return f"NCCL {version_text(nccl)} cannot suspend communicators: {version_text(SUSPENDS)} or newer is needed"
    major, minor = torch.split(".")[:2]  # of 2.13.0+cu130
    if (int(major), int(minor)) < SUSPENDS_TORCH:
        return f"torch {torch} does not show how communicators are suspended: 2.12 or newer is needed"
    return ""


def no_code(nccl: Version | None, cuda: str, capability: tuple[int, int]) -> str:
    """Return what this NCCL lacks for a GPU of this compute capability; empty if nothing. `cuda`: the version it was built with.

    A newer generation runs the PTX of the generation before, which the driver compiles when NCCL is first used.
    """
    if nccl is None:
        return ""
    architecture = f"sm_{capability[0]}{capability[1]}"
    since = COMPILED_SINCE.get(capability[0])
    if since is not None and nccl < since:
        return (
            f"NCCL {version_text(nccl)} has no kernels for {architecture}, only what the driver can compile; "
            f"{version_text(since)} and newer have"
        )
    if int(cuda.partition(".")[0]) >= 13 and capability < OLDEST_WITH_CUDA_13:
        return f"NCCL {version_text(nccl)} for CUDA {cuda} has no kernels for {architecture}: use a build for CUDA 12"
    return ""


@contextlib.contextmanager
def unbound(default: Any) -> Iterator[None]:
    """Inside this context, new groups get their own communicators, made by their members alone.

    If the default group is bound to its device, torch splits each new group off the default communicator, and every rank of the World
    must take part (`_new_process_group_helper` in torch/distributed/distributed_c10d.py, 2.9 to 2.13).
    """
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


class Sharing(NamedTuple):
    env: Mapping[str, str]
    words: str  # shown to people


def sharing_env(nccl: Version | None, number: int) -> Sharing | None:
    """Return the environment with which rank `number` can share a GPU; None if there is no NCCL.

    NCCL 2.30 and newer have a flag for it. Older versions refuse two ranks that see the same GPU on the same host, so each rank
    claims to be a separate host, and their data goes over sockets. In a multi-node NVLink domain NCCL would take such hosts for
    nodes of the domain and connect them over NVLink (src/init.cc, ncclMnnvlCheck), so that is switched off.
    """
    if nccl is None:
        return None
    if nccl >= SHARES_GPUS:
        env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": MOST_CTAS, "NCCL_NVLS_ENABLE": "0"}
        return Sharing(env, f"by the multi-rank flag of NCCL {version_text(nccl)}")
    env = {"NCCL_HOSTID": f"{os.uname().nodename}-kit-{number}", "NCCL_NET": "Socket", "NCCL_MAX_CTAS": MOST_CTAS}
    env["NCCL_MNNVL_ENABLE"] = "0"
    return Sharing(
        env, f"by ranks that call themselves hosts of their own: NCCL {version_text(nccl)} has no flag for it"
    )
