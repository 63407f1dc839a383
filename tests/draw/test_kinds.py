"""The five kinds of chart, on rows that are written by hand: each value is where it belongs, and what is wrong is seen."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from kit.draw.chart import Limit, Mark, Plot
from kit.draw.data import Tables, lines_apart, with_attrs
from kit.draw.lanes import Lanes, merged_labels
from kit.draw.levels import Levels
from kit.draw.lines import Lines
from kit.draw.matrix import Matrix
from kit.draw.picture import paint
from kit.draw.points import Points
from kit.draw.style import LIGHT, Look, looks_of
from kit.results import NotMeasured, Verdict, VerdictRow
from tests.seen import axes_of, bars, boxes, colours, titles, words

pytestmark = pytest.mark.usefixtures("strict")


def drawn(chart, *limits, below=False, more=()):
    """The picture of a chart; `limits` are rules and their limits."""
    verdict = Verdict([VerdictRow(rule, 0, limit, "1", True, "") for rule, limit in limits])
    picture = paint([[Plot("a plot", [chart, *more], below=below)]], "heading", LIGHT, Tables(), verdict)
    picture.draw_without_rendering()
    return picture


def given(rows, **attrs):
    table = with_attrs(pd.DataFrame(rows), **attrs)
    return lambda _: table


# -- what all kinds share ------------------------------------------------------------------------------------------------


def test_words_come_from_attrs_and_from_columns():
    rows = given([{"x": 1, "value": 2.0, "unit_word": "apples"}], n=3)
    picture = drawn(Lines(rows=rows, heading="{n} of them", label="count of {unit_word}", about="{n}"))
    assert titles(picture) == ["3 of them"]
    assert (picture.axes[0].get_ylabel(), picture.axes[0].get_xlabel()) == ("count of apples", "3")


def test_each_panel_has_a_drawing_and_all_have_one_legend():
    rows = given([{"panel": panel, "kind": kind, "x": 1, "value": 1.0} for panel in "ab" for kind in ("p", "q")])
    picture = drawn(Lines(rows=rows, heading="panel {panel}"))
    assert titles(picture) == ["panel a", "panel b"]
    assert [axes.get_legend() is not None for axes in picture.axes] == [True, False]
    other = given([{"panel": panel, "kind": kind, "x": 1, "value": 1.0} for panel, kind in ("ap", "aq", "bp", "br")])
    assert all(axes.get_legend() for axes in drawn(Lines(rows=other, heading="{panel}")).axes)


@pytest.mark.parametrize("count", [2, 4, 5, 7, 9])
def test_a_legend_of_long_words_ends_within_the_picture(count):
    kinds = ["a transport: best 5.65 GB/s at 16 MiB, 31% of memcpy, used here", "another: 0.5 GB/s"]
    rows = given(
        [{"kind": f"{kinds[index % 2]} {index}", "x": x, "value": 1.0} for index in range(count) for x in (0, 1)]
    )
    picture = drawn(Lines(rows=rows))
    assert picture.axes[0].get_legend().get_window_extent().x1 <= picture.bbox.x1


def test_a_chart_that_was_not_measured_is_left_out():
    def missing(_):
        raise NotMeasured("the run ended before")

    there = Lines(rows=given([{"x": 1, "value": 1.0}]), heading="there")
    assert titles(drawn(Lines(rows=missing), more=[there])) == ["there"]
    assert Plot("", [Lines(rows=missing)]).drawings(Tables(), Verdict()) == []


@pytest.mark.parametrize(
    ("unit", "value", "label"), [("s", 0.02, "time [ms]"), ("B", 3e10, "time [GiB]"), ("", 5, "time")]
)
def test_values_are_in_a_unit_that_is_read_well(unit, value, label):
    picture = drawn(Lines(rows=given([{"x": 1, "value": value}]), label="time", unit=unit))
    assert picture.axes[0].get_ylabel() == label


def test_looks_that_are_open_follow_from_the_place():
    looks = looks_of(["a", "b", "c"], {"b": Look("bad", "bad one")})
    assert [look.colour for look in looks.values()] == [0, "bad", 1]
    assert [look.word for look in looks.values()] == ["a", "bad one", "c"]
    assert len({look.marker for look in looks.values()}) == 3
    many = looks_of([str(number) for number in range(7)], {})
    assert (many["6"].colour, many["0"].hatch) == (6, "")
    assert many["6"].hatch  # the same colour as the first one


# -- lines ---------------------------------------------------------------------------------------------------------------


def flat(axes):
    return [line.get_ydata()[0] for line in axes.lines if line.get_gid() == "limit"]


def test_a_limit_is_above_the_level_that_it_starts_from_and_what_is_beyond_is_marked():
    rows = given([{"x": x, "value": x, "base": 2.0} for x in range(6)])
    (axes,) = drawn(
        Lines(rows=rows, limits=(Limit("rule", "limit {limit:+g}: {at:g}"),)), ("rule", 1), ("other", 9)
    ).axes
    assert flat(axes) == [3]
    assert "limit +1: 3" in {text.get_text() for text in axes.texts}
    wrong = [
        list(line.get_xdata()) for line in axes.lines if line.get_color() == LIGHT.bad and line.get_marker() != "None"
    ]
    assert wrong == [[4, 5]]


def test_a_runs_own_rows_keep_their_limit_although_they_have_an_empty_column_of_starts():
    rows = given([{"x": x, "value": x, "start": math.nan} for x in range(3)])
    assert flat(drawn(Lines(rows=rows, limits=(Limit("rule"),)), ("rule", 1)).axes[0]) == [1]


def test_only_the_panel_that_a_limit_is_for_has_it():
    rows = given([{"panel": panel, "x": 1, "value": 1.0} for panel in ("fds: start 1", "groups: start 1")])
    picture = drawn(Lines(rows=rows, limits=(Limit("rule", panel="groups"),)), ("rule", 4))
    assert [flat(axes) for axes in picture.axes] == [[], [4]]


@pytest.mark.parametrize("value", [10.0, 2.0, 10.000000000000002])
def test_equal_values_on_a_logarithmic_axis_get_room(value):
    """However a processor rounds their logarithms: with bars, matplotlib's limits were 4e-15 apart."""
    table = {"low": value, "high": math.nextafter(value, 0), "value": value}
    rows = given([{"x": x, **table} for x in (20, 40, 80)])
    low, high = drawn(Lines(rows=rows, scale="log", bars=True)).axes[0].get_ylim()
    assert low < value / 2
    assert high > 2 * value


