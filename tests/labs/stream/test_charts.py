"""The picture and tables of a stream run. The ledgers are simulated, or written by hand where numbers are compared."""

from __future__ import annotations

import dataclasses
import itertools

import pandas as pd
import pytest

import kit
from kit.draw.data import read
from kit.draw.style import THEMES
from kit.errors import BadInput
from kit.labs.stream import tables
from kit.labs.stream.charts import (
    WHAT_IF,
    buffer_over_time,
    divergences,
    drift_by_position,
    every_loop,
    lanes_of,
    last_steps,
    losses,
    recomputed_tokens,
    rewards,
    tokens_by_lag,
)
from kit.labs.stream.lab import StreamConfig, settings
from kit.labs.stream.tables import drift
from kit.results import NotMeasured, Row, create_run
from kit.stream.ports import drifted
from kit.stream.simulated import Durations, pace, simulate
from kit.view import named
from kit.view.named import plot_run
from tests.seen import axes_of, boxes, titles, words

BEGAN = 1.8e9
VERIFIED = {"tokens": 900, "decidable": 850, "wrong_stamps": 0, "samples": 80, "samples_over_syncs": 20}
RESULTS = {"global_loss": 1.0, "grad_norm": 2.0, "gen_kl_error": 0.25}  # of the first step, then less
CALLS = [
    ("reset", 0.1),
    ("sync", 0.2),
    ("decode", 2.0),
    ("logprobs", 0.1),
    ("begin", 0.1),
    ("microbatch", 0.4),
    ("finish", 0.2),
]


pytestmark = pytest.mark.usefixtures("strict")


def events(ledger):
    """The rows of a ledger by hand: name, time, ids."""
    return [Row(metric=name, time=when, ids=ids) for name, when, ids in ledger]


@pytest.fixture
def make_stream(tmp_path):
    """Return a function that writes a stream run, with given or simulated ledgers. `until` is the last phase."""

    def make(
        *, until=None, ledgers=None, verified=VERIFIED, bound=False, durations=None, prepare=lambda _: None, **changed
    ):
        config = StreamConfig(**changed)
        writer = create_run(tmp_path, "stream", dataclasses.asdict(config), {})
        clock, known = BEGAN, {}

        def tell(cycle, phase, rank, metric, value, **more):
            unit = "" if value is None else "s" if metric in ("seconds", "call") else "1"
            about = {"run": writer.id, "lab": "stream", "cycle": cycle, "phase": phase, "rank": rank}
            writer.append([Row(**about, metric=metric, value=value, unit=unit, **more)])

        def tell_drift(cycle, clock):
            for lag, position in itertools.product((0, 1), range(4)):
                ids = {"lag": lag, "position": position, "tokens": 2}
                for name, value in drifted([0.01 * position, -0.1 * lag]).items():
                    tell(cycle, "verify", 0, name, value, time=clock, ids=ids)

        def tell_results(cycle, phase, row, when):
            for name, value in RESULTS.items() if row.event == "finish" else ():
                ids = {name: row[name] for name in ("step", "update")}
                tell(cycle, phase, 0, name, value / (1 + row["step"]), time=when, ids=ids)

        def tell_paces(cycle, phase, clock, known):
            for loop in ("stream", "bound") if phase == "bound" else ():
                for metric, value in pace(known[loop]).items():
                    tell(cycle, phase, -1, metric, value, time=clock, ids={"loop": loop})

        phases = ["prepare", "plain", "lockstep", "stream", "verify", *(["bound"] if bound else [])]
        for cycle, phase in enumerate(phases):
            began = clock
            if phase == "plain":
                for name, seconds in CALLS:
                    clock += seconds
                    rank = 1 if name == "decode" else 0
                    tell(cycle, phase, rank, "call", seconds, time=clock, start=clock - seconds, ids={"call": name})
            if phase in ("lockstep", "stream", "bound"):
                chosen = settings(config)
                if phase == "lockstep":
                    chosen = dataclasses.replace(
                        chosen, sampler="strict", window=0, places=config.groups, slots=config.groups
                    )
                if phase in (ledgers or {}):
                    rows = events(ledgers[phase])
                else:
                    rows = simulate(chosen, durations or Durations(), prepare=prepare).rows
                tell(
                    cycle,
                    phase,
                    0,
                    "digest",
                    None,
                    time=clock - 5,
                    ids={"version": 0},
                    text="of a rank, not of the ledger",
                )
                for row in rows:
                    tell(cycle, phase, -1, row.event, None, time=began + row.time, ids=row.ids)
                    tell_results(cycle, phase, row, began + row.time)
                clock = began + rows[-1].time
                known[phase] = rows
                tell_paces(cycle, phase, clock, known)
            if phase == "verify":
                for name, value in verified.items():
                    tell(cycle, phase, 0, name, value, time=clock)
                tell_drift(cycle, clock)
            clock += 0.5
            for rank in range(config.ranks):
                tell(cycle, phase, rank, "seconds", clock - began, time=clock)
            if phase == until:
                break
        writer.finish()
        return kit.load(writer.dir)

    return make


