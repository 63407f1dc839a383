"""The tables of a sync run, the required order of a sync, and the rules.

`stages`, `syncs`, `transports`, `sync_events` and `digests` take `run.frame()` and return a pandas table; they raise `NotMeasured` if the
run ended before.

The lab's own samples are held against the required order: points, versions, routes and attempted forwards. A successful sync has the points
of `required_order` on every receiver; `bucket` and `write` come once per bucket, from 0 on. If a rank did not end the phase, or raised in
it, points may be missing at the end: such a sync is compared with the beginning of that order, up to its undo.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd

from kit.labs.sync.lab import CLOSED_S, MOST_BESIDE, SyncConfig, is_asked, roles
from kit.machine import KIB, MIB
from kit.results import Measured, Missing, NotMeasured, Rule, incomplete, rule, select, with_ids
from kit.results.frames import read_ids
from kit.results.growth import DRIFT_CYCLES, SETTLED, bystander_change, compared, growth, worst
from kit.results.units import counted

Config = Mapping[str, Any]
Measure = Callable[[pd.DataFrame, Config], Measured]

MUCH = 0.5  # of all bytes: with more, everything is less than twice what is needed
# Of the model at the sender. If more has changed, everything is sent; the kit's own number for that is not read, as it is judged here.
COPIES, CHANGES = 2.0, 0.75
MOST_COPIED = (
    0.8  # of the bytes of adopted weights: in a small model the end of a bucket parts most tensors that a weight joins
)
PATHS = ("refresh", "expand")
SENDER = ("gather", "pack", "send", "verify", "apply", "teardown", "finalize", "publish", "activate")
RECEIVER = ("receive", "verify", "keep", "gate", "apply", "teardown", "finalize")
AFTER = ("apply", "close", "closed", "teardown", "derive", "finalize", "publish", "activate", "end")
BEFORE = {"refresh": ("begin", "open"), "stream": ("begin", "gate", "open"), "expand": ("begin", "wake", "open")}
PUBLISHED = ("publish", "activate", "end")
SERVED = ("refresh", "stream")  # paths for replicas that are awake
NO_OFFLOAD = "no offload of the trainer was recorded"
WAITS, UNASKED = "waits", "unasked"
END = "the end of the sync", 0
BY_SYNC = ["cycle", "phase", "path", "sync"]
BY_RANK = ["cycle", "phase", "rank"]
# What each number of a rehearsed failure counts.
FAILURES = {
    "accepted": "invalid calls that were accepted",
    "unnamed": "errors that name another cause or none",
    "kept_version": "wrong versions after the failure",
    "kept_wrong": "wrong weights or routes after the failure",
    "left_segments": "shared-memory segments left behind",
    "left_files": "temporary files left behind",
    "left_groups": f"process groups still there after {CLOSED_S:g} s",
    "left_unlisted": f"process groups that torch does not list, still there after {CLOSED_S:g} s",
    "not_derived": "undos after which nothing was derived from the old weights",
    "silent": "failures without an error",
    "unheard": "errors of other receivers that name another cause or none",
    "waited_for": "failed syncs that ended only after the stalled receiver: a transport's close must not wait for it",
    "compared_again": "versions with the same compared tensors as the one before (verify_share)",
    "served_wrong": "wrong forwards during the failure",
    "next_failed": "failures of the next sync",
}
# Counts that something made once may raise, too: they count if two failures or more on a rank left some behind.
LEFT_OPEN = {
    "left_fds": "file descriptors left behind",
    "left_sockets": "sockets left behind",
    "left_threads": "threads left behind",
}


# -- tables ----------------------------------------------------------------------------------------------------------------


def stages(frame: pd.DataFrame) -> pd.DataFrame:
    """Busy seconds of the sender and of the slowest receiver of each sync: cycle, path, who, rank, stage, seconds.

    The stage `wall` is the elapsed time; stages overlap, so their sum may be larger.
    """
    rows = frame[frame["phase"].isin(PATHS) & frame["value"].notna()]
    busy = with_ids(rows[rows["metric"] == "stage_seconds"], "stage")
    rows = pd.concat([busy, rows[rows["metric"] == "wall"].assign(stage="wall")])
    received = rows[rows["rank"] != 0]
    walls = received[received["stage"] == "wall"]
    slowest = walls.loc[walls.groupby(["cycle", "phase"])["value"].idxmax(), BY_RANK]
    table = pd.concat([rows[rows["rank"] == 0].assign(who="sender"), received.merge(slowest).assign(who="receiver")])
    if table.empty:
        raise NotMeasured("no sync was timed")
    table = table.rename(columns={"phase": "path", "value": "seconds"})
    table = table.sort_values(["cycle", "path"], ascending=[True, False], ignore_index=True)  # a refresh comes first
    return table[["cycle", "path", "who", "rank", "stage", "seconds"]]


def syncs(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per sync: bytes, buckets, elapsed time, and busy seconds of the sender and the slowest receiver by stage."""
    rows = frame[(frame["rank"] == 0) & frame["phase"].isin(PATHS)]
    on_gpus = (frame["metric"] == "driver_used").any()
    detours = {"shm": ", through host memory"} if on_gpus else {}
    table = []
    for (cycle, path), busy in stages(frame).groupby(["cycle", "path"], sort=False):
        sync = rows[(rows["cycle"] == cycle) & (rows["phase"] == path)]
        totals = sync[sync["ids"] == ""].set_index("metric")["value"]
        sent, received = (busy[busy["who"] == who].set_index("stage")["seconds"] for who in ("sender", "receiver"))
        by = with_ids(sync[sync["metric"] == "transport_receivers"], "transport")
        names = [
            f"{name} to {count:g}{detours.get(name, '')}"
            for name, count in zip(by["transport"], by["value"], strict=True)
            if count
        ]
        table.append(
            {
                "cycle": cycle,
                "path": path,
                "transport": ", ".join(names),
                "bytes": totals.get("bytes"),
                "buckets": totals.get("buckets"),
                "wall": sent.get("wall"),
                **{stage: sent[stage] for stage in SENDER if stage in sent},
                **{f"receiver {stage}": received[stage] for stage in RECEIVER if stage in received},
            }
        )
    return pd.DataFrame(table)


