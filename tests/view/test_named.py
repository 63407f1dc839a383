"""Single plots by name: each has its axes, units and numbers, and its limit where a person moved it. Runs are made up here."""

from __future__ import annotations

import dataclasses
import re

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex

import kit
from kit.draw.picture import PLACES, SHEET, inline
from kit.draw.style import DARK, LIGHT, THEMES
from kit.errors import BadInput
from kit.labs.bench_view.made_up import made_up
from kit.view import named

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A made-up run in the offload lab's format."""
    return kit.load(made_up(tmp_path_factory.mktemp("runs"), 3000))


def words(picture):
    return {text.get_text().strip() for text in picture.findobj(mpl.text.Text)}


def titles(picture):
    return [axes.get_title(loc="left") for axes in picture.axes if axes.get_title(loc="left")]


def flat(axes):
    """The heights of the limit lines in a drawing."""
    return [line.get_ydata()[0] for line in axes.lines if line.get_gid() == "limit"]


def test_the_names_are_those_that_the_run_has_something_for(run, make_run):
    assert named.names(run) == ["overview", "memory", "drift", "times", "census", "timeline", "verdict"]
    assert named.names(make_run(cycles=0)) == ["overview"]
    assert named.names(make_run(cycles=1)) == ["overview", "memory", "times", "census", "timeline"]


@pytest.mark.drawn(4, of="alone")
@pytest.mark.parametrize("theme_name", THEMES)
@pytest.mark.parametrize("name", ["memory", "drift", "times", "census", "timeline", "verdict"])
def test_each_is_drawn_alone_with_its_origin(run, name, theme_name):
    picture = named.plot_run(run, name, theme=theme_name)
    assert picture.get_suptitle().startswith("offload · 4 ranks · tiny, tp 2 · mode exact")
    assert to_hex(picture.get_facecolor()) == THEMES[theme_name].paper
    assert picture._repr_png_().startswith(b"\x89PNG")
    for axes in picture.axes:
        if axes.axison:
            assert re.search(r"\[.+\]|count|cycle|rank", axes.get_ylabel() + axes.get_xlabel()), axes


def test_what_each_shows(run):
    def seen(name):
        return named.plot_run(run, name)

    assert titles(seen("memory")) == ["Host memory of a rank, 320.0 MiB at the baseline (median and range of 4 ranks)"]
    assert titles(seen("drift")) == ["Drift of anonymous memory while released"]
    assert "cycle (a point is one sample)" in words(seen("drift"))
    assert titles(seen("times")) == ["Time per phase and rank"]
    assert "cycle 1, n = 1" in words(seen("times"))
    assert titles(seen("census")) == [
        "Process groups (without a job 1)",
        "Open files (without a job 1)",
        "Sockets (without a job 1)",
        "Threads (without a job 1)",
    ]
    timeline = seen("timeline")
    assert {"rank 0", "rank 3", "time since the first phase began [s]"} <= words(timeline)
    bars = [path for axes in timeline.axes for drawn in axes.collections for path in drawn.get_paths()]
    assert len(bars) == (run.frame()["metric"] == "seconds").sum()
    assert {"✓", "memory_drift"} <= words(seen("verdict"))


def test_a_tolerance_moves_its_line_and_is_reported(run):
    plain, moved = (named.plot_run(run, "drift", tolerances=limits) for limits in (None, {"memory_drift": 7.5}))
    assert (flat(plain.axes[0]), flat(moved.axes[0])) == ([200], [7.5])
    assert "limit 7.5 MiB" in words(moved)
    assert moved.get_suptitle().endswith("finished · limits moved: memory_drift 7.5")
    census = named.plot_run(run, "census", tolerances={"fds_return": 9})
    by_title = {axes.get_title(loc="left").partition(" (")[0]: flat(axes) for axes in census.axes}
    assert by_title == {"Process groups": [1], "Open files": [29], "Sockets": [], "Threads": [20]}
    assert "✗ FAIL" in words(named.plot_run(run, "verdict", tolerances={"fds_return": -1}))
    assert "limits moved: memory_drift 7.5" in named.plot_run(run, tolerances={"memory_drift": 7.5}).get_suptitle()
    with pytest.raises(BadInput, match="unknown tolerance 'drift'"):
        named.plot_run(run, "drift", tolerances={"drift": 1})


