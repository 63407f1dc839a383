"""What a refresh applies in the pause of a replica: several threads where cores are free and pieces are large."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.measure import host
from kit.sync.buckets import HOT, Bound, lay_out, specs_of
from kit.sync.receiver import Call

CORES = 4


def stored(size: int, receivers: int) -> Any:
    """A call that has four buckets of one tensor each, of bytes 1 to 4, and the weights that they fill."""
    tensors = {(f"weight{number}", 0): torch.zeros(size, dtype=torch.uint8) for number in range(4)}
    layout = lay_out(specs_of(tensors), size)
    buffers = [torch.full((size,), number + 1, dtype=torch.uint8) for number in range(4)]
    call = SimpleNamespace(applier=Bound(layout, tensors), stored=buffers, receivers=receivers, tensors=tensors)
    call.receiver = SimpleNamespace(device=torch.device("cpu"))
    return call


@pytest.mark.parametrize(
    ("size", "receivers", "threads"), [(2 * HOT, 1, 4), (2 * HOT, 2, 2), (2 * HOT, 4, 1), (HOT // 2, 1, 1)]
)
def test_buckets_are_applied_on_the_cores_that_receivers_share(
    monkeypatch: pytest.MonkeyPatch, size: int, receivers: int, threads: int
) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(CORES)))
    call, together, seen = stored(size, receivers), threading.Barrier(threads), set[threading.Thread]()

    def apply_bucket(index: int, buffer: torch.Tensor) -> None:
        seen.add(threading.current_thread())
        together.wait(20)
        call.applier.apply(index, buffer)

    call.apply_bucket = apply_bucket
    Call.apply_stored(call)
    assert [int(tensor.unique()) for tensor in call.tensors.values()] == [1, 2, 3, 4]
    assert len(seen) == threads


def test_what_a_thread_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(CORES)))
    call = stored(2 * HOT, 1)

    def apply_bucket(index: int, _: torch.Tensor) -> None:
        if index == 3:
            raise OSError("the disk is on fire")

    call.apply_bucket = apply_bucket
    with pytest.raises(OSError, match="on fire"):
        Call.apply_stored(call)