def transports(frame: pd.DataFrame) -> pd.DataFrame:
    """Every transport and bucket size that was tried on generated bytes: bytes per second (median, least, greatest), and the median's
    share of one large memcpy."""
    rates, keys = ["rate", "rate_low", "rate_high"], ["transport", "bucket_size"]
    rows = with_ids(frame[(frame["phase"] == "sweep") & frame["metric"].isin(rates)], *keys)
    rows = rows[(rows["rank"] == 0) & rows["value"].notna()]
    if rows.empty:
        raise NotMeasured("transports were not compared")
    table = rows.pivot_table(index=keys, columns="metric", values="value").reset_index().rename_axis(columns=None)
    table = table.reindex(columns=[*keys, *rates]).rename(columns={"bucket_size": "bucket_bytes"})
    return table.assign(of_memcpy=table["rate"] / memcpy(frame))


def memcpy(frame: pd.DataFrame) -> float:
    """Bytes per second of one copy of the same bytes; NaN where it was not measured."""
    rows = with_ids(frame[(frame["phase"] == "sweep") & (frame["metric"] == "rate")], "transport")
    return float(rows[rows["transport"] == "memcpy"]["value"].median())


def sync_events(frame: pd.DataFrame, path: str, cycle: int) -> pd.DataFrame:
    """What happened on each rank, in its order: rank, order, event, seconds since the sender began."""
    rows = all_events(frame)
    table = rows[(rows["phase"] == path) & (rows["cycle"] == cycle)].rename(columns={"value": "seconds"})
    if table.empty:
        raise NotMeasured(f"no events of {path} in cycle {cycle}")
    return table.sort_values(["rank", "order"], ignore_index=True)[["rank", "order", "event", "seconds"]]


def all_events(frame: pd.DataFrame) -> pd.DataFrame:
    return with_ids(frame[frame["metric"] == "event"], "event", "order")


def receiver_digests(frame: pd.DataFrame) -> pd.DataFrame:
    """Tensors that each receiver hashed after a cycle, and how many were not the sender's: cycle, rank, hashed, differ."""
    columns = {"tensors_hashed": "hashed", "tensors_differ": "differ"}
    rows = frame[(frame["phase"] == "verify") & frame["metric"].isin(list(columns))]
    if rows.empty:
        raise NotMeasured("no tensor was hashed on a receiver")
    wide = rows.pivot_table(index=["cycle", "rank"], columns="metric", values="value").reset_index()
    wide = wide.rename(columns=columns).rename_axis(columns=None).reindex(columns=["cycle", "rank", *columns.values()])
    return wide.astype(dict.fromkeys(columns.values(), "Int64"))


# -- the order of a sync -----------------------------------------------------------------------------------------------------


def ended(frame: pd.DataFrame) -> set[tuple[int, str, int]]:
    """The phases (cycle, phase, rank) that ended without an error, so that their records are complete."""
    done, failed = (frame[frame["metric"] == metric][BY_RANK] for metric in ("seconds", "failed"))
    return set(done.itertuples(index=False, name=None)) - set(failed.itertuples(index=False, name=None))


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """Every sample of every sync, with a column for each id, and `whole`: whether the sync is complete."""
    rows = frame[frame["metric"] == "point"].reset_index(drop=True)
    if rows.empty:
        raise Missing("no sync was sampled")
    done = ended(frame)
    whole = [key in done for key in rows[BY_RANK].itertuples(index=False, name=None)]
    table = (
        rows.join(pd.DataFrame([dict(read_ids(ids)) for ids in rows["ids"]])).drop(columns="ids").assign(whole=whole)
    )
    table = table.sort_values([*BY_SYNC, "rank", "order"], kind="stable")
    undone = (table["point"] == "undo").groupby([table[name] for name in [*BY_SYNC, "rank"]]).cummax()
    return table[table["whole"] | ~undone]


def required_order(path: str, buckets: int) -> list[tuple[str, int]]:
    """The points of a sync in the required order."""
    if path == "base":
        return [(name, 0) for name in ("begin", *PUBLISHED)]
    if path == "refresh":
        arrived = [("bucket", index) for index in range(buckets)] + [("verify", 0), ("gate", 0)]
        arrived += [("write", index) for index in range(buckets)]
    else:
        arrived = [(name, index) for index in range(buckets) for name in ("bucket", "write")] + [("verify", 0)]
    return [*((name, 0) for name in BEFORE[path]), *arrived, *((name, 0) for name in AFTER)]


def out_of_order(frame: pd.DataFrame, trainers: int, *, own: bool = False) -> tuple[int, int, str]:
    """The number of receivers' syncs that break the rule, the number of all, and the first problem in words. `own`: a synchroniser that
    is not the kit's, and has an order of its own between the beginning and the end."""
    table, done = points(frame), ended(frame)
    broken, count = [], 0
    closed = table[(table["rank"] == 0) & (table["point"] == "closed")].groupby(BY_SYNC)["value"].max()
    for (cycle, phase, path, sync, rank), rows in table[table["rank"] >= trainers].groupby([*BY_SYNC, "rank"]):
        count += 1
        end = closed.get((cycle, phase, path, sync), math.inf if (cycle, phase, 0) in done else -math.inf)
        if problem := next(own_problems(str(path), rows) if own else problems(str(path), rows, end), ""):
            broken.append(f"{problem} (rank {rank}, {path} in {phase}, cycle {cycle})")
    return len(broken), count, next(iter(broken), "")


