"""The tables of a share run, read from the ledger of a phase: devices and their owners, switches, requests, pipelines, loops.

Each takes `run.frame()` and returns a pandas table; it raises `NotMeasured` if the run ended before. `phase` names the loop.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from kit.labs.growth import PerFrame, events, rows_of
from kit.loop.messages import numbers
from kit.results import NotMeasured, with_ids
from kit.share.books import RUNS_ON, Ledger
from kit.share.judge import is_needy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kit.share.books import Row

LAB = "share"
SHARED = "shared"
ALONE = "alone_"  # with the pipeline's name
USES = ("training", "generating", "waiting", "switching", "idle")
NOBODY = "-"
TRAINER = {"begin": "training", "microbatch": "training", "finish": "training", "logprobs": "logprobs"}


# -- the ledger ------------------------------------------------------------------------------------------------------------


def shown(frame: pd.DataFrame) -> str | None:
    """The loop that is drawn: `shared` if a replica woke in it, else the last phase in which one did."""
    woken = frame[frame["value"].isna() & (frame["metric"] == "expanded")]
    if len(woken) and not (woken["lab"] == LAB).any():
        return SHARED  # another system's ledger
    phases = woken["phase"]
    return SHARED if (phases == SHARED).any() else str(phases.iloc[-1]) if len(phases) else None


def read_ledger(frame: pd.DataFrame, phase: str) -> Ledger | None:
    rows = events(frame, phase, lab=LAB, main=SHARED)
    rows = rows[rows["ids"] != ""]
    return None if rows.empty else Ledger(rows_of(rows))


_ledgers = PerFrame(read_ledger)


def ledger(frame: pd.DataFrame, phase: str = SHARED) -> Ledger:
    """What the desk and the pipelines did in a phase, in order."""
    found = _ledgers.of(frame, phase)
    if found is None:
        raise NotMeasured(f"the phase {phase} has no ledger")
    return found


def pipelines(book: Ledger) -> list[str]:
    """The pipelines that registered, in this order; without a desk, those that did something."""
    return list(dict.fromkeys(row.who for row in book.of("clusters") or book.of("sent", "trained")))


def ends(book: Ledger) -> tuple[float, float]:
    return book.rows[0].time, book.rows[-1].time


# -- who has the devices ---------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """What a pipeline has devices for: a replica that is waking, awake or falling asleep, or another cluster that is held."""

    pipeline: str
    what: str
    devices: tuple[int, ...]
    state: str
    left: float
    right: float


def spans(book: Ledger) -> list[Span]:
    """In order of their ends. What is under way ends with the last row."""
    found: list[Span] = []
    under_way: dict[tuple[str, str], tuple[tuple[int, ...], str, float]] = {}

    def turn(key: tuple[str, str], state: str, now: float, devices: tuple[int, ...] = ()) -> None:
        if key in under_way:
            devices, before, left = under_way.pop(key)
            found.append(Span(*key, devices, before, left, now))
        if state:
            under_way[key] = devices, state, now

    for row in book.rows:
        if row.at in book.refused:
            continue
        replica = row.who, f"replica {row.get('replica')}"
        if row.event == "expand":
            turn(replica, "waking", row.time, numbers(str(row["devices"])))
        elif row.event == "expanded" and replica in under_way:
            turn(replica, "awake", row.time)
        elif row.event == "left" and replica in under_way:
            turn(replica, "sleeping", row.time)
        elif row.event == "shrunk" or (row.event == "error" and row.get("of") == "expand"):
            turn(replica, "", row.time)
        elif row.event == "granted" and row["kind"] != "generation" and (row.who, row.cluster) not in under_way:
            turn((row.who, row.cluster), "held", row.time, numbers(str(row["devices"])))
        elif row.event == "release" and row.cluster != "generation":
            turn((row.who, row.cluster), "", row.time)
        elif row.event == "acquire" and "release" in row.ids:
            turn((row.who, RUNS_ON.get(row["release"], row["release"])), "", row.time)
        elif row.event in ("died", "gone"):
            lost = [replica] if "replica" in row.ids else [key for key in under_way if key[0] == row.who]
            for key in lost:
                turn(key, "", row.time)
    for key in list(under_way):
        turn(key, "", book.rows[-1].time)
    return found


class Work(NamedTuple):
    """A replica with requests, or a call of the trainer, whose `step` it is."""

    pipeline: str
    what: str
    part: str  # generating, training or logprobs
    left: float
    right: float
    step: int = -1


def work(book: Ledger) -> list[Work]:
    return [*generating(book), *training(book)]


def generating(book: Ledger) -> Iterator[Work]:
    """A replica works while it has requests that have not ended. When it leaves, they go elsewhere."""
    where: dict[tuple[str, Any, Any], tuple[str, Any]] = {}
    loads: defaultdict[tuple[str, Any], int] = defaultdict(int)
    since: dict[tuple[str, Any], float] = {}

    def change(replica: tuple[str, Any], by: int, now: float) -> Iterator[Work]:
        loads[replica] += by
        if loads[replica] > 0:
            since.setdefault(replica, now)
        elif replica in since:
            yield Work(replica[0], f"replica {replica[1]}", "generating", since.pop(replica), now)

    for row in book.rows:
        request = row.who, row.get("group"), row.get("sample")
        if row.event == "sent":
            if request in where:
                yield from change(where.pop(request), -1, row.time)
            where[request] = row.who, row["replica"]
            yield from change(where[request], 1, row.time)
        elif row.event in ("completed", "failed", "cancelled") and "sample" in row.ids and request in where:
            yield from change(where.pop(request), -1, row.time)
        elif row.event in ("left", "died", "gone"):
            gone = [(row.who, row["replica"])] if "replica" in row.ids else [one for one in since if one[0] == row.who]
            where = {one: replica for one, replica in where.items() if replica not in gone}
            for replica in gone:
                yield from change(replica, -loads[replica], row.time)
    for replica, left in since.items():
        yield Work(replica[0], f"replica {replica[1]}", "generating", left, book.rows[-1].time)


def training(book: Ledger) -> Iterator[Work]:
    """The trainers' calls that have ended. A trainer takes one at a time, in order."""
    waiting: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    free: dict[str, float] = {}
    for row in book.rows:
        if row.event in TRAINER and "to" in row.ids:
            waiting[row.who, row.event].append(row)
        elif row.event in ("done", "error") and (calls := waiting.get((row.who, str(row.get("of"))))):
            call = calls.pop(0)
            left = max(free.get(row.who, call.time), call.time)
            yield Work(row.who, "trainer", TRAINER[call.event], left, row.time, int(call.get("step", -1)))
            free[row.who] = row.time


