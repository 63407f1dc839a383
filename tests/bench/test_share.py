"""The bench of time sharing: what it reads from a run's records, and the scheduler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from kit.labs.bench import Bench
from kit.labs.bench_share import parts as share
from kit.labs.bench_share.rules import RULES
from kit.labs.share import tables
from kit.results import Row
from kit.results.run import to_frame
from tests.labs.share.runs import make


def frame_of(*rows: dict[str, Any]) -> Any:
    head = {"run": "test", "lab": "share", "cycle": 3, "phase": "shared", "rank": 0, "unit": "s", "time": 1.0}
    return to_frame(Row(**{**head, **row}) for row in rows)


def test_a_switch_is_a_cycle_that_takes_from_one_and_gives_to_the_other(tmp_path: Path) -> None:
    frame = make(tmp_path, phases=("shared",), memory=False).frame()
    every = tables.switches(frame)
    found = share.switched(frame)["total"]
    across = [
        row["total"] for row in every.to_dict("records") if {row["shrinks"][:2], row["expands"][:2]} == {"a.", "b."}
    ]
    assert found == across
    assert 0 < len(found) < len(every)


def test_hashing_for_a_check_is_no_part_of_a_switch(tmp_path: Path) -> None:
    run = make(tmp_path, phases=("shared",), memory=False)
    plain = tables.switches(run.frame())
    one = plain[plain["expands"].str.startswith("b.") & (plain["weights"] > 0)].iloc[0]
    who = "b.replica " + one["expands"].rpartition(":")[2]
    start = tables.ends(tables.ledger(run.frame(), "shared"))[0] + one["at"] + one["total"] - one["weights"]
    ids = {"what": "check", "who": who}
    head = {"run": run.id, "lab": "share", "cycle": 3, "phase": "shared", "rank": 5, "unit": "s", "time": 1.0}
    spans = [
        Row(**head, metric="handing_over", value=seconds, start=start, ids=ids)
        for seconds in (one["weights"] / 2, one["weights"] / 4)  # two ranks of the replica, at the same time
    ]
    frame = pd.concat([run.frame(), to_frame(spans)], ignore_index=True)
    table = tables.switches(frame)
    assert table["check"].sum() == pytest.approx(one["weights"] / 2, abs=1e-5)
    before = share.switched(run.frame())["total"]
    assert sum(share.switched(frame)["total"]) == pytest.approx(sum(before) - one["weights"] / 2, abs=1e-5)


def test_parts_of_a_switch_are_those_of_cycles_that_move_one_replica(tmp_path: Path) -> None:
    frame = make(tmp_path, phases=("shared",), memory=False).frame()
    table = tables.switches(frame)
    found = share.of_parts(frame)
    assert 0 < len(found["shrink"]) <= (table["shrinks"] != "").sum()
    assert 0 < len(found["expand"]) == len(found["weights"]) <= (table["expands"] != "").sum()
    assert all(value > 0 for seconds in found.values() for value in seconds)


def test_owners_are_those_that_the_observer_counted() -> None:
    row = {"metric": "seen_samples", "value": 50, "unit": "1"}
    assert share.owners(frame_of({**row, "ids": {"two_owners": 3, "blind": 0}})) == (50, 3, False)
    assert share.owners(frame_of({**row, "ids": {"two_owners": 0, "blind": 1}})) == (50, 0, True)


def test_the_scheduler_has_a_row_for_each_size_and_question() -> None:
    bench = SimpleNamespace(config=SimpleNamespace(rounds=3, plans=1))
    rows = list(share.time_scheduler(cast("Bench", bench)))  # this part needs no ranks
    questions = ["bundle_moved", "plan_from_nothing", "large_plan"]
    assert [(row.ids["tp"], row.metric) for row in rows] == [(tp, name) for tp in (1, 8) for name in questions]
    assert all(row.median for row in rows)


def test_loops_are_compared_with_the_bound_of_their_own_run() -> None:
    loops = [
        share.Loops(shared={"home": 12.0, "gap-ratio": 13.0}, serial=20.0, static=15.0),
        share.Loops(shared={"home": 9.0, "gap-ratio": 14.0}, serial=16.0, static=10.0),
    ]
    rows = {row.what: row for row in share.compared("two", loops, [10.0, 10.0], "note")}
    assert rows["two, together (home), over the bound"].values == [1.2, 0.9]
    assert rows["two, together (gap-ratio), over the bound"].values == [1.3, 1.4]
    assert rows["two, together (home), over the bound"].metric == "shared_over_bound"
    assert rows["two, one after the other, over the bound"].values == [2.0, 1.6]
    fastest = rows["two, the bound over the fastest loop"]
    assert fastest.values == [10 / 12, 10 / 9]  # the second loop cannot be: it is faster than its bound
    rule = next(rule for rule in RULES if rule.name == fastest.metric)
    assert [rule.holds(value, 1.0) for value in fastest.values] == [True, False]


def test_all_device_time_is_in_one_share(tmp_path: Path) -> None:
    shares = share.device_shares(make(tmp_path, phases=("shared",), memory=False).frame())
    assert sum(shares.values()) == pytest.approx(1.0)
    assert [use for use in shares if use.startswith("idle")] == [f"idle, {cause}" for cause in tables.CAUSES]
    assert shares["work of owners"] > 0


def test_the_load_on_a_virtual_clock_has_every_row() -> None:
    bench = SimpleNamespace(config=SimpleNamespace(load_steps=1, seeds=2))
    rows = list(share.on_virtual_clock(cast("Bench", bench)))
    assert {row.metric for row in rows} == {"loop_over_bound", "bound_over_fastest", "virtual_over_serial"}
    assert all(any(f"({planner})" in row.what for row in rows) for planner in ("gap-ratio", "home"))
    assert all(len(row.values) == 2 for row in rows)
    assert all(value <= 1 for row in rows if row.metric == "bound_over_fastest" for value in row.values)
