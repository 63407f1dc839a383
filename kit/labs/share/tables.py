"""The tables of a share run, read from the ledger of a phase: devices and their owners, switches, requests, pipelines, loops.

Each takes `run.frame()` and returns a pandas table; it raises `NotMeasured` if the run ended before. `phase` names the loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from kit.labs.share.lab import ALONE, MAIN
from kit.labs.share.ledgers import (
    HolderSpan,
    machines_of,
    memory_source,
    over_time,
    recorded_on_ranks,
    runs,
    seats,
    spans,
)
from kit.results import NotMeasured
from kit.results.frames import event_rows
from kit.results.ledger import PerFrame
from kit.results.records import Row, numbers
from kit.share.judge.books import Books, DeskLedger, Request, cluster_of, replica_of, request_of
from kit.share.judge.demand import has_work, is_needy, sleeping_bundles
from kit.share.judge.stuck import device_requests, flights
from kit.share.state import GENERATION
from kit.stream.ports import TRAINER, calls, covered

USES = ("training", "generating", "waiting", "switching", "idle")
NOBODY = "-"
CAUSES = ("no request", "switch", "starved", "planner")  # of idle devices


# -- the ledger ------------------------------------------------------------------------------------------------------------


def shown(frame: pd.DataFrame) -> str | None:
    """The loop to draw: `shared` if a replica woke in it, else the last phase in which one did."""
    happened = event_rows(frame)
    woken = happened[happened["metric"] == "expanded"]
    if len(woken) and not (woken["lab"] == "share").any():
        return MAIN  # another system's ledger
    phases = woken["phase"]
    return MAIN if (phases == MAIN).any() else str(phases.iloc[-1]) if len(phases) else None


_ledgers = PerFrame(lambda frame, phase: DeskLedger([row for part in runs(frame, phase) for row in part])).of


def ledger(frame: pd.DataFrame, phase: str = MAIN) -> DeskLedger:
    book = _ledgers(frame, phase)
    if not book.rows:
        raise NotMeasured(f"the phase {phase} has no ledger")
    return book


def pipelines(book: DeskLedger) -> list[str]:
    """The registered pipelines in order; without a desk, those with events."""
    return list(dict.fromkeys(row.who for row in book.of("clusters") or book.of("sent", "trained")))


def ends(book: DeskLedger) -> tuple[float, float]:
    return book.rows[0].time, book.rows[-1].time


# -- who has the devices ---------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A replica with requests, or a call of the trainer for its `step`."""

    pipeline: str
    role: str
    part: str  # generating, training or logprobs
    left: float
    right: float
    step: int = -1


def work(book: DeskLedger) -> list[Work]:
    """A replica works while it has open requests that wait for no tool. When it leaves, they go elsewhere."""
    busy = over_time(decoded(book), lambda flying: {replica_of(sent): True for sent in flying})
    generating = [Work(name, f"replica {number}", "generating", left, right) for (name, number), _, left, right in busy]
    return [*generating, *training(book)]


def decoded(book: DeskLedger) -> Iterator[tuple[Row, list[Row]]]:
    """Each row, and each end of a tool call, with the rows that sent the requests which wait for no tool before it."""
    answered: dict[Request, float] = {}
    for row, flying in flights(book):
        for request, when in sorted(answered.items(), key=lambda call: call[1]):
            if when <= row.time:
                yield replace(row, time=when), [sent for key, sent in flying.items() if key not in answered]
                del answered[request]
        yield row, [sent for key, sent in flying.items() if key not in answered]
        if row.event == "tool_called":
            answered[request_of(row)] = row.time + row.number("ms") / 1000
        elif row.event == "sent":  # again, elsewhere
            answered.pop(request_of(row), None)


def training(book: DeskLedger) -> Iterator[Work]:
    for call in calls(book.rows):
        if call.row.event in TRAINER:
            part, step = TRAINER[call.row.event], call.row.number("step", -1)
            yield Work(call.row.who, "trainer", part, call.left, call.right, step)


def weights(book: DeskLedger) -> dict[tuple[str, str], list[tuple[float, int]]]:
    published: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for row in book.of("published"):
        published[row.who, f"replica {row['replica']}"].append((row.time, int(row["version"])))
    return published


