"""`kit bench routing` at small size: both ways really run with a stand-in for torchcomms; without it, rows give the reason."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

from kit import results
from kit.bench import offload
from kit.bench.offload import NUMBERS, PHASES
from kit.bench.session import Book, Session, conduct, read_rows
from tests.test_routing import STANDINS


def measured(folder: Path) -> dict[str, Any]:
    assert conduct("routing", quick=True, out=folder / "rows.jsonl", device="cpu") == 0
    message = read_rows(folder / "rows.jsonl")
    assert message["bench"] == "routing"
    return {row["what"]: row for row in message["rows"]}


@pytest.mark.slow
def test_numbers_are_the_same_and_times_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)
    rows = measured(tmp_path)
    assert (rows[NUMBERS]["median"], rows[NUMBERS]["met"]) == (0.0, True)
    assert rows[NUMBERS]["note"] == "10 numbers in each turn; turns: 1"
    assert all(rows[f"{phase}, time on over off"]["median"] > 0 for phase in PHASES)


class MadeUp:
    """Stand-in for a run with a given routing verdict."""

    def __init__(self, *, routed: bool) -> None:
        self.routed = routed

    def verdict(self) -> list[Any]:
        return [types.SimpleNamespace(check="routing_effective", passed=self.routed, why="rank 1: 3 of 4 groups")]


@pytest.mark.parametrize(
    ("routed", "seen", "reported"),
    [
        (True, [(10, 0), (10, 2), (10, 0)], (2.0, False, "10 numbers in each turn; turns: 3")),
        (True, [(10, 0)] * 3, (0.0, True, "10 numbers in each turn; turns: 3")),
        (True, [(0, 0)] * 3, (None, None, "not measured: the runs have no comparable number")),
        (False, [(10, 0)] * 3, (None, None, "not measured: rank 1: 3 of 4 groups")),
    ],
)
def test_one_turn_that_differs_is_enough(
    routed: bool,
    seen: list[tuple[int, int]],
    reported: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    turns = iter(seen)
    monkeypatch.setattr(offload, "routed_run", lambda *_: MadeUp(routed=routed))
    monkeypatch.setattr(offload, "seconds_in", lambda *_: 1.0)
    monkeypatch.setattr(results, "outcomes", lambda *_: next(turns))
    session = Session("cpu", tmp_path, Book("routing"))
    rows = {row.what: row for row in offload.routed(session, turns=3, cycles=1)}
    assert (rows[NUMBERS].median, rows[NUMBERS].met, rows[NUMBERS].note) == reported


def test_where_it_is_not_in_effect_the_rows_say_why(tmp_path: Path) -> None:
    rows = measured(tmp_path)
    if rows[NUMBERS]["median"] is not None:
        pytest.skip("torchcomms is installed here")
    assert {row["note"] for row in rows.values()} == {"not measured: ModuleNotFoundError: No module named 'torchcomms'"}
