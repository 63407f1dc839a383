"""The charts and tables of a split run: the calls of a step, and the errors of gradients and metrics against the plain step."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from kit.draw.album import Charts, Table
from kit.draw.chart import Limit, Mark
from kit.draw.data import SEPARATE, RunData, with_attrs
from kit.draw.lanes import Lanes
from kit.draw.lines import Lines
from kit.draw.matrix import Matrix
from kit.draw.style import Look
from kit.labs.split import rules
from kit.labs.split.faults import KIT_SPLIT
from kit.labs.split.lab import cases_of
from kit.labs.split.rules import COMMON, chunks_in_words, every_chunks, singular
from kit.results import with_ids
from kit.results.units import amount, counted

CALLS = {
    "run": Look("faint", "plain step", outline=True),
    "begin": Look(3, outline=True),
    "microbatch": Look(0, outline=True),
    "finish": Look(2, outline=True),
    "took": Look("ink", shape="words", listed=False),
}
APART = 0.14  # levels, in columns
EACH = "one per\nmicrobatch"  # chunks
EXACT = 16  # decades below 1 of the least error that has a colour


def step_calls(data: RunData) -> pd.DataFrame:
    """The calls of the last step, one after the other. A rank waits for others inside a call."""
    rows = with_ids(data.frame[data.frame["metric"] == "call_seconds"], "call", "order")
    ranks = data.ranks if len(data.ranks) <= SEPARATE else data.ranks[:1]
    rows = rows[rows["rank"].isin(ranks)].sort_values(["rank", "order"])
    boxes: list[dict[str, Any]] = []
    for case in cases_of(data.config):
        for phase in ("sync", "split") if case.first else ("split",):
            lane: dict[str, Any] = {
                "lane": f"{case.level}, {'plain' if phase == 'sync' else chunks_in_words(case.chunks)}"
            }
            lane |= {"gap": 0.22} if phase == "sync" and boxes else {}
            calls = rows[(rows["cycle"] == case.cycle) & (rows["phase"] == phase)]
            for place, (_, mine) in enumerate(calls.groupby("rank")):
                ends = mine["value"].cumsum()
                at = {"low": place / len(ranks), "high": (place + 0.94) / len(ranks)}
                spans = zip(mine["call"], ends - mine["value"], ends, strict=True)
                boxes += [{**lane, **at, "kind": call, "left": left, "right": right} for call, left, right in spans]
            took = float(calls.groupby("rank")["value"].sum().max()) if len(calls) else 0.0
            words = amount(took, "s") if took else ""
            boxes.append({**lane, "kind": "took", "left": took, "right": took, "words": words})
    lanes = f"rank {ranks[0]}" if len(ranks) == 1 else f"lanes: ranks {ranks[0]} to {ranks[-1]}"
    return with_attrs(pd.DataFrame(boxes), step=data.config["steps"], ranks=lanes)


def gradient_errors(data: RunData) -> pd.DataFrame:
    """||dg|| / ||g|| over the model for each number of chunks: the first step as points, later ones as a span. What is not a number counts
    as infinite."""
    config, compared = data.config, data.records[data.records["phase"] == "compare"]
    errors = with_ids(compared[compared["metric"] == "gradient_error"], "step")
    errors = errors.assign(value=errors["value"].fillna(math.inf))
    between = compared[compared["metric"] == "chunk_error"].set_index("cycle")["value"]
    levels = list(dict.fromkeys(case.level for case in cases_of(config)))
    points: list[dict[str, Any]] = []
    for case in cases_of(config):
        mine = errors[errors["cycle"] == case.cycle]
        x = list(config["chunks"]).index(case.chunks) + (levels.index(case.level) - (len(levels) - 1) / 2) * APART
        first, rest = mine[mine["step"] == 1]["value"], mine[mine["step"] > 1]["value"]
        points += [{"x": x, "kind": case.level, "value": value, "judged": True} for value in first]
        if len(rest):
            points.append({"x": x, "kind": "later", "low": rest.min(), "high": rest.max()})
        if not case.first and case.cycle in between:
            points.append({"x": x, "kind": "against the first number of chunks", "value": float(between[case.cycle])})
    table = pd.DataFrame(points, columns=["x", "kind", "value", "low", "high", "judged"]).fillna({"judged": False})
    ticks = {float(place): str(count or EACH) for place, count in enumerate(config["chunks"])}
    later = f"steps 2 to {config['steps']}" if config["steps"] > 2 else "step 2"
    return with_attrs(table, ticks=ticks, marks=[Mark(COMMON, f"{COMMON:g}, common")], later=later)


def metric_errors(data: RunData) -> pd.DataFrame:
    """The error of each metric in the first step, at each level for each number of chunks, beside the error if the loss's normalizer
    divided every metric."""
    table = rules.metrics(data.records, data.config)
    table = table[table["step"] == 1].sort_values("level", ascending=False, kind="stable")  # tokens first
    per = table["normalizer"].map(lambda unit: "" if unit == "none" else singular(unit))
    names = per.groupby(table["metric"], sort=False).agg(lambda units: " or ".join(filter(None, dict.fromkeys(units))))
    order = {count: place for place, count in enumerate(data.config["chunks"])}
    cells: list[dict[str, Any]] = []
    for (level, metric), rows in table.groupby(["level", "metric"], sort=False):
        name = f"{metric}  {f'per {names[str(metric)]}' if names[str(metric)] else ''}".strip()
        about, head = {"row": name}, f"{level},\n"
        for row in rows.sort_values("chunks", key=lambda counts: counts.map(order)).to_dict("records"):
            is_lost = pd.isna(row["split"]) and pd.notna(row["sync"])
            cell = {
                "column": head + (counted(row["chunks"], "chunk") if row["chunks"] else "all chunks"),
                "kind": "measured",
                "value": row["error"],
            }
            cells.append({**about, **cell, **error_cell(row["error"]), **({"words": "missing"} if is_lost else {})})
        computed = float(rows["one_scalar_error"].max())
        cells.append({**about, "column": head + "one scalar", "kind": "computed", **error_cell(computed, zero="faint")})
    return pd.DataFrame(cells)


def error_cell(error: float, *, zero: str = "good") -> dict[str, Any]:
    if error == 0:
        return {"words": "0", "tone": zero, "bold": True, "heat": 0.0}
    heat = 1 + math.log10(error) / EXACT if error < math.inf else 1.0
    return {"words": f"{error:.2g}", "heat": min(max(heat, 0.0), 1.0)}


def is_rehearsed(data: RunData) -> bool:
    return "rehearse" in data.phases and "result" in data.metrics()  # not in runs of an older kit


def heading(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config[name] > 1]
    own = [] if config["implementation"] == KIT_SPLIT else [config["implementation"]]
    job = " ".join([config["backend"], ", ".join([config["size"], *sizes])])
    return [job, config["recipe"], *own, every_chunks(config), counted(config["steps"], "step")]


METRICS = Matrix(
    rows=metric_errors,
    title="Metrics against the plain step",
    heading="Metrics against the plain step: relative error in step 1, by level and number of chunks",
    looks={
        "measured": Look(0, "measured"),
        "computed": Look(1, "if the loss's normalizer divided every metric (computed)"),
    },
    limits=(Limit("metric_parity", "above the limit of {limit:g}"),),
)
GRADIENTS = Lines(
    rows=gradient_errors,
    title="Gradients by number of chunks",
    heading="Gradients against the plain step",
    bars=True,
    scale="errors",
    looks={
        "tokens": Look(0, marker="o"),
        "sequences": Look(3, marker="s"),
        "against the first number of chunks": Look("ink", marker="D", line=None, hollow=True),
        "later": Look("faint", "{later}", marker="", line=None),
    },
    limits=(Limit("grad_parity", "limit {limit:g}, step 1"), Limit("later_steps", "limit {limit:g}, later")),
    label="||dg|| / ||g||",
    about="chunks per step (a point is one step, n = 1)",
    height=3.6,
    share=0.8,
)
STEP = Lanes(
    rows=step_calls,
    title="A step, call by call",
    heading="Step {step}, call by call ({ranks})",
    looks=CALLS,
    about="time since the step began, one sample",
    lane=0.24,
)
CHARTS = Charts(
    cycle="level and chunks",
    cycle_words=lambda config: {case.cycle: f"{case.level}\n{case.chunks or EACH}" for case in cases_of(config)},
    plots={
        "metrics": METRICS,
        "gradients": GRADIENTS,
        "calls": STEP,
    },
    overview=(("calls", "gradients"), ("metrics",), ("verdict",)),
    words=heading,
    ready=is_rehearsed,
    tables={
        "metrics": Table("Every metric, worst first", lambda data: rules.metrics(data.records, data.config), "error"),
        "tensors": Table(
            "Every tensor, worst first", lambda data: rules.tensors(data.records, data.config), "gradient_error"
        ),
    },
)
