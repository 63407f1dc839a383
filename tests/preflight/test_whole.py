"""All probes on this machine's real ranks, as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kit.machine import has_gpu_driver

GPU = has_gpu_driver()
NEED_A_GPU = {"7b", "8", "9a", "9b"}


def deep(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kit", "doctor", "--deep", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "KIT_RUNS": str(tmp_path)},
    )
    return done, json.loads(done.stdout)["deep"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(GPU, reason="this machine has a GPU: see the test for it")
def test_without_a_gpu_all_that_can_be_measured_passes(tmp_path, nothing_left):
    done, reported = deep(tmp_path)
    shown = json.dumps(reported["probes"], indent=1)
    assert done.returncode == 0, shown
    assert {one["number"]: one["result"] for one in reported["probes"]} == {
        number: "not measurable" if number in NEED_A_GPU else "pass"
        for number in ("1", "2", "3", "4", "5", "6", "7a", "7b", "8", "9a", "9b", "10")
    }, shown
    rows = {row["what"]: row for one in reported["probes"] for row in one["rows"]}
    for what in ("NCCL groups", "cudaHostRegister", "CUDA IPC", "suspend", "driver memory", "compute mode"):
        assert rows[what]["result"] == "not measurable"
        assert rows[what]["why"]
    for what in ("gloo group", "given back", "tp2 bfloat16, step", "collective without its peer"):
        assert rows[what]["value"] > 0
    assert rows["the late rank is named"]["result"] == "pass"
    kept = reported["times"]
    unknown = {"host_to_device", "device_to_host"}
    numbers = (
        "world",
        "world_megatron",
        "all_reduce",
        "group",
        "group_destroy",
        "group_reload",
        "job",
        "step",
        "layout",
    )
    assert all(kept[name] > 0 for name in numbers)
    assert all(name not in kept for name in unknown)
    assert json.loads((tmp_path / "preflight.json").read_text()) == kept


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not GPU, reason="this machine has no GPU driver")
def test_on_a_gpu_every_probe_ends_by_itself_in_time(tmp_path, nothing_left):
    """Findings are for a person to judge; this only checks that each probe ends, and that together they keep the time limit."""
    _, reported = deep(tmp_path)
    assert reported["device"] == "cuda"
    assert [one["number"] for one in reported["probes"] if one["ended"] != "finished"] == []
    assert reported["seconds"] <= reported["limit_s"] == 130
