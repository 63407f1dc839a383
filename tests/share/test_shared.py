"""Two stream pipelines and the desk in one runner, on a virtual clock: both end, and each computes the same as alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.errors import BadInput
from kit.labs.definition import Fault
from kit.labs.share.faults import OF_THE_DESK
from kit.labs.share.ledgers import settled
from kit.labs.share.scenarios import SCENARIOS, Scenario, generates, trains
from kit.loop.messages import Event
from kit.loop.runner import Runner
from kit.results import Row
from kit.results.records import numbers
from kit.results.rules import Missing, NotMeasured, settle
from kit.share.judge import RULES
from kit.share.judge.books import Books, DeskLedger
from kit.share.judge.devices import one_owner, released_early, shrink_before_expand
from kit.share.judge.ends import dead_replaced
from kit.share.judge.pipelines import pipeline_rows
from kit.share.judge.plans import plan_valid
from kit.share.judge.requests import priority_kept
from kit.share.judge.stuck import circle, waits_of
from kit.share.planner import View, fifo
from kit.share.simulated import DeskSimulation
from kit.share.state import Cluster
from kit.stream import judge as stream_judge
from kit.stream.judge.history import LoopLedger
from kit.stream.settings import opening
from kit.stream.simulated import Durations, drawn_length
from kit.target import replaced
from tests.loop.replaying import replay_rows
from tests.share.chaos import rows_of, violations
from tests.share.pair import STRICT, A, B, outcome, shared

# Those that rules of a ledger alone see.
SCRIPTED = [fault for fault in OF_THE_DESK if fault.scene and fault.caught_by != "devices_used"]
BOTH = {"a": A, "b": B}
WIDE = {
    "a": {"trainer": Cluster((0, 1)), "generation": Cluster((0, 1, 2, 3))},
    "b": {"trainer": Cluster((2, 3)), "generation": Cluster((0, 1, 2, 3), 2)},
}
KINDS: list[dict[str, Any]] = [
    {},
    {"stream": replace(STRICT, previous="recomputed")},  # log-probabilities, then training, in one operation
    {"durations": Durations(train_s=0.02, length=drawn_length(8, 64))},
    {"admission_ms": 0},
    {"planner": "fifo"},
    {"planner": "static"},
    {"pipelines": WIDE, "devices": 4},
    {"stream": replace(STRICT, sampler="in-order", window=1)},
]


def ends(done: DeskSimulation) -> dict[str, str]:
    return {name: one.why for name, one in done.ended.items()}


def run(how: dict[str, Any]) -> DeskSimulation:
    how = dict(how)
    return shared(how.pop("pipelines", BOTH), **how)


@pytest.mark.drawn(3, of="kinds")
@pytest.mark.parametrize("how", KINDS, ids=lambda how: "-".join(how) or "plain")
def test_both_end_and_every_check_passes(how: dict[str, Any]) -> None:
    done = run(how)
    assert ends(done) == {"a": "done", "b": "done", "desk": "done"}
    rows = rows_of(done.rows)
    assert violations(rows) == {}
    assert replay_rows(done.runner.cores, done.rows) is None
    for name in ("a", "b"):
        settings = replace(
            how.get("stream", STRICT), replicas=len(how.get("pipelines", BOTH)[name]["generation"].bundles)
        )
        first = [Row(metric=event, time=0.0, ids=ids) for event, ids in opening(settings)]
        ledger = LoopLedger([*first, *pipeline_rows(done.rows, name)])
        for rule in stream_judge.RULES:
            try:
                assert not settle(rule(ledger)).value
            except NotMeasured:
                continue


@pytest.mark.parametrize(
    "how", [one for one in KINDS if one.get("stream", STRICT).window == 0], ids=lambda how: "-".join(how) or "plain"
)
def test_at_staleness_0_each_computes_what_it_computes_alone(how: dict[str, Any]) -> None:
    done = run(how)
    more = {key: value for key, value in how.items() if key not in ("pipelines", "planner")}
    for name, clusters in how.get("pipelines", BOTH).items():
        alone = shared({name: clusters}, **more)
        assert outcome(done, name) == outcome(alone, name)
        assert len(outcome(alone, name)) == 3 * 4 + 3
        assert done.seconds > alone.seconds


def test_they_do_share() -> None:
    """At least one pipeline generates on both devices, and sharing takes less than 1.1 times the two runs one after the other."""
    done = shared(BOTH, STRICT)
    woken = {(row.ids["pipeline"], row.ids["devices"]) for row in done.rows if row.event == "expand"}
    assert woken == {("a", (0,)), ("a", (1,)), ("b", (0,)), ("b", (1,))} or len(woken) == 3
    one_after_the_other = sum(shared({name: BOTH[name]}).seconds for name in BOTH)
    assert done.seconds < 1.1 * one_after_the_other


def at(seconds: float, event: Event) -> Any:
    def prepare(runner: Runner) -> None:
        runner.clock.after(seconds, lambda: runner.post(event))  # type: ignore[attr-defined]

    return prepare


def test_a_dead_pipeline_leaves_and_the_other_goes_on() -> None:
    def kill(runner: Runner) -> None:
        at(3.5, Event("died", "desk", who="a"))(runner)
        at(3.5, Event("error", "a", of="pipeline", why="killed"))(runner)

    done = shared(BOTH, prepare=kill, until_s=60)
    assert ends(done) == {"a": "error", "b": "done", "desk": "done"}
    assert outcome(done, "b") == outcome(shared({"b": B}), "b")
    assert violations(rows_of(done.rows), without=("no_request_lost", "progress_ended")) == {}


def test_a_replica_that_cannot_wake_is_done_without() -> None:
    done = shared(BOTH, more={"broken": [("a", 1)]})
    assert ends(done) == {"a": "done", "b": "done", "desk": "done"}
    assert violations(rows_of(done.rows)) == {}


def test_a_shrink_without_an_answer_stops_both_with_the_desks_name() -> None:
    done = shared(BOTH, more={"hangs": [("shrink", "a", 0)]}, operation_ms=2000)
    assert ends(done) == {"a": "error", "b": "error", "desk": "error"}
    for name in ("a", "b"):
        assert "replica 0 of a did not answer a shrink within 2000 ms" in done.ended[name].error


def test_a_refused_pipeline_ends_with_the_reason() -> None:
    done = shared({"a": A, "b": {"trainer": Cluster((7,)), "generation": Cluster((0,))}}, until_s=30)
    assert done.ended["b"].error == "b names the devices [7], but there are only 2"


def foreign(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same ledger as another system would write it: each row once, with the pipeline that it is about."""
    own = {"core", "to", "who", "pipeline"}
    return [
        {
            "event": row.event,
            "time": row.time,
            "pipeline": row.who,
            **{key: row.ids[key] for key in row.ids if key not in own},
        }
        for row in DeskLedger(rows).rows
    ]


