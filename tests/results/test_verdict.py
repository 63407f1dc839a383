from __future__ import annotations

import json
import math
import re

import pytest

from kit.errors import BadInput
from kit.results import (
    Measured,
    NotMeasured,
    Rule,
    Unjudged,
    Verdict,
    VerdictRow,
    exit_code,
    incomplete,
    judge,
    load_tolerances,
    read_verdict,
    rule,
    save_tolerances,
    select,
    to_frame,
)
from kit.results.rules import hold_limits, measure_checks, suspect_in
from kit.results.verdict import cells, headline, measured_of, without_parts


def check(value, *, limit=10.0, better="<=", why="", name="drift"):
    return Rule(name, "Does it come back?", lambda *_: Measured(value, why), limit=limit, unit="MiB", better=better)


def only(checks, tolerances=None):
    (row,) = judge(to_frame([]), {}, [checks], tolerances)
    return row


@pytest.mark.parametrize(
    ("value", "better", "passed"),
    [
        (10.0, "<=", True),
        (10.1, "<=", False),
        (10.0, ">=", True),
        (9.9, ">=", False),
        (10.0, "==", True),
        (10.0000001, "==", False),
        (math.inf, "<=", False),
        (math.nan, "<=", False),
        (math.nan, ">=", False),
        (math.nan, "==", False),
    ],
)
def test_a_limit_holds_or_not(value, better, passed):
    assert only(check(value, better=better)).passed is passed


def test_what_was_not_measured_neither_passes_nor_fails():
    row = only(check(None, why="no GPU driver here"))
    assert (row.passed, row.measured, row.why) == (None, None, "not measured: no GPU driver here")
    assert only(check(None)).why == "not measured: no records for it"


def test_missing_records_are_not_measured(record):
    def measure(frame, config):
        return Measured(select(frame, phase="reload", metric="rss")["value"].max())

    question = Rule("rss", "?", measure, limit=1.0, unit="B")
    row = judge(to_frame([record()]), {}, [question])[0]
    assert (row.passed, row.why) == (None, "not measured: no records with phase 'reload', metric 'rss'")
    row = judge(to_frame([record(phase="release", metric="rss")]), {}, [question])[0]
    assert (row.passed, row.why) == (None, "not measured: nothing was recorded in phase 'reload'")
    assert judge(to_frame([record(metric="rss", value=0)]), {}, [question])[0].passed is True


def test_missing_records_fail_where_something_may_have_kept_them_away(record):
    question = Rule("rss", "?", lambda frame, _: Measured(len(select(frame, metric="rss"))), limit=1.0, unit="B")
    row = judge(to_frame([record()]), {}, [question], suspect="fault 'x'")[0]
    assert (row.passed, row.measured) == (False, None)
    assert row.why == "could not be judged: no records with metric 'rss'; fault 'x' may have kept them away"
    assert judge(to_frame([record(metric="rss")]), {}, [question], suspect="fault 'x'")[0].passed is True


def raising(error):
    def measure(frame, config):
        raise error

    return Rule("c", "?", measure, limit=1.0)


def test_what_the_machine_cannot_have_is_null_whoever_is_suspected():
    verdict = judge(to_frame([]), {}, [raising(NotMeasured("no GPU driver"))], suspect="fault 'x'")
    assert (verdict[0].passed, verdict[0].why) == (None, "not measured: no GPU driver")
    assert (verdict.failed, verdict.passed, exit_code(verdict)) == ((), False, 1)  # nothing at all was measured


def test_what_the_code_kept_from_being_judged_fails_and_comes_back_from_disk(tmp_path):
    verdict = judge(to_frame([]), {}, [raising(Unjudged("training ended in cycle 1"))])
    row = verdict[0]
    assert (row.passed, row.measured, row.why) == (False, None, "could not be judged: training ended in cycle 1")
    assert exit_code(verdict) == 1
    assert verdict.summary() == "1 failed, 0 passed, 0 not measured"
    assert "FAIL" in repr(verdict)
    verdict.write(tmp_path / "verdict.json")
    assert read_verdict(tmp_path / "verdict.json") == verdict


