"""The charts and tables of a sync run: busy time by stage, one sync event by event, transports, and what hashing found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kit.draw.album import Charts, Table
from kit.draw.chart import Mark
from kit.draw.data import RunData, with_attrs
from kit.draw.general import drift_chart
from kit.draw.lanes import Lanes
from kit.draw.levels import Levels
from kit.draw.lines import Lines
from kit.draw.matrix import Matrix
from kit.draw.style import Look
from kit.labs.sync import rules
from kit.machine import MIB
from kit.results import NotMeasured, with_ids
from kit.results.units import amount, counted, sample_counts

# Sending and receiving are two ends of one thing, as are keeping the old weights and applying the new ones. What is short is one: the rest.
STAGES = {
    "gather": Look(0),
    "pack": Look(3),
    "send": Look(1),
    "receive": Look(1, hatch="///"),
    "verify": Look(2),
    "keep": Look(4, "undo copy", hatch="..."),
    "apply": Look(4),
    "teardown": Look(5),
    "rest": Look("faint", "finalize to activate"),
}
SHORT = dict.fromkeys(("gate", "finalize", "publish", "activate"), "rest")
# Which stage an event ends. What leads to any other is drawn as waiting.
ENDS = {"gathered": "gather", "packed": "pack", "sent": "send", "received": "receive", "verified": "verify"}
ENDS |= {"apply": "apply", "applied": "apply", "teardown": "teardown", "end": "rest", **SHORT}
CYCLES = 5  # as many are drawn, the last ones
LANES = 6
PATHS = {"expand": "Expansion", "refresh": "Refresh"}


def sync_stages(data: RunData) -> pd.DataFrame:
    """Two bars for each sync: the sender's stages, and those of the receiver that was last; with the time that passed."""
    table = rules.stages(data.records)
    table = table[table["cycle"].isin(sorted(table["cycle"].unique())[-CYCLES:])]
    bars = []
    for (cycle, path), mine in table.groupby(["cycle", "path"], sort=False):
        sent = mine[mine["who"] == "sender"].set_index("stage")["seconds"]
        took = float(sent["wall"]) if "wall" in sent else math.nan
        place = f"{path}\ntook {amount(took, 's')}" if "wall" in sent else str(path)
        for who, rows in mine.groupby("who", sort=False):
            busy = rows[rows["stage"] != "wall"].groupby(rows["stage"].replace(SHORT))["seconds"].sum()
            bars.append({"place": place, "section": f"cycle {cycle}", "side": who, "mark": took, **busy})
    return pd.DataFrame(bars)


def sync_events(data: RunData) -> pd.DataFrame:
    """A lane for each rank of the last expansion that has events, else of the last refresh: what led to each event in the colour of its
    stage, and its name where it happened. Of many receivers those that took longest."""
    every = rules.all_events(data.records)
    path = next((path for path in reversed(rules.PATHS) if (every["phase"] == path).any()), None)
    if path is None or not has_syncs(data):
        raise NotMeasured("no sync recorded its events")
    cycle = int(every[every["phase"] == path]["cycle"].max())
    events = rules.sync_events(data.records, path, cycle)
    last = events[events["rank"] != 0].groupby("rank")["seconds"].max().sort_values(ascending=False)
    ranks = [0] * bool((events["rank"] == 0).any()) + sorted(int(rank) for rank in last.index[: LANES - 1])
    boxes: list[dict[str, Any]] = []
    for rank in ranks:
        mine, lane = events[events["rank"] == rank], {"lane": lane_name(rank, data.config), "gap": 0.34}
        moments = list(zip(mine["seconds"], mine["event"], strict=True))
        for (left, _), (right, name) in itertools.pairwise(moments):
            boxes.append({**lane, "kind": ENDS.get(name, "waiting"), "left": left, "right": right})
        boxes += [{**lane, "kind": "event", "left": when, "right": when, "words": name} for when, name in moments]
    receivers = events["rank"].nunique() - (0 in ranks)
    shown = f", {len(ranks) - 1} of {receivers} receivers" if receivers > LANES - 1 else ""
    return with_attrs(pd.DataFrame(boxes), path=PATHS[path], cycle=cycle, shown=shown)


def lane_name(rank: int, config: Mapping[str, object]) -> str:
    if rank == 0:
        return "sender, rank 0"
    ranks, replicas, each = (int(str(config[name])) for name in ("ranks", "replicas", "infer_tp"))
    return f"replica {(rank - (ranks - replicas * each)) // each}, rank {rank}"


def rates_by_size(data: RunData) -> pd.DataFrame:
    """Bytes per second against the bucket size, end to end into a receiver's tensors; one large memcpy is the ceiling. The name of a
    transport has its best median; those that this run's syncs used are marked."""
    table, frame = rules.transports(data.records), data.records
    used = frame["phase"].isin(rules.PATHS) & (frame["metric"] == "transport_receivers") & (frame["value"] > 0)
    chosen = set(with_ids(frame[used], "transport")["transport"])
    names = {}
    for row in table.sort_values("rate", ascending=False).drop_duplicates("transport").to_dict("records"):
        share = f", {row['of_memcpy']:.0%} of memcpy" if math.isfinite(row["of_memcpy"]) else ""
        mark = ", used here" if row["transport"] in chosen else ""
        names[row["transport"]] = (
            f"{row['transport']}: best {amount(row['rate'], 'B/s')} at {row['bucket_bytes'] / MIB:g} MiB{share}{mark}"
        )
    swept = frame[frame["phase"] == "sweep"]
    numbers, size = (swept[swept["metric"] == name]["value"] for name in ("rate_samples", "sweep_bytes"))
    ceiling = rules.memcpy(frame)
    columns = {"rate": "value", "rate_low": "low", "rate_high": "high"}
    rows = table.rename(columns=columns).assign(x=table["bucket_bytes"] / MIB, kind=table["transport"].map(names))
    return with_attrs(
        rows,
        ticks={mib: f"{mib:g}" for mib in sorted(rows["x"].unique())},
        marks=[Mark(ceiling, f"one memcpy, {ceiling / 1e9:.3g}", "ink")] if math.isfinite(ceiling) else [],
        n=f"{sample_counts({int(count) for count in numbers})}, median and range" if len(numbers) else "medians",
        size=f", {float(size.iloc[0]) / MIB:.4g} MiB to one receiver" if len(size) else "",
    )


