"""The pictures of a share run. The ledger is written by hand where positions are compared, otherwise simulated."""

from __future__ import annotations

import pandas as pd
import pytest

from kit.draw.style import THEMES
from kit.labs.share import tables
from kit.labs.share.charts import (
    MIB,
    OWNERS,
    device_lanes,
    loop_of,
    memory_over_time,
    request_lanes,
    stretches_of,
    utilisation,
    version_lanes,
)
from kit.view import named
from kit.view.named import album, plot_run
from tests.labs.share.runs import BY_HAND, HIGH, LOW, make
from tests.seen import axes_of, titles, words

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return make(tmp_path_factory.mktemp("share"))


@pytest.fixture
def by_hand(tmp_path):
    return make(tmp_path, ledgers={"shared": BY_HAND}, phases=("shared",), memory=False)


@pytest.mark.drawn(1, of="themes")
@pytest.mark.parametrize("theme_name", THEMES)
def test_it_tells_the_story(simulated, theme_name):
    picture = plot_run(simulated, theme=theme_name)
    assert picture.get_suptitle() == (
        "share · 6 ranks · tiny · 2 devices · training: a on 0, b on 1 · planner gap-ratio · 3 and 3 steps · finished"
    )
    assert [title.split(" (")[0].split(":")[0] for title in titles(picture)] == [
        "Phase shared", "Requests", "Utilisation of each device by its owner's work", "Phase shared",
        "Device 0", "Device 1", "Time of each loop over the same work", "Waits for devices",
    ]  # fmt: skip
    assert {"pipeline a", "pipeline b", "device 0", "a trainer", "b generation", "a replica 1", "step 2"} <= words(
        picture
    )
    assert any(word.startswith("budget ") for word in words(picture))
    assert picture._repr_png_().startswith(b"\x89PNG")


def spans(rows, kind, state=""):
    """Left and right ends of the boxes of a kind and state."""
    mine = rows[(rows["kind"] == kind) & (rows["state"].fillna("") == state) & (rows["right"] > rows["left"])]
    return sorted(mine[["left", "right"]].round(6).values.tolist())


def test_bars_lie_where_the_owner_did_what_they_say(by_hand):
    rows = device_lanes(album(by_hand).data)
    assert spans(rows, "pipeline a", "generating") == [[4, 6]]
    assert spans(rows, "pipeline a", "falls asleep, wakes, gets weights") == [[1, 2], [2, 3], [6, 7]]
    assert spans(rows, "pipeline b", "training") == [[8, 8.5], [8.5, 11]]
    assert spans(rows, "sync of weights") == [[2, 3]]
    assert ["step 0|0", 8] in rows[["words", "left"]].values.tolist()


def test_requests_wait_until_their_grant(by_hand):
    rows = request_lanes(album(by_hand).data)
    assert set(rows["lane"]) == {"a generation", "b trainer", "b generation"}
    assert spans(rows, "pipeline b") == [[0.5, 1], [5.5, 7]]
    assert sorted(rows[rows["kind"] == "grant"]["left"].round(6)) == [2, 7]
    assert spans(rows, "pipeline b", "lease") == [[7, 12]]


def test_a_bin_is_full_where_the_owner_works_all_of_the_time(by_hand):
    rows = utilisation(album(by_hand).data)
    mine = rows[rows["kind"] == "pipeline b"]
    heights = mine["high"] - mine["low"]
    assert heights.max() == pytest.approx(1)
    assert ((mine["right"] - mine["left"]) * heights).sum() == pytest.approx(3)  # seconds of training
    assert set(rows["words"].dropna()) == {"36% at work", "0% at work"}


def test_versions_are_drawn_where_they_were(by_hand):
    loop = loop_of(album(by_hand).data)
    stretches = [
        stretch._replace(left=stretch.left - loop.began, right=stretch.right - loop.began)
        for stretch in stretches_of(loop)
    ]
    assert ("a", "replica 0", -1, 2, 3) in stretches
    assert ("a", "replica 0", 0, 3, 6) in stretches
    assert ("b", "trainer", 0, 0, 11) in stretches
    assert list(version_lanes(album(by_hand).data)["lane"].unique()) == ["a trainer", "a replica 0", "b trainer"]


def test_memory_is_above_the_least_of_each_rank(simulated):
    rows = memory_over_time(album(simulated).data)
    first = rows[rows["panel"].str.startswith("Device 0")]
    # The trainer of a, and a replica of each pipeline.
    assert first["panel"].iloc[0].endswith(f"({3 * LOW / MIB:.1f} MiB)")
    assert first["base"].iloc[0] == pytest.approx((HIGH - LOW) / MIB)
    assert first.groupby("kind")["value"].min().tolist() == [0, 0]
    assert first.groupby("x")["value"].sum().max() == pytest.approx((HIGH - LOW) / MIB)


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
    picture = plot_run(run)
    assert axes_of(picture, "Phase shared: owner").get_title(loc="left").endswith("the first 16 of 20 devices")
    assert axes_of(picture, "Utilisation").get_title(loc="left").endswith("the first 8 of 20 devices")
    assert axes_of(picture, "Device 0").get_title(loc="left").endswith("the first 4 of 20 devices")
    assert OWNERS.inches(device_lanes(album(run).data)) < 6


def test_an_early_end_is_drawn_as_any_run(tmp_path):
    nothing = make(tmp_path / "nothing", until="prepare")
    assert not {"devices", "utilisation", "versions", "loops"} & set(named.names(nothing))
    early = make(tmp_path / "early", until="alone_a")
    assert axes_of(plot_run(early), "Phase alone_a: owner of each device")


@pytest.mark.slow
def test_its_plots_have_names(simulated):
    assert set(named.names(simulated)) >= {"devices", "utilisation", "versions", "device-memory", "loops"}
    for name in named.names(simulated):
        named.plot_run(simulated, name)
