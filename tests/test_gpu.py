"""How NVML's answers are interpreted. A stand-in library with the same calls is used; no GPU is needed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import machine
from kit.labs.share.lab import roles
from kit.labs.share.watch import Watch
from kit.machine import NVML_FINE, NVML_TOO_SMALL, NVML_UNKNOWN, gpu_process_bytes
from tests.labs.share.conftest import share
from tests.standins.compiled import shared_library

MIB = 2**20
BUS = "00000000:19:00.0"


class StandIn:
    """NVML with one GPU and the given processes on it: (pid, bytes)."""

    def __init__(self, *processes: tuple[int, int]) -> None:
        self.processes = processes

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, _gpu: Any) -> int:  # noqa: N802 - the library's own name
        return NVML_FINE if bus == BUS.encode() else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _gpu: Any, count: Any, into: Any) -> int:  # noqa: N802 - as above
        there, room = len(self.processes), count._obj.value
        count._obj.value = there
        if there > room:
            return NVML_TOO_SMALL
        for place, (pid, used) in enumerate(self.processes):
            into[place].pid, into[place].used = pid, used
        return NVML_FINE


def test_a_process_has_what_is_listed_under_its_number():
    library = StandIn((10, 500 * MIB), (11, 700 * MIB))
    assert gpu_process_bytes(library, BUS, 11) == 700 * MIB
    assert gpu_process_bytes(StandIn((11, 3 * MIB), (11, 4 * MIB)), BUS, 11) == 7 * MIB


def test_another_process_of_that_number_is_not_taken_for_it():
    """In a container the driver may list the host's pids."""
    assert gpu_process_bytes(StandIn((11, 100 * MIB)), BUS, 11, at_least=200 * MIB) is None


def test_there_is_no_answer_where_the_driver_gives_none():
    assert gpu_process_bytes(None, BUS, 11) is None
    assert gpu_process_bytes(StandIn(), BUS, 11) is None
    assert gpu_process_bytes(StandIn((10, MIB)), BUS, 11) is None
    assert gpu_process_bytes(StandIn((11, NVML_UNKNOWN)), BUS, 11) is None
    assert gpu_process_bytes(StandIn((11, MIB)), "00000000:20:00.0", 11) is None


class Listing(StandIn):
    """NVML with two GPUs that have the same processes."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - as above
        count._obj.value = 2
        return NVML_FINE

    def nvmlDeviceGetHandleByIndex_v2(self, _number: int, _handle: Any) -> int:  # noqa: N802 - as above
        return NVML_FINE


def test_each_listed_process_has_its_bytes_on_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvml", lambda: Listing((10, 5 * MIB), (11, 7 * MIB), (12, NVML_UNKNOWN)))
    assert machine.gpu_bytes_by_pid() == {10: 10 * MIB, 11: 14 * MIB}
    monkeypatch.setattr(machine, "nvml", lambda: None)
    assert machine.gpu_bytes_by_pid() == {}


@pytest.mark.parametrize(
    ("device", "listed", "metrics"),
    [
        ("cuda", {}, set()),  # a container that hides processes, or no driver
        ("cuda", {1: 5 * MIB}, set()),  # the host's pids
        ("cuda", {os.getpid(): 5 * MIB}, {("seen_on_gpus", 5 * MIB)}),
        ("cpu", {os.getpid(): 5 * MIB}, {("seen_resident", 3 * MIB)}),
    ],
)
def test_an_observer_takes_no_host_memory_for_a_gpus(
    device: str, listed: dict[int, int], metrics: set[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpu_bytes_by_pid", lambda: listed)
    monkeypatch.setattr(machine, "resident", lambda _: 3 * MIB)
    watch = Watch({os.getpid(): "a.trainer"}, tmp_path, [0], place=0, on_gpus=device == "cuda")
    rows = watch.look().rows
    seen = {(row.metric, row.value) for row in rows if row.ids.get("who") == "a.trainer" and row.unit == "B"}
    assert seen == metrics


def test_the_structure_is_as_large_as_the_library_s():
    """Two 32-bit numbers follow a 32-bit and a 64-bit one, which is aligned to 8 bytes."""
    assert (ctypes.sizeof(machine.GpuProcess), machine.GpuProcess.used.offset) == (24, 8)


class Busy:
    """NVML with two GPUs, one of which does not report its utilisation."""

    def __init__(self, *percent: int) -> None:
        self.percent = percent

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - the library's own name
        count._obj.value = len(self.percent)
        return NVML_FINE

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:  # noqa: N802 - as above
        handle._obj.value = number + 1
        return NVML_FINE

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:  # noqa: N802 - as above
        rates._obj.gpu = max(0, self.percent[handle.value - 1])
        return NVML_FINE if self.percent[handle.value - 1] >= 0 else NVML_TOO_SMALL


@pytest.mark.parametrize(("library", "message"), [(Busy(40, 7), [40, 7]), (Busy(40, -1), []), (Busy(), []), (None, [])])
def test_how_busy_each_gpu_is(library: Any, message: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvml", lambda: library)
    assert machine.busy_gpus() == message


# With nvml.h's own structures: two GPUs, and the processes on the first of them.
NVML = """
#include <string.h>
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;
typedef struct { unsigned int gpu, memory; } Rates;
static Process listed[] = { PROCESSES };
static const unsigned int count = sizeof listed / sizeof *listed;
int nvmlInit_v2(void) { return INIT; }
int nvmlSystemGetDriverVersion(char *text, unsigned int length) { strncpy(text, "580.95.05", length); return 0; }
int nvmlDeviceGetCount_v2(unsigned int *gpus) { *gpus = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int number, void **gpu) { *gpu = (void *)(unsigned long)(number + 1); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **gpu) { *gpu = (void *)1; return strcmp(bus, BUS) ? 6 : 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, Rates *rates) { rates->gpu = 10 * (unsigned long)gpu; return 0; }
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned int *room, Process *into) {
    unsigned int there = gpu == (void *)1 ? count : 0, given = *room;
    if (LISTING) return LISTING;
    *room = there;
    if (there > given) return 7;
    memcpy(into, listed, there * sizeof *listed);
    return 0;
}
#endif
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a compiled stand-in the driver's library, and returns what `machine` makes of it."""

    def install(processes: str = "{11, 5, 0, 0}", **defined: object) -> Any:
        defined = {"INIT": 0, "LISTING": 0, "PROCESSES": processes, "BUS": f'"{BUS}"', **defined}
        monkeypatch.setattr(machine, "NVML", shared_library(tmp_path, NVML, **defined))
        machine.nvml.cache_clear()
        return machine.nvml()

    yield install
    machine.nvml.cache_clear()


