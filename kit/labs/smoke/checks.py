"""What the smoke lab asks of its records, and named sets of limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.growth import at_most, few_cycles, one_cycle, slopes
from kit.results import Measured, Missing, Unjudged, incomplete, select
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd


def more_than_baseline(metric: str) -> Callable[[pd.DataFrame, Mapping[str, Any]], Measured]:
    """How many more there are after any cycle than at the baseline, on the rank where it is worst."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        before = select(frame, phase="baseline", metric=metric).set_index("rank")["value"]
        after = select(frame, phase="count", metric=metric)
        more = after["value"] - after["rank"].map(before)
        if more.isna().any():
            incomplete(f"{metric} was not recorded on every rank")
            after, more = after[more.notna()], more.dropna()
        worst = after.iloc[int(more.to_numpy().argmax())]
        was, now = int(before[worst["rank"]]), int(worst["value"])
        said = f"after cycle {worst['cycle']}: {now}, at baseline: {was} (rank {worst['rank']})"
        return Measured(float(more.max()), said)

    return measure


def wrong_values(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Wrong numbers over all groups, cycles and ranks; a group without an all-reduce does not pass."""
    wrong = select(frame, phase="talk", metric="wrong_values")
    talked = select(frame, phase="talk", metric="talked_groups")
    if len(wrong) < config["cycles"] * config["ranks"]:
        incomplete(f"only {len(wrong)} of {config['cycles'] * config['ranks']} rounds were run")
    if (talked["value"] != config["groups"]).any():
        raise Unjudged(f"a rank used fewer than {config['groups']} groups")
    bad = wrong[wrong["value"] != 0].sort_values(["cycle", "rank"])  # they come as ranks answer
    if bad.empty:
        return Measured(0.0, f"{len(wrong)} rounds over {config['groups']} groups, all sums exact")
    first = f"first: rank {bad.iloc[0]['rank']} in cycle {bad.iloc[0]['cycle']}"
    return Measured(float(bad["value"].sum()), f"wrong sums in {counted(len(bad), 'round')}, {first}")


def groups_left(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Groups in torch's registry, or groups that are still referenced, whichever are more."""
    listed = more_than_baseline("groups")(frame, config)
    held = select(frame, phase="count", metric="groups_alive")
    worst = held.iloc[int(held["value"].to_numpy().argmax())]
    if worst["value"] > (listed.value or 0):
        where = f"rank {worst['rank']} after cycle {worst['cycle']}"
        return Measured(float(worst["value"]), f"{worst['value']:g} groups are still referenced: {where}")
    return listed


def shared(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Groups that alias another one: a collective over them runs over that group, or over WORLD."""
    rows = select(frame, phase="talk", metric="shared_groups")
    if len(rows) < config["cycles"] * config["ranks"]:
        incomplete(f"shared_groups was recorded {len(rows)} times, not {config['cycles'] * config['ranks']}")
    worst = rows.iloc[int(rows["value"].to_numpy().argmax())]
    value = float(worst["value"])
    said = f"{value:g} of {config['groups']} groups alias another group or WORLD (rank {worst['rank']}, cycle {worst['cycle']})"
    return Measured(value, said if value else f"all {config['groups']} groups are distinct")


def replaced(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    rows = select(frame, phase="count", metric="names_replaced")
    worst = rows.iloc[int(rows["value"].to_numpy().argmax())]
    value = float(worst["value"])
    return Measured(value, f"rank {worst['rank']}: {worst['text']}" if value else "no function was replaced")


def drift(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Growth of anonymous memory from the first cycle's end to the last's, on the rank where it is worst."""
    levels = select(frame, phase="count", metric="anon_rss").pivot_table(index="cycle", columns="rank", values="value")
    if len(levels) < 2:
        raise Missing("memory was recorded in fewer than 2 cycles")
    grown = (levels.iloc[-1] - levels.iloc[0]) / 2**20
    said = f"anon_rss after cycle {levels.index[-1]} vs cycle {levels.index[0]} (rank {grown.idxmax()})"
    return Measured(float(grown.max()), said)


CHECKS = (
    at_most(
        "groups_return_to_baseline",
        "Are all process groups gone after every cycle, registered with torch or not?",
        "groups_more",
        groups_left,
    ),
    at_most("groups_are_distinct", "Is every group distinct from the others and from WORLD?", "groups_shared", shared),
    at_most(
        "every_group_communicates",
        "Does an all-reduce over every group return the exact sum?",
        "wrong_values",
        wrong_values,
    ),
    at_most(
        "fds_return",
        "Does the number of file descriptors return to the baseline?",
        "fds_more",
        more_than_baseline("fds"),
    ),
    at_most(
        "threads_return",
        "Does the number of threads return to the baseline?",
        "threads_more",
        more_than_baseline("threads"),
    ),
    at_most(
        "memory_drift",
        "Is memory after the last cycle the same as after the first cycle?",
        "drift_mib",
        drift,
        limit=50,
        unit="MiB",
        cannot=one_cycle,
    ),
    at_most(
        "memory_slope",
        "Is memory growth per cycle no larger than in a control run without groups?",
        "slope_mib",
        slopes("count", control="control"),
        limit=1,
        unit="MiB/cycle",
        cannot=few_cycles,
    ),
    at_most(
        "names_restored",
        "Are all functions of torch.distributed the original ones at the end?",
        "names_replaced",
        replaced,
    ),
)


# Sets of tolerances for the smoke lab. A tolerance that a set does not name keeps the lab's default.
PRESETS = {
    "strict": {
        "drift_mib": 2.0,  # an interpreter that repeats its work varies by some hundred KiB
    },
    "common practice": {
        "fds_more": 8.0,  # descriptors and threads are usually not counted until a system limit is hit
        "threads_more": 8.0,  # a few that stay after the first use of a backend count as normal
        "drift_mib": 200.0,  # below the noise of a plot of resident memory
    },
}
