"""CUDA's driver is not started in the process that forks the ranks, whoever counts GPUs there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kit.world import World, device
from kit.world.device import choose


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for torch's own count, since this torch need not know CUDA: two GPUs, and who asked is written down."""
    note = tmp_path / "asked"

    def count() -> int:
        note.write_text(str(os.getpid()))
        return 2

    monkeypatch.setattr(device, "_plain", count)
    monkeypatch.setattr(device._C, device.COUNT, count, raising=False)
    device.counted_by_a_child.cache_clear()
    yield note
    device.counted_by_a_child.cache_clear()


def test_gpus_are_counted_by_a_child(asked: Path) -> None:
    device.spare("auto")
    assert getattr(torch._C, device.COUNT)() == 2
    assert int(asked.read_text()) != os.getpid()
    device.restore()
    assert getattr(torch._C, device.COUNT)() == 2
    assert int(asked.read_text()) == os.getpid()


def test_for_ranks_on_the_host_nobody_is_asked(asked: Path) -> None:
    device.spare("cpu")
    assert getattr(torch._C, device.COUNT)() == 0
    assert not asked.exists()


def test_a_driver_that_was_started_too_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    seat = choose("auto", 0, 2)
    assert str(seat.device) == "cpu"
    assert "started CUDA before they were forked" in seat.why
    with pytest.raises(RuntimeError, match="device='cuda' cannot be had: a module that was loaded for the ranks"):
        choose("cuda", 0, 2)


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_ranks_have_a_driver_of_their_own(wanted: str, nothing_left: None) -> None:
    """With a torch that knows CUDA; there need not be a GPU."""
    with World(1, device=wanted, python=sys.executable, preload=("megatron.core",)) as world:
        assert world.eval("torch.cuda._is_in_bad_fork()") == [False]
        if world.device == "cpu":
            assert world.eval("torch.cuda.is_available()") == [False]