def problems(path: str, rows: pd.DataFrame, sender_closed: float) -> Iterator[str]:
    """The problems with one receiver's points in one sync. `sender_closed` is inf if the sender did not close, -inf if that is unknown."""
    seen = list(zip(rows["point"], rows["bucket"].astype(int), strict=True))
    wanted = required_order(path, sum(name == "bucket" for name, _ in seen))
    if seen != (wanted if rows["whole"].all() else wanted[: len(seen)]):
        was, must = next(pair for pair in itertools.zip_longest(seen, wanted, fillvalue=END) if pair[0] != pair[1])
        yield f"{spelled(was)} came instead of {spelled(must)}"
    if not rows["value"].is_monotonic_increasing:
        yield "the times of the points are not increasing"
    published = rows["point"].isin(PUBLISHED)
    versions = rows["version"].astype(int)
    old, new = versions[~published], versions[published]
    if old.nunique() > 1 or new.nunique() > 1:
        yield f"the version changed at another point than publish: {sorted(set(old))} before it, {sorted(set(new))} from then on"
    elif len(old) and len(new) and new.iloc[0] < old.iloc[0] + (path in SERVED):
        yield f"version {new.iloc[0]} was published while version {old.iloc[0]} was active"
    yield from routes(path, rows)
    if path in SERVED:
        begun, over = (rows["point"].eq(point).cummax() for point in ("gate", "end"))
        early = rows[begun & ~over & ~rows["forward"].isin([WAITS, UNASKED])]
        if len(early):
            yield f"a forward ran at {early['point'].iloc[0]}, between gate and end"
        if WAITS in rows[rows["point"] == "end"]["forward"].to_numpy():
            yield "forwards still waited after the end"
    closed = rows[rows["point"] == "close"]["value"]
    if path != "base" and closed.min() < sender_closed:
        yield f"the receiver closed its transport, but the sender {'did not' if sender_closed == math.inf else 'closed later'}"


def own_problems(path: str, rows: pd.DataFrame) -> Iterator[str]:
    """The problems with one receiver's points in one sync of a synchroniser that is not the kit's."""
    names = rows["point"].tolist()
    versions = rows["version"].astype(int).tolist()
    if rows["whole"].all() and names.count("publish") != 1:
        yield f"a version was published {counted(names.count('publish'), 'time')} instead of once"
    if "publish" in names and path in SERVED and versions[names.index("publish")] <= versions[0]:
        yield f"version {versions[names.index('publish')]} was published while version {versions[0]} was active"
    if path in SERVED and WAITS in rows[rows["point"] == "end"]["forward"].to_numpy():
        yield "forwards still waited after the end"


def routes(path: str, rows: pd.DataFrame) -> Iterator[str]:
    """A serving replica has a route throughout; one that pauses or wakes gets it at the end; at the end all have one."""
    routed = rows["routed"].astype(bool)
    active = rows["point"] == "end"
    if not routed[active].all():
        yield "no route at the end"
    elif path == "refresh" and not routed.all():
        yield f"no route at {rows[~routed]['point'].iloc[0]} although the replica serves"
    elif path in {"stream", "expand"}:
        early = rows[routed & ~active & (rows["point"] != "begin")]  # the receiver learns the path with `begin`
        if len(early):
            yield f"a route at {early['point'].iloc[0]}, before the end"


def spelled(point: tuple[str, int]) -> str:
    name, index = point
    return f"{name} {index}" if name in {"bucket", "write"} else name


def attempts(frame: pd.DataFrame, config: Config) -> tuple[pd.DataFrame, list[str]]:
    """Attempted forwards in syncs of awake replicas, and the points of the rule without an attempt."""
    table = points(frame)
    table = table[table["path"].isin(SERVED) & (table["rank"] >= trainer_ranks(config))]
    if table.empty:
        raise Missing("no replica was awake in any sync")
    missing = []
    for (cycle, phase, path, _, rank), rows in table[table["whole"]].groupby([*BY_SYNC, "rank"]):
        tried = rows[rows["forward"].str.startswith((WAITS, "version", "no version"))]
        points_tried = set(zip(tried["point"], tried["bucket"].astype(int), strict=True))
        own = [("begin", 0), ("end", 0)] if config.get("implementation") else None
        wanted = own or required_order(str(path), max(1, sum(rows["point"] == "bucket")))
        lacking = [point for point in wanted if is_asked(point[1]) and point not in points_tried]
        missing += [f"{spelled(point)} (rank {rank}, {phase}, cycle {cycle})" for point in lacking]
    return table[table["forward"] != UNASKED], missing


# -- the checks --------------------------------------------------------------------------------------------------------------


def receivers(config: Config) -> int:
    return int(config["infer_tp"] * config["replicas"])


def trainer_ranks(config: Config) -> int:
    return int(config["ranks"] - receivers(config))


def shares(config: Config) -> bool:
    """Whether the trainer and the first replicas share devices. Rows do not tell: a run that broke early lacks them."""
    return bool(config.get("placement", "overlap") == "overlap")


