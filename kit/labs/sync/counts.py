"""What the lab's own samples of syncs come to: points in the order of the rule, versions, routes, and forwards that were attempted at each.

A sync that succeeds has these points on every receiver, by path; `bucket` and `write` come once a bucket, from 0 on. Of a phase that a
rank did not end, or that raised there, points may be missing at the end: such a sync is held against the beginning of the rule, up to
where it was undone.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.results import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AFTER = ("apply", "close", "closed", "teardown", "derive", "finalize", "publish", "activate", "end")
BEFORE = {
    "refresh": ("begin", "open"),
    "stream": ("begin", "gate", "open"),
    "expand": ("begin", "wake", "open"),
}
PUBLISHED = ("publish", "activate", "end")
SERVED = ("refresh", "stream")  # paths of replicas that are awake
WAITS = "waits"
BY_SYNC = ["cycle", "phase", "path", "sync"]
BY_RANK = ["cycle", "phase", "rank"]


def ended(frame: pd.DataFrame) -> set[tuple[int, str, int]]:
    """Phases by cycle and rank that came to their end without an error: what was recorded of them is all that there is."""
    done, failed = (frame[frame["metric"] == metric][BY_RANK] for metric in ("seconds", "failed"))
    return set(done.itertuples(index=False, name=None)) - set(failed.itertuples(index=False, name=None))


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """Every sample of every sync: a column for each of its ids, and whether the sync is `whole`."""
    rows = frame[frame["metric"] == "point"].reset_index(drop=True)
    if rows.empty:
        raise Missing("no point of any sync was sampled")
    ids = pd.DataFrame([json.loads(text) for text in rows["ids"]])
    done = ended(frame)
    whole = [key in done for key in rows[BY_RANK].itertuples(index=False, name=None)]
    table = rows.drop(columns="ids").join(ids).assign(whole=whole)
    table = table.sort_values([*BY_SYNC, "rank", "order"], kind="stable")
    undone = (table["point"] == "undo").groupby([table[name] for name in [*BY_SYNC, "rank"]]).cummax()
    return table[table["whole"] | ~undone]


def rule(path: str, buckets: int) -> list[tuple[str, int]]:
    """The points of a sync in their order."""
    if path == "base":
        return [(name, 0) for name in ("begin", *PUBLISHED)]
    if path == "refresh":
        arrived = [("bucket", index) for index in range(buckets)] + [("verify", 0), ("gate", 0)]
        arrived += [("write", index) for index in range(buckets)]
    else:
        arrived = [(name, index) for index in range(buckets) for name in ("bucket", "write")] + [("verify", 0)]
    return [*((name, 0) for name in BEFORE[path]), *arrived, *((name, 0) for name in AFTER)]


def out_of_order(frame: pd.DataFrame, trainers: int) -> tuple[int, int, str]:
    """Receivers' syncs that break the rule, of how many, and the first of them in words."""
    table = points(frame)
    wrong, count, first = 0, 0, ""
    done = ended(frame)
    closed = table[(table["rank"] == 0) & (table["point"] == "closed")].groupby(BY_SYNC)["value"].max()
    for (cycle, phase, path, sync, rank), rows in table[table["rank"] >= trainers].groupby([*BY_SYNC, "rank"]):
        count += 1
        end = closed.get((cycle, phase, path, sync), math.inf if (cycle, phase, 0) in done else -math.inf)
        problem = next(problems(str(path), rows, end), "")
        if problem:
            wrong += 1
            first = first or f"{path} in phase {phase} of cycle {cycle} on rank {rank}: {problem}"
    return wrong, count, first


def problems(path: str, rows: pd.DataFrame, sender_closed: float) -> Iterator[str]:
    """What is wrong with one receiver's points in one sync. Infinite is a close of the sender's that never came, or that may have."""
    found = list(zip(rows["point"], rows["bucket"].astype(int), strict=True))
    wanted = rule(path, sum(name == "bucket" for name, _ in found))
    if found != (wanted if rows["whole"].all() else wanted[: len(found)]):
        place = next(
            (at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
            min(len(found), len(wanted)),
        )
        was = spelled(found[place]) if place < len(found) else "nothing"
        must = spelled(wanted[place]) if place < len(wanted) else "nothing"
        yield f"{was} where {must} must come"
    if not rows["value"].is_monotonic_increasing:
        yield "times go back"
    published = rows["point"].isin(PUBLISHED)
    versions = rows["version"].astype(int)
    old, new = versions[~published], versions[published]
    if old.nunique() > 1 or new.nunique() > 1:
        yield f"version {sorted(set(old))} before it was published and {sorted(set(new))} after"
    elif len(old) and len(new) and new.iloc[0] < old.iloc[0] + (path in SERVED):
        yield f"version {new.iloc[0]} was published after version {old.iloc[0]}"
    yield from routes(path, rows)
    if path in SERVED:
        inside = rows[(rows["order"] >= first_order(rows, "gate")) & (rows["order"] < first_order(rows, "end"))]
        early = inside[inside["forward"] != WAITS]
        if len(early):
            yield f"a forward ran at {early['point'].iloc[0]}, between gate and end"
    if path != "base":
        mine = rows[rows["point"] == "close"]["value"]
        if len(mine) and mine.min() < sender_closed:
            never = sender_closed == math.inf
            yield "the sender's transport was not closed" if never else "its transport was closed before the sender's"


def routes(path: str, rows: pd.DataFrame) -> Iterator[str]:
    """A replica that serves is routed to throughout; one that paused or woke from the end on; and then all are."""
    routed = rows["routed"].astype(bool)
    active = rows["point"] == "end"
    if not routed[active].all():
        yield "not routed to at the end"
    elif path == "refresh" and not routed.all():
        yield f"not routed to at {rows[~routed]['point'].iloc[0]}, although it serves"
    elif path in {"stream", "expand"}:
        early = rows[routed & ~active & (rows["point"] != "begin")]  # it is told with `begin`
        if len(early):
            yield f"routed to at {early['point'].iloc[0]}, before the end"


def first_order(rows: pd.DataFrame, point: str) -> float:
    orders = rows[rows["point"] == point]["order"]
    return float(orders.min()) if len(orders) else float("inf")


def spelled(point: tuple[str, int]) -> str:
    name, index = point
    return f"{name} {index}" if name in {"bucket", "write"} else name


def attempts(frame: pd.DataFrame, config: Mapping[str, Any]) -> tuple[pd.DataFrame, list[str]]:
    """Attempts at a forward in syncs of replicas that serve, and the points of the rule at which there was none."""
    table = points(frame)
    table = table[
        table["path"].isin(SERVED) & (table["rank"] >= config["ranks"] - config["infer_tp"] * config["replicas"])
    ]
    if table.empty:
        raise Missing("no replica was awake in any sync")
    missing = []
    for (cycle, phase, path, _, rank), rows in table[table["whole"]].groupby([*BY_SYNC, "rank"]):
        tried = rows[rows["forward"].isin([WAITS]) | rows["forward"].str.startswith(("version", "no version"))]
        there = set(zip(tried["point"], tried["bucket"].astype(int), strict=True))
        wanted = rule(str(path), max(1, sum(rows["point"] == "bucket")))
        missing += [
            f"{spelled(each)} on rank {rank} in phase {phase} of cycle {cycle}" for each in wanted if each not in there
        ]
    return table, missing
