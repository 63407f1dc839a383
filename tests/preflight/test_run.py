"""How probes run: stopped and named at their limit, reported when they crash, cleaned up afterwards, and one object with --json."""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kit import cli, doctor, machine
from kit.preflight import run
from kit.preflight.run import PROBES, TOTAL_S, Findings, Outcome, Probe, Report, Row, shm_names
from kit.world import leftovers
from tests.holdings import wait_for

ODD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from kit import machine
from kit.world import leftovers

def fine(report, device, settings):
    print("what is printed is no report")
    report.at("a sum")
    report.row("sum", passed=True, value=0.5, unit="s")
    report.time(step=0.5)

def falls_short(report, device, settings):
    report.row("share", passed=False, value=12.0, unit="%", why="wanted: 90 %")

def measures_nothing(report, device, settings):
    report.needs_gpu("this", "that")

def leaves(report, device, settings):
    '''What a World is made of, whose agent does not end: a marked process out of reach of the group, a folder, a counter of torch.'''
    mark = leftovers.mark("abcdef")
    (leftovers.base() / mark).mkdir()
    process = subprocess.Popen(["sleep", "3600"], env={**os.environ, machine.MARK: mark}, start_new_session=True)
    report.row("before", passed=True, value=1.0, unit="s")
    report.pids([process.pid])
    Path(f"/dev/shm/torch_{process.pid}_1").touch()
    Path(f"/dev/shm/nccl-{process.pid}").touch()
    report.at("a wait for ever")
    time.sleep(3600)

def raises(report, device, settings):
    report.row("before", passed=True)
    report.at("a division")
    1 / 0

def killed(report, device, settings):
    report.at("its end")
    os.kill(os.getpid(), signal.SIGKILL)

def exits(report, device, settings):
    os._exit(0)

def interrupted(report, device, settings):
    report.row("before", passed=True)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(3600)