def bit_exact(frame: pd.DataFrame, config: Config) -> Measured:
    """Does every replica have the trainer's tensors, bit for bit?

    Hashes of all tensors after every cycle, after rehearsed failures, and after the syncs that follow them."""
    select(frame, phase="verify", metric="tensors_differ")
    compared = frame[frame["phase"].isin(["verify", "rehearse"])]
    differ = compared[compared["metric"] == "tensors_differ"]
    hashed = compared[compared["metric"] == "tensors_hashed"]["value"]
    wanted = receivers(config) * (config["cycles"] + 1)
    if len(differ) < wanted or not hashed.min():
        incomplete(f"all tensors were compared {len(differ)} times instead of {wanted}")
    moved = frame[frame["phase"].isin(PATHS)]
    transit = ""
    if not config.get("implementation"):
        sent = select(moved, metric="tensors_sent")["value"].max()
        verified = select(moved, metric="tensors_verified")["value"].min()
        transit = f"in transit {verified:.0f} of {sent:.0f} tensors were verified ({config['verify']})"
    answer, after_syncs = worst(differ), worst(differ[differ["phase"] == "verify"])
    seen = after_syncs.why if after_syncs.value else answer.why  # a rehearsal comes after all of them
    looked_at = f"SHA-256 of {hashed.min():.0f} tensors, {len(differ)} comparisons"
    reasons = [seen, healing(differ[differ["phase"] == "verify"]), looked_at, transit]
    return dataclasses.replace(answer, why="; ".join(filter(None, reasons)))


def healing(differ: pd.DataFrame) -> str:
    """Whether a replica that differed after a cycle had the trainer's tensors after a later one. The next version may hide a lost one."""
    last = int(differ["cycle"].max())
    wrong = differ[differ["value"] > 0].sort_values("cycle")
    last_wrong = {int(rank): int(cycle) for rank, cycle in zip(wrong["rank"], wrong["cycle"], strict=True)}
    if not last_wrong:
        return ""
    healed = {rank: cycle for rank, cycle in sorted(last_wrong.items()) if cycle < last}
    if not healed:
        return "the replicas that differ do so up to the last cycle"
    where = ", ".join(f"rank {rank} from cycle {cycle + 1} on" for rank, cycle in [*healed.items()][:3])
    return f"later syncs brought the right bytes: {where}"


def rounds_otherwise(config: Config) -> str:
    """Why right replicas may round differently than the trainer; empty if they add in the same order."""
    if config.get("serve", "megatron") != "megatron":
        return "the engine computes in another order than the trainer"
    if config.get("receiver"):
        return "your own receiving side may have a forward that rounds differently"
    same_layout = config["tp"] == config["infer_tp"] and config["pp"] == 1
    return "" if same_layout else "the layouts differ, so sums round differently"


NOISE_MARGIN = 8  # versions have other weights than the base, at which the noise of a few prompts was measured


def rounding(config: Config) -> float:
    return 1e-5 if config["dtype"] == "float32" else 3e-2


def logits_limit(config: Config) -> float:
    return rounding(config) if rounds_otherwise(config) else 0.0


def logits_equal(frame: pd.DataFrame, config: Config) -> Measured:
    """Do the replicas return the trainer's logits?"""
    errors = frame[frame["phase"].isin(["base", "verify", "rehearse"]) & (frame["metric"] == "logits_error")]
    same = select(frame, metric="logits_same")["value"]
    wanted = receivers(config) * (config["cycles"] + 1)
    if len(errors) < wanted:
        incomplete(f"logits were compared {len(errors)} times instead of {wanted}")
    answer = worst(errors)
    why = f"{answer.why}; {same.sum():.0f} of {len(errors)} logits are identical bit for bit"
    noise = frame[frame["metric"] == "logits_noise"]["value"]
    if not noise.empty:
        limit = min(NOISE_MARGIN * float(noise.max()), rounding(config))
        measured = f"noise at rest {noise.max():.2g}, between the engine and a plain model with the base weights"
        return Measured(answer.value, f"{why}; {measured}", limit=limit)
    if reason := rounds_otherwise(config):
        return Measured(answer.value, why, if_passed=reason)
    value = answer.value or (math.inf if same.min() < 1 else 0.0)
    return Measured(value, f"{why}; replicas have the trainer's layout")


def older_kit(frame: pd.DataFrame) -> None:
    """Refuse a run in which replicas hashed their weights and did not look for changes."""
    seen = frame[frame["phase"] == "base"]["metric"]
    if "tensors_hashed" in seen.to_numpy() and "tensors_unchanged" not in seen.to_numpy():
        raise NotMeasured("this run was recorded before the lab observed changes and writes")


def trained_changed(frame: pd.DataFrame, config: Config) -> Measured:
    """Did every tensor that training changed also change on every replica?

    Changes on each end are read from that end's model, whatever was gathered, named and sent."""
    older_kit(frame)
    rows = select(frame, metric="tensors_unchanged")
    trained = select(frame, phase="verify", metric="tensors_trained")["value"]
    wanted = receivers(config) * config["cycles"]
    if len(trained) < wanted:
        incomplete(f"changes were compared {len(trained)} times instead of {wanted}")
    if not trained.min():
        incomplete("training changed no tensor in a cycle")
    answer = worst(rows)
    return dataclasses.replace(
        answer, why=f"{answer.why}; training changed {trained.min():.0f} or more tensors per cycle"
    )