def weights(book: Ledger) -> dict[tuple[str, str], list[tuple[float, int]]]:
    """When each version was published on each replica, by pipeline and replica."""
    found: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for row in book.of("published"):
        found[row.who, f"replica {row['replica']}"].append((row.time, int(row["version"])))
    return found


class Sync(NamedTuple):
    """Weights on their way to a replica, until it publishes their version."""

    pipeline: str
    what: str
    devices: tuple[int, ...]
    version: int
    left: float
    right: float


def syncs(book: Ledger) -> Iterator[Sync]:
    began: dict[str, float] = {}
    devices: dict[tuple[str, str], tuple[int, ...]] = {}
    for row in book.rows:
        key = row.who, f"replica {row.get('replica')}"
        if row.event == "expand":
            devices[key] = numbers(str(row["devices"]))
        elif row.event == "sync_begin":
            began[row.who] = row.time
        elif row.event == "published":
            left = began.get(row.who, row.time)
            yield Sync(*key, devices.get(key, ()), int(row["version"]), left, row.time)


def uses(book: Ledger) -> pd.DataFrame:
    """The whole time of every device: device, pipeline, what, use, left, right.

    `switching` is a replica that falls asleep, wakes or waits for its first weights; `waiting` is a device that has an owner and no work.
    """
    began, ended = ends(book)
    mine = spans(book)
    by: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for one in work(book):
        by[one.pipeline, one.what].append(one)
    published = weights(book)
    found: list[tuple[int, str, str, str, float, float]] = []
    for device in range(book.limit("devices", 0)):
        reached = began
        for span in sorted((one for one in mine if device in one.devices), key=lambda one: one.left):
            found.append((device, NOBODY, "", "idle", reached, span.left))
            parts = of_span(span, by[span.pipeline, span.what], published[span.pipeline, span.what])
            found += [(device, span.pipeline, span.what, *part) for part in parts]
            reached = max(reached, span.right)
        found.append((device, NOBODY, "", "idle", reached, ended))
    table = pd.DataFrame(found, columns=["device", "pipeline", "what", "use", "left", "right"])
    return table[table["right"] > table["left"]].reset_index(drop=True)


