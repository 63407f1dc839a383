"""What is found in a training environment, and what of torchcomms would be in effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.measure import stack

ROOT = Path(__file__).resolve().parents[2]


def ask(tmp_path: Path, flag: str = "") -> dict:
    """In a process of its own, in which a package of the test's may lie on the path."""
    code = "import json; from kit.measure.stack import torchcomms; print(json.dumps(torchcomms()))"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", stack.ROUTING_FLAG: flag}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def package(folder: Path, version: str, code: str) -> None:
    """A stand-in for torchcomms, which has no build for every machine."""
    (folder / "torchcomms").mkdir()
    (folder / "torchcomms" / "__init__.py").write_text(code)
    about = folder / f"torchcomms-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchcomms\nVersion: {version}\n")


def test_nothing_is_installed(tmp_path):
    said = ask(tmp_path, "1")
    if said["why"] != "torchcomms is not installed":
        pytest.skip("torchcomms is installed here")
    assert said == {"requested": True, "importable": False, "why": "torchcomms is not installed"}
    assert ask(tmp_path, "0")["requested"] is False


def test_the_package_indexs_placeholder_is_recognised(tmp_path):
    package(tmp_path, "0.0.1", "raise ImportError('a name without code')\n")
    said = ask(tmp_path, "1")
    assert said["requested"] is True
    assert said["importable"] is False
    assert said["why"] == (
        "torchcomms 0.0.1 cannot be imported (ImportError: a name without code): it is the package index's placeholder"
    )


def test_a_real_one_that_does_not_load_is_no_placeholder(tmp_path):
    package(tmp_path, "0.2.0", "import nothing_of_that_name\n")
    said = ask(tmp_path)
    assert said["importable"] is False
    assert "No module named 'nothing_of_that_name'" in said["why"]
    assert "placeholder" not in said["why"]


def test_one_that_loads_has_what_torch_asks_for(tmp_path):
    package(tmp_path, "0.2.0", "def new_comm(): ...\n")
    assert ask(tmp_path) == {"requested": False, "importable": True, "why": None}
    (tmp_path / "torchcomms" / "__init__.py").write_text("")
    assert "new_comm" in ask(tmp_path)["why"]


def test_megatrons_options_are_read_from_megatron():
    found = {one.name: one.what for one in stack.findings()}
    assert found["CPU-offloaded optimizer"] == "Megatron knows optimizer_cpu_offload"
    assert found["precision-aware optimizer"] == "Megatron knows use_precision_aware_optimizer"
    assert found["CUDA graphs"] == "Megatron knows cuda_graph_impl"
    assert stack.megatron_fields("megatron.core.optimizer", "NoSuchConfig") == set()
    assert stack.option(set(), "anything") is None
    assert stack.installed("torch", "torch") == __import__("importlib.metadata").metadata.version("torch")
    assert stack.installed("no-such-package", "no_such_module") is None
