"""The required order of a sync, and the lab's own samples against it: points, versions, routes and attempted forwards.

A successful sync has the points of `rule` on every receiver; `bucket` and `write` come once per bucket, from 0 on. If a rank did not end
the phase, or raised in it, points may be missing at the end: such a sync is compared with the beginning of the rule, up to its undo.
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
SERVED = ("refresh", "stream")  # paths for replicas that are awake
WAITS = "waits"
BY_SYNC = ["cycle", "phase", "path", "sync"]
BY_RANK = ["cycle", "phase", "rank"]


def ended(frame: pd.DataFrame) -> set[tuple[int, str, int]]:
    """The phases (cycle, phase, rank) that ended without an error, so that their records are complete."""
    done, failed = (frame[frame["metric"] == metric][BY_RANK] for metric in ("seconds", "failed"))
    return set(done.itertuples(index=False, name=None)) - set(failed.itertuples(index=False, name=None))


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """Every sample of every sync, with a column for each id, and `whole`: whether the sync is complete."""
    rows = frame[frame["metric"] == "point"].reset_index(drop=True)
    if rows.empty:
        raise Missing("no sync was sampled")
    ids = pd.DataFrame([json.loads(text) for text in rows["ids"]])
    done = ended(frame)
    whole = [key in done for key in rows[BY_RANK].itertuples(index=False, name=None)]
    table = rows.drop(columns="ids").join(ids).assign(whole=whole)
    table = table.sort_values([*BY_SYNC, "rank", "order"], kind="stable")
    undone = (table["point"] == "undo").groupby([table[name] for name in [*BY_SYNC, "rank"]]).cummax()
    return table[table["whole"] | ~undone]


def rule(path: str, buckets: int) -> list[tuple[str, int]]:
    """The points of a sync in the required order."""
    if path == "base":
        return [(name, 0) for name in ("begin", *PUBLISHED)]
    if path == "refresh":
        arrived = [("bucket", index) for index in range(buckets)] + [("verify", 0), ("gate", 0)]
        arrived += [("write", index) for index in range(buckets)]
    else:
        arrived = [(name, index) for index in range(buckets) for name in ("bucket", "write")] + [("verify", 0)]
    return [*((name, 0) for name in BEFORE[path]), *arrived, *((name, 0) for name in AFTER)]


def out_of_order(frame: pd.DataFrame, trainers: int) -> tuple[int, int, str]:
    """The number of receivers' syncs that break the rule, the number of all, and the first problem in words."""
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
            first = first or f"{problem} (rank {rank}, {path} in {phase}, cycle {cycle})"
    return wrong, count, first


def problems(path: str, rows: pd.DataFrame, sender_closed: float) -> Iterator[str]:
    """The problems with one receiver's points in one sync. `sender_closed` is inf if the sender did not close, -inf if that is unknown."""
    found = list(zip(rows["point"], rows["bucket"].astype(int), strict=True))
    wanted = rule(path, sum(name == "bucket" for name, _ in found))
    if found != (wanted if rows["whole"].all() else wanted[: len(found)]):
        place = next(
            (at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
            min(len(found), len(wanted)),
        )
        was = spelled(found[place]) if place < len(found) else "the end of the sync"
        must = spelled(wanted[place]) if place < len(wanted) else "the end of the sync"
        yield f"{was} came instead of {must}"
    if not rows["value"].is_monotonic_increasing:
        yield "the times of the points are not increasing"
    published = rows["point"].isin(PUBLISHED)
    versions = rows["version"].astype(int)
    old, new = versions[~published], versions[published]
    if old.nunique() > 1 or new.nunique() > 1:
        yield f"the version changed at another point than publish: {sorted(set(old))} before it, {sorted(set(new))} from then on"
    elif len(old) and len(new) and new.iloc[0] < old.iloc[0] + (path in SERVED):
        yield f"version {new.iloc[0]} was published while version {old.iloc[0]} was active"
    yield from routes(path, rows)
    if path in SERVED:
        inside = rows[(rows["order"] >= first_order(rows, "gate")) & (rows["order"] < first_order(rows, "end"))]
        early = inside[inside["forward"] != WAITS]
        if len(early):
            yield f"a forward ran at {early['point'].iloc[0]}, between gate and end"
        if WAITS in rows[rows["point"] == "end"]["forward"].to_numpy():
            yield "forwards still waited after the end"
    if path != "base":
        mine = rows[rows["point"] == "close"]["value"]
        if len(mine) and mine.min() < sender_closed:
            never = sender_closed == math.inf
            yield f"the receiver closed its transport, but the sender {'did not' if never else 'closed later'}"


def routes(path: str, rows: pd.DataFrame) -> Iterator[str]:
    """A serving replica has a route throughout; one that pauses or wakes gets it at the end; at the end all have one."""
    routed = rows["routed"].astype(bool)
    active = rows["point"] == "end"
    if not routed[active].all():
        yield "no route at the end"
    elif path == "refresh" and not routed.all():
        yield f"no route at {rows[~routed]['point'].iloc[0]} although the replica serves"
    elif path in {"stream", "expand"}:
        early = rows[routed & ~active & (rows["point"] != "begin")]  # the receiver learns the path with `begin`
        if len(early):
            yield f"a route at {early['point'].iloc[0]}, before the end"


def first_order(rows: pd.DataFrame, point: str) -> float:
    orders = rows[rows["point"] == point]["order"]
    return float(orders.min()) if len(orders) else float("inf")


def spelled(point: tuple[str, int]) -> str:
    name, index = point
    return f"{name} {index}" if name in {"bucket", "write"} else name


def attempts(frame: pd.DataFrame, config: Mapping[str, Any]) -> tuple[pd.DataFrame, list[str]]:
    """Attempted forwards in syncs of awake replicas, and the points of the rule without an attempt."""
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
        missing += [f"{spelled(each)} (rank {rank}, {phase}, cycle {cycle})" for each in wanted if each not in there]
    return table, missing