def test_a_config_that_cannot_have_an_answer_is_not_asked():
    question = Rule("c", "?", lambda *_: 1 / 0, cannot=lambda config: "one cycle" if config["cycles"] < 2 else "")
    assert judge(to_frame([]), {"cycles": 1}, [question])[0].why == "not measured: one cycle"
    assert judge(to_frame([]), {}, [question])[0].why == "not measured: the run's config has no 'cycles'"
    assert "ZeroDivisionError" in judge(to_frame([]), {"cycles": 2}, [question])[0].why


def test_why_a_value_is_good_enough_is_reported_of_rows_that_pass():
    question = Rule("c", "?", lambda _, c: Measured(c["x"], "far", if_passed="another order"), limit=1e-5)
    assert [judge(to_frame([]), {"x": x}, [question])[0].why for x in (0.0, 1.35)] == ["far; another order", "far"]


def test_a_limit_from_the_noise_of_the_run_replaces_the_rules_and_a_person_may_still_move_it():
    question = Rule("c", "?", lambda *_: Measured(0.02, limit=0.03), limit=1e-5)
    each = Rule("d", "?", lambda *_: [Measured(0.02, of="x", limit=0.03), Measured(0.04, of="y", limit=0.03)])
    verdict = judge(to_frame([]), {}, [question, each])
    assert [(row.check, row.passed, row.limit) for row in verdict] == [
        ("c", True, 0.03),
        ("d", False, 0.03),
        ("d/x", True, 0.03),
        ("d/y", False, 0.03),
    ]
    moved = judge(to_frame([]), {}, [question], {"c": 0.01})[0]
    assert (moved.passed, moved.limit) == (False, 0.01)


@pytest.mark.parametrize(
    ("config", "fault", "suspect"),
    [
        (
            {"implementation": "kit.labs.offload.ranks.releaser:KitReleaser", "order": "tp-cp-ep-dp-pp", "cycles": 3},
            None,
            "",
        ),
        ({"implementation": "mine:Whole"}, None, "implementation=mine:Whole"),
        ({"model": "kit.x:y"}, "bit-flip", "fault 'bit-flip'"),
        ({"transport": "auto", "loss": "a.b:C.d"}, "x", "fault 'x' and loss=a.b:C.d"),
        ({"python": "/usr/bin/python", "transport": "kitten:A"}, None, "transport=kitten:A"),
    ],
)
def test_who_may_have_kept_records_away(config, fault, suspect):
    assert suspect_in(config, fault) == suspect


def test_a_check_sees_the_config():
    question = Rule("c", "?", lambda _, config: Measured(config["cycles"] - 3), better="==")
    assert judge(to_frame([]), {"cycles": 3}, [question]).passed


def test_a_tolerance_moves_the_limit():
    row = only(check(20.0), {"drift": 50})
    assert (row.passed, row.limit) == (True, 50.0)


@pytest.mark.parametrize("value", ["50", None, True, math.nan, [1]])
def test_a_tolerance_that_is_no_number_is_bad_input(value):
    with pytest.raises(BadInput, match=r"tolerance 'drift' is .*; it must be a number"):
        only(check(1.0), {"drift": value})


def test_an_unknown_tolerance_is_bad_input_that_lists_the_known():
    with pytest.raises(BadInput, match="unknown tolerance 'x'; allowed are: drift"):
        only(check(1.0), {"x": 1})


def test_passed_failed_and_exit_code():
    good, bad, unknown = check(1.0), check(99.0, name="bad"), check(None)
    assert exit_code(judge(to_frame([]), {}, [good, unknown])) == 0
    assert exit_code(judge(to_frame([]), {}, [good, unknown]), strict=True) == 1
    verdict = judge(to_frame([]), {}, [good, bad, unknown])
    assert not verdict.passed
    assert [row.check for row in verdict.failed] == ["bad"]
    assert exit_code(verdict) == 1
    assert exit_code(Verdict([])) == 1


@pytest.mark.parametrize(
    ("values", "ended", "answer"),
    [
        ([1.0, None], "", True),
        ([1.0, 99.0], "", False),
        ([None, None], "", None),
        ([1.0, None], "stopped", None),
        ([1.0, 99.0], "failed", False),
    ],
)
def test_a_verdict_passes_only_if_something_was_measured_and_the_run_came_to_its_end(values, ended, answer):
    rules = [check(value, name=f"check{number}") for number, value in enumerate(values)]
    verdict = Verdict(judge(to_frame([]), {}, rules), ended=ended)
    assert (verdict.answer, verdict.passed) == (answer, answer is True)


