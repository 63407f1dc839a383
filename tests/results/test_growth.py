"""The measures that the rules of several labs share."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import pytest

from kit.machine import MIB
from kit.results import Row, Rule, Verdict, judge, to_frame
from kit.results.growth import OBSERVED, largest, slopes, worst

DRIVER = "memory_slope/driver_used"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_equal_values_the_lowest_rank_is_named_whoever_wrote_first(order: tuple[int, int]) -> None:
    rows = pd.DataFrame(
        [
            {"metric": "wrong_values", "value": 1.0, "rank": rank, "cycle": cycle, "phase": "talk"}
            for cycle in (2, 1)
            for rank in order
        ]
    )
    assert worst(rows).why == "wrong_values: 1 after talk (rank 0, cycle 1)"


def level(cycle: int, phase: str, metric: str, value: float, rank: int = 0) -> Row:
    return Row(
        run="r", lab="mine", cycle=cycle, phase=phase, rank=rank, metric=metric, value=value * MIB, unit="B", time=0
    )


def grown(rates: Mapping[str, float], cycles: int, moved: float | None = None) -> Verdict:
    """The verdict on memory that grows by these MiB per cycle; `moved`: a person's limit in place of 1 MiB."""
    records = [
        level(cycle, "idle", metric, 900 + rate * cycle)
        for metric, rate in rates.items()
        for cycle in range(1, cycles + 1)
    ]
    if "process_used" in rates:  # it is judged where ranks share a GPU
        records += [level(0, "run", "gpu", 0, rank) for rank in (0, 1)]
    asked = Rule("memory_slope", "", slopes("idle"), limit=1, unit="MiB/cycle")
    return judge(to_frame(records), {"cycles": cycles}, [asked], {} if moved is None else {"memory_slope": moved})


@pytest.mark.parametrize(
    ("metric", "rate", "cycles", "passed"),
    [
        ("driver_used", 8, 6, True),
        ("driver_used", 6, 12, False),
        ("driver_used", 6, 100, False),
        ("driver_used", 0.9, 100, True),
        ("process_used", 6, 100, False),
        ("anon_rss", 4, 6, True),
        ("anon_rss", 4.5, 4, False),
        ("anon_rss", 3, 100, False),
        ("tensor_bytes", 1.1, 6, False),
    ],
)
def test_a_step_allows_less_per_cycle_the_more_cycles_there_are(
    metric: str, rate: float, cycles: int, passed: bool
) -> None:
    rows = {row.check: row for row in grown({"driver_used": 0, metric: rate}, cycles)}
    part = rows[f"memory_slope/{metric}"]
    assert (part.measured, part.passed) == (pytest.approx(rate), passed)
    if cycles >= 6:
        assert rows["memory_slope"].passed is passed


@pytest.mark.parametrize(("rate", "judged", "passed"), [(0, True, None), (5, False, False)])
def test_a_driver_that_was_seen_in_few_cycles_is_not_judged(rate: float, judged: bool, passed: bool | None) -> None:
    rows = {row.check: row for row in grown({"driver_used": 9, "anon_rss": rate}, cycles=4)}
    assert (rows[DRIVER].passed, rows[DRIVER].why) == (None, "not measured: needs at least 6 cycles")
    assert rows["memory_slope/anon_rss"].passed is judged
    assert rows["memory_slope"].passed is passed
    assert rows["memory_slope"].why.endswith(
        "anon_rss: +5.000 MiB/cycle after idle (rank 0, 3 cycles)" if rate else "needs at least 6 cycles"
    )


@pytest.mark.parametrize(("moved", "passed"), [(2, False), (5.9, False), (6.1, True)])
def test_a_limit_that_a_person_moved_holds_for_every_kind_of_memory(moved: float, passed: bool) -> None:
    rows = {row.check: row for row in grown({"driver_used": 6, "tensor_bytes": 0.9}, 6, moved)}
    assert (rows["memory_slope"].passed, rows["memory_slope"].measured) == (passed, pytest.approx(6))
    assert rows["memory_slope/tensor_bytes"].passed


def test_without_a_gpu_all_kinds_of_memory_are_in_one_row() -> None:
    (row,) = grown({"anon_rss": 3, "tensor_bytes": 0.5}, cycles=4)
    assert (row.check, row.limit, row.measured, row.passed) == ("memory_slope", 1, pytest.approx(3), False)
    assert row.why == "anon_rss: +3.000 MiB/cycle after idle (rank 0, 3 cycles); others: tensor_bytes +0.500"


@pytest.mark.parametrize("cycles", [4, 5, 6])
@pytest.mark.parametrize("after", [2, 3])
def test_one_jump_is_no_growth_in_every_cycle(cycles: int, after: int) -> None:
    records = [level(cycle, "idle", "anon_rss", 900 + 3 * (cycle > after)) for cycle in range(1, cycles + 1)]
    asked = Rule("memory_slope", "", slopes("idle"), limit=1, unit="MiB/cycle")
    (row,) = judge(to_frame(records), {"cycles": cycles}, [asked])
    assert row.passed


def test_each_observed_phase_of_a_job_on_a_gpu_has_an_answer_for_each_kind_of_memory() -> None:
    records = [
        level(cycle, phase, metric, value)
        for phase, rate in (("clean", 0), ("leaky", 9))
        for cycle in range(6)
        for metric, value in (("observers_seconds", 0), ("anon_rss", 0), ("driver_used", rate * cycle))
    ]
    asked = [rule for rule in OBSERVED if rule.name == "memory_slope"]
    verdict = judge(to_frame(records), {"observed": True}, asked)
    assert {row.check for row in verdict if row.passed is False} == {"memory_slope", "memory_slope/leaky/driver_used"}
    assert sum(row.passed is True for row in verdict) == 3


@pytest.mark.parametrize(
    ("releaser", "counts", "more", "why"),
    [
        ("mine:R", (9, 9, 9), 0, "threads: no increase after verify over build or the first verify (1 rank, 2 cycles)"),
        ("mine:R", (9, 9, 10), 1, "threads: 9 after build or the first verify, 10 after verify (+1; rank 0, cycle 3)"),
        ("mine:R", (7, 8, 8), 0, "threads: no increase after verify over build or the first verify (1 rank, 2 cycles)"),
        ("mine:R", (9,), 1, "threads: 8 after build, 9 after verify (+1; rank 0, cycle 1)"),
        ("", (9, 9, 9), 1, "threads: 8 after build, 9 after verify (+1; rank 0, cycle 1)"),
    ],
)
def test_what_own_code_makes_in_the_first_cycle_may_stay(
    releaser: str, counts: tuple[int, ...], more: int, why: str
) -> None:
    levels = [(0, "build", 8), *((cycle, "verify", count) for cycle, count in enumerate(counts, start=1))]
    rows = [
        Row(run="r", lab="offload", cycle=cycle, phase=phase, rank=0, metric="threads", value=value, unit="1", time=0)
        for cycle, phase, value in levels
    ]
    asked = Rule("threads_return", "", largest("threads", after="verify", base="build", once=True))
    (row,) = judge(to_frame(rows), {"ranks": 1, "cycles": len(counts), "implementation": releaser}, [asked])
    assert (row.measured, row.why) == (more, why)
