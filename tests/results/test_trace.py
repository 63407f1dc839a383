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