def test_verdict_json_has_exactly_the_contracts_keys_and_comes_back(tmp_path):
    checks = [check(1.5, why="worst: rank 1"), check(None), check(math.inf), check(True)]
    verdict = judge(to_frame([]), {}, checks, {"drift": math.inf})
    verdict.write(tmp_path / "verdict.json")
    rows = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=pytest.fail)
    assert all(set(row) == {"check", "measured", "limit", "unit", "passed", "why"} for row in rows)
    assert [row["passed"] for row in rows] == [True, None, True, True]
    assert [row["measured"] for row in rows] == [1.5, None, "Infinity", 1.0]
    assert read_verdict(tmp_path / "verdict.json") == verdict


ROW = '[{"check": "a", "measured": 1, "limit": 1, "unit": "s", "passed": true, "why": ""}]'


@pytest.mark.parametrize(
    "text",
    [
        *("{}x", "3", "{}{", '{"check": 1}', '[{"check": "a"}]', "[" * 100_000),
        ROW.replace('"measured": 1', '"measured": []'),
        ROW.replace('"measured": 1', '"measured": 1e400'),
        ROW.replace('"limit": 1', '"limit": 1' + "0" * 400),
        ROW.replace('"limit": 1', '"limit": "much"'),
        ROW.replace('"a"', "1"),
        ROW.replace('"s"', "null"),
        ROW.replace('"why": ""', '"why": {}'),
        ROW.replace("true", "[]"),
        ROW.replace("true", '"yes"'),
    ],
)
def test_a_damaged_verdict_is_bad_input(tmp_path, text):
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(BadInput, match=r"verdict\.json") as caught:
        read_verdict(tmp_path / "verdict.json")
    assert "\n" not in str(caught.value)
    (tmp_path / "verdict.json").write_text(ROW)
    assert len(read_verdict(tmp_path / "verdict.json")) == 1


def test_the_table_is_aligned_and_worst_first():
    checks = [check(1.0, name="good"), check(None, name="unknown"), check(1234.5678, name="a long name that fails")]
    lines = repr(judge(to_frame([]), {}, checks)).splitlines()
    assert lines[0] == "1 failed, 1 passed, 1 not measured"
    assert [line.split()[0] for line in lines[2:]] == ["FAIL", "-", "pass"]
    assert len({line.rindex("MiB") for line in lines[2:]}) == 1
    assert "1235 MiB" in lines[2]


def test_what_was_not_measured_for_one_reason_is_one_line_and_parts_that_passed_are_none():
    rows = [VerdictRow(name, None, 1.0, "ratio", None, "not measured: no CUDA device") for name in ("residual", "comm")]
    rows += [VerdictRow("lone", None, 1.0, "1", None, "not measured: too short")]
    rows += [VerdictRow(name, 0.0, 0.0, "1", True, "") for name in ("family", "family/one")]
    rows += [VerdictRow("family/two", 1.0, 0.0, "1", False, "bad")]
    lines = repr(Verdict(rows)).splitlines()
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "FAIL family/two 1 0 bad",
        "- 2 checks - not measured: no CUDA device (residual, comm)",
        "- lone - 1 not measured: too short",
        "pass family 0 0",
    ]
    page = Verdict(rows)._repr_html_()
    assert "no CUDA device (residual, comm)" in page
    assert "family/one" not in page


def test_a_value_just_beside_its_limit_shows_the_digits_that_differ():
    row = VerdictRow("share", 0.89999, 0.9, "ratio", False, "")
    assert cells([row])[1:3] == ("0.89999", "0.9")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], "nothing is judged yet"),
        ([None, None], "nothing is judged yet"),
        ([True, True], "all 2 checks pass"),
        ([True, None], "the one check passes; 1 could not be measured"),
        ([False, True, None], "1 of 2 checks fails: c0"),
        ([False] * 5, "5 of 5 checks fail: c0, c1, c2 and 2 more"),
    ],
)
def test_a_verdict_in_words(answers, message):
    rows = [VerdictRow(f"c{n}", None, 1.0, "1", passed, "") for n, passed in enumerate(answers)]
    assert headline([*rows, VerdictRow("c0/part", None, 1.0, "1", False, "")] if rows else rows) == message


