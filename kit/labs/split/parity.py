"""The tables of a split run: every metric of the plain and the split step, and the errors of every gradient and weight; and the measures
of checks that need no second step to compare with: promises of the protocol, float64 computations, counts of the rows.

`metrics(frame, config)` and `tensors(frame, config)` return pandas tables.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.split.config import KIT_LOSS, KIT_MODEL, cases_of
from kit.results import Measured, Missing, NotMeasured, incomplete, select, with_ids
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]


# Errors of smaller values are absolute: a relative limit of 1e-6 becomes an absolute one of 1e-8.
FLOOR = 1e-2
# The same threshold if the rows of a microbatch depend on the number of chunks: log-probabilities are rounded differently, and a loss
# near zero is a small difference of large terms.
REGROUPED = 1.0
NOT_METRICS = frozenset({"grad_norm", "lr", "wd", "global_valid_seqs", "global_valid_toks", "updated", "global_loss"})
WAYS = (("sync", "plain"), ("split", "split"))
UPDATES = {"update_norm_error": "norm", "update_rate_error": "learning rate", "update_decay_error": "decay"}
PLACES = 3  # of a broken promise that are named


def results(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """The numbers that ranks recorded for the steps of a phase, with columns `step` and `name`."""
    found = with_ids(frame[(frame["phase"] == phase) & (frame["metric"] == "result")], "step", "name")
    if found.empty:
        raise Missing(f"no results of phase {phase}")
    return found


def values(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    """The numbers that rank 0 recorded for the steps of a phase, by cycle, step and metric."""
    found = results(frame[frame["rank"] == 0], phase)
    return found.assign(metric=found["name"])[["cycle", "step", "metric", "value"]]


def error(value: pd.Series, base: pd.Series, floor: float) -> pd.Series:
    """Relative error, absolute below the floor. NaN equals NaN and an infinity itself; other non-finite errors are infinite."""
    equal = (value == base) | (value.isna() & base.isna())
    relative = (value - base).abs() / base.abs().clip(lower=floor)
    return relative.fillna(float("inf")).where(~equal, 0.0)


def worst(table: pd.DataFrame, column: str) -> dict[str, Any]:
    """The row with the largest value of a column."""
    row = table.iloc[int(table[column].to_numpy().argmax())]
    return {str(name): value for name, value in row.items()}


def paired(frame: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """Every number of the plain and the split step: cycle, level, chunks, step, metric, sync, split, error."""
    cut = values(frame, "split")
    plain = values(frame, "sync")
    rows = []
    base = 0
    for case in cases_of(config):
        base = case.cycle if case.first else base
        one = plain[plain["cycle"] == base].drop(columns="cycle").rename(columns={"value": "sync"})
        two = cut[cut["cycle"] == case.cycle].drop(columns="cycle").rename(columns={"value": "split"})
        if two.empty:
            raise Missing(f"the split step with chunks={case.chunks}, level={case.level} did not run")
        both = one.merge(two, on=["step", "metric"], how="outer", indicator="seen")
        rows.append(both.assign(cycle=case.cycle, level=case.level, chunks=case.chunks))
    table = pd.concat(rows, ignore_index=True)
    floor = FLOOR if config["batching"] == "fixed" else REGROUPED
    return table.assign(error=error(table["split"], table["sync"], floor))


def metrics(frame: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """Every metric of every case and step, its normalizer, and its value if one scalar divided all metrics."""
    numbers = paired(frame, config)
    table = numbers[~numbers["metric"].isin(NOT_METRICS)]
    rows = frame[(frame["phase"] == "sync") & (frame["rank"] == 0) & (frame["metric"] == "normalizer")]
    recorded = with_ids(rows, "name")
    level = {case.cycle: case.level for case in cases_of(config)}
    keys = zip(recorded["cycle"].map(level), recorded["name"], strict=True)
    by = dict(zip(keys, recorded["text"], strict=True))
    keys = zip(table["level"], table["metric"], strict=True)
    table = table.assign(normalizer=[by.get(key, "none") for key in keys])
    steps = numbers.pivot_table(index=["cycle", "step"], columns="metric", values="sync", dropna=False)
    counts = steps[["global_valid_seqs", "global_valid_toks"]].clip(lower=1)
    counts = counts.set_axis(["sequences", "tokens"], axis=1).assign(none=1.0)
    own = counts.reindex(pd.MultiIndex.from_frame(table[["cycle", "step"]])).to_dict("records")
    right = [each[name] for each, name in zip(own, table["normalizer"], strict=True)]
    scalar = [each[name] for each, name in zip(own, table["level"], strict=True)]
    extreme = table["metric"].str.endswith(("_min", "_max"))
    table["one_scalar"] = table["sync"].where(extreme, table["sync"] * right / scalar)
    table["one_scalar_error"] = error(table["one_scalar"], table["sync"], FLOOR)
    keys_of = ["level", "chunks", "step", "metric"]
    columns = [*keys_of, "normalizer", "sync", "split", "one_scalar", "error", "one_scalar_error"]
    return table[columns].sort_values(keys_of, ignore_index=True)


def tensors(frame: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """Every tensor of every case: relative error of the first gradient and of the final weights, and the worst element."""
    rows = frame[(frame["phase"] == "compare") & (frame["rank"] == 0)]
    found = with_ids(rows[rows["metric"].str.startswith("tensor_")], "tensor")
    if found.empty:
        raise Missing("no tensors were compared")
    found = found.assign(name=found["metric"].str.removeprefix("tensor_"))
    cases = pd.DataFrame(cases_of(config))[["cycle", "level", "chunks"]]
    wide = found.pivot_table(index=["cycle", "tensor"], columns="name", values="value", sort=False).reset_index()
    return cases.merge(wide, on="cycle").drop(columns="cycle")


# -- words for the reasons of checks and for pictures -------------------------------------------------------------------


def every_chunks(config: Mapping[str, Any]) -> str:
    """The numbers of chunks of a run."""
    return "chunks " + ", ".join(str(count or "one per microbatch") for count in config["chunks"])


def scope(config: Mapping[str, Any]) -> str:
    """The steps, levels and numbers of chunks that a run compared."""
    levels = sorted({case.level for case in cases_of(config)}, reverse=True)
    return f"{counted(config['steps'], 'step')}, loss per {' and per '.join(map(singular, levels))}, {every_chunks(config)}"


def singular(level: str) -> str:
    return level.removesuffix("s")


def where(config: Mapping[str, Any], cycle: int) -> str:
    case = next(case for case in cases_of(config) if case.cycle == cycle)
    return f"loss per {singular(case.level)}, {chunks_of(case.chunks)}"


def chunks_of(count: int) -> str:
    return counted(count, "chunk") if count else "one chunk per microbatch"


def against(row: Mapping[str, Any]) -> str:
    """A number of the split step beside the plain step's."""
    return f"{row['split']:.9g} vs {row['sync']:.9g} in the plain step"


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


