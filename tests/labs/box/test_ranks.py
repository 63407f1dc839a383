"""The rank side of GPU probes, with stand-ins for what only a GPU has: each runs to its end and records what the rules read.

The calls themselves are `assumed`: cudaHostRegister and cudaHostUnregister take addresses as numbers and return a cudaError
(torch/csrc/cuda/shared/cudart.cpp); reduce_tensor and rebuild_cuda_tensor are those of torch/multiprocessing/reductions.py; suspend, resume
and memory_stats belong to the NCCL backend (torch/csrc/distributed/c10d/init.cpp of 2.12 and later); allocator settings are changed by
torch._C._accelerator_setAllocatorSettings (2.9 and later).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from kit import nccl
from kit.labs.box.ranks import probes
from kit.labs.box.ranks.probes import Probes
from kit.measure.phase import DeviceMemory

ON_GPU = types.SimpleNamespace(type="cuda", index=0)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which the preflight itself asks")


class Rank:
    """A context that keeps what is recorded: the last value and text of each metric."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.values: dict[str, float | None] = {}
        self.texts: dict[str, str] = {}

    def record(self, metric: str, value: float | None, unit: str = "1", *, text: str = "", **_: Any) -> None:
        self.values[metric] = value
        self.texts[metric] = text


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Probes:
    """The probes of rank 0 of one, without collectives."""
    monkeypatch.setattr(Probes, "meet", lambda self: None)
    monkeypatch.setattr(Probes, "tell", lambda self, note, source: note)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return Probes(Rank())  # type: ignore[arg-type]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Any:
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


def test_registered_memory_is_copied_from_and_given_back(cudart: Any, lab: Any) -> None:
    mapped = torch.zeros(4 * 2**20, dtype=torch.uint8)
    lab.copies(mapped.data_ptr(), mapped, "memlock 64 KiB")
    assert cudart.asked == [("register", mapped.numel()), ("unregister", mapped.data_ptr())]
    assert (lab.ctx.values["wrong_bytes"], lab.ctx.values["register_error"]) == (0, 0)
    assert mapped.min() == 5  # the values from the device
    kinds = ("registered", "pinned", "pageable")
    assert all(lab.ctx.values[f"{kind}_to_{place}"] > 0 for kind in kinds for place in ("device", "host"))


def test_a_refused_registration_is_not_copied_from_nor_taken_back(cudart: Any, lab: Any) -> None:
    cudart.status = 801
    mapped = torch.zeros(4096, dtype=torch.uint8)
    lab.copies(mapped.data_ptr(), mapped, "memlock 64 KiB")
    assert lab.ctx.texts["register_error"] == "cudaError 801: CUDA gives no reason; memlock 64 KiB"
    assert "registered_to_device" not in lab.ctx.values
    assert [name for name, _ in cudart.asked] == ["register"]


@pytest.mark.parametrize("stays", [False, True])
def test_a_resized_buffer_is_seen_to_leave_or_to_stay(monkeypatch: pytest.MonkeyPatch, lab: Any, stays: bool) -> None:
    if stays:  # an allocator that does not free memory
        monkeypatch.setattr(probes, "bytes_in_use", lambda: 0)
    lab.resize(1)
    assert lab.ctx.values["views_changed"] == 0
    assert (lab.ctx.values["given_back"] >= 0.9) is not stays


def test_a_weighted_sum_sees_a_byte_that_moved() -> None:
    flat = torch.arange(256, dtype=torch.uint8)
    before = probes.weighted_sum(flat)
    flat[[8, 16]] = flat[[16, 8]]
    assert probes.weighted_sum(flat) != before


