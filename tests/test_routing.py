"""Whether torch can route through torchcomms, probed in a separate process with a test package on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.routing import FLAG, requested

ROOT = Path(__file__).resolve().parents[1]
STANDINS = ROOT / "tests" / "standins"


def ask(path: Path, flag: str = "") -> dict[str, Any]:
    code = "import json; from kit.routing import probe; print(json.dumps(probe()))"
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", FLAG: flag}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def package(folder: Path, version: str, code: str) -> None:
    """Make a package with torchcomms' name."""
    (folder / "torchcomms").mkdir()
    (folder / "torchcomms" / "__init__.py").write_text(code)
    about = folder / f"torchcomms-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchcomms\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("flag", "asked"),
    [
        pytest.param("", False, marks=pytest.mark.slow),
        ("0", False),
        ("1", True),
        pytest.param("true", True, marks=pytest.mark.slow),
    ],
)
def test_the_flag_is_read_as_torch_reads_it(flag: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAG, flag)
    assert requested() is asked
    code = "import torch.distributed.config as config; print(bool(config.use_torchcomms))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(asked)


@pytest.mark.slow
def test_nothing_is_installed(tmp_path: Path) -> None:
    message = ask(tmp_path, "1")
    if message["why"] != "torchcomms is not installed":
        pytest.skip("torchcomms is installed here")
    assert message == {"requested": True, "importable": False, "effective": None, "why": "torchcomms is not installed"}
    assert ask(tmp_path, "0")["requested"] is False


def test_the_package_indexs_placeholder_is_recognised(tmp_path: Path) -> None:
    package(tmp_path, "0.0.1", "raise ImportError('a name without code')\n")
    message = ask(tmp_path, "1")
    assert (message["requested"], message["importable"], message["effective"]) == (True, False, None)
    assert message["why"] == (
        "torchcomms 0.0.1 cannot be imported (ImportError: a name without code): it is the package index's placeholder"
    )


def test_a_real_one_that_does_not_load_is_no_placeholder(tmp_path: Path) -> None:
    package(tmp_path, "0.2.0", "import nothing_of_that_name\n")
    message = ask(tmp_path)
    assert message["importable"] is False
    assert "No module named 'nothing_of_that_name'" in message["why"]
    assert "placeholder" not in message["why"]


def test_one_that_lacks_what_torch_asks_for_is_not_importable(tmp_path: Path) -> None:
    package(tmp_path, "0.2.0", "def new_comm(): ...\n")
    message = ask(tmp_path, "1")
    assert (message["importable"], message["effective"]) == (False, None)
    assert "_backend_wrapper" in message["why"]


def test_a_group_tells_whether_it_is_routed() -> None:
    message = ask(STANDINS, "1")
    assert message == {"requested": True, "importable": True, "effective": True, "why": None}
    assert ask(STANDINS) == {"requested": False, "importable": True, "effective": None, "why": None}


def test_a_group_that_cannot_be_made_is_not_routed(tmp_path: Path) -> None:
    package(tmp_path, "0.3.0", "def new_comm(*_, **__): raise RuntimeError('no library')\n")
    (tmp_path / "torchcomms" / "_comms.py").write_text("class _BackendWrapper: ...\n")
    (tmp_path / "torchcomms" / "hooks.py").write_text("class FlightRecorderHook: ...\n")
    message = ask(tmp_path, "1")
    assert (message["importable"], message["effective"]) == (True, False)
    assert message["why"] == "a group cannot be made (RuntimeError: no library)"
