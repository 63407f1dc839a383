"""Helpers shared by the parts of the kill matrix."""

from __future__ import annotations

import random

import pytest

from kit import machine

TIMES = 5


def each(kinds: dict[str, object]) -> pytest.MarkDecorator:
    """Run every kind five times; without --every, only one of the five, drawn by the commit's day."""
    drawn = {kind: pytest.mark.drawn(1, of=kind) for kind in kinds}
    cases = [pytest.param(kind, n, marks=drawn[kind], id=f"{kind} {n}") for kind in kinds for n in range(TIMES)]
    return pytest.mark.parametrize(("kind", "n"), cases)


def moment(kind: str, n: int, most_s: float) -> float:
    """A random moment that is the same in each run of a case."""
    return random.Random(f"{kind} {n}").uniform(0.0, most_s)


def descendants(parent: int) -> list[int]:
    """All descendants of a process, including zombies."""
    below: dict[int, list[int]] = {}
    for pid in machine.pids():
        if fields := machine.stat_fields(pid):
            below.setdefault(int(fields[1]), []).append(pid)
    found, todo = [], [parent]
    while todo:
        found += (mine := below.get(todo.pop(), []))
        todo += mine
    return found
