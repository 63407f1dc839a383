"""User code: a sampler with NeMo-RL's protocol in the lab's own runs, and a ledger that another system wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kit
from kit import cli
from kit.labs.stream.drive import PIPELINE
from kit.stream.core import Controller
from kit.stream.settings import Resume, StreamSettings
from tests.labs.stream.conftest import simulated
from tests.stream.test_foreign import Windowed

ROOT = Path(__file__).parents[3]
OWN = f"{Windowed.__module__}:{Windowed.__qualname__}"


def test_an_own_sampler_passes_the_ledgers_checks() -> None:
    verdict, error = simulated(sampler=OWN, places=16)
    assert error == ""
    assert [row.check for row in verdict if row.passed is False] == []
    assert {row.check for row in verdict if row.passed} >= {"every_group_once", "no_sample_too_old", "permits_return"}


def own_controller(plan: StreamSettings, start: Resume | None = None) -> Controller:
    """Stands in for a user's controller; it returns the kit's."""
    return Controller(plan, pipeline=PIPELINE, resume=start)


def test_an_own_controller_is_judged_by_the_ledgers_checks() -> None:
    verdict, error = simulated(implementation=f"{__name__}:own_controller")
    assert error == ""
    assert [row.check for row in verdict if row.passed is False] == []


@pytest.mark.slow
def test_an_own_trainer_and_an_own_transport_take_part_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    own = {"trainer": "docs.examples.step_trainer:Adapter", "transport": "docs.examples.shared_transport:Shared"}
    run = kit.run("stream", device="cpu", steps=2, phases="plain,lockstep,stream,verify", **own)
    rows = {row.check: row.passed for row in run.verdict()}
    assert [name for name, passed in rows.items() if passed is False] == []
    assert rows["equals_plain"]
    assert rows["stamps_true"]


def test_a_trainer_that_is_not_there_is_refused_before_ranks_start() -> None:
    with pytest.raises(kit.BadInput, match="no_such_module"):
        kit.lab("stream", trainer="no_such_module:Trainer")


def test_what_is_no_sampler_is_refused_before_ranks_start() -> None:
    with pytest.raises(kit.BadInput, match="the sampler json:loads lacks admit, select"):
        kit.lab("stream", sampler="json:loads")


def test_a_ledger_of_another_system_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "docs" / "examples" / "ledger.py"
    subprocess.run([sys.executable, example, tmp_path / "ledger"], check=True, timeout=60)
    assert cli.main(["check", str(tmp_path / "ledger"), "--lab", "stream"]) == 0
    assert "pass  every_group_once" in capsys.readouterr().out
