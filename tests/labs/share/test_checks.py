"""Each check of what ranks recorded and observers saw: it passes on a right run, and fails once one row is wrong or missing."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kit.labs.definition import as_settings
from kit.labs.share.adapters import ADAPTER_RULES
from kit.labs.share.lab import LAB
from kit.labs.share.rules import RULES
from kit.results import Row
from kit.results.records import NOTEBOOK
from kit.results.rules import applicable, judge
from kit.results.run import to_frame
from tests.labs.parts import failed, passed, unanswered, why
from tests.labs.share.conftest import share
from tests.labs.share.evidence import CONFIG, MIB, Facts, fact, records, verdict_of

OF_RANKS = {
    "same_numbers",
    "weights_after_wake",
    "peak_fits",
    "memory_down_asleep",
    "groups_down_asleep",
    "others_untouched",
    "namespaces_apart",
    "nothing_left",
}
Change = Callable[[list[Facts]], object]


def matching(rows: list[Facts], metric: str, phase: str = "shared", **wanted: Any) -> list[Facts]:
    """Rows of a metric with these ids, and with this `text`, `rank` or `value`."""

    def value(row: Facts, name: str) -> Any:
        return row.get(name) if name in ("text", "rank", "value") else row.get("ids", {}).get(name)

    return [
        row
        for row in rows
        if (row["metric"], row["phase"]) == (metric, phase)
        and all(value(row, name) == one for name, one in wanted.items())
    ]


def edit(metric: str, changes: dict[str, Any], *, phase: str = "shared", at: int = 0, **wanted: Any) -> Change:
    """Return an edit that changes one row: its own keys, or ids."""

    def change(rows: list[Facts]) -> None:
        row = matching(rows, metric, phase, **wanted)[at]
        for name, value in changes.items():
            if name in ("value", "text", "rank", "time"):
                row[name] = value
            else:
                row["ids"] = {**row["ids"], name: value}

    return change


def drop(metric: str, *, phase: str = "shared", only: int | None = None, **wanted: Any) -> Change:
    """Return an edit that drops all matching rows, or one of them."""

    def change(rows: list[Facts]) -> None:
        found = matching(rows, metric, phase, **wanted)
        gone = {id(row) for row in (found if only is None else [found[only]])}
        rows[:] = [row for row in rows if id(row) not in gone]

    return change


def add_behind(
    metric: str, new: str, ids: dict[str, Any], *, phase: str = "shared", at: int = 0, **wanted: Any
) -> Change:
    """Return an edit that inserts a row with these ids right after a ledger row."""

    def change(rows: list[Facts]) -> None:
        row = matching(rows, metric, phase, **wanted)[at]
        more = {**fact(new, row["time"], ids=ids), "phase": phase, "rank": NOTEBOOK}
        rows.insert(next(place for place, one in enumerate(rows) if one is row) + 1, more)

    return change


def resident(owner: str, metric: str, at: int, mib: float, **wanted: Any) -> Change:
    """Return an edit: an observer sees `mib` MiB of a rank just after a row."""

    def change(rows: list[Facts]) -> None:
        when = matching(rows, metric, **wanted)[at]["time"] + 1e-6
        more = fact("seen_resident", when, value=mib * MIB, unit="B", ids={"who": owner})
        rows.append({**more, "phase": "shared", "rank": NOTEBOOK})

    return change


BOTH = "a.trainer b.replica 0"
SLEPT = {"pipeline": "b", "replica": 0}
STARTED = {"group": 0, "sample": 0, "version": 0, "core": "b", "pipeline": "b", "replica": 0}
SENT = {"group": 0, "sample": 0, "attempt": 3, "pipeline": "b", "replica": 0}


def without_a_version(rows: list[Facts]) -> None:
    for phase in ("alone_a", "shared"):
        drop("digest", phase=phase, only=1, pipeline="a")(rows)


OF_A_SLEEPER = resident("b.replica 1", "left", 0, 330, pipeline="a")
WRONG: list[tuple[str, str, Change]] = [
    ("one_owner", "a lock with two holders", edit("seen_owner", {"value": 2.0, "text": BOTH}, device=0, text="a.trainer")),
    ("one_owner", "a lease that was not given back", drop("lease", only=0, event="freed", device=0)),
    ("one_owner", "leases that no observer saw", drop("seen_owner", text="a.replica 1")),
    ("one_owner", "a replica without a lease", drop("lease", text="b.replica 1")),
    ("one_owner", "a run without leases", drop("lease")),
    ("one_owner", "a run without observers", drop("seen_samples")),
    ("drained_before_sleep", "requests in flight", edit("in_flight", {"value": 2.0})),
    ("drained_before_sleep", "a sleep that was not counted", drop("in_flight", only=0)),
    ("drained_before_sleep", "a sleeper that generates", add_behind("shrunk", "started", STARTED, who="b", replica=0)),
    ("weights_after_wake", "other weights", edit("served", {"text": "other"}, version=1)),
    ("weights_after_wake", "weights that nobody hashed", drop("served", only=0, version=0)),
    ("weights_after_wake", "a version that the trainer did not hash", drop("digest", version=1, pipeline="b")),
    ("version_after_wake", "an older version", edit("published", {"version": 0}, version=1)),
    ("version_after_wake", "tokens of another version", edit("tokens", {"version": 0}, version=1)),
    ("version_after_wake", "a replica without weights", drop("published", only=0, pipeline="a", replica=0)),
    ("version_after_wake", "a sync of a version that is not due", edit("sync", {"version": 0}, version=1)),
    ("same_numbers", "another loss", edit("global_loss", {"value": 1 / 3 + 1e-16 * 2}, pipeline="b", step=0)),
    ("same_numbers", "a loss that is missing", drop("grad_norm", only=0, pipeline="a")),
    ("same_numbers", "a version that is missing in both", without_a_version),
    ("same_numbers", "other tokens", edit("tokens_digest", {"text": "other"}, phase="alone_b")),
    ("peak_fits", "a rank that is awake beside another", resident("b.replica 0", "seen_resident", 1, 340, who="a.replica 0")),
    ("memory_down_asleep", "weights that stay", edit("seen_resident", {"value": 325.0 * MIB}, at=2, who="a.replica 0")),
    ("groups_down_asleep", "groups that stay", edit("groups_asleep", {"value": 3.0}, who="b.trainer")),
    ("groups_down_asleep", "a trainer that counted them once", drop("groups_asleep", only=0, who="b.trainer")),
    ("others_untouched", "a group more", edit("groups", {"value": 6.0}, rank=4)),
    ("others_untouched", "memory of a sleeper", OF_A_SLEEPER),
    ("namespaces_apart", "the same samples", edit("tokens_digest", {"text": "a 0 0"}, pipeline="b", group=0, sample=0)),
    ("namespaces_apart", "the same weights", edit("digest", {"text": "a 0"}, pipeline="b", version=0)),
    ("nothing_left", "a descriptor more", edit("fds", {"value": 6.0}, phase="end", rank=3)),
    ("nothing_left", "a temporary file more", edit("temp_files", {"value": 6.0}, phase="end", rank=3)),
    ("empty_set_suspends", "a request to nobody", add_behind("shrunk", "sent", SENT, at=-1, who="b")),
    ("empty_set_suspends", "a request that is counted for ever", drop("completed", only=-1, pipeline="a")),
    ("no_deadlock", "a desk that does not end", drop("ended", pipeline="desk")),
    ("no_deadlock", "an error of a pipeline that lives", edit("ended", {"why": "error", "error": "stuck"}, pipeline="b")),
    ("dead_pipeline_leaves", "a death that nobody handles", drop("gone", phase="rehearse", pipeline="a")),
    ("dead_pipeline_leaves", "devices that are not idle", edit("gone", {"idle": ""}, phase="rehearse", pipeline="a")),
    ("dead_pipeline_leaves", "a survivor with other numbers", edit("grad_norm", {"value": 0.5}, phase="rehearse")),
]  # fmt: skip


def test_the_desk_may_shrink_a_replica_of_which_only_its_pipeline_knows_that_it_died(right: list[Facts]) -> None:
    plan = next(row for row in matching(right, "plan") if "b.generation:0" in row["ids"]["shrinks"])
    place = next(at for at, row in enumerate(right) if row is plan)
    died = fact("died", plan["time"], ids={"replica": 0, "pipeline": "b", "core": "b"})
    rows = [*right[:place], {**died, "phase": "shared", "rank": NOTEBOOK}, *right[place:]]
    found = failed(verdict_of(rows))
    assert not found & {"devices_conserved", "plan_valid", "plan_as_specified", "planned_release_once"}


def test_a_wake_between_two_looks_is_no_weights_that_stay(right: list[Facts]) -> None:
    """The observer saw neither the weights nor their release."""
    first = min(row["time"] for row in matching(right, "lease", text="a.replica 0", event="taken"))
    rows = [*right]
    for when, event in ((first - 0.06, "taken"), (first - 0.03, "freed")):
        ids = {"device": 0, "event": event, "pipeline": "a"}
        rows.append({**fact("lease", when, text="a.replica 0", ids=ids), "phase": "shared", "rank": 1})
    assert "memory_down_asleep" not in failed(verdict_of(rows))


def test_a_wake_while_memory_is_read_is_in_its_own_right(right: list[Facts]) -> None:
    """A busy machine may stop an observer in the middle of a look; what it reads then belongs to a later time."""
    rows = copy.deepcopy(right)
    leases = matching(rows, "lease", device=0)
    freed, taken = next(
        pair for pair in itertools.pairwise(leases) if [one["text"] for one in pair] == ["a.trainer", "a.replica 0"]
    )
    reading = next(row for row in matching(rows, "seen_resident", who="a.replica 0") if row["time"] >= taken["time"])
    reading |= {"start": freed["time"] - 0.02, "time": taken["time"] + 0.02}
    assert failed(verdict_of(rows)) == set()
    reading |= {"start": freed["time"] - 0.02, "time": freed["time"] - 0.01}
    assert failed(verdict_of(rows)) == {"peak_fits"}


@pytest.mark.parametrize(("woke", "expected"), [("same", set()), ("other", {"weights_after_wake"})])
def test_weights_in_host_memory_come_back_as_they_were(right: list[Facts], woke: str, expected: set[str]) -> None:
    rows = copy.deepcopy(right)
    for when, text in (("sleeps", "same"), ("wakes", woke), ("sleeps", "next"), ("wakes", "next")):
        ids = {"pipeline": "a", "replica": 0, "when": when}
        rows.append({**fact("kept", 1.0, text=text, ids=ids), "phase": "shared", "rank": 1})
    assert failed(verdict_of(rows)) == expected


@pytest.mark.parametrize("lacks", ["", "sleeps", "wakes"])
def test_weights_in_host_memory_are_compared_at_every_wake(right: list[Facts], lacks: str) -> None:
    kept: list[Facts] = []
    for woken in matching(right, "expanded", phase="shared"):
        for when in {"sleeps", "wakes"} - {lacks}:
            ids = {"pipeline": woken["ids"]["who"], "replica": woken["ids"]["replica"], "when": when}
            kept.append({**fact("kept", woken["time"], text="same", ids=ids), "phase": "shared", "rank": 1})
    kept.sort(key=lambda row: str(row["ids"]["when"]))
    config = dataclasses.replace(CONFIG, sleep_level=1)
    assert failed(verdict_of([*right, *kept], config)) == ({"weights_after_wake"} if lacks else set())


@pytest.mark.parametrize("check", ["one_owner", "memory_down_asleep"])
def test_what_an_observer_could_not_see_is_not_judged(right: list[Facts], check: str) -> None:
    rows = copy.deepcopy(right)
    changes = {
        "one_owner": drop("seen_owner", text="a.replica 1"),
        "memory_down_asleep": edit("seen_resident", {"value": 325.0 * MIB}, at=2, who="a.replica 0"),
    }
    changes[check](rows)
    assert check in failed(verdict_of(rows))
    leases = [row["time"] for row in matching(rows, "lease")]
    slept = [row["time"] for row in matching(rows, "seen_resident", who="a.replica 0")][2:4]
    start, end = {"one_owner": (leases[0], leases[-1]), "memory_down_asleep": slept}[check]
    gap = fact("seen_gap", end, value=end - start, unit="s", start=start)
    rows.append({**gap, "phase": "shared", "rank": NOTEBOOK})
    assert check not in failed(verdict_of(rows))


def of_cores(rows: list[Facts], held_on: str, but: str = "") -> list[Facts]:
    """What an observer sees of the cores of ranks: those without a device may use both, and those with one `held_on`, but for one."""
    looks = [
        fact("seen_cores", row["time"], text=cores, ids={"who": row["text"]})
        for row in matching(rows, "lease")
        for cores in [held_on if row["ids"]["event"] == "taken" and row["text"] != but else "0,1"]
    ]
    return [*rows, *({**look, "phase": "shared", "rank": NOTEBOOK} for look in looks)]


def test_a_rank_with_a_device_keeps_to_one_core(right: list[Facts]) -> None:
    assert failed(verdict_of(of_cores(right, "1"))) == set()
    verdict = verdict_of(of_cores(right, "1", but="a.trainer"))
    assert failed(verdict) == {"one_owner"}
    assert "a.trainer held device 0 and was only seen on the cores 0,1" in why(verdict, "one_owner")
    late = [
        row | {"time": 1e12} if row["metric"] == "seen_cores" and row["ids"]["who"] == "a.trainer" else row
        for row in of_cores(right, "1")
    ]
    assert failed(verdict_of(late)) == set()  # nobody saw it while it held its device
    assert failed(verdict_of(of_cores(right, "0,1"))) == set()  # a container that lets no rank choose


@pytest.fixture(scope="module")
def right() -> list[Facts]:
    return records()


def test_a_right_run_passes_every_check(right: list[Facts]) -> None:
    verdict = verdict_of(right)
    assert failed(verdict) == set()
    has_none = {"gate_shown", "no_world_fails", "dead_replaced", *(rule.name for rule in ADAPTER_RULES)}
    assert unanswered(verdict) == has_none  # what this config does not have


def test_on_ranks_every_check_that_is_asked_can_be_measured(right: list[Facts]) -> None:
    """So `--strict` can pass: with large weights and `release_groups`."""
    nulls = unanswered(verdict_of(right))
    asked = [rule.name for rule in applicable(LAB.all_rules(), as_settings(CONFIG))]
    assert nulls.isdisjoint(asked)
    assert {"nothing_piles_up", "nothing_left"} <= {*asked}
    simulated = [rule.name for rule in applicable(LAB.all_rules(), {**as_settings(CONFIG), "simulated": True})]
    assert "dead_replaced" in simulated
    assert "nothing_piles_up" not in simulated  # no rank does anything


@pytest.mark.drawn(8, of="wrong rows")
@pytest.mark.parametrize(("check", "what", "change"), WRONG, ids=[f"{check}-{what}" for check, what, _ in WRONG])
def test_a_wrong_row_fails_its_check(right: list[Facts], check: str, what: str, change: Change) -> None:
    rows = copy.deepcopy(right)
    change(rows)
    assert rows != right, what
    assert check in failed(verdict_of(rows))


def test_every_check_of_ranks_has_a_wrong_row() -> None:
    assert {check for check, _, _ in WRONG} >= OF_RANKS
    assert {rule.name for rule in RULES} >= {check for check, _, _ in WRONG}


@pytest.mark.parametrize(
    ("check", "change", "words"),
    [
        ("others_untouched", edit("groups", {"value": 6.0}, rank=4), "b replica 0 (rank 4) has 6 process groups after the phase shared"),
        ("groups_down_asleep", drop("groups_asleep", only=0, who="b.trainer"), "b trainer (rank 3) left its device"),
        ("nothing_left", edit("fds", {"value": 6.0}, phase="end", rank=3), "b trainer (rank 3)"),
    ],
)  # fmt: skip
def test_ranks_are_called_by_pipeline_and_role(right: list[Facts], check: str, change: Change, words: str) -> None:
    rows = copy.deepcopy(right)
    change(rows)
    assert words in why(verdict_of(rows), check)


def test_a_rank_where_something_piles_up_is_called_by_pipeline_and_role() -> None:
    rows = [
        Row(**fact("fds", 1.0, value=count), run="test", lab="share", phase="shared", cycle=cycle, rank=3)
        for cycle, count in enumerate((5.0, 5.0, 7.0), 1)
    ]
    asked = [rule for rule in LAB.all_rules() if rule.name == "nothing_piles_up"]
    answers = judge(to_frame(rows), as_settings(CONFIG), asked)
    assert [row.why for row in answers] == ["fds: 5 after cycle 2, 7 after cycle 3 (+2; b trainer (rank 3), cycle 3)"]


def test_the_first_number_that_departs_is_named(right: list[Facts]) -> None:
    rows = copy.deepcopy(right)
    for phase, step in (("shared", 1), ("shared", 0)):
        edit("grad_norm", {"value": 2.0}, phase=phase, pipeline="b", step=step)(rows)
    found = why(verdict_of(rows), "same_numbers")
    assert found.startswith(
        "pipeline b, grad_norm of step=0 update=0: 2.0 in the phase shared, 0.14285714285714285 alone"
    )
    assert found.endswith("1 more")


def test_a_dead_owner_that_observers_still_see(right: list[Facts]) -> None:
    rows = copy.deepcopy(right)
    gone = matching(rows, "gone", "rehearse", pipeline="a")[0]["time"]
    seen = fact("seen_owner", gone + 0.5, value=1.0, unit="1", text="a.replica 0", ids={"device": 0})
    rows.append({**seen, "phase": "rehearse", "rank": NOTEBOOK})
    assert (
        why(verdict_of(rows), "dead_pipeline_leaves")
        == "rehearse: a.replica 0 still holds device 0 after the desk removed a"
    )


def test_small_weights_are_not_judged_by_resident_memory(right: list[Facts]) -> None:
    rows = [row for row in right if row["metric"] != "seen_resident"]
    rows += [
        {**row, "value": 300 * MIB + (row["value"] - 300 * MIB) / 100}
        for row in right
        if row["metric"] == "seen_resident"
    ]
    verdict = verdict_of(rows, dataclasses.replace(CONFIG, layers=4))
    for check in ("peak_fits", "memory_down_asleep"):
        assert passed(verdict, check) is None
        assert "too small to distinguish from noise" in why(verdict, check)


def test_a_broken_run_is_judged_as_far_as_it_goes(right: list[Facts]) -> None:
    """Without the phase `end`, missing records are not blamed on the code under test."""
    rows = [row for row in right if row["phase"] not in ("end", "rehearse") and row["metric"] != "served"]
    verdict = verdict_of(rows)
    assert passed(verdict, "weights_after_wake") is None
    assert passed(verdict, "same_numbers") is True


def test_a_window_leaves_the_numbers_open(right: list[Facts]) -> None:
    verdict = verdict_of(right, share(layers=200, steps=2, release_groups=True, window=1))
    assert passed(verdict, "same_numbers") is None
    assert "use window=0" in why(verdict, "same_numbers")


def on_gpus(rows: list[Facts], *, listed: bool, host: float = 300 * MIB) -> list[Facts]:
    """The records of the same run on GPUs: driver numbers if the driver lists the ranks, and those of each rank's allocator. The host's
    memory, which does not change, is recorded too, as a kit that confuses the two would do."""
    made = []
    for row in rows:
        if row["metric"] != "seen_resident":
            made.append(row)
            continue
        made += [{**row, "metric": "reserved", "value": row["value"] - 300 * MIB}, {**row, "value": host}]
        made += [{**row, "metric": "seen_on_gpus"}] if listed else []
    return made


@pytest.mark.parametrize("listed", [True, False])
def test_on_gpus_memory_is_what_the_driver_or_the_allocator_reports(right: list[Facts], *, listed: bool) -> None:
    calm = verdict_of(on_gpus(right, listed=listed))
    assert failed(calm) == set()
    assert passed(calm, "peak_fits") is passed(calm, "memory_down_asleep") is True
    assert passed(calm, "others_untouched") is (True if listed else None)
    for check, _, change in WRONG:
        if check in ("peak_fits", "memory_down_asleep") or (listed and change is OF_A_SLEEPER):
            rows = copy.deepcopy(right)
            change(rows)
            assert check in failed(verdict_of(on_gpus(rows, listed=listed)))


def test_without_a_replica_that_moved_nothing_is_said_of_the_others(right: list[Facts]) -> None:
    still = [row for row in right if row["metric"] not in ("left", "shrunk", "expand", "expanded", "joined")]
    assert passed(verdict_of(still), "others_untouched") is None


def test_another_process_under_a_ranks_number_is_not_its_memory(right: list[Facts]) -> None:
    """A container's driver lists the host's pids: one of them may be a rank's here, with too little memory for it."""
    rows = on_gpus(right, listed=True)
    strange = [{**row, "value": MIB} if row["metric"] == "seen_on_gpus" else row for row in rows]
    assert passed(verdict_of(strange), "peak_fits") is True
    assert "does not list" in why(verdict_of(strange), "others_untouched")
    some = [row for row in rows if row["metric"] != "seen_on_gpus" or row["ids"]["who"] != "a.trainer"]
    assert passed(verdict_of(some), "others_untouched") is None
