"""Answers to the checks that hold a step against what is known without another: promises, float64, the rows themselves."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.split import parity
from kit.labs.split.config import KIT_LOSS, KIT_MODEL, cases_of
from kit.results import Measured, Missing, NotMeasured, incomplete, select, with_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

WAYS = (("sync", "plain"), ("split", "piece-wise"))


def promised(*names: str, phases: Sequence[str] = ("rehearse",), what: str, beside: Sequence[str] = ()) -> Measure:
    """Sums of what ranks counted of broken promises, on the rank that is worst; right is 0. `beside` are told and not counted."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        total, said = 0.0, []
        broke = frame[(frame["metric"] == "rehearsal_raised") & (frame["value"] > 0)]
        for name in (*names, *beside):
            rows = frame[frame["phase"].isin(phases) & (frame["metric"] == name)]
            if rows.empty and not broke.empty:
                row = broke.iloc[0]
                return Measured(
                    math.inf, f"could not be judged: the rehearsal raised ({place_of(row['ids'], row['text'])})"
                )
            if rows.empty:
                raise Missing(f"no records of {name}")
            worst = rows.loc[rows.groupby(["cycle", "ids"])["value"].idxmax()]
            broken = worst[worst["value"] > 0]
            if name in names:
                total += float(broken["value"].sum())
            if not broken.empty:
                where = "; ".join(filter(None, map(place_of, broken["ids"], broken["text"])))
                said.append(f"{name.replace('_', ' ')}: {broken['value'].sum():g}" + (f" ({where})" if where else ""))
        return Measured(total, ", ".join(said) if total else "; ".join([what, *said]))

    return measure


def place_of(ids: str, text: str) -> str:
    """What a record is about, in words."""
    words = [str(value) for value in json.loads(ids).values()] if ids else []
    return ", ".join(filter(None, [*words, text]))


def update(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Both ways' updates against float64 formulas of their own, from the gradients that the optimizer found."""
    if config["model"] != KIT_MODEL:
        raise NotMeasured(f"model={config['model']} has its own optimizer, and its settings are not known")
    names = ("update_error", "update_norm_error", "update_rate_error", "update_decay_error")
    rows = frame[frame["phase"].isin(["sync", "split"]) & frame["metric"].isin(names)]
    runs = rows[rows["metric"] == "update_error"]["cycle"].nunique()
    if runs < len(cases_of(config)):
        incomplete(f"updates were recorded for {runs} of {len(cases_of(config))} ways to cut")
    worst = {name: parity.worst(rows[rows["metric"] == name], "value") for name in names if name in set(rows["metric"])}
    if len(worst) < len(names) and runs < len(cases_of(config)):
        raise Missing("updates were not recorded")
    if len(worst) < len(names):
        return Measured(math.inf, "no step of either way called the optimizer")
    row = max(worst.values(), key=lambda each: float(each["value"]))
    moved = worst["update_error"]
    said = f"weights after {config['steps']} steps against float64 clipping, AdamW and schedule: {moved['value']:.2g} of the way at worst"
    said += f", {moved['text']}, {place_of(moved['ids'], '')} step"
    off = "; ".join(
        f"{name.split('_')[1]} {each['value']:.2g} off"
        + (f" in step {json.loads(each['ids'])['step']}" if each["value"] else "")
        for name, each in worst.items()
        if name != "update_error"
    )
    return Measured(float(row["value"]), f"{said}; {off}")


def gaps(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The loss against float64 where trainer and engine are far apart."""
    rows = select(frame, phase="oracle", metric="gap_error")
    rows = rows.assign(gap=[json.loads(ids)["gap"] for ids in rows["ids"]])
    if config["loss"] != KIT_LOSS:
        rows = rows[rows["gap"].abs() <= 50]  # a loss in float32 overflows above 88
    row = parity.worst(rows, "value")
    said = f"gaps of {', '.join(map(str, sorted(rows['gap'].abs().unique())))} both ways, in float32 against float64"
    return Measured(row["value"], f"{said}; worst at {row['gap']:+d}: {row['text']} {row['value']:.2g} off")


def replicas(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Counts that are known from the rows themselves, against what the step says."""
    table = parity.values(frame, "split")
    known = parity.values(frame, "prepare")
    wide = table.pivot_table(index=["cycle", "step"], columns="metric", values="value")
    pairs = {"num_valid_samples": "sequences", "num_unmasked_tokens": "tokens"}
    pairs |= {"global_valid_seqs": "sequences", "global_valid_toks": "tokens"}
    here = {name: by for name, by in pairs.items() if name in wide}
    if not here:
        return Measured(math.inf, "the result counts no sequences and no tokens")
    true = known.pivot_table(index="step", columns="metric", values="value")
    times = {
        name: wide[name] / true[by].reindex(wide.index.get_level_values("step")).to_numpy() for name, by in here.items()
    }
    off = pd.DataFrame(times).sub(1).abs().fillna(float("inf"))
    worst = off.max().idxmax()
    said = f"counts are those of the rows: {', '.join(here)}"
    if off[worst].max():
        said = f"{worst} is {times[str(worst)][off[worst].idxmax()]:g} times what the rows hold"
    copies = config["tp"] * config["pp"]
    return Measured(float(off.max().max()), f"{said}; {copies} replica{'s' if copies > 1 else ''} of each data rank")


def oracle(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Loss, metrics and gradients of the plain step against float64 formulas of their own."""
    exact = parity.values(frame, "oracle").rename(columns={"value": "exact"})
    plain = parity.values(frame, "sync").rename(columns={"value": "plain"})
    table = exact.merge(plain, on=["cycle", "step", "metric"])
    if len(table) < len(exact):
        lacking = sorted(set(exact["metric"]) - set(plain["metric"]))
        return Measured(math.inf, f"the plain step lacks metrics that the oracle has: {', '.join(lacking)}")
    floor = parity.REGROUPED if config["dtype"] == "bfloat16" else parity.FLOOR  # rounding, as there
    table = table.assign(error=parity.error(table["plain"], table["exact"], floor))
    row = parity.worst(table, "error")
    gradients = float(select(frame, phase="oracle", metric="gradient_error")["value"].max())
    return Measured(
        max(row["error"], gradients),
        f"{many(table['metric'].nunique(), 'metric')} in float64; worst {row['metric']}: {row['plain']:.9g} against {row['exact']:.9g}; "
        f"gradients {gradients:.2g} off",
    )


def balance(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """The experts' loss that both ways report of the first step, against float64 from what routers were given."""
    exact = float(select(frame, phase="oracle", metric="balance")["value"].iloc[0])
    told = [parity.values(frame, phase).query("step == 1").assign(way=way) for phase, way in WAYS]
    table = pd.concat(each[each["metric"] == "moe_aux_loss"] for each in told)
    lacking = [way for _, way in WAYS if way not in set(table["way"])]
    if lacking:
        return Measured(math.inf, f"the result of the {lacking[0]} step has no moe_aux_loss")
    table["error"] = parity.error(table["value"], pd.Series(exact, index=table.index), parity.FLOOR)
    row = parity.worst(table, "error")
    return Measured(row["error"], f"worst in the {row['way']} step: {row['value']:.9g} against {exact:.9g} in float64")


def many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def backends(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    steps = with_ids(select(frame, phase="other_backend", metric="gradient_error"), "step")
    first = select(steps, step=1)["value"].max()
    weights = select(frame, phase="other_backend", metric="parameter_error")["value"].max()
    return Measured(
        first, f"gradients of Megatron and FSDP2 in step 1; weights after {config['steps']} steps {weights:.2g} off"
    )
