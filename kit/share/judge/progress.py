"""The rules of what pipelines report about their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kit.results.ledger import by_cores
from kit.results.progress import GroupTally, only_training
from kit.results.records import Id, Row
from kit.results.rules import Missing, NotMeasured, Violations
from kit.results.units import counted
from kit.share.judge.books import DeskLedger, need, need_lines


def progress_ended(ledger: DeskLedger) -> Violations:
    """Does the desk clamp every progress stream to its target, and does every stream end?"""
    plans = [row for row in need(ledger, "plan") if "demand" in row.ids]
    if not plans:
        raise NotMeasured("no `plan` event has the id `demand`")
    need_lines(ledger, "progress")
    for row, books in ledger.replay():
        if row.event == "plan" and "demand" in row.ids:
            stated = {text.rpartition(":")[0]: int(text.rpartition(":")[2]) for text in str(row["demand"]).split()}
            sums = {name: books.progress(name) for name in books.clusters if books.streams.get(name)}
            counted = {name: target - done for name, (done, target) in sums.items()}
            # No demand may be stated as 0.
            if any(stated.get(name, 0) != counted.get(name, 0) for name in {*stated, *counted} - books.closing):
                yield f"{row} states the demand {stated}; according to the reports it is {counted}"
        elif row.event == "unregister" and books.streams.get(row.who) and row.at not in ledger.refused:
            yield f"{row}: its progress of {', '.join(books.streams[row.who])} has not ended"
    return f"{len(plans)} plans"


def progress_true(ledger: DeskLedger) -> Violations:
    """Does every pipeline report the groups that its loop has and needs, no more?

    A group is there from `ready` until it is trained or ends; a step needs `groups_per_step`, or fewer if groups were lost. In the kit's
    own ledgers the group belongs to one adapter, if there are any, and counts only in the reports of that one.
    """
    need(ledger, "capacity")
    if ledger.of("trained"):
        need(ledger, "ready")
    size = {row.who: row.number("groups_per_step") for row in ledger.of("capacity") if "groups_per_step" in row.ids}
    # The window of adapters is one less than their number. Another system may number its groups in another way.
    own = by_cores(ledger.rows)
    adapters = {row.who: row.number("window") + 1 for row in ledger.of("capacity") if own and "window" in row.ids}

    def streams(name: str) -> Callable[[Id], Iterable[str]]:
        def with_adapter(group: Any) -> Iterable[str]:
            return "training", f"adapter {int(group) // size[name] % adapters[name]}"

        return with_adapter if name in adapters else only_training

    loops = {name: GroupTally(groups, streams(name)) for name, groups in size.items()}
    count = 0
    for row in ledger.rows:
        if row.who not in loops:
            continue
        if row.event == "progress" and is_of_training(row):
            count += 1
            stream = str(row.get("stream", "training")) if row.who in adapters else "training"
            yield from loops[row.who].wrong(row, stream)
        elif row.event == "capacity":  # new ranks may take the place of dead ones, whose last reports come late
            loops[row.who] = GroupTally(size[row.who], streams(row.who))
        else:
            loops[row.who].take(row)
    if not count:
        raise Missing("no pipeline with a `capacity` event has a `progress` event")
    return f"{counted(count, 'report')} of {', '.join(sorted(size))}"


def is_of_training(row: Row) -> bool:
    """Whether a report is about a step that the loop trains, of all weights or of an adapter."""
    stream = str(row.get("stream", "training"))
    return stream == "training" or stream.startswith("adapter ")
