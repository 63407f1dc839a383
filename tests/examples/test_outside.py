"""A lab from outside the package: its two files and an entry point in a folder of their own, far from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
FILES = ("parcel_lab.py", "parcel_charts.py")
LINES = 150  # in which a lab has a config, two roles, three rules, two faults and two charts
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: parcel\nVersion: 1\n",
    "entry_points.txt": "[kit.labs]\nparcel = parcel_lab:LAB\n",
}
DRAW = "import kit, sys; print(*kit.load(sys.argv[1]).plot().axes)"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "parcel-1.dist-info").mkdir()
    for name, text in INFO.items():
        (tmp_path / "parcel-1.dist-info" / name).write_text(text)
    for name in FILES:
        shutil.copy(EXAMPLES / name, tmp_path)
    return tmp_path


def python(outside: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(outside), "KIT_RUNS": str(outside / "runs")}
    return subprocess.run([sys.executable, *words], cwd=outside, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_lab_from_outside_is_run_faulted_and_drawn(outside: Path, nothing_left: None) -> None:
    assert sum(len((outside / name).read_text().splitlines()) for name in FILES) <= LINES
    faults: list[dict[str, Any]] = json.loads(python(outside, "-m", "kit", "faults", "parcel", "--json").stdout)
    assert len(faults) == 2
    for fault in (None, *faults):
        chosen = ("--fault", fault["name"]) if fault else ()
        done = python(outside, "-m", "kit", "run", "parcel", "--set", "ranks=3", "--json", *chosen)
        assert done.returncode == (1 if fault else 0), done.stderr
        reported = json.loads(done.stdout)
        wrong = [row["check"] for row in reported["verdict"] if row["passed"] is False]
        assert wrong == ([fault["check"]] if fault else [])
    drawn = python(outside, "-c", DRAW, reported["run"])
    assert (drawn.returncode, drawn.stdout != "\n") == (0, True), drawn.stderr
