"""The bench of routing: both ways are compared number by number; where routing has no effect, rows give the reason."""

from __future__ import annotations

import types
from typing import Any

import pytest

from kit.labs.bench_routing import parts as routing
from kit.labs.bench_routing.parts import NUMBERS
from kit.labs.bench_routing.rules import RULES
from kit.results.samples import sample_rows
from tests.bench.recorded import frame_of


class MadeUp:
    """Stand-in for a run with a given routing verdict."""

    def __init__(self, *, routed: bool) -> None:
        self.routed = routed

    def verdict(self) -> list[Any]:
        return [types.SimpleNamespace(check="routing_effective", passed=self.routed, why="rank 1: 3 of 4 groups")]


@pytest.mark.parametrize(
    ("routed", "seen", "reported"),
    [
        (True, [(10, 0), (10, 2), (10, 0)], (2.0, 3, "10 numbers in each turn")),
        (True, [(10, 0, "", 1)] * 3, (1.0, 3, "10 numbers in each turn")),
        (True, [(10, 0)] * 3, (0.0, 3, "10 numbers in each turn")),
        (True, [(0, 0)] * 3, (None, 0, "not measured: the runs have no comparable number")),
        (False, [(10, 0)] * 3, (None, 0, "not measured: rank 1: 3 of 4 groups")),
    ],
)
def test_one_turn_that_differs_is_enough(
    routed: bool, seen: list[tuple[int, int]], reported: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(seen)
    monkeypatch.setattr(routing, "routed_run", lambda *_: MadeUp(routed=routed))
    monkeypatch.setattr(routing, "phase_seconds", lambda *_: 1.0)
    monkeypatch.setattr(routing, "outcomes", lambda *_: (*next(turns), "", 0)[:4])
    bench: Any = types.SimpleNamespace(config=types.SimpleNamespace(turns=3))
    frame = frame_of(routing.compare_routed(bench))
    rows = {row["what"]: row for row in sample_rows(frame, RULES, {})}
    answer = RULES[0].measure(frame, {})[0]  # type: ignore[index]
    assert (answer.value, rows[NUMBERS]["n"], rows[NUMBERS]["note"]) == reported