def row(name, when, **ids):
    return name, when, ids


def sent(group, sample, replica, when):
    return row("sent", when, group=group, sample=sample, replica=replica, attempt=0)


def tokens(sample, when, version, first, count):
    return row("tokens", when, group=0, sample=sample, replica=0, version=version, first=first, count=count)


# One replica. Group 0 has two samples; sample 1 spans the sync of version 1, from 4 to 5 s. Group 1 is evicted.
BY_HAND = [
    row("capacity", 0.0, places=2, slots=2, window=1),
    row("joined", 0.0, replica=0),
    row("reserved", 1.0, group=0, version=0),
    sent(0, 0, 0, 1.0),
    sent(0, 1, 0, 1.0),
    row("started", 2.0, group=0, sample=0, replica=0, version=0),
    row("started", 2.0, group=0, sample=1, replica=0, version=0),
    tokens(0, 2.0, 0, 0, 4),
    tokens(1, 2.1, 0, 0, 4),
    tokens(0, 3.0, 0, 4, 2),
    tokens(1, 3.0, 0, 4, 4),
    row("completed", 3.0, group=0, sample=0, replica=0, version=0, newest=0, length=6),
    row("bumped", 4.0, version=1, updates=1, step=0),
    row("sync_begin", 4.0, version=1),
    row("synced", 5.0, version=1),
    tokens(1, 7.0, 1, 8, 2),
    row("completed", 7.0, group=0, sample=1, replica=0, version=0, newest=1, length=10),
    row("ready", 7.0, group=0, version=0, newest=1),
    row("reserved", 7.0, group=1, version=1),
    row("selected", 7.0, group=0, step=1, version=1),
    row("microbatch", 7.0, step=1, update=0, groups="0", to="trainer"),
    row("failed", 7.5, group=1, sample=0, replica=0, why="a sample, not the group"),
    row("evicted", 7.5, group=1, version=1, why="too old"),
    row("done", 8.0, of="microbatch", step=1, update=0, groups="0", core="a"),
    row("trained", 8.0, group=0, step=1, update=0, version=1),
    row("bumped", 9.0, version=2, updates=2, step=1),
    row("cleared", 9.0, group=0, step=1),
    row("ended", 10.0, why="done"),
]  # fmt: skip


def test_reward_loss_and_kl_are_drawn_by_update(make_stream):
    run = make_stream(reference="recomputed")
    data = read(run)
    assert losses(data)[["x", "value"]].values.tolist() == [
        [1, 1.0],
        [2, 0.5],
        [3, pytest.approx(1 / 3)],
        [4, 0.25],
        [5, 0.2],
    ]
    assert divergences(data)["kind"].unique().tolist() == [
        "of the policies that generated"
    ]  # the only one that was recorded
    rows = tables.ledger(run.frame(), "stream")
    trained = {row["group"] for row in rows if row.event == "trained" and row["step"] == 0}
    gained = [float(row["reward"]) for row in rows if row.event == "completed" and row["group"] in trained]
    assert rewards(data).iloc[0].tolist() == [1, sum(gained) / len(gained), min(gained), max(gained)]