def every_parameter_written(frame: pd.DataFrame, config: Config) -> Measured:
    """Does a sync write every parameter and persistent buffer of a replica, and no constant?

    The lab overwrites all of them in a replica that wakes, and in one that does not serve: at the end, with your own synchroniser before
    the base. Constants must keep their bytes, and so must parameters that your own receiving side declares `frozen`."""
    older_kit(frame)
    left = select(frame, metric="tensors_unwritten")
    constants = select(frame, metric="constants_changed")
    ranks = left["rank"].nunique()
    if ranks < receivers(config):
        incomplete(f"the weights of {ranks} of {receivers(config)} receivers were overwritten before a sync")
    answer = worst(pd.concat([left, constants]))
    syncs = f"{counted(len(left), 'sync')} to replicas without weights"
    reasons = [answer.why, f"{syncs}, constants compared {len(constants)} times"]
    if config.get("receiver") and constants["value"].any():
        reasons.append("tensors that `finalize` derives must be in your receiver's list `derived`")
    return dataclasses.replace(answer, why="; ".join(reasons))


def versions_compared(frame: pd.DataFrame, table: pd.DataFrame) -> pd.Series[float]:
    """Whether the logits of both versions of a sync differ, for each sync with two. Empty if no sync published a new one."""
    syncs_only = table[table["phase"].isin(PATHS)]
    published = (syncs_only.groupby([*BY_SYNC, "rank"])["version"].nunique() > 1).any()
    if published:
        return select(frame, metric="versions_differ")["value"]
    return frame[frame["metric"] == "versions_differ"]["value"]


def no_torn_reads(frame: pd.DataFrame, config: Config) -> Measured:
    """Did every forward run on a single weight version?"""
    torn, served, moved = (select(frame, metric=name)["value"].sum() for name in ("torn", "served", "logits_moved"))
    table, missing = attempts(frame, config)
    versions = versions_compared(frame, table)
    same = (versions < 1).sum()
    outside, gates = (frame[frame["metric"] == name] for name in ("written_outside", "gates_written"))
    if config.get("implementation") and outside.empty:
        raise Missing("no weights of a serving replica were hashed at its gate")
    open_writes, torn_gates = outside["value"].sum(), (gates["value"] > 1).sum()
    waited = int((table["forward"] == WAITS).sum())
    reasons = [
        f"no forward was attempted at {missing[0]}" if missing else "",
        "two versions gave the same logits, so a torn read would not show" if same else "",
        "the logits of one version changed between syncs" if moved else "",
        f"{open_writes:.0f} tensors changed while the gate was open: {worst(outside).why}" if open_writes else "",
        f"weights changed within several gates of one sync: {worst(gates).why}" if torn_gates else "",
        f"{torn:.0f} of {served:.0f} forwards during syncs had mixed weights, or old ones after new ones",
        f"attempted forwards: {len(table) - waited} ran, {waited} waited ({counted(table['rank'].nunique(), 'rank')})",
    ]
    wrong = torn + moved + len(missing) + same + open_writes + torn_gates
    if versions.empty and not wrong:
        raise NotMeasured("no sync published a new version, so no forward ran between two")
    return Measured(float(wrong), "; ".join(filter(None, reasons)))


def version_order(frame: pd.DataFrame, config: Config) -> Measured:
    """Did every sync run in the required order?

    The sampled points of every sync on every receiver against the required order; and forwards on another version than reported."""
    wrong, count, first = out_of_order(frame, trainer_ranks(config), own=bool(config.get("implementation")))
    late = frame[frame["metric"] == "written_late"]
    labels, open_labels = (
        frame[frame["metric"] == name]["value"].sum() for name in ("mislabelled", "labelled_outside")
    )
    unlocked = max(frame[frame["metric"] == "unlocked"]["value"], default=0)
    reasons = [
        first,
        f"{labels:.0f} forwards ran on another version than the replica reported" if labels else "",
        f"the sender's lock was free at {unlocked:.0f} points of a sync" if unlocked else "",
        f"tensors changed after their version was published: {worst(late).why}" if late["value"].sum() else "",
        f"`publish` was called outside of the gate in {counted(int(open_labels), 'sync')} on receivers"
        if open_labels
        else "",
        f"all {count} syncs on receivers ran in the required order",
    ]
    return Measured(float(wrong + labels + open_labels + unlocked + late["value"].sum()), next(filter(None, reasons)))


def no_double_bump(frame: pd.DataFrame, config: Config) -> Measured:  # noqa: ARG001 - measures are called alike
    """Does the version equal the number of trained versions?

    On every rank after each cycle."""
    rows = select(frame, phase="verify", metric="version")
    off = (rows["value"] - rows["cycle"]).abs()
    row = rows.iloc[int(off.to_numpy().argmax())]
    right = f"version equals the number of trained versions ({counted(len(rows), 'reading')})"
    trained, version = (row["cycle"], "training"), (row["value"], "verify")
    wrong = compared("version", trained, version, f"rank {row['rank']}, cycle {row['cycle']}")
    return Measured(float(off.to_numpy().max()), wrong if off.any() else right)


def receivers_answer(frame: pd.DataFrame, config: Config) -> Measured:
    """Does every receiver serve the new version after a sync, and answer each request once?

    Each is asked for a forward after every sync, if its phase ended or the sync failed on any rank. Each request that
    runs or waits while weights change must get exactly one answer, to its own prompt."""
    rows = frame[frame["phase"].isin([*PATHS, "rehearse"])]
    failed = rows[rows["metric"] == "failed"][["cycle", "phase"]].drop_duplicates()
    asked = {key for key in ended(rows) if key[2] >= trainer_ranks(config)}
    asked |= {(*key, rank) for key in failed.itertuples(index=False, name=None) for rank in served_in(key[1], config)}
    serves = rows[rows["metric"] == "serves"]
    if failed.empty and serves.empty:
        raise Missing("no forward was requested after a sync")
    answered = list(serves[BY_RANK].itertuples(index=False, name=None))
    wrong = serves[serves["value"] < 1][BY_RANK].itertuples(index=False, name=None)
    unserved = sorted([*(asked - {*answered}), *wrong])
    served = int((serves["value"] >= 1).sum())
    why = f"the new version was served after {served} of {served + len(unserved)} syncs on receivers"
    places = [f"; not on rank {rank}, {phase}, cycle {cycle}" for cycle, phase, rank in unserved[:1]]
    wrong_answers = rows[rows["metric"] == "wrong_answers"]
    if others := wrong_answers["value"].sum():
        places.append(
            f"; {others:.0f} requests got no answer, two, or that of another request: {worst(wrong_answers).why}"
        )
    return Measured(float(len(unserved) + others), why + "".join(places))


