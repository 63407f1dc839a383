"""What the sync lab asks of its records."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from kit.labs.memory import growth, on_cuda, one_cycle, others_untouched
from kit.labs.sync.config import SyncConfig, roles
from kit.labs.sync.counts import attempts, ended, out_of_order
from kit.results import Check, Measured, Missing, incomplete, select

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]
    Cannot = Callable[[Mapping[str, Any]], str]

MIB = 2**20
SYNCS = ("refresh", "expand")
FAILURES = (
    "accepted",
    "unnamed",
    "kept_version",
    "kept_wrong",
    "left_segments",
    "left_files",
    "left_groups",
    "silent",
    "served_wrong",
    "next_failed",
)


def syncs(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A number of every sync of a version."""
    rows = frame[frame["phase"].isin(SYNCS) & (frame["metric"] == metric)]
    if rows.empty:
        raise Missing(f"no sync recorded {metric}")
    return rows


def worst(rows: pd.DataFrame) -> tuple[float, str]:
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    return float(row["value"]), f"rank {row['rank']}, {row['phase']}, cycle {row['cycle']}"


def bit_exact(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """After every cycle, after rehearsed failures, and after what came after these."""
    select(frame, phase="verify", metric="tensors_differ")
    done = frame[frame["phase"].isin(["verify", "rehearse"])]
    differ, hashed = done[done["metric"] == "tensors_differ"], done[done["metric"] == "tensors_hashed"]["value"]
    wanted = receivers(config) * (config["cycles"] + 1)
    if len(differ) < wanted or not hashed.min():
        incomplete(f"{len(differ)} of {wanted} comparisons of all tensors were made")
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
    errors = frame[frame["phase"].isin(["base", "verify", "rehearse"]) & (frame["metric"] == "logits_error")]
    same = select(frame, metric="logits_same")["value"]
    value, where = worst(errors)
    if equal_layouts(config) and value == 0 and same.min() < 1:
        value = float("inf")
    found = f"{same.sum():.0f} of {len(errors)} are the same bits; largest difference on {where}"
    if equal_layouts(config):
        return Measured(value, f"{found}; the trainer's layout")
    return Measured(value, found, if_passed="layouts differ, so sums are added in another order")


def names_right(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    value, where = worst(select(frame, metric="plain_error"))
    return Measured(value, f"largest difference on {where}, over the largest logit")


def plain_limit(config: Mapping[str, Any]) -> float:
    return 1e-5 if config["dtype"] == "float32" else 3e-2


def no_torn_reads(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    torn = select(frame, metric="torn")
    served = select(frame, metric="served")["value"].sum()
    moved = select(frame, metric="logits_moved")["value"].sum()
    table, missing = attempts(frame, config)
    same = (select(frame, metric="versions_differ")["value"] < 1).sum()
    value = float(torn["value"].sum() + moved + len(missing) + same)
    waited = int((table["forward"] == "waits").sum())
    found = [
        f"no forward was attempted at {missing[0]}" if missing else "",
        "two versions gave the same logits, so that a torn read would not show" if same else "",
        "logits of one version changed while nothing came" if moved else "",
        f"{torn['value'].sum():.0f} of {served:.0f} forwards during syncs were of no version at rest, or of the old one after the new",
        f"{len(table) - waited} attempts ran and {waited} waited, on {table['rank'].nunique()} ranks",
    ]
    return Measured(value, "; ".join(filter(None, found)))


def version_order(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Points that the lab sampled on every receiver in every sync, against the rule; and forwards whose version was not the replica's."""
    wrong, count, first = out_of_order(frame, trainer_ranks(config))
    labels = frame[frame["metric"] == "mislabelled"]["value"].sum()
    unlocked = max(frame[frame["metric"] == "unlocked"]["value"], default=0)
    if labels:
        first = first or f"{labels:.0f} forwards ran on another version than the replica had"
    if unlocked:
        first = first or f"another thread could take the sender's lock at {unlocked:.0f} points of a sync"
    return Measured(
        float(wrong + labels + unlocked), first or f"{count} syncs on receivers were in the order of the rule"
    )


def no_double_bump(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """The version on every rank after each cycle is the number of versions that were trained."""
    rows = select(frame, phase="verify", metric="version")
    off = rows.assign(value=(rows["value"] - rows["cycle"]).abs())
    value, where = worst(off)
    return Measured(
        value, f"versions off by {value:.0f} on {where}" if value else f"{len(rows)} times as many as were trained"
    )


def answers(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Each receiver is asked for a forward after every sync: where its phase has ended, and where the sync failed on any rank."""
    rows = frame[frame["phase"].isin([*SYNCS, "rehearse"])]
    failed = rows[rows["metric"] == "failed"][["cycle", "phase"]].drop_duplicates()
    asked = {key for key in ended(rows) if key[2] >= trainer_ranks(config)}
    asked |= {(*key, rank) for key in failed.itertuples(index=False, name=None) for rank in served_in(key[1], config)}
    told = rows[rows["metric"] == "serves"]
    there = list(zip(told["cycle"], told["phase"], told["rank"], told["value"], strict=True))
    if failed.empty and not there:
        raise Missing("no forward after a sync was asked for")
    unserved = [*(asked - {each[:3] for each in there}), *(each[:3] for each in there if each[3] < 1)]
    served = sum(each[3] >= 1 for each in there)
    found = f"{served} of {served + len(unserved)} times a receiver served the new version after its sync"
    where = [f"; not on rank {rank} in {phase} of cycle {cycle}" for cycle, phase, rank in sorted(unserved)[:1]]
    return Measured(float(len(unserved)), found + "".join(where))


def served_in(phase: str, config: Mapping[str, Any]) -> list[int]:
    """The receivers that take part in a phase with syncs."""
    names = {"refresh": ("replica",), "expand": ("sleeper",)}.get(phase, ("replica", "sleeper"))
    made = SyncConfig(**{each.name: config[each.name] for each in dataclasses.fields(SyncConfig)})
    return [rank for role in roles(made) if role.name in names for rank in role.ranks]


def back(metric: str, what: str) -> Measure:
    """Levels after every cycle and after the rehearsal against those after the base."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        last = "shrink" if shares(frame) else "verify"
        before = select(frame, phase="base", metric=metric).set_index("rank")["value"]
        rows = frame[frame["phase"].isin([last, "rehearse"]) & (frame["metric"] == metric)]
        if rows["cycle"].nunique() < min(2, config["cycles"]):
            incomplete(f"{metric} was not counted after every cycle")
        if rows.empty:
            raise Missing(f"{metric} was not counted after any cycle")
        more = rows.assign(value=rows["value"] - rows["rank"].map(before))
        value, where = worst(more)
        return Measured(
            value, f"{value:.0f} more {what} after {where}" if value > 0 else f"never more {what} than after the base"
        )

    return measure


def cache_bounded(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    value, where = worst(select(frame, metric="cache_copies"))
    held = select(frame, metric="cache_bytes")["value"].max() / MIB
    return Measured(value, f"whole models of shared memory at the sender at most, {held:.1f} MiB; {where}")


def base_equal(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    differ = select(frame, phase="base", metric="tensors_differ")
    if len(differ) < receivers(config):
        incomplete(f"base weights were compared on {len(differ)} of {receivers(config)} ranks")
    compared = select(frame, phase="base", metric="tensors_hashed")["value"].sum()
    accepted = select(frame, phase="base", metric="base_accepted")["value"].sum()
    found = f"{differ['value'].sum():.0f} of {compared:.0f} tensors on all receivers differ, by SHA-256"
    if accepted:
        found += f"; a base with one other number was not refused by name on {accepted:.0f} ranks"
    return Measured(float(differ["value"].sum() + accepted), found)


def failure_is_clean(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    rows = select(frame, phase="rehearse")
    rows = rows[rows["metric"].isin(FAILURES)]
    if rows.empty:
        raise Missing("no failure was rehearsed")
    rows = rows.assign(scene=rows["ids"].map(lambda ids: json.loads(ids)["scene"]))
    wrong = rows[rows["value"] > 0]
    found = ", ".join(f"{row.metric} {row.value:.0f} on rank {row.rank} in '{row.scene}'" for row in wrong.itertuples())
    scenes = ", ".join(rows["scene"].unique())
    fine = "every failed sync left all as before and was named, and the next one worked"
    return Measured(float(rows["value"].sum()), found or f"{fine}: {scenes}")


def sweep_arrived(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    rows = select(frame, phase="sweep", metric="sweep_missing")
    wrong = rows[rows["value"] > 0]
    named = [json.loads(ids) for ids in wrong["ids"]]
    found = ", ".join(f"{one['transport']} in buckets of {one['bucket_bytes']} bytes" for one in named[:3])
    seen = f"{len(rows)} transports and sizes brought every tensor"
    return Measured(float(rows["value"].sum()), f"tensors that did not arrive by {found}" if found else seen)


def receivers(config: Mapping[str, Any]) -> int:
    return int(config["infer_tp"] * config["replicas"])


def trainer_ranks(config: Mapping[str, Any]) -> int:
    return int(config["ranks"] - receivers(config))


def shares(frame: pd.DataFrame) -> bool:
    return bool((frame["phase"] == "shrink").any())


def zero(
    name: str, question: str, measure: Measure, tolerance: str, limit: float = 0, *, cannot: Cannot | None = None
) -> Check:
    return Check(name, question, tolerance, limit, "1", "<=", measure, cannot=cannot)


def no_sweep(config: Mapping[str, Any]) -> str:
    return "" if config["sweep"] else "sweep=false"


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
    Check(
        name="names_right",
        question="Does a plain model that knows the tensors by their names give the trainer's logits?",
        tolerance="names_rel",
        limit=plain_limit,
        unit="ratio",
        better="<=",
        measure=names_right,
    ),
    zero("no_torn_reads", "Did every forward run on one version alone?", no_torn_reads, "torn_reads"),
    zero("version_order", "Did everything happen in the order of the rule?", version_order, "out_of_order"),
    zero("no_double_bump", "Is the version the number of training steps?", no_double_bump, "versions_off"),
    zero("receivers_answer", "Does every receiver serve the new version after a sync?", answers, "unanswered"),
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
        cannot=one_cycle,
    ),
    zero("cache_bounded", "Are there two copies at most?", cache_bounded, "copies", 2),
    zero(
        "failure_is_clean", "Does a sync that fails leave all as it was, by name?", failure_is_clean, "failures_unclean"
    ),
    Check(
        name="others_untouched",
        question="Does a process beside the job keep its memory on the GPU?",
        tolerance="others_mib",
        limit=10,
        unit="MiB",
        better="<=",
        measure=on_cuda(others_untouched("prepare")),
    ),
    zero("sweep_arrived", "Did the bytes of the comparison arrive?", sweep_arrived, "sweep_missing", cannot=no_sweep),
)