def findings(data: RunData) -> pd.DataFrame:
    """What hashing found, what was served meanwhile, and what has no chart, in sentences."""
    if not has_syncs(data):
        raise NotMeasured("no sync was timed")
    frame = data.records
    lines = [hashed(frame), served(frame)]
    try:
        rules.transports(frame)
    except NotMeasured:
        why = "the run ended before that" if data.config.get("sweep", True) else "sweep is off"
        lines.append((f"Transports were not compared: {why}.", "faint"))
    return pd.DataFrame(
        [
            {"row": line, "column": "", "start": 0.0, "words": words, "tone": tone}
            for line, (words, tone) in enumerate(lines)
        ]
    )


def hashed(frame: pd.DataFrame) -> tuple[str, str]:
    try:
        table = rules.receiver_digests(frame)
    except NotMeasured as why:
        return f"Digests: {why}.", "faint"
    wrong = table[table["differ"] > 0]
    total = f"{table['hashed'].sum():g} tensors hashed on {counted(table['rank'].nunique(), 'receiver')}"
    over = f"over {counted(table['cycle'].nunique(), 'cycle')}"
    if wrong.empty:
        return f"Digests: {total} {over}, 0 differ from the trainer's.", "good"
    first = wrong.iloc[0]
    where = f"first on rank {first['rank']:g} in cycle {first['cycle']:g}"
    return f"Digests: {total} {over}, {wrong['differ'].sum():g} differ from the trainer's, {where}.", "bad"


def served(frame: pd.DataFrame) -> tuple[str, str]:
    rows = frame[frame["phase"] == "refresh"]
    counts = {name: rows[rows["metric"] == name]["value"] for name in ("served", "torn")}
    if counts["served"].empty:
        return "No replica served while weights were refreshed.", "faint"
    forwards, torn = (float(values.sum()) for values in counts.values())
    total = f"{counted(int(forwards), 'forward')} served during refreshes, {torn:g} with weights of mixed versions."
    return f"Meanwhile: {total}", "bad" if torn else "good"


def has_syncs(data: RunData) -> bool:
    timed = data.of("wall")
    return bool(timed[timed["rank"] == 0]["phase"].isin(rules.PATHS).any())


def heading(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp") if config[name] > 1]
    replicas = counted(config["replicas"], "replica") + (f" of {config['infer_tp']}" if config["infer_tp"] > 1 else "")
    where = config["placement"] + (", two Worlds" if config["worlds"] == "two" else "")
    cycles = counted(config["cycles"], "cycle")
    return [", ".join([config["size"], *sizes]), replicas, where, f"transport {config['transport']}", cycles]


SECONDS = ("wall", *rules.SENDER, *(f"receiver {stage}" for stage in rules.RECEIVER))
STAGE = Levels(
    rows=sync_stages,
    title="Sync by stage",
    heading="Stages of each sync, n = 1 each (left: sender; right: last receiver; stages overlap)",
    looks=STAGES,
    mark_word="elapsed time",
    label="busy",
    unit="s",
    height=3.9,
)
EVENTS = Lanes(
    rows=sync_events,
    title="One sync, event by event",
    heading="{path} of cycle {cycle}, event by event{shown}",
    looks={**STAGES, "waiting": Look("grid", "preparing, waiting"), "event": Look("ink", shape="tick", listed=False)},
    about="time since the sender began",
    lane=0.2,
)
RATES = Lines(
    rows=rates_by_size,
    title="GB/s by bucket size",
    heading="Transports by bucket size{size}",
    about="bucket size [MiB] ({n})",
    unit="B/s",
    bars=True,
    x_log=True,
    zero=True,
    height=3.8,
)
CHARTS = Charts(
    plots={
        "stages": STAGE,
        "events": EVENTS,
        "rates": RATES,
        "summary": Matrix(rows=findings, title="Digests and forwards", heading=" ", heads=False),
        "drift": drift_chart(phase="verify"),
    },
    overview=(("stages",), ("events",), ("rates",), ("summary",), ("verdict",)),
    words=heading,
    ready=has_syncs,
    tables={
        "syncs": Table(
            "Every sync", lambda data: rules.syncs(data.records), "wall", {**dict.fromkeys(SECONDS, "s"), "bytes": "B"}
        ),
        "stages": Table("Every stage of every sync", lambda data: rules.stages(data.records), units={"seconds": "s"}),
        "transports": Table(
            "Transports by bucket size",
            lambda data: rules.transports(data.records),
            units={"bucket_bytes": "B", **dict.fromkeys(("rate", "rate_low", "rate_high"), "B/s")},
        ),
        "digests": Table(
            "Digests on the receivers, worst first", lambda data: rules.receiver_digests(data.records), "differ"
        ),
    },
)