def syncs(book: DeskLedger) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """The transfer of weights to a replica, until it publishes their version: its devices, left, right."""
    began: dict[str, float] = {}
    place = seats(book)
    for row in book.of("sync_begin", "published"):
        if row.event == "sync_begin":
            began[row.who] = row.time
        else:
            devices = place.get(f"{row.who}.replica {row['replica']}", ())
            yield devices, began.get(row.who, row.time), row.time


def uses(book: DeskLedger) -> pd.DataFrame:
    """All of the time of every device: device, pipeline, what, use, left, right, seconds.

    `switching`: a replica falls asleep, wakes or waits for its first weights; `waiting`: the owner has no work.
    """
    began, ended = ends(book)
    leased = sorted(spans(book), key=lambda span: span.left)
    by: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for call in sorted(work(book), key=lambda call: call.left):
        by[call.pipeline, call.role].append(call)
    published = weights(book)
    used: list[tuple[int, str, str, str, float, float]] = []
    for device in range(book.limit("devices", 0)):
        reached = began
        for span in [span for span in leased if device in span.devices]:
            used.append((device, NOBODY, "", "idle", reached, span.left))
            parts = of_span(span, by[span.pipeline, span.role], published[span.pipeline, span.role])
            used += [(device, span.pipeline, span.role, *part) for part in parts]
            reached = max(reached, span.right)
        used.append((device, NOBODY, "", "idle", reached, ended))
    table = pd.DataFrame(used, columns=["device", "pipeline", "what", "use", "left", "right"])
    table = table[table["right"] > table["left"]].reset_index(drop=True)
    return table.assign(seconds=table["right"] - table["left"])


def idle(frame: pd.DataFrame, phase: str = MAIN) -> pd.DataFrame:
    """One row per device: the seconds in which it had no owner, by cause.

    `switch`: a plan is in progress. `planner`: a request that waits, or a sleeping replica of a pipeline with work, could have it now.
    `starved`: one of these needs it, but another device that it also needs has an owner. `no request`: nobody needs it.
    """
    book = ledger(frame, phase)
    spells = [(key, cause, right - left) for key, cause, left, right in over_time(book.replay(), idle_by_cause)]
    table = pd.DataFrame(spells, columns=["device", "cause", "seconds"])
    sums = table.pivot_table(index="device", columns="cause", values="seconds", aggfunc="sum", fill_value=0.0)
    devices = pd.RangeIndex(book.limit("devices", 0), name="device")
    return sums.reindex(index=devices, columns=[*CAUSES], fill_value=0.0).reset_index().rename_axis(columns=None)


def idle_by_cause(books: Books) -> dict[int, str]:
    free = books.idle()
    if books.plan is not None:
        return dict.fromkeys(free, "switch")
    needs = [frozenset(books.clusters[name][cluster]) for name, cluster in books.waiting if cluster != GENERATION]
    needs += [bundle for name in books.clusters if has_work(books, name) for bundle in sleeping_bundles(books, name)]
    causes = dict.fromkeys(free, "no request")
    causes |= {device: "starved" for devices in needs for device in devices & free}
    return causes | {device: "planner" for devices in needs if devices <= free for device in devices}


def of_span(
    span: HolderSpan, calls: Sequence[Work], published: Sequence[tuple[float, int]]
) -> Iterator[tuple[str, float, float]]:
    """The uses of a device while it has an owner: use, left, right."""
    if span.state in ("waking", "sleeping"):
        yield "switching", span.left, span.right
        return
    reached = span.left
    if span.state == "awake" and published:
        reached = min((when for when, _ in published if span.left <= when <= span.right), default=span.right)
        yield "switching", span.left, reached
    for call in calls:
        left, right = max(call.left, reached), min(call.right, span.right)
        if right > left:
            yield "waiting", reached, left
            yield "generating" if call.part == "generating" else "training", left, right
            reached = right
    yield "waiting", reached, span.right


def leases(frame: pd.DataFrame, phase: str = MAIN) -> pd.DataFrame:
    """One row per device and owner: leases, seconds, share of the time, and seconds by use. `unused` = waiting + idle."""
    book = ledger(frame, phase)
    table = uses(book)
    if table.empty:
        raise NotMeasured(f"the phase {phase} has no desk")
    counts = Counter(
        (device, span.pipeline) for span in spans(book) if span.state in ("waking", "held") for device in span.devices
    )
    by_use = table.pivot_table("seconds", ["device", "pipeline"], "use", aggfunc="sum", fill_value=0.0)
    by_use = by_use.reindex(columns=[*USES], fill_value=0.0).rename_axis(["device", "owner"])
    seconds, (began, ended) = by_use.sum(axis=1), ends(book)
    columns = {
        "leases": [counts[key] for key in by_use.index],
        "seconds": seconds,
        "share": seconds / (ended - began),
        **{use: by_use[use] for use in USES[:-1]},
        "unused": by_use["waiting"] + by_use["idle"],
    }
    return pd.DataFrame(columns, index=by_use.index).reset_index()


