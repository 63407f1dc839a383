"""The bench of offloading: each limit is compared with the right measurement."""

from types import SimpleNamespace

import pytest
import torch

from kit.errors import KitError
from kit.labs.bench_offload import parts as offload
from kit.labs.bench_offload.ranks import moves as onranks
from kit.megatron.tensors import Item


def test_a_ratio_is_taken_cycle_by_cycle():
    trial = {"tensors": 1, "bytes": 2**30, "times": {"kit": [2.0, 30.0], "memcpy": [1.0, 10.0]}}
    assert list(offload.over("m", trial, "out_over_memcpy", "out", "kit", "memcpy").values) == [2.0, 3.0]


def test_a_model_that_does_not_fit_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr("kit.labs.definition.free_memory", lambda: 2**30)
    (samples,) = offload.offload_tensors(SimpleNamespace(device="cpu"), "qwen2.5-0.5b")
    assert not samples.values
    assert "does not fit" in samples.note


def test_on_a_gpu_every_way_is_beside_the_pinned_copy():
    names = ("first_out", "first_back", "steady_out", "steady_back", "copy_out", "copy_back", "pageable_out")
    names += ("pageable_back", "clone_out", "clone_back", "native_out", "native_back")
    times = {name: [1.0] for name in names}
    trial = {"tensors": 1, "bytes": 2**30, "refused": "", "resident": [(1, 0)], "times": times}
    rows = list(offload.on_cuda("m", trial))
    ways = {row.who for row in rows}
    assert ways == {"kit", "pinned copy", "pageable copy", ".cpu() of every tensor", "Megatron's own"}
    for way in ways:
        assert {row.what.rpartition(": ")[2] for row in rows if row.who == way} >= {"out", "back"}
    assert [row.metric for row in rows if "pinned copy's" in row.what] == ["out_over_pinned", "back_over_pinned"]


class Saver:
    """Stand-in for torch_memory_saver: pause takes the tensor away; resume returns it, or a different one if `right` is false."""

    def __init__(self, job, *, right=True):
        self.job, self.right, self.kept = job, right, None

    def pause(self, tag):
        assert tag == onranks.TAG
        self.kept, self.job.tensor = self.job.tensor, None

    def resume(self, tag):
        assert tag == onranks.TAG
        self.job.tensor = self.kept if self.right else self.kept + 1


class Job:
    """One tensor on a fake GPU."""

    device = "cuda:0"

    def __init__(self):
        self.tensor = torch.arange(4)

    def hashes(self):
        return {"weights": str(self.tensor)}


def test_torch_memory_saver_is_timed_and_must_bring_the_same_bytes(monkeypatch):
    monkeypatch.setattr(onranks, "_used", lambda job: 100 if job.tensor is None else 1100)
    job = Job()
    seen = onranks.saver_cycles(Saver(job), job, 3)
    assert seen["left"] == 1000
    assert {way: len(taken) for way, taken in seen["times"].items()} == {"out": 3, "back": 3}
    with pytest.raises(KitError, match="brought other bytes back"):
        onranks.saver_cycles(Saver(job, right=False), job, 1)


def test_plain_copies_bring_the_same_bytes_back():
    storages = [torch.arange(start, start + 100, dtype=torch.uint8).untyped_storage() for start in (0, 50)]
    items = [
        Item(name=str(place), kind="weights", storage=one, size=one.nbytes()) for place, one in enumerate(storages)
    ]
    before = [bytes(one) for one in storages]
    block = torch.ones(sum(item.size for item in items), dtype=torch.uint8)
    for out, back in (onranks.one_by_one(items), onranks.one_by_one(items, block)):
        assert out > 0 < back
    assert [bytes(one) for one in storages] == before