def of_span(
    span: Span, calls: Sequence[Work], published: Sequence[tuple[float, int]]
) -> Iterator[tuple[str, float, float]]:
    """What a device is used for while somebody has it: use, left, right."""
    if span.state in ("waking", "sleeping"):
        yield "switching", span.left, span.right
        return
    reached = span.left
    if span.state == "awake" and published:
        reached = min([when for when, _ in published if when >= span.left], default=span.right)
        reached = min(reached, span.right)
        yield "switching", span.left, reached
    for call in sorted(calls, key=lambda one: one.left):
        left, right = max(call.left, reached), min(call.right, span.right)
        if right > left:
            yield "waiting", reached, left
            yield "generating" if call.part == "generating" else "training", left, right
            reached = right
    yield "waiting", reached, span.right


def leases(frame: pd.DataFrame, phase: str = SHARED) -> pd.DataFrame:
    """One row a device and owner: leases, seconds, share of the time, and the seconds by use. `unused` is waiting and idle."""
    book = ledger(frame, phase)
    began, ended = ends(book)
    table = uses(book)
    table["seconds"] = table["right"] - table["left"]
    counts: defaultdict[tuple[int, str], int] = defaultdict(int)
    for span in spans(book):
        if span.state in ("waking", "held"):
            for device in span.devices:
                counts[device, span.pipeline] += 1
    found = []
    for key, some in table.groupby(["device", "pipeline"]):
        device, owner = int(str(key[0])), str(key[1])
        seconds = some.groupby("use")["seconds"].sum()
        total = float(seconds.sum())
        found.append(
            {
                "device": device,
                "owner": owner,
                "leases": counts[device, owner],
                "seconds": total,
                "share": total / (ended - began) if ended > began else 0.0,
                **{use: float(seconds.get(use, 0.0)) for use in USES[:-1]},
                "unused": float(seconds.get("waiting", 0.0) + seconds.get("idle", 0.0)),
            }
        )
    if not found:
        raise NotMeasured(f"the phase {phase} has no desk")
    return pd.DataFrame(found)


def utilisation(frame: pd.DataFrame, phase: str = SHARED, *, paced: bool = False) -> pd.DataFrame:
    """One row a device: the share of the time in which it was used, and what says so (`by`).

    On CUDA the driver (`gpu`), asked each second; else the processor time of its owners (`cpu`), in ticks of the kernel. A paced loop
    mostly sleeps, so there it is the time in which the owner had work (`work`), as in `leases`.
    """
    book = ledger(frame, phase)
    began, ended = ends(book)
    rows = frame[frame["phase"] == phase]
    devices = range(book.limit("devices", 0))
    busy = with_ids(rows[rows["metric"] == "gpu_busy"], "gpu").groupby("gpu")["value"].mean() / 100
    owned = with_ids(rows[rows["metric"] == "owned"], "device", "cpu_s").dropna(subset=["device", "cpu_s"])
    if len(busy):
        by, used = "gpu", {device: float(busy.iloc[device % len(busy)]) for device in devices}
    elif paced or owned.empty or ended <= began:
        table = uses(book)
        table = table[table["use"].isin(USES[:2])]
        by, seconds = "work", (table["right"] - table["left"]).groupby(table["device"]).sum()
        used = {device: float(seconds.get(device, 0.0)) / max(ended - began, 1e-9) for device in devices}
    else:
        by, seconds = "cpu", owned["cpu_s"].astype(float).groupby(owned["device"].astype(int)).sum()
        used = {device: float(seconds.get(device, 0.0)) / (ended - began) for device in devices}
    return pd.DataFrame([{"device": device, "used": share, "by": by} for device, share in used.items()])


# -- switches --------------------------------------------------------------------------------------------------------------


