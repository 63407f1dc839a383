"""The tables of a stream run, from the ledger of a loop, and the drift of its tokens.

Each takes `run.frame()` and returns a pandas table; it raises `NotMeasured` if the run ended before. `phase` names the loop.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kit.results import Missing, NotMeasured, Row, Unjudged, with_ids
from kit.results.frames import event_rows, events_of, rows_of
from kit.stream.curves import LoopCurves
from kit.stream.judge.history import ENDS
from kit.stream.ports import PARTS, TRAINER, Meter, covered, drifted, spent

LOOPS = ("plain", "lockstep", "stream", "bound")


# -- the ledger ------------------------------------------------------------------------------------------------------------


def shown(frame: pd.DataFrame) -> str:
    """The loop to draw: `stream` if it began, else the last one with a complete sample in its ledger; empty if there is none."""
    rows = event_rows(frame)
    phases = [*rows[rows["metric"] == "completed"]["phase"]]
    return "stream" if "stream" in phases else str(phases[-1]) if phases else ""


def ledger(frame: pd.DataFrame, phase: str) -> list[Row]:
    ledger_rows = events_of(frame, phase)
    if not any(row.event == "completed" for row in ledger_rows):
        raise NotMeasured(f"no sample was completed in the phase {phase}")
    return ledger_rows


# -- samples ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    version: int
    left: float
    right: float
    tokens: int


@dataclass(slots=True)
class Attempt:
    """One attempt. `end` is completed, failed or cancelled; empty while it is in flight.

    A replica reports after each call, so the time of the first tokens starts at its previous report or when the sample was sent.
    """

    group: int
    number: int
    replica: int
    sent: float
    parts: list[Part] = field(default_factory=list)
    end: str = ""


def samples(rows: Sequence[Row]) -> list[Attempt]:
    """Every attempt that generated tokens, in order of its first tokens."""
    attempts: list[Attempt] = []
    under_way: dict[tuple[object, object], Attempt] = {}
    reported: dict[int, float] = {}  # when each replica last reported tokens
    synced = rows[0].time
    for row in rows:
        key = row.get("group"), row.get("sample")
        if row.event == "synced":
            synced = row.time
        elif row.event == "sent":
            replica = row.number("replica")
            attempts.append(Attempt(row.number("group"), row.number("sample"), replica, max(row.time, synced)))
            under_way[key] = attempts[-1]
        elif key not in under_way:
            continue
        elif row.event == "started":
            sample = under_way[key]
            sample.sent = max(sample.sent, synced, reported.get(sample.replica, 0.0))
        elif row.event == "tokens":
            extend(under_way[key], Part(row.number("version"), synced, row.time, row.number("count")))
            reported[under_way[key].replica] = row.time
        elif row.event in ("completed", "failed", "cancelled"):
            sample = under_way.pop(key)
            sample.end = row.event
            if row.event == "completed" and not sample.parts:  # a ledger without spans of tokens
                extend(sample, Part(row.number("version"), synced, row.time, row.number("length", 0)))
    return sorted((sample for sample in attempts if sample.parts), key=lambda sample: sample.parts[0].left)


def extend(sample: Attempt, new: Part) -> None:
    """Add tokens to the last part if they have its version, else as a new part after it. `new.left` is the end of the last sync."""
    last = sample.parts[-1] if sample.parts else None
    if last is not None and last.version == new.version:
        last.right, last.tokens = new.right, last.tokens + new.tokens
    else:
        new.left = min(max(new.left, sample.sent if last is None else last.right), new.right)
        sample.parts.append(new)


def replicas(frame: pd.DataFrame, phase: str = "stream") -> pd.DataFrame:
    """One row per replica: complete samples, those that span a sync, attempts given up, tokens, and seconds of generation."""
    rows = ledger(frame, phase)
    total = rows[-1].time - rows[0].time
    by: dict[int, list[Attempt]] = defaultdict(list)
    for sample in samples(rows):
        by[sample.replica].append(sample)
    lines = []
    for replica, mine in sorted(by.items()):
        complete = [sample for sample in mine if sample.end == "completed"]
        tokens = sum(part.tokens for sample in mine for part in sample.parts)
        busy = covered((part.left, part.right) for sample in mine for part in sample.parts)
        lines.append(
            {
                "replica": replica,
                "samples": len(complete),
                "span a sync": sum(len(sample.parts) > 1 for sample in complete),
                "given up": sum(sample.end in ("failed", "cancelled") for sample in mine),
                "tokens": tokens,
                "generating": busy,
                "share of the time": busy / total if total else 0.0,
                "tokens per second": tokens / busy if busy else 0.0,
            }
        )
    return pd.DataFrame(lines)


# -- steps -----------------------------------------------------------------------------------------------------------------


def steps(frame: pd.DataFrame, phase: str = "stream") -> pd.DataFrame:
    """One row per step: the version that it made, its groups and tokens, their lag in versions, and how its time was spent (seconds).

    `exposed_generation` is the time spent only waiting for samples; `replicas_idle` the mean over replicas of the time without a request.
    """
    rows = ledger(frame, phase)
    meter, seconds, made = Meter(), dict[int, dict[str, float]](), dict[int, int]()
    for row in rows:
        meter.see(row)
        if row.event == "bumped":
            made[row.number("step")] = row.number("version")
            seconds[row.number("step")] = meter.take()
    trained = lags(frame, phase)
    lines = []
    for step, version in made.items():
        mine = trained[trained["step"] == step]
        lines.append(
            {
                "step": step,
                "version": version,
                "groups": mine["group"].nunique(),
                "tokens": int(mine["tokens"].sum()),
                **lag_columns(mine),
                **seconds[step],
            }
        )
    if not lines:
        raise NotMeasured(f"no step ended in the phase {phase}")
    return pd.DataFrame(lines)


def updates(frame: pd.DataFrame, phase: str = "stream") -> pd.DataFrame:
    """One row per optimizer update: the trainer's results, and counts, times and rollouts, as `--log` sends them to a tracker."""
    curves = LoopCurves(phase)
    rows = rows_of(frame[(frame["phase"] == phase) & (frame["ids"] != "")])
    points = [point for row in rows for point in curves.see(row)]
    points += curves.close()
    if not points:
        raise NotMeasured(f"no update ended in the phase {phase}")
    return pd.DataFrame(
        [
            {"update": point.x, **{name.removeprefix(f"{phase}/"): value for name, value in point.values.items()}}
            for point in points
        ]
    )


