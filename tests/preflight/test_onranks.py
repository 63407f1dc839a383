"""The rank side of GPU probes, with stand-ins for what only a GPU has: each runs to its end and returns what the probe reads.

The calls themselves are `assumed`: cudaHostRegister and cudaHostUnregister take addresses as numbers and return a cudaError
(torch/csrc/cuda/shared/cudart.cpp); reduce_tensor and rebuild_cuda_tensor are those of torch/multiprocessing/reductions.py; suspend, resume
and memory_stats belong to the NCCL backend (torch/csrc/distributed/c10d/init.cpp of 2.12 and later).
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit import nccl
from kit.measure.phase import DeviceMemory
from kit.preflight import onranks
from tests.preflight.test_judging import COPIES, SUSPENDED, VIEW

GPU = types.SimpleNamespace(type="cuda", index=0)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which the preflight itself asks")


@pytest.fixture
def cudart(monkeypatch):
    """Stand-in for the driver's registration calls; records their arguments."""
    asked: list[tuple[str, int]] = []
    fake = types.SimpleNamespace(
        status=0,
        asked=asked,
        cudaHostRegister=lambda address, size, flags: asked.append(("register", size)) or fake.status,
        cudaHostUnregister=lambda address: asked.append(("unregister", address)) or 0,
    )
    plain = torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: plain(*args, **kwargs))  # noqa: PLW0108 - it takes an option away
    return fake


def test_registered_memory_is_copied_from_and_given_back(cudart):
    size = 4 * onranks.PIECE
    there = torch.zeros(size, dtype=torch.uint8)
    seen = onranks.copies(there.data_ptr(), there)
    assert {"populate", "memlock", *seen} == COPIES.keys()
    assert cudart.asked == [("register", size), ("unregister", there.data_ptr())]
    assert seen["right"]
    assert there.min() == 5  # the values from the device


def test_a_refused_registration_is_not_copied_from_nor_taken_back(cudart):
    cudart.status = 801
    there = torch.zeros(4096, dtype=torch.uint8)
    seen = onranks.copies(there.data_ptr(), there)
    assert (seen["status"], seen["reason"]) == (801, "CUDA gives no reason")
    assert "h2d" not in seen
    assert [name for name, _ in cudart.asked] == ["register"]


def test_a_host_allocation_of_every_kind_is_measured():
    seen = onranks.registered(size=16 * 2**20)
    assert all(seen[name] > 0 for name in ("populate", "copy_in", "copy_out"))


@pytest.mark.parametrize("stays", [False, True])
def test_a_resized_buffer_is_seen_to_leave_or_to_stay(monkeypatch, stays):
    if stays:  # an allocator that does not free memory
        monkeypatch.setattr(onranks, "let_go", lambda: None)
        monkeypatch.setattr(onranks, "held", lambda: 0)
    seen = onranks.resized(size=128 * 2**20)
    assert seen["same"]
    assert (seen["left"] >= 0.9 * 128 * 2**20) is not stays


def test_a_digest_sees_a_byte_that_moved():
    flat = torch.arange(256, dtype=torch.uint8)
    before = onranks.digests(flat, [])
    flat[[8, 16]] = flat[[16, 8]]
    assert onranks.digests(flat, []) != before


def test_what_the_driver_tells_is_read_once_both_hold_their_block(monkeypatch):
    order: list[str] = []
    plain = torch.ones
    reported = DeviceMemory(allocated=1, reserved=2, peak_allocated=3, driver_used=4, process_used=None)
    monkeypatch.setattr(onranks, "device", lambda: GPU)
    monkeypatch.setattr(torch, "ones", lambda *size, dtype, device: order.append("block") or plain(1, dtype=dtype))
    monkeypatch.setattr(onranks, "meet", lambda: order.append("meet"))
    monkeypatch.setattr(onranks, "device_memory", lambda name: order.append("read") or reported)
    seen = onranks.driver_view()
    assert seen is not None
    assert seen.keys() == VIEW.keys()
    assert order == ["block", "meet", "read", "meet"]


@pytest.fixture
def shared(monkeypatch):
    """Stand-in for torch's sharing of memory between processes, within one process."""
    from torch.multiprocessing import reductions

    given: list[torch.Tensor] = []
    monkeypatch.setattr(reductions, "reduce_tensor", lambda value: (None, (given.append(value) or len(given) - 1,)))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda index: given[index])
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    yield given
    onranks.close()


