"""The preflight on this machine's real ranks: as a person runs it, with ranks that start slowly, and with every fault."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.doctor import operation_times
from kit.errors import BadInput, KitError
from kit.labs.box.faults import FAULTS
from kit.labs.box.lab import PROBES, BoxConfig
from kit.machine import has_gpu_driver
from kit.results import read_verdict

GPU = has_gpu_driver()
NEED_A_GPU = {"suspend", "resize_expandable", "driver_memory", "ipc", "ipc_expandable"}
ROOT = Path(__file__).resolve().parents[3]


def deep(folder: Path) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "kit", "doctor", "--deep", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "KIT_RUNS": str(folder)},
    )
    return done.returncode, json.loads(done.stdout)["deep"], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(GPU, reason="this machine has a GPU: see the test for it")
def test_without_a_gpu_all_that_can_be_measured_passes(tmp_path: Path, nothing_left: None) -> None:
    status, reported, lines = deep(tmp_path)
    shown = json.dumps(reported, indent=1)
    assert (status, reported["status"], reported["device"]) == (0, "finished", "cpu"), shown
    names = [probe.phase for probe in PROBES]
    assert {probe["title"]: probe["result"] for probe in reported["probes"]} == {
        name: "not measurable" if name in NEED_A_GPU else "pass" for name in names
    }, shown
    assert all(any(line.startswith(f"{name} ") for line in lines.splitlines()) for name in names)
    rules = {row["check"]: row for row in reported["verdict"]}
    for name in ("groups_nccl", "host_memory_registers", "ipc_bytes", "suspend_frees", "rebuild_driver"):
        assert rules[name]["passed"] is None
        assert "needs a GPU" in rules[name]["why"]
    numbers = {"start", "all_reduce", "all_reduce_host", "group", "group_host", "group_destroy", "group_reload"}
    assert all(reported["times"][name] > 0 for name in numbers | {"layout", "job", "step"})
    assert not {"host_to_device", "device_to_host"} & reported["times"].keys()
    assert reported["times"]["host"] == os.uname().nodename
    run = kit.load(reported["run"])
    assert run.verdict().to_json() == reported["verdict"]
    assert run.save(tmp_path / "table.csv").exists()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not GPU, reason="this machine has no GPU driver")
def test_on_a_gpu_every_probe_ends_by_itself(tmp_path: Path, nothing_left: None) -> None:
    """Findings are for a person to judge; this only checks that each probe ends."""
    _, reported, _ = deep(tmp_path)
    assert reported["device"] == "cuda"
    assert [probe["title"] for probe in reported["probes"] if probe["ended"] != "finished"] == []


# Slept through by every Python of a World that starts: by torchrun, whose forks the ranks are, and not by the notebook.
SLOW_START = """
import os, sys, time
if any("agent.py" in word for word in sys.orig_argv):
    time.sleep(float(os.environ["TEST_START_DELAY_S"]))
"""


@pytest.mark.slow
@pytest.mark.drawn(1, of="slow starts")
@pytest.mark.parametrize("seconds", [5, 8, 10])
def test_a_slow_start_of_ranks_does_not_count_in_a_probes_limit(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("TEST_START_DELAY_S", str(seconds))
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    with kit.lab("box", device="cpu", probes="seats,killed_rank", timeout_s=seconds - 1) as lab:
        run = lab.run()
    assert run.status == "finished"
    assert run.verdict().passed, run.verdict()
    assert operation_times(run)["start"] >= seconds


def test_probes_are_named() -> None:
    with pytest.raises(ValueError, match="there is no probe 'group'; did you mean 'groups'"):
        BoxConfig(probes="seats, group")
    with pytest.raises(BadInput, match="ranks must be even, not 3"):
        kit.run("box", ranks=3)


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fails_the_rule_that_it_names(fault: Any, tmp_path: Path, nothing_left: None) -> None:
    out = tmp_path / "run"
    ends = pytest.raises(KitError, match="these phases broke: groups") if fault.exit == 3 else contextlib.nullcontext()
    with ends:
        kit.run("box", fault=fault.name, device="cpu", out=out)
    failed = {row.check.partition("/")[0] for row in read_verdict(out / "verdict.json").failed}
    assert fault.caught_by in failed
    assert failed <= {fault.caught_by} | ALSO.get(fault.name, set())


# Other rules that a bug fails, besides the one it is listed under.
ALSO = {"kept-name": {"nothing_piles_up"}, "wrong-sum": {"all_reduce_host"}, "kept-memory": {"resize_takes_again"}}