def test_the_html_is_escaped():
    page = judge(to_frame([]), {}, [check(1.0, name="<b>", why="a & b")])._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "a &amp; b" in page


def test_a_verdict_is_a_sequence_in_the_order_of_the_checks():
    rows = [VerdictRow(name, 1.0, 1.0, "1", True, "") for name in "abc"]
    verdict = Verdict(rows)
    assert (list(verdict), verdict[1], verdict[:2], len(verdict)) == (rows, rows[1], tuple(rows[:2]), 3)


def test_tolerance_files(tmp_path):
    path = tmp_path / "mine.json"
    save_tolerances(path, {"drift_mib": 50, "seconds": 0.1, "slope": math.inf})
    assert load_tolerances(path) == {"drift_mib": 50.0, "seconds": 0.1, "slope": math.inf}
    for text, sentence in [
        ("[1]", "one JSON object"),
        ("{", "not valid JSON"),
        ('{"a": "b"}', "must be a number"),
        ('{"a": NaN}', "must be a number"),
    ]:
        path.write_text(text)
        with pytest.raises(BadInput, match=sentence):
            load_tolerances(path)
    with pytest.raises(BadInput, match="there is no file"):
        load_tolerances(tmp_path / "gone.json")


def test_tolerances_that_are_no_mapping_are_one_sentence():
    with pytest.raises(BadInput, match=r"tolerances must be names and numbers .* not \[1\]"):
        judge(to_frame([]), {}, [check(1)], [1])


def test_a_limit_may_hang_on_the_config():
    question = check(5.0, limit=lambda config: 1.0 if config["dtype"] == "float32" else 10.0)
    rows = {dtype: judge(to_frame([]), {"dtype": dtype}, [question])[0] for dtype in ("float32", "bfloat16")}
    assert [(row.limit, row.passed) for row in rows.values()] == [(1.0, False), (10.0, True)]
    moved = judge(to_frame([]), {"dtype": "float32"}, [question], {"drift": 7})[0]
    assert (moved.limit, moved.passed) == (7.0, True)


def test_several_answers_are_several_rows():
    def measure(frame, config):
        return [Measured(value, name, of=name) for name, value in given.items()]

    several = Rule("each", "?", measure, limit=10.0)
    given = {"one": 1.0, "two": 99.0, "three": None, "four": 50.0}
    verdict = judge(to_frame([]), {}, [several, check(1.0)])
    assert [(row.check, row.passed, row.measured) for row in verdict] == [
        ("each", False, 99.0),
        ("each/one", True, 1.0),
        ("each/two", False, 99.0),
        ("each/three", None, None),
        ("each/four", False, 50.0),
        ("drift", True, 1.0),
    ]
    assert [row.why for row in verdict[:4]] == ["2 of 4 fail; worst: two", "one", "two", "not measured: three"]
    # A check with parts counts once, in both summaries.
    assert verdict.summary() == "1 failed (3 rows), 1 passed, 0 not measured"
    assert measured_of(without_parts(verdict)) == "1 failed, 2 of 2 measured"
    assert {row.limit for row in verdict[:5]} == {10.0}
    assert exit_code(verdict) == 1
    given = {"one": 1.0, "three": None}
    assert judge(to_frame([]), {}, [several])[0].passed is None
    given = {"one": 1.0, "two": 2.0}
    assert (judge(to_frame([]), {}, [several])[0].passed, judge(to_frame([]), {}, [several])[0].why) == (
        True,
        "2 compared; worst: two",
    )
    given = {}
    assert judge(to_frame([]), {}, [several])[0].passed is None


