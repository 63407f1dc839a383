"""Gates: defaults that show one thing, and a check that it did happen."""

from __future__ import annotations

import pytest

from kit.errors import BadInput
from kit.labs.share.config import ShareConfig
from tests.labs.share.conftest import failed, passed, simulated, why


@pytest.mark.parametrize("gate", ["1", "2", "3", "4"])
def test_a_gate_shows_what_it_is_about(gate: str) -> None:
    verdict, error = simulated(gate=gate)
    assert (failed(verdict), error) == (set(), "")
    assert passed(verdict, "gate_shown") is True


def test_a_gate_that_shows_nothing_fails() -> None:
    """One step alone: nothing is handed over, and nobody comes back."""
    verdict, _ = simulated(gate="3", steps_a=1)
    assert passed(verdict, "gate_shown") is False
    assert why(verdict, "gate_shown").startswith("it never happened that a pipeline handed its devices over")
    assert passed(simulated(gate="1", infer_a=(0,))[0], "gate_shown") is False


def test_settings_go_over_a_gate_and_other_gates_are_refused() -> None:
    assert ShareConfig(gate="2").infer_tp == 2
    assert ShareConfig(gate="1", window=2).window == 2
    with pytest.raises(BadInput, match="the labs offload and sync measure"):
        ShareConfig(gate="2.5")
