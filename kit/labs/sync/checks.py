"""The checks of the sync lab."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from kit.labs.growth import at_most, growth, on_cuda, one_cycle, others_untouched
from kit.labs.sync.config import SyncConfig, roles
from kit.labs.sync.tables import attempts, ended, out_of_order
from kit.results import Measured, Missing, NotMeasured, incomplete, select
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MIB = 2**20
SYNCS = ("refresh", "expand")
# What each number of a rehearsed failure counts.
FAILURES = {
    "accepted": "invalid calls that were accepted",
    "unnamed": "errors that do not name the cause",
    "kept_version": "wrong versions after the failure",
    "kept_wrong": "wrong weights or routes after the failure",
    "left_segments": "shared-memory segments left behind",
    "left_files": "temporary files left behind",
    "left_groups": "process groups left behind",
    "silent": "failures without an error",
    "served_wrong": "wrong forwards during the failure",
    "next_failed": "failures of the next sync",
}


def syncs(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A metric of every sync of a version."""
    rows = frame[frame["phase"].isin(SYNCS) & (frame["metric"] == metric)]
    if rows.empty:
        raise Missing(f"no sync recorded {metric}")
    return rows


def worst(rows: pd.DataFrame) -> tuple[float, str]:
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    return float(row["value"]), f"rank {row['rank']}, {row['phase']}, cycle {row['cycle']}"


