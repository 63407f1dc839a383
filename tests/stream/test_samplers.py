"""Samplers as pure functions of a view, in tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kit.stream.settings import SAMPLERS, SamplerView


@dataclass(frozen=True)
class Slot:
    id: int
    version: int
    target: int = -1
    order: int = -1


def view(*slots: Slot, **more: Any) -> SamplerView:
    plain = {
        "version": 0,
        "window": 1,
        "groups": 2,
        "last": 100,
        "index": -1,
        "position": 0,
        "accepted": 0,
        "running": 0,
    }
    return SamplerView(**{**plain, **more}, buffer={slot.id: slot for slot in slots})


@pytest.mark.parametrize("name", ["strict", "in-order", "weight-fifo", "ready-first"])
@pytest.mark.parametrize(
    ("index", "version", "window", "opens"),
    [
        (-1, 0, 0, True),
        (0, 0, 0, False),
        (0, 1, 0, True),
        (0, 0, 1, True),
        (1, 0, 1, False),
        (4, 3, 2, True),
        (5, 3, 2, False),
    ],
)
def test_a_gate_blocks_while_its_index_is_version_plus_window(
    name: str, index: int, version: int, window: int, opens: bool
) -> None:
    assert SAMPLERS[name].admits(view(index=index, version=version, window=window)) is opens
    assert SAMPLERS[name].admits(view(index=index, version=version, window=window, position=1)), "the batch has passed"


def test_a_gate_lets_no_batch_through_that_no_step_trains() -> None:
    assert SAMPLERS["in-order"].admits(view(index=2, version=2, window=3, last=4))
    assert not SAMPLERS["in-order"].admits(view(index=3, version=2, window=3, last=4))


def test_windowed_does_not_gate() -> None:
    assert SAMPLERS["windowed"].admits(view(index=99, running=99))


@pytest.mark.parametrize(
    ("accepted", "running", "version", "opens"),
    [(0, 3, 0, True), (1, 3, 0, False), (3, 0, 0, True), (4, 1, 1, True), (2, 4, 1, False)],
)
def test_capacity_bounds_accepted_plus_running(accepted: int, running: int, version: int, opens: bool) -> None:
    found = SAMPLERS["capacity"].admits(view(accepted=accepted, running=running, version=version, position=1))
    assert found is opens


BUFFER = (
    Slot(1, 0, target=2, order=3),
    Slot(2, 1, target=2, order=0),
    Slot(3, 1, target=3, order=-1),
    Slot(4, 2, target=3, order=2),
    Slot(5, 3, target=4, order=1),
    Slot(6, 0, target=1, order=-1),
)


@pytest.mark.parametrize(
    ("name", "version", "selects", "evicts", "aborts"),
    [
        ("in-order", 2, (1, 2), (), ()),
        ("in-order", 3, (4,), (1, 2), ()),
        ("weight-fifo", 3, (4, 5), (1, 2), ()),
        ("weight-fifo", 2, (2,), (1,), ()),
        ("weight-fifo", 1, (1,), (), ()),
        ("windowed", 2, (2, 4), (1,), (6,)),
        ("windowed", 3, (4, 5), (1, 2), (3, 6)),
        ("ready-first", 3, (1, 2, 4, 5), (), ()),
        ("ready-first", 1, (1, 2), (), ()),
        ("capacity", 3, (2, 5, 4, 1), (), ()),
    ],
)
def test_what_is_trained_and_what_is_too_old(
    name: str, version: int, selects: tuple[int, ...], evicts: tuple[int, ...], aborts: tuple[int, ...]
) -> None:
    seen = view(*BUFFER, version=version)
    sampler = SAMPLERS[name]
    assert (sampler.selects(seen), sampler.evicts(seen), sampler.aborts(seen)) == (selects, evicts, aborts)


def test_weight_fifo_waits_for_the_oldest_version_and_then_goes_on() -> None:
    waits = view(Slot(1, 0, order=0), Slot(2, 0), Slot(3, 1, order=1), version=1)
    assert SAMPLERS["weight-fifo"].selects(waits) == (1,)
    complete = view(Slot(1, 0, order=0), Slot(2, 0, order=2), Slot(3, 1, order=1), version=1)
    assert SAMPLERS["weight-fifo"].selects(complete) == (1, 2, 3)
    unfinished = view(Slot(1, 0), Slot(3, 1, order=1), version=1)
    assert SAMPLERS["weight-fifo"].selects(unfinished) == ()


@pytest.mark.parametrize(
    ("name", "places"),
    [("strict", 8), ("in-order", 32), ("weight-fifo", 32), ("ready-first", 32), ("windowed", 0), ("capacity", 0)],
)
def test_the_places_that_a_sampler_needs(name: str, places: int) -> None:
    assert SAMPLERS[name].places(8, 0 if name == "strict" else 3) == places


def test_only_in_order_samplers_stamp_targets() -> None:
    assert {name for name, sampler in SAMPLERS.items() if sampler.stamps} == {"strict", "in-order"}