def test_a_limit_far_above_everything_has_a_scale_with_room_for_both():
    near, far = (
        drawn(Lines(rows=given([{"x": 1, "value": 1.0}]), limits=(Limit("r"),)), ("r", at)).axes[0] for at in (4, 400)
    )
    assert (near.get_yscale(), far.get_yscale()) == ("linear", "symlog")
    assert far.get_ylim()[1] > 400


def test_errors_have_places_for_zero_and_infinity():
    rows = given(
        [{"x": x, "value": value, "low": math.nan, "high": math.nan} for x, value in enumerate((0, 1e-7, math.inf))]
    )
    (axes,) = drawn(Lines(rows=rows, scale="errors", bars=True)).axes
    named = {label.get_text(): tick for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    points = axes.lines[-1].get_ydata()
    assert [named["0"], named["10⁻⁷"], named["∞"]] == pytest.approx(list(points))
    assert "∞" not in {
        label.get_text()
        for label in drawn(Lines(rows=given([{"x": 0, "value": 1e-3, "low": 0.0, "high": 0.0}]), scale="errors"))
        .axes[0]
        .get_yticklabels()
    }


def test_areas_stand_on_one_another():
    rows = given([{"x": x, "kind": kind, "value": 2.0} for x in (0.0, 1.0) for kind in "ab"])
    (axes,) = drawn(Lines(rows=rows, stacked=True, x_unit="s")).axes
    assert axes.collections[1].get_paths()[0].get_extents().y1 == 4
    assert axes.get_ylim()[0] == 0


def test_points_of_phases_have_their_colours():
    rows = given([{"x": x, "value": 1.0, "phase": phase} for x, phase in enumerate(("make", "talk", "make"))])
    (axes,) = drawn(Lines(rows=rows)).axes
    (points,) = axes.collections
    first, second, third = map(tuple, points.get_facecolors())
    assert first == third != second
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["make", "talk"]


@pytest.mark.parametrize(("ranks", "kinds"), [(2, ["rank 0", "rank 1"]), (9, ["median and range of 9 ranks"])])
def test_many_ranks_are_one_line_with_a_band(ranks, kinds):
    rows = lines_apart(pd.DataFrame({rank: [rank, rank + 1] for rank in range(ranks)}, index=[1, 2]), "rank")
    assert rows["kind"].unique().tolist() == kinds
    assert set(rows["x"]) == {1, 2}
    if ranks == 9:
        assert rows[["value", "low", "high"]].values.tolist() == [[4, 0, 8], [5, 1, 9]]


# -- levels --------------------------------------------------------------------------------------------------------------

PARTS = {"a": Look(0), "b": Look(1)}


def columns_of(axes):
    """The bars at each place: from where to where."""
    found = {}
    for bar in bars(axes):
        found.setdefault(round(bar.get_x() + bar.get_width() / 2, 3), []).append(
            (bar.get_y(), bar.get_y() + bar.get_height())
        )
    return found


def test_parts_stand_on_one_another_and_sides_beside_each_other():
    rows = given(
        [
            {"place": "p", "side": side, "a": 1.0, "b": top, "mark": 5.0}
            for side, top in (("left", 2.0), ("right", math.nan))
        ]
    )
    (axes,) = drawn(Levels(rows=rows, looks=PARTS, mark_word="peak")).axes
    assert list(columns_of(axes).values()) == [[(0, 1), (1, 3)], [(0, 1)]]
    assert {"a", "b", "peak"} <= words(axes.figure)
    assert max(axes.get_ylim()) > 5


def test_a_row_for_each_part_is_the_same():
    rows = given([{"place": place, "kind": kind, "value": 1.0} for place in "pq" for kind in "ab"])
    assert list(columns_of(drawn(Levels(rows=rows)).axes[0]).values()) == [[(0, 1), (1, 2)]] * 2


def test_whole_numbers_keep_their_distance_and_sections_are_named():
    (axes,) = drawn(Levels(rows=given([{"place": place, "value": 1.0} for place in (2, 9)]))).axes
    assert list(columns_of(axes)) == [2, 9]
    (axes,) = drawn(
        Levels(rows=given([{"place": "p", "section": section, "value": 1.0} for section in ("one", "two")]))
    ).axes
    assert {"one", "two"} <= {text.get_text() for text in axes.texts}
    assert len(columns_of(axes)) == 2


def test_a_tone_colours_a_bar_and_its_words_and_lying_bars_have_room_for_words():
    rows = given([{"place": "p", "value": 1.0, "words": "a long sentence after it", "tone": "bad"}])
    (axes,) = drawn(Levels(rows=rows, across=True)).axes
    assert colours(axes.figure)["a long sentence after it"] == LIGHT.bad
    assert axes.get_xlim()[1] > 1.1
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first one is on top


def test_an_edge_between_places_is_a_limit():
    rows = given([{"place": place, "value": 1.0} for place in (0, 1)], edge=(0.5, "limit: 0 versions"))
    picture = drawn(Levels(rows=rows))
    assert "limit: 0 versions" in words(picture)


# -- points --------------------------------------------------------------------------------------------------------------


def test_points_have_the_range_and_median_of_their_rank():
    rows = given(
        [
            {"place": "p", "lane": f"rank {rank}", "kind": "p", "value": value}
            for rank in (0, 1)
            for value in (1.0, 2.0, 6.0)
        ]
    )
    (axes,) = drawn(Points(rows=rows)).axes
    spans = [
        list(line.get_ydata()) for line in axes.lines if len(set(line.get_xdata())) == 1 and len(line.get_ydata()) == 2
    ]
    assert spans == [[1, 6]] * 2
    assert [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "_"] == [2, 2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1"]
    assert axes.get_yscale() == "linear"


def test_times_far_apart_are_on_a_logarithmic_scale():
    rows = given(
        [{"place": place, "lane": "all", "kind": place, "value": value} for place, value in (("p", 1.0), ("q", 100.0))]
    )
    assert drawn(Points(rows=rows)).axes[0].get_yscale() == "log"


def test_a_hollow_point_is_seen_before_a_full_one_of_the_same_value():
    rows = given([{"place": "p", "lane": "all", "kind": kind, "value": 1.0} for kind in ("first", "later")])
    looks = {"first": Look(1, hollow=True), "later": Look(0)}
    first, later = drawn(Points(rows=rows, looks=looks)).axes[0].lines
    assert first.get_zorder() > later.get_zorder()


# -- lanes ---------------------------------------------------------------------------------------------------------------


def test_boxes_lie_at_their_times_in_their_lanes():
    rows = given(
        [
            {"lane": "rank 0", "kind": "train", "left": 0.0, "right": 4.0},
            {"lane": "rank 1", "kind": "train", "state": "idle", "left": 1.0, "right": 2.0, "low": 0.5},
            {"lane": "rank 1", "kind": "grant", "left": 3.0, "right": 3.0},
        ],
        bands=[(2.0, 3.0)],
        ended=5.0,
    )
    looks = {"idle": Look("faint", alpha=0.3), "grant": Look("ink", shape="tick", listed=False)}
    (axes,) = drawn(Lanes(rows=rows, looks=looks, about="time")).axes
    assert boxes(axes, "train") == [(0, 4)]
    assert boxes(axes, "train idle") == [(1, 2)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["train", "idle"]
    (band,) = [patch for patch in axes.patches if patch.get_gid() == "band"]
    assert (band.get_x(), band.get_width()) == (2, 1)
    assert axes.get_xlim() == (0, 5)
    assert axes.get_xlabel() == "time [s]"


def test_lanes_share_the_room_that_there_is():
    few, many = (
        pd.DataFrame([{"lane": str(lane), "kind": "k", "left": 0.0, "right": 1.0} for lane in range(count)])
        for count in (2, 60)
    )
    chart = Lanes(rows=lambda _: few)
    assert chart.inches(few) < 2
    assert chart.inches(many) < 9


def test_names_that_would_touch_are_written_as_one():
    lane = pd.DataFrame({"left": [0.0, 1.0, 2.0, 50.0], "words": ["inactive", "wake", "begin", "end"]})
    assert merged_labels(lane, 60.0, 1.0) == [(0.0, "inactive, wake, begin"), (50.0, "end")]
    assert merged_labels(lane, 60.0, 0.1) == list(zip(lane["left"], lane["words"], strict=True))


def test_of_alternatives_the_first_that_fits_is_written():
    lane = pd.DataFrame({"left": [0.0, 20.0], "words": ["step 1, version 2|step 1|1"] * 2})
    assert merged_labels(lane, 30.0, 1.0) == [(0.0, "step 1, version 2"), (20.0, "step 1")]


def test_the_last_words_have_room():
    rows = given([{"lane": "l", "kind": "k", "left": 9.9, "right": 10.0, "words": "a name at the very end of it"}])
    assert drawn(Lanes(rows=rows)).axes[0].get_xlim()[1] > 11


# -- matrix --------------------------------------------------------------------------------------------------------------


def test_a_cell_above_the_limit_is_marked():
    cells = [
        {"row": "loss", "column": str(value), "words": f"{value:g}", "kind": "measured", "value": value, "heat": 0.5}
        for value in (1.0, 5.0)
    ]
    picture = drawn(Matrix(rows=given(cells), heading="m", limits=(Limit("rule", "above {limit:g}"),)), ("rule", 2))
    assert {"1", "✗ 5", "measured", "above 2"} <= words(picture)
    first, second = axes_of(picture, "m").patches
    assert second.get_facecolor()[:3] != first.get_facecolor()[:3]


def test_words_begin_where_they_are_told():
    cells = [{"row": 0, "column": "0", "start": start, "words": str(start), "tone": "good"} for start in (0.0, 0.5)]
    picture = drawn(Matrix(rows=given(cells), heads=False, heading=" "))
    assert [text.get_position()[0] for text in picture.axes[0].texts] == [0, 0.5]
    assert colours(picture)["0.5"] == LIGHT.good
    assert Mark(1, "") == Mark(1, "", "faint")
