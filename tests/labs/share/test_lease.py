"""A rank's lease of a device: a lock that two ranks cannot have, and one core and one thread while it lasts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.errors import KitError
from kit.labs.rankside import Context
from kit.labs.share.lab import LOCK
from kit.labs.share.ranks.side import DeviceLock, context_of
from tests.labs.share.conftest import share


def lease(owner: str, device: int, notes: list[tuple[str, Any]]) -> DeviceLock:
    ctx = SimpleNamespace(
        config=SimpleNamespace(on_devices=lambda _: (device,)),
        role="replica 0",
        place=0,
        owner=owner,
        device=torch.device("cpu"),
        record=lambda metric, value, *unit, **ids: notes.append((metric, ids["event"])),
    )
    return DeviceLock(ctx)  # type: ignore[arg-type]


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    """The folder of devices' locks, as the observer makes it."""
    for device in (0, 1, 5):
        (tmp_path / LOCK.format(device)).touch()
    return tmp_path


@pytest.fixture
def cores() -> Any:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield before
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("device", [0, 1, 5])
def test_a_rank_has_one_core_with_its_device_and_all_without(locks: Path, cores: set[int], device: int) -> None:
    notes: list[tuple[str, Any]] = []
    torch.set_num_threads(2)
    mine = lease("a.replica 0", device, notes)
    for _ in range(2):
        mine.take(locks)
        assert mine.held
        assert os.sched_getaffinity(0) == {sorted(cores)[device % len(cores)]}
        assert torch.get_num_threads() == 1
        mine.free()
        assert not mine.held
        assert os.sched_getaffinity(0) == cores
        assert torch.get_num_threads() == 2
    mine.free()  # a second time changes nothing
    assert notes == [("lease", "taken"), ("lease", "freed")] * 2


def test_two_ranks_cannot_have_a_device(locks: Path, cores: set[int]) -> None:
    notes: list[tuple[str, Any]] = []
    mine, other = lease("a.trainer", 0, notes), lease("b.replica 1", 0, notes)
    mine.take(locks)
    with pytest.raises(KitError, match=r"b\.replica 1 cannot take device 0: a\.trainer holds it"):
        other.take(locks)
    assert not other.held
    with pytest.raises(KitError, match=r"a\.trainer already holds device 0"):
        mine.take(locks)
    mine.free()
    other.take(locks)
    other.free()
    assert os.sched_getaffinity(0) == cores


def test_ranks_of_one_pipeline_may_share_a_device_if_all_say_so(locks: Path, cores: set[int]) -> None:
    notes: list[tuple[str, Any]] = []
    mine, other = lease("a.trainer", 0, notes), lease("a.replica 1", 0, notes)
    mine.take(locks, together=True)
    other.take(locks, together=True)
    with pytest.raises(KitError, match="cannot take device 0"):
        lease("b.trainer", 0, notes).take(locks)
    other.free()
    mine.free()
    assert os.sched_getaffinity(0) == cores


def test_a_pipeline_knows_the_places_of_its_own_ranks() -> None:
    roles = {"a trainer": (0,), "a replica 0": (1,), "b trainer": (2,), "b replica 0": (3,), "observer 1": (4,)}
    ctx = Context(
        rank=3,
        world_size=5,
        world_sizes=(1, 1, 1, 1, 1),
        world=3,
        role="b replica 0",
        roles=roles,
        meeting="here",
        device=torch.device("cpu"),
        config=share(),
        devices=("cuda:0", "cuda:1", "cuda:1", "cuda:2", "cpu"),
        nodes=(0, 0, 0, 1, 1),
        hosts=("near", "near", "near", "far", "far"),
    )
    mine = context_of(ctx)
    assert (mine.rank, mine.devices, mine.nodes, mine.hosts) == (1, ("cuda:1", "cuda:2"), (0, 1), ("near", "far"))
