"""Other people's code: a sampler with NeMo-RL's protocol in the lab's own runs, and a ledger that another system wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kit
from kit import cli
from tests.labs.stream.conftest import simulated
from tests.stream.test_foreign import Windowed

OWN = f"{Windowed.__module__}:{Windowed.__qualname__}"


def test_an_own_sampler_passes_the_ledgers_checks() -> None:
    verdict, error = simulated(sampler=OWN, places=16)
    assert error == ""
    assert [row.check for row in verdict if row.passed is False] == []
    assert {row.check for row in verdict if row.passed} >= {"every_group_once", "no_sample_too_old", "permits_return"}


def test_what_is_no_sampler_is_refused_before_ranks_start() -> None:
    with pytest.raises(kit.BadInput, match="the sampler json:loads has no admit, select"):
        kit.lab("stream", sampler="json:loads")


def test_a_ledger_of_another_system_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "docs" / "examples" / "ledger.py"
    subprocess.run([sys.executable, example, tmp_path / "ledger"], check=True, timeout=60)
    assert cli.main(["check", str(tmp_path / "ledger"), "--lab", "stream"]) == 0
    assert "pass  every_group_once" in capsys.readouterr().out
