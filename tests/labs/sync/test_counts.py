"""Points of made-up syncs: those in the required order pass, and any other order is reported by its first wrong point. A sync that was
cut off is judged by the points it has; missing ones are no finding."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from kit.labs.sync.lab import SyncConfig, is_asked
from kit.labs.sync.rules import (
    AFTER,
    PUBLISHED,
    RULES,
    attempts,
    no_second_copy,
    no_torn_reads,
    out_of_order,
    receivers_answer,
    required_order,
    return_to_baseline,
)
from kit.results import Measured, Missing, NotMeasured, Rule, judge

CONFIG = {"ranks": 3, "infer_tp": 1, "replicas": 2}
Rows = list[dict[str, Any]]


def receiver(path: str, rank: int = 2) -> Rows:
    """The points of a right receiver."""
    made: Rows = []
    inside = False
    for order, (point, index) in enumerate(required_order(path, 2)):
        new = point in PUBLISHED
        inside = (inside or point == "gate") and point != "end"
        routed = path == "refresh" or point in {"begin", "end"}
        forward = "" if path in {"base", "expand"} else "waits" if inside else f"version {int(new)}"
        ids = {
            "path": path,
            "sync": 1,
            "point": point,
            "bucket": index,
            "order": order,
            "version": int(new),
            "routed": int(routed),
        }
        made.append({"rank": rank, "value": 100.0 + order, **ids, "forward": forward})
    return made


def sender(path: str, closed: float = 100.0) -> Rows:
    ids = {
        "path": path,
        "sync": 1,
        "point": "closed",
        "bucket": 0,
        "order": 5,
        "version": 0,
        "routed": 1,
        "forward": "",
    }
    return [{"rank": 0, "value": closed, **ids}]


def ending(*ranks: int, failed: bool = False, phase: str = "refresh", cycle: int = 1) -> pd.DataFrame:
    """The records of ranks that have ended a phase."""
    metrics = ["seconds", *["failed"] * failed]
    rows = [{"rank": rank, "metric": metric, "value": 1.0} for rank in ranks for metric in metrics]
    return pd.DataFrame(rows).assign(cycle=cycle, phase=phase, ids="")


def sampled(*rows: Rows, phase: str = "refresh", cycle: int = 1) -> pd.DataFrame:
    own = ("rank", "value")
    return pd.DataFrame(
        [
            {
                "cycle": cycle,
                "phase": phase,
                "metric": "point",
                **{name: row[name] for name in own},
                "ids": json.dumps({name: value for name, value in row.items() if name not in own}),
            }
            for each in rows
            for row in each
        ]
    )


def frame(*rows: Rows) -> pd.DataFrame:
    """A phase that all ranks have ended."""
    return pd.concat([sampled(*rows), ending(0, 1, 2)], ignore_index=True)


@pytest.mark.parametrize("path", ["base", "refresh", "stream", "expand"])
def test_the_rule_itself_passes(path: str) -> None:
    assert out_of_order(frame(receiver(path, 1), receiver(path, 2), sender(path)), 1) == (0, 2, "")


def at(rows: Rows, point: str) -> dict[str, Any]:
    return next(row for row in rows if row["point"] == point)


def swap(one: str, other: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        first, second = at(rows, one), at(rows, other)
        first["point"], second["point"] = other, one

    return change


def put(point: str, **values: Any) -> Callable[[Rows], None]:
    return lambda rows: at(rows, point).update(values)


def drop(point: str) -> Callable[[Rows], None]:
    return lambda rows: rows.remove(at(rows, point))


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("refresh", swap("publish", "activate"), "activate came instead of publish"),
        ("refresh", swap("gate", "verify"), "gate came instead of verify"),
        ("refresh", drop("derive"), "finalize came instead of derive"),
        ("refresh", drop("end"), "the end of the sync came instead of end"),
        ("refresh", put("apply", version=1), "another point than publish: [0, 1] before it"),
        ("refresh", put("publish", version=0), "another point than publish: [0] before it, [0, 1] from then on"),
        ("refresh", put("verify", routed=0), "no route at verify although the replica serves"),
        ("refresh", put("finalize", forward="version 1"), "a forward ran at finalize, between gate and end"),
        ("refresh", put("activate", forward="version 1"), "a forward ran at activate, between gate and end"),
        ("refresh", put("end", forward="waits"), "forwards still waited after the end"),
        ("stream", put("open", routed=1), "a route at open, before the end"),
        ("stream", put("write", forward="no version"), "a forward ran at write, between gate and end"),
        ("expand", put("publish", routed=1), "a route at publish, before the end"),
        ("expand", put("activate", routed=1), "a route at activate, before the end"),
        ("expand", put("end", routed=0), "no route at the end"),
        ("expand", drop("wake"), "open came instead of wake"),
        ("refresh", put("close", value=99.0), "the times of the points are not increasing"),
    ],
)
def test_what_breaks_the_rule_is_reported(path: str, change: Callable[[Rows], None], words: str) -> None:
    rows = receiver(path)
    change(rows)
    wrong, count, first = out_of_order(frame(receiver(path, 1), rows, sender(path)), 1)
    assert (wrong, count) == (1, 2)
    assert words in first
    assert first.endswith(f"(rank 2, {path} in refresh, cycle 1)")


OWN = ("begin", "publish", "end")  # the points of any synchroniser but the kit's


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("refresh", put("begin"), ""),
        ("expand", put("begin", version=1), ""),
        ("refresh", drop("publish"), "a version was published 0 times instead of once"),
        ("refresh", lambda rows: rows.append(at(rows, "publish")), "a version was published 2 times instead of once"),
        ("refresh", put("begin", version=1), "version 1 was published while version 1 was active"),
        ("refresh", put("end", forward="waits"), "forwards still waited after the end"),
    ],
)
def test_own_code_has_an_order_of_its_own_between_the_ends(
    path: str, change: Callable[[Rows], None], words: str
) -> None:
    rows = [row for row in receiver(path) if row["point"] in OWN]
    change(rows)
    wrong, count, first = out_of_order(frame(rows), 1, own=True)
    assert (wrong, count) == (int(bool(words)), 1)
    assert first.startswith(words)


def test_the_sender_closes_first() -> None:
    place = 2 + 2 * 2 + 2 + 1  # index of `close` in a refresh with two buckets
    wrong, _, first = out_of_order(frame(receiver("refresh"), sender("refresh", 100.5 + place)), 1)
    assert (wrong, "the sender closed later" in first) == (1, True)
    wrong, _, first = out_of_order(frame(receiver("refresh")), 1)
    assert (wrong, "the sender did not" in first) == (1, True)


def test_two_syncs_of_one_path_are_distinguished() -> None:
    second = [{**row, "sync": 2, "value": row["value"] + 50} for row in receiver("refresh")]
    closed = [{**row, "sync": 2, "value": 150.0} for row in sender("refresh")]
    table = frame(receiver("refresh"), sender("refresh"), second, closed)
    assert out_of_order(table, 1) == (0, 2, "")
    assert attempts(table, CONFIG)[1] == []


def test_the_same_version_may_be_expanded_and_not_refreshed() -> None:
    for path, wanted in (("expand", 0), ("refresh", 1), ("stream", 1)):
        rows = receiver(path)
        for row in rows:
            row["version"] = 1
        assert out_of_order(frame(rows, sender(path)), 1)[0] == wanted


def test_a_point_without_an_attempt_is_named() -> None:
    rows = receiver("refresh")
    table, missing = attempts(frame(rows), CONFIG)
    assert (len(table), missing) == (len(rows), [])
    at(rows, "publish")["forward"] = ""
    at(rows, "write")["forward"] = "stuck"
    assert attempts(frame(rows), CONFIG)[1] == [
        "write 0 (rank 2, refresh, cycle 1)",
        "publish (rank 2, refresh, cycle 1)",
    ]


def test_of_many_buckets_some_are_not_asked_and_all_of_the_first_are() -> None:
    rows = receiver("refresh")
    unasked = [{**at(rows, "write"), "bucket": bucket, "forward": "unasked"} for bucket in (255, 257)]
    table, missing = attempts(frame([*rows, *unasked]), CONFIG)
    assert (len(table), missing) == (len(rows), [])
    assert [is_asked(bucket) for bucket in (0, 255, 257, 272)] == [True, True, False, True]
    at(rows, "write")["forward"] = "unasked"
    wrong, _, first = out_of_order(frame(receiver("refresh", 1), rows, sender("refresh")), 1)
    assert (wrong, first) == (0, "")
    assert attempts(frame(rows), CONFIG)[1] == ["write 0 (rank 2, refresh, cycle 1)"]


def test_nothing_sampled_is_not_measured() -> None:
    with pytest.raises(NotMeasured, match="no sync was sampled"):
        out_of_order(frame(receiver("base"))[:0], 1)
    with pytest.raises(NotMeasured, match="no forward was requested after a sync"):
        receivers_answer(frame(receiver("base"))[:0], CONFIG)
    with pytest.raises(NotMeasured, match="no replica was awake"):
        attempts(frame(receiver("expand")), CONFIG)


def test_rules_share_what_comes_after() -> None:
    for path in ("stream", "expand"):
        assert tuple(name for name, _ in required_order(path, 3))[-len(AFTER) :] == AFTER


# -- syncs that were cut off -----------------------------------------------------------------------------------------------

OF_A_RUN = dataclasses.asdict(SyncConfig(ranks=4, tp=1, replicas=3))  # 0 trains, 1 sleeps, 2 and 3 serve


def served(rank: int, value: float = 1.0) -> pd.DataFrame:
    return pd.DataFrame([{"cycle": 1, "phase": "refresh", "metric": "serves", "rank": rank, "value": value, "ids": ""}])


def rank_of_a_refresh(rank: int) -> pd.DataFrame:
    """All records of one receiver in a phase, in its order."""
    return pd.concat([sampled(receiver("refresh", rank)), served(rank), ending(rank)])


@pytest.mark.slow
def test_no_beginning_of_a_good_run_is_blamed() -> None:
    """This holds for any rank and row at which the run was cut off, whichever rank was ahead."""
    mine = pd.concat([sampled(sender("refresh")), ending(0)])
    two, three = rank_of_a_refresh(2), rank_of_a_refresh(3)
    early, late = three[: len(three) // 2], three[len(three) // 2 :]
    for parts in ([mine, two, three], [early, two, mine, late]):
        whole = pd.concat(parts, ignore_index=True)
        for cut in range(1, len(whole) + 1):
            part = whole.head(cut)
            if (part["metric"] == "point").any():
                assert out_of_order(part, 1)[0] == 0, cut
                with contextlib.suppress(NotMeasured):
                    assert attempts(part, OF_A_RUN)[1] == [], cut
            with contextlib.suppress(NotMeasured):
                assert receivers_answer(part, OF_A_RUN).value == 0, cut
        assert receivers_answer(whole, OF_A_RUN).value == 0


@pytest.mark.parametrize("point", ["open", "gate", "finalize"])
def test_a_sync_that_failed_is_judged_up_to_where_it_was_undone(point: str) -> None:
    rows = receiver("refresh")
    place = rows.index(at(rows, point))
    broken = [*rows[: place + 1], *({**rows[place], "point": name, "order": 90} for name in ("undo", "closed"))]
    table = pd.concat([sampled(broken, sender("refresh")), ending(0, 2, failed=True)], ignore_index=True)
    assert out_of_order(table, 1) == (0, 1, "")
    assert attempts(table, CONFIG)[1] == []
    at(broken, "begin")["routed"] = 0
    table = pd.concat([sampled(broken, sender("refresh")), ending(0, 2, failed=True)], ignore_index=True)
    assert "no route at begin" in out_of_order(table, 1)[2]
    # Nothing may be undone in a sync that succeeded.
    assert "undo came instead of" in out_of_order(frame(broken, sender("refresh")), 1)[2]


def test_a_receiver_answers_where_its_phase_has_ended_or_the_sync_failed() -> None:
    def unserved(*parts: pd.DataFrame) -> tuple[float | None, str]:
        found = receivers_answer(pd.concat(parts, ignore_index=True), OF_A_RUN)
        return found.value, found.why

    assert unserved(served(2), ending(2), served(3), ending(3))[0] == 0
    assert unserved(served(2), ending(2), ending(3)) == (
        1,
        "the new version was served after 1 of 2 syncs on receivers; not on rank 3, refresh, cycle 1",
    )
    assert unserved(served(2), ending(2), served(3, 0.0), ending(3))[0] == 1
    # Rank 3 was killed and recorded nothing; rank 1 sleeps and was not asked.
    value, why = unserved(ending(0, 2, failed=True))
    assert (value, "not on rank 2, refresh" in why) == (2, True)
    assert unserved(ending(0, 1, failed=True, phase="expand"))[1].endswith("not on rank 1, expand, cycle 1")
    assert unserved(served(2), ending(2), ending(0, failed=True, phase="train"))[0] == 0


@pytest.mark.parametrize(
    ("trainer", "replica", "copies", "where"),
    [
        ((9, 20, 20), (5, 5, 5), 0.0, "rank 0, cycle 2"),  # what is made once exists after two cycles
        ((9, 20, 30), (5, 5, 5), 1.0, "rank 0, cycle 3"),
        ((9, 20, 20), (5, 15, 15), 1.0, "rank 1, cycle 2"),
    ],
)
def test_a_copy_that_every_version_leaves_is_counted_on_either_end(
    trainer: tuple[int, ...], replica: tuple[int, ...], copies: float, where: str
) -> None:
    rows: list[tuple[object, ...]] = [(0, 1, "base", "tensor_bytes", 5.0), (0, 0, "base", "bytes", 10.0)]
    for rank, weighed in enumerate((trainer, replica)):
        rows += [(cycle, rank, "verify", "tensor_bytes", float(held)) for cycle, held in enumerate(weighed, start=1)]
    frame = pd.DataFrame(rows, columns=["cycle", "rank", "phase", "metric", "value"])
    config = {"ranks": 2, "infer_tp": 1, "replicas": 1, "cycles": 3}
    answer = no_second_copy(frame, config)
    assert answer.value == copies
    assert where in answer.why
    assert "only replicas" not in answer.why
    assert "only replicas" in no_second_copy(frame[frame["cycle"] < 3], {**config, "cycles": 2}).why


def rule_named(name: str) -> Rule:
    return next(rule for rule in RULES if rule.name == name)


@pytest.mark.parametrize("name", ["sleepers_release", "trainer_restored", "weights_once"])
def test_a_run_that_broke_before_it_offloaded_is_not_said_to_share_no_device(name: str) -> None:
    broke = frame(receiver("refresh"), sender("refresh"))
    asked = rule_named(name)
    overlap, apart = (
        {**CONFIG, "cycles": 1, "arena": "views", "placement": placement} for placement in ("overlap", "apart")
    )
    assert asked.unanswerable(overlap) is None
    with pytest.raises(Missing, match=r"no offload of the trainer was recorded|no sleeping replica was looked at"):
        asked.measure(broke, overlap)
    assert "shares no device" in str(asked.unanswerable(apart))


@pytest.mark.parametrize(("placement", "last"), [("overlap", "shrink"), ("apart", "verify")])
def test_the_placement_says_after_which_phase_counts_are_back(placement: str, last: str) -> None:
    counted = {"base": 1.0, "verify": 3.0, last: 1.0}
    rows = [{"rank": 2, "cycle": 1, "phase": phase, "metric": "groups", "value": of} for phase, of in counted.items()]
    config = {**CONFIG, "cycles": 1, "placement": placement}
    answer = return_to_baseline("groups")(pd.DataFrame(rows), config)
    assert isinstance(answer, Measured)
    assert answer.value == 0.0


def served_while(rows: Rows, **counts: float) -> pd.DataFrame:
    """A refresh, and what the replica counted in it."""
    metrics = {"torn": 0.0, "served": 5.0, "logits_moved": 0.0, **counts}
    own = [{"rank": 2, "metric": metric, "value": value} for metric, value in metrics.items()]
    counted = pd.DataFrame(own).assign(cycle=1, phase="refresh", ids="")
    return pd.concat([frame(rows, sender("refresh")), counted], ignore_index=True)


def test_where_no_version_was_published_a_torn_read_would_not_show() -> None:
    rows = [{**row, "version": 0} for row in receiver("refresh")]
    with pytest.raises(NotMeasured, match="no sync published a new version") as error:
        no_torn_reads(served_while(rows), CONFIG)
    assert not isinstance(error.value, Missing)
    assert no_torn_reads(served_while(rows, torn=2.0), CONFIG).value == 2.0
    assert no_torn_reads(served_while(rows, logits_moved=1.0), CONFIG).value == 1.0


def test_two_versions_with_the_same_logits_hide_torn_reads() -> None:
    assert no_torn_reads(served_while(receiver("refresh"), versions_differ=1.0), CONFIG).value == 0.0
    same = no_torn_reads(served_while(receiver("refresh"), versions_differ=0.0), CONFIG)
    assert (same.value, "two versions gave the same logits" in same.why) == (1.0, True)
    with pytest.raises(Missing, match="versions_differ"):
        no_torn_reads(served_while(receiver("refresh")), CONFIG)


def test_replicas_that_slept_before_the_first_offload_say_nothing_of_the_trainer() -> None:
    slept = {"rank": 2, "cycle": 0, "phase": "base", "metric": "asleep_tensors", "ids": "", "text": ""}
    config = {**CONFIG, "cycles": 1, "placement": "overlap"}
    for kept, verdict in ((0.0, None), (2.0, False)):
        (row,) = judge(pd.DataFrame([{**slept, "value": kept}]), config, [rule_named("sleepers_release")])
        assert row.passed is verdict
        assert kept or "no offload of the trainer was recorded" in row.why
