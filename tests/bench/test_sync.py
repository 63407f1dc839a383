"""The bench of weight transfer: each limit is compared with the right measurement; sizes and names are those of the weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.errors import BadInput
from kit.labs.bench_sync import lab, parts
from kit.labs.bench_sync.lab import LAB, BenchSyncConfig, Shape, shape_of
from kit.labs.bench_sync.ranks import ways as onranks

CONFIG = BenchSyncConfig()
SHAPES = {key: shape_of(CONFIG, key) for key in ("model", "small", "large")}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: str(shape.name))
def test_sizes_are_those_of_the_weights(shape: Shape) -> None:
    elements = sum(torch.Size(shape_).numel() for shape_ in onranks.shapes_of(shape.arguments()))
    assert shape.size() == 2 * elements


def test_noise_differs_from_tensor_to_tensor() -> None:
    made = onranks.populated_tensors({"count": 3, "size": 4096}, filled=True)
    first, second, third = made.values()
    assert first.numel() == 2048
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert not any(
        tensor.any() for tensor in onranks.populated_tensors({"count": 3, "size": 4096}, filled=False).values()
    )


def test_ways_are_reported_in_words() -> None:
    assert parts.way_title("broadcast@16") == "broadcast, buckets of 16 MiB"
    assert parts.way_title("shm+cache") == "shm, by way of the cache"
    assert parts.way_title("shm+sha256") == "shm, verified by sha256"
    assert parts.way_title("file:dcp") == "dcp"


def reported(**seconds: list[float]) -> dict[str, Any]:
    return {"bytes": 10**9, "automatic": 2**22, "seconds": seconds}


def test_ratios_are_taken_turn_by_turn_against_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' samples are made up."""
    made = reported(
        memcpy=[1.0, 2.0],
        copies=[1.5, 2.5],
        shm=[2.0, 2.0],
        serialize=[9.0, 9.0],
        broadcast=[12.0, 10.0],
        rendezvous=[20.0, 20.0],
    )
    made["seconds"] |= {
        "shm+cache": [4.0, 4.0],
        "shm+whole": [1.0, 1.0],
        "shm+whole+fresh": [3.0, 3.0],
        "per-tensor": [8.0, 8.0],
        "broadcast@4": [10.0, 10.0],
    }
    monkeypatch.setattr(parts, "ask_rates", lambda *_, **__: made)
    bench: Any = SimpleNamespace(config=SimpleNamespace(buckets_mib=[4]))
    rows = {row.what.partition(": ")[2]: row for row in parts.compare_transports(bench, SHAPES["small"])}
    over = rows["shm, time over memcpy's"]
    assert (list(over.values), over.metric) == ([2.0, 1.0], "small_shm_over_memcpy")
    group = rows["shm over the best by a group, time"]
    assert (group.median, group.metric, group.note) == (0.25, "shm_over_group", "that is per-tensor")
    automatic = rows["broadcast over the best of per-tensor and fixed sizes, time"]
    assert (automatic.median, automatic.metric) == (1.375, "automatic_over_fixed")
    assert automatic.note == "that is per-tensor; automatic buckets are of 4 MiB"


@pytest.mark.parametrize(("device", "first"), [("cuda", "gpus.ipc"), ("cpu", "model.transports")])
def test_gpu_rows_come_first_where_there_is_a_gpu(device: Any, first: str) -> None:
    phases = [step.phase for step in LAB.plan(BenchSyncConfig(device=device))]
    assert phases[0] == first
    assert {"gpus.ipc", "gpus.shm", "gpus.broadcast", "digests", "growth.bytes"} < set(phases)


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "free_memory", lambda: 2**30)
    bench: Any = None
    with pytest.raises(BadInput, match=r"64 x 4 MiB needs 1\.8 GiB here, but only 1\.0 GiB are free"):
        parts.ask_rates(bench, SHAPES["large"], ["shm"], receivers=2)


def test_files_lie_in_memory_where_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lab, "IN_MEMORY", tmp_path)
    monkeypatch.setattr(lab.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert lab.place_for(799) == tmp_path
    assert lab.place_for(800) is None