def switches(frame: pd.DataFrame, phase: str = SHARED) -> pd.DataFrame:
    """One row a cycle of the desk that moved something: what, and how long it took (seconds).

    `shrink` is from the plan until the last replica sleeps, `expand` from the first order to wake until the last replica has its memory,
    `weights` from then until the last of them has its weights; `total` is from the plan to the end of all this. `check` is the part of
    `weights` in which replicas of that pipeline hashed what they got, one sync after the other: that is for `weights_after_wake` only.
    """
    book = ledger(frame, phase)
    began, _ = ends(book)
    published, hashed = weights(book), hashing(frame, phase)
    found: list[dict[str, Any]] = []
    woken: list[tuple[float, tuple[str, str]]] = []  # of the cycle under way
    open_ = False
    for row in book.rows:
        if row.event == "plan":
            texts = {name: str(row.get(name, "")) for name in ("shrinks", "grants", "expands")}
            found.append({"cycle": int(row["number"]), "at": row.time - began, **texts, "shrink": 0.0, "expand": 0.0})
            found[-1]["first"] = found[-1]["end"] = row.time
            open_, woken = True, []
        elif open_ and row.event == "shrunk":
            found[-1]["shrink"] = row.time - found[-1]["first"]
            found[-1]["end"] = row.time
        elif open_ and row.event == "expand":
            found[-1].setdefault("ordered", row.time)
        elif open_ and row.event == "expanded":
            woken.append((row.time, (row.who, f"replica {row['replica']}")))
            found[-1]["expand"] = row.time - found[-1].get("ordered", row.time)
            found[-1]["end"] = row.time
        elif open_ and row.event == "commit":
            found[-1]["end"] = row.time
            found[-1]["loaded"] = loaded(book, woken, published)
            found[-1]["who"] = {who for _, (who, _) in woken}
            open_ = False
    if not found:
        raise NotMeasured(f"the phase {phase} has no plan of a desk")
    for one in found:
        first, end, done = one.pop("first"), one.pop("end"), one.pop("loaded", None)
        one.pop("ordered", None)
        who = one.pop("who", set())
        one["weights"] = max(0.0, done - end) if done is not None else 0.0
        one["total"] = end - first + one["weights"]
        one["check"] = covered([span for name, *span in hashed if name in who], end, done or end)
    return pd.DataFrame(found)


def hashing(frame: pd.DataFrame, phase: str) -> list[tuple[str, float, float]]:
    """Of which pipeline a replica hashed its weights, from when to when."""
    rows = frame[(frame["phase"] == phase) & (frame["metric"] == "handing_over")]
    rows = with_ids(rows, "what", "who") if len(rows) else rows.assign(what="", who="")
    mine = rows[rows["what"] == "check"]
    return [
        (str(who).partition(".")[0], start, start + seconds)
        for who, start, seconds in zip(mine["who"], mine["start"], mine["value"], strict=True)
    ]


def covered(spans: Iterable[Sequence[float]], since: float, until: float) -> float:
    """The seconds between two moments that these spans cover; they may overlap."""
    found, last = 0.0, since
    for start, end in sorted((start, end) for start, end in spans):
        found += max(0.0, min(end, until) - max(start, last))
        last = max(last, min(end, until))
    return found


def loaded(
    book: Ledger,
    woken: Iterable[tuple[float, tuple[str, str]]],
    published: dict[tuple[str, str], list[tuple[float, int]]],
) -> float | None:
    """When the last of these replicas had its weights; those that left before do not count."""
    left = [(row.time, (row.who, f"replica {row['replica']}")) for row in book.of("left")]
    moments = []
    for when, replica in woken:
        until = min((gone for gone, one in left if one == replica and gone >= when), default=float("inf"))
        moments += [then for then, _ in published[replica] if when <= then <= until][:1]
    return max(moments, default=None)