@pytest.mark.parametrize(
    ("processes", "own", "every"),
    [
        pytest.param("{11, 5, 0, 0}", 5, {11: 5}, id="own"),
        pytest.param("{10, 7, 0, 0}, {11, 5, 0, 0}", 5, {10: 7, 11: 5}, id="own-and-foreign"),
        pytest.param("{10, 7, 0, 0}", None, {10: 7}, id="foreign"),
        pytest.param("{11, 5, 1, 0}, {11, 6, 2, 0}", 11, {11: 11}, id="partitions"),
        pytest.param("{11, ~0ull, 0, 0}", None, {}, id="bytes-unknown"),
    ],
)
def test_the_processes_that_the_drivers_library_lists(
    driver: Callable[..., Any], processes: str, own: int | None, every: dict[int, int]
) -> None:
    library = driver(processes)
    assert gpu_process_bytes(library, BUS, 11) == own
    assert gpu_process_bytes(library, "00000000:20:00.0", 11) is None
    assert machine.gpu_bytes_by_pid() == every
    assert machine.busy_gpus() == [10, 20]


@pytest.mark.parametrize("error", [3, 4, 999], ids=["not-supported", "no-permission", "unknown"])
def test_a_library_that_lists_no_processes(driver: Callable[..., Any], error: int) -> None:
    """A container without the host's pids, or a GPU in MIG mode that is asked as a whole."""
    library = driver(LISTING=error)
    assert gpu_process_bytes(library, BUS, 11) is None
    assert machine.gpu_bytes_by_pid() == {}


@pytest.mark.parametrize("defined", [{"INIT": 18}, {"OLD": 1}], ids=["other-than-the-kernels", "too-old"])
def test_a_library_that_cannot_be_used(driver: Callable[..., Any], defined: dict[str, object]) -> None:
    assert driver(**defined) is None
    assert machine.gpu_bytes_by_pid() == {}
    assert machine.busy_gpus() == []


def test_a_box_without_a_driver_has_no_library(monkeypatch):
    monkeypatch.setattr(machine, "NVML", "libno-such-driver.so.1")
    machine.nvml.cache_clear()
    assert machine.nvml() is None
    machine.nvml.cache_clear()


# As listed by torch 2.13's wheels for CUDA 13.
WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "built_for", "fits"),
    [
        *((gpu, WHEEL, True) for gpu in [(9, 0), (8, 9), (10, 3), (12, 1), (13, 0)]),  # the last from PTX
        ((7, 0), WHEEL, False),
        ((10, 0), ["sm_80", "sm_90a"], False),
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # code for 8.0 runs on 8.9
        ((8, 0), ["sm_86"], False),
        ((10, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX is compiled for later GPUs
        ((7, 5), ["sm_80", "compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["compute_90a"], False),  # for that architecture only
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f", "compute_100f"], True),  # for the family
        ((12, 0), ["compute_100f"], False),
        ((9, 0), [], False),
        ((9, 0), ["gfx90a"], False),  # torch for ROCm
    ],
)
def test_code_runs_on_later_gpus_of_its_generation_and_ptx_on_all_later_ones(capability, built_for, fits):
    """`assumed`: from the CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility"."""
    assert machine.runs_on_gpu(built_for, capability) is fits


UUIDS = ("GPU-aa11", "GPU-ab22", "GPU-bb33")


@pytest.mark.parametrize(
    ("visible", "places"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("GPU-bb,GPU-aa11", [2, 0]),
        ("GPU-a", []),  # the beginning of two
        ("0,7,1", [0]),  # CUDA stops at the first name that it does not know
        ("-1,0", []),
        ("MIG-cc44", []),
    ],
)
def test_the_gpus_that_ranks_will_see(visible: str | None, places: list[int]) -> None:
    assert [*machine.visible_gpus(UUIDS, visible)] == places


def test_gpus_that_are_hidden_from_ranks_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab share places pipelines on the GPUs that it counts; one that ranks cannot see would be refused by them."""
    lines = "\\n".join(f"{uuid}, {1000 * (number + 1)}" for number, uuid in enumerate(UUIDS))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [free >> 20 for free in machine.free_gpu_bytes()] == [2000]
    assert {device for role in roles(share()) for device in role.devices} == {0}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [free >> 20 for free in machine.free_gpu_bytes()] == [1000, 2000, 3000]
    assert {device for role in roles(share()) for device in role.devices} == {0, 1}  # of two devices