def served_in(phase: str, config: Config) -> list[int]:
    names = {"refresh": ("replica",), "expand": ("sleeper",)}.get(phase, ("replica", "sleeper"))
    # An older run lacks later settings.
    known = {field.name for field in dataclasses.fields(SyncConfig)} & config.keys()
    settings = SyncConfig(**{name: config[name] for name in known})
    return [rank for role in roles(settings) if role.name in names for rank in role.ranks]


def return_to_baseline(metric: str) -> Measure:
    """Counts after every cycle and after the rehearsal against the baseline, which is taken after the base is published."""

    def measure(frame: pd.DataFrame, config: Config) -> Measured:
        last = "shrink" if shares(config) else "verify"
        before = select(frame, phase="base", metric=metric).set_index("rank")["value"]
        rows = frame[frame["phase"].isin([last, "rehearse"]) & (frame["metric"] == metric)]
        if rows["cycle"].nunique() < min(2, config["cycles"]):
            incomplete(f"{metric} was not counted after every cycle")
        if rows.empty:
            raise Missing(f"{metric} was not counted after any cycle")
        return worst(rows.assign(before=rows["rank"].map(before)), base="base")

    return measure


def cache_bounded(frame: pd.DataFrame, config: Config) -> Measured:  # noqa: ARG001 - as above
    """Does the sender keep at most two copies of the model?

    With a delta also what has changed, which is less than a copy."""
    answer = worst(select(frame, metric="cache_copies"))
    held = select(frame, metric="cache_bytes")["value"].max() / MIB
    return dataclasses.replace(answer, why=f"{answer.why}; {held:.1f} MiB in the sender's shared memory")


def most_copies(config: Config) -> float:
    return COPIES if config.get("delta", "off") == "off" else COPIES + CHANGES


def no_second_copy(frame: pd.DataFrame, config: Config) -> Measured:
    """Do replicas and the trainer keep no further copy of the weights after a sync?

    The bytes of all tensors of a rank after each cycle, in copies of the whole model: on a replica compared with those before the first
    sync, on the trainer, without shared memory, with those after the second cycle."""
    older_kit(frame)
    weighed = frame[frame["metric"] == "tensor_bytes"]
    rows = weighed[weighed["phase"].isin(["verify", "rehearse"])]
    of_trainer = weighed["rank"] < trainer_ranks(config)
    settled = of_trainer & (weighed["cycle"] == SETTLED) & (weighed["phase"] == "verify")
    of_base = ~of_trainer & (weighed["phase"] == "base")
    before = weighed[of_base | settled].drop_duplicates("rank").set_index("rank")["value"]
    of_replicas = rows[rows["rank"] >= trainer_ranks(config)]
    if len(of_replicas) < receivers(config) * config["cycles"]:
        incomplete(f"tensors were weighed {len(of_replicas)} times instead of {receivers(config) * config['cycles']}")
    if of_replicas.empty:
        raise Missing("tensors were not weighed after any sync")
    whole = float(select(frame, metric="bytes")["value"].max())
    over = (rows["value"] - rows["rank"].map(before)).dropna() / whole
    largest: Any = over.idxmax()
    row = rows.loc[largest]
    where = f"rank {row['rank']}" + (f", cycle {row['cycle']}" if row["cycle"] else "")
    start = "base" if row["rank"] >= trainer_ranks(config) else f"cycle {SETTLED}"
    first, last = (before[row["rank"]] / MIB, start), (row["value"] / MIB, row["phase"])
    why = compared("tensors", first, last, where, unit=" MiB")
    if not ((weighed["rank"] < trainer_ranks(config)) & (weighed["cycle"] > SETTLED)).any():
        why += f"; only replicas, as the trainer needs {SETTLED + 1} cycles"
    return Measured(max(0.0, float(over.max())), f"{why}; the model has {whole / MIB:.3g} MiB")


def base_equal(frame: pd.DataFrame, config: Config) -> Measured:
    """Were all base weights equal when the base was published?"""
    differ = select(frame, phase="base", metric="tensors_differ")["value"]
    if len(differ) < receivers(config):
        incomplete(f"base weights were compared on {len(differ)} of {receivers(config)} receivers")
    hashed = select(frame, phase="base", metric="tensors_hashed")["value"].sum()
    accepted = 0.0
    if not config.get("implementation"):
        accepted = select(frame, phase="base", metric="base_accepted")["value"].sum()
    why = f"{differ.sum():.0f} of {hashed:.0f} tensors on all receivers differ (SHA-256)"
    if accepted:
        why += f"; a base with two changed numbers was not refused by name on {counted(int(accepted), 'rank')}"
    return Measured(float(differ.sum() + accepted), why)