def lags(frame: pd.DataFrame, phase: str = "stream") -> pd.DataFrame:
    return lags_of(ledger(frame, phase))


def lags_of(rows: Sequence[Row]) -> pd.DataFrame:
    by: dict[int, list[Attempt]] = defaultdict(list)
    for sample in samples(rows):
        if sample.end == "completed":
            by[sample.group].append(sample)
    lines = []
    for row in rows:
        if row.event == "trained":
            group, now = row.number("group"), row.number("version")
            tokens: Counter[int] = Counter()
            for part in (part for sample in by[group] for part in sample.parts):
                tokens[part.version] += part.tokens
            lines += [
                (row.number("step"), group, version, now - version, count) for version, count in sorted(tokens.items())
            ]
    return pd.DataFrame(lines, columns=["step", "group", "version", "lag", "tokens"])


def lag_columns(table: pd.DataFrame) -> dict[str, float]:
    """The mean over tokens, and the largest."""
    tokens = table["tokens"].sum()
    return {
        "mean lag": float((table["lag"] * table["tokens"]).sum() / tokens) if tokens else 0.0,
        "largest lag": int(table["lag"].max()) if len(table) else 0,
    }


def ends(frame: pd.DataFrame, phase: str = "stream") -> pd.DataFrame:
    """How many groups ended in each way, by the version at that time: version, end, groups, why (of the first). `cleared`: a trained
    group, counted under the version that it was trained on."""
    rows = ledger(frame, phase)
    trained = {row["group"]: row.number("version") for row in rows if row.event == "trained"}
    counts: Counter[tuple[int, str]] = Counter()
    why: dict[tuple[int, str], str] = {}
    version = 0
    for row in rows:
        if row.event == "bumped":
            version = row.number("version")
        elif row.event in ENDS and "sample" not in row.ids:
            now = trained.get(row["group"], version) if row.event == "cleared" else version
            counts[now, row.event] += 1
            why.setdefault((now, row.event), str(row.get("why", "")))
    table = [(*key, count, why[key]) for key, count in sorted(counts.items())]
    return pd.DataFrame(table, columns=["version", "end", "groups", "why"])


# -- loops -----------------------------------------------------------------------------------------------------------------