def promised(*names: str, phases: Sequence[str] = ("rehearse",), right: str, uncounted: Sequence[str] = ()) -> Measure:
    """The number of broken promises, on the worst rank of each. `right` is the reason if there is none; `uncounted` are only shown."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        total, reasons = 0.0, []
        broke = frame[(frame["metric"] == "rehearsal_raised") & (frame["value"] > 0)]
        for name in (*names, *uncounted):
            rows = frame[frame["phase"].isin(phases) & (frame["metric"] == name)]
            if rows.empty and not broke.empty:
                where = place_of(*broke.iloc[0][["ids", "text"]])
                return Measured(math.inf, f"could not be judged: a rehearsal raised an error ({where})")
            if rows.empty:
                raise Missing(f"no records of {name}")
            worst = rows.loc[rows.groupby(["cycle", "ids"])["value"].idxmax()]
            broken = worst[worst["value"] > 0]
            if name in names:
                total += float(broken["value"].sum())
            if not broken.empty:
                places = [*filter(None, map(place_of, broken["ids"], broken["text"]))]
                more = [f"and {len(places) - PLACES} more"] if places[PLACES:] else []
                where = "; ".join(places[:PLACES] + more)
                reasons.append(f"{PROMISES[name]}: {broken['value'].sum():g}" + (f" ({where})" if where else ""))
        return Measured(total, ", ".join(reasons) if total else "; ".join([right, *reasons]))

    return measure


def place_of(ids: str, text: str) -> str:
    """The ids and the text of a record, in words."""
    words = [str(value) for value in json.loads(ids).values()] if ids else []
    return ", ".join(filter(None, [*words, text]))


def update(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The updates of both steps against separate float64 formulas, from the gradients that the optimizer received."""
    if config["model"] != KIT_MODEL:
        raise NotMeasured(f"the optimizer settings of model={config['model']} are unknown")
    names = ("update_error", *UPDATES)
    rows = frame[frame["phase"].isin(["sync", "split"]) & frame["metric"].isin(names)]
    runs = rows[rows["metric"] == "update_error"]["cycle"].nunique()
    if runs < len(cases_of(config)):
        incomplete(f"updates were recorded for {runs} of {len(cases_of(config))} cases (level and number of chunks)")
    most = {name: worst(rows[rows["metric"] == name], "value") for name in names if name in set(rows["metric"])}
    if len(most) < len(names) and runs < len(cases_of(config)):
        raise Missing("updates were not recorded")
    if len(most) < len(names):
        return Measured(math.inf, "no step called ctx.optimizer.step")
    row = max(most.values(), key=lambda each: float(each["value"]))
    moved = most["update_error"]
    why = f"worst tensor after {counted(config['steps'], 'step')}: {moved['text']}, error {moved['value']:.2g} of the distance it moved"
    why += f" ({place_of(moved['ids'], '')} step, against float64 clipping, AdamW and schedule)"
    off = ", ".join(
        f"{word} {most[name]['value']:.2g}"
        + (f" in step {json.loads(most[name]['ids'])['step']}" if most[name]["value"] else "")
        for name, word in UPDATES.items()
    )
    return Measured(float(row["value"]), f"{why}; relative errors: {off}")