def test_a_ledger_that_no_runner_wrote_is_judged_alike() -> None:
    assert violations(foreign(rows_of(shared(BOTH).rows))) == {}
    for fault in SCRIPTED:
        with replaced(fault.patch):
            rows = foreign(rows_of(SCENARIOS[fault.scene["scenario"]].run().rows))
        assert fault.caught_by in violations(rows), fault.name


def test_a_ledger_that_does_not_say_who_waits_is_not_called_wrong() -> None:
    """A request waits from its `acquire` on. Without this, every grant of a plan looked as if nobody had asked for it."""
    told = foreign(rows_of(shared(BOTH).rows))
    rows = [row for row in told if row["event"] not in ("queued", "expired", "withdrawn")]
    assert violations(rows) == {}
    assert settled(priority_kept, DeskLedger(rows)).value == 0
    with pytest.raises(Missing, match="no `acquire` or `queued` event"):
        settled(priority_kept, DeskLedger(row for row in rows if row["event"] != "acquire"))


def test_a_desk_need_not_note_the_devices_with_which_pipelines_registered() -> None:
    told = rows_of(shared(BOTH).rows)
    rows = [row for row in told if row["event"] != "clusters"]
    assert violations(rows) == violations(told) == {}

    def clusters(ledger: list[dict[str, Any]]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        return [
            (row.who, numbers(row["trainer"]), numbers(row["generation"])) for row in DeskLedger(ledger).of("clusters")
        ]

    assert clusters(rows) == clusters(told)
    assert settled(plan_valid, DeskLedger(rows)).value == 0
    wrong = [{**row, "grants": "a.trainer:0 b.trainer:0"} if row["event"] == "plan" else row for row in rows]
    assert "which are not free" in violations(wrong)["plan_valid"]


def test_what_a_ledger_lacks_is_named() -> None:
    with pytest.raises(Missing, match="no `plan` event"):
        settled(plan_valid, DeskLedger([{"event": "limits", "time": 0.0, "pipeline": "desk"}]))
    with pytest.raises(BadInput, match="row 0 of the ledger"):
        DeskLedger([{"event": "plan"}])


# -- faults -----------------------------------------------------------------------------------------------------------------


BY_PIPELINES = {  # checks with faults of pipelines, in the lab `share`
    "routed_to_awake", "drained_before_sleep", "empty_set_suspends", "version_after_wake", "no_deadlock",
    "dead_pipeline_leaves", "progress_true",
}  # fmt: skip


def test_every_check_has_a_fault() -> None:
    assert {fault.caught_by for fault in SCRIPTED} | BY_PIPELINES == {rule.__name__ for rule in RULES}


@pytest.mark.drawn(6, of="faults")
@pytest.mark.parametrize("fault", SCRIPTED, ids=lambda fault: fault.name)
def test_a_fault_is_seen_by_the_check_that_it_names(fault: Fault) -> None:
    scenario = SCENARIOS[fault.scene["scenario"]]
    assert violations(rows_of(scenario.run().rows)) == {}
    with replaced(fault.patch):
        wrong = scenario.run()
    assert fault.caught_by in violations(rows_of(wrong.rows))


def test_the_death_of_a_replica_that_a_pipeline_does_not_have_calls_for_no_plan() -> None:
    """b could wake a second replica on the device that a left, but nothing has made the desk plan since a took its device."""
    calm = Scenario(
        lines={
            "a": (*trains(300, 900), (300, "progress", {"completed": 1, "target": 1}), *generates(5, 1)),
            "b": generates(6, 1),
        },
        clusters={"a": {"trainer": (0,), "generation": (0, 1), "tp": 2}, "b": {"generation": (1, 2)}},
        settings={"devices": 3},
    )
    dies = replace(calm, lines={**calm.lines, "b": (*generates(6, 1), (400, "died", {"who": "a", "replica": 1}))})
    assert [violations(rows_of(scenario.run().rows)) for scenario in (calm, dies)] == [{}, {}]


class NeverTrustsAgain:
    """A planner that keeps a list of its own of lost replicas, and never looks at one of them again."""

    def __init__(self) -> None:
        self.awake: set[tuple[str, int]] = set()
        self.lost: set[tuple[str, int]] = set()

    def __call__(self, view: View) -> None:
        taken = {(share.name, replica) for share in view.shares.values() for replica in share.touched}
        self.lost |= self.awake & taken
        for share in view.shares.values():
            share.touched |= {replica for name, replica in self.lost if name == share.name}
        fifo(view)
        self.awake = {(share.name, replica) for share in view.shares.values() for replica in share.active}


def left_asleep() -> list[dict[str, Any]]:
    return rows_of(replace(SCENARIOS["recovery"], planner=NeverTrustsAgain()).run().rows)


def test_a_planner_that_leaves_the_replaced_asleep_is_seen() -> None:
    assert "the pipeline had no replica for 7.9" in violations(left_asleep())["dead_replaced"]
    assert violations(rows_of(replace(SCENARIOS["recovery"], planner=fifo).run().rows)) == {}


def test_how_long_the_replaced_may_stay_asleep_is_not_judged_without_a_limit() -> None:
    rows = [{key: value for key, value in row.items() if key != "watchdog_ms"} for row in left_asleep()]
    with pytest.raises(NotMeasured, match="`watchdog_ms`"):
        settled(dead_replaced, DeskLedger(rows))


def test_a_replaced_replica_is_gone_with_its_pipeline() -> None:
    """Once the pipeline registers again, its replica is a new one."""
    rows = left_asleep()
    begin = next(at for at, row in enumerate(rows) if row["event"] == "restarted" and row.get("core")) + 1
    registered = ("clusters", "admit", "admitted", "progress", "acquire", "queued")
    own = [row for row in rows[:begin] if row.get("pipeline") == "a" and row.get("core", "desk") == "desk"]
    again: list[dict[str, Any]] = [
        {"event": "died", "who": "a", "pipeline": "a", "core": "desk"},
        {"event": "gone", "how": "died", "idle": (0, 1), "pipeline": "a"},
        *(row for row in own if row["event"] in registered),
    ]
    again = [{**row, "time": 1.1} for row in again]
    assert settled(dead_replaced, DeskLedger(rows)).value == 1
    assert settled(dead_replaced, DeskLedger([*rows[:begin], *again, *rows[begin:]])).value == 0


def test_what_observers_saw_is_judged_also_without_releases() -> None:
    """Devices that are given back go into the books, which another system may leave out; two holders of one device do not need them."""
    rows: list[dict[str, Any]] = [
        {"pipeline": "desk", "event": "limits", "devices": 2},
        *({"pipeline": name, "event": "clusters", "trainer": [0], "generation": [1], "tp": 1} for name in "ab"),
        *(
            {"pipeline": name, "event": event, **ids}
            for name in "ab"
            for event, ids in (
                ("acquire", {"kind": "training"}),
                ("granted", {"kind": "training", "devices": [0]}),
                ("taken", {"device": 0}),
            )
        ),
        *({"pipeline": name, "event": "ended", "why": "done"} for name in ("a", "b", "desk")),
    ]
    rows = [{"time": float(number), **row} for number, row in enumerate(rows)]
    assert "device 0 is still held by a" in settled(one_owner, DeskLedger(rows)).why
    once = [row for row in rows if (row["pipeline"], row["event"]) != ("b", "taken")]
    with pytest.raises(Missing, match="`release`"):
        settled(one_owner, DeskLedger(once))


def test_devices_that_a_sleeper_has_not_left_are_not_idle() -> None:
    """Seen in the desk's orders alone, and by what observers saw of the devices."""
    fault = next(fault for fault in SCRIPTED if fault.name == "released-while-falling-asleep")
    with replaced(fault.patch):
        rows = rows_of(shared(BOTH).rows)
    assert "was seen on it" in violations(rows)["devices_conserved"]
    unseen = [row for row in rows if row["event"] not in ("taken", "freed")]
    assert "has not fallen asleep" in violations(unseen)["devices_conserved"]


def test_a_circle_is_found_through_any_owner() -> None:
    """a waits for device 0 of c, which waits for nothing, and for device 1 of b, which waits for a."""
    clusters = {"a": (0, 1), "b": (2,), "c": (3,)}
    books = Books(
        4,
        {name: {"trainer": wanted, "critic": ()} for name, wanted in clusters.items()},
        held={("a", "critic"): "values", ("b", "critic"): "values", ("c", "critic"): "values"},
    )
    for name, own in (("a", (2,)), ("b", (1,)), ("c", (0,))):
        books.clusters[name]["critic"] = own
    asked = [
        Row(metric="acquire", time=0.0, ids={"pipeline": name, "cluster": "trainer", "kind": "training"})
        for name in ("a", "b")
    ]
    names, words = circle(books, asked)
    assert names == {"a", "b"}
    assert words == (
        "a waits for device 0, which c holds (critic) and device 1, which b holds (critic); "
        "b waits for device 2, which a holds (critic)"
    )
    assert circle(books, asked[:1]) == (frozenset(), "")


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (("granted", {"pipeline": "b", "kind": "training"}), "it waits for device 1 since "),
        (("published", {"pipeline": "b"}), "has no answer of replica 0"),
        (("done", {"pipeline": "b", "of": "microbatch"}), "b trainer has not answered `microbatch` (row "),
        (("shrunk", {"who": "b"}), "replica 0 of b was ordered to fall asleep and has not answered"),
        (("expanded", {"who": "b"}), "replica 0 of b was ordered to wake and has not answered"),
        (
            ("completed", {"pipeline": "b"}),
            "requests to replica 0 without an answer, the first is `sent` of b, group 0",
        ),
    ],
    ids=lambda lost: lost[0] if isinstance(lost, tuple) else "",
)
def test_a_ledger_that_stops_names_what_has_no_answer(lost: tuple[str, dict[str, Any]], words: str) -> None:
    rows = rows_of(shared(BOTH).rows)
    event, ids = lost
    at = next(at for at, row in enumerate(rows) if row["event"] == event and ids.items() <= row.items())
    assert words in waits_of(DeskLedger(rows[:at]), "b")