def loops(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per loop over the same work: seconds by part. `bound` is simulated with the durations of this run."""
    lines = []
    for loop in LOOPS:
        seconds = plain(frame) if loop == "plain" else metered(frame, loop)
        if seconds:
            lines.append({"loop": loop, **seconds})
    if not lines:
        raise NotMeasured("no loop ended")
    return pd.DataFrame(lines)


def bound(frame: pd.DataFrame) -> pd.DataFrame:
    """The loop's measured pace, next to that of its controller on simulated ranks with the same durations."""
    rows = with_ids(frame[frame["phase"] == "bound"], "loop")
    if rows.empty:
        raise NotMeasured("the run ended before the phase bound")
    table = rows.pivot_table(index=["metric", "unit"], columns="loop", values="value", sort=False).reset_index()
    table.columns.name = None
    return table.rename(columns={"stream": "measured"})[["metric", "measured", "bound", "unit"]]


def metered(frame: pd.DataFrame, phase: str) -> dict[str, float]:
    try:
        rows = ledger(frame, phase)
    except NotMeasured:
        return {}
    if not any(row.event == "ended" for row in rows):
        return {}
    seconds = spent(rows)
    return {name: seconds[name] for name in ("total", *PARTS)}


def plain(frame: pd.DataFrame) -> dict[str, float]:
    """Seconds of the loop without a controller, from its ranks' consecutive calls; empty if it has not ended."""
    mine = frame[frame["phase"] == "plain"]
    calls = with_ids(mine[mine["metric"] == "call"], "call")
    calls = calls[calls["call"] != "reset"]
    if calls.empty or not (mine["metric"] == "seconds").any():
        return {}
    total = float(calls["time"].max() - calls["start"].min())
    of_trainer = calls[calls["rank"] == 0]
    parts = {
        part: float(of_trainer[of_trainer["call"].map({**TRAINER, "sync": "sync"}) == part]["value"].sum())
        for part in PARTS[:-1]
    }
    return {"total": total, **parts, PARTS[-1]: total - sum(parts.values())}


# -- the buffer ------------------------------------------------------------------------------------------------------------


def buffer(rows: Sequence[Row]) -> pd.DataFrame:
    """Groups in the buffer after each change: time, unfinished, complete."""
    there: dict[object, str] = {}
    ready = set()
    lines = []
    for row in rows:
        group = row.get("group")
        if row.event in ("place", "reserved"):
            there[group] = "complete" if group in ready else "unfinished"
        elif row.event == "ready":
            ready.add(group)
            there[group] = "complete"
        elif row.event in ("place_back", "selected", *ENDS) and "sample" not in row.ids:
            there.pop(group, None)
        else:
            continue
        counts = Counter(there.values())
        lines.append((row.time, counts["unfinished"], counts["complete"]))
    return pd.DataFrame(lines, columns=["time", "unfinished", "complete"])


def capacity(rows: Sequence[Row]) -> dict[str, int]:
    """The limits in the controller's first row."""
    given = next((row for row in rows if row.event == "capacity"), None)
    return {name: given.number(name) for name in ("places", "slots", "window") if given and name in given.ids}


# -- tokens ----------------------------------------------------------------------------------------------------------------

TOKENS_FILE = "tokens.jsonl"
WHOLE_NUMBERS = ("group", "sample", "position", "token", "version", "step_version")
FINITE_NUMBERS = ("logprob_engine", "logprob_trainer")
COLUMNS = {"drift_mean": "mean difference", "drift_mismatch": "mismatch", "drift_ratio": "ratio", "drift_kl": "KL"}


def drift(frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """By lag and position of a token in its answer: tokens, and the trainer's log-probability against the engine's."""
    rows = frame[(frame["phase"] == "verify") & frame["metric"].isin(COLUMNS)]
    if rows.empty:
        return dumped(folder / TOKENS_FILE)
    ids = ["lag", "position", "tokens"]
    table = with_ids(rows, *ids).pivot_table(index=ids, columns="metric", values="value").reset_index()
    table.columns.name = None
    return table.astype(dict.fromkeys(ids, int))[[*ids, *COLUMNS]].rename(columns=COLUMNS)


def dumped(path: Path) -> pd.DataFrame:
    """The same from a dump: one line of JSON per token. Incomplete or contradictory lines raise `Unjudged`."""
    cells: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for row in tokens_in(path):
        cells[row["step_version"] - row["version"], row["position"]].append(difference(row))
    rows = [
        {"lag": lag, "position": position, "tokens": len(differences), **drifted(differences)}
        for (lag, position), differences in sorted(cells.items())
    ]
    return pd.DataFrame(rows).rename(columns=COLUMNS)


def fresh_by_version(folder: Path) -> pd.DataFrame:
    """By version: the drift of a dump's tokens that are trained at the version which generated them."""
    cells: defaultdict[int, list[float]] = defaultdict(list)
    for row in tokens_in(folder / TOKENS_FILE) if (folder / TOKENS_FILE).is_file() else ():
        if row["version"] == row["step_version"]:
            cells[row["version"]].append(difference(row))
    rows = [
        {"version": version, "tokens": len(differences), **drifted(differences)}
        for version, differences in sorted(cells.items())
    ]
    return pd.DataFrame(rows).rename(columns=COLUMNS)


def difference(row: dict[str, Any]) -> float:
    return float(row["logprob_trainer"] - row["logprob_engine"])


def tokens_in(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise NotMeasured(f"there is no {path.name} beside the records")
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = checked_line(line, f"{path.name}, line {number}")
        key = tuple(row[name] for name in ("group", "sample", "position", "step_version"))
        if key in rows:
            raise Unjudged(f"{path.name}, line {number}: this token of group {key[0]}, sample {key[1]} occurs twice")
        rows[key] = row
    if not rows:
        raise Missing(f"{path.name} is empty")
    return [*rows.values()]


def checked_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        raise Unjudged(f"{where} is not JSON") from None
    for name in (*WHOLE_NUMBERS, *FINITE_NUMBERS):
        value = row.get(name) if isinstance(row, dict) else None
        right = (
            isinstance(value, int)
            if name in WHOLE_NUMBERS
            else isinstance(value, (int, float)) and math.isfinite(value)
        )
        if not right or isinstance(value, bool):
            kind = "whole" if name in WHOLE_NUMBERS else "finite"
            raise Unjudged(f"{where}: {name}={value!r} is not a {kind} number")
    if row["position"] < 0:
        raise Unjudged(f"{where}: position={row['position']}; positions count from 0")
    if row["step_version"] < row["version"]:
        raise Unjudged(f"{where}: version {row['version']} is newer than the step's, {row['step_version']}")
    ids: dict[str, Any] = row
    return ids
