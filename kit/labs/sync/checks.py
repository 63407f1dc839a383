"""What the sync lab asks of its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.memory import growth, on_cuda, others_untouched
from kit.results import Check, Measured, NotMeasured, select

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MIB = 2**20
SYNCS = ("refresh", "expand")
ORDER = {
    "base": ("publish", "activate"),
    "refresh": (
        "ready",
        "received",
        "verified",
        "gate",
        "applied",
        "teardown",
        "finalize",
        "publish",
        "activate",
        "end",
    ),
    "stream": (
        "inactive",
        "gate",
        "begin",
        "ready",
        "received",
        "verified",
        "applied",
        "teardown",
        "finalize",
        "publish",
    ),
    "expand": (
        "inactive",
        "wake",
        "begin",
        "ready",
        "received",
        "verified",
        "applied",
        "teardown",
        "finalize",
        "publish",
    ),
}
FAILURES = (
    "accepted",
    "unnamed",
    "kept_version",
    "kept_wrong",
    "left_segments",
    "left_groups",
    "silent",
    "next_failed",
)


def syncs(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A number of every sync of a version."""
    rows = frame[frame["phase"].isin(SYNCS) & (frame["metric"] == metric)]
    if rows.empty:
        raise NotMeasured(f"no sync recorded {metric}")
    return rows


def worst(rows: pd.DataFrame) -> tuple[float, str]:
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    return float(row["value"]), f"rank {row['rank']}, {row['phase']}, cycle {row['cycle']}"