def test_requests_to_a_replica_that_sleeps_are_seen() -> None:
    rows = rows_of(shared(BOTH).rows)
    asleep: set[int] = set()
    for row in rows:
        if row.get("pipeline") == "a" and row.get("to") == "devices":
            asleep = asleep | {row["replica"]} if row["event"] == "shrink" else asleep - {row["replica"]}
        elif row.get("pipeline") == "a" and row["event"] == "sent" and asleep:
            row["replica"] = min(asleep)
            break
    assert "routed_to_awake" in violations(rows)


def test_a_request_that_is_not_sent_again_is_seen() -> None:
    rows = rows_of(shared(BOTH).rows)
    again = [row for row in rows if row.get("pipeline") == "a" and row["event"] == "sent" and row["attempt"]]
    lost = {"sent", "completed", "cleared"}
    wrong = [
        row
        for row in rows
        if row["event"] not in lost or row.get("pipeline") != "a" or row["group"] != again[0]["group"]
    ]
    first = next(
        row
        for row in rows
        if row["event"] == "sent" and row.get("pipeline") == "a" and row["group"] == again[0]["group"]
    )
    assert "no_request_lost" in violations([*wrong[: rows.index(first)], first, *wrong[rows.index(first) :]])


@pytest.mark.parametrize(("between", "is_right"), [([], False), (["commit"], True), (["died"], True)])
def test_a_desk_plans_again_after_its_commit_or_a_loss(between: list[str], *, is_right: bool) -> None:
    """Two plans without a commit would hide a replica that is put to sleep late."""
    names = ["plan", *between, "plan"]
    rows = [{"event": name, "time": float(at), "pipeline": "desk", "number": at} for at, name in enumerate(names)]
    assert settled(shrink_before_expand, DeskLedger(rows)).value == float(not is_right)


