"""The bystander answers, sees its own block, and ends when its input ends. It runs on a CPU here, where no driver lists anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kit.labs import bystander
from kit.labs.bystander import BLOCK, Bystander
from kit.measure import phase
from kit.measure.phase import DeviceMemory


@pytest.fixture(scope="module")
def standing() -> Iterator[Bystander]:
    made = Bystander("cpu")
    yield made
    made.close()


def alive(one: Bystander) -> bool:
    return Path(f"/proc/{one._process.pid}").exists()


def test_it_answers(standing: Bystander) -> None:
    for _ in range(2):
        reported = standing.ask()
        assert reported == {"bystander_driver": 0.0, "bystander_bytes": 4.0 * BLOCK, "bystander_damaged": 0.0}
    assert alive(standing)


def test_it_ends_with_its_input_and_one_that_does_not_answer_is_ended() -> None:
    quick, stuck = Bystander("cpu"), Bystander("cpu", deadline_s=0.2)
    try:
        os.kill(stuck._process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"did not answer within 0\.2 s and was ended"):
            stuck.ask()
        assert not alive(stuck)
    finally:
        stuck.close()
        quick.close()
    assert not alive(quick)


@pytest.mark.parametrize(("listed", "driver"), [(600 * 2**20, 600 * 2**20), (None, 0)])
def test_its_bytes_are_the_drivers_where_the_driver_lists_it(
    monkeypatch: pytest.MonkeyPatch, listed: int | None, driver: int
) -> None:
    """The driver is a stand-in."""
    held = DeviceMemory(allocated=16, reserved=2**21, peak_allocated=16, driver_used=2**30, process_used=listed)
    monkeypatch.setattr(phase, "device_memory", lambda _: held)
    block = torch.arange(4, dtype=torch.int32)
    assert bystander.bystander_memory(block, block.clone()) == {"driver": driver, "bytes": 2**21, "damaged": 0}
    assert bystander.bystander_memory(block, block + 1)["damaged"] == 16
