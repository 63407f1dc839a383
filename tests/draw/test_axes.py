"""Which cycles a run has, and where an axis of steps names them."""

from __future__ import annotations

from kit.draw.axes import stretches
from kit.draw.plots import cycles_of


def test_a_cycle_is_named_where_it_has_most_steps() -> None:
    once, control = [(0, "baseline")], [(1, "control"), (2, "control")]
    cycles = [(cycle, phase) for cycle in (1, 2) for phase in ("make", "talk", "destroy")]
    order = [*once, *control, *cycles, (0, "end")]
    assert cycles_of(order) == [1, 2]
    assert stretches(order, cycles_of(order)) == {1: [3, 4, 5], 2: [6, 7, 8]}


def test_a_loop_may_count_from_zero() -> None:
    order = [(0, "setup"), (0, "train"), (1, "train"), (2, "train")]
    assert cycles_of(order) == [0, 1, 2]
    assert stretches(order, cycles_of(order)) == {0: [0, 1], 1: [2], 2: [3]}


def test_a_run_without_cycles_has_one() -> None:
    assert cycles_of([(0, "baseline"), (0, "offload"), (0, "reload")]) == [0]
