"""Progress of a loop, counted from rows: what a report may say before and after groups end."""

from __future__ import annotations

import pytest

from kit.results.progress import GroupTally
from kit.results.records import Id, Row, Unjudged

Rows = list[tuple[str, dict[str, int]]]
READY: Rows = [("ready", {"group": group}) for group in range(2)]
TRAINED: Rows = [("trained", {"group": group, "step": 0}) for group in range(2)]


def said_after(rows: Rows, completed: int, target: int = 2) -> str:
    progress = GroupTally(2)
    for event, ids in rows:
        progress.take(Row(metric=event, time=0.0, ids=ids))
    return " ".join(progress.wrong(Row(metric="progress", time=0.0, ids={"completed": completed, "target": target})))


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        ([], 0),
        (READY, 2),
        ([*READY, *TRAINED], 2),
        ([*READY, *TRAINED, ("bumped", {})], 0),
        ([*READY, *TRAINED, ("abort", {"step": 0}), ("bumped", {})], 2),
        ([*READY, *TRAINED, ("abort", {"step": 1}), ("bumped", {})], 0),
        ([*READY, ("finish", {"step": 0}), *TRAINED, ("abort", {"step": 0}), ("bumped", {})], 0),
        ([*READY, ("evicted", {"group": 0})], 2),  # the report may be on its way
        ([*READY, ("evicted", {"group": 0}), ("bumped", {})], 1),
        ([*READY, ("failed", {"group": 0, "sample": 0}), ("bumped", {})], 2),
    ],
)
def test_a_report_has_no_more_groups_than_there_are(rows: Rows, most: int) -> None:
    assert not said_after(rows, most)
    assert f"reports {most + 1} complete groups; there are {most}" in said_after(rows, most + 1)


@pytest.mark.parametrize(
    ("rows", "least"),
    [
        ([], 2),
        ([("dropped", {"group": 0})], 1),
        ([("failed", {"group": 0, "sample": 0}), ("failed", {"group": 0, "sample": 1})], 1),
        ([("dropped", {"group": 0}), ("filtered", {"group": 1})], 0),
        ([("failed", {"sample": 0})], 1),
        ([("error", {"of": "generate", "group": 0, "sample": 0})], 1),
        ([("error", {"of": "microbatch", "group": 0})], 2),
    ],
)
def test_a_step_needs_as_many_groups_fewer_as_were_lost(rows: Rows, least: int) -> None:
    assert not said_after(rows, 0, least)
    assert f"reports that a step needs {least - 1} groups; it needs 2" in said_after(rows, 0, least - 1)
    assert "reports that a step needs 3 groups; it needs 2" in said_after(rows, 0, 3)


def test_a_group_that_is_not_named_cannot_be_counted() -> None:
    with pytest.raises(Unjudged, match="has no id `group`"):
        GroupTally(2).take(Row(metric="ready", time=0.0))


def test_each_group_is_counted_once_however_long_a_step_is() -> None:
    counted: list[Id] = []

    def streams(group: Id) -> tuple[str, ...]:
        counted.append(group)
        return ("training",)

    progress = GroupTally(100, streams)
    for group in (*range(100), *range(100)):
        progress.take(Row(metric="ready", time=0.0, ids={"group": group}))
    assert counted == [*range(100)]
    assert progress.most == {"training": 100}