def utilisation(frame: pd.DataFrame, phase: str = MAIN, *, paced: bool = False) -> pd.DataFrame:
    """One row per device: the share of the time in which it was used, and how that was measured (`by`).

    On CUDA by the driver (`gpu`), sampled each second; else by the processor time of its owners (`cpu`), in kernel ticks. A paced loop
    mostly sleeps, so it uses the time in which the owner had work (`work`), as in `leases`.
    """
    book = ledger(frame, phase)
    began, ended = ends(book)
    devices = pd.RangeIndex(book.limit("devices", 0), name="device")
    of_gpus = recorded_on_ranks(frame, phase, "gpu_busy", "gpu")
    busy = of_gpus.groupby([machines_of(of_gpus), "gpu"])["value"].mean() / 100  # machines have as many GPUs each
    owned = recorded_on_ranks(frame, phase, "owned", "device", "cpu_s")
    if len(busy):
        by, used = "gpu", pd.Series([float(busy.iloc[device % len(busy)]) for device in devices], devices)
    else:
        if paced or owned.empty:
            table = uses(book)
            table = table[table["use"].isin(USES[:2])]
            by, seconds = "work", table.groupby("device")["seconds"].sum()
        else:
            by, seconds = "cpu", owned["cpu_s"].astype(float).groupby(owned["device"].astype(int)).sum()
        used = seconds.reindex(devices, fill_value=0.0) / max(ended - began, 1e-9)
    return used.rename("used").rename_axis("device").reset_index().assign(by=by)


# -- switches --------------------------------------------------------------------------------------------------------------


def switches(frame: pd.DataFrame, phase: str = MAIN) -> pd.DataFrame:
    """One row per desk cycle with moves: what moved, and how long it took (seconds).

    `shrink`: from the plan until the last replica sleeps. `expand`: from the first order to wake until the last replica has its memory.
    `weights`: from then until the last of them has its weights. `total`: from the plan to the end of all this. `check`: the part of
    `weights` in which replicas of that pipeline hashed their tensors, one sync after the other, only for `weights_after_wake`.
    """
    book = ledger(frame, phase)
    cycles: list[list[Row]] = []  # the rows from a plan to its commit
    for row in book.rows:
        if row.event == "plan":
            cycles.append([row])
        elif cycles and cycles[-1][-1].event != "commit":
            cycles[-1].append(row)
    if not cycles:
        raise NotMeasured(f"the phase {phase} has no plan of a desk")
    return pd.DataFrame([switch(book, *rows, hashed=hashing(frame, phase)) for rows in cycles])