def test_a_check_that_raises_fails_by_name_and_leaves_the_others_their_answers():
    """On the records of a broken run it is null, because anything may be missing."""

    def raises(frame, config):
        raise KeyError("bucket")

    checks = [Rule("broken", "?", raises, better="=="), check(0.0)]
    broken, fine = judge(to_frame([]), {}, checks)
    assert (broken.passed, broken.measured) == (False, None)
    assert re.search(r"the check raised KeyError: 'bucket' at test_verdict.py:\d+$", broken.why)
    assert fine.passed
    half = hold_limits(measure_checks(to_frame([]), {}, checks, whole=False), {}, {})
    assert [row.passed for row in half] == [None, True]


def test_a_check_that_finds_nothing_to_ask_about_is_null_or_failed():
    """A check that returns an empty list is null, or failed if own code or a fault may be the reason."""
    nothing = Rule("c", "?", lambda *_: [], better="==")
    assert [judge(to_frame([]), {}, [nothing], suspect=who)[0].passed for who in ("", "fault 'x'")] == [None, False]


def test_a_limit_that_an_older_config_cannot_give_is_null_and_no_traceback():
    question = Rule("c", "?", lambda *_: Measured(1.0), limit=lambda config: config["size"] * 2)
    row = judge(to_frame([]), {}, [question])[0]
    assert (row.passed, row.measured, math.isnan(row.limit)) == (None, None, True)
    assert row.why == "not measured: the run's config has no 'size'"
    assert cells([row])[1:3] == ("-", "-")
    assert judge(to_frame([]), {}, [question], {"c": 3})[0].passed


def test_lacking_records_can_fail_a_check_and_cannot_pass_it():
    """A broken run is judged as far as its records go."""

    def counts(frame, config):
        incomplete("3 of 4 counts")
        return [Measured(config["worst"], "as counted", of="rank 0"), Measured(None, "not counted", of="rank 1")]

    check = Rule("few", "?", counts)
    fine = hold_limits(measure_checks(to_frame([]), {"worst": 0}, [check], whole=False), {}, {})
    assert [row.passed for row in fine] == [None, None, None]
    assert fine[1].why == "not measured: 3 of 4 counts; those that are there hold (0)"
    leak = hold_limits(measure_checks(to_frame([]), {"worst": 2}, [check], whole=False), {}, {})
    assert [(row.passed, row.measured) for row in leak] == [(False, 2), (False, 2), (None, None)]
    assert [row.passed for row in judge(to_frame([]), {"worst": 0}, [check], suspect="fault 'x'")] == [False] * 3


def test_a_check_that_breaks_for_want_of_records_says_which():
    def raises(frame, config):
        incomplete("3 of 4 counts")
        raise KeyError("rank")

    row = judge(to_frame([]), {}, [Rule("few", "?", raises)])[0]
    assert (row.passed, row.why) == (None, "not measured: 3 of 4 counts")


def test_a_config_that_lacks_what_a_check_is_asked_for_does_not_ask_it():
    asked = Rule("few", "?", lambda *_: Measured(0), when=lambda config: config["experts"] > 0)
    assert [asked.asked(config) for config in ({"experts": 2}, {"experts": 0}, {})] == [True, False, False]


def test_an_old_tolerance_name_is_accepted_with_a_sentence_that_has_the_new_one():
    question = Rule("memory_drift", "?", lambda *_: Measured(20.0))
    with pytest.warns(FutureWarning, match="tolerance drift_mib is now called memory_drift"):
        assert judge(to_frame([]), {}, [question], {"drift_mib": 50}).passed


def test_a_rule_that_yields_counts_violations():
    def order_kept(frame, config):
        """Is the order kept?"""
        yield from (f"row {row}" for row in config["wrong"])
        return "3 rows in order"

    asked = rule(order_kept)
    assert (asked.name, asked.question) == ("order_kept", "Is the order kept?")
    rows = [judge(to_frame([]), {"wrong": wrong}, [asked])[0] for wrong in ([], [4], [4, 7])]
    assert [(row.measured, row.why) for row in rows] == [(0, "3 rows in order"), (1, "row 4"), (2, "row 4; 1 more")]


def test_what_stops_a_rule_after_its_first_violation_is_said():
    def order_kept(frame, config):
        """Is the order kept?"""
        yield "row 4"
        raise KeyError("row 5 has no step")

    row = judge(to_frame([]), {}, [rule(order_kept)])[0]
    assert (row.passed, row.why) == (False, "row 4; the rule went no further: 'row 5 has no step'")
