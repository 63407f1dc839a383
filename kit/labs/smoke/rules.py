"""What the smoke lab asks of its records, and named sets of limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.results import Measured, Rule, Unjudged, select
from kit.results.growth import count_of, each_rank, few_cycles, growth, more_than, most, one_cycle, slopes
from kit.results.units import counted

if TYPE_CHECKING:
    import pandas as pd


def wrong_values(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Wrong numbers over all groups, cycles and ranks; a group without an all-reduce does not pass."""
    wrong = each_rank(frame, config, "talk", "wrong_values")
    if (select(frame, phase="talk", metric="talked_groups")["value"] != config["groups"]).any():
        raise Unjudged(f"a rank used fewer than {config['groups']} groups")
    bad = wrong[wrong["value"] != 0].sort_values(["cycle", "rank"])  # they come as ranks answer
    if bad.empty:
        return Measured(0.0, f"{len(wrong)} rounds over {config['groups']} groups, all sums exact")
    first = f"first: rank {bad.iloc[0]['rank']} in cycle {bad.iloc[0]['cycle']}"
    return Measured(float(bad["value"].sum()), f"wrong sums in {counted(len(bad), 'round')}, {first}")


def groups_left(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Groups in torch's registry, or groups that are still referenced, whichever are more."""
    listed = more_than("groups", "count", "baseline")(frame, config)
    held, where = most(select(frame, phase="count", metric="groups_alive"))
    return Measured(held, f"{held:g} groups are still referenced {where}") if held > (listed.value or 0) else listed


RULES = (
    Rule(
        "groups_return_to_baseline",
        "Are all process groups gone after every cycle, registered with torch or not?",
        groups_left,
    ),
    Rule(
        "groups_are_distinct",
        "Is every group distinct from the others and from WORLD?",
        count_of(
            "talk",
            "shared_groups",
            "groups that alias another group or WORLD: {value:g} {where}",
            "all groups are distinct in {everywhere}",
        ),
    ),
    Rule(
        "every_group_communicates",
        "Does an all-reduce over every group return the exact sum?",
        wrong_values,
    ),
    Rule(
        "fds_return",
        "Does the number of file descriptors return to the baseline?",
        more_than("fds", "count", "baseline"),
    ),
    Rule(
        "threads_return",
        "Does the number of threads return to the baseline?",
        more_than("threads", "count", "baseline"),
    ),
    Rule(
        "memory_drift",
        "Is memory after the last cycle the same as after the first cycle?",
        growth("count", "after a cycle", "anon_rss"),
        limit=50,
        unit="MiB",
        cannot=one_cycle,
    ),
    Rule(
        "memory_slope",
        "Is memory growth per cycle no larger than in a control run without groups?",
        slopes("count", control="control"),
        limit=1,
        unit="MiB/cycle",
        cannot=few_cycles,
    ),
    Rule(
        "names_restored",
        "Are all functions of torch.distributed the original ones at the end?",
        count_of("count", "names_replaced", "functions replaced: {value:g} {where}", "no function was replaced"),
    ),
)


# Sets of tolerances for the smoke lab. A tolerance that a set does not name keeps the lab's default.
PRESETS = {
    "strict": {
        "memory_drift": 2.0,  # an interpreter that repeats its work varies by some hundred KiB
    },
    "common practice": {
        "fds_return": 8.0,  # descriptors and threads are usually not counted until a system limit is hit
        "threads_return": 8.0,  # a few that stay after the first use of a backend count as normal
        "memory_drift": 200.0,  # below the noise of a plot of resident memory
    },
}
