"""The tables of a share run. The ledger is written by hand where numbers are compared, otherwise simulated."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pandas as pd
import pytest

from kit.draw.data import read
from kit.labs.share import tables
from kit.labs.share.drive import together
from kit.labs.share.lab import ShareConfig
from kit.labs.share.simulated import AS_CONFIGURED
from kit.results import NotMeasured
from kit.share.judge.books import Books, WaitingRequest
from kit.view import named
from tests.labs.share import runs
from tests.labs.share.runs import BY_HAND, make

BEGAN = runs.BEGAN + 0.5  # after the phase prepare


@pytest.fixture
def by_hand(tmp_path):
    return make(tmp_path, ledgers={"shared": BY_HAND}, phases=("shared",), memory=False).frame()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return make(tmp_path_factory.mktemp("share"))


def test_a_simulated_run_has_a_track_for_each_device_in_its_timeline():
    config, rows = ShareConfig(simulated=True, ranks=0), []
    together(SimpleNamespace(config=config, append=rows.extend), AS_CONFIGURED)
    first, last = rows[0].time, max(row.time for row in rows)
    owned = sorted((row for row in rows if row.metric == "owned"), key=lambda row: (row["track"], row.start))
    assert {row["track"] for row in owned} == {f"device {device}" for device in range(config.devices)}
    assert {row.text.partition(".")[0] for row in owned} == {*config.names}
    for row, after in itertools.pairwise(owned):
        assert first <= row.start <= row.time <= last
        assert row["track"] != after["track"] or row.time <= after.start


def test_every_second_of_a_device_has_a_use(by_hand):
    table = tables.uses(tables.ledger(by_hand))
    found = [(row.device, row.pipeline, row.use, row.left - BEGAN, row.right - BEGAN) for row in table.itertuples()]
    assert found == [
        (0, "-", "idle", 0, 1),
        (0, "a", "switching", 1, 2),  # wakes
        (0, "a", "switching", 2, 3),  # gets weights
        (0, "a", "waiting", 3, 4),
        (0, "a", "generating", 4, 6),
        (0, "a", "switching", 6, 7),  # falls asleep
        (0, "b", "waiting", 7, 8),
        (0, "b", "training", 8, 8.5),  # begin
        (0, "b", "training", 8.5, 11),  # finish
        (0, "b", "waiting", 11, 12),
        (0, "-", "idle", 12, 14),
        (1, "-", "idle", 0, 14),
    ]


def test_each_idle_second_has_a_cause(by_hand):
    nothing = dict.fromkeys(tables.CAUSES, 0.0)
    assert tables.idle(by_hand).to_dict("records") == [
        {
            "device": 0,
            **nothing,
            "planner": 1.0,
            "no request": 2.0,
        },  # a's replica could wake at once; at the end nobody needs it
        {"device": 1, **nothing, "switch": 2.0, "no request": 12.0},
    ]


def test_an_idle_device_of_a_request_that_needs_another_one_too_is_starved():
    books = Books(3)
    books.clusters, books.tp = {"a": {"trainer": (0, 1)}, "b": {"trainer": (1,)}}, {"a": 1, "b": 1}
    books.waiting, books.held = (
        {("a", "trainer"): WaitingRequest("training", 1, 0, 0.0)},
        {("b", "trainer"): "training"},
    )
    assert tables.idle_by_cause(books) == {0: "starved", 2: "no request"}
    books.held = {}
    assert tables.idle_by_cause(books) == {0: "planner", 1: "planner", 2: "no request"}


def test_leases_are_counted_by_device_and_owner(by_hand):
    rows = {(row["device"], row["owner"]): row for row in tables.leases(by_hand).to_dict("records")}
    a, b, idle = rows[0, "a"], rows[0, "b"], rows[1, "-"]
    assert (a["leases"], a["seconds"], a["generating"], a["switching"], a["unused"]) == (1, 6, 2, 3, 1)
    assert (b["leases"], b["seconds"], b["training"], b["unused"]) == (1, 5, 3, 2)
    assert (idle["seconds"], idle["share"], idle["unused"]) == (14, 1, 14)
    assert a["share"] == pytest.approx(6 / 14)


def seen(frame, metric, *rows):
    """Add rows of an observer, given as value and ids."""
    more = [
        {**frame.iloc[0], "phase": "shared", "metric": metric, "value": value, "text": "", "ids": json.dumps(ids)}
        for value, ids in rows
    ]
    return pd.concat([frame, pd.DataFrame(more)])


def test_a_device_is_used_by_processor_time_or_by_work_where_a_loop_is_paced(by_hand):
    frame = seen(by_hand, "owned", (5.0, {"device": 0, "cpu_s": "2.5"}), (5.0, {"device": 0, "cpu_s": "1"}))
    assert tables.utilisation(frame).to_dict("list") == {
        "device": [0, 1], "used": [pytest.approx(3.5 / 14), 0], "by": ["cpu", "cpu"],
    }  # fmt: skip
    for rows in (tables.utilisation(frame, paced=True), tables.utilisation(by_hand)):
        assert rows.to_dict("list") == {"device": [0, 1], "used": [pytest.approx(5 / 14), 0], "by": ["work", "work"]}


def test_what_the_driver_says_of_a_gpu_comes_first(by_hand):
    frame = seen(by_hand, "gpu_busy", (40, {"gpu": 0}), (60, {"gpu": 0}))
    assert tables.utilisation(frame).to_dict("list") == {"device": [0, 1], "used": [0.5, 0.5], "by": ["gpu", "gpu"]}


def test_a_switch_has_its_parts(by_hand):
    first, second = tables.switches(by_hand).to_dict("records")
    assert (first["expands"], first["shrink"], first["expand"], first["weights"], first["total"]) == (
        "a.generation:0", 0, 1, 1, 2,
    )  # fmt: skip
    assert (second["grants"], second["shrink"], second["expand"], second["total"]) == ("b.trainer:0", 1, 0, 1)


def test_waits_end_with_the_grant(by_hand):
    rows = {(row["pipeline"], row["kind"]): row for row in tables.requests(by_hand).to_dict("records")}
    assert rows["a", "generation"]["longest wait"] == pytest.approx(2)
    assert rows["b", "training"]["waited"] == pytest.approx(1.5)
    assert rows["b", "admission"]["waited"] == pytest.approx(0.5)
    assert rows["a", "suspended"]["waited"] == pytest.approx(6)  # its replica left at 6, and its progress ended at 12
    assert {row["granted"] for key, row in rows.items() if key[1] != "suspended"} == {1}


def test_a_request_that_nobody_answers_is_open(tmp_path):
    ends = ("granted", "release")
    rows = [one for one in BY_HAND if not (one[0] in ends and one[2]["kind"] == "training")]
    frame = make(tmp_path, ledgers={"shared": rows}, phases=("shared",), memory=False).frame()
    (one,) = [one for one in tables.waits(tables.ledger(frame)) if one.kind == "training"]
    assert one.end == "open"
    assert one.right - one.left == pytest.approx(8.5)


def test_a_request_whose_time_is_over_has_expired(tmp_path):
    ends = ("granted", "release")
    rows = [one for one in BY_HAND if not (one[0] in ends and one[2]["kind"] == "training")]
    late = {"pipeline": "b", "cluster": "trainer", "kind": "training"}
    more = [("expired", 12.0, late), ("error", 12.5, {**late, "of": "acquire"})]
    rows = sorted([*rows, *more], key=lambda one: one[1])
    frame = make(tmp_path, ledgers={"shared": rows}, phases=("shared",), memory=False).frame()
    (one,) = [one for one in tables.waits(tables.ledger(frame)) if one.kind == "training"]
    assert one.end == "expired"


def test_loops_are_compared_with_the_bound(simulated):
    table = tables.loops(simulated.frame()).set_index("loop")
    assert list(table.index) == ["shared", "bound", "a alone", "b alone", "serial", "static"]
    alone = table.loc[["a alone", "b alone"], "seconds"]
    assert table.loc["serial", "seconds"] == pytest.approx(alone.sum())
    assert table.loc["bound", "seconds"] >= alone.max()
    assert table.loc["shared", "times bound"] == pytest.approx(
        table.loc["shared", "seconds"] / table.loc["bound", "seconds"]
    )
    by = tables.arithmetic(simulated.frame())
    assert table.loc["static", "seconds"] == by.static == max(by.work.values())  # one device for each of two pipelines
    assert list(table["known by"]) == ["measured", "arithmetic", "measured", "measured", "arithmetic", "arithmetic"]


def test_work_of_the_loops_alone_is_counted_by_devices(simulated):
    book = tables.ledger(simulated.frame(), "alone_a")
    clusters = {row.who: {"trainer": (0,)} for row in book.of("clusters")}
    one = tables.needed(book, clusters, {"a": 1})
    assert tables.needed(book, {"a": {"trainer": (0, 1)}}, {"a": 2}) == pytest.approx(2 * one)


def test_pipelines_have_what_they_did_and_what_it_cost(simulated):
    table = tables.progress(simulated.frame()).set_index("pipeline")
    assert table["version"].tolist() == [3, 3]
    assert table["groups trained"].tolist() == [12, 12]
    assert (table["slow-down"] > 1).all()
    assert table["share"].sum() == pytest.approx(1)
    assert (table["working"] + table["switching"] <= table["device-seconds"]).all()


def test_devices_times_are_whole(simulated):
    frame = simulated.frame()
    began, ended = tables.ends(tables.ledger(frame))
    by = tables.leases(frame).groupby("device")["seconds"].sum()
    assert by.tolist() == pytest.approx([ended - began] * 2)


def test_what_is_missing_is_reported(tmp_path):
    nothing = make(tmp_path, until="prepare")
    for table in (tables.leases, tables.switches, tables.requests, tables.progress, tables.loops):
        with pytest.raises(NotMeasured):
            table(nothing.frame())


def test_its_tables_have_names_and_units(simulated):
    for name in ("leases", "switches", "requests", "pipelines", "loops"):
        table = named.tables(simulated)[name]
        columns = table.rows(read(simulated)).columns
        assert set(table.units) <= {*columns}, name
        assert not table.worst or table.worst in columns
