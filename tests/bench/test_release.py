"""The bench of releasing, from made-up answers of ranks."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import KitError
from kit.labs.bench import Samples
from kit.labs.bench_release.parts import LIKE_EXACT, exact_over_common, of_trial, ways_compared
from kit.labs.bench_release.ranks.cycles import GLOO, SPLIT, STORE

MIB = 2**20
EXACT, MANUAL = "exact", "manual"


def rank(release: float, *, freed: int, left: int, groups: int = 20, mechanism: str = GLOO) -> dict[str, Any]:
    """One rank's result, with two equal cycles."""
    levels = {"groups": freed, "rss_anon": freed * MIB}
    cycle = {"seconds": {"release": release, "back": 0.01, "first collective": 0.002}, "freed": levels}
    left_ = {"groups": left, "rss_anon": left * MIB}
    return {"groups": groups, "cycles": [cycle, cycle], "left": left_, "mechanism": mechanism}


TWO = [rank(0.02, freed=20, left=0), rank(0.03, freed=19, left=1)]


def made() -> dict[str, Samples]:
    return {samples.what.partition(": ")[2]: samples for samples in of_trial(2, EXACT, TWO)}


def test_a_time_is_the_slowest_ranks_and_a_sample_is_a_cycle():
    release = made()["release"]
    assert (release.values, release.unit) == (pytest.approx([30, 30]), "ms")
    assert made()["round"].values == pytest.approx([42, 42])


def test_freed_is_the_least_and_left_the_most_of_any_rank():
    rows = made()
    assert [list(rows[f"{word} groups"].values) for word in ("freed", "left")] == [[19, 19], [1]]
    assert "freed sockets" not in rows  # the samples contain no socket counts


def test_exact_is_held_against_what_is_in_common_use():
    control = exact_over_common(2, {EXACT: TWO, MANUAL: [rank(0.2, freed=17, left=9)]})
    assert control.values == pytest.approx([42 / 212] * 2)


def test_like_is_compared_with_like_and_every_row_names_its_mechanism():
    """On a GPU, plain `manual` splits WORLD, which is different work from making communicators over the store."""
    cost = {EXACT: (0.3, STORE), MANUAL: (0.1, SPLIT), LIKE_EXACT: (0.4, STORE)}
    answers = {way: [rank(taken, freed=20, left=0, mechanism=how)] for way, (taken, how) in cost.items()}
    for way, (_, how) in cost.items():
        assert {samples.ids["mechanism"] for samples in of_trial(2, way, answers[way])} == {how}
    exact = exact_over_common(2, answers)
    assert exact.values == pytest.approx([312 / 412] * 2)
    assert exact.note == f"{STORE}; over 'manual, by store', which uses the same mechanism"
    del answers[LIKE_EXACT]
    alone = exact_over_common(2, answers)
    assert not alone.values
    assert alone.note == f"not measured: {STORE}; no comparable way was measured with the same mechanism"


class Broken:
    """A World whose ranks die in release mode `abort`, and which is interrupted at its sixth call."""

    device = "cpu"

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Broken:
        return self

    def __exit__(self, *_: object) -> None: ...

    def restart(self) -> None: ...

    def status(self) -> list:
        return [{"device": "cpu"}] * 2

    def call(self, target: str, *, mode: str, **_: object) -> list:
        if target.endswith(":refused"):
            return ["it needs a GPU" if mode == "suspend" else ""]
        self.calls += 1
        if mode == "abort":
            raise KitError("rank 1 died\nof something")
        if self.calls == 6:
            raise KeyboardInterrupt
        return [rank(0.02, freed=20, left=0)]


def bench_of(world: Broken, device: str, trials: int) -> Any:
    config = SimpleNamespace(trials=trials, cycles=1)
    return SimpleNamespace(device=device, config=config, world=lambda *_, **__: world)


def test_rows_of_every_trial_are_given_before_the_next_one():
    rows: list[Samples] = []
    measured = ways_compared(bench_of(Broken(), "cpu", trials=2), 2, 0)
    with pytest.raises(KeyboardInterrupt):
        deque(map(rows.append, measured))
    notes = {
        samples.who: (samples.what, samples.note) for samples in rows if not samples.values and "way" in samples.ids
    }
    assert notes["suspend"] == ("own groups, 2 ranks", "not measured: it needs a GPU")
    assert notes["abort"] == ("own groups, 2 ranks", "not measured: rank 1 died")
    counted = Counter(samples.who for samples in rows if samples.ids.get("of") == "release")
    assert counted == {"exact": 2, "manual": 1, "official": 1}


def test_on_a_gpu_manual_is_measured_by_the_same_mechanism_too():
    asked = []

    class Gpu(Broken):
        def status(self) -> list:
            return [{"device": "cuda:0"}] * 2

        def call(self, target: str, *, mode: str, by_store: bool = False, **_: object) -> list:
            if target.endswith(":refused"):
                return [""]
            asked.append((mode, by_store))
            return [rank(0.02, freed=20, left=0, mechanism=STORE)]

    bench = bench_of(Gpu(), "cuda", trials=1)
    list(ways_compared(bench, 2, 0))
    assert [call for call in asked if call[0] == "manual"] == [("manual", False), ("manual", True)]
    (samples,) = ways_compared(bench, 4, 0, most_a_gpu=1)
    assert samples.note == "not measured: 2 ranks would share a GPU"