def failure_is_clean(frame: pd.DataFrame, config: Config) -> Measured:
    """Does a failed sync leave everything unchanged and name the cause?"""
    own = config.get("implementation")
    if own and select(frame, metric="retries")["value"].max() < 1:
        raise NotMeasured(
            "most failures are rehearsed in the kit's links and buckets, and your synchroniser has no retries = True"
        )
    rows = select(frame, phase="rehearse")
    opened = with_ids(rows[rows["metric"].isin(list(LEFT_OPEN)) & (rows["value"] > 0)], "scene")
    rows = with_ids(rows[rows["metric"].isin(list(FAILURES))], "scene")
    if rows.empty:
        raise Missing("no failure was rehearsed")
    # What is made once may be made by one failure of a kind, and not by the next.
    often = opened[opened.groupby(["rank", "metric", "scene"])["value"].transform("size") > 1]
    rows = pd.concat([rows, often])
    words = FAILURES | LEFT_OPEN
    broken = "; ".join(
        f"{words[str(row.metric)]}: {row.value:.0f} (rank {row.rank}, scene {row.scene}){f': {row.text!s}' if row.text else ''}"
        for row in rows[rows["value"] > 0].itertuples()
    )
    scenes = ", ".join(sorted(rows["scene"].unique()))  # ranks answer in any order
    named = "raised on the trainer and on the replica that failed" if own else "named the cause"
    right = f"every failed sync left weights and version unchanged and {named}, and the next sync succeeded"
    alone = len(served_in("refresh", config)) == config.get("infer_tp")
    unseen = (
        "; with one serving replica it does not show whether others stay behind: use placement=apart" if alone else ""
    )
    return Measured(float(rows["value"].sum()), broken or f"{right} ({scenes}){unseen}")


def delta_bytes(frame: pd.DataFrame, config: Config) -> Measured:
    """Does a version that is sent as changes need at most twice the bytes of what changed?

    The bytes of all buckets that arrived on a receiver, beside what the lab's own comparison of the trainer's tensors needs."""
    needed = select(frame, phase="train", metric="bytes_needed").set_index("cycle")["value"].to_dict()
    whole = float(select(frame, metric="bytes")["value"].max())
    arrived = select(frame, phase="refresh", metric="bytes_arrived")
    bases = with_ids(select(frame, phase="refresh", metric="base_named"), "was")
    later = arrived[arrived["cycle"] > 1]
    if len(later) < (config["cycles"] - 1) * len(served_in("refresh", config)):
        incomplete("the bytes of a version were not counted on every receiver")
    changed = with_ids(select(frame, phase="train", metric="words_changed"), "of")
    share = changed["value"].sum() / changed["of"].astype(float).sum()
    least = min(needed[cycle] for cycle in later["cycle"]) / whole
    if least > MUCH:
        raise NotMeasured(
            f"what changed needs {least:.0%} of all bytes: use delta=word, dtype=bfloat16 or a smaller lr"
        )
    other = bases[bases["value"].notna() & (bases["value"] != bases["was"].astype(float))]
    if len(other):
        row = other.iloc[0]
        why = (
            f"version {row['value']:.0f} was named as the one that is changed, but rank {row['rank']} had {row['was']}"
        )
        return Measured(math.inf, why)
    ratios = (later["value"] / later["cycle"].map(needed)).dropna()  # 0 of 0 bytes where nothing changed
    if ratios.empty:
        raise NotMeasured("no word changed: use a larger lr")
    largest: Any = ratios.idxmax()
    row, cycle = later.loc[largest], int(later["cycle"][largest])
    why = f"{row['value'] / KIB:.1f} KiB arrived, {needed[cycle] / KIB:.1f} were needed (rank {row['rank']}, cycle {cycle})"
    named = int(bases[bases["cycle"] > 1]["value"].notna().sum())
    shares = f"{share:.2%} of all words changed per version; {named} of {len(later)} syncs sent changes"
    return Measured(float(ratios.max()), f"{why}; {shares}; everything is {whole / KIB:.1f} KiB")


def trainer_restored(frame: pd.DataFrame, config: Config) -> Measured:
    """Does the trainer have its weights again after every offload, bit for bit?

    SHA-256 of its tensors on every rank before the offload and after the reload."""
    rows = offloads(frame, "restored_wrong")
    wanted = trainer_ranks(config) * config["cycles"]
    if len(rows) < wanted:
        incomplete(f"the trainer's tensors were compared {len(rows)} times instead of {wanted}")
    return worst(rows)


def trainer_untouched(frame: pd.DataFrame, _: Config) -> Measured:
    """Does your synchroniser leave the trainer's mode, gradients, random numbers and torch's settings alone?"""
    return worst(select(frame, metric="trainer_touched"))


def weights_once(frame: pd.DataFrame, config: Config) -> Measured:
    """Does an offloaded trainer keep its weights on the host once?

    Tensors outside of shared memory and pages of memory files without the buckets, on all ranks of the trainer; less what is no weight."""
    rows = offloads(frame, "host_copies")
    where = "are in the buckets" if config.get("arena") == "cache" else "have one copy beside the buckets"
    return Measured(
        float(rows["value"].max()), f"copies beside the buckets; arena={config.get('arena')}: weights {where}"
    )


def not_offloaded(config: Config) -> str:
    return "" if shares(config) else "the trainer is not offloaded: it shares no device with replicas"


def none_sleeps(config: Config) -> str:
    return "" if shares(config) else "no replica sleeps: the trainer shares no device with them"


def has_other_copies(config: Config) -> str:
    if (delta := config.get("delta", "off")) != "off":
        return f"delta={delta} keeps a version that is not sent; cache_bounded counts it"
    return kits_only(config, "your synchroniser may keep its one copy where no bucket lies")


def copies_allowed(config: Config) -> float:
    return MOST_BESIDE + (config.get("arena") != "cache")


