"""The tables of a sync run: stages by cycle, transports by bucket size, the order of events, digests.

Each takes `run.frame()` and returns a pandas table; it raises `NotMeasured` if the run ended before.
"""

from __future__ import annotations

import pandas as pd

from kit.results import NotMeasured, with_ids

PATHS = ("refresh", "expand")
SENDER = ("gather", "pack", "send", "verify", "apply", "teardown", "finalize", "publish", "activate")
RECEIVER = ("receive", "verify", "keep", "gate", "apply", "teardown", "finalize")
MEMCPY = "memcpy"


def stages(frame: pd.DataFrame) -> pd.DataFrame:
    """Busy seconds of the sender and of the slowest receiver of each sync: cycle, path, who, rank, stage, seconds.

    The stage `wall` is the elapsed time; stages overlap, so their sum may be larger.
    """
    rows = frame[frame["phase"].isin(PATHS) & frame["value"].notna()]
    busy = with_ids(rows[rows["metric"] == "stage_seconds"], "stage")
    rows = pd.concat([busy, rows[rows["metric"] == "wall"].assign(stage="wall")])
    received = rows[rows["rank"] != 0]
    walls = received[received["stage"] == "wall"]
    slowest = walls.loc[walls.groupby(["cycle", "phase"])["value"].idxmax(), ["cycle", "phase", "rank"]]
    found = pd.concat(
        [rows[rows["rank"] == 0].assign(who="sender"), received.merge(slowest).assign(who="receiver")],
        ignore_index=True,
    )
    if found.empty:
        raise NotMeasured("no sync was timed")
    found = found.rename(columns={"phase": "path", "value": "seconds"})
    found = found[["cycle", "path", "who", "rank", "stage", "seconds"]]
    order = found["path"].map(PATHS.index)
    return (
        found.assign(order=order)
        .sort_values(["cycle", "order"], kind="stable", ignore_index=True)
        .drop(columns="order")
    )


def syncs(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per sync: bytes, buckets, elapsed time, and busy seconds of the sender and the slowest receiver by stage."""
    busy = stages(frame)
    rows = frame[(frame["rank"] == 0) & frame["phase"].isin(PATHS)]
    found = []
    for (cycle, path), mine in busy.groupby(["cycle", "path"], sort=False):
        here = rows[(rows["cycle"] == cycle) & (rows["phase"] == path)]
        totals = here[here["ids"] == ""].set_index("metric")["value"]
        sent, received = (mine[mine["who"] == who].set_index("stage")["seconds"] for who in ("sender", "receiver"))
        by = with_ids(here[here["metric"] == "transport_receivers"], "transport")
        names = [f"{name} to {count:g}" for name, count in zip(by["transport"], by["value"], strict=True) if count]
        found.append(
            {
                "cycle": cycle,
                "path": path,
                "transport": ", ".join(names),
                "bytes": totals.get("bytes"),
                "buckets": totals.get("buckets"),
                "wall": sent.get("wall"),
                **{stage: sent[stage] for stage in SENDER if stage in sent},
                **{f"receiver {stage}": received[stage] for stage in RECEIVER if stage in received},
            }
        )
    return pd.DataFrame(found)


def transports(frame: pd.DataFrame) -> pd.DataFrame:
    """Every transport and size of bucket that was tried on synthetic bytes: bytes a second, and its share of one large memcpy."""
    rows = swept(frame, "rate", "transport", "bucket_size")
    rows = rows[(rows["rank"] == 0) & rows["value"].notna()]
    if rows.empty:
        raise NotMeasured("transports were not compared")
    found = rows.rename(columns={"value": "rate", "bucket_size": "bucket_bytes"})[["transport", "bucket_bytes", "rate"]]
    return found.assign(of_memcpy=found["rate"] / memcpy(frame)).sort_values(
        ["transport", "bucket_bytes"], ignore_index=True
    )


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """Each transport at the size of bucket that suits it best, the fastest first."""
    found = transports(frame)
    return found.loc[found.groupby("transport")["rate"].idxmax()].sort_values(
        "rate", ascending=False, ignore_index=True
    )


def memcpy(frame: pd.DataFrame) -> float:
    """Bytes a second of one copy of the same bytes; NaN where it was not measured."""
    rows = swept(frame, "rate", "transport")
    values = rows[rows["transport"] == MEMCPY]["value"]
    return float(values.median()) if len(values) else float("nan")


def swept(frame: pd.DataFrame, metric: str, *ids: str) -> pd.DataFrame:
    """Records of the comparison of transports that have these ids."""
    return with_ids(frame[(frame["phase"] == "sweep") & (frame["metric"] == metric)], *ids)


def events(frame: pd.DataFrame, path: str, cycle: int) -> pd.DataFrame:
    """What happened on each rank, in its order: rank, order, event, seconds since the sender began."""
    rows = all_events(frame)
    rows = rows[(rows["phase"] == path) & (rows["cycle"] == cycle)]
    if rows.empty:
        raise NotMeasured(f"no events of {path} in cycle {cycle}")
    found = rows.rename(columns={"value": "seconds"})
    return found.sort_values(["rank", "order"], ignore_index=True)[["rank", "order", "event", "seconds"]]


def all_events(frame: pd.DataFrame) -> pd.DataFrame:
    """The records of events of every sync, with columns for the event and its order on its rank."""
    return with_ids(frame[frame["metric"] == "event"], "event", "order")


def digests(frame: pd.DataFrame) -> pd.DataFrame:
    """Tensors that each receiver hashed after a cycle, and how many were not the sender's: cycle, rank, hashed, differ."""
    rows = frame[(frame["phase"] == "verify") & frame["metric"].isin(["tensors_hashed", "tensors_differ"])]
    if rows.empty:
        raise NotMeasured("no tensor was hashed on a receiver")
    wide = rows.pivot_table(index=["cycle", "rank"], columns="metric", values="value").reset_index()
    wide = wide.rename(columns={"tensors_hashed": "hashed", "tensors_differ": "differ"}).rename_axis(columns=None)
    return wide.reindex(columns=["cycle", "rank", "hashed", "differ"]).astype({"hashed": "Int64", "differ": "Int64"})
