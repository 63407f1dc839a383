"""Rows and how they are told: numbers, limits, notes, and one JSON object as the last line."""

from __future__ import annotations

import json

import pytest

from kit.bench.rows import Row, row, table
from kit.bench.session import Book, tell
from kit.measure import provenance


def test_a_row_is_the_spread_of_its_samples() -> None:
    one = row("it", [3.0, 1.0, 2.0], unit="ms", limit=2.0, aim=0.5)
    assert (one.median, one.low, one.high, one.n) == (2.0, 1.0, 3.0, 3)
    assert one.met is True
    assert row("it", [2.1], limit=2.0).met is False
    assert row("it", [2.1]).met is None


def test_a_row_without_samples_says_why() -> None:
    one = row("it", [], who="somebody", limit=2.0, note="not installed")
    assert (one.median, one.n, one.met) == (None, 0, None)
    assert "somebody, it: not installed" in table([one]).splitlines()


def test_a_limit_that_is_not_met_is_told_as_it_is() -> None:
    lines = table([row("fast", [0.1], limit=1), row("slow", [1234.5], limit=1)]).splitlines()
    assert lines[1].endswith("  met")
    assert lines[2].endswith("NOT MET")
    assert "1234" in lines[2]
    assert len(lines) == 3


@pytest.mark.parametrize("as_json", [True, False])
def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    rows = [row("it", [1.0, 2.0], limit=1.2, ceiling=0.5), Row(what="other", note="why")]
    book = Book("some")
    book.describe(provenance())
    for one in rows:
        book.keep("a part", one)
    tell(book, as_json=as_json)
    *people, last = capsys.readouterr().out.splitlines()
    assert people[0].split()[:3] == ["what", "who", "median"]
    if not as_json:
        assert " cores; " in last
        return
    said = json.loads(last)
    assert said["bench"] == "some"
    first = said["rows"][0]
    assert list(first.values()) == ["it", "kit", "s", 1.5, 1.0, 2.0, 2, 1.2, None, 0.5, "", {}, False]
    assert list(first)[-6:] == ["limit", "aim", "ceiling", "note", "ids", "met"]
    assert [one["note"] for one in said["rows"]] == ["", "why"]
    assert said["provenance"]["python"]
