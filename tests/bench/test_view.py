"""The bench of panels: its made-up run suits the lab's checks and plots."""

from __future__ import annotations

from kit.labs.bench_view.made_up import RANKS, made_up
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
