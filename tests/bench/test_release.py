"""`kit bench release`: rows from made-up samples, and a small run on real ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kit.bench.offload import LIKE_EXACT, of, release_table, ways_compared
from kit.bench.onranks.jobs import GLOO, SPLIT, STORE
from kit.bench.session import Row, conduct, read_rows
from kit.errors import KitError

MIB = 2**20
EXACT, MANUAL = "exact", "manual"


def rank(release: float, *, freed: int, left: int, groups: int = 20, mechanism: str = GLOO) -> dict:
    """One rank's result, with two equal cycles."""
    levels = {"groups": freed, "rss_anon": freed * MIB}
    one = {"seconds": {"release": release, "back": 0.01, "first collective": 0.002}, "freed": levels}
    left_ = {"groups": left, "rss_anon": left * MIB}
    return {"groups": groups, "cycles": [one, one], "left": left_, "mechanism": mechanism}


def made() -> dict[tuple[str, str], Row]:
    seen = {
        EXACT: [[rank(0.02, freed=20, left=0), rank(0.03, freed=19, left=1)]] * 2,
        MANUAL: [[rank(0.2, freed=17, left=9), rank(0.1, freed=17, left=9)]],
    }
    return {(one.who, one.what.partition(": ")[2]): one for one in of(2, seen)}


def test_a_time_is_the_slowest_ranks_and_a_sample_is_a_cycle():
    one = made()["exact", "release"]
    assert (one.median, one.n, one.unit) == (pytest.approx(30), 4, "ms")
    assert made()["manual", "round"].median == pytest.approx(212)


def test_freed_is_the_least_and_left_the_most_of_any_rank():
    rows = made()
    assert [rows["exact", f"{word} groups"].median for word in ("freed", "left")] == [19, 1]
    assert [rows["exact", f"{word} host memory"].n for word in ("freed", "left")] == [4, 2]
    assert ("exact", "freed sockets") not in rows  # the samples contain no socket counts


def test_exact_is_held_against_what_is_in_common_use():
    exact = made()["exact", "round"]
    assert (exact.limit, exact.aim, exact.met) == (pytest.approx(212), 60, True)
    assert made()["manual", "round"].limit is None


def test_like_is_compared_with_like_and_every_row_names_its_mechanism():
    """On a GPU, plain `manual` splits WORLD, which is different work from making communicators over the store."""
    cost = {EXACT: (0.3, STORE), MANUAL: (0.1, SPLIT), LIKE_EXACT: (0.4, STORE)}
    seen = {way: [[rank(taken, freed=20, left=0, mechanism=how)]] for way, (taken, how) in cost.items()}
    rows = {(one.who, one.ids["what"]): one for one in of(2, seen)}
    assert {one.who: one.ids["mechanism"] for one in rows.values()} == {
        "exact": STORE,
        "manual": SPLIT,
        "manual, by store": STORE,
    }
    exact = rows["exact", "round"]
    assert (exact.limit, exact.aim) == (pytest.approx(412), 6000)
    assert exact.note == f"{STORE}; the limit is the time of 'manual, by store', which uses the same mechanism"
    assert rows["manual", "release"].note == SPLIT
    del seen[LIKE_EXACT]
    alone = next(one for one in of(2, seen) if one.who == "exact" and one.ids["what"] == "round")
    assert (alone.limit, alone.met) == (None, None)
    assert alone.note == f"{STORE}; no comparable way was measured with the same mechanism"


def test_the_table_has_a_line_for_each_way_and_says_what_was_not_measured():
    rows = [*made().values(), Row(what="groups, 2 ranks", who="suspend", note="not measured: it needs a GPU")]
    message = release_table(rows).splitlines()
    assert message[0].split()[:4] == ["ranks", "groups", "way", "release"]
    assert message[1].split() == [
        "2",
        "20",
        "exact",
        "30",
        "(30-30)",
        "10",
        "(10-10)",
        "2",
        "(2-2)",
        "19",
        "/",
        "1",
        "19",
        "/",
        "1",
    ]
    assert "exact, 20 groups a rank, 2 ranks: round: 42 ms, at most 212: met" in message
    assert message[-1] == "suspend, groups, 2 ranks: not measured: it needs a GPU"


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


def test_rows_of_every_trial_are_given_before_the_next_one():
    world = Broken()
    session = SimpleNamespace(device="cpu", world=lambda *_, **__: world)
    rows: dict[tuple[str, str], Row] = {}

    def keep() -> None:
        for one in ways_compared(session, 2, 0, trials=2, cycles=1):
            rows[one.what, one.who] = one

    with pytest.raises(KeyboardInterrupt):
        keep()
    notes = {one.who: (one.what, one.note) for one in rows.values() if one.median is None}
    assert notes == {
        "suspend": ("own groups, 2 ranks", "not measured: it needs a GPU"),
        "abort": ("own groups, 2 ranks", "not measured: rank 1 died"),
    }
    counted = {one.who: one.n for one in rows.values() if one.ids.get("what") == "release"}
    assert counted == {"exact": 4, "manual": 2, "official": 2}


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

    session = SimpleNamespace(device="cuda", world=lambda *_, **__: Gpu())
    list(ways_compared(session, 2, 0, trials=1, cycles=1))
    assert [one for one in asked if one[0] == "manual"] == [("manual", False), ("manual", True)]
    (row,) = ways_compared(session, 4, 0, trials=1, cycles=1, most_a_gpu=1)
    assert row.note == "not measured: 2 ranks would share a GPU"


@pytest.mark.slow
def test_a_small_run_tells_the_ways_apart(tmp_path):
    few = {"groups": (0, 30), "more_ranks": (), "trials": 1, "cycles": 2}
    assert conduct("release", **few, out=tmp_path / "rows.jsonl", device="cpu") == 0
    message = read_rows(tmp_path / "rows.jsonl")
    assert message["bench"] == "release"
    assert {row["ids"]["mechanism"] for row in message["rows"] if row["median"] is not None} == {GLOO}
    rows = {
        (row["ids"]["groups"], row["ids"]["what"], row["who"]): row["median"]
        for row in message["rows"]
        if "what" in row["ids"]
    }
    own, more = sorted({number for number, _, _ in rows})
    assert more == 30 > own
    for number in (own, more):
        for way in ("exact", "abort"):
            assert rows[number, "freed groups", way] == number
            assert rows[number, "left groups", way] == rows[number, "left threads", way] == 0
            assert rows[number, "freed sockets", way] > rows[number, "freed sockets", "manual"]
        assert rows[number, "left groups", "official"] > rows[number, "left groups", "manual"] > 0
    (why,) = {row["note"] for row in message["rows"] if row["who"] == "suspend" and row["median"] is None} or {""}
    assert not why or "it needs a GPU (NCCL)" in why
