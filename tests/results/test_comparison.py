from __future__ import annotations

import math

import pytest

from kit.errors import BadInput
from kit.results import Run, VerdictRow, compare, outcomes
from kit.results.comparison import Comparison, answers_changed, changed_rows, compact, size_settings
from kit.results.verdict import Verdict


def row(table, metric):
    (found,) = table[table["metric"] == metric].to_dict("records")
    return found


@pytest.fixture
def two(make_run, record):
    first = [record(cycle=c, value=v) for c, v in enumerate([1.0, 2.0, 9.0])]
    first += [record(metric="rss", value=100.0, unit="B"), record(metric="groups", value=0.0, unit="1")]
    first += [record(metric="gone", value=1.0, unit="1"), record(metric="same", value=3.0, unit="1")]
    second = [record(cycle=c, value=v) for c, v in enumerate([4.0, 6.0])]
    second += [record(metric="rss", value=25.0, unit="B"), record(metric="groups", value=3.0, unit="1")]
    second += [record(metric="new", value=1.0, unit="1"), record(metric="same", value=3.0, unit="1")]
    return [Run(make_run(first, "first")), Run(make_run(second, "second"))]


def test_medians_difference_ratio_n_and_spread(two):
    seconds = row(compare(two), "seconds")
    assert (seconds["base"], seconds["value"]) == (2.0, 5.0)
    assert (seconds["difference"], seconds["ratio"]) == (3.0, 2.5)
    assert (seconds["base_n"], seconds["n"]) == (3, 2)
    assert (seconds["base_spread"], seconds["spread"]) == (8.0, 2.0)
    assert (seconds["base_run"], seconds["run"]) == (two[0].id, two[1].id)


def test_what_changed_most_comes_first_and_nothing_is_lost(two):
    table = compare(two)
    assert table["metric"].tolist() == ["groups", "rss", "seconds", "same", "gone", "new"]
    assert row(table, "groups")["ratio"] == math.inf
    assert row(table, "gone")["found_in"] == "base_run"
    assert row(table, "new")["found_in"] == "run"
    assert (row(table, "new")["base_n"], row(table, "new")["n"]) == (0, 1)


def test_ids_are_kept_apart(make_run, record):
    def run(name, **values):
        return Run(make_run([record(metric="error", value=v, ids={"tensor": t}) for t, v in values.items()], name))

    table = compare([run("x", a=1.0, b=1.0), run("y", a=1.0, b=3.0)])
    assert table[["ids", "ratio"]].values.tolist() == [['{"tensor":"b"}', 3.0], ['{"tensor":"a"}', 1.0]]


def test_ranks_and_phases_are_kept_apart(make_run, record):
    runs = [Run(make_run([record(rank=r, phase=p) for r in (0, 1) for p in "ab"], name)) for name in ("x", "y")]
    assert len(compare(runs)) == 4


def test_three_runs_are_each_put_against_the_first(two, make_run, record):
    third = Run(make_run([record(value=2.0)], "third"))
    table = compare([*two, third])
    seconds = table[table["metric"] == "seconds"]
    assert dict(zip(seconds["run"], seconds["ratio"], strict=True)) == {two[1].id: 2.5, third.id: 1.0}


def test_empty_runs_compare_to_an_empty_table(make_run):
    assert compare([Run(make_run([], "a")), Run(make_run([], "b"))]).empty


def test_one_run_is_not_a_comparison(two):
    with pytest.raises(BadInput, match="two runs or more, not 1"):
        compare(two[:1])


def test_outcomes_are_held_against_each_other_to_the_last_bit(make_run, record):
    def run(name, *losses, digest="ab", **other):
        rows = [record(cycle=c, metric="loss", value=v, unit="1") for c, v in enumerate(losses)]
        rows += [record(metric="result", ids={"name": name, "step": 1}, value=v, unit="1") for name, v in other.items()]
        rows.append(record(metric="digest", value=None, text=digest))
        return Run(make_run([*rows, record(metric="seconds", value=len(name))], name))

    base = run("base", 1.0, 2.0, grad_norm=3.0)
    assert outcomes(base, run("the same", 1.0, 2.0, grad_norm=3.0))[:2] == (4, 0)
    assert outcomes(base, base).kinds == "losses, gradient norms and digests"
    digests = Run(make_run([record(metric="digest", value=None, text="ab")], "digests"))
    assert outcomes(digests, digests) == (1, 0, "digests", 0)
    assert outcomes(base, run("another text", 1.0, 2.0, grad_norm=3.0, digest="ac"))[:2] == (4, 1)
    assert outcomes(base, run("other ids", 1.0, 2.0, grad_norm=math.nextafter(3.0, 4.0), digest="ac"))[:2] == (4, 2)
    assert outcomes(base, run("last bit", 1.0, math.nextafter(2.0, 3.0), grad_norm=3.0))[:2] == (4, 1)
    shorter = outcomes(base, run("no longer", 1.0, grad_norm=3.0))
    assert str(shorter) == "0 of 3 losses, gradient norms and digests differ; 1 more is in one run only"
    assert outcomes(base, run("nan", 1.0, math.nan, grad_norm=3.0))[:2] == (4, 1)
    assert outcomes(Run(make_run([record()], "none")), Run(make_run([record()], "nor here"))) == (0, 0, "", 0)


