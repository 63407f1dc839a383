"""Pipelines with adapters: their config and phases, and each check on the rows of a right run and on one wrong row. No ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kit.actors.adapters import adapter_of_group, steps_of_adapter
from kit.errors import BadInput
from kit.labs.definition import as_settings
from kit.labs.discover import find_fault
from kit.labs.share.adapters import ADAPTER_RULES
from kit.labs.share.drive import simulate_pipelines
from kit.labs.share.lab import LAB, plan, roles
from kit.labs.share.ranks.adapters import AdaptersTrainer
from kit.labs.share.ranks.roles import LeasedTrainer
from kit.labs.share.scenarios import SCENARIOS
from kit.megatron.config import GEOMETRIES
from kit.megatron.lora import initial_adapter
from kit.results import Row
from kit.results.rules import judge, settle
from kit.results.run import to_frame
from kit.share.judge.books import DeskLedger
from kit.share.judge.progress import progress_true
from kit.stream import core
from kit.stream.adapters import Reports, ReportsByAdapter
from kit.stream.generation import StreamState, StreamTurn
from kit.sync.buckets import automatic, lay_out, specs_of
from kit.target import replaced
from tests.labs.share.conftest import share
from tests.labs.simulated import failed, passed, why
from tests.share.chaos import rows_of, violations

CONFIG = share(scenario="C", adapters=2, steps=4, groups=2, group=2)
feed, finish, reports_by_adapter = core.feed, core.finish, ReportsByAdapter.reports
Facts = dict[str, Any]


def records() -> Iterator[Facts]:
    loop = CONFIG.loops["a"]
    for version in range(loop.steps + 1):
        for where in ("trainer", "replica 0", "replica 1"):
            yield row("base_digest", text="base", version=version, where=where)
            for adapter in range(2):
                text = f"{adapter} at {steps_of_adapter(version, adapter, 2)}"
                yield row("adapter_digest", text=text, adapter=adapter, version=version, where=where)
    for group in range(loop.steps * loop.groups):
        for sample in range(loop.group):
            ids = {"group": group, "sample": sample, "adapter": adapter_of_group(loop, group)}
            yield row("trained_row", **ids)
            yield row("own_adapter_error", "verify", 1e-7, **ids)
            yield row("other_adapter_gap", "verify", 0.1, **ids)
    for step in range(loop.steps):
        yield row("apart_from_alone", "verify", 0.0, step=step, adapter=step % 2)
    for replica in range(2):
        yield row("adapter_bytes_asleep", value=0.0, replica=replica)
    yield from in_ledger(*loop_rows())
    yield row("fds", "end", 5.0)


@functools.cache
def loop_rows() -> tuple[Row, ...]:
    return (*simulate_pipelines(CONFIG).rows,)


def in_ledger(*rows: Row) -> Iterator[Facts]:
    for written in rows:
        yield {"metric": written.metric, "phase": "shared", "ids": {**written.ids}, "rank": -1}


def row(metric: str, phase: str = "shared", value: float | None = None, text: str = "", **ids: Any) -> Facts:
    return {"metric": metric, "phase": phase, "value": value, "text": text, "ids": {**ids, "pipeline": "a"}}


def verdict_of(rows: list[Facts]) -> Any:
    made = (Row(**{"run": "test", "lab": "share", "cycle": 3, "rank": 0, "time": 1.0, **facts}) for facts in rows)
    return judge(to_frame(made), as_settings(CONFIG), ADAPTER_RULES)


NAMES = {rule.name for rule in ADAPTER_RULES}
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("adapters_apart", "trained_row", {"adapter": 1}),
    ("adapters_apart", "own_adapter_error", {"value": 0.1}),
    ("base_unchanged", "base_digest", {"text": "another"}),
    ("adapter_numbers", "apart_from_alone", {"value": 3.0}),
    ("trained_changed", "adapter_digest", {"text": "another"}),
    ("adapters_unloaded", "adapter_bytes_asleep", {"value": 4096.0}),
    ("turns_fair", "selected", {"pipeline": "another"}),
]


def test_a_right_run_passes() -> None:
    verdict = verdict_of([*records()])
    assert failed(verdict) == set()
    assert all(passed(verdict, name) for name in NAMES)


@pytest.mark.parametrize(("check", "metric", "change"), WRONG)
@pytest.mark.parametrize("place", [0, -1])
def test_a_wrong_row_fails_its_check(check: str, metric: str, change: dict[str, Any], place: int) -> None:
    rows = copy.deepcopy([*records()])
    changed = [facts for facts in rows if facts["metric"] == metric][place]
    for name, value in change.items():
        of_row = changed if name in changed else changed["ids"]
        of_row[name] = 1 - of_row[name] if name == "adapter" else value
    assert check in failed(verdict_of(rows))


def test_a_step_waits_for_no_group_of_another_adapter_and_takes_none() -> None:
    """The first step, of groups 0 and 1, waits for group 2; or it takes group 2 in place of group 1."""
    rows = [*records()]
    place = {(facts["metric"], facts["ids"].get("group")): at for at, facts in enumerate(rows)}
    late = [*rows]
    late.insert(place["selected", 0], late.pop(place["ready", 2]))
    assert "adapter 0 of a waits, although its 2 groups are complete" in why(verdict_of(late), "turns_fair")
    assert failed(verdict_of(late)) == {"turns_fair"}
    taken = copy.deepcopy(rows)
    taken[place["selected", 1]]["ids"]["group"] = 2
    assert "taken in the turn of adapter 0 of a" in why(verdict_of(taken), "turns_fair")


def lacks_the_next(t: StreamTurn) -> bool:
    """Whether the next adapter, if there is one, lacks groups."""
    complete = sum(group.order >= 0 for group in t.buffer.values())
    return t.version + 1 < t.last and complete < t.settings.groups


def feeds_late(t: StreamTurn) -> None:
    if not lacks_the_next(t):
        feed(t)


def begins_late(t: StreamTurn) -> None:
    if "training" not in t.granted or not lacks_the_next(t):
        feed(t)


def finishes_late(t: StreamTurn) -> None:
    if not lacks_the_next(t):
        finish(t)


@pytest.mark.parametrize(
    ("place", "wrong"), [("feed", "feeds_late"), ("feed", "begins_late"), ("finish", "finishes_late")]
)
def test_an_adapter_whose_groups_are_taken_trains_at_once(place: str, wrong: str) -> None:
    """Each takes its groups in time, and then waits for those of the next."""
    with replaced({f"kit.stream.core:{place}": f"{__name__}:{wrong}"}):
        done = simulate_pipelines(CONFIG)
    assert {name: end.why for name, end in done.ended.items()} == dict.fromkeys(("a", "desk"), "done")
    assert "waits for nothing" in why(verdict_of([*in_ledger(*done.rows)]), "turns_fair")


@pytest.mark.parametrize(
    ("call", "given_up"),
    [("generate", False), ("metrics", False), ("sync", False), ("progress", False), ("finish", True)],
)
def test_only_an_error_of_the_trainer_gives_a_step_up(call: str, given_up: bool) -> None:
    with replaced({"kit.stream.core:feed": f"{__name__}:feeds_late"}):
        rows = [*in_ledger(*simulate_pipelines(CONFIG).rows)]
    error = {**row("error", of=call), "rank": -1}
    with_errors = [
        facts for written in rows for facts in ([written, error] if written["metric"] == "selected" else [written])
    ]
    assert ("waits for nothing" in why(verdict_of(with_errors), "turns_fair")) is not given_up


@pytest.mark.parametrize("rule", ADAPTER_RULES, ids=lambda rule: rule.name)
def test_missing_rows_fail_a_complete_run(rule: Any) -> None:
    metrics = {metric for check, metric, _ in WRONG if check == rule.name}
    assert metrics
    for metric in metrics:
        rows = [facts for facts in records() if facts["metric"] != metric]
        assert rule.name in failed(verdict_of(rows))


@pytest.mark.parametrize("config", [{}, {"pipelines": ["a", "b"]}, {"loops": 3, "model": {"layers": 2}}])
def test_the_config_of_another_system_has_no_adapters(config: dict[str, Any]) -> None:
    assert not any(rule.when(config) for rule in ADAPTER_RULES)


def test_an_aborted_step_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step may be tried again with other groups."""
    monkeypatch.setattr(LeasedTrainer, "begin", lambda *_: None)
    trainer = object.__new__(AdaptersTrainer)
    trainer.actor = types.SimpleNamespace(version=1)  # type: ignore[assignment]
    trainer.forget()
    for version in (0, 1):
        trainer.rows[version][0, 0] = None  # type: ignore[assignment]
    trainer.begin(1, 0)
    assert [version for version, rows in trainer.rows.items() if rows] == [0]


