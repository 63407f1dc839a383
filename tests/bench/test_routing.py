"""`kit bench routing`, small: with a stand-in for torchcomms both ways really run, and without one the rows say why not."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from kit.bench.routing import NUMBERS, PHASES, QUICK, main
from tests.test_routing import STANDINS


def told(capsys: Any) -> dict[str, Any]:
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["bench"] == "routing"
    return {row["what"]: row for row in said["rows"]}


@pytest.mark.slow
def test_numbers_are_the_same_and_times_are_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)
    assert main(True, QUICK) == 0
    rows = told(capsys)
    assert (rows[NUMBERS]["median"], rows[NUMBERS]["met"]) == (0.0, True)
    assert rows[NUMBERS]["note"] == "10 numbers in each turn"
    assert all(rows[f"{phase}, time on over off"]["median"] > 0 for phase in PHASES)


def test_where_it_is_not_in_effect_the_rows_say_why(capsys: Any) -> None:
    assert main(True, QUICK) == 0
    rows = told(capsys)
    if rows[NUMBERS]["median"] is not None:
        pytest.skip("torchcomms is installed here")
    assert {row["note"] for row in rows.values()} == {"not measured: torchcomms is not installed"}