def test_only_what_changed_by_more_than_the_spread_is_reported(make_run, record):
    def run(name, **values):
        rows = [
            record(cycle=cycle, metric=metric, value=value, unit="1" if metric == "groups" else "s", rank=rank)
            for metric, readings in values.items()
            for cycle, value in enumerate(readings)
            for rank in (0, 1)
        ]
        return Run(make_run(rows, name))

    steady = {"groups_before": [1.0], "overhead_seconds": [1.0, 1.0]}
    one = run(
        "one",
        leak=[1.0, 1.0, 1.0],
        seconds=[1.0, 1.1],
        wide=[1.0, 3.0],
        even=[1.0, 1.0],
        groups=[2.0],
        single=[1.0],
        **steady,
    )
    other = {
        "leak": [2.0, 3.0, 4.0],
        "seconds": [2.0, 2.1],
        "wide": [2.0, 5.0],
        "even": [1.01, 1.01],
        "groups": [3.0],
        "single": [1.2],
    }
    two = run("two", **other, groups_before=[2.0], overhead_seconds=[9.0, 9.0])
    found = changed_rows(compare([one, two]))
    # Once per metric, not once per rank: one group more is certain, and 1 s is more against a spread of 0.1 s than 2 s against 1 s.
    assert found["metric"].tolist() == ["groups", "seconds", "leak"]
    assert compact(found)["ratio"].tolist() == [1.5, 1.952, 3.0]
    assert compare([one, two])["metric"].tail(4).tolist() == ["overhead_seconds"] * 2 + ["groups_before"] * 2
    assert changed_rows(compare([one, one])).empty
    assert changed_rows(compare([Run(make_run([], "a")), one])).empty


def test_changed_answers_come_with_the_failures_first(make_run):
    def run(name, **answers):
        found = Run(make_run([], name))
        Verdict(VerdictRow(check, None, 0, "1", passed, check) for check, passed in answers.items()).write(
            found.dir / "verdict.json"
        )
        return found

    one = run("one", same=True, better=False, worse=True, gone=True)
    two = run("two", same=True, better=True, worse=False, new=None)
    reported = [(name, was and was.passed, now and now.passed) for name, was, now in answers_changed(one, two)]
    assert reported == [("worse", True, False), ("better", False, True), ("gone", True, None), ("new", None, None)]


def test_settings_that_make_runs_different_in_size():
    apart = {"ranks": [2, 4], "layers": [None, 2], "cycles": [1, 2], "hashes": [True, False], "size": ["a", "b"]}
    assert size_settings({**apart, "timeout_s": [1.0, 2.0], "mode": ["a", "b"]}) == ["ranks", "layers", "size"]


def test_a_number_that_may_be_below_zero_has_no_ratio(make_run, record):
    def run(name, reward, cost):
        rows = [record(cycle=cycle, metric="reward", value=value, unit="1") for cycle, value in enumerate(reward)]
        return Run(make_run([*rows, record(metric="cost", value=cost, unit="1")], name))

    table = compare([run("one", [-1.0, 2.0, 3.0], 1.0), run("two", [4.0, 4.0, 5.0], 2.0)])
    assert math.isnan(row(table, "reward")["ratio"])
    assert (row(table, "reward")["difference"], row(table, "cost")["ratio"]) == (2.0, 2.0)


def test_checks_that_changed_are_reported_by_run(make_run):
    runs = []
    for name, passed in (("one", True), ("two", False), ("three", True)):
        runs.append(Run(make_run([], name)))
        Verdict([VerdictRow("drift", None, 0, "1", passed, "")]).write(runs[-1].dir / "verdict.json")
    assert Comparison(runs).answers == {runs[1].id: ["drift: pass → FAIL"]}
