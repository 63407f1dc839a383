"""What doctor reports about a machine with GPUs, with made-up GPUs."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from typing import Any

import pytest

from kit import cli, doctor
from kit.errors import RankDied, RankTimeout
from kit.labs.definition import Step
from kit.results import Verdict, VerdictRow


def ranks(**other: Any) -> dict[str, Any]:
    reported: dict[str, Any] = {
        "cuda": "13.0",
        "gpus": 2,
        "suspend_why": None,
        "shared_gpus": "by the multi-rank flag of NCCL 2.30.4",
        "no_peer_access": [],
        "code": [],
        "nccl2": False,
        "torchcomms": {
            "requested": False,
            "importable": False,
            "effective": None,
            "why": "torchcomms is not installed",
        },
        "findings": [
            {"name": "Transformer Engine", "what": "2.9", "means": "its workspaces stay"},
            {"name": "CUDA graphs", "what": None, "means": "capture anew"},
        ],
    }
    return reported | other


def lines(**other: Any) -> dict[str, str]:
    return dict(doctor.communication(ranks(**other)))


def test_release_modes_are_reported_with_the_reason_for_what_is_missing():
    assert (
        lines()["release"]
        == "exact, abort, manual, official; suspend should work, but has not been tested on a GPU yet"
    )
    old = lines(suspend_why="NCCL 2.28.9 cannot suspend communicators: 2.29.7 or newer is needed")
    assert old["release"].endswith("no suspend: NCCL 2.28.9 cannot suspend communicators: 2.29.7 or newer is needed")


def test_how_gpus_are_shared_is_reported_where_there_are_any():
    assert lines()["sharing"] == "more ranks than GPUs share them by the multi-rank flag of NCCL 2.30.4"
    assert "sharing" not in lines(gpus=0)


def test_pairs_without_peer_access_are_named():
    assert "peers" not in lines()
    assert lines(no_peer_access=[[0, 1], [0, 3]])["peers"] == "no peer access between GPUs 0-1, 0-3"


def test_only_what_is_there_is_reported_and_only_where_it_runs():
    assert lines()["found"] == "Transformer Engine (2.9): its workspaces stay"
    assert "found" not in lines(findings=[])


@pytest.mark.parametrize(
    ("requested", "effective", "why", "message"),
    [
        (True, True, None, "requested; importable, in effect"),
        (
            True,
            False,
            "torch could route and did not",
            "requested; importable, not in effect: torch could route and did not",
        ),
        (False, None, None, "not requested; importable"),
    ],
)
def test_routing_says_whether_it_was_asked_for_and_what_came_of_it(requested, effective, why, message):
    comms = {"requested": requested, "importable": True, "effective": effective, "why": why}
    assert lines(torchcomms=comms)["torchcomms"] == message
    assert lines()["torchcomms"] == "not requested; not importable: torchcomms is not installed"


def test_other_environments_with_megatron_and_a_missing_openssl_are_listed(monkeypatch):
    both = {"path": "/opt/x/bin/python", "where": "found under /opt", "verdict": "has both", "fit": True}
    monkeypatch.setattr(
        doctor, "ask_interpreters", lambda _: ([{**both, "chosen": is_it} for is_it in (True, False)], None)
    )
    lines = doctor.describe_box(doctor.examine() | {"openssl": None}).splitlines()
    assert "openssl     none: labs over several machines need it, for their certificates" in lines
    message = "/opt/x/bin/python (found under /opt): has both"
    assert f"ranks use   -> {message}" in lines
    assert f"ranks use      {message}; to use it: export KIT_PYTHON=/opt/x/bin/python" in lines


def test_the_line_about_threads_says_what_limits_them():
    found = {"threads": {"a_rank": 25, "set": None}, "cores": {"usable": 64}, "cgroup": {"pids_max": 100}}
    limited = "half of the limit of 100 processes and threads is less than 64 cores"
    assert limited in doctor.threads_line(found)
    found["threads"]["a_rank"] = 32
    assert doctor.threads_line(found).startswith(
        "32 for the computations of each of 2 ranks, fewer with more ranks; set"
    )
    found["threads"]["set"] = "4"
    assert doctor.threads_line(found) == "4 for the computations of a rank: OMP_NUM_THREADS is set"


def test_a_gpu_in_a_line():
    gpu = {"name": "H200", "memory_mib": 143771, "memory_free_mib": 140000, "pcie_gen_max": 5, "pcie_width": 16}
    message = doctor.gpu_lines({"driver": "580.95", "gpus": [gpu]})
    assert message == ["H200, 140000 of 143771 MiB free, PCIe 5 x16, driver 580.95"]


CODE = {
    "gpu": "sm_100",
    "built_for": ["sm_80", "sm_90"],
    "torch": False,
    "nccl_why": "NCCL 2.24.3 has no kernels for sm_100",
}


def test_a_gpu_without_code_is_a_problem_by_name():
    fine = {**CODE, "torch": True, "nccl_why": ""}
    assert doctor.without_code([fine]) == []
    assert doctor.without_code([fine, CODE]) == [
        "torch has no code for this box's GPU (sm_100), only for sm_80 sm_90; install a matching build"
    ]
    assert lines(code=[fine])["code"] == "sm_100: torch has code (built for sm_80 sm_90); NCCL has kernels"
    assert lines(code=[CODE])["code"].endswith(
        "torch has no code (built for sm_80 sm_90); NCCL 2.24.3 has no kernels for sm_100"
    )


def test_a_python_that_does_not_answer_is_a_problem_and_no_traceback(monkeypatch):
    monkeypatch.setattr(doctor, "ANSWERS_S", 0.2)
    monkeypatch.setattr(doctor, "PROBE", "import time; time.sleep(60)")
    problems: list[str] = []
    message = doctor.ask_ranks_python(sys.executable, problems)
    assert message == {"path": sys.executable, "why": "it did not answer within 0.2 s"}
    assert [sys.executable in one and "did not answer within 0.2 s" in one for one in problems] == [True]


# -- the preflight: a lab's phases as probes ---------------------------------------------------------------------------


class Made:
    """A lab of three phases, of which the second breaks in a way."""

    def __init__(self, how: BaseException | None = None) -> None:
        names = ("sums", "sums_on_host", "last")
        self.steps = [Step(1, name) for name in names]
        self.config = types.SimpleNamespace(timeout_s=60.0, device="cpu")
        self.world = types.SimpleNamespace(device="cpu")
        self.how = how
        self.done = 0
        self.broken: dict[str, BaseException] = {}
        self.error = ""
        self.started = False

    def start(self) -> None:
        self.started = True

    def step(self) -> None:
        if self.done == 1 and isinstance(self.how, KeyboardInterrupt):
            self.error = "stopped"
            raise self.how
        if self.done == 1 and self.how is not None:
            self.broken["sums_on_host"] = self.how
        self.done += 1

    def verdict(self) -> Verdict:
        fails = VerdictRow("sums_on_host_exact", 1, 0, "1", passed=False, why="off by one (rank 1)")
        last = VerdictRow("last_seen", None, 0, "1", passed=None, why="not measured: needs a GPU")
        return Verdict([VerdictRow("sums_exact", 0, 0, "1", passed=True, why=""), fails, last])


def stepped(how: BaseException | None = None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    lines: list[str] = []
    preflight, lab = doctor.Preflight(lines.append), Made(how)
    with contextlib.suppress(KeyboardInterrupt):
        preflight.run(lab)  # type: ignore[arg-type]
    return {name: preflight.probe(name, lab.verdict()) for name in preflight.names}, lines


def test_a_rule_belongs_to_the_probe_whose_whole_name_it_begins_with():
    probes, lines = stepped()
    assert {name: [row["check"] for row in probe["rows"]] for name, probe in probes.items()} == {
        "sums": ["sums_exact"],
        "sums_on_host": ["sums_on_host_exact"],
        "last": ["last_seen"],
    }
    assert [probe["result"] for probe in probes.values()] == ["pass", "fail", "not measurable"]
    assert [probe["ended"] for probe in probes.values()] == ["finished"] * 3
    assert lines[0] == "3 probes, each with a time limit of 60 s"
    assert lines[1].startswith("start of the ranks ")
    assert lines[3].startswith("sums_on_host        fail ")
    assert lines[3].endswith(" s  sums_on_host_exact: off by one (rank 1)")


@pytest.mark.parametrize(
    ("how", "ended"),
    [
        (RankTimeout("no answer from rank 1 within 60 s", phase="", ranks=(1,), culprits=(1,), stacks={}), "cut"),
        (RankDied("rank 1 was killed by SIGKILL", phase="", rank=1, signal="SIGKILL"), "crashed"),
    ],
)
def test_a_probe_that_is_cut_short_or_crashes_says_so_and_the_next_one_runs(how, ended):
    probes, lines = stepped(how)
    assert [probe["ended"] for probe in probes.values()] == ["finished", ended, "finished"]
    assert (probes["sums_on_host"]["result"], probes["sums_on_host"]["why"]) == ("fail", str(how))
    assert lines[3].endswith(str(how))


def test_an_interrupt_keeps_what_was_measured_and_runs_no_more():
    probes, lines = stepped(KeyboardInterrupt())
    assert [probe["ended"] for probe in probes.values()] == ["finished", "interrupted", "not run"]
    assert [probe["result"] for probe in probes.values()] == ["pass", "fail", "not measurable"]
    assert len(lines) == 3


def test_where_labs_cannot_run_no_probe_does(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: {"problems": ["no Python with torch was found"]})
    assert cli.main(["doctor", "--deep", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "deep" not in json.loads(out)
    assert err == "kit: the probes need ranks, but ranks cannot run here\n"


@pytest.mark.parametrize(
    ("gpu", "device", "why", "there"),
    [
        ({"gpus": [{"name": "NVIDIA H200"}], "driver": "550.1"}, "cpu", "torch is old", "NVIDIA H200"),
        ({"gpus": [], "driver": "550.1"}, "cpu", "torch is old", "the GPU driver 550.1"),
        ({"gpus": [{"name": "NVIDIA H200"}], "driver": "550.1"}, "cuda", "torch is old", ""),
        ({"gpus": [{"name": "NVIDIA H200"}], "driver": "550.1"}, "cpu", "asked for", ""),
        ({"gpus": [], "driver": None}, "cpu", "torch is old", ""),
    ],
)
def test_ranks_that_would_silently_use_the_cpu_are_a_problem(gpu: Any, device: str, why: str, there: str) -> None:
    problems = doctor.silent_cpu(gpu, {"device": device, "device_why": why})
    assert problems == ([f"ranks would run on the CPU although this box has {there}: {why}"] if there else [])