def test_samples_that_no_adapter_stands_out_in_prove_nothing() -> None:
    rows = [facts | ({"value": 1e-6} if facts["metric"] == "other_adapter_gap" else {}) for facts in records()]
    assert "no sample distinguishes an adapter from the others" in why(verdict_of(rows), "adapters_apart")


def test_a_step_that_trains_nothing_or_two_adapters_is_named() -> None:
    rows = copy.deepcopy([*records()])
    for facts in rows:
        if facts["metric"] == "adapter_digest" and facts["ids"]["version"] == 1 and facts["ids"]["adapter"] == 1:
            facts["text"] = "1 at 1"
    assert "step 0 of a changed adapter 1" in why(verdict_of(rows), "trained_changed")


def test_scenarios_with_adapters() -> None:
    one, two = share(scenario="C").loops, share(scenario="D").loops
    assert {name: loop.adapters for name, loop in one.items()} == {"a": 4}
    assert {name: loop.adapters for name, loop in two.items()} == {"a": 0, "b": 4}
    assert (two["a"].window, two["b"].window, two["b"].sampler) == (0, 3, "in-order")
    phases = {role.name: role.phases for role in roles(share(scenario="D"))}
    assert phases["a trainer"].endswith("roles:LeasedTrainer")
    assert phases["b trainer"].endswith("adapters:AdaptersTrainer")
    assert [step.roles for step in plan(share(scenario="D")) if step.phase == "verify"] == [("b trainer",)]
    assert "verify" not in {step.phase for step in plan(share())}


