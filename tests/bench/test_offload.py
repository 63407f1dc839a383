"""`kit bench offload`, small: every part really runs, on real ranks; what is judged is judged by the right thing."""

import json

import pytest

from kit.bench.offload import Sizes, lab, main, tensors
from kit.bench.offload.tensors import Samples


@pytest.mark.slow
def test_a_small_run_has_every_row(capsys):
    few = Sizes(models=("tiny",), trials=1, cycles=2, leak_cycles=1, grid=("dp2",))
    assert main(True, few) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["bench"] == "offload"
    assert said["provenance"]["versions"]["torch"]
    rows = said["rows"]

    def named(part, who="kit"):
        (found,) = [row for row in rows if part in row["what"] and row["who"] == who]
        return found

    assert named("out, time over memcpy's")["limit"] == pytest.approx(1 / 0.7)
    assert named("out, time over memcpy's")["n"] == 2
    assert named("back, time over populate-then-copy's")["limit"] == pytest.approx(1 / 0.8)
    assert named("out, first cycle")["n"] == 1
    assert "needs a GPU" in named("out and back", "Megatron's own")["note"]
    assert [named(f"{what} leaked")["median"] for what in ("groups", "fds", "threads")] == [0, 0, 0]
    assert named("the lab's own measuring")["n"] == 4
    bitwise = named("bit for bit: dp2")
    assert bitwise["met"] is True
    assert bitwise["note"].startswith("kit run offload --set ranks=2 --set tp=1: ")
    assert ", 0 failed" in bitwise["note"]


def test_a_ratio_is_taken_cycle_by_cycle():
    trial = {"tensors": 1, "bytes": 2**30, "times": {"kit": [2.0, 30.0], "memcpy": [1.0, 10.0]}}
    ratio = Samples("m", [trial, trial]).ratio("out", "kit", "memcpy", 2.5)
    assert (ratio.n, ratio.low, ratio.median, ratio.high, ratio.met) == (4, 2.0, 2.5, 3.0, True)


def test_a_model_that_does_not_fit_is_a_row_that_says_so(monkeypatch, tmp_path):

    monkeypatch.setattr("kit.labs.fits.available_bytes", lambda: 2**30)
    (row,) = tensors.rows("qwen2.5-0.5b", tmp_path, trials=1, cycles=1)
    assert row.median is None
    assert "does not fit" in row.note


def test_a_run_that_breaks_is_a_row_that_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(lab.GRID, "tp3", {"ranks": 2, "tp": 3})
    row = lab.bitwise("tp3", tmp_path)
    assert row.median is None
    assert "tp=3 does not divide" in row.note
