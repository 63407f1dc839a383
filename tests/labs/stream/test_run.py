"""One whole run on ranks: every phase, every check, and how the command ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kit
from kit.cli import main
from kit.labs.stream.checks import LOOPS, ledger
from tests.labs.stream.conftest import failed

# What so short a run, on a machine of any speed, may leave without an answer.
TOO_SHORT = {
    "controller_answers",
    "nothing_piles_up",
    "trains_before_straggler",
    "kv_policy_kept",
    "no_torn_generation",
}


@pytest.fixture(scope="module")
def run(places: None) -> kit.Run:
    return kit.run("stream", steps=3, groups=2, group=2, layers=1, lr=3e-3, slots=4, answer=[8, 16], decode=2)


def test_every_check_has_an_answer_and_none_fails(run: kit.Run) -> None:
    verdict = run.verdict()
    assert failed(verdict) == set()
    assert {row.check for row in verdict if row.passed is None} <= TOO_SHORT


def test_every_loop_has_a_ledger_with_an_end(run: kit.Run) -> None:
    for phase in (*LOOPS, "resume", "rehearse"):
        rows = ledger(run.frame(), phase)
        assert rows is not None
        assert rows.ended is not None
        assert rows.ended["why"] == "done"


@pytest.mark.slow
def test_the_command_says_how_a_simulated_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    simulated = ["run", "stream", "--set", "simulated=true", "--set", "ranks=1", "--json"]
    assert main(simulated) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]
    assert main([*simulated, "--fault", "lost-group"]) == 1
    assert main([*simulated, "--fault", "gate-never-opens"]) == 3
    assert main(["run", "stream", "--set", "places=1", "--json"]) == 2
