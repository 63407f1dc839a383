"""Gates: defaults that demonstrate one thing, and a check that it happened."""

from __future__ import annotations

from pathlib import Path

import pytest

import kit
from tests.labs.parts import failed, passed, why
from tests.labs.share.conftest import share, simulated


@pytest.mark.parametrize("gate", ["1", "2", "2.5", "3", "4"])
def test_a_gate_shows_what_it_is_about(gate: str) -> None:
    verdict, error = simulated(gate=gate)
    assert (failed(verdict), error) == (set(), "")
    assert passed(verdict, "gate_shown") is True


def test_a_gate_that_shows_nothing_fails() -> None:
    """With a single step, no devices are handed over and no pipeline comes back."""
    verdict, _ = simulated(gate="3", steps=1)
    assert passed(verdict, "gate_shown") is False
    assert why(verdict, "gate_shown").startswith("never happened: a pipeline handed its devices over")
    assert passed(simulated(gate="1", infer=(0,))[0], "gate_shown") is False


def test_settings_go_over_a_gate() -> None:
    assert share(gate="2").loops["a"].infer_tp == 2
    assert share(gate="1", window=2).loops["a"].window == 2
    assert share(gate="2.5", size="tiny").layers == 1


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("gate", ["1", "2", "2.5", "3"])
def test_a_gate_on_ranks(gate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    verdict = kit.run("share", gate=gate).verdict()
    assert failed(verdict) == set()
    asked = {"gate_shown", "memory_down_asleep", "groups_down_asleep", "weights_after_wake", "same_numbers"}
    assert all(passed(verdict, name) is True for name in (asked if gate == "2.5" else {"gate_shown"}))
