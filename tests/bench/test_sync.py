"""`kit bench sync` at small size: every part runs on real ranks, every byte arrives, and each limit is compared with the right
measurement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.bench import sync
from kit.bench.onranks import sync as onranks
from kit.bench.session import conduct, read_rows
from kit.bench.sync import Shape
from kit.errors import BadInput

SHAPES = (
    Shape(key="model", name="tiny model", model="tiny", at_most=sync.LARGE),
    Shape(key="small", name="9 x 32 KiB", count=9, each=32 * 1024, at_most=sync.SMALL),
)
TINY: dict[str, Any] = {"shapes": SHAPES, "rounds": 2, "slow_rounds": 1, "buckets_mib": (0.0625, 1), "hash_mib": 1}
TINY |= {"growth_mb": (1, 2), "receivers": (1, 2), "receivers_mb": 1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_has_every_row(tmp_path: Path) -> None:
    assert conduct("sync", **TINY, out=tmp_path / "rows.jsonl", device="cpu") == 0
    message = read_rows(tmp_path / "rows.jsonl")
    assert message["bench"] == "sync"
    rows = message["rows"]
    silent = {(row["what"], row["who"]): row["note"] for row in rows if row["median"] is None}
    assert set(silent.values()) <= {
        "not installed",
        "not measured: the CPU was requested, or this machine has no GPU driver",
    }, silent

    def named(*words: str) -> dict[str, Any]:
        (found,) = [row for row in rows if all(word in row["what"] for word in words)]
        return dict(found)

    for shape, limit in (("tiny model", 1.25), ("9 x 32 KiB", 1 / 0.6)):
        here = f"{shape}, 1 receiver"
        over = named(f"{here}: shm, time over memcpy's")
        assert (over["limit"], over["n"]) == (pytest.approx(limit), 2)
        assert over["median"] == pytest.approx(1 / float(over["note"].split()[0]), rel=0.5, abs=0.5)
        assert named(f"{here}: shm, by way of the cache, time over memcpy's")["limit"] is None
        floor = named(f"{here}: a copy on each end at once, time over memcpy's")
        assert (floor["limit"], floor["n"], floor["who"]) == (None, 2, "memcpy")
        assert named(f"{here}: shm over the best by a group")["limit"] == 0.25
        best = named(f"{here}: broadcast over the best of")
        assert best["limit"] == 1.1
        assert best["note"].endswith("; automatic buckets are of 1 MiB")
        for way in ("serialize", "per-tensor", "rendezvous", "broadcast, buckets of 0.0625 MiB"):
            assert named(f"{here}: {way}")["note"].endswith(" GB/s")
        assert named(f"{here}: shm, verified by xxh3, time over unverified")["n"] == 2
        assert named(f"{shape}, 2 receivers: serialize, time over")["limit"] is None
        assert named(f"{here}, files: dcp over shm")["note"] == "in /dev/shm"
    assert named("digests of 1 GB in tensors of 32 KiB: sha256")["unit"] == "s"
    assert named("growth: 2 MB, 1 receiver: shm")["n"] == 2
    assert named("growth: 1 MB, 2 receivers: broadcast")["n"] == 2


@pytest.mark.parametrize("shape", [*sync.SHAPES, SHAPES[0]], ids=lambda shape: str(shape.name))
def test_sizes_are_those_of_the_weights(shape: Shape) -> None:
    elements = sum(torch.Size(each).numel() for each in onranks.shapes_of(shape.arguments()))
    assert shape.size() == 2 * elements


def test_noise_differs_from_tensor_to_tensor() -> None:
    made = onranks.weights({"count": 3, "each": 4096}, filled=True)
    first, second, third = made.values()
    assert first.numel() == 2048
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert not any(tensor.any() for tensor in onranks.weights({"count": 3, "each": 4096}, filled=False).values())


def test_ways_are_reported_in_words() -> None:
    assert sync.called("broadcast@16") == "broadcast, buckets of 16 MiB"
    assert sync.called("shm+cache") == "shm, by way of the cache"
    assert sync.called("shm+sha256") == "shm, verified by sha256"
    assert sync.called("file:dcp") == "dcp"


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
    monkeypatch.setattr(sync, "rates", lambda *_, **__: made)
    rows = {row.what.partition(": ")[2]: row for row in sync.transports(None, SHAPES[1], rounds=2, buckets_mib=[4])}  # type: ignore[arg-type]
    over = rows["shm, time over memcpy's"]
    assert (over.low, over.median, over.high, over.met) == (1.0, 1.5, 2.0, True)
    group = rows["shm over the best by a group, time"]
    assert (group.median, group.met, group.note) == (0.25, True, "that is per-tensor")
    automatic = rows["broadcast over the best of per-tensor and fixed sizes, time"]
    assert (automatic.median, automatic.met) == (1.375, False)
    assert automatic.note == "that is per-tensor; automatic buckets are of 4 MiB"


@pytest.mark.parametrize(("device", "first"), [("cuda", "gpus.ipc"), ("cpu", "model.transports")])
def test_gpu_rows_come_first_where_there_is_a_gpu(device: str, first: str) -> None:
    made = sync.parts(device)
    assert next(iter(made)) == first
    assert {"gpus.ipc", "gpus.shm", "gpus.broadcast", "digests", "growth.bytes"} < made.keys()


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "free_memory", lambda: 2**30)
    world: Any = None
    with pytest.raises(BadInput, match=r"64 x 4 MiB needs 1\.8 GiB here, but only 1\.0 GiB are free"):
        sync.rates(world, sync.SHAPES[2], ["shm"], receivers=2, rounds=1)


def test_files_lie_in_memory_where_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sync, "IN_MEMORY", tmp_path)
    monkeypatch.setattr(sync.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert sync.place_for(799) == tmp_path
    assert sync.place_for(800) is None