# -- requests --------------------------------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """A request from when it was made until its end: granted, withdrawn, expired or refused; `open` if it has none.

    Two kinds are no requests for devices: `admission`, and `suspended`, where the pipeline has demand and a lease of generation, and all
    its replicas sleep.
    """

    pipeline: str
    cluster: str
    kind: str
    left: float
    right: float
    end: str


ENDS = {"granted": "granted", "expired": "expired", "withdrawn": "withdrawn", "error": "refused", "gone": "gone"}


def waits(book: Ledger) -> list[Wait]:
    found: list[Wait] = []
    asked: dict[tuple[str, str], tuple[str, float]] = {}
    for row in book.rows:
        if row.event == "acquire" and row.at not in book.refused:
            asked.setdefault((row.who, row.cluster), (str(row["kind"]), row.time))
        elif row.event in ENDS:
            if row.event == "error" and row.get("of") not in ("acquire", book.desk):
                continue
            all_of_it = row.event == "gone" or row.get("of") == book.desk
            keys = [key for key in asked if key[0] == row.who and (all_of_it or key[1] == row.cluster)]
            found += [Wait(*key, *asked.pop(key), row.time, ENDS[row.event]) for key in keys]
    last = book.rows[-1].time
    admitted = {row.who: row.time for row in book.of("admitted")}
    found += [
        Wait(
            row.who,
            "generation",
            "admission",
            row.time,
            admitted.get(row.who, last),
            "granted" if row.who in admitted else "open",
        )
        for row in book.of("admit")
        if admitted.get(row.who, last) > row.time
    ]
    found += [Wait(*key, kind, since, last, "open") for key, (kind, since) in asked.items()]
    return sorted([*found, *suspended(book)], key=lambda one: one.left)


def suspended(book: Ledger) -> Iterator[Wait]:
    """Stretches in which a pipeline that generates has demand and no replica."""
    since: dict[str, float] = {}
    row = book.rows[0]
    for row, books in book.replay():
        needy = {name for name in books.clusters if is_needy(books, name) and (name, "generation") not in books.waiting}
        for name in {*since} - needy:
            left = since.pop(name)
            if row.time > left:
                yield Wait(name, "generation", "suspended", left, row.time, "granted")
        since |= dict.fromkeys(needy - {*since}, row.time)
    yield from (Wait(name, "generation", "suspended", left, row.time, "open") for name, left in since.items())


def requests(frame: pd.DataFrame, phase: str = SHARED) -> pd.DataFrame:
    """One row a pipeline and kind of request: how many, how many were granted, and how long they waited (seconds).

    The kind `suspended` counts the times in which all replicas of a pipeline with demand slept, `admission` the wait until it may begin.
    """
    found = []
    by: dict[tuple[str, str], list[Wait]] = defaultdict(list)
    for one in waits(ledger(frame, phase)):
        by[one.pipeline, one.kind].append(one)
    for (name, kind), some in by.items():
        seconds = [one.right - one.left for one in some]
        found.append(
            {
                "pipeline": name,
                "kind": kind,
                "requests": len(some),
                "granted": sum(one.end == "granted" for one in some),
                "mean wait": sum(seconds) / len(seconds),
                "longest wait": max(seconds),
                "waited": sum(seconds),
            }
        )
    if not found:
        raise NotMeasured(f"the phase {phase} has no requests to a desk")
    return pd.DataFrame(found)


# -- pipelines and loops ---------------------------------------------------------------------------------------------------


def progress(frame: pd.DataFrame, phase: str = SHARED) -> pd.DataFrame:
    """One row a pipeline: what it did, when it ended, what it had of the devices, and what sharing cost it.

    `seconds` is until its end; `alone` is the same in its phase alone, where that ran, and `slow-down` the ratio.
    """
    book = ledger(frame, phase)
    began, ended = ends(book)
    table = uses(book)
    table["seconds"] = table["right"] - table["left"]
    total = (ended - began) * book.limit("devices", 0)
    waited = waits(book)
    found = []
    for name in pipelines(book):
        mine = table[table["pipeline"] == name]
        rows = [row for row in book.rows if row.who == name]
        seconds = ended_at(book, name) - began
        own = loop_seconds(frame, ALONE + name)
        sent = [(row["group"], row["sample"]) for row in rows if row.event == "sent"]
        held = float(mine["seconds"].sum())
        found.append(
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
                "working": float(mine[mine["use"].isin(["training", "generating"])]["seconds"].sum()),
                "switching": float(mine[mine["use"] == "switching"]["seconds"].sum()),
                "waited": sum(one.right - one.left for one in waited if one.pipeline == name),
            }
        )
    if not found:
        raise NotMeasured(f"no pipeline registered in the phase {phase}")
    return pd.DataFrame(found).astype({"alone": float, "slow-down": float})


def ended_at(book: Ledger, name: str) -> float:
    """When a pipeline's loop was over: its last row."""
    return max(row.time for row in book.rows if row.who == name)