def offloads(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = frame[frame["metric"] == metric]
    if rows.empty and was_offloaded(frame) and not (frame["metric"] == "host_copies").any():
        raise NotMeasured("this run was recorded before the lab observed the trainer's offloads")
    if rows.empty:
        raise Missing(NO_OFFLOAD)
    return rows


def was_offloaded(frame: pd.DataFrame) -> bool:
    return any(phase == "offload" for _, phase, _ in ended(frame))


def weights_adopted(frame: pd.DataFrame, config: Config) -> Measured:
    """Do adopting replicas have their weights in the sender's memory, so that nobody else sees what they write?

    By the system's list of mappings, after every cycle. Weights whose tensors lie interleaved or cut by columns are copied."""
    copied, shared = (select(frame, phase="verify", metric=metric) for metric in ("weights_copied", "weights_shared"))
    wanted = receivers(config) * config["cycles"]
    if len(copied) < wanted:
        incomplete(f"the memory of weights was looked up {len(copied)} times instead of {wanted}")
    if shared["value"].any():
        return Measured(math.inf, f"weights of which others see what is written: {worst(shared).why}")
    return worst(copied)


def sleepers_release(frame: pd.DataFrame, config: Config) -> Measured:
    """Do a sleeping replica and an offloaded trainer release their weights?

    An engine in place of the kit's model must also refuse a forward while it sleeps."""
    rows = frame[frame["metric"].isin(["asleep_tensors", "answered_asleep", "offloaded_left"])]
    if rows.empty:
        raise Missing("no sleeping replica was looked at")
    if not was_offloaded(frame):
        incomplete(NO_OFFLOAD)
    kept, answered = (rows[rows["metric"] == metric] for metric in ("asleep_tensors", "answered_asleep"))
    left = rows[rows["metric"] == "offloaded_left"]["value"].any()
    if config.get("serve") == "vllm" and not answered["value"].any() and not left:
        raise NotMeasured(
            f"vLLM frees no weights on a CPU: {kept['value'].max():.0f} keep their memory; a sleeping engine refused every forward"
        )
    return worst(answered if answered["value"].any() else rows)


def sweep_arrived(frame: pd.DataFrame, config: Config) -> Measured:  # noqa: ARG001 - as above
    """Did every tensor of the transport comparison arrive?"""
    rows = select(frame, phase="sweep", metric="sweep_missing")
    wrong = with_ids(rows[rows["value"] > 0], "transport", "bucket_bytes")
    ways = ", ".join(f"{row.transport} with buckets of {row.bucket_bytes} bytes" for row in wrong[:3].itertuples())
    right = f"every tensor arrived with all {len(rows)} combinations of transport and bucket size"
    return Measured(float(rows["value"].sum()), f"tensors are missing with {ways}" if ways else right)


def kits_only(config: Config, why: str) -> str:
    return why if config.get("implementation") else ""


def not_swept(config: Config) -> str:
    if not config["sweep"]:
        return "sweep=false: transports were not compared"
    return kits_only(config, "the kit's transports have no part in your synchroniser")


RULES = (
    rule(bit_exact),
    rule(logits_equal, limit=logits_limit, unit="ratio"),
    Rule(
        "names_right",
        "Does a plain model, loaded by tensor names, return the trainer's logits?",
        lambda frame, _: worst(select(frame, metric="plain_error")),
        limit=rounding,
        unit="ratio",
    ),
    rule(trained_changed),
    rule(every_parameter_written),
    rule(no_torn_reads),
    rule(version_order),
    rule(no_double_bump),
    rule(receivers_answer),
    rule(base_equal),
    Rule(
        "groups_return_to_baseline",
        "Does the number of process groups return to the baseline?",
        return_to_baseline("groups"),
    ),
    Rule(
        "segments_return_to_baseline",
        "Does the number of shared-memory segments return to the baseline?",
        return_to_baseline("segments"),
    ),
    Rule(
        "memory_growth",
        "Does each rank's memory stay constant after the first version?",
        growth("verify"),
        limit=200,
        unit="MiB",
        cycles=DRIFT_CYCLES,
    ),
    rule(no_second_copy, limit=0.25, unit="copies"),
    rule(
        cache_bounded,
        limit=most_copies,
        unit="copies",
        cannot=lambda config: kits_only(config, "your synchroniser keeps its copies anywhere"),
    ),
    rule(weights_adopted, limit=MOST_COPIED, unit="ratio", when=lambda config: config.get("refresh") == "adopted"),
    rule(sleepers_release, cannot=none_sleeps),
    rule(delta_bytes, limit=2, unit="ratio", cycles=2, when=lambda config: config["delta"] != "off"),
    rule(trainer_restored, cannot=not_offloaded),
    rule(trainer_untouched, when=lambda config: bool(config.get("implementation"))),
    rule(
        weights_once,
        limit=copies_allowed,
        unit="copies",
        cannot=lambda config: has_other_copies(config) or not_offloaded(config),
    ),
    rule(failure_is_clean),
    Rule(
        "others_untouched",
        "Does another process on the GPU keep its memory unchanged?",
        bystander_change("prepare"),
        limit=10,
        unit="MiB",
    ),
    rule(sweep_arrived, cannot=not_swept),
)


# Sets of tolerances for the sync lab. A tolerance that a set does not name keeps the lab's default.
PRESETS = {
    "strict": {
        "logits_equal": 0.0,  # bit for bit, which only equal layouts can give
        "memory_growth": 10.0,  # the host allocator varies by some MiB between versions
        "others_untouched": 0.0,  # memory of other processes may not change
    },
    "common practice": {
        "logits_equal": 3e-2,  # usual between a trainer and an inference engine: a few percent
        "memory_growth": 500.0,  # below the noise of an engine's resident set
        "cache_bounded": 3.0,  # one copy at the sender, one in transit, one being assembled
        "others_untouched": 50.0,
    },
}