def gaps(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The loss against float64 at large gaps between trainer and engine."""
    rows = select(frame, phase="oracle", metric="gap_error")
    rows = rows.assign(gap=[json.loads(ids)["gap"] for ids in rows["ids"]])
    if config["loss"] != KIT_LOSS:
        rows = rows[rows["gap"].abs() <= 50]  # a loss in float32 overflows above 88
    row = worst(rows, "value")
    why = f"worst at a gap of {row['gap']:+d}: {row['text']}, error {row['value']:.2g}"
    sizes = ", ".join(map(str, sorted(rows["gap"].abs().unique())))
    return Measured(row["value"], f"{why}; gaps of {sizes} in both directions, float32 against float64")


def replicas(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The counts in the result against the rows counted one by one."""
    table = values(frame, "split")
    known = values(frame, "prepare")
    wide = table.pivot_table(index=["cycle", "step"], columns="metric", values="value")
    pairs = {"num_valid_samples": "sequences", "num_unmasked_tokens": "tokens"}
    pairs |= {"global_valid_seqs": "sequences", "global_valid_toks": "tokens"}
    here = {name: by for name, by in pairs.items() if name in wide}
    if not here:
        return Measured(math.inf, "the result has no count of sequences or tokens")
    true = known.pivot_table(index="step", columns="metric", values="value")
    steps = wide.index.get_level_values("step")
    times = {name: wide[name] / true[by].reindex(steps).to_numpy() for name, by in here.items()}
    off = pd.DataFrame(times).sub(1).abs().fillna(float("inf"))
    worst = off.max().idxmax()
    why = f"{', '.join(here)} equal the counts of the rows"
    if off[worst].max():
        why = f"{worst} is {times[str(worst)][off[worst].idxmax()]:g} times the count of the rows"
    ranks = counted(config["tp"] * config["pp"], "rank")
    return Measured(float(off.max().max()), f"{why} ({ranks} per data-parallel replica)")


def oracle(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Loss, metrics and gradients of the plain step against separate float64 formulas."""
    exact = values(frame, "oracle").rename(columns={"value": "exact"})
    plain = values(frame, "sync").rename(columns={"value": "plain"})
    table = exact.merge(plain, on=["cycle", "step", "metric"])
    if len(table) < len(exact):
        lacking = sorted(set(exact["metric"]) - set(plain["metric"]))
        return Measured(math.inf, f"the plain step does not report {', '.join(lacking)}, which the float64 oracle has")
    floor = REGROUPED if config["dtype"] == "bfloat16" else FLOOR  # rounding, as there
    table = table.assign(error=error(table["plain"], table["exact"], floor))
    row = worst(table, "error")
    gradients = float(select(frame, phase="oracle", metric="gradient_error")["value"].max())
    why = f"worst of {counted(table['metric'].nunique(), 'metric')}: {row['metric']}, {row['plain']:.9g} vs {row['exact']:.9g} in float64"
    return Measured(max(row["error"], gradients), f"{why}; gradients: ||dg||/||g|| {gradients:.2g}")


def balance(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """The load-balancing loss that both steps report for step 1, against float64 from the routers' inputs."""
    exact = float(select(frame, phase="oracle", metric="balance")["value"].iloc[0])
    reported = [values(frame, phase).query("step == 1").assign(way=way) for phase, way in WAYS]
    table = pd.concat(each[each["metric"] == "moe_aux_loss"] for each in reported)
    if lacking := [way for _, way in WAYS if way not in set(table["way"])]:
        return Measured(math.inf, f"the result of the {lacking[0]} step has no moe_aux_loss")
    table["error"] = error(table["value"], pd.Series(exact, index=table.index), FLOOR)
    row = worst(table, "error")
    return Measured(row["error"], f"worst: {row['value']:.9g} in the {row['way']} step vs {exact:.9g} in float64")


def backends(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    steps = with_ids(select(frame, phase="other_backend", metric="gradient_error"), "step")
    first = select(steps, step=1)["value"].max()
    weights = select(frame, phase="other_backend", metric="parameter_error")["value"].max()
    after = f"weights after {counted(config['steps'], 'step')}: ||dp||/||p|| {weights:.2g}"
    return Measured(first, f"||dg||/||g|| between Megatron and FSDP2 in step 1; {after}")
