"""Sum the memory that NCCL reports for communicators. The groups are stand-ins: only a GPU has communicators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kit.errors import BadInput
from kit.megatron import groups, observe

MIB = 2**20


class StandIn:
    """A group that is also its NCCL backend; without statistics it was never used."""

    def __init__(self, stats: dict[str, int] | None) -> None:
        self.stats = stats

    def _get_backend(self, device: Any) -> StandIn:
        assert device.type == "cuda"
        return self

    def memory_stats(self) -> dict[str, int]:
        if self.stats is None:
            raise RuntimeError("NCCL communicator is not initialized")
        return self.stats


class Older:
    """A group of a torch version without these statistics."""

    def _get_backend(self, device: Any) -> object:
        return object()


class Refusing(StandIn):
    """A group of which NCCL refuses to report statistics."""

    def __init__(self, words: str) -> None:
        self.words = words

    def memory_stats(self) -> dict[str, int]:
        raise RuntimeError(self.words)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    def hold(*made: Any, backend: str = "cuda:nccl") -> None:
        monkeypatch.setattr(groups, "registered", lambda: list(made))
        for group in made:
            monkeypatch.setitem(groups.c10d._world.pg_backend_config, group, backend)

    return hold


def test_statistics_are_added_up_and_groups_that_were_never_used_have_none(registry: Any) -> None:
    used = [StandIn({"suspend": 60 * MIB, "suspended": 0, "persist": 4 * MIB, "total": 64 * MIB}) for _ in range(3)]
    registry(*used, StandIn(None))
    assert groups.communicators() == {"suspend": 180 * MIB, "persist": 12 * MIB, "total": 192 * MIB}


def test_a_suspended_group_is_asked_behind_its_empty_handle(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`assumed`: NCCL's sums include suspended memory (ncclCommMemStats, src/mem_manager.cc of 2.29.7); only `persist` is on the GPU."""
    handle = object()
    inner = StandIn({"suspend": 60 * MIB, "suspended": 1, "persist": 4 * MIB, "total": 64 * MIB})
    registry(handle)
    monkeypatch.setattr(groups, "asleep", [(handle, inner)])
    assert groups.communicators() == {"suspend": 0, "persist": 4 * MIB, "total": 4 * MIB}


def test_where_the_library_says_nothing_there_is_nothing(registry: Any) -> None:
    registry(Older())
    assert groups.communicators() == {}
    registry(StandIn({"total": MIB}), backend="cpu:gloo")
    assert groups.communicators() == {}


def test_a_sum_without_one_of_them_is_no_sum(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> dict[str, int]:
        raise RuntimeError("NCCL error: invalid usage")

    broken = StandIn({})
    monkeypatch.setattr(broken, "memory_stats", fails)
    registry(StandIn({"total": MIB}), broken)
    assert groups.communicators() == {}


REQUIRES = "getMemoryStats() requires NCCL 2.29.7 or later\nException raised from getMemoryStats"


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (StandIn({"total": MIB}), ""),
        (StandIn(None), ""),  # never used yet, but supported
        (Older(), "shows no statistics of communicators"),
        (Refusing(REQUIRES), "cannot ask NCCL: getMemoryStats() requires NCCL 2.29.7 or later"),
        (Refusing("NCCL error: MemManager is disabled"), "cannot ask NCCL: NCCL error: MemManager is disabled"),
    ],
)
def test_suspend_is_refused_by_what_torch_was_built_with(monkeypatch: pytest.MonkeyPatch, world: Any, why: str) -> None:
    """`assumed`: the text is that of torch's NCCLUtils.cpp without NCCL_HAS_COMM_OFFLOAD; the versions themselves are sufficient here."""
    monkeypatch.setattr(groups.nccl, "no_suspend", lambda *_, **__: "")
    monkeypatch.setattr(groups.c10d._world, "default_pg", world)
    monkeypatch.setitem(groups.c10d._world.pg_backend_config, world, "cpu:gloo,cuda:nccl")
    if not why:
        groups.refuse_keeping()
        return
    with pytest.raises(BadInput, match=r"^mode=suspend is not available: torch ") as refused:
        groups.refuse_keeping()
    assert str(refused.value).endswith(why)


@pytest.mark.parametrize("routed", [True, False])
def test_a_routed_communicator_is_finalized_as_torchs_own_destroy_does(
    monkeypatch: pytest.MonkeyPatch, routed: bool
) -> None:
    class Wrapper(list[str]):
        """torch's wrapper of a communicator, and also the communicator."""

        def get_comm(self) -> Wrapper:
            return self

        def finalize(self) -> None:
            self.append("finalized")

    class Group:
        _device_types = ("cpu", "cuda")
        backends: ClassVar[dict[str, Any]] = {"cpu": object(), "cuda": Wrapper()}

        def _get_backend(self, device: str) -> Any:
            return self.backends[device]

    monkeypatch.setattr(groups.c10d, "_TORCHCOMM_AVAILABLE", routed, raising=False)
    monkeypatch.setattr(groups.c10d, "_BackendWrapper", Wrapper, raising=False)
    groups.finalize(Group())
    assert Group.backends["cuda"] == ["finalized"] * routed


def test_both_backends_of_a_group_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(_device_types=[torch.device("cpu"), torch.device("cuda")])
    assert observe._devices(group) == ["cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert observe._devices(group) == ["cpu", "cuda"]
    sums = {"cpu": 4.0, "cuda": 5.0}
    monkeypatch.setattr(observe, "_sum_of_squares", lambda _, device: sums[device])
    assert observe.wrong_sum(group, [0, 1]) == "a sum over ranks [0, 1] is 4 on cpu, not 5"
    sums["cpu"] = 5.0
    assert observe.wrong_sum(group, [0, 1]) == ""
