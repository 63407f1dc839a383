"""What the smoke lab asks of its records, and named sets of limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.results import Measured, Rule, Unjudged, rule, select
from kit.results.growth import DRIFT_CYCLES, SLOPE_CYCLES, each_rank, growth, largest, slopes, worst, worst_of

if TYPE_CHECKING:
    import pandas as pd


def every_group_communicates(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does an all-reduce over every group return the exact sum?

    A group without an all-reduce does not pass."""
    wrong = each_rank(frame, config, "talk", "wrong_values")
    if (select(frame, phase="talk", metric="talked_groups")["value"] != config["groups"]).any():
        raise Unjudged(f"a rank used fewer than {config['groups']} groups")
    return worst(wrong)


RULES = (
    Rule(
        "groups_return_to_baseline",
        "Are all process groups gone after every cycle, registered with torch or not?",
        worst_of(largest("groups", after="count", base="baseline"), largest("groups_alive", after="count")),
    ),
    Rule(
        "groups_are_distinct",
        "Is every group distinct from the others and from WORLD?",
        largest("shared_groups", after="talk"),
    ),
    rule(every_group_communicates),
    Rule(
        "fds_return",
        "Does the number of file descriptors return to the baseline?",
        largest("fds", after="count", base="baseline"),
    ),
    Rule(
        "threads_return",
        "Does the number of threads return to the baseline?",
        largest("threads", after="count", base="baseline"),
    ),
    Rule(
        "memory_drift",
        "Is memory after the last cycle the same as after the first cycle?",
        growth("count", "anon_rss"),
        limit=50,
        unit="MiB",
        cycles=DRIFT_CYCLES,
    ),
    Rule(
        "memory_slope",
        "Is memory growth per cycle no larger than in a control run without groups?",
        slopes("count", control="control"),
        limit=1,
        unit="MiB/cycle",
        cycles=SLOPE_CYCLES,
    ),
    Rule(
        "names_restored",
        "Are all functions of torch.distributed the original ones at the end?",
        largest("names_replaced", after="count"),
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
