"""The commits of CONTRIBUTING, applied to a copy of the kit: a rule is one line, a fault is one entry and one function."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.frozen.record import ARCHIVE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the kit with the commits, outside the repository."""
    shutil.copytree(ROOT / "kit", tmp_path / "kit", ignore=shutil.ignore_patterns("__pycache__"))
    commits = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len(commits) == 2
    for commit in commits:
        subprocess.run(["git", "apply", "-"], input=commit, cwd=tmp_path, check=True, text=True)
    return tmp_path


def verdict(checkout: Path, *words: str) -> dict[str, bool | None]:
    env = {**os.environ, "PYTHONPATH": str(checkout), "KIT_RUNS": str(checkout / "runs")}
    command = [sys.executable, "-m", "kit", *words, "--json"]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode in {0, 1}, done.stderr
    return {row["check"]: row["passed"] for row in json.loads(done.stdout)["verdict"]}


def test_a_new_rule_judges_recorded_runs(checkout: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(checkout, [name for name in archive if name.name.startswith("smoke-")], filter="data")
    assert verdict(checkout, "check", "smoke-default")["sockets_return"] is True
    assert verdict(checkout, "check", "smoke-leaked-group")["sockets_return"] is False


@pytest.mark.slow
def test_a_new_fault_is_caught_by_its_rule_alone(checkout: Path, nothing_left: None) -> None:
    judged = verdict(checkout, "run", "smoke", "--fault", "open-file", "--set", "cycles=2")
    assert [check for check, passed in judged.items() if passed is False] == ["fds_return"]
