"""The rows of each pipeline's loop, for the judge of loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kit.results.ledger import by_cores, is_note
from kit.results.records import Row


def pipeline_rows(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of one pipeline's loop, for the checks of `stream`. A combined release and request is split into two rows."""
    own = (
        core_rows(rows, name) if by_cores(rows) else [row for row in rows if row.who == name and row.event != "begins"]
    )
    split: list[Row] = []
    for row in own:
        if "release" in row.ids:
            split.append(replace(row, metric="release", ids={**row.ids, "kind": row["release"]}))
        split.append(row)
    return split


def core_rows(rows: Iterable[Row], name: str) -> list[Row]:
    """The rows of one pipeline's core: those from an event that it got to the next core's.

    It begins when the pipeline is admitted, with all replicas. Its member takes them back at once, because they sleep until the desk wakes
    them: these rows `joined` have the id `asleep`.
    """
    own: list[Row] = []
    inside = admitted = False
    for row in rows:
        inside = row["core"] == name if "core" in row.ids else inside
        if inside and row.event == "admitted":
            own, admitted = [Row(metric="begins", time=row.time, ids={"core": name})], True
        elif inside and admitted and row.event == "joined" and is_note(row):
            own.append(replace(row, ids={**row.ids, "asleep": 1}))
        elif inside and row.get("to") != name:
            own.append(row)
    return own