def test_a_ledger_without_rewards_or_results_has_no_picture_of_them(make_stream):
    data = read(make_stream(until="stream", ledgers={"stream": BY_HAND}, steps=2, groups=1, group=2))
    for table in (rewards, losses, divergences):
        with pytest.raises(NotMeasured):
            table(data)


@pytest.mark.drawn(1, of="themes")
@pytest.mark.parametrize("theme_name", THEMES)
def test_it_tells_the_story(make_stream, theme_name):
    picture = plot_run(make_stream(), theme=theme_name)
    assert picture.get_suptitle() == (
        "stream · 3 ranks · tiny · 2 replicas · in-order, window 1 · at a sync: keep · 5 steps · finished"
    )
    assert [title.split(" (")[0].split(" of ")[0] for title in titles(picture)] == [
        "Phase stream: a bar is a sample, its colour the weight version", "Groups in the buffer",
        "Time", "Time", "Lag", "How 20 groups ended", "Reward", "Loss", "KL divergence", "Drift",
    ]  # fmt: skip
    assert {"trainer", "replica 0", "replica 1", "version 0", "limit, 8 places", "limit: 1 version"} <= words(picture)
    assert (
        "Recomputation: 900 tokens under the weights of every version; 850 of them are decidable, 0 have a wrong version. "
        "25% of the samples span a sync."
    ) in words(picture)
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_bars_lie_where_their_tokens_were_generated(make_stream):
    picture = plot_run(make_stream(ledgers={"stream": BY_HAND}, steps=2), "versions")
    axes = axes_of(picture, "Phase stream")
    assert boxes(axes, "version 0") == [(1, 3), (1, 3)]
    assert boxes(axes, "1") == [(5, 7)]
    assert boxes(axes, "joint") == [(3, 5)]
    assert (7, 8) in boxes(axes, "2")
    for drawn in (axes, axes_of(picture, "Groups in the buffer")):
        (band,) = [patch for patch in drawn.patches if patch.get_gid() == "band"]
        assert (band.get_x(), band.get_width()) == pytest.approx((4, 1))


def test_first_tokens_count_from_the_replicas_report_before():
    """A replica takes an order that is sent while it decodes only after its call."""
    rows = [
        sent(0, 0, 0, 0.0), row("started", 2.0, group=0, sample=0, replica=0), tokens(0, 2.0, 0, 0, 4),
        sent(0, 1, 0, 1.0), row("started", 3.0, group=0, sample=1, replica=0), tokens(0, 3.0, 0, 4, 4), tokens(1, 3.0, 0, 0, 4),
    ]  # fmt: skip
    found = tables.samples(events(rows))
    assert [(sample.number, sample.parts[0].left, sample.parts[0].right) for sample in found] == [(0, 0, 3), (1, 2, 3)]


def test_a_ledger_without_spans_of_tokens_has_bars(make_stream):
    rows = [one for one in BY_HAND if one[0] not in ("tokens", "started")]
    frame = make_stream(ledgers={"stream": rows}, steps=2).frame()
    found = tables.samples(tables.ledger(frame, "stream"))
    assert [[(part.version, part.tokens) for part in sample.parts] for sample in found] == [[(0, 6)], [(0, 10)]]


def test_samples_share_lanes_only_when_they_do_not_overlap():
    def sample(left, right):
        return tables.Attempt(0, 0, 0, left, [tables.Part(0, left, right, 1)])

    assert lanes_of([sample(0, 2), sample(1, 3), sample(2, 4), sample(3, 5), sample(3, 6)]) == [0, 1, 0, 1, 2]