def test_a_window_that_adapters_cannot_have_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"a\.window=1 is not allowed with a\.adapters=4: each adapter trains on samples of its"
    ):
        share(**{"a.adapters": 4, "a.window": 1})


def test_only_a_single_adapter_can_be_merged() -> None:
    with pytest.raises(
        BadInput, match=r"a\.lora_merged=true needs a\.adapters=1, because a merged base serves one adapter"
    ):
        share(scenario="C", lora_merged=True)
    assert share(scenario="A", adapters=1, lora_merged=True).loops["a"].window == 0


def test_groups_belong_to_adapters_in_turn() -> None:
    loop = CONFIG.loops["a"]
    assert [adapter_of_group(loop, group) for group in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [steps_of_adapter(version, 1, 2) for version in range(6)] == [0, 0, 1, 1, 2, 2]


def test_a_simulated_run_with_adapters_ends() -> None:
    done = simulate_pipelines(share(scenario="D", steps=4, simulated=True))
    assert {name: end.why for name, end in done.ended.items()} == dict.fromkeys(("a", "b", "desk"), "done")


def test_each_adapter_reports_its_own_next_step() -> None:
    """Of two adapters with two steps each: what they lack is summed, and a stream ends with its adapter's last step."""
    reports: dict[str, list[int | str]] = {"adapter 0": [], "adapter 1": []}
    for written in loop_rows():
        if "stream" in written.ids and written.get("to") == "desk":
            reports[written["stream"]].append(written.get("completed", "ends"))
    assert [*reports.values()] == [[0, 1, 2, 0, 1, 2, "ends"]] * 2
    assert DeskLedger(loop_rows()).of("plan")[0]["demand"] == "a:4"  # two groups of each


def test_an_adapter_that_reports_more_than_there_is_fails() -> None:
    rows = [*loop_rows()]
    at = next(
        at for at, row in enumerate(rows) if (row.event, row.get("completed"), row.get("to")) == ("progress", 1, None)
    )
    wrong = dataclasses.replace(rows[at], ids={**rows[at].ids, "completed": 9})
    assert settle(progress_true(DeskLedger(rows))).value == 0
    assert (
        "reports 9 complete groups; there are"
        in settle(progress_true(DeskLedger([*rows[:at], wrong, *rows[at + 1 :]]))).why
    )


def reports_groups_of_all(core_of_it: ReportsByAdapter, state: StreamState) -> Reports:
    reports = reports_by_adapter(core_of_it, state)
    complete = sum(completed for completed, _ in reports.values())
    return {adapter: (min(complete, target), target) for adapter, (_, target) in reports.items()}


def test_an_adapter_that_reports_the_groups_of_another_fails() -> None:
    with replaced({"kit.stream.adapters:ReportsByAdapter.reports": f"{__name__}:reports_groups_of_all"}):
        rows = simulate_pipelines(CONFIG).rows
    assert "reports 1 complete groups; there are 0" in settle(progress_true(DeskLedger(rows))).why


@pytest.mark.parametrize("name", ["over-reports", "complete-at-once"])
def test_a_fault_of_reports_shows_with_adapters_too(name: str) -> None:
    fault = find_fault(LAB, name)
    assert fault is not None
    assert not fault.needs
    with replaced(fault.patch):
        rows = simulate_pipelines(CONFIG).rows
    assert settle(progress_true(DeskLedger(rows))).value


def test_the_excess_of_an_adapter_that_counts_for_another_is_seen() -> None:
    with replaced({"kit.share.core:HANDLERS": "kit.labs.share.bugs:PROGRESS_IS_UNCLAMPED"}):
        rows = rows_of(SCENARIOS["by adapter"].run().rows)
    assert "according to the reports it is {'a': 3}" in violations(rows)["progress_ended"]


def test_a_report_that_the_desk_refuses_counts_nowhere() -> None:
    scene = SCENARIOS["by adapter"]
    mixed = 250, "progress", {"completed": 0, "target": 50}
    own = (*scene.lines["a"][:3], mixed, *scene.lines["a"][3:])
    rows = rows_of(dataclasses.replace(scene, lines={**scene.lines, "a": own}).run().rows)
    refused = "a reports progress of adapter 0 and cannot report training too"
    assert next(row["why"] for row in rows if row["event"] == "error").startswith(refused)
    assert violations(rows) == {}


def test_an_own_side_of_the_desk_reports_for_the_whole_pipeline() -> None:
    done = simulate_pipelines(share(scenario="D", steps=4, simulated=True, pipeline="tests.labs.share.test_own:Right"))
    assert {name: end.why for name, end in done.ended.items()} == dict.fromkeys(("a", "b", "desk"), "done")
    assert not [row for row in done.rows if row.event == "error"]


def test_an_adapter_is_sent_in_hardly_more_than_its_own_bytes() -> None:
    specs = specs_of(
        {(name, 0): value for name, value in initial_adapter(GEOMETRIES["125m"], CONFIG.loops["a"].lora, 1).items()}
    )
    own = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)
    assert own <= lay_out(specs, automatic(specs)).total <= 1.2 * own
