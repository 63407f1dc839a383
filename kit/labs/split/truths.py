"""Checks that need no second step to compare with: promises of the protocol, float64 computations, counts of the rows."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.split import parity
from kit.labs.split.config import KIT_LOSS, KIT_MODEL, cases_of
from kit.results import Measured, Missing, NotMeasured, incomplete, select, with_ids
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

WAYS = (("sync", "plain"), ("split", "split"))


# What each number counts, in words.
PROMISES = {
    "hooks_lost": "hooks not restored",
    "abort_changed": "tensors changed by abort",
    "abort_gradients": "nonzero gradients left by abort",
    "abort_next_differs": "tensors that differ after the step that follows an abort",
    "abort_ticked": "versions that grew with abort",
    "abort_raised": "aborts of a closed step that raised",
    "error_changed": "tensors changed by an error and the abort after it",
    "error_ticked": "versions that grew with an error",
    "error_swallowed": "errors swallowed",
    "misuse_changed": "states changed by calls in the wrong state",
    "misuse_silent": "wrong calls that were accepted",
    "misuse_other_words": "errors that do not name the state",
    "misuse_other_type": "errors of another type than Misuse (allowed)",
    "state_unseen": "kinds of state that a step did not change",
    "wrong_versions": "wrong versions",
    "groups_kept": "groups left behind",
    "nonfinite_updated": "updates with non-finite values",
    "nonfinite_changed": "tensors changed by a non-finite step",
    "nonfinite_ticks_off": "wrong versions after a non-finite step",
    "nonfinite_next_differs": "tensors that differ after the step that follows a non-finite one",
    "masked_reach": "numbers changed by masked places",
}


PLACES = 3  # of a broken promise that are named


def promised(*names: str, phases: Sequence[str] = ("rehearse",), right: str, uncounted: Sequence[str] = ()) -> Measure:
    """The number of broken promises, on the worst rank of each. `right` is the reason if there is none; `uncounted` are only shown."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        total, reasons = 0.0, []
        broke = frame[(frame["metric"] == "rehearsal_raised") & (frame["value"] > 0)]
        for name in (*names, *uncounted):
            rows = frame[frame["phase"].isin(phases) & (frame["metric"] == name)]
            if rows.empty and not broke.empty:
                row = broke.iloc[0]
                return Measured(
                    math.inf, f"could not be judged: a rehearsal raised an error ({place_of(row['ids'], row['text'])})"
                )
            if rows.empty:
                raise Missing(f"no records of {name}")
            worst = rows.loc[rows.groupby(["cycle", "ids"])["value"].idxmax()]
            broken = worst[worst["value"] > 0]
            if name in names:
                total += float(broken["value"].sum())
            if not broken.empty:
                places = [*filter(None, map(place_of, broken["ids"], broken["text"]))]
                where = "; ".join(
                    [*places[:PLACES], *([f"and {len(places) - PLACES} more"] if places[PLACES:] else [])]
                )
                reasons.append(f"{PROMISES[name]}: {broken['value'].sum():g}" + (f" ({where})" if where else ""))
        return Measured(total, ", ".join(reasons) if total else "; ".join([right, *reasons]))

    return measure


def place_of(ids: str, text: str) -> str:
    """The ids and the text of a record, in words."""
    words = [str(value) for value in json.loads(ids).values()] if ids else []
    return ", ".join(filter(None, [*words, text]))


UPDATES = {"update_norm_error": "norm", "update_rate_error": "learning rate", "update_decay_error": "decay"}