def bit_exact(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    differ = select(frame, phase="verify", metric="tensors_differ")
    hashed = select(frame, phase="verify", metric="tensors_hashed")["value"]
    wanted = config["infer_tp"] * config["replicas"] * config["cycles"]
    if len(differ) < wanted or not hashed.min():
        raise NotMeasured(f"{len(differ)} of {wanted} comparisons of all tensors were made")
    value, where = worst(differ)
    seen = f"SHA-256 of {hashed.min():.0f} tensors on {len(differ)} occasions"
    sent, verified = syncs(frame, "tensors_sent")["value"].max(), syncs(frame, "tensors_verified")["value"].min()
    seen += f"; on the way {verified:.0f} of {sent:.0f} were compared ({config['verify']})"
    return Measured(value, f"{value:.0f} differ on {where}; {seen}" if value else f"none differs; {seen}")


def equal_layouts(config: Mapping[str, Any]) -> bool:
    return bool(config["tp"] == config["infer_tp"] and config["pp"] == 1)


def logits_limit(config: Mapping[str, Any]) -> float:
    """Equal layouts add in one order; others round otherwise."""
    if equal_layouts(config):
        return 0.0
    return 1e-5 if config["dtype"] == "float32" else 3e-2


def logits_equal(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    errors = select(frame, phase="verify", metric="logits_error")
    same = select(frame, phase="verify", metric="logits_same")["value"].sum()
    value, where = worst(errors)
    if equal_layouts(config) and value == 0 and same < len(errors):
        value = float("inf")
    kind = "one layout on both sides" if equal_layouts(config) else "layouts differ, so sums are added in another order"
    return Measured(value, f"{same:.0f} of {len(errors)} are the same bits; furthest on {where}; {kind}")


def no_torn_reads(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    if config["refresh"] == "paused":
        raise NotMeasured("refresh=paused: nobody serves meanwhile")
    torn = select(frame, phase="refresh", metric="torn")
    served = select(frame, phase="refresh", metric="served")["value"].sum()
    if select(frame, phase="refresh", metric="versions_differ")["value"].min() < 1:
        raise NotMeasured("two versions gave the same logits, so that a torn read would not show")
    return Measured(
        float(torn["value"].sum()), f"of {served:.0f} forwards while weights arrived, on {torn['rank'].nunique()} ranks"
    )


def version_order(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Events of every receiver in every sync, against the rule; their times must not go back either."""
    events = frame[frame["metric"].str.startswith("event/") & frame["phase"].isin(["base", *SYNCS])]
    receivers = events[events["rank"] >= trainer_ranks(config)]
    if receivers.empty:
        raise NotMeasured("no receiver recorded events")
    wrong, first, count = 0, "", 0
    for (cycle, phase, rank), rows in receivers.groupby(["cycle", "phase", "rank"]):
        ordered = rows.sort_values("metric")
        names = [metric.split("/", 2)[2] for metric in ordered["metric"]]
        path = str(phase) if phase != "refresh" or config["refresh"] == "staged" else "stream"
        rule = ORDER[path]
        count += 1
        if [name for name in names if name in rule] != list(rule) or not ordered["value"].is_monotonic_increasing:
            wrong += 1
            first = first or f"{phase} of cycle {cycle} on rank {rank}: {', '.join(names)}"
    return Measured(wrong, first or f"{count} times the order of the rule")


def no_double_bump(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """The version on every rank after each cycle is the number of versions that were trained."""
    rows = select(frame, phase="verify", metric="version")
    off = rows.assign(value=(rows["value"] - rows["cycle"]).abs())
    value, where = worst(off)
    return Measured(
        value, f"versions off by {value:.0f} on {where}" if value else f"{len(rows)} times as many as were trained"
    )


def answers(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    asked, active = syncs(frame, "receivers")["value"].sum(), syncs(frame, "answered")["value"].sum()
    return Measured(float(asked - active), f"{active:.0f} of {asked:.0f} receivers said that they are active")


def back(metric: str, what: str) -> Measure:
    """Levels after every cycle and after the rehearsal against those after the base."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        last = "shrink" if shares(frame) else "verify"
        before = select(frame, phase="base", metric=metric).set_index("rank")["value"]
        rows = frame[frame["phase"].isin([last, "rehearse"]) & (frame["metric"] == metric)]
        if rows["cycle"].nunique() < min(2, config["cycles"]):
            raise NotMeasured(f"{metric} was not counted after every cycle")
        more = rows.assign(value=rows["value"] - rows["rank"].map(before))
        value, where = worst(more)
        return Measured(
            value, f"{value:.0f} more {what} after {where}" if value > 0 else f"never more {what} than after the base"
        )

    return measure


def cache_bounded(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    value, where = worst(syncs(frame, "cache_copies"))
    held = syncs(frame, "cache_bytes")["value"].max() / MIB
    return Measured(value, f"whole models at most, {held:.1f} MiB; {where}")


def base_equal(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    differ = select(frame, phase="base", metric="base_differ")["value"].sum()
    compared = select(frame, phase="base", metric="base_compared")["value"].sum()
    if not compared:
        raise NotMeasured("no base weights were compared")
    by = config["verify"] if config["verify"] != "none" else "sha256"
    return Measured(float(differ), f"of {compared:.0f} tensors of all receivers, by {by}")


def failure_is_clean(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    rows = select(frame, phase="rehearse")
    rows = rows[rows["metric"].isin(FAILURES)]
    if rows.empty:
        raise NotMeasured("no failure was rehearsed")
    wrong = rows[rows["value"] > 0]
    said = ", ".join(f"{row.metric} {row.value:.0f} on rank {row.rank}" for row in wrong.itertuples())
    return Measured(
        float(rows["value"].sum()), said or "every failed sync left all as before, was named, and the next one worked"
    )


def sweep_arrived(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    if not config["sweep"]:
        raise NotMeasured("sweep=false")
    rows = select(frame, phase="sweep", metric="sweep_missing")
    return Measured(float(rows["value"].sum()), "tensors that did not arrive by every transport")


def trainer_ranks(config: Mapping[str, Any]) -> int:
    return int(config["ranks"] - config["infer_tp"] * config["replicas"])


def shares(frame: pd.DataFrame) -> bool:
    return bool((frame["phase"] == "shrink").any())


def zero(name: str, question: str, measure: Measure, tolerance: str, limit: float = 0) -> Check:
    return Check(name=name, question=question, tolerance=tolerance, limit=limit, unit="1", better="<=", measure=measure)


CHECKS = (
    zero("bit_exact", "Is every tensor on every replica the trainer's, by its hash?", bit_exact, "tensors_differ"),
    Check(
        name="logits_equal",
        question="Do replicas answer as the trainer does?",
        tolerance="logits_rel",
        limit=logits_limit,
        unit="ratio",
        better="<=",
        measure=logits_equal,
    ),
    zero("no_torn_reads", "Did every forward run on one version alone?", no_torn_reads, "torn_reads"),
    zero("version_order", "Did everything happen in the order of the rule?", version_order, "out_of_order"),
    zero("no_double_bump", "Is the version the number of training steps?", no_double_bump, "versions_off"),
    zero("receivers_answer", "Did all receivers say that they have it?", answers, "unanswered"),
    zero("base_equal", "Were all base weights equal where the base was published?", base_equal, "base_differ"),
    zero("groups_return_to_baseline", "Is no group left?", back("groups", "groups"), "groups_more"),
    zero("segments_return_to_baseline", "Is no shared memory left?", back("segments", "segments"), "segments_more"),
    Check(
        name="memory_growth",
        question="Does memory stay where it was after the first version?",
        tolerance="growth_mib",
        limit=200,
        unit="MiB",
        better="<=",
        measure=growth("verify", "after a version is on all replicas"),
    ),
    zero("cache_bounded", "Are there two copies at most?", cache_bounded, "copies", 2),
    zero(
        "failure_is_clean", "Does a sync that fails leave all as it was, by name?", failure_is_clean, "failures_unclean"
    ),
    Check(
        name="others_untouched",
        question="Does a process beside the job keep its memory on the card?",
        tolerance="others_mib",
        limit=10,
        unit="MiB",
        better="<=",
        measure=on_cuda(others_untouched("prepare")),
    ),
    zero("sweep_arrived", "Did the bytes of the comparison arrive?", sweep_arrived, "sweep_missing"),
)
