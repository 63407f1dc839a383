"""Which device a rank works on, and why, and the environment of ranks that may use a GPU. Runs on the rank, before anything touches CUDA.

The settings are read off the sources named beside them; no GPU has confirmed them yet.

A driver that was started before a fork is dead after it: every rank would find no GPU. torchrun's own config counts
GPUs before it forks, and so do modules that are loaded for the ranks. `spare` has a child count, which is gone afterwards. A module
that asks a GPU for more than its presence starts the driver all the same; `poisoned` detects it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kit import machine, nccl


class Setting(NamedTuple):
    """One variable of the environment. `others` are names with the same meaning: with one of them set it is left alone.
    `{folder}` in a value is the World's own folder, which goes when the World does."""

    name: str
    value: str
    why: str
    others: tuple[str, ...] = ()


# torch: torch/csrc/distributed/c10d/ProcessGroupNCCL.{hpp,cpp} of 2.9 to 2.13. NCCL: src/bootstrap.cc of 2.28 to 2.30.
SETTINGS = (
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "after a collective that failed or timed out, the watchdog would end the survivor by SIGABRT (handleException rethrows)",
        ("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "WORLD's heartbeat monitor would write a trace and then end every rank: the watchdog's dump signal goes over the store",
    ),
    Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "the monitor would end a rank whose watchdog is busy for eight minutes, such as one that a debugger holds",
    ),
    Setting(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "the watchdog would rethrow a CUDA error of the rank and end it by SIGABRT, before the rank can report it",
    ),
    Setting(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "1",
        "the watchdog sleeps four times this with its lock held, 60 s by default: the group could not be given back before",
    ),
    Setting(
        "TORCH_FR_DUMP_TEMP_FILE",
        "{folder}/nccl_trace_rank_",
        "a trace that is written all the same would stay in /tmp or ~/.cache (DebugInfoWriter in c10d/FlightRecorder.cpp)",
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    ),
    Setting(
        "NCCL_RAS_ENABLE",
        "0",
        "NCCL's RAS opens and closes a thread and sockets: the counts of threads and sockets would not be exact",
    ),
    Setting(
        "NCCL_ALGO",
        "^NVLS",
        "in deterministic mode torch sets this with the first group, after NCCL has read it for WORLD: later groups would differ",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "Megatron overlaps communication by the order of launches; the driver reads it when the context is made",
    ),
    Setting(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        "PyTorch looks for it at the first matrix product, and without it refuses deterministic mode from then on",
    ),
)


def prepare_device(environ: MutableMapping[str, str], wanted: str, folder: Path) -> None:
    """Put the settings into a rank's environment, before the driver is asked anything. What a person has set stays."""
    if wanted == "cpu" or (torch.version.cuda is None and torch.version.hip is None):
        return
    for setting in SETTINGS:
        if not any(name in environ for name in (setting.name, *setting.others)):
            environ[setting.name] = setting.value.format(folder=folder)


class Seat(NamedTuple):
    """A rank's device, why it is that one, and what NCCL must find in the environment before its first communicator."""

    device: torch.device
    why: str
    env: Mapping[str, str]


def choose_device(wanted: str, number: int, neighbours: int, devices: Sequence[int] = (), local: int = 0) -> Seat:
    """`wanted` is auto, cpu or cuda; `number` counts the ranks of this machine, of which there are `neighbours`.

    Auto takes CUDA where it is usable. Fewer GPUs than ranks are shared, in a way that the NCCL of this process knows.
    `devices` places the ranks of this World on purpose: this one, `local` among them, on `devices[local]`.
    """
    if wanted == "cpu":
        return Seat(torch.device("cpu"), "asked for", {})
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is a build without CUDA"
    elif is_poisoned():
        reason = (
            "a module that was loaded for the ranks started CUDA before they were forked, so that it is dead in them"
        )
    elif not torch.cuda.is_available():
        reason = no_device(torch.version.cuda)
    else:
        there = torch.cuda.device_count()
        counted = f"{there} CUDA device{'s' * (there > 1)} for {neighbours} rank{'s' * (neighbours > 1)}"
        if devices:
            gpu = devices[local]
            # All ranks of a World get the same environment: a communicator between ranks that share and ranks that do not must agree.
            repeated = len({*devices}) < len(devices)
            if gpu >= there:
                hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
                left = "there are" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden} leaves"
                raise RuntimeError(f"devices={list(devices)} names GPU {gpu}, and {left} {there}, numbered from 0")
            if seat := place_on_gpu(gpu, number, f"GPU {gpu} of devices={list(devices)}", shared=repeated):
                return seat
            raise RuntimeError(f"devices={list(devices)} puts several ranks on one GPU, which needs NCCL")
        if seat := place_on_gpu(number % there, number, counted, shared=there < neighbours):
            return seat
        reason = f"{counted}; without NCCL each rank needs its own"
    if wanted == "cuda":
        raise RuntimeError(f"device='cuda' cannot be had: {reason}")
    return Seat(torch.device("cpu"), reason, {})


def no_device(cuda: str | None) -> str:
    """Why a torch for this CUDA finds no GPU, and what to install if there is a driver."""
    if cuda is None or not machine.has_gpu_driver():
        return "torch finds no usable CUDA device"
    driver = machine.gpu_driver() or "of unknown version"
    return (
        f"torch {torch.__version__} for CUDA {cuda} finds no usable GPU with the driver {driver}; install a driver for CUDA {cuda} or "
        "later, or a torch for an older CUDA, and check CUDA_VISIBLE_DEVICES"
    )


def place_on_gpu(gpu: int, number: int, why: str, *, shared: bool) -> Seat | None:
    """This rank on this GPU; None where several ranks are to share it and there is no NCCL."""
    if not shared:
        return Seat(torch.device("cuda", gpu), why, {})
    if (sharing := nccl.sharing_env(nccl.running(), number)) is None:
        return None
    why = f"{why}, shared {sharing.words}; communication times: {nccl.SHARED_GPU}"
    return Seat(torch.device("cuda", gpu), why, sharing.env)


# -- in the process that forks the ranks -----------------------------------------------------------------------------------


_C: Any = torch._C
COUNT = "_cuda_getDeviceCount"
_plain = getattr(_C, COUNT, None)  # a build without CUDA has none


def spare(device: str) -> None:
    """From now on, for ranks on this device: cpu, for which there are no GPUs, or another one."""
    if _plain is not None:
        setattr(_C, COUNT, (lambda: 0) if device == "cpu" else counted_by_a_child)


def restore() -> None:
    """In a rank, which has its own driver."""
    if _plain is not None:
        setattr(_C, COUNT, _plain)


def is_poisoned() -> bool:
    """Whether CUDA was started in this process's parent before the fork."""
    return bool(torch.cuda._is_in_bad_fork())


@functools.cache
def counted_by_a_child() -> int:
    assert _plain is not None
    child = os.fork()
    if not child:
        count = 0
        try:
            count = _plain()
        finally:
            os._exit(min(count, 255))
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