def update(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The updates of both steps against separate float64 formulas, from the gradients that the optimizer received."""
    if config["model"] != KIT_MODEL:
        raise NotMeasured(f"the optimizer settings of model={config['model']} are unknown")
    names = ("update_error", *UPDATES)
    rows = frame[frame["phase"].isin(["sync", "split"]) & frame["metric"].isin(names)]
    runs = rows[rows["metric"] == "update_error"]["cycle"].nunique()
    if runs < len(cases_of(config)):
        incomplete(f"updates were recorded for {runs} of {len(cases_of(config))} cases (level and number of chunks)")
    worst = {name: parity.worst(rows[rows["metric"] == name], "value") for name in names if name in set(rows["metric"])}
    if len(worst) < len(names) and runs < len(cases_of(config)):
        raise Missing("updates were not recorded")
    if len(worst) < len(names):
        return Measured(math.inf, "no step called ctx.optimizer.step")
    row = max(worst.values(), key=lambda each: float(each["value"]))
    moved = worst["update_error"]
    why = f"worst tensor after {counted(config['steps'], 'step')}: {moved['text']}, error {moved['value']:.2g} of the distance it moved"
    why += f" ({place_of(moved['ids'], '')} step, against float64 clipping, AdamW and schedule)"
    off = ", ".join(
        f"{UPDATES[name]} {each['value']:.2g}"
        + (f" in step {json.loads(each['ids'])['step']}" if each["value"] else "")
        for name, each in worst.items()
        if name in UPDATES
    )
    return Measured(float(row["value"]), f"{why}; relative errors: {off}")


def gaps(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The loss against float64 at large gaps between trainer and engine."""
    rows = select(frame, phase="oracle", metric="gap_error")
    rows = rows.assign(gap=[json.loads(ids)["gap"] for ids in rows["ids"]])
    if config["loss"] != KIT_LOSS:
        rows = rows[rows["gap"].abs() <= 50]  # a loss in float32 overflows above 88
    row = parity.worst(rows, "value")
    why = f"worst at a gap of {row['gap']:+d}: {row['text']}, error {row['value']:.2g}"
    sizes = ", ".join(map(str, sorted(rows["gap"].abs().unique())))
    return Measured(row["value"], f"{why}; gaps of {sizes} in both directions, float32 against float64")


def replicas(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The counts in the result against the rows counted one by one."""
    table = parity.values(frame, "split")
    known = parity.values(frame, "prepare")
    wide = table.pivot_table(index=["cycle", "step"], columns="metric", values="value")
    pairs = {"num_valid_samples": "sequences", "num_unmasked_tokens": "tokens"}
    pairs |= {"global_valid_seqs": "sequences", "global_valid_toks": "tokens"}
    here = {name: by for name, by in pairs.items() if name in wide}
    if not here:
        return Measured(math.inf, "the result has no count of sequences or tokens")
    true = known.pivot_table(index="step", columns="metric", values="value")
    times = {
        name: wide[name] / true[by].reindex(wide.index.get_level_values("step")).to_numpy() for name, by in here.items()
    }
    off = pd.DataFrame(times).sub(1).abs().fillna(float("inf"))
    worst = off.max().idxmax()
    why = f"{', '.join(here)} equal the counts of the rows"
    if off[worst].max():
        why = f"{worst} is {times[str(worst)][off[worst].idxmax()]:g} times the count of the rows"
    ranks = counted(config["tp"] * config["pp"], "rank")
    return Measured(float(off.max().max()), f"{why} ({ranks} per data-parallel replica)")


def oracle(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Loss, metrics and gradients of the plain step against separate float64 formulas."""
    exact = parity.values(frame, "oracle").rename(columns={"value": "exact"})
    plain = parity.values(frame, "sync").rename(columns={"value": "plain"})
    table = exact.merge(plain, on=["cycle", "step", "metric"])
    if len(table) < len(exact):
        lacking = sorted(set(exact["metric"]) - set(plain["metric"]))
        return Measured(math.inf, f"the plain step does not report {', '.join(lacking)}, which the float64 oracle has")
    floor = parity.REGROUPED if config["dtype"] == "bfloat16" else parity.FLOOR  # rounding, as there
    table = table.assign(error=parity.error(table["plain"], table["exact"], floor))
    row = parity.worst(table, "error")
    gradients = float(select(frame, phase="oracle", metric="gradient_error")["value"].max())
    return Measured(
        max(row["error"], gradients),
        f"worst of {counted(table['metric'].nunique(), 'metric')}: {row['metric']}, {row['plain']:.9g} vs {row['exact']:.9g} in float64; "
        f"gradients: ||dg||/||g|| {gradients:.2g}",
    )


def balance(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """The load-balancing loss that both steps report for step 1, against float64 from the routers' inputs."""
    exact = float(select(frame, phase="oracle", metric="balance")["value"].iloc[0])
    reported = [parity.values(frame, phase).query("step == 1").assign(way=way) for phase, way in WAYS]
    table = pd.concat(each[each["metric"] == "moe_aux_loss"] for each in reported)
    lacking = [way for _, way in WAYS if way not in set(table["way"])]
    if lacking:
        return Measured(math.inf, f"the result of the {lacking[0]} step has no moe_aux_loss")
    table["error"] = parity.error(table["value"], pd.Series(exact, index=table.index), parity.FLOOR)
    row = parity.worst(table, "error")
    return Measured(row["error"], f"worst: {row['value']:.9g} in the {row['way']} step vs {exact:.9g} in float64")


def backends(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    steps = with_ids(select(frame, phase="other_backend", metric="gradient_error"), "step")
    first = select(steps, step=1)["value"].max()
    weights = select(frame, phase="other_backend", metric="parameter_error")["value"].max()
    return Measured(
        first,
        f"||dg||/||g|| between Megatron and FSDP2 in step 1; weights after {counted(config['steps'], 'step')}: ||dp||/||p|| {weights:.2g}",
    )