def loop_seconds(frame: pd.DataFrame, phase: str) -> float | None:
    """How long a loop took, or several in turn: as recorded, else from the first row to the last. None if it did not end."""
    recorded = frame[(frame["phase"] == phase) & (frame["metric"] == "makespan")]["value"]
    if len(recorded):
        return float(recorded.sum())
    try:
        book = ledger(frame, phase)
    except NotMeasured:
        return None
    began, ended = ends(book)
    return ended - began if book.of("ended") else None


def needed(book: Ledger, clusters: Mapping[str, Mapping[str, Sequence[int]]], tp: Mapping[str, int]) -> float:
    """Device-seconds of work in a loop: calls of trainers and replicas with requests, times the devices that each takes."""
    return sum(
        (one.right - one.left)
        * (tp[one.pipeline] if one.part == "generating" else len(clusters[one.pipeline]["trainer"]))
        for one in work(book)
    )


class Arithmetic(NamedTuple):
    """Seconds that follow from the loops alone, and the device-seconds of work of each pipeline.

    `bound` is max(device-seconds / devices, longest alone) + switching device-seconds / devices; `serial` the sum of the loops alone;
    `static` the longest pipeline's work on its even part of the devices.
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
    clusters = {row.who: {"trainer": numbers(str(row.get("trainer", "")))} for row in book.of("clusters")}
    tp = {row.who: int(row.get("tp", 1)) for row in book.of("clusters")}
    busy = {name: needed(ledger(frame, ALONE + name), clusters, tp) for name in names}
    table = uses(book)
    switching = float((table["right"] - table["left"])[table["use"] == "switching"].sum())
    return Arithmetic(
        bound=max(sum(busy.values()) / devices, *known.values()) + switching / devices,
        serial=sum(known.values()),
        static=max(busy.values()) / (devices / len(names)),
        work=busy,
        alone=known,
    )


def loops(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a loop over the same work: how long it took, whether that is measured or arithmetic, and how many times the bound it is."""
    found: list[tuple[str, float | None, str]] = [("shared", loop_seconds(frame, SHARED), "measured")]
    least = float("nan")
    try:
        by = arithmetic(frame)
    except NotMeasured:
        by = None
    if by is not None:
        least = by.bound
        found.append(("bound", by.bound, "arithmetic"))
        found += [(f"{name} alone", seconds, "measured") for name, seconds in by.alone.items()]
    for loop in ("serial", "static"):
        seconds = loop_seconds(frame, loop)
        if seconds is not None:
            found.append((loop, seconds, "measured"))
        elif by is not None and len(by.alone) > 1:
            found.append((loop, getattr(by, loop), "arithmetic"))
    ended = [one for one in found if one[1] is not None]
    if not ended:
        raise NotMeasured("no loop ended")
    result = pd.DataFrame(ended, columns=["loop", "seconds", "known by"])
    return result.assign(**{"times bound": result["seconds"] / least})


# -- memory ----------------------------------------------------------------------------------------------------------------


def seats(book: Ledger) -> dict[str, tuple[int, ...]]:
    """The devices of each role, by its pipeline and name ("a.replica 0"), and of each rank of it ("a.replica 0#1")."""
    found: dict[str, tuple[int, ...]] = {}
    for row in book.of("clusters"):
        found[f"{row.who}.trainer"] = numbers(str(row.get("trainer", "")))
        devices, tp = numbers(str(row.get("generation", ""))), int(row.get("tp", 1))
        for replica in range(len(devices) // tp):
            found[f"{row.who}.replica {replica}"] = devices[replica * tp : (replica + 1) * tp]
    ranks = {f"{role}#{place}": (one,) for role, devices in found.items() for place, one in enumerate(devices)}
    return found | ranks


def memory(frame: pd.DataFrame, phase: str = SHARED) -> pd.DataFrame:
    """Resident bytes of ranks, as observers saw them: device, pipeline, who, time, bytes."""
    place = seats(ledger(frame, phase))
    rows = with_ids(frame[(frame["phase"] == phase) & (frame["metric"] == "seen_resident")], "who")
    rows = rows[rows["who"].isin(place)].sort_values("time", kind="stable")
    if rows.empty:
        raise NotMeasured(f"no resident bytes were seen in the phase {phase}")
    found = [
        (device, who.partition(".")[0], who, when, size)
        for who, when, size in zip(rows["who"], rows["time"], rows["value"], strict=True)
        for device in place[who]
    ]
    return pd.DataFrame(found, columns=["device", "pipeline", "who", "time", "bytes"])
