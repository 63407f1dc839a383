"""Provenance is JSON, works without torch, gives reasons for missing values, and reveals no secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kit import machine
from kit.measure import provenance
from kit.measure.facts import installed, known_option, megatron_fields, stack_findings
from kit.measure.recorder import cuda_state, git_state, gpu_state, recorder_settings

ROOT = Path(__file__).parents[2]


def test_it_is_json_and_says_what_runs_here():
    reported = json.loads(json.dumps(provenance()))
    assert reported["versions"]["torch"] == torch.__version__
    assert reported["kit"]
    assert reported["cpu"]["cores"] >= reported["cpu"]["affinity"] >= 1
    assert reported["time"].endswith("+00:00")
    assert (reported["cuda"]["cuda"] is None) == (torch.version.cuda is None)
    assert reported["gpu"]["gpus"] or reported["gpu"]["why"] or reported["gpu"]["driver"] is None


def test_it_loads_neither_torch_nor_pandas():
    script = """
import sys
from kit.measure import Recorder, provenance
told = provenance()
assert not {"torch", "pandas", "numpy", "pydantic"} & set(sys.modules)
assert told["versions"]["torch"] and told["cuda"]["why"] == "torch is not loaded in this process", told
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_named_as_the_reason():
    assert cuda_state()["why"] == "this torch is built without CUDA"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("INFO", "INFO"),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1"),
        ("tcp://10.0.0.1:29500", "tcp://10.0.0.1:29500"),
        ("http://me:word@host:80", "http://<hidden>@host:80"),
        ("/home/alice/topo.xml", "<path>"),
        ("a=/home/alice:/srv/x", "a=<path>:<path>"),
        ("file:///home/alice/x", "<path>"),
        ("~alice/x", "<path>"),
        ("hf_abcdefghijklmnop", "<hidden>"),
        ("0123456789abcdef0123456789abcdef", "<hidden>"),
    ],
)
def test_values_lose_paths_and_secrets_only(value, shown):
    assert recorder_settings({"NCCL_X": value}) == {"NCCL_X": shown}


def test_only_the_settings_that_matter_and_no_secret_names():
    given = dict.fromkeys(
        [
            "NCCL_DEBUG",
            "TORCH_X",
            "MASTER_ADDR",
            "OMP_NUM_THREADS",
            "MALLOC_ARENA_MAX",
            "CUDA_VISIBLE_DEVICES",
            "KIT_RUNS",
            "NVIDIA_TF32_OVERRIDE",
            "PYTORCH_ALLOC_CONF",
        ],
        "1",
    )
    others = dict.fromkeys(
        ["HOME", "USER", "KIT_TOKEN", "NCCL_API_KEY", "TORCH_SECRET_X", "KIT_password", "HF_HOME"], "1"
    )
    assert recorder_settings(given | others) == given


def git(folder, *arguments):
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", "-C", folder, *name, *arguments], check=True, capture_output=True, text=True).stdout


def test_git_tells_commit_and_dirt_of_the_checkout_itself(tmp_path):
    assert git_state(tmp_path)["commit"] is None
    assert git_state(tmp_path)["why"].startswith("git ended with status 128: fatal: not a git repository")
    git(tmp_path, "init", "-q")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert git_state(tmp_path) == {"commit": commit, "dirty": False, "why": None}
    (tmp_path / "a/file").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True, "why": None}
    assert git_state(tmp_path / "a")["why"] == "the kit is not in a git checkout"


def test_missing_tools_are_reasons_not_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path)["why"] == "git is not on this box"
    assert gpu_state() == {"driver": machine.gpu_driver(), "gpus": [], "why": "nvidia-smi is not on this box"}


def test_a_driver_that_fails_is_quoted_without_paths(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to load /home/alice/lib'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_state()["why"] == "nvidia-smi ended with status 9: Failed to load <path>"
    tool.chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state()["why"] == "nvidia-smi cannot be started: Permission denied"


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, GPU-12, 143771, 143000, 5, [N/A], 16, 16, 580.95.05'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpu = {
        "name": "NVIDIA H200",
        "uuid": "GPU-12",
        "memory_mib": 143771,
        "memory_free_mib": 143000,
        "pcie_gen": 5,
        "pcie_gen_max": None,
        "pcie_width": 16,
        "pcie_width_max": 16,
    }
    assert gpu_state() == {"driver": "580.95.05", "gpus": [gpu], "why": None}


@pytest.mark.parametrize(("value", "told"), [("1", "set to 1"), ("0", None), (None, None)])
def test_launches_that_block_are_reported(monkeypatch: pytest.MonkeyPatch, value: str | None, told: str | None) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    (finding,) = (row for row in stack_findings() if row["name"] == "CUDA_LAUNCH_BLOCKING")
    assert finding["what"] == told


def test_megatrons_options_are_read_from_megatron():
    found = {finding["name"]: finding["what"] for finding in stack_findings()}
    assert found["CPU-offloaded optimizer"] == "Megatron knows optimizer_cpu_offload"
    assert found["precision-aware optimizer"] == "Megatron knows use_precision_aware_optimizer"
    assert found["CUDA graphs"] == "Megatron knows cuda_graph_impl"
    assert megatron_fields("megatron.core.optimizer", "NoSuchConfig") == set()
    assert known_option(set(), "anything") is None
    assert installed("torch", "torch") == torch.__version__
    assert installed("no-such-package", "no_such_module") is None
