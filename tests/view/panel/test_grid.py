"""The table of the panel: which rows words find, in which order, and what the widgets make of a click. No kernel is needed."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest

from kit.view.panel.grid import Grid, counted
from kit.view.panel.sift import PAGE, Query, Table, markdown

FRAME = pd.DataFrame(
    {
        "phase": ["reload", "release", "idle", "reload", "Idle <b>"],
        "rank": [0, 1, 10, 1, 0],
        "value": [2.5, math.nan, 3e6, -1.0, 4.0],
        "unit": ["s", "s", "B", "s", "1|2"],
    }
)


def places(words="", by="", descending=False):
    return Table(FRAME).rows(Query(words, by, descending)).tolist()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("reload", [0, 3]),
        ("RELOAD", [0, 3]),
        ("idle", [2, 4]),
        ("reload rank:1", [3]),
        ("rank:1", [1, 3]),  # a number is compared as one: not 10
        ("rank:>=1", [1, 2, 3]),
        ("value:>2.5", [2, 4]),
        ("value:<0", [3]),
        ("value:x", []),
        ("phase:rel", [0, 1, 3]),
        ("phase:=idle", [2]),
        ("Phase:reload", [0, 3]),
        ("3000000", [2]),
        ('"Idle <b>"', [4]),
        ('"reload', [0, 3]),  # a quote that is still being typed
        ("nothing:here", []),
        ("nowhere", []),
    ],
)
def test_words_find_rows(words, found):
    assert places(words) == found


def test_sorting_puts_what_is_missing_last_and_keeps_equals_in_their_order():
    assert places(by="value") == [3, 0, 4, 2, 1]
    assert places(by="value", descending=True) == [2, 4, 0, 3, 1]
    assert places(by="rank") == [0, 4, 1, 3, 2]
    assert places("reload", by="value") == [3, 0]
    assert places(by="no column") == [0, 1, 2, 3, 4]


def test_pages():
    table = Table(pd.DataFrame({"n": np.arange(2 * PAGE + 37)}))
    assert table.pages(Query()) == 3
    assert table.page(Query(page=2))["n"].tolist() == list(range(2 * PAGE, 2 * PAGE + 37))
    assert table.pages(Query("n:<10")) == 1
    assert Table(FRAME.head(0)).pages(Query("reload")) == 1


def test_a_copy_is_markdown_that_reads_back():
    lines = markdown(FRAME).splitlines()
    assert lines[0] == "| phase | rank | value | unit |"
    assert lines[1] == "|---|---:|---:|---|"
    assert lines[3] == "| release | 1 |  | s |"
    assert lines[4] == "| idle | 10 | 3000000 | B |"
    assert lines[6] == r"| Idle \<b\> | 0 | 4 | 1\|2 |"


def test_counts_are_told():
    assert counted(37, 10412, 0, 1) == "37 of 10\u202f412 rows"
    assert counted(1, 1, 0, 1) == "1 row"
    assert counted(250, 250, 1, 3) == "250 rows, page 2 of 3"


def shown(grid):
    """The cells of each row on the page."""
    body = grid.rows.value.partition("<tbody>")[2]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]


def test_the_worst_comes_first_until_a_person_sorts():
    grid = Grid(FRAME, worst="value")
    assert [row[2] for row in shown(grid)] == ["3000000", "4", "2.5", "-1", ""]
    grid.by.value = "phase"
    grid.descending.value = False
    assert shown(grid)[0][0] == "Idle &lt;b&gt;"
    grid.show(FRAME.tail(2), worst="value")  # the records grew: the person's order stays
    assert grid.by.value == "phase"


def test_a_heading_sorts_by_a_button_that_is_not_shown():
    grid = Grid(FRAME)
    press = grid._sorters.children
    assert len(press) == len(FRAME.columns)
    assert all(f"kit-sort-{index}" in button._dom_classes for index, button in enumerate(press))
    assert ".kit-sort-1&" not in grid.rows.value
    assert ".kit-sort-1').click()" in grid.rows.value
    press[1].click()
    assert [row[1] for row in shown(grid)] == ["10", "1", "1", "0", "0"]
    assert (grid.by.value, grid.descending.value) == ("rank", True)
    assert 'aria-sort="descending"' in grid.rows.value
    press[1].click()
    assert [row[1] for row in shown(grid)] == ["0", "0", "1", "1", "10"]


def test_filtering_turns_back_to_the_first_page_and_tells_the_count():
    grid = Grid(pd.DataFrame({"n": range(250), "word": ["even", "odd"] * 125}))
    assert (grid.before.disabled, grid.after.disabled) == (True, False)
    grid.after.click()
    grid.after.click()
    assert "page 3 of 3" in grid.count.value
    assert grid.after.disabled
    assert len(shown(grid)) == 50
    grid.words.value = "odd"
    assert "125 of 250 rows, page 1 of 2" in grid.count.value
    assert shown(grid)[0] == ["1", "odd"]


def test_the_copy_is_of_the_rows_that_are_shown():
    grid = Grid(FRAME)
    grid.words.value = "release"
    (text,) = re.findall(r"<textarea[^>]*>(.*?)</textarea>", grid.copy.value, re.DOTALL)
    assert text == "| phase | rank | value | unit |\n|---|---:|---:|---|\n| release | 1 |  | s |\n"
    assert "<b" not in Grid(FRAME).copy.value.partition("<textarea")[2].partition("</textarea>")[0]


def test_no_table_is_no_table():
    grid = Grid()
    assert grid.words.disabled
    assert grid.rows.layout.display == "none"
    grid.show(FRAME)
    assert not grid.words.disabled
    assert len(shown(grid)) == 5


def test_every_control_has_a_label_or_words():
    grid = Grid(FRAME)
    for control in (grid.words, grid.by, grid.descending, grid.before, grid.after):
        assert control.description
        assert control.tooltip
