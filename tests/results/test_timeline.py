from __future__ import annotations

import json
import math
from xml.etree import ElementTree as ET

import pytest

from kit.errors import BadInput
from kit.results import Run, VerdictRow, trace, write_trace
from kit.results.run import write_junit
from kit.results.verdict import Verdict

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
    return Run(make_run([*rows, record(phase="untimed", metric="loss", time=T0)]))


def events(run, kind):
    return [event for event in trace(run)["traceEvents"] if event["ph"] == kind]


def test_a_complete_event_per_timed_phase_in_the_process_of_its_rank(run):
    spans = events(run, "X")
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in spans] == [
        ("reload", 1, 0.0, 2e6),
        ("reload", 2, 1e6, 2e6),
    ]
    assert spans[0]["args"]["cycle"] == 0
    assert spans[0]["args"]["rss [B]"] == 500.0
    assert spans[0]["args"]["loss"] == math.inf


def names(run):
    return {e["pid"]: e["args"]["name"] for e in events(run, "M")}


def test_ranks_have_names(run):
    assert names(run) == {1: "rank 0", 2: "rank 1"}


def test_names_have_the_roles_of_their_ranks(run):
    path = run.dir / "run.json"
    info = json.loads(path.read_text())
    info["provenance"] = {"world": {"roles": {"trainer": [0], "replica": [1]}}}
    path.write_text(json.dumps(info))
    again = Run(run.dir)
    assert again.roles == {0: "trainer", 1: "replica"}
    path.write_text(json.dumps({**info, "provenance": {"world": "two ranks"}}))
    assert Run(run.dir).roles == {}
    path.write_text(json.dumps(info))
    assert names(again) == {1: "rank 0 (trainer)", 2: "rank 1 (replica)"}


def test_memory_is_a_counter_before_and_after(run):
    points = [(e["ts"], e["args"]["bytes"]) for e in events(run, "C") if e["name"] == "rss" and e["pid"] == 1]
    assert points == [(0.0, 300.0), (2e6, 500.0)]


def test_a_phase_run_twice_in_a_cycle_is_two_events_with_their_own_numbers(make_run, record):
    rows = [record(value=0.1, time=t) for t in (T0, T0 + 1)]
    rows += [record(metric="rss", unit="B", value=v, time=t) for v, t in ((1.0, T0), (2.0, T0 + 1))]
    spans = events(Run(make_run(rows)), "X")
    assert [e["args"]["rss [B]"] for e in spans] == [1.0, 2.0]


def test_the_file_is_strict_json_in_order_of_time(run, tmp_path):
    data = json.loads(write_trace(run, tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
    times = [event["ts"] for event in data["traceEvents"] if "ts" in event]
    assert times == sorted(times)
    assert min(times) == 0


def test_a_run_without_times_is_bad_input(make_run, record):
    with pytest.raises(BadInput, match="no timed phases"):
        trace(Run(make_run([record(metric="rss")])))


def span(record, metric, start, end, **changes):
    return record(metric=metric, start=T0 + start, time=T0 + end, **{"value": None, "unit": "", **changes})


def test_spans_begin_and_end_on_their_rank_whatever_overlaps(make_run, record):
    edges = [(0, 10), (1, 4), (3.5, 6)]
    rows = [span(record, "generate", *edge, rank=rank) for rank, edge in zip((0, 1, 1), edges, strict=True)]
    run = Run(make_run(rows))
    begun, ended = ({e["id"]: (e["pid"], e["ts"]) for e in events(run, kind)} for kind in "be")
    assert list(begun.values()) == [(1, 0.0), (2, 1e6), (2, 3.5e6)]
    assert [ended[number] for number in begun] == [(1, 1e7), (2, 4e6), (2, 6e6)]


def test_a_span_says_what_it_is_about(make_run, record):
    rows = [span(record, "generate", 0, 2, ids={"group": 17, "tensor": "a/b"}, text="stop token", value=2.0, unit="s")]
    (event,) = events(Run(make_run(rows)), "b")
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
    (mark,) = events(Run(make_run(rows)), "i")
    assert (mark["name"], mark["ts"], mark["pid"], mark["s"]) == ("completed", 0.5e6, 1, "t")
    assert mark["args"] == {"cycle": 0, "phase": "reload", "group": 3}


def test_spans_of_a_track_are_bars_on_a_process_of_their_own(make_run, record):
    span = {"rank": -1, "metric": "owned", "value": 1.0}
    owned = [
        record(**span, start=T0 + at, time=T0 + at + 1, text=owner, ids={"track": f"device {device}"})
        for at, owner in enumerate(("a", "b"))
        for device in (0, 1)
    ]
    found = Run(make_run([record(value=4.0, time=T0 + 4), *owned]))
    bars = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events(found, "X") if e["name"] in ("a", "b")]
    one, two = (pid for pid, name in names(found).items() if name.startswith("device"))
    assert sorted(bars) == [("a", one, 0, 1e6), ("a", two, 0, 1e6), ("b", one, 1e6, 1e6), ("b", two, 1e6, 1e6)]
    assert not events(found, "b")


# -- verdicts as JUnit XML ---------------------------------------------------------------------------------------------


def test_a_case_for_each_check_and_an_error_for_a_run_that_did_not_finish(make_run, tmp_path):
    rows = [VerdictRow("fine", 0, 0, "1", True, ""), VerdictRow("leak", 3, 0, "1", False, 'rank <0>\x1b["')]
    verdict = Verdict([*rows, VerdictRow("gpu", None, 0, "B", None, "no GPU")])
    finished, broken = Run(make_run([], "one")), Run(make_run([], "two"))
    info = (broken.dir / "run.json").read_text()
    (broken.dir / "run.json").write_text(info.replace('"finished",', '"failed",', 1))
    path = write_junit([(finished, verdict), (broken, Verdict([]))], tmp_path / "new" / "checks.xml")
    one, two = ET.fromstring(path.read_text())
    assert {name: one.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3", "failures": "1", "errors": "0", "skipped": "1",
    }  # fmt: skip
    assert [(case.get("name"), [(child.tag, child.get("message")) for child in case]) for case in one.iter("testcase")] == [
        ("fine", []), ("leak", [("failure", 'rank <0>["')]), ("gpu", [("skipped", "no GPU")]),
    ]  # fmt: skip
    assert two.get("errors") == "1"
    assert "the run failed" in two.find("testcase/error").get("message")