def test_a_desk_may_put_replicas_to_sleep_after_its_commit() -> None:
    rows = [
        {"event": "clusters", "pipeline": "a", "generation": (0, 1), "tp": 1},
        {"event": "acquire", "pipeline": "a", "kind": "generation"},
        {"event": "plan", "pipeline": "desk", "number": 1},
        {"event": "expand", "pipeline": "a", "replica": 0, "devices": (0,)},
        {"event": "expanded", "pipeline": "a", "replica": 0},
        {"event": "joined", "pipeline": "a", "replica": 0},
        {"event": "commit", "pipeline": "desk", "number": 1},
        {"event": "left", "pipeline": "a", "replica": 0},
    ]
    timed = [{**row, "time": float(at)} for at, row in enumerate(rows)]
    assert not settled(shrink_before_expand, DeskLedger(timed)).value
    early = [row for row in timed if row["event"] != "commit"]
    assert settled(shrink_before_expand, DeskLedger(early)).value == 1


@pytest.mark.parametrize(
    ("devices", "is_right"), [((2, 3), True), ((3, 2), True), ((1, 2), False), ((2,), False), ((), False)]
)
def test_a_replica_wakes_on_its_own_devices(devices: tuple[int, ...], *, is_right: bool) -> None:
    """Two orders of the devices would give one of them to two replicas, which no other row shows."""
    rows = [
        {"event": "clusters", "pipeline": "a", "generation": (0, 1, 2, 3), "tp": 2},
        {"event": "acquire", "pipeline": "a", "kind": "generation"},
        {"event": "plan", "pipeline": "desk", "number": 1},
        {"event": "expand", "pipeline": "a", "replica": 1, "devices": devices},
    ]
    found = settled(one_owner, DeskLedger([{**row, "time": float(at)} for at, row in enumerate(rows)]))
    assert bool(found.value) is not is_right
    if not is_right:
        assert "its own are 2 and 3" in found.why


