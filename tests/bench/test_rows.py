"""Bench rows and their table: numbers, limits, notes, and the file that holds them."""

from __future__ import annotations

from pathlib import Path

from kit.bench.session import Book, Row, page, read_rows, row, table
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


def test_a_count_has_no_unit_and_a_ratio_is_so_many_times() -> None:
    lines = table([row("count", [3.0], unit="1"), row("of", [1.5], unit="ratio"), row("took", [2.0])]).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["1", "x", "s"]  # the first row has no unit, so its n comes last


def test_a_limit_that_is_not_met_is_reported_as_it_is() -> None:
    lines = table([row("fast", [0.1], limit=1), row("slow", [1234.5], limit=1)]).splitlines()
    assert lines[1].endswith("  met")
    assert lines[2].endswith("NOT MET")
    assert "1234" in lines[2]
    assert len(lines) == 3


def test_rows_are_reported_and_read_back(tmp_path: Path) -> None:
    rows = [row("it", [1.0, 2.0], limit=1.2, ceiling=0.5), Row(what="other", note="why")]
    book = Book("some", tmp_path / "rows.jsonl")
    book.begin()
    book.describe(provenance())
    for one in rows:
        book.keep("a part", one)
    first, *_, last = page(book, table).splitlines()
    assert first.split()[:3] == ["what", "who", "median"]
    assert " cores; " in last
    message = read_rows(tmp_path / "rows.jsonl")
    assert message["bench"] == "some"
    first_row = message["rows"][0]
    assert list(first_row.values()) == ["it", "kit", "s", 1.5, 1.0, 2.0, 2, 1.2, None, 0.5, "", {}, False]
    assert list(first_row)[-6:] == ["limit", "aim", "ceiling", "note", "ids", "met"]
    assert [one["note"] for one in message["rows"]] == ["", "why"]
    assert message["provenance"]["python"]
