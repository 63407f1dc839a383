"""`kit bench view` at small size: its made-up run suits the lab's checks and plots, and every row is measured."""

from __future__ import annotations

import os

import pytest

from kit.bench.session import conduct, read_rows
from kit.bench.view import RANKS, made_up
from kit.public import load
from kit.view import named


def test_the_made_up_run_is_judged_and_drawn_as_the_labs_own(tmp_path):
    run = load(made_up(tmp_path, 4000))
    frame = run.frame()
    assert 4000 <= len(frame) < 6000
    assert sorted(frame["rank"].unique()) == list(range(RANKS))
    measured = {row.check for row in run.verdict() if row.passed is not None}
    assert {"groups_return_to_baseline", "memory_drift", "fds_return", "threads_return"} <= measured
    assert {"memory", "drift", "times", "census"} <= set(named.names(run))


@pytest.mark.slow
def test_a_small_run_has_every_row(tmp_path):
    before = os.environ.get("KIT_RUNS")
    few = {"records": 3500, "many": 5000, "moves": 2, "opens": 2, "panels": 1}
    assert conduct("view", **few, out=tmp_path / "rows.jsonl") == 0
    assert os.environ.get("KIT_RUNS") == before
    message = read_rows(tmp_path / "rows.jsonl")
    assert message["bench"] == "view"
    rows = message["rows"]
    assert all(row["n"] > 0 and row["low"] <= row["median"] <= row["high"] for row in rows)
    assert all("made-up records" in row["note"] for row in rows)
    limits = [(row["unit"], row["limit"]) for row in rows if row["limit"] is not None]
    assert limits == [("s", 2.0), ("s", 2.0), ("ms", 100.0), *[("ms", 300.0)] * 4]
