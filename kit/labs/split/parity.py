"""The tables of a split run: every metric of the plain and the split step, and the errors of every gradient and weight.

`metrics(frame, config)` and `tensors(frame, config)` return pandas tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.labs.split.config import cases_of
from kit.results import Missing, with_ids
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

# Errors of smaller values are absolute: a relative limit of 1e-6 becomes an absolute one of 1e-8.
FLOOR = 1e-2
# The same threshold if the rows of a microbatch depend on the number of chunks: log-probabilities are rounded differently, and a loss
# near zero is a small difference of large terms.
REGROUPED = 1.0
NOT_METRICS = frozenset({"grad_norm", "lr", "wd", "global_valid_seqs", "global_valid_toks", "updated", "global_loss"})


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
    table = paired(frame, config)
    table = table[~table["metric"].isin(NOT_METRICS)]
    plain = paired(frame, config).pivot_table(index=["cycle", "step"], columns="metric", values="sync", dropna=False)
    recorded = with_ids(
        frame[(frame["phase"] == "sync") & (frame["rank"] == 0) & (frame["metric"] == "normalizer")], "name"
    )
    level = {case.cycle: case.level for case in cases_of(config)}
    rows = zip(recorded["cycle"], recorded["name"], recorded["text"], strict=True)
    by = {(level[cycle], name): normalizer for cycle, name, normalizer in rows}
    keys = zip(table["level"], table["metric"], strict=True)
    table = table.assign(normalizer=[by.get(key, "none") for key in keys])
    counts = plain[["global_valid_seqs", "global_valid_toks"]].clip(lower=1)
    where = pd.MultiIndex.from_frame(table[["cycle", "step"]])
    sequences = counts["global_valid_seqs"].reindex(where).to_numpy()
    tokens = counts["global_valid_toks"].reindex(where).to_numpy()
    own = {"tokens": tokens, "sequences": sequences}
    right = [own[each][index] if each in own else 1.0 for index, each in enumerate(table["normalizer"])]
    scalar = [own[level][index] for index, level in enumerate(table["level"])]
    extreme = table["metric"].str.endswith(("_min", "_max"))
    table["one_scalar"] = table["sync"].where(extreme, table["sync"] * right / scalar)
    table["one_scalar_error"] = error(table["one_scalar"], table["sync"], FLOOR)
    columns = [
        "level",
        "chunks",
        "step",
        "metric",
        "normalizer",
        "sync",
        "split",
        "one_scalar",
        "error",
        "one_scalar_error",
    ]
    return table[columns].sort_values(["level", "chunks", "step", "metric"], ignore_index=True)


def tensors(frame: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """Every tensor of every case: relative error of the first gradient and of the final weights, and the worst element."""
    rows = frame[(frame["phase"] == "compare") & (frame["rank"] == 0)]
    found = with_ids(rows[rows["metric"].str.startswith("tensor_")], "tensor")
    if found.empty:
        raise Missing("no tensors were compared")
    found = found.assign(name=found["metric"].str.removeprefix("tensor_"))
    wide = found.pivot_table(index=["cycle", "tensor"], columns="name", values="value", sort=False).reset_index()
    cases = {case.cycle: case for case in cases_of(config)}
    wide.insert(0, "level", [cases[cycle].level for cycle in wide["cycle"]])
    wide.insert(1, "chunks", [cases[cycle].chunks for cycle in wide["cycle"]])
    return wide.drop(columns="cycle").rename_axis(columns=None)


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
