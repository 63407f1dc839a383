from __future__ import annotations

import json
import math

import pytest

from kit.errors import BadInput
from kit.results import (
    Check,
    Measured,
    Verdict,
    VerdictRow,
    exit_code,
    judge,
    load_tolerances,
    read_verdict,
    save_tolerances,
    select,
    to_frame,
)


def check(value, *, limit=10.0, better="<=", why="", name="drift", tolerance="drift_mib"):
    return Check(name, "Does it come back?", tolerance, limit, "MiB", better, lambda *_: Measured(value, why))


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

    question = Check("rss", "?", "rss_mib", 1.0, "B", "<=", measure)
    row = judge(to_frame([record()]), {}, [question])[0]
    assert (row.passed, row.why) == (None, "not measured: no records with phase 'reload', metric 'rss'")
    assert judge(to_frame([record(metric="rss", value=0)]), {}, [question])[0].passed is True


def test_a_check_sees_the_config():
    question = Check("c", "?", "c", 0, "1", "==", lambda _, config: Measured(config["cycles"] - 3))
    assert judge(to_frame([]), {"cycles": 3}, [question]).passed


def test_a_broken_check_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        only(Check("c", "?", "c", 0, "1", "==", lambda *_: Measured(1 / 0)))


def test_a_tolerance_moves_the_limit():
    row = only(check(20.0), {"drift_mib": 50})
    assert (row.passed, row.limit) == (True, 50.0)


@pytest.mark.parametrize("value", ["50", None, True, math.nan, [1]])
def test_a_tolerance_that_is_no_number_is_bad_input(value):
    with pytest.raises(BadInput, match=r"tolerance 'drift_mib' is .*; it must be a number"):
        only(check(1.0), {"drift_mib": value})


def test_an_unknown_tolerance_is_bad_input_that_lists_the_known():
    with pytest.raises(BadInput, match="unknown tolerance 'x'; allowed are: drift_mib"):
        only(check(1.0), {"x": 1})


def test_passed_failed_and_exit_code():
    good, bad, unknown = check(1.0), check(99.0, name="bad"), check(None)
    assert exit_code(judge(to_frame([]), {}, [good, unknown])) == 0
    verdict = judge(to_frame([]), {}, [good, bad, unknown])
    assert not verdict.passed
    assert [row.check for row in verdict.failed] == ["bad"]
    assert exit_code(verdict) == 1
    assert exit_code(Verdict([])) == 0


def test_verdict_json_has_exactly_the_contracts_keys_and_comes_back(tmp_path):
    checks = [check(1.5, why="worst: rank 1"), check(None), check(math.inf), check(True)]
    verdict = judge(to_frame([]), {}, checks, {"drift_mib": math.inf})
    verdict.write(tmp_path / "verdict.json")
    rows = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=pytest.fail)
    assert all(set(row) == {"check", "measured", "limit", "unit", "passed", "why"} for row in rows)
    assert [row["passed"] for row in rows] == [True, None, True, True]
    assert [row["measured"] for row in rows] == [1.5, None, "Infinity", 1.0]
    assert read_verdict(tmp_path / "verdict.json") == verdict


@pytest.mark.parametrize("text", ["{}x", "3", '[{"check": "a"}]', '[{"check":"a","measured":[],"limit":1}]'])
def test_a_damaged_verdict_is_bad_input(tmp_path, text):
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(BadInput, match=r"verdict\.json"):
        read_verdict(tmp_path / "verdict.json")


def test_the_table_is_aligned_and_worst_first():
    checks = [check(1.0, name="good"), check(None, name="unknown"), check(1234.5678, name="a long name that fails")]
    lines = repr(judge(to_frame([]), {}, checks)).splitlines()
    assert lines[0] == "1 failed, 1 passed, 1 not measured"
    assert [line.split()[0] for line in lines[2:]] == ["FAIL", "-", "pass"]
    assert len({line.index("MiB") for line in lines[2:]}) == 1
    assert "1234.57" in lines[2]


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
    moved = judge(to_frame([]), {"dtype": "float32"}, [question], {"drift_mib": 7})[0]
    assert (moved.limit, moved.passed) == (7.0, True)


def test_several_answers_are_several_rows():
    def measure(frame, config):
        return [Measured(value, name, of=name) for name, value in given.items()]

    several = Check("each", "?", "each", 10.0, "1", "<=", measure)
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
    assert [row.why for row in verdict[:4]] == ["2 of 4 fail, worst two", "one", "two", "not measured: three"]
    assert {row.limit for row in verdict[:5]} == {10.0}
    assert exit_code(verdict) == 1
    given = {"one": 1.0, "three": None}
    assert judge(to_frame([]), {}, [several])[0].passed is None
    given = {"one": 1.0, "two": 2.0}
    assert (judge(to_frame([]), {}, [several])[0].passed, judge(to_frame([]), {}, [several])[0].why) == (
        True,
        "2, worst two",
    )
    given = {}
    assert judge(to_frame([]), {}, [several])[0].passed is None
