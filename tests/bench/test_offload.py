"""`kit bench offload` at small size: every part runs on real ranks, and each limit is compared with the right measurement."""

import pytest
import torch

from kit.bench import offload
from kit.bench.offload import Samples
from kit.bench.onranks import jobs as onranks
from kit.bench.session import Book, Session, conduct, read_rows
from kit.errors import KitError
from kit.megatron.tensors import Item


@pytest.mark.slow
def test_a_small_run_has_every_row(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert conduct("offload", models=("tiny",), trials=1, cycles=2, out=out, device="cpu") == 0
    message = read_rows(tmp_path / "rows.jsonl")
    assert message["bench"] == "offload"
    assert message["provenance"]["versions"]["torch"]
    rows = message["rows"]

    def named(part, who="kit"):
        (found,) = [row for row in rows if part in row["what"] and row["who"] == who]
        return found

    assert named("out, time over memcpy's")["limit"] == pytest.approx(1 / 0.7)
    assert named("out, time over memcpy's")["n"] == 2
    assert named("back, time over populate-then-copy's")["limit"] == pytest.approx(1 / 0.8)
    assert named("out, first cycle")["n"] == 1
    assert "needs a GPU" in named("out and back", "Megatron's own")["note"]
    assert "needs a GPU" in named("out and back", "torch_memory_saver")["note"]
    assert named(": back", "a copy of every tensor")["n"] == 2


def test_a_ratio_is_taken_cycle_by_cycle():
    trial = {"tensors": 1, "bytes": 2**30, "times": {"kit": [2.0, 30.0], "memcpy": [1.0, 10.0]}}
    ratio = Samples("m", [trial, trial]).ratio("out", "kit", "memcpy", 2.5)
    assert (ratio.n, ratio.low, ratio.median, ratio.high, ratio.met) == (4, 2.0, 2.5, 3.0, True)


def test_a_model_that_does_not_fit_is_a_row_that_says_so(monkeypatch, tmp_path):

    monkeypatch.setattr("kit.labs.definition.free_memory", lambda: 2**30)
    (row,) = offload.tensors(Session("cpu", tmp_path, Book("offload")), "qwen2.5-0.5b", trials=1, cycles=1)
    assert row.median is None
    assert "does not fit" in row.note


def test_on_a_gpu_every_way_is_beside_the_pinned_copy():
    names = ("first_out", "first_back", "steady_out", "steady_back", "copy_out", "copy_back", "pageable_out")
    names += ("pageable_back", "clone_out", "clone_back", "native_out", "native_back")
    trial = {
        "tensors": 1,
        "bytes": 2**30,
        "refused": "",
        "resident": [(1, 0)],
        "times": {name: [1.0] for name in names},
    }
    rows = offload._cuda_rows("m", [trial])
    ways = {row.who for row in rows}
    assert ways == {"kit", "pinned copy", "pageable copy", ".cpu() of every tensor", "Megatron's own"}
    for way in ways:
        assert {row.what.rpartition(": ")[2] for row in rows if row.who == way} >= {"out", "back"}
    assert [row.limit for row in rows if "pinned copy's" in row.what] == [1.25, 1.25]


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
