"""`kit bench release`: rows from made-up samples, and a small run on real ranks."""

from __future__ import annotations

import json

import pytest

from kit.bench.release import Sizes, main, ways
from kit.bench.release.ways import WHAT, of, table
from kit.bench.rows import Row
from kit.errors import KitError

MIB = 2**20


def rank(release: float, *, freed: int, left: int, groups: int = 20) -> dict:
    """What one rank says of two cycles alike."""
    levels = {"groups": freed, "rss_anon": freed * MIB}
    one = {"seconds": {"release": release, "back": 0.01, "first collective": 0.002}, "freed": levels}
    return {"groups": groups, "cycles": [one, one], "left": {"groups": left, "rss_anon": left * MIB}}


def made() -> dict[tuple[str, str], Row]:
    seen = {
        (20, "exact"): [[rank(0.02, freed=20, left=0), rank(0.03, freed=19, left=1)]] * 2,
        (20, "manual"): [[rank(0.2, freed=17, left=9), rank(0.1, freed=17, left=9)]],
    }
    return {(one.who, one.what.partition(": ")[2]): one for one in of(20, 2, seen)}


def test_a_time_is_the_slowest_ranks_and_a_sample_is_a_cycle():
    one = made()["exact", "release"]
    assert (one.median, one.n, one.unit) == (pytest.approx(30), 4, "ms")
    assert made()["manual", "release + back"].median == pytest.approx(210)


def test_freed_is_the_least_and_left_the_most_of_any_rank():
    rows = made()
    assert [rows["exact", f"{word} groups"].median for word in ("freed", "left")] == [19, 1]
    assert [rows["exact", f"{word} host memory"].n for word in ("freed", "left")] == [4, 2]
    assert ("exact", "freed sockets") not in rows  # nobody counted them


def test_exact_is_held_against_what_is_in_common_use():
    exact = made()["exact", "release + back"]
    assert (exact.limit, exact.aim, exact.met) == (pytest.approx(210), 60, True)
    assert made()["manual", "release + back"].limit is None


def test_the_table_has_a_line_for_each_way_and_says_what_was_not_measured():
    rows = [*made().values(), Row(what="groups, 2 ranks", who="suspend", note="not measured: it needs a card")]
    said = table(rows).splitlines()
    assert said[0].split()[:4] == ["ranks", "groups", "way", "release"]
    assert said[1].split() == [
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
    assert "exact, 20 groups a rank, 2 ranks: release + back: 40 ms, at most 210: met" in said
    assert said[-1] == "suspend, groups, 2 ranks: not measured: it needs a card"


class Broken:
    """A World whose ranks die under one way of releasing, and which is interrupted after so many calls."""

    def __init__(self, *_: object, **__: object) -> None:
        self.calls = 0

    def __enter__(self) -> Broken:
        return self

    def __exit__(self, *_: object) -> None: ...

    def restart(self) -> None: ...

    def call(self, target: str, *, mode: str, **_: object) -> list:
        if target.endswith(":refused"):
            return ["it needs a card" if mode == "suspend" else ""]
        self.calls += 1
        if mode == "abort":
            raise KitError("rank 1 died\nof something")
        if self.calls == 6:
            raise KeyboardInterrupt
        return [rank(0.02, freed=20, left=0)]


def test_what_broke_is_said_and_what_was_measured_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(ways, "World", Broken)
    rows: list[Row] = []
    with pytest.raises(KeyboardInterrupt):
        ways.measure(rows, 2, (0,), tmp_path, trials=2, cycles=1)
    notes = {(one.who, one.what): one.note for one in rows if one.note}
    assert notes == {
        ("suspend", "groups, 2 ranks"): "not measured: it needs a card",
        ("abort", "own groups, 2 ranks"): "not measured: rank 1 died",
    }
    counted = {one.who: one.n for one in rows if one.what.endswith(": release")}
    assert counted == {"exact": 4, "manual": 2, "official": 2}


@pytest.mark.slow
def test_a_small_run_tells_the_ways_apart(capsys):
    few = Sizes(groups=(0, 30), more_ranks=(), trials=1, cycles=2)
    assert main(True, few) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["bench"] == "release"
    rows = {
        (int(found[1]), found[3], row["who"]): row["median"]
        for row in said["rows"]
        if (found := WHAT.fullmatch(row["what"]))
    }
    own, more = sorted({number for number, _, _ in rows})
    assert more == 30 > own
    for number in (own, more):
        for way in ("exact", "abort"):
            assert rows[number, "freed groups", way] == number
            assert rows[number, "left groups", way] == rows[number, "left threads", way] == 0
            assert rows[number, "freed sockets", way] > rows[number, "freed sockets", "manual"]
        assert rows[number, "left groups", "official"] > rows[number, "left groups", "manual"] > 0
    (why,) = {row["note"] for row in said["rows"] if row["who"] == "suspend" and row["median"] is None} or {""}
    assert not why or "it needs a card (NCCL)" in why
