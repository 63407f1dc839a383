"""What doctor reports about a machine with GPUs, with made-up GPUs."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kit import doctor


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


def test_other_environments_with_megatron_are_listed_with_the_line_to_use(monkeypatch):
    both = {"path": "/opt/x/bin/python", "where": "found under /opt", "verdict": "has both", "fit": True}
    monkeypatch.setattr(
        doctor, "ask_interpreters", lambda _: ([{**both, "chosen": is_it} for is_it in (True, False)], None)
    )
    lines = doctor.describe(doctor.examine()).splitlines()
    message = "/opt/x/bin/python (found under /opt): has both"
    assert f"ranks use   -> {message}" in lines
    assert f"ranks use      {message}; to use it: export KIT_PYTHON=/opt/x/bin/python" in lines


def test_a_gpu_in_a_line():
    gpu = {"name": "H200", "memory_mib": 143771, "memory_free_mib": 140000, "pcie_gen_max": 5, "pcie_width": 16}
    message = doctor.gpus({"driver": "580.95", "gpus": [gpu]})
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
