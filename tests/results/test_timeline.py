from __future__ import annotations

import json
import math

import pytest

from kit.errors import BadInput
from kit.results import load, trace, write_trace

T0 = 1_760_000_000.0


@pytest.fixture
def run(make_run, record):
    rows = []
    for rank in (0, 1):
        common = {"rank": rank, "phase": "reload", "time": T0 + 2 + rank}
        rows += [
            record(**common, value=2.0),
            record(**common, metric="rss", value=500.0, unit="B"),
            record(**common, metric="rss_before", value=300.0, unit="B"),
            record(**common, metric="loss", value=math.inf, unit=""),
        ]
    return load(make_run([*rows, record(phase="untimed", metric="loss", time=T0)]))


def events(run, kind):
    return [event for event in trace(run)["traceEvents"] if event["ph"] == kind]


def test_a_complete_event_per_timed_phase_in_the_lane_of_its_rank(run):
    spans = events(run, "X")
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("reload", 0, 0.0, 2e6),
        ("reload", 1, 1e6, 2e6),
    ]
    assert spans[0]["args"]["cycle"] == 0
    assert spans[0]["args"]["rss [B]"] == 500.0
    assert spans[0]["args"]["loss"] == math.inf


def test_lanes_have_names(run):
    names = {e["tid"]: e["args"]["name"] for e in events(run, "M") if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1"}


def test_lanes_have_the_roles_of_their_ranks(run):
    path = run.dir / "run.json"
    info = json.loads(path.read_text())
    info["provenance"] = {"world": {"roles": {"trainer": [0], "replica": [1]}}}
    path.write_text(json.dumps(info))
    again = load(run.dir)
    assert again.roles == {0: "trainer", 1: "replica"}
    names = {e["tid"]: e["args"]["name"] for e in events(again, "M") if e["name"] == "thread_name"}
    assert names == {0: "rank 0 (trainer)", 1: "rank 1 (replica)"}


def test_memory_is_a_counter_before_and_after(run):
    points = [(e["ts"], e["args"]["bytes"]) for e in events(run, "C") if e["name"] == "rank 0 rss"]
    assert points == [(0.0, 300.0), (2e6, 500.0)]


def test_a_phase_run_twice_in_a_cycle_is_two_events_with_their_own_numbers(make_run, record):
    rows = [record(value=0.1, time=t) for t in (T0, T0 + 1)]
    rows += [record(metric="rss", unit="B", value=v, time=t) for v, t in ((1.0, T0), (2.0, T0 + 1))]
    spans = events(load(make_run(rows)), "X")
    assert [e["args"]["rss [B]"] for e in spans] == [1.0, 2.0]


def test_the_file_is_strict_json_in_order_of_time(run, tmp_path):
    data = json.loads(write_trace(run, tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
    times = [event["ts"] for event in data["traceEvents"] if "ts" in event]
    assert times == sorted(times)
    assert min(times) == 0


def test_a_run_without_times_is_bad_input(make_run, record):
    with pytest.raises(BadInput, match="no timed phases"):
        trace(load(make_run([record(metric="rss")])))


def span(record, metric, start, end, **changes):
    return record(metric=metric, start=T0 + start, time=T0 + end, **{"value": None, "unit": "", **changes})


def lanes(run):
    """The spans by the name of their lane: where each begins, and how long it is."""
    names = {e["tid"]: e["args"]["name"] for e in events(run, "M") if e["name"] == "thread_name"}
    found = {}
    for event in events(run, "X"):
        found.setdefault(names[event["tid"]], []).append((event["ts"], event["dur"]))
    return found


def test_spans_have_lanes_of_their_own_below_their_rank(make_run, record):
    rows = [record(rank=rank, value=4.0, time=T0 + 4, phase="rollout") for rank in (0, 1)]
    rows += [span(record, "generate", 1, 2, rank=rank, phase="rollout") for rank in (0, 1)]
    rows += [span(record, "score", 1.5, 3, rank=1, phase="rollout")]
    run = load(make_run(rows))
    assert lanes(run) == {
        "rank 0": [(0.0, 4e6)],
        "rank 0: generate": [(1e6, 1e6)],
        "rank 1": [(0.0, 4e6)],
        "rank 1: generate": [(1e6, 1e6)],
        "rank 1: score": [(1.5e6, 1.5e6)],
    }
    order = {e["tid"]: e["args"]["sort_index"] for e in events(run, "M") if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in events(run, "M") if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(order, key=order.get)] == sorted(names.values())


def test_spans_that_overlap_stand_on_lanes_of_their_own_and_those_that_nest_share_one(make_run, record):
    edges = [(0, 10), (1, 4), (2, 3), (3.5, 6), (5, 7), (11, 12), (12, 13)]
    run = load(make_run([span(record, "generate", *edge) for edge in edges]))
    assert lanes(run) == {
        "rank 0: generate": [(0.0, 1e7), (1e6, 3e6), (2e6, 1e6), (5e6, 2e6), (1.1e7, 1e6), (1.2e7, 1e6)],
        "rank 0: generate (2)": [(3.5e6, 2.5e6)],
    }
    for drawn in lanes(run).values():  # in each lane any two are apart, or one lies in the other
        for index, (begin, taken) in enumerate(drawn):
            for later, more in drawn[index + 1 :]:
                assert later >= begin + taken or later + more <= begin + taken


def test_a_span_says_what_it_is_about(make_run, record):
    rows = [span(record, "generate", 0, 2, ids={"group": 17, "tensor": "a/b"}, text="stop token", value=2.0, unit="s")]
    (event,) = events(load(make_run(rows)), "X")
    assert event["name"] == "generate"
    assert event["args"] == {
        "cycle": 0,
        "phase": "reload",
        "group": 17,
        "tensor": "a/b",
        "text": "stop token",
        "generate [s]": 2.0,
    }


def test_an_event_is_a_mark_on_the_lane_of_its_rank(make_run, record):
    rows = [record(time=T0 + 1, value=1.0), record(metric="digest", value=None, text="ab", time=T0 + 1)]
    rows += [record(metric="completed", value=None, unit="", ids={"group": 3}, time=T0 + 0.5)]
    (mark,) = events(load(make_run(rows)), "i")
    assert (mark["name"], mark["ts"], mark["tid"], mark["s"]) == ("completed", 0.5e6, 0, "t")
    assert mark["args"] == {"cycle": 0, "phase": "reload", "group": 3}