def test_tables_count_what_the_ledger_has(make_stream):
    frame = make_stream(ledgers={"stream": BY_HAND}, steps=2).frame()
    lags = tables.lags(frame)
    assert lags.values.tolist() == [[1, 0, 0, 1, 14], [1, 0, 1, 0, 2]]
    last = tables.steps(frame).iloc[-1]
    assert last[["step", "version", "groups", "tokens", "largest lag"]].tolist() == [1, 2, 1, 16, 1]
    assert last["mean lag"] == pytest.approx(14 / 16)
    assert last[["total", "training"]].tolist() == pytest.approx([5, 1])
    ends = tables.ends(frame)
    assert ends.values.tolist() == [[1, "cleared", 1, ""], [1, "evicted", 1, "too old"]]
    (replica,) = tables.replicas(frame).to_dict("records")
    assert (replica["samples"], replica["span a sync"], replica["tokens"]) == (2, 1, 16)
    assert (replica["generating"], replica["share of the time"]) == pytest.approx((4, 0.4))


def test_the_buffer_has_its_groups_and_its_limit(make_stream):
    run = make_stream(ledgers={"stream": BY_HAND}, steps=2)
    table = tables.buffer(tables.ledger(run.frame(), "stream"))
    assert table[["unfinished", "complete"]].values.tolist() == [[1, 0], [0, 1], [1, 1], [1, 0], [0, 0], [0, 0]]
    assert [mark.value for mark in buffer_over_time(read(run)).attrs["marks"]] == [2]


def test_parts_of_a_step_stand_on_one_another(make_stream):
    run = make_stream()
    table = tables.steps(run.frame())
    assert (table[[*tables.PARTS]].sum(axis=1) - table["total"]).abs().max() < 1e-6
    assert last_steps(read(run))["words"].str.endswith("%").all()


def test_loops_are_compared_by_part(make_stream):
    run = make_stream(bound=True)
    table = tables.loops(run.frame()).set_index("loop")
    assert list(table.index) == ["plain", "lockstep", "stream", "bound"]
    assert table.loc[
        "plain", ["total", "training", "logprobs", "sync", "exposed_generation"]
    ].tolist() == pytest.approx([3.0, 0.7, 0.1, 0.2, 2.0], abs=1e-5)
    assert table.loc["bound", "total"] == pytest.approx(table.loc["stream", "total"], abs=1e-5)
    assert every_loop(read(run))["place"].iloc[-1] == "bound: simulated"


def test_what_was_measured_stands_beside_the_bound(make_stream):
    run = make_stream(bound=True, ledgers={"stream": BY_HAND}, steps=2)
    table = tables.bound(run.frame()).set_index("metric")
    assert table.loc["steps_per_second", "measured"] == pytest.approx(2 / 10)
    assert table.loc["exposed_generation", "measured"] == pytest.approx(
        tables.loops(run.frame()).set_index("loop").loc["stream", "exposed_generation"]
    )
    assert table.loc["steps_per_second", "bound"] > table.loc["steps_per_second", "measured"]
    with pytest.raises(NotMeasured):
        tables.bound(make_stream().frame())


def test_a_what_if_follows_its_controls(make_stream):
    run = make_stream(steps=8, durations=Durations(train_s=0.4))
    table = WHAT_IF.prepare(run)
    measured, same = table(sampler="in-order", window=1).to_dict("records")
    assert (measured["loop"], same["loop"]) == ("measured: stream", "forecast: sampler in-order, window 1")
    assert same["seconds"] == pytest.approx(measured["seconds"], rel=0.1)
    assert same["largest lag"] == 1
    strict = table(sampler="strict", window=0).iloc[1]
    assert strict["largest lag"] == 0
    assert strict["exposed generation"] > same["exposed generation"]
    with pytest.raises(BadInput, match="strict allows no window"):
        table(sampler="strict", window=1)
    with pytest.raises(NotMeasured):
        WHAT_IF.prepare(make_stream(until="plain"))