def test_a_plot_changes_with_the_limits_that_are_in_it_alone(run):
    album = named.album(run)
    assert {name for name in album.names if album.moves_with(name, {"memory_drift"})} == {
        "overview",
        "drift",
        "verdict",
    }
    assert album.moves_with("census", {"fds_return"})
    assert not album.moves_with("memory", {"fds_return", "memory_drift"})


def test_a_plot_that_is_like_another_is_laid_out_as_that_is(run):
    album = named.album(run)
    first = album.draw("census")
    first.draw_without_rendering()
    second = album.draw("census", tolerances={"fds_return": 3}, like=first)
    second.draw_without_rendering()
    assert [axes.get_position().bounds for axes in second.axes] == [axes.get_position().bounds for axes in first.axes]
    other = album.draw("census", like=album.draw("drift"))  # a plot with different parts
    assert other.get_layout_engine() is not None
    assert second.get_layout_engine().__class__.__name__ == "PlaceHolderLayoutEngine"


def test_names_and_options_that_are_wrong_are_reported(run, make_run):
    with pytest.raises(BadInput, match="has no plot 'drfit'; its plots are: overview, memory, drift"):
        run.plot("drfit")
    with pytest.raises(BadInput, match="has no plot 'rates'"):
        run.plot("rates")
    with pytest.raises(BadInput, match="light, dark, not 'pink'"):
        run.plot("drift", theme="pink")
    with pytest.raises(BadInput, match="has no plot 'drift'"):
        named.plot_run(make_run(cycles=1), "drift")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_each_is_saved(run, tmp_path, suffix):
    path = run.plot("drift", theme="dark").save(tmp_path / f"drift{suffix}")
    text = path.read_bytes()
    assert text.startswith(b"\x89PNG") if suffix == ".png" else DARK.series[0].encode() in text


def test_in_a_page_a_picture_takes_the_colours_of_its_theme(run):
    page = inline(named.plot_run(run, "drift"), 'Drift "of" <it>')
    assert 'aria-label="Drift &quot;of&quot; &lt;it&gt;"' in page
    assert f"stroke: var({PLACES[LIGHT.series[0]]})" in page
    assert not set(re.findall("#[0-9a-f]{6}", page)) & set(PLACES)
    assert "<style" not in page  # matplotlib's style would apply to every drawing on the page
    assert 'href="http' not in page
    used = set(re.findall(r"url\(#(\w+)\)", page))
    assert used
    assert all(f'id="{name}"' in page for name in used)
    again = inline(named.plot_run(run, "drift"), "Drift")
    assert not used & set(re.findall(r'id="(p\w{10})"', again))  # two pictures on a page share no ids


def test_a_cell_shows_a_picture_in_the_colours_of_its_page_and_a_dark_one_as_it_is(run):
    page = run.plot("drift")._repr_html_()
    assert page.startswith(f"<style>{SHEET}</style>")
    assert f"stroke: var({PLACES[LIGHT.series[0]]})" in page
    assert run.plot("drift", theme="dark")._repr_html_() is None


def test_both_themes_have_the_same_colours_in_the_same_places():
    assert len(PLACES) == len(dataclasses.fields(LIGHT)) - 1 + len(LIGHT.series)  # all colours differ
    assert len(LIGHT.series) == len(DARK.series)


def test_drift_of_any_run_is_after_its_last_phase(make_run):
    run = make_run(phases=("make", "use"))
    assert titles(named.plot_run(run, "drift")) == ["Drift of anonymous memory after use"]
    assert flat(named.plot_run(run, "drift").axes[0]) == []
