"""What the smoke lab asks of its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.results import Check, Measured, NotMeasured, select

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
            raise NotMeasured(f"{metric} is missing on some rank")
        worst = after.iloc[int(more.to_numpy().argmax())]
        was, now = int(before[worst["rank"]]), int(worst["value"])
        return Measured(
            float(more.max()), f"rank {worst['rank']}: {was} at the baseline, {now} after cycle {worst['cycle']}"
        )

    return measure


def wrong_values(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Numbers that came out wrong, over all groups, cycles and ranks; a group that nobody talked over is not right."""
    wrong = select(frame, phase="talk", metric="wrong_values")
    talked = select(frame, phase="talk", metric="talked_groups")
    if len(wrong) < config["cycles"] * config["ranks"]:
        raise NotMeasured(f"only {len(wrong)} of {config['cycles'] * config['ranks']} talks were made")
    if (talked["value"] != config["groups"]).any():
        raise NotMeasured(f"a rank talked over fewer than {config['groups']} groups")
    bad = wrong[wrong["value"] != 0]
    where = ", ".join(f"rank {row.rank} in cycle {row.cycle}" for row in bad.itertuples())
    talks = f"{len(wrong)} talks over {config['groups']} groups, every sum compared"
    return Measured(float(wrong["value"].sum()), f"wrong on {where}" if where else talks)


def drift(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Growth of anonymous memory from the first cycle's end to the last's, on the rank where it is worst."""
    levels = select(frame, phase="count", metric="anon_rss").pivot_table(index="cycle", columns="rank", values="value")
    if len(levels) < 2:
        raise NotMeasured("a drift needs two cycles or more")
    grown = (levels.iloc[-1] - levels.iloc[0]) / 2**20
    return Measured(float(grown.max()), f"rank {grown.idxmax()}, cycle {levels.index[0]} to {levels.index[-1]}")


CHECKS = (
    Check(
        name="groups_return_to_baseline",
        question="Are all process groups gone from torch's registry after every cycle?",
        tolerance="groups_more",
        limit=0,
        unit="1",
        better="<=",
        measure=more_than_baseline("groups"),
    ),
    Check(
        name="every_group_communicates",
        question="Does every group give the exact sum of what its ranks put in?",
        tolerance="wrong_values",
        limit=0,
        unit="1",
        better="<=",
        measure=wrong_values,
    ),
    Check(
        name="fds_return",
        question="Are the groups' sockets and files closed?",
        tolerance="fds_more",
        limit=0,
        unit="1",
        better="<=",
        measure=more_than_baseline("fds"),
    ),
    Check(
        name="threads_return",
        question="Have the groups' threads ended?",
        tolerance="threads_more",
        limit=0,
        unit="1",
        better="<=",
        measure=more_than_baseline("threads"),
    ),
    Check(
        name="memory_drift",
        question="Does memory stay where it was after the first cycle?",
        tolerance="drift_mib",
        limit=50,
        unit="MiB",
        better="<=",
        measure=drift,
    ),
)
