"""The pictures of a share run. The ledger is written by hand where positions are compared, otherwise simulated."""

from __future__ import annotations

import warnings

import matplotlib as mpl
import pandas as pd
import pytest

from kit.draw.style import THEMES
from kit.labs.share import tables
from kit.labs.share.pictures import LANE, levels
from kit.labs.share.pictures.lanes import devices_height, loop_of, stretches, version_lanes
from kit.view import named
from kit.view.named import album, plot
from tests.labs.share.runs import BY_HAND, HIGH, LOW, make


@pytest.fixture(autouse=True)
def strict():
    """Make warnings errors: a layout that does not fit only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return make(tmp_path_factory.mktemp("share"))


@pytest.fixture
def by_hand(tmp_path):
    return make(tmp_path, ledgers={"shared": BY_HAND}, phases=("shared",), memory=False)


def axes_of(picture, title):
    return next(axes for axes in picture.axes if axes.get_title(loc="left").startswith(title))


def titles(picture):
    return [axes.get_title(loc="left") for axes in picture.axes if axes.get_title(loc="left")]


def words(picture):
    return {text.get_text().strip() for text in picture.findobj(mpl.text.Text)}


def named_parts(axes, name):
    """Left and right ends of the bars with this name."""
    drawn = [path.get_extents() for one in axes.collections if one.get_gid() == name for path in one.get_paths()]
    return [(pytest.approx(box.x0), pytest.approx(box.x1)) for box in drawn]


@pytest.mark.parametrize("theme_name", THEMES)
def test_it_tells_the_story(simulated, theme_name):
    picture = plot(simulated, theme=theme_name)
    assert picture.get_suptitle() == (
        "share · 6 ranks · tiny · 2 devices · training: a on 0, b on 1 · planner gap-ratio · 3 and 3 steps · finished"
    )
    assert [title.split(" (")[0].split(":")[0] for title in titles(picture)] == [
        "Phase shared", "Requests", "Utilisation of each device by its owner's work", "In total", "Phase shared",
        "Device 0", "Device 1", "Time of each loop over the same work", "Waits for devices",
    ]  # fmt: skip
    assert {"pipeline a", "pipeline b", "device 0", "a trainer", "b generation", "a replica 1", "step 2"} <= words(
        picture
    )
    assert any(word.startswith("budget ") for word in words(picture))
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_bars_lie_where_the_owner_did_what_they_say(by_hand):
    axes = axes_of(plot(by_hand, "devices"), "Phase shared")
    assert named_parts(axes, "a generating") == [(4, 6)]
    assert named_parts(axes, "a switching") == [(1, 2), (2, 3), (6, 7)]
    assert named_parts(axes, "b training") == [(8, 8.5), (8.5, 11)]
    assert named_parts(axes, "sync") == [(2, 3)]
    assert ("step 0", 8) in [(text.get_text(), round(text.get_position()[0])) for text in axes.texts]


def test_requests_wait_until_their_grant(by_hand):
    axes = axes_of(plot(by_hand, "devices"), "Requests")
    assert {text.get_text() for text in axes.get_yticklabels()} == {"a generation", "b trainer", "b generation"}
    assert named_parts(axes, "b waits") == [(0.5, 1), (5.5, 7)]
    assert sorted(round(float(line.get_xdata()[0]), 3) for line in axes.lines) == [2, 7]
    assert named_parts(axes, "b has devices") == [(7, 12)]


def test_a_bin_is_full_where_the_owner_works_all_of_the_time(by_hand):
    picture = plot(by_hand, "utilisation")
    axes = axes_of(picture, "Utilisation")
    drawn = [one for one in axes.collections if one.get_gid() == "b working"]
    boxes = [path.get_extents() for one in drawn for path in one.get_paths()]
    assert max(box.height for box in boxes) == pytest.approx(LANE)
    area = sum(box.width * box.height for box in boxes) / LANE
    assert area == pytest.approx(3, rel=1e-6)  # seconds of training
    assert {"36 % at work", "0 % at work"} <= words(picture)


def test_versions_are_drawn_where_they_were(by_hand):
    loop = loop_of(album(by_hand).data)
    found = [
        (one.pipeline, one.what, one.version, one.left - loop.began, one.right - loop.began) for one in stretches(loop)
    ]
    assert ("a", "replica 0", -1, 2, 3) in found
    assert ("a", "replica 0", 0, 3, 6) in found
    assert ("b", "trainer", 0, 0, 11) in found
    assert list(version_lanes(loop, stretches(loop))) == [("a", "trainer"), ("a", "replica 0"), ("b", "trainer")]


def test_memory_is_above_the_least_of_each_rank(simulated):
    loop = loop_of(album(simulated).data)
    table = tables.memory(simulated.frame())
    part = levels(table[table["device"] == 0], loop)
    assert part.least == 3 * LOW  # the trainer of a, and a replica of each pipeline
    assert part.budget == HIGH - LOW
    assert {float(stack.min()) for stack in part.stacks} == {0}
    assert max(float(sum(at)) for at in zip(*part.stacks, strict=True)) == HIGH - LOW


def test_a_loop_under_way_is_drawn(by_hand, tmp_path):
    """A run can be drawn at any moment: after each ledger row that could be the last one on disk."""
    frame = by_hand.frame()
    mine = frame[(frame["phase"] == "shared") & (frame["rank"] == -1)]
    for last in range(15, len(BY_HAND)):
        part = pd.concat([frame[frame["phase"] != "shared"], mine.iloc[:last]])
        assert tables.shown(part) == "shared"
        book = tables.ledger(part)
        assert not tables.uses(book).empty
        assert tables.waits(book)
        assert not tables.leases(part).empty


@pytest.mark.slow
def test_many_devices_and_replicas_fit(tmp_path):
    """There are more devices than lanes, and replicas with two devices."""
    every = tuple(range(20))
    run = make(
        tmp_path, devices=20, infer=every, infer_tp=2, tp=2, **{"a.train": every[:2], "b.train": every[2:4]},
        phases=("shared",),
    )  # fmt: skip
    picture = plot(run)
    assert axes_of(picture, "Phase shared: owner").get_title(loc="left").endswith("the first 16 of 20 devices")
    assert axes_of(picture, "Utilisation").get_title(loc="left").endswith("the first 8 of 20 devices")
    assert axes_of(picture, "Device 0").get_title(loc="left").endswith("the first 4 of 20 devices")
    assert devices_height(loop_of(album(run).data)) < 5


def test_an_early_end_is_drawn_as_any_run(tmp_path):
    nothing = make(tmp_path / "nothing", until="prepare")
    assert not {"devices", "utilisation", "versions", "loops"} & set(named.names(nothing))
    early = make(tmp_path / "early", until="alone_a")
    assert axes_of(plot(early), "Phase alone_a: owner of each device")


def test_its_plots_have_names(simulated):
    assert set(named.names(simulated)) >= {"devices", "utilisation", "versions", "device-memory", "loops"}
    for name in named.names(simulated):
        named.plot(simulated, name)
