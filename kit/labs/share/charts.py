"""The charts of a share run: devices and their owners with requests, utilisation, versions, memory, and whole loops.

Colour is the pipeline in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kit.draw.album import Charts, Table
from kit.draw.chart import Limit, Mark, Plot
from kit.draw.data import RunData, with_attrs
from kit.draw.lanes import Lanes
from kit.draw.levels import Levels
from kit.draw.lines import Lines
from kit.draw.style import Look
from kit.labs.share import tables
from kit.labs.share.ledgers import share_config, spans
from kit.machine import MIB
from kit.results import NotMeasured
from kit.results.records import flat
from kit.results.units import amount, counted, size
from kit.share.judge.books import DeskLedger
from kit.stream.ports import replica_number

DEVICES, USED, FILLED = 16, 8, 4  # at most as many devices have lanes, lanes of utilisation, and a chart of memory
REPLICAS = 8  # at most as many replicas of a pipeline have lanes of versions
BINS = 80
BY = {"cpu": "CPU time", "gpu": "GPU busy"}
LOOPS = {
    "shared": "shared: this config",
    "bound": "bound: arithmetic",
    "serial": "serial: one after the other",
    "static": "static: half each",
}


class Loop(NamedTuple):
    """The loop that is drawn."""

    phase: str
    book: DeskLedger
    names: list[str]
    began: float
    ended: float

    def devices(self, most: int) -> range:
        return range(min(self.book.limit("devices", 0), most))

    def attrs(self, most: int = 0) -> dict[str, Any]:
        """For titles and the axis of time; `shown` says if not all devices have a lane."""
        count = self.book.limit("devices", 0)
        shown = f", the first {most} of {count} devices" if 0 < most < count else ""
        return {"phase": self.phase, "shown": shown, "ended": self.ended - self.began}


def loop_of(data: RunData) -> Loop:
    phase = tables.shown(data.records)
    if phase is None or not data.order:
        raise NotMeasured("no replica woke in any phase")
    book = tables.ledger(data.records, phase)
    return Loop(phase, book, tables.pipelines(book), *tables.ends(book))


def device_uses(data: RunData) -> pd.DataFrame:
    return tables.uses(loop_of(data).book)


def lanes(loop: Loop, boxes: Sequence[dict[str, Any]], **attrs: Any) -> pd.DataFrame:
    """Boxes in seconds since the loop began, with the pipelines in order before other kinds."""
    kinds = dict.fromkeys([*map(kind_of, loop.names), *(box["kind"] for box in boxes)])
    table = pd.DataFrame(boxes, columns=None if boxes else ["lane", "kind", "left", "right"])
    table = table.assign(kind=table["kind"].astype(pd.CategoricalDtype(list(kinds))))
    table[["left", "right"]] -= loop.began
    return with_attrs(table, **{**loop.attrs(), **attrs})


def kind_of(pipeline: str) -> str:
    return f"pipeline {pipeline}"


# -- devices and requests ------------------------------------------------------------------------------------------------


def device_lanes(data: RunData) -> pd.DataFrame:
    """One lane per device: its owner, and whether the owner trains, generates, moves in or out, or is idle."""
    loop, uses = loop_of(data), data.table(device_uses)
    states = {"training": "training", "generating": "generating", "waiting": "owner without work"}
    boxes: list[dict[str, Any]] = []
    uses = uses[uses["device"].isin(loop.devices(DEVICES)) & (uses["use"] != "idle")]
    for row in uses.sort_values("device", kind="stable").to_dict("records"):
        box = {
            "lane": f"device {row['device']}",
            "kind": kind_of(row["pipeline"]),
            "left": row["left"],
            "right": row["right"],
        }
        state = states.get(row["use"], "falls asleep, wakes, gets weights")
        boxes.append({**box, "state": state, "low": 0.4 if row["use"] == "generating" else 0.0})
        if row["use"] == "generating":  # the upper part belongs to it too
            boxes.append({**box, "state": "owner without work", "high": 0.4})
    for devices, left, right in tables.syncs(loop.book):
        strips = [device for device in devices if device in loop.devices(DEVICES)]
        boxes += [
            {"lane": f"device {device}", "kind": "sync of weights", "left": left, "right": right, "low": 0.82}
            for device in strips
        ]
    for device, pipeline, step, left in step_begins(loop):
        if device in loop.devices(DEVICES):
            moment = {"lane": f"device {device}", "kind": kind_of(pipeline), "left": left, "right": left}
            boxes.append({**moment, "words": f"step {step}|{step}"})
    return lanes(loop, boxes, **loop.attrs(DEVICES))


def step_begins(loop: Loop) -> Iterator[tuple[int, str, int, float]]:
    """Where each step begins on each device of its trainer: device, pipeline, step, time."""
    calls = list(tables.training(loop.book))
    seen: set[tuple[int, str, int]] = set()
    for span in spans(loop.book):
        for call in calls if span.role == "trainer" else ():
            if call.pipeline == span.pipeline and span.left <= call.left < span.right:
                for key in {(device, call.pipeline, call.step) for device in span.devices} - seen:
                    seen.add(key)
                    yield *key, call.left


def request_lanes(data: RunData) -> pd.DataFrame:
    """One lane per pipeline and cluster: waits as boxes, grants as ticks, leases as thin lines."""
    loop = loop_of(data)
    waits = tables.waits(loop.book)
    order = {name: place for place, name in enumerate(loop.names)}
    keys = sorted(
        {(wait.pipeline, wait.cluster) for wait in waits},
        key=lambda key: (order.get(key[0], len(order)), key[1] == "generation", key[1]),
    )
    boxes: list[dict[str, Any]] = []
    for wait in waits:
        box = {"lane": f"{wait.pipeline} {wait.cluster}", "left": wait.left, "right": wait.right}
        state = "all replicas sleep with work left" if wait.kind == "suspended" else ""
        boxes.append({**box, "kind": kind_of(wait.pipeline), "state": state})
        if wait.end == "granted" and wait.kind not in ("suspended", "admission"):
            boxes.append({**box, "kind": "grant", "left": wait.right})
    for span in spans(loop.book):
        cluster = "generation" if span.role.startswith("replica") else span.role
        if (span.pipeline, cluster) in keys:
            lane = {
                "lane": f"{span.pipeline} {cluster}",
                "kind": kind_of(span.pipeline),
                "left": span.left,
                "right": span.right,
            }
            boxes.append({**lane, "state": "lease", "low": 0.4, "high": 0.6})
    places = {f"{pipeline} {cluster}": place for place, (pipeline, cluster) in enumerate(keys)}
    boxes.sort(key=lambda box: places[box["lane"]])
    longest = max((wait.right - wait.left for wait in waits), default=0.0)
    return lanes(loop, boxes, longest=amount(longest, "s"))


# -- utilisation ---------------------------------------------------------------------------------------------------------


def utilisation(data: RunData) -> pd.DataFrame:
    """One lane per device; full height means that the owner works all the time. After it the share of work, and how busy the device was."""
    loop, uses = loop_of(data), data.table(device_uses)
    idle = {"switching": "switching", "waiting": "owner without work", "idle": ""}
    uses = uses.assign(kind=uses["use"].map(idle).fillna(uses["pipeline"].map(kind_of)))
    kinds = [*map(kind_of, loop.names), "switching", "owner without work"]
    paced = any(value for name, value in flat(data.config).items() if name.endswith("pace_ms"))
    measured = tables.utilisation(data.records, loop.phase, paced=paced).set_index("device")
    edges, total = np.linspace(loop.began, loop.ended, BINS + 1), max(loop.ended - loop.began, 1e-9)
    boxes: list[dict[str, Any]] = []
    for device in loop.devices(USED):
        mine, lane, reached = uses[uses["device"] == device], {"lane": f"device {device}"}, np.ones(BINS)
        for kind in kinds:
            share = np.zeros(BINS)
            for left, right in mine[mine["kind"] == kind][["left", "right"]].to_numpy():
                share += np.clip(np.minimum(right, edges[1:]) - np.maximum(left, edges[:-1]), 0, None)
            lower, reached = reached, reached - share / np.diff(edges)
            for place in np.flatnonzero(share):
                box = {"left": edges[place], "right": edges[place + 1], "low": reached[place], "high": lower[place]}
                boxes.append({**lane, "kind": kind, **box})
        at_work = mine[mine["kind"].isin(kinds[:-2])]["seconds"].sum() / total
        source, used = str(measured["by"][device]), float(measured["used"][device])
        words = f"{at_work:.0%} at work" + ("" if source == "work" else f", {used:.0%} {BY[source]}")
        boxes.append({**lane, "kind": "used", "left": loop.ended, "right": loop.ended, "words": words})
    return lanes(loop, boxes, bin=amount(total / BINS, "s"), **loop.attrs(USED))


# -- versions ------------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    pipeline: str
    role: str
    version: int  # -1: it has no weights yet
    left: float
    right: float


def stretches_of(loop: Loop) -> list[Stretch]:
    """Where each version was: on a trainer from the step that made it, on a replica from its publication until the replica leaves."""
    stretches: list[Stretch] = []

    def add(name: str, role: str, changes: Sequence[tuple[float, int]], ended: float) -> None:
        ends = [*(when for when, _ in changes[1:]), ended]
        for (left, version), right in zip(changes, ends, strict=True):
            stretches.append(Stretch(name, role, version, left, right))

    for name in loop.names:
        made = [(row.time, int(row["version"])) for row in loop.book.of("bumped") if row.who == name]
        add(name, "trainer", [(loop.began, 0), *made], max(row.time for row in loop.book.rows if row.who == name))
    published = tables.weights(loop.book)
    for span in spans(loop.book):
        if span.state == "awake":
            mine = [change for change in published[span.pipeline, span.role] if span.left <= change[0] <= span.right]
            add(span.pipeline, span.role, [(span.left, -1), *mine], span.right)
    return stretches


def version_lanes(data: RunData) -> pd.DataFrame:
    loop = loop_of(data)
    stretches = stretches_of(loop)
    boxes: list[dict[str, Any]] = []
    for name in loop.names:
        replicas = {stretch.role for stretch in stretches if stretch.pipeline == name and stretch.role != "trainer"}
        shown = sorted(replicas, key=replica_number)[:REPLICAS]
        for role in ("trainer", *shown):
            lane = {"lane": f"{name} {role}", "kind": kind_of(name), "gap": 0.15 if role == "trainer" else 0.07}
            for stretch in stretches:
                if (stretch.pipeline, stretch.role) == (name, role):
                    state = (
                        "awake, without weights" if stretch.version < 0 else "odd" if stretch.version % 2 else "even"
                    )
                    words = "" if stretch.version < 0 else f"v{stretch.version}|{stretch.version}"
                    boxes.append({**lane, "state": state, "words": words, "left": stretch.left, "right": stretch.right})
    return lanes(loop, boxes)


# -- memory --------------------------------------------------------------------------------------------------------------


def memory_over_time(data: RunData) -> pd.DataFrame:
    """For each device the MiB of each pipeline above the minimum of each rank, which is its process without a model. The budget is the
    maximum of one rank."""
    loop = loop_of(data)
    table, parts = tables.memory(data.records, loop.phase), []
    for device in loop.devices(FILLED):
        mine = table[table["device"] == device]
        mine = mine.assign(time=mine["time"].clip(lower=loop.began))
        least = mine.groupby("who")["bytes"].min()
        above = mine.assign(bytes=(mine["bytes"] - mine["who"].map(least)) / MIB)
        levels = above.pivot_table(index="time", columns="who", values="bytes", aggfunc="last").ffill().fillna(0.0)
        last = max([loop.ended, *levels.index])
        levels = pd.concat([levels, levels.iloc[-1:].set_axis([last])]) if len(levels) else levels
        owners = mine.drop_duplicates("who").set_index("who")["pipeline"]
        by_pipeline = levels.T.groupby(owners).sum().T.reindex(columns=loop.names, fill_value=0.0)
        lines = by_pipeline.rename_axis("x").reset_index().melt("x", var_name="kind")
        title = f"Device {device}: bytes of its ranks above their minimum ({size(float(least.sum()))})"
        parts.append(lines.assign(panel=title, base=float(above["bytes"].max()), x=lines["x"] - loop.began))
    rows = pd.concat(parts)
    return with_attrs(rows.assign(kind=rows["kind"].map(kind_of)), **loop.attrs(FILLED))


# -- loops ---------------------------------------------------------------------------------------------------------------


def loop_times(data: RunData) -> pd.DataFrame:
    table, names, words = tables.loops(data.records), [], []
    for row in table.to_dict("records"):
        loop, calculated = str(row["loop"]), row["known by"] == "arithmetic"
        names.append(LOOPS.get(loop, loop) + (" (arithmetic)" if calculated and loop != "bound" else ""))
        compared = loop in ("shared", "serial", "static") and row["times bound"] > 0
        words.append(amount(row["seconds"], "s") + (f", {row['times bound']:.2f} x bound" if compared else ""))
    marks = [Mark(float(seconds), "", "bad") for seconds in table[table["loop"] == "bound"]["seconds"]]
    columns = {"seconds": "value", "known by": "kind"}
    return with_attrs(table.rename(columns=columns).assign(place=names, words=words), marks=marks)


def device_waits(data: RunData) -> pd.DataFrame:
    loop = loop_of(data)
    table = tables.requests(data.records, loop.phase)
    kinds = pd.CategoricalDtype([*dict.fromkeys([*loop.names, *table["pipeline"]])])
    words = [f"{requests} x" for requests in table["requests"]]
    return table.assign(
        place=table["pipeline"] + " " + table["kind"],
        kind=table["pipeline"].astype(kinds),
        value=table["mean wait"],
        words=words,
        low=table["mean wait"],
        high=table["longest wait"],
    )


def heading(data: RunData) -> list[str]:
    config = data.config
    if "devices" not in config:  # another system's ledger
        return []
    loops = share_config(config).loops  # whichever way the settings of a pipeline are written
    trains = ", ".join(f"{name} on {device_numbers(loop.train)}" for name, loop in loops.items() if loop.train)
    steps = " and ".join(str(loop.steps) for loop in loops.values())
    return [
        config["size"], counted(config["devices"], "device"), f"training: {trains}",
        f"planner {config['planner']}", f"{steps} steps",
    ]  # fmt: skip


def device_numbers(numbers: Sequence[int]) -> str:
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2
    return f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))


def seconds_in(*columns: str) -> dict[str, str]:
    return dict.fromkeys(columns, "s")


SWITCHES = (
    "falls asleep, wakes, gets weights",
    "awake, without weights",
    "switching",
    "all replicas sleep with work left",
)
SWITCHING = dict.fromkeys(SWITCHES, Look("faint", hatch="////", alpha=0.75))
WITHOUT_WORK = {"owner without work": Look("faint", alpha=0.3)}
SINCE = "time since the loop began"
OWNERS = Lanes(
    rows=device_lanes,
    heading="Phase {phase}: owner of each device (full bar = trains, low bar = generates){shown}",
    looks={
        **dict.fromkeys(("training", "generating"), Look("faint", listed=False)),
        **SWITCHING,
        **WITHOUT_WORK,
        "sync of weights": Look("ink"),
    },
    about=SINCE,
    lane=0.4,
)
REQUESTS = Lanes(
    rows=request_lanes,
    heading="Requests: bar = wait (longest {longest}), | = grant, line = lease",
    looks={**SWITCHING, "lease": Look("faint", listed=False), "grant": Look("ink", shape="tick", listed=False)},
    about=SINCE,
    lane=0.17,
)
UTILISATION = Lanes(
    rows=utilisation,
    title="Utilisation of devices",
    heading="Utilisation of each device by its owner's work (bins of {bin}){shown}",
    looks={**SWITCHING, **WITHOUT_WORK, "used": Look("ink", shape="words", listed=False)},
    about=SINCE,
    lane=0.5,
)
VERSIONS = Lanes(
    rows=version_lanes,
    title="Versions over time, by replica",
    heading="Phase {phase}: weight version of each trainer and each awake replica",
    looks={
        **SWITCHING,
        "odd": Look(alpha=0.4, inside=True, listed=False),
        "even": Look(alpha=0.75, inside=True, listed=False),
    },
    about=SINCE,
    lane=0.2,
)
MEMORY = Lines(
    rows=memory_over_time,
    heading="{panel}{shown}",
    limits=(Limit("peak_fits", "budget {at:.4g} MiB: maximum of one rank plus noise"),),
    label="[MiB]",
    about=SINCE,
    x_unit="s",
    stacked=True,
    height=1.8,
)
LOOP_TIMES = Levels(
    rows=loop_times,
    heading="Time of each loop over the same work",
    looks={"measured": Look(2), "arithmetic": Look("faint")},
    across=True,
    label="time (n = 1 each)",
    unit="s",
)
WAITS = Levels(
    rows=device_waits,
    heading="Waits for devices",
    legend=False,
    across=True,
    label="time: mean (bar) and longest (line)",
    unit="s",
)
CHARTS = Charts(
    plots={
        "devices": Plot("Devices, owners and requests", [OWNERS, REQUESTS], below=True),
        "utilisation": UTILISATION,
        "versions": VERSIONS,
        "device-memory": Plot("Memory of devices", [MEMORY], below=True),
        "loops": Plot("Loops and waits", [LOOP_TIMES, WAITS]),
    },
    overview=(("devices",), ("utilisation",), ("versions",), ("device-memory",), ("loops",), ("verdict",)),
    words=heading,
    ready=lambda data: bool(data.order) and tables.shown(data.records) is not None,
    tables={
        "leases": Table(
            "Devices and their owners",
            lambda data: tables.leases(data.records),
            "unused",
            seconds_in("seconds", *tables.USES[:-1], "unused"),
        ),
        "idle": Table(
            "Idle devices by cause", lambda data: tables.idle(data.records), units=seconds_in(*tables.CAUSES)
        ),
        "switches": Table(
            "Every switch",
            lambda data: tables.switches(data.records),
            "total",
            seconds_in("at", "shrink", "expand", "weights", "total"),
        ),
        "requests": Table(
            "Requests for devices",
            lambda data: tables.requests(data.records),
            "longest wait",
            seconds_in("mean wait", "longest wait", "waited"),
        ),
        "pipelines": Table(
            "Every pipeline",
            lambda data: tables.progress(data.records),
            "seconds",
            seconds_in("seconds", "alone", "device-seconds", "working", "switching", "waited"),
        ),
        "loops": Table("Loop by loop", lambda data: tables.loops(data.records), units=seconds_in("seconds")),
    },
)