def test_the_driver_is_read_once_all_ranks_hold_their_block(monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    order: list[str] = []
    plain = torch.ones
    reported = DeviceMemory(allocated=1, reserved=2, peak_allocated=3, driver_used=4, process_used=None)
    monkeypatch.setattr(probes, "device", lambda: ON_GPU)
    monkeypatch.setattr(torch, "ones", lambda *size, dtype, device: order.append("block") or plain(1, dtype=dtype))
    monkeypatch.setattr(Probes, "meet", lambda self: order.append("meet"))
    monkeypatch.setattr(probes, "device_memory", lambda name: order.append("read") or reported)
    lab.driver_memory(1)
    assert (lab.ctx.values["seen_reserved"], lab.ctx.values["seen_process_used"]) == (2, None)
    assert order == ["block", "meet", "read", "meet"]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Stand-in for torch's sharing of memory between processes, within one process."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(probes, "SHARED", 4096)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda value: (None, (given.append(value) or len(given) - 1,)))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda index: given[index])
    for name in ("ipc_collect", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return given


def test_shared_memory_is_read_whole_and_written_back(
    shared: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, lab: Any
) -> None:
    assert lab.hand_over()
    assert lab.ctx.values["wrong_words"] == 0
    monkeypatch.setattr(
        reductions, "rebuild_cuda_tensor", lambda index: shared[index].clone()
    )  # another process's copy
    assert lab.hand_over()
    assert (lab.ctx.values["wrong_words"], lab.ctx.texts["wrong_words"]) == (
        1,
        "the owner does not see the reader's word",
    )


@pytest.mark.parametrize(
    ("rank", "order"), [(0, ["meet", "collect", "meet", "meet", "collect"]), (1, ["meet", "meet", "collect", "meet"])]
)
def test_memory_of_another_rank_is_released_in_the_order_of_a_sync(
    shared: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, lab: Any, rank: int, order: list[str]
) -> None:
    """Its owner first: torch then keeps the block until the reader is done and the owner collects it. What still stays is recorded."""
    seen: list[str] = []
    sizes = iter([100, 164])
    lab.ctx.rank = rank
    monkeypatch.setattr(probes, "device", lambda: ON_GPU)
    monkeypatch.setattr(Probes, "hand_over", lambda *_, **__: True)
    monkeypatch.setattr(Probes, "meet", lambda _: seen.append("meet"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: seen.append("collect"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(sizes))
    lab.ipc(1)
    assert seen == order
    assert lab.ctx.values.get("still_allocated") == (64 if rank == 0 else None)


@pytest.mark.parametrize("step", ["reduce_tensor", "rebuild_cuda_tensor"])
def test_memory_that_cannot_be_shared_is_refused_in_one_line(
    shared: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, lab: Any, step: str
) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("pidfd_getfd: Operation not permitted\nsecond line")

    monkeypatch.setattr(reductions, step, refuses)
    assert not lab.hand_over()
    assert lab.ctx.texts["refused"].startswith("RuntimeError: pidfd_getfd: Operation not permitted; ")
    assert "wrong_words" not in lab.ctx.values


def test_memory_outside_of_an_expandable_segment_is_no_answer_about_one(shared: list[torch.Tensor], lab: Any) -> None:
    lab.resize(1, expandable=True)
    assert lab.ctx.values == {"refused": 1}
    assert not lab.hand_over(expandable=True)
    assert lab.ctx.texts["refused"].startswith("the allocator took no expandable segment")


def test_allocator_settings_are_as_the_environment_has_them_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changes.append)
    for given, after in (("", "expandable_segments:False"), ("max_split_size_mb:64", "max_split_size_mb:64")):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
        with probes.expandable_segments():
            assert changes == ["expandable_segments:True"]
        assert changes.pop() == after
        changes.clear()


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
def test_a_communicator_goes_to_sleep_and_comes_back(monkeypatch: pytest.MonkeyPatch, lab: Any, refuses: str) -> None:
    backend = Backend(refuses)
    group = types.SimpleNamespace(_get_backend=lambda where: backend)
    monkeypatch.setattr(probes, "device", lambda: ON_GPU)
    monkeypatch.setattr(nccl, "no_suspend", lambda *_: "")
    monkeypatch.setattr(probes, "bytes_in_use", lambda: 100 - 40 * len(backend.calls))
    monkeypatch.setattr(probes, "sums_are_exact", lambda *_: True)
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend: group)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    lab.suspend(1)
    values, texts = lab.ctx.values, lab.ctx.texts
    if refuses == "suspend":
        assert (values["suspend_wrong"], texts["suspend_wrong"]) == (
            1,
            "RuntimeError: ncclInvalidUsage: it shares its memory",
        )
    elif refuses:
        assert texts == {"suspend_refused": "NCCL's memory statistics: RuntimeError: built without it"}
    else:
        assert backend.calls == ["suspend", "resume"]
        assert (values["suspend_wrong"], values["suspend_freed"]) == (0, 40)
        assert "'suspended': 0} before, " in texts["suspend_freed"]


def test_suspend_is_asked_of_versions_first(monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    lab.suspend(1)
    assert lab.ctx.values == {}
    monkeypatch.setattr(probes, "device", lambda: ON_GPU)
    monkeypatch.setattr(probes.nccl, "running", lambda: None)
    lab.suspend(1)
    assert lab.ctx.texts == {"suspend_refused": "there is no NCCL: this torch is built without CUDA"}


def test_options_are_compared_field_by_field() -> None:
    config = types.SimpleNamespace(max_ctas=4, net_name=None, copy=print)
    stored = types.SimpleNamespace(
        _timeout=types.SimpleNamespace(total_seconds=lambda: 600.0), config=config, is_high_priority_stream=True
    )
    about = {"group_desc": "ONE", "bound_device_id": None, "_device_types": [torch.device("cpu")]}
    group = types.SimpleNamespace(_get_backend=lambda where: types.SimpleNamespace(options=stored), **about)
    before = [probes.options_of(group)]
    assert before[0] == {
        "backend": "SimpleNamespace",
        "timeout_s": 600.0,
        "description": "ONE",
        "max_ctas": 4,
        "net_name": None,
        "is_high_priority_stream": True,
    }
    config.max_ctas = 32
    assert probes.changed_options(before, [probes.options_of(group)]) == ["group 0: max_ctas 4 -> 32"]


def test_seats_of_ranks_that_share_a_gpu_need_its_default_mode(monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    """`assumed`: the names of the modes are nvidia-smi's (`nvidia-smi --help-query-gpu`, compute_mode)."""
    code = {"gpu": "sm_90", "built_for": ["sm_90"], "torch": True, "nccl_why": ""}
    plain = torch.arange
    monkeypatch.setattr(probes, "device", lambda: ON_GPU)
    monkeypatch.setattr(probes, "gpu_code", lambda *_: [code])
    monkeypatch.setattr(torch, "arange", lambda *args, device, **kwargs: plain(*args, **kwargs))  # noqa: PLW0108 - as above
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv(probes.WATCHDOG, "0")
    lab.ctx.config = types.SimpleNamespace(device="cuda")
    for devices, mode, refused in (
        (["cuda:0", "cuda:0"], "Default", False),
        (["cuda:0", "cuda:0"], "Exclusive_Process", True),
        (["cuda:0", "cuda:1"], "Exclusive_Process", False),
    ):
        lab.ctx.devices = devices
        monkeypatch.setattr(probes.machine, "query_gpus", lambda *_, mode=mode, **__: ([[mode], [mode]], None))
        lab.seats(1)
        assert (lab.ctx.values["exclusive"], lab.ctx.texts["exclusive"]) == (refused, mode)
    assert lab.ctx.texts["no_code"] == "sm_90: torch has code (built for sm_90); NCCL has kernels"
    assert {lab.ctx.values[name] for name in ("elsewhere", "kernel_error", "dead_context", "no_code", "watchdog")} == {
        0
    }
    monkeypatch.setattr(probes.machine, "query_gpus", lambda *_, **__: ([], "nvidia-smi did not answer within 3 s"))
    lab.seats(1)
    assert (lab.ctx.values["exclusive"], lab.ctx.texts["exclusive"]) == (None, "nvidia-smi did not answer within 3 s")


def test_whether_world_is_connected_is_asked_of_its_backend(monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    backends = [types.SimpleNamespace(_is_initialized=lambda: False), types.SimpleNamespace()]
    world = types.SimpleNamespace(_get_backend=lambda where: backends.pop(0))
    plain = torch.ones
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(probes, "device", lambda: ON_GPU)
    monkeypatch.setattr(probes, "sums_are_exact", lambda *_: True)
    monkeypatch.setattr(torch, "ones", lambda *size, device: plain(*size))  # noqa: PLW0108 - as above
    monkeypatch.setattr(dist, "all_reduce", lambda value: None)
    lab.all_reduce(1)
    assert lab.ctx.values["unconnected"] is True
    lab.all_reduce(1)
    assert lab.ctx.values["unconnected"] is None
    assert lab.ctx.texts["unconnected"] == "only some versions of torch show NCCL's state"