def switch(book: DeskLedger, plan: Row, *rows: Row, hashed: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    times: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        times[row.event].append(row.time)
    end = max([plan.time, *times["shrunk"], *times["expanded"], *times["commit"]])
    woken = [row for row in rows if row.event == "expanded"]
    names = {row.who for row in woken}
    loaded = max([end, *(loads(book, woken) if times["commit"] else ())])
    return {
        "cycle": int(plan["number"]),
        "at": plan.time - book.rows[0].time,
        **{name: str(plan.get(name, "")) for name in ("shrinks", "grants", "expands")},
        "shrink": max(times["shrunk"], default=plan.time) - plan.time,
        "expand": max(times["expanded"]) - min(times["expand"], default=plan.time) if woken else 0.0,
        "weights": loaded - end,
        "total": loaded - plan.time,
        "check": covered(((left, right) for name, left, right in hashed if name in names), end, loaded),
    }


def loads(book: DeskLedger, woken: Iterable[Row]) -> Iterator[float]:
    """When each of these replicas had its weights, without those that left earlier."""
    later = book.of("published", "left")
    for wake in woken:
        first = next((row for row in later if row.at > wake.at and replica_of(row) == replica_of(wake)), None)
        if first is not None and first.event == "published":
            yield first.time


def hashing(frame: pd.DataFrame, phase: str) -> list[tuple[str, float, float]]:
    rows = recorded_on_ranks(frame, phase, "handing_over", "what", "who")
    mine = rows[rows["what"] == "check"]
    return [
        (str(who).partition(".")[0], start, start + seconds)
        for who, start, seconds in zip(mine["who"], mine["start"], mine["value"], strict=True)
    ]


# -- requests --------------------------------------------------------------------------------------------------------------


class DeviceWait(NamedTuple):
    """A request from its start to its end: granted, withdrawn, refused, or gone with its pipeline; `open` if it has no end.

    Two kinds are not requests for devices: `admission`, and `suspended`: the pipeline has demand and a lease of generation, but all its
    replicas sleep.
    """

    pipeline: str
    cluster: str
    kind: str
    left: float
    right: float
    end: str


ENDS = {"granted": "granted", "error": "refused", "gone": "gone"}  # else it was withdrawn


def waits(book: DeskLedger) -> list[DeviceWait]:
    last = book.rows[-1].time
    waited = []
    expired = book.of("expired")
    for request, answer in device_requests(book):
        cluster = cluster_of(request)
        end = "open" if answer is None else ENDS.get(answer.event, "withdrawn")
        late = [row for row in expired if (row.who, cluster_of(row)) == (request.who, cluster) and row.at > request.at]
        if answer is not None and end == "refused" and any(row.at < answer.at for row in late):
            end = "expired"
        right = last if answer is None else answer.time
        waited.append(DeviceWait(request.who, cluster, str(request["kind"]), request.time, right, end))
    admitted = {row.who: row.time for row in book.of("admitted")}
    for row in book.of("admit"):
        end = "granted" if row.who in admitted else "open"
        waited.append(DeviceWait(row.who, "generation", "admission", row.time, admitted.get(row.who, last), end))
    for name, _, left, right in over_time(book.replay(), suspended):
        waited.append(DeviceWait(name, "generation", "suspended", left, right, "granted" if right < last else "open"))
    kept = [wait for wait in waited if wait.right > wait.left or wait.kind not in ("admission", "suspended")]
    return sorted(kept, key=lambda wait: wait.left)


def suspended(books: Books) -> dict[str, bool]:
    return {
        name: True for name in books.clusters if is_needy(books, name) and (name, "generation") not in books.waiting
    }


def requests(frame: pd.DataFrame, phase: str = MAIN) -> pd.DataFrame:
    """One row per pipeline and kind of request: how many, how many were granted, and how long they waited (seconds).

    The kind `suspended` counts the times when all replicas of a pipeline with demand slept, `admission` the wait until it may begin.
    """
    table = pd.DataFrame(waits(ledger(frame, phase)))
    if table.empty:
        raise NotMeasured(f"the phase {phase} has no requests to a desk")
    table = table.assign(seconds=table["right"] - table["left"], granted=table["end"] == "granted")
    columns = {
        "requests": ("seconds", "size"),
        "granted": ("granted", "sum"),
        "mean wait": ("seconds", "mean"),
        "longest wait": ("seconds", "max"),
        "waited": ("seconds", "sum"),
    }
    return table.groupby(["pipeline", "kind"], sort=False).agg(**columns).reset_index()


# -- pipelines and loops ---------------------------------------------------------------------------------------------------


def progress(frame: pd.DataFrame, phase: str = MAIN) -> pd.DataFrame:
    """One row per pipeline: its work, its end, its use of the devices, and the cost of sharing.

    `seconds` is until its end; `alone` is the same in its phase alone, if that ran, and `slow-down` the ratio.
    """
    book = ledger(frame, phase)
    began, ended = ends(book)
    table = uses(book)
    total = (ended - began) * book.limit("devices", 0)
    waited = waits(book)
    lines = []
    for name in pipelines(book):
        mine = table[table["pipeline"] == name].groupby("use")["seconds"].sum()
        rows = [row for row in book.rows if row.who == name]
        seconds = rows[-1].time - began
        own = loop_seconds(frame, ALONE + name)
        sent = [request_of(row) for row in rows if row.event == "sent"]
        held = float(mine.sum())
        lines.append(
            {
                "pipeline": name,
                "version": max((int(row["version"]) for row in rows if row.event == "bumped"), default=0),
                "groups trained": len({row["group"] for row in rows if row.event == "trained"}),
                "sent again": len(sent) - len({*sent}),
                "seconds": seconds,
                "alone": own,
                "slow-down": seconds / own if own else None,
                "device-seconds": held,
                "share": held / total if total else 0.0,
                "working": mine.get("training", 0.0) + mine.get("generating", 0.0),
                "switching": mine.get("switching", 0.0),
                "waited": sum(wait.right - wait.left for wait in waited if wait.pipeline == name),
            }
        )
    if not lines:
        raise NotMeasured(f"no pipeline registered in the phase {phase}")
    return pd.DataFrame(lines).astype({"alone": float, "slow-down": float})


def loop_seconds(frame: pd.DataFrame, phase: str) -> float | None:
    """The time of a loop, or of several in turn: as recorded, else from the first row to the last. None if it did not end."""
    recorded = frame[(frame["phase"] == phase) & (frame["metric"] == "makespan")]["value"]
    if len(recorded):
        return float(recorded.sum())
    try:
        book = ledger(frame, phase)
    except NotMeasured:
        return None
    began, ended = ends(book)
    return ended - began if book.of("ended") else None


def needed(book: DeskLedger, clusters: Mapping[str, Mapping[str, Sequence[int]]], tp: Mapping[str, int]) -> float:
    """Device-seconds of work in a loop: trainer calls and replicas with requests, times the devices of each."""
    return sum(
        (call.right - call.left)
        * (tp[call.pipeline] if call.part == "generating" else len(clusters[call.pipeline]["trainer"]))
        for call in work(book)
    )


class Arithmetic(NamedTuple):
    """Seconds calculated from the loops alone, and the device-seconds of work of each pipeline.

    `bound` is max(device-seconds / devices, longest alone), `serial` the sum of the loops alone, `static` the longest pipeline's work on
    its even part of the devices.
    """

    bound: float
    serial: float
    static: float
    work: dict[str, float]
    alone: dict[str, float]


def arithmetic(frame: pd.DataFrame) -> Arithmetic:
    book = ledger(frame)
    devices, names = book.limit("devices", 0), pipelines(book)
    alone = {name: loop_seconds(frame, ALONE + name) for name in names}
    known = {name: seconds for name, seconds in alone.items() if seconds is not None}
    if not names or len(known) < len(names):
        raise NotMeasured("not every pipeline ran alone")
    clusters = {row.who: {"trainer": numbers(row.get("trainer", ()))} for row in book.of("clusters")}
    tp = {row.who: int(row.get("tp", 1)) for row in book.of("clusters")}
    busy = {name: needed(ledger(frame, ALONE + name), clusters, tp) for name in names}
    return Arithmetic(
        bound=max(sum(busy.values()) / devices, *known.values()),
        serial=sum(known.values()),
        static=max(busy.values()) / (devices / len(names)),
        work=busy,
        alone=known,
    )


def loops(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per loop over the same work: its time, whether that is measured or arithmetic, and the ratio to the bound."""
    lines: list[tuple[str, float | None, str]] = [("shared", loop_seconds(frame, MAIN), "measured")]
    least = float("nan")
    try:
        by = arithmetic(frame)
    except NotMeasured:
        by = None
    if by is not None:
        least = by.bound
        lines.append(("bound", by.bound, "arithmetic"))
        lines += [(f"{name} alone", seconds, "measured") for name, seconds in by.alone.items()]
    if by is not None and len(by.alone) > 1:
        lines.append(("serial", by.serial, "arithmetic"))
    if (seconds := loop_seconds(frame, "static")) is not None:
        lines.append(("static", seconds, "measured"))
    elif by is not None and len(by.alone) > 1:
        lines.append(("static", by.static, "arithmetic"))
    ended = [line for line in lines if line[1] is not None]
    if not ended:
        raise NotMeasured("no loop ended")
    result = pd.DataFrame(ended, columns=["loop", "seconds", "known by"])
    return result.assign(**{"times bound": result["seconds"] / least})


# -- memory ----------------------------------------------------------------------------------------------------------------


def memory(frame: pd.DataFrame, phase: str = MAIN) -> pd.DataFrame:
    """Bytes of ranks, resident or on GPUs: device, pipeline, who, time, bytes."""
    place = seats(ledger(frame, phase))
    rows = recorded_on_ranks(frame, phase, memory_source(frame, phase), "who")
    readings = [
        (device, who.partition(".")[0], who, when, size)
        for who, when, size in zip(rows["who"], rows["time"], rows["value"], strict=True)
        for device in place.get(who, ())
    ]
    if not readings:
        raise NotMeasured(f"no memory of ranks was recorded in the phase {phase}")
    return pd.DataFrame(readings, columns=["device", "pipeline", "who", "time", "bytes"])