def test_drift_is_drawn_by_lag_and_position(make_stream):
    run = make_stream()
    table = drift(run.frame(), run.dir)
    assert table[["lag", "position", "tokens"]].values.tolist() == [[lag, at, 2] for lag in (0, 1) for at in range(4)]
    rows = drift_by_position(read(run))
    assert [lag.split(":")[0] for lag in rows["kind"].unique()] == ["lag 0", "lag 1"]
    assert (
        rows["kind"].iloc[0]
        == f"lag 0: KL {table['KL'][:4].mean():.2g} per token, ratio {table['ratio'][:4].mean():.4g}"
    )
    assert rows["value"].tolist() == table["mismatch"].tolist()


def test_tokens_beyond_the_window_are_in_the_colour_of_what_is_wrong(make_stream):
    late = [*BY_HAND]
    late[-4] = row("trained", 8.0, group=0, step=1, update=0, version=3)
    rows = tokens_by_lag(read(make_stream(ledgers={"stream": late}, steps=2)))
    assert rows[["place", "tone"]].values.tolist() == [[2, "bad"], [3, "bad"]]
    assert rows.attrs["edge"] == (1.5, "limit: 1 version")


def test_a_sampler_without_a_limit_has_no_line(make_stream):
    rows = tokens_by_lag(read(make_stream(sampler="ready-first")))
    assert "edge" not in rows.attrs
    assert not rows["tone"].any()


def test_a_wrong_version_is_in_the_colour_of_what_is_wrong(make_stream):
    (row,) = recomputed_tokens(read(make_stream(verified={**VERIFIED, "wrong_stamps": 3}))).to_dict("records")
    assert "3 have a wrong version" in row["words"]
    assert row["tone"] == "bad"


@pytest.mark.slow
def test_what_is_missing_is_reported_or_left_out(make_stream):
    half = plot_run(make_stream(until="stream"))
    assert "Recomputation: the run ended before this phase." in words(half)
    early = make_stream(until="lockstep")
    assert axes_of(plot_run(early), "Phase lockstep: a bar is a sample")
    nothing = make_stream(until="plain")
    assert axes_of(plot_run(nothing), "Timeline of ranks")
    assert not {"versions", "steps", "groups"} & set(named.names(nothing))
    for table in (tables.steps, tables.replicas, tables.lags, tables.ends):
        with pytest.raises(NotMeasured):
            table(nothing.frame())


def test_a_loop_under_way_is_drawn(make_stream):
    """A run can be drawn at any moment: after each ledger row that could be the last one on disk."""
    run = make_stream(ledgers={"stream": BY_HAND}, steps=2)
    frame = run.frame()
    mine = frame[(frame["phase"] == "stream") & (frame["rank"] == -1)]
    for last in range(12, len(BY_HAND)):
        part = pd.concat([frame[frame["phase"] != "stream"], mine.iloc[:last]])
        assert tables.shown(part) == "stream"
        assert len(tables.samples(tables.ledger(part, "stream"))) == 2


@pytest.mark.slow
def test_many_replicas_and_steps_fit(make_stream):
    """A replica dies, groups are evicted, and there are more replicas than lanes and more versions than colours."""
    prepare = lambda system: system.schedule("died", 1, 0.5)  # noqa: E731 - a fixture's argument
    run = make_stream(
        ranks=11, replicas=10, steps=20, sampler="windowed", places=16, on_dead_replica="go-on", prepare=prepare
    )
    picture = plot_run(run)
    assert axes_of(picture, "Phase stream").get_title(loc="left").endswith("the first 8 of 10 replicas")
    assert {"version 0, 6 ... 18", "given up"} <= words(picture)
    table = tables.ends(run.frame())
    assert table.groupby("end")["groups"].sum()["cleared"] == 80


@pytest.mark.slow
def test_its_plots_and_tables_have_names(make_stream):
    run = make_stream()
    assert set(named.names(run)) >= {"versions", "steps", "groups", "recomputed"}
    assert set(named.tables(run)) >= {"steps", "replicas", "loops", "lags", "ends"}
    for name in named.names(run):
        named.plot_run(run, name)