RELEASES = {"event": "release", "pipeline": "a", "kind": "training"}
ANSWERS = {"event": "done", "pipeline": "a", "of": "finish"}


@pytest.mark.parametrize(
    ("after", "early"),
    [
        ([RELEASES], 1),
        ([{"event": "acquire", "pipeline": "a", "kind": "generation", "release": "training"}], 1),
        ([{**RELEASES, "kind": "logprobs"}], 1),
        ([{**ANSWERS, "of": "microbatch"}, RELEASES], 1),  # the answer to another call
        ([{**ANSWERS, "pipeline": "b"}, RELEASES], 1),
        ([ANSWERS, RELEASES], 0),
        ([{**ANSWERS, "event": "error"}, RELEASES], 0),
        *[([{"event": event, "pipeline": "a"}, RELEASES], 0) for event in ("abort", "died", "gone", "ended")],
        ([{**RELEASES, "pipeline": "b"}], 0),
        ([{**RELEASES, "kind": "generation"}, {**RELEASES, "kind": "critic"}], 0),  # the trainer does not run on these
        ([ANSWERS, {"event": "begin", "pipeline": "a", "to": "devices"}, RELEASES], 0),  # no call of the trainer
        ([ANSWERS, {"event": "begin", "pipeline": "a", "to": "trainer"}, RELEASES], 1),
    ],
)
def test_devices_are_released_once_the_trainer_has_answered(after: list[dict[str, Any]], early: int) -> None:
    call = {"event": "finish", "pipeline": "a", "to": "trainer"}
    ledger = DeskLedger([{**row, "time": float(at)} for at, row in enumerate([call, *after])])
    found = list(released_early(ledger))
    assert len(found) == early
    assert all("is released, but the trainer of a has not answered" in words for words in found)
