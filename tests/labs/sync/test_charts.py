"""The picture of a sync run: stages at their measured times, events in their order, rates, digests; missing records are left out.

The runs are made up here, in the form in which the lab records.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pandas as pd
import pytest

import kit
from kit.draw.data import read
from kit.draw.style import THEMES
from kit.labs.sync import rules
from kit.labs.sync.charts import rates_by_size, sync_events, sync_stages
from kit.labs.sync.lab import SyncConfig
from kit.results import NotMeasured, create_run, with_ids
from kit.view import named
from kit.view.named import plot_run
from tests.labs.parts import made_up_row
from tests.seen import axes_of, colours, titles, words

SENDER = {"gather": 0.02, "pack": 0.01, "send": 0.03, "verify": 0.004, "teardown": 0.001, "finalize": 0, "publish": 0}
RECEIVER = {"receive": 0.03, "keep": 0.002, "apply": 0.01, "verify": 0.005}
SENT = ("begin", "gathered", "packed", "sent", "teardown", "finalize", "publish", "activate", "end")
ARRIVED = ("begin", "ready", "received", "verified", "applied", "teardown", "finalize", "publish", "activate", "end")
MIB = 2**20
RATES = {"shm": {MIB: 6e9, 8 * MIB: 9e9}, "broadcast": {MIB: 0.5e9, 8 * MIB: 1.5e9}, "serialize": {MIB: 1e9}}


pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def make_sync(tmp_path):
    """Return a function that writes a sync run. `until` is the last (cycle, phase); `differ` counts wrong tensors, `torn` torn forwards."""

    def make(*, until=None, differ=0, torn=0, rates=RATES, events=True, fault=None, old=False, **changed):
        config = dataclasses.asdict(SyncConfig(**changed))
        writer = create_run(tmp_path, "sync", config, {}, fault=fault)
        receivers = range(config["ranks"] - config["replicas"] * config["infer_tp"], config["ranks"])
        overlap = config["placement"] == "overlap"
        clock = 1.8e9

        def tell(cycle, phase, rank, rows):
            about = {"run": writer.id, "lab": "sync", "cycle": cycle, "phase": phase, "rank": rank, "time": clock}
            writer.append([made_up_row(about, *row, old=old) for row in rows])

        def happened(names, pace):
            return [
                ("event", (index - names.index("begin")) * pace, {"event": name, "order": index})
                for index, name in enumerate(names)
            ]

        def stages(table, nth=1):
            return [("stage_seconds", value * nth, {"stage": name}) for name, value in table.items()]

        def sync(phase, rank, nth):
            if rank == 0:
                rows = [("wall", 0.08), ("bytes", 1e6), ("buckets", 3)]
                rows += [
                    ("transport_receivers", count, {"transport": name}) for name, count in (("shm", 3), ("ipc", 0))
                ]
                return rows + stages(SENDER) + happened(SENT, 0.008) * events
            names = ("inactive", "wake", *ARRIVED) if phase == "expand" else ARRIVED
            rows = [("wall", 0.07 + 0.001 * nth), *stages(RECEIVER, nth)]
            return rows + happened(names, 0.007) * events + [("served", 4), ("torn", torn)] * (phase == "refresh")

        cycle_phases = ["train", "refresh", *(["offload", "expand"] if overlap else []), "verify"]
        plan = [(0, "prepare"), *itertools.product(range(1, config["cycles"] + 1), cycle_phases)]
        plan += [(0, "sweep")] * config["sweep"] + [(0, "rehearse")]
        for cycle, phase in plan:
            clock += 1
            for rank in range(config["ranks"]):
                rows = [("seconds", 0.4)]
                if phase in rules.PATHS and (rank == 0 or rank in receivers):
                    rows += sync(phase, rank, rank - receivers[0] + 1)
                if phase == "verify" and rank in receivers:
                    rows += [("tensors_hashed", 10), ("tensors_differ", differ if cycle == 2 else 0)]
                if phase == "sweep" and rank == 0 and rates:
                    rows += [("rate", 12e9, {"transport": "memcpy"}), ("sweep_bytes", 64 * MIB)]
                    rows += [
                        ("rate", rate, {"transport": name, "bucket_size": size})
                        for name, sizes in rates.items()
                        for size, rate in sizes.items()
                    ]
                tell(cycle, phase, rank, rows)
            if (cycle, phase) == until:
                break
        writer.finish()
        return kit.load(writer.dir)

    return make


@pytest.mark.drawn(1, of="themes")
@pytest.mark.parametrize("theme_name", THEMES)
def test_it_tells_the_story(make_sync, theme_name):
    picture = plot_run(make_sync(), theme=theme_name)
    expected = "sync · 5 ranks · tiny, tp 2 · 3 replicas · overlap · transport auto · 3 cycles · finished"
    assert picture.get_suptitle() == expected
    assert [title.split(" (")[0] for title in titles(picture)] == [
        "Stages of each sync, n = 1 each",
        "Expansion of cycle 3, event by event",
        "Transports by bucket size, 64 MiB to one receiver",
    ]
    assert {
        "gather",
        "undo copy",
        "elapsed time",
        "one memcpy, 12",
        "sender, rank 0",
        "replica 2, rank 4",
    } <= words(picture)
    assert "Digests: 90 tensors hashed on 3 receivers over 3 cycles, 0 differ from the trainer's." in words(picture)
    assert "Meanwhile: 36 forwards served during refreshes, 0 with weights of mixed versions." in words(picture)
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_stages_stand_beside_the_time_that_passed(make_sync):
    rows = sync_stages(read(make_sync(cycles=1)))
    assert rows["place"].tolist() == ["refresh\ntook 80 ms"] * 2 + ["expand\ntook 80 ms"] * 2
    sender, last = rows.iloc[0], rows.iloc[1]
    assert sender[["gather", "pack", "send", "verify", "teardown"]].tolist() == [0.02, 0.01, 0.03, 0.004, 0.001]
    # The last receiver is the third, not one of the others.
    assert last[["receive", "verify", "keep", "apply"]].tolist() == pytest.approx([0.09, 0.015, 0.006, 0.03])
    assert rows["mark"].tolist() == pytest.approx([0.08] * 4)


def test_of_many_cycles_the_last_are_drawn(make_sync):
    rows = sync_stages(read(make_sync(cycles=9)))
    assert rows["section"].unique().tolist() == [f"cycle {cycle}" for cycle in range(5, 10)]


def test_events_lie_where_they_happened(make_sync):
    rows = sync_events(read(make_sync()))
    replica = rows[rows["lane"] == "replica 0, rank 2"]
    boxes, events = replica[replica["kind"] != "event"], replica[replica["kind"] == "event"]
    assert boxes["left"].tolist() == pytest.approx([0.007 * index for index in range(-2, 9)])
    assert events["words"].tolist() == ["inactive", "wake", *ARRIVED]


def test_without_an_expansion_the_refresh_is_drawn(make_sync):
    picture = plot_run(make_sync(placement="apart"))
    assert axes_of(picture, "Refresh of cycle 3, event by event")
    assert "inactive" not in " ".join(words(picture))


def test_many_receivers_are_reported_by_the_slowest(make_sync):
    rows = sync_events(read(make_sync(ranks=10, replicas=4, infer_tp=2)))
    assert rows.attrs["shown"] == ", 5 of 8 receivers"
    assert rows["lane"].unique().tolist()[:3] == ["sender, rank 0", "replica 0, rank 2", "replica 0, rank 3"]


def test_rates_have_their_ceiling_and_their_best(make_sync):
    rows = rates_by_size(read(make_sync()))
    lines = {kind.split(":")[0]: line["value"].tolist() for kind, line in rows.groupby("kind")}
    assert lines == {"broadcast": [0.5e9, 1.5e9], "serialize": [1e9], "shm": [6e9, 9e9]}
    assert [mark.value for mark in rows.attrs["marks"]] == [12e9]
    assert {
        "shm: best 9 GB/s at 8 MiB, 75% of memcpy, used here",
        "broadcast: best 1.5 GB/s at 8 MiB, 12% of memcpy",
    } <= set(rows["kind"])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"sweep": False}, "Transports were not compared: sweep is off."),
        ({"until": (2, "refresh")}, "Transports were not compared: the run ended before that."),
        ({"rates": {}}, "Transports were not compared: the run ended before that."),
        ({"until": (1, "expand")}, "Digests: no tensor was hashed on a receiver."),
    ],
)
def test_what_is_missing_is_reported(make_sync, changed, sentence):
    picture = plot_run(make_sync(**changed))
    assert sentence in words(picture)
    assert not any(title.startswith("Medians at") for title in titles(picture))
    assert axes_of(picture, "Stages of each sync")


def test_a_run_without_events_has_no_timeline(make_sync):
    assert titles(plot_run(make_sync(events=False)))[1].startswith("Transports")


def test_a_run_that_broke_before_a_sync_is_drawn_as_any_run(make_sync):
    assert axes_of(plot_run(make_sync(until=(1, "train"))), "Timeline of ranks")


def test_wrong_digests_and_torn_forwards_are_in_the_colour_of_what_is_wrong(make_sync):
    picture = plot_run(make_sync(differ=2, torn=1, fault="swapped"))
    digests = "Digests: 90 tensors hashed on 3 receivers over 3 cycles, 6 differ from the trainer's, first on rank 2 in cycle 2."
    meanwhile = "Meanwhile: 36 forwards served during refreshes, 9 with weights of mixed versions."
    assert {colours(picture)[sentence] for sentence in (digests, meanwhile)} == {THEMES["light"].bad}
    assert "fault: swapped" in picture.get_suptitle()


@pytest.mark.slow
def test_a_run_of_an_older_kit_is_drawn_without_what_it_named_otherwise(make_sync):
    run = make_sync(old=True)
    drawn = titles(plot_run(run))
    assert drawn
    assert not any(title.startswith(("Expansion", "Transports")) for title in drawn)
    assert not {"events", "rates"} & set(named.names(run))
    for name in named.names(run):
        run.plot(name)
    assert len(rules.syncs(run.frame())) == 6
    assert [row for row in run.verdict() if row.passed is False] == []


def test_tables_of_a_run(make_sync):
    run = make_sync()
    table = rules.syncs(run.frame())
    assert list(table["path"]) == ["refresh", "expand"] * 3
    assert table.loc[0, ["transport", "buckets", "wall", "gather", "receiver receive"]].tolist() == [
        "shm to 3", 3, pytest.approx(0.08), pytest.approx(0.02), pytest.approx(0.09)]  # fmt: skip
    frame = run.frame()
    on_gpus = frame.assign(metric=frame["metric"].where(frame["metric"] != "seconds", "driver_used"))
    assert set(rules.syncs(on_gpus)["transport"]) == {"shm to 3, through host memory"}
    assert rules.transports(run.frame())["of_memcpy"].max() == pytest.approx(0.75)
    for asked in (rules.stages, rules.transports, rules.receiver_digests):
        with pytest.raises(NotMeasured):
            asked(run.frame().head(0))


def test_its_drawings_have_names(make_sync):
    run = make_sync()
    assert {"stages", "events", "rates", "memory", "drift"} - set(named.names(run)) == {"memory", "drift"}
    rates = named.plot_run(run, "rates")
    assert titles(rates) == ["Transports by bucket size, 64 MiB to one receiver"]
    assert {"one memcpy, 12", "bucket size [MiB] (medians)"} <= words(rates)  # older runs have no spread
    assert titles(named.plot_run(run, "events")) == ["Expansion of cycle 3, event by event"]
    assert "rates" not in named.names(make_sync(rates={}))


def test_rates_have_their_spread_where_it_was_recorded(make_sync):
    spread = [(MIB, "rate_low", 5e9), (MIB, "rate_high", 7e9), (MIB, "rate_samples", 3)]
    spread += [(8 * MIB, "rate_low", 8e9), (8 * MIB, "rate_high", 9.5e9), (8 * MIB, "rate_samples", 3)]
    run = make_sync()
    frame = run.frame()
    rows = with_ids(frame, "transport", "bucket_size").query("transport == 'shm'")
    more = [rows[rows["bucket_size"] == size].assign(metric=metric, value=value) for size, metric, value in spread]
    more = pd.concat(more)[list(frame.columns)]
    data = replace(read(run), records=pd.concat([frame, more], ignore_index=True))
    rows = rates_by_size(data)
    assert rows[rows["transport"] == "shm"][["low", "high"]].to_numpy().tolist() == [[5e9, 7e9], [8e9, 9.5e9]]
    assert rows.attrs["n"] == "n = 3, median and range"