def bit_exact(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Hashes of all tensors after every cycle, after rehearsed failures, and after the syncs that follow them."""
    select(frame, phase="verify", metric="tensors_differ")
    done = frame[frame["phase"].isin(["verify", "rehearse"])]
    differ, hashed = done[done["metric"] == "tensors_differ"], done[done["metric"] == "tensors_hashed"]["value"]
    wanted = receivers(config) * (config["cycles"] + 1)
    if len(differ) < wanted or not hashed.min():
        incomplete(f"all tensors were compared {len(differ)} times instead of {wanted}")
    value, where = worst(differ)
    compared = f"SHA-256 of {hashed.min():.0f} tensors, {len(differ)} comparisons"
    sent, verified = syncs(frame, "tensors_sent")["value"].max(), syncs(frame, "tensors_verified")["value"].min()
    compared += f"; in transit {verified:.0f} of {sent:.0f} tensors were verified ({config['verify']})"
    return Measured(value, f"{value:.0f} tensors differ ({where}); {compared}" if value else f"0 differ; {compared}")


def equal_layouts(config: Mapping[str, Any]) -> bool:
    return bool(config["tp"] == config["infer_tp"] and config["pp"] == 1)


def rounding(config: Mapping[str, Any]) -> float:
    return 1e-5 if config["dtype"] == "float32" else 3e-2


def logits_limit(config: Mapping[str, Any]) -> float:
    """Equal layouts add in the same order; different ones round differently."""
    return 0.0 if equal_layouts(config) else rounding(config)


def logits_equal(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    errors = frame[frame["phase"].isin(["base", "verify", "rehearse"]) & (frame["metric"] == "logits_error")]
    same = select(frame, metric="logits_same")["value"]
    value, where = worst(errors)
    why = f"{same.sum():.0f} of {len(errors)} logits are identical bit for bit; largest difference: {where}"
    if not equal_layouts(config):
        return Measured(value, why, if_passed="the layouts differ, so sums round differently")
    value = float("inf") if value == 0 and same.min() < 1 else value
    return Measured(value, f"{why}; replicas have the trainer's layout")


def names_right(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    value, where = worst(select(frame, metric="plain_error"))
    return Measured(value, f"largest difference divided by the largest logit: {where}")


def no_torn_reads(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    torn = select(frame, metric="torn")
    served = select(frame, metric="served")["value"].sum()
    moved = select(frame, metric="logits_moved")["value"].sum()
    table, missing = attempts(frame, config)
    same = (select(frame, metric="versions_differ")["value"] < 1).sum()
    value = float(torn["value"].sum() + moved + len(missing) + same)
    waited = int((table["forward"] == "waits").sum())
    reasons = [
        f"no forward was attempted at {missing[0]}" if missing else "",
        "two versions gave the same logits, so a torn read would not show" if same else "",
        "the logits of one version changed between syncs" if moved else "",
        f"{torn['value'].sum():.0f} of {served:.0f} forwards during syncs had mixed weights, or old ones after new ones",
        f"attempted forwards: {len(table) - waited} ran, {waited} waited ({counted(table['rank'].nunique(), 'rank')})",
    ]
    return Measured(value, "; ".join(filter(None, reasons)))


def version_order(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The sampled points of every sync on every receiver against the required order; and forwards on another version than reported."""
    wrong, count, first = out_of_order(frame, trainer_ranks(config))
    labels = frame[frame["metric"] == "mislabelled"]["value"].sum()
    unlocked = max(frame[frame["metric"] == "unlocked"]["value"], default=0)
    reasons = [
        first,
        f"{labels:.0f} forwards ran on another version than the replica reported" if labels else "",
        f"the sender's lock was free at {unlocked:.0f} points of a sync" if unlocked else "",
        f"all {count} syncs on receivers ran in the required order",
    ]
    return Measured(float(wrong + labels + unlocked), next(filter(None, reasons)))


def no_double_bump(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """The version on every rank after each cycle against the number of trained versions."""
    rows = select(frame, phase="verify", metric="version")
    off = rows.assign(value=(rows["value"] - rows["cycle"]).abs())
    value, where = worst(off)
    right = f"version equals the number of trained versions ({counted(len(rows), 'reading')})"
    return Measured(
        value, f"version differs from the number of trained versions by {value:.0f} ({where})" if value else right
    )


def answers(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Each receiver is asked for a forward after every sync, if its phase ended or the sync failed on any rank."""
    rows = frame[frame["phase"].isin([*SYNCS, "rehearse"])]
    failed = rows[rows["metric"] == "failed"][["cycle", "phase"]].drop_duplicates()
    asked = {key for key in ended(rows) if key[2] >= trainer_ranks(config)}
    asked |= {(*key, rank) for key in failed.itertuples(index=False, name=None) for rank in served_in(key[1], config)}
    serves = rows[rows["metric"] == "serves"]
    answered = list(zip(serves["cycle"], serves["phase"], serves["rank"], serves["value"], strict=True))
    if failed.empty and not answered:
        raise Missing("no forward was requested after a sync")
    unserved = [*(asked - {each[:3] for each in answered}), *(each[:3] for each in answered if each[3] < 1)]
    served = sum(each[3] >= 1 for each in answered)
    why = f"the new version was served after {served} of {served + len(unserved)} syncs on receivers"
    where = [f"; not on rank {rank}, {phase}, cycle {cycle}" for cycle, phase, rank in sorted(unserved)[:1]]
    return Measured(float(len(unserved)), why + "".join(where))


def served_in(phase: str, config: Mapping[str, Any]) -> list[int]:
    """The receivers that take part in the syncs of a phase."""
    names = {"refresh": ("replica",), "expand": ("sleeper",)}.get(phase, ("replica", "sleeper"))
    made = SyncConfig(**{each.name: config[each.name] for each in dataclasses.fields(SyncConfig)})
    return [rank for role in roles(made) if role.name in names for rank in role.ranks]


def returns_to_baseline(metric: str, noun: str) -> Measure:
    """Counts after every cycle and after the rehearsal against the baseline, which is taken after the base is published."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        last = "shrink" if shares(frame) else "verify"
        before = select(frame, phase="base", metric=metric).set_index("rank")["value"]
        rows = frame[frame["phase"].isin([last, "rehearse"]) & (frame["metric"] == metric)]
        if rows["cycle"].nunique() < min(2, config["cycles"]):
            incomplete(f"{metric} was not counted after every cycle")
        if rows.empty:
            raise Missing(f"{metric} was not counted after any cycle")
        value, where = worst(rows.assign(value=rows["value"] - rows["rank"].map(before)))
        right = f"no rank has more {noun} than at baseline ({counted(len(rows), 'reading')})"
        return Measured(value, f"{value:.0f} more {noun} than at baseline ({where})" if value > 0 else right)

    return measure


def cache_bounded(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    value, where = worst(select(frame, metric="cache_copies"))
    held = select(frame, metric="cache_bytes")["value"].max() / MIB
    copies = counted(int(value), "copy").replace("copys", "copies")
    return Measured(value, f"at most {copies} of the model in the sender's shared memory, {held:.1f} MiB ({where})")


def base_equal(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    differ = select(frame, phase="base", metric="tensors_differ")
    if len(differ) < receivers(config):
        incomplete(f"base weights were compared on {len(differ)} of {receivers(config)} receivers")
    compared = select(frame, phase="base", metric="tensors_hashed")["value"].sum()
    accepted = select(frame, phase="base", metric="base_accepted")["value"].sum()
    why = f"{differ['value'].sum():.0f} of {compared:.0f} tensors on all receivers differ (SHA-256)"
    if accepted:
        why += f"; a base with one changed number was not refused by name on {counted(int(accepted), 'rank')}"
    return Measured(float(differ["value"].sum() + accepted), why)


def failure_is_clean(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    rows = select(frame, phase="rehearse")
    rows = rows[rows["metric"].isin(FAILURES)]
    if rows.empty:
        raise Missing("no failure was rehearsed")
    rows = rows.assign(scene=rows["ids"].map(lambda ids: json.loads(ids)["scene"]))
    wrong = rows[rows["value"] > 0]
    found = "; ".join(
        f"{FAILURES[str(row.metric)]}: {row.value:.0f} (rank {row.rank}, scene {row.scene})"
        for row in wrong.itertuples()
    )
    scenes = ", ".join(sorted(rows["scene"].unique()))  # ranks answer in any order
    right = "every failed sync left weights and version unchanged and named the cause, and the next sync succeeded"
    return Measured(float(rows["value"].sum()), found or f"{right} ({scenes})")


def asleep(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Weights that stay on the device while their replica sleeps, on the worst rank, by name."""
    if not shares(frame):
        raise NotMeasured("no replica sleeps: the trainer has devices of its own")
    rows = frame[frame["metric"] == "asleep_tensors"]
    if rows.empty:
        raise Missing("no sleeping replica was looked at")
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    right = f"no weight has memory on the device ({rows['rank'].nunique()} sleeping ranks)"
    wrong = f"{row['value']:g} weights keep their memory (rank {row['rank']}): {row['text']}"
    return Measured(float(row["value"]), wrong if row["value"] else right)


def sweep_arrived(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    rows = select(frame, phase="sweep", metric="sweep_missing")
    wrong = rows[rows["value"] > 0]
    named = [json.loads(ids) for ids in wrong["ids"]]
    found = ", ".join(f"{one['transport']} with buckets of {one['bucket_bytes']} bytes" for one in named[:3])
    right = f"every tensor arrived with all {len(rows)} combinations of transport and bucket size"
    return Measured(float(rows["value"].sum()), f"tensors are missing with {found}" if found else right)


def receivers(config: Mapping[str, Any]) -> int:
    return int(config["infer_tp"] * config["replicas"])


def trainer_ranks(config: Mapping[str, Any]) -> int:
    return int(config["ranks"] - receivers(config))


def shares(frame: pd.DataFrame) -> bool:
    return bool((frame["phase"] == "shrink").any())


CHECKS = (
    at_most("bit_exact", "Does every replica have the trainer's tensors, bit for bit?", "tensors_differ", bit_exact),
    at_most(
        "logits_equal",
        "Do the replicas return the trainer's logits?",
        "logits_rel",
        logits_equal,
        limit=logits_limit,
        unit="ratio",
    ),
    at_most(
        "names_right",
        "Does a plain model, loaded by tensor names, return the trainer's logits?",
        "names_rel",
        names_right,
        limit=rounding,
        unit="ratio",
    ),
    at_most("no_torn_reads", "Did every forward run on a single weight version?", "torn_reads", no_torn_reads),
    at_most("version_order", "Did every sync run in the required order?", "out_of_order", version_order),
    at_most("no_double_bump", "Does the version equal the number of trained versions?", "versions_off", no_double_bump),
    at_most("receivers_answer", "Does every receiver serve the new version after a sync?", "unanswered", answers),
    at_most("base_equal", "Were all base weights equal when the base was published?", "base_differ", base_equal),
    at_most(
        "groups_return_to_baseline",
        "Does the number of process groups return to the baseline?",
        "groups_more",
        returns_to_baseline("groups", "groups"),
    ),
    at_most(
        "segments_return_to_baseline",
        "Does the number of shared-memory segments return to the baseline?",
        "segments_more",
        returns_to_baseline("segments", "segments"),
    ),
    at_most(
        "memory_growth",
        "Does each rank's memory stay constant after the first version?",
        "growth_mib",
        growth("verify", "after all replicas have a version"),
        limit=200,
        unit="MiB",
        cannot=one_cycle,
    ),
    at_most("cache_bounded", "Does the sender keep at most two copies of the model?", "copies", cache_bounded, limit=2),
    at_most("sleepers_release", "Does a sleeping replica release its weights?", "asleep_tensors", asleep),
    at_most(
        "failure_is_clean",
        "Does a failed sync leave everything unchanged and name the cause?",
        "failures_unclean",
        failure_is_clean,
    ),
    at_most(
        "others_untouched",
        "Does another process on the GPU keep its memory unchanged?",
        "others_mib",
        on_cuda(others_untouched("prepare")),
        limit=10,
        unit="MiB",
    ),
    at_most(
        "sweep_arrived",
        "Did every tensor of the transport comparison arrive?",
        "sweep_missing",
        sweep_arrived,
        cannot=lambda config: "" if config["sweep"] else "sweep=false: transports were not compared",
    ),
)


# Sets of tolerances for the sync lab. A tolerance that a set does not name keeps the lab's default.
PRESETS = {
    "strict": {
        "logits_rel": 0.0,  # bit for bit, which only equal layouts can give
        "growth_mib": 10.0,  # the host allocator varies by some MiB between versions
        "others_mib": 0.0,  # memory of other processes may not change
    },
    "common practice": {
        "logits_rel": 3e-2,  # usual between a trainer and an inference engine: a few percent
        "growth_mib": 500.0,  # below the noise of an engine's resident set
        "copies": 3.0,  # one copy at the sender, one in transit, one being assembled
        "others_mib": 50.0,
    },
}
