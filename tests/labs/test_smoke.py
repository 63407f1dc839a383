"""The smoke lab: what is right passes, each fault is caught by the check it names, also in somebody's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

import kit
from kit.labs.discover import find
from kit.results import NotMeasured, Record, judge, to_frame

CHECKS = {"groups_return_to_baseline", "every_group_communicates", "fds_return", "threads_return", "memory_drift"}
OWN = '''
import torch.distributed as dist

class Own:
    """Counts what it is asked for, and forgets the last group of all."""
    def __init__(self, ctx):
        self.made, self.left = 0, ctx.config.cycles * ctx.config.groups + ctx.config.groups
    def make(self, ranks):
        self.made += 1
        return dist.new_group(list(ranks), group_desc=f"own {self.made}")
    def destroy(self, group):
        self.left -= 1
        if self.left:
            dist.destroy_process_group(group)
'''


def outcome(run: kit.Run) -> dict[str, bool | None]:
    return {row.check: row.passed for row in run.verdict()}


def test_passes(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", ranks=3, groups=3)
    assert outcome(run) == dict.fromkeys(CHECKS, True)
    frame = run.frame()
    counted = frame[(frame["metric"] == "groups") & (frame["rank"] == 2)].set_index(["cycle", "phase"])["value"]
    assert [counted[2, phase] for phase in ("make", "talk", "destroy", "count")] == [4, 4, 1, 1]


def test_a_leaked_group(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", fault="leaked-group")
    row = next(row for row in run.verdict() if row.check == "groups_return_to_baseline")
    assert (row.measured, row.passed) == (3.0, False)
    assert "1 at the baseline, 4 after cycle 3" in row.why
    assert outcome(run)["every_group_communicates"] is True
    assert run.verdict(groups_more=3, fds_more=1000, threads_more=1000).passed


def test_a_wrong_sum(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", fault="wrong-sum", cycles=2)
    assert outcome(run) == {**dict.fromkeys(CHECKS, True), "every_group_communicates": False}
    row = next(row for row in run.verdict() if row.check == "every_group_communicates")
    assert row.measured == 2.0
    assert row.why == "wrong on rank 0 in cycle 2, rank 1 in cycle 2"


@pytest.mark.slow
def test_ones_own_code_is_judged(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    (tmp_path / "own_groups.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    run = kit.run("smoke", implementation="own_groups:Own", cycles=2)
    row = next(row for row in run.verdict() if row.check == "groups_return_to_baseline")
    assert (row.measured, row.passed) == (1.0, False)


def test_one_rank_and_one_cycle(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", ranks=1, cycles=1, groups=1, size=1)
    assert outcome(run) == {**dict.fromkeys(CHECKS, True), "memory_drift": None}


def rows(phase: str, metric: str, values: list[float], cycle: int = 1) -> list[Record]:
    return [
        Record(run="r", lab="smoke", cycle=cycle, phase=phase, rank=rank, metric=metric, value=value, unit="1", time=0)
        for rank, value in enumerate(values)
    ]


def test_what_is_missing_is_not_judged() -> None:
    config = {"ranks": 2, "cycles": 2, "groups": 2}
    checks = find("smoke").load_checks()
    nothing = judge(to_frame([]), config, checks)
    assert {row.passed for row in nothing} == {None}
    short = rows("talk", "wrong_values", [0, 0]) + rows("talk", "talked_groups", [2, 2])
    lonely = rows("baseline", "fds", [5], 0) + rows("count", "fds", [5, 5])
    verdict = {row.check: row for row in judge(to_frame(short + lonely), config, checks)}
    assert "only 2 of 4 talks" in verdict["every_group_communicates"].why
    assert "missing on some rank" in verdict["fds_return"].why
    silent = rows("talk", "wrong_values", [0, 0]) + rows("talk", "talked_groups", [2, 1])
    one = {row.check: row for row in judge(to_frame(silent), {**config, "cycles": 1}, checks)}
    assert one["every_group_communicates"].passed is None
    assert NotMeasured  # what the checks raise; judged as null