"""
FOUND: dict[str, Any] = {"ranks": {"device": "cpu", "torch": "2.13", "nccl": None}, "gpu": {"gpus": []}, "problems": []}


@pytest.fixture(autouse=True)
def odd(tmp_path, monkeypatch):
    (tmp_path / "odd_probes.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))


def odd_probe(name: str, limit_s: float = 60.0) -> Probe:
    return Probe(number="1", title=name, target=f"odd_probes:{name}", limit_s=limit_s)


def ended(name: str, limit_s: float = 60.0) -> Outcome:
    return run.run(odd_probe(name), "cpu", limit_s, megatron=False)[0]


def test_a_probe_reports_rows_and_times():
    outcome, seconds = run.run(odd_probe("fine"), "cpu", 60.0, megatron=False)
    assert (outcome.result, outcome.ended) == ("pass", "finished")
    assert outcome.rows == (Row(what="sum", result="pass", value=0.5, unit="s"),)
    assert seconds == {"step": 0.5}
    assert outcome.line().endswith("s  sum 0.5 s")


def test_what_falls_short_is_reported_with_its_limit():
    outcome = ended("falls_short")
    assert outcome.result == "fail"
    assert outcome.summary() == "share 12 %: wanted: 90 %"


def test_what_needs_a_gpu_is_not_measurable_and_fails_nothing():
    outcome = ended("measures_nothing")
    assert outcome.result == "not measurable"
    assert "needs a GPU" in outcome.line()
    assert run.exit_status([outcome]) == 0


@pytest.mark.slow
def test_a_probe_that_hangs_is_cut_names_what_it_did_and_leaves_nothing():
    before = shm_names()
    outcome = ended("leaves", 6.0)
    assert (outcome.result, outcome.ended, outcome.at) == ("fail", "cut", "a wait for ever")
    assert outcome.summary() == "cut after 6 s, during: a wait for ever"
    assert run.exit_status([outcome]) == 3
    first, left = outcome.rows
    assert first.what == "before"  # the row measured before it ended is kept
    assert left.what == "left behind, now removed"
    assert f"{machine.SHM}/nccl-" in left.why
    pid = int(re.search(r"process (\d+) \(sleep 3600\)", left.why)[1])
    assert wait_for(lambda: (machine.stat_fields(pid) or ["X"])[0] in "ZX")
    assert shm_names() == before
    assert not [path for path in leftovers.base().iterdir() if path.name.startswith("abcdef:")]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "crashed during a division: ZeroDivisionError: division by zero"),
        ("killed", "crashed during its end: killed by SIGKILL"),
        ("exits", "crashed during start: exit status 0 without a result"),
    ],
)
def test_a_probe_that_crashes_says_how(name, why):
    outcome = ended(name)
    assert (outcome.result, outcome.ended, outcome.why) == ("fail", "crashed", why)
    assert run.exit_status([outcome]) == 3


def test_an_interrupt_keeps_what_was_measured_and_runs_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "runs_dir", lambda: tmp_path)
    lines: list[str] = []
    probes = [odd_probe("interrupted"), odd_probe("fine")]
    reported, status = run.deep(FOUND, lines.append, time.monotonic(), probes)
    assert status == 130
    assert [one["ended"] for one in reported["probes"]] == ["interrupted", "not run"]
    assert [row["what"] for row in reported["probes"][0]["rows"]] == ["before"]
    assert "interrupted: 1 interrupted" in lines[-1]
    assert json.loads((tmp_path / run.TIMES).read_text()) == reported["times"]


def test_the_total_is_held_and_what_did_not_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "runs_dir", lambda: tmp_path)
    monkeypatch.setattr(run, "pace", lambda device: 1.0)
    lines: list[str] = []
    long_ago = time.monotonic() - TOTAL_S
    reported, status = run.deep(FOUND, lines.append, long_ago, [odd_probe("fine")])
    assert reported["probes"][0]["ended"] == "not run"
    assert "not run: 1 fine" in lines[-1]
    assert status == 0


def test_the_limits_are_the_issues_and_fit_into_the_total():
    """All probes together, including doctor itself, have two minutes and ten seconds."""
    limits = {one.number: one.limit_s for one in PROBES}
    longer = {"3": 12, "4": 12, "5": 12, "10": 40}
    assert limits == {
        name: longer.get(name, 6) for name in ("1", "2", "3", "4", "5", "6", "7a", "7b", "8", "9a", "9b", "10")
    }
    assert sum(limits.values()) <= TOTAL_S
    for one in PROBES:
        module, _, name = one.target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("own", "later", "left", "limit"),
    [
        (6, 118, 124, 6),  # no time to spare
        (6, 118, 127, 9),
        (6, 40, 110, 12),  # at most twice its own limit
        (40, 0, 30, 30),  # the total limit applies
        (6, 118, 100, 6),  # already late, but it still has its own limit
    ],
)
def test_a_probe_may_use_spare_time_and_later_ones_keep_theirs(own, later, left, limit):
    assert run.allowed(own, later, left) == limit


def test_limits_are_stretched_without_a_gpu_and_where_others_work(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for load, times_as_long in ((0.1, 5.0), (4.0, 10.0), (99.0, 20.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert run.pace("cpu") == times_as_long
        assert run.pace("cuda") == 1.0


def test_json_is_one_object_and_the_lines_go_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: dict(FOUND))
    monkeypatch.setattr(run, "PROBES", (odd_probe("fine"), odd_probe("falls_short")))
    assert cli.main(["doctor", "--deep", "--json"]) == 1
    out, err = capsys.readouterr()
    reported = json.loads(out)["deep"]
    assert [one["result"] for one in reported["probes"]] == ["pass", "fail"]
    assert (reported["times"]["step"], reported["times"]["device"], reported["times"]["torch"]) == (0.5, "cpu", "2.13")
    assert reported["times"]["host"] == os.uname().nodename
    assert len([line for line in err.splitlines() if line.startswith("1 ")]) == 2


def test_where_labs_cannot_run_no_probe_does(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: {**FOUND, "problems": ["no Python with torch was found"]})
    assert cli.main(["doctor", "--deep", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "deep" not in json.loads(out)
    assert err == "kit: the probes need ranks, but ranks cannot run here\n"


def test_no_number_is_given_for_what_is_not_finite(tmp_path):
    findings = Findings()
    with (tmp_path / "out").open("w+") as file:
        Report(file).row("rate", passed=False, value=float("nan"), unit="GB/s", why="2 copies")
        file.seek(0)
        findings.hear(file.read())
    assert findings.rows == [Row(what="rate", result="fail", unit="GB/s", why="measured nan; 2 copies")]