def test_shared_memory_is_read_whole_and_written_back(shared):
    offered = onranks.offer(size=4096)
    assert not onranks.written()
    assert onranks.take(handle=offered["handle"], size=4096, keep=False) == {"same": True}
    assert onranks.written()
    shared[0][3] = 0
    assert onranks.take(handle=offered["handle"], size=4096, keep=False) == {"same": False}
    assert onranks.close() == 0


def test_memory_that_cannot_be_shared_is_refused_in_one_line(shared, monkeypatch):
    from torch.multiprocessing import reductions

    def refuses(*_: Any) -> None:
        raise RuntimeError("pidfd_getfd: Operation not permitted\nsecond line")

    offered = onranks.offer(size=64)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", refuses)
    refused = {"error": "RuntimeError: pidfd_getfd: Operation not permitted"}
    assert onranks.take(handle=offered["handle"], size=64, keep=True) == refused
    monkeypatch.setattr(reductions, "reduce_tensor", refuses)
    assert onranks.offer(size=64) == refused


class Backend:
    def __init__(self, refuses: str) -> None:
        self.refuses = refuses
        self.calls: list[str] = []

    def memory_stats(self) -> dict[str, int]:
        if self.refuses == "memory_stats":
            raise RuntimeError("built without it\nmore")
        return {"suspend": 64, "suspended": int("suspend" in self.calls)}

    def suspend(self) -> None:
        if self.refuses == "suspend":
            raise RuntimeError("ncclInvalidUsage: it shares its memory\nmore")
        self.calls.append("suspend")

    def resume(self) -> None:
        self.calls.append("resume")


@pytest.mark.parametrize("refuses", ["", "suspend", "memory_stats"])
def test_one_communicator_goes_to_sleep_and_comes_back(monkeypatch, refuses):
    backend = Backend(refuses)
    group = types.SimpleNamespace(_get_backend=lambda where: backend)
    monkeypatch.setattr(onranks, "device", lambda: GPU)
    monkeypatch.setattr(nccl, "no_suspend", lambda *_: "")
    for name, value in {"meet": None, "held": 7, "sums": True}.items():
        monkeypatch.setattr(onranks, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend: group)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    seen = onranks.suspended()
    if refuses == "suspend":
        assert seen["error"] == "RuntimeError: ncclInvalidUsage: it shares its memory"
        return
    if refuses:
        assert seen == {"refused": "NCCL's memory statistics: RuntimeError: built without it"}
        return
    assert seen.keys() == SUSPENDED.keys()
    assert backend.calls == ["suspend", "resume"]
    assert [one["suspended"] for one in seen["stats"]] == [0, 1]


def test_suspend_is_asked_of_versions_first(monkeypatch):
    assert onranks.suspended() == {"refused": "needs a GPU, but these ranks run on the CPU"}
    monkeypatch.setattr(onranks, "device", lambda: GPU)
    assert onranks.suspended() == {"refused": "there is no NCCL: this torch is built without CUDA"}


def test_options_are_compared_field_by_field():
    config = types.SimpleNamespace(max_ctas=4, net_name=None, copy=print)
    stored = types.SimpleNamespace(
        _timeout=types.SimpleNamespace(total_seconds=lambda: 600.0), config=config, is_high_priority_stream=True
    )
    about = {"group_desc": "ONE", "bound_device_id": None, "_device_types": [torch.device("cpu")]}
    group = types.SimpleNamespace(_get_backend=lambda where: types.SimpleNamespace(options=stored), **about)
    before = [onranks.options(group)]
    assert before[0] == {
        "backend": "SimpleNamespace",
        "timeout_s": 600.0,
        "description": "ONE",
        "max_ctas": 4,
        "net_name": None,
        "is_high_priority_stream": True,
    }
    config.max_ctas = 32
    assert onranks.differences(before, [onranks.options(group)]) == {"group 0: max_ctas 4 -> 32"}


def test_whether_world_is_ready_is_asked_of_its_backend(monkeypatch):
    backends = [types.SimpleNamespace(_is_initialized=lambda: False), types.SimpleNamespace()]
    world = types.SimpleNamespace(_get_backend=lambda where: backends.pop(0))
    assert onranks.ready_at_once() is None
    monkeypatch.setattr(onranks, "device", lambda: GPU)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    assert [onranks.ready_at_once(), onranks.ready_at_once()] == [False, None]
