"""Checks of the offload lab that count: groups, handles, files, threads, tensors and steps that are not as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.offload.config import EXACT
from kit.results import Measured, NotMeasured, select

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]


def everywhere(config: Mapping[str, Any]) -> str:
    """How much was looked at."""
    return ", ".join(f"{config[name]} {name if config[name] > 1 else name[:-1]}" for name in ("ranks", "cycles"))


def counted(frame: pd.DataFrame, config: Mapping[str, Any], phase: str, metric: str) -> pd.DataFrame:
    """A number from every rank in every cycle; with any missing there is nothing to judge."""
    rows = select(frame, phase=phase, metric=metric)
    wanted = config["ranks"] * config["cycles"]
    if len(rows) < wanted:
        raise NotMeasured(f"{metric} was counted {len(rows)} times, not {wanted}: on every rank in every cycle")
    return rows


def most(rows: pd.DataFrame) -> tuple[float, str]:
    """The largest value and where it was."""
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    return float(row["value"]), f"on rank {row['rank']} in cycle {row['cycle']}"


def need_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> None:
    """A question about Megatron's groups has no answer where none were there or none were given back."""
    if not config["groups"]:
        raise NotMeasured("groups=false: no group was given back")
    if not select(frame, phase="fingerprint", metric="groups_watched")["value"].max():
        raise NotMeasured("the job has no groups of Megatron's")


def need_destroyed(config: Mapping[str, Any]) -> None:
    """Suspended groups are there all the time: only their memory goes."""
    if config["mode"] == "suspend":
        raise NotMeasured("mode=suspend keeps its groups and gives back their memory")


def count_of(phase: str, metric: str, what: str) -> Measure:
    """The largest number that the ranks themselves counted of something wrong; right is 0."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        need_groups(frame, config)
        value, where = most(counted(frame, config, phase, metric))
        return Measured(value, f"{what}: {value:g} {where}" if value else f"{what}: none, {everywhere(config)}")

    return measure


def beyond(
    frame: pd.DataFrame, config: Mapping[str, Any], metric: str, phase: str, base: str
) -> tuple[pd.DataFrame, pd.Series]:
    """How many more there are after each cycle's `phase` than after `base`, and the levels after `base` by rank."""
    if not config["groups"]:
        raise NotMeasured("groups=false: no group was given back")
    before = select(frame, phase=base, metric=metric).groupby("rank")["value"].first()
    rows = counted(frame, config, phase, metric)
    return rows.assign(value=rows["value"] - rows["rank"].map(before)), before


def more_than(metric: str, phase: str, base: str) -> Measure:
    """How many more there are after any cycle's `phase` than after `base`, on the worst rank."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        more, before = beyond(frame, config, metric, phase, base)
        value, where = most(more)
        level = int(before.max())
        said = f"{value:g} more {where}" if value > 0 else f"never more, {everywhere(config)}"
        return Measured(value, f"{metric} after {phase} against {level} after {base}: {said}")

    return measure


def lasting(metric: str, phase: str, base: str) -> Measure:
    """How many more there are after `phase` of a cycle and of the next one, too, than after `base`, on the worst rank.

    What leaks stays. Seen once on a busy machine without a leak: a socket more on one rank in one cycle of 20, from the first
    collectives on, which went with the groups. What appears in the last of several cycles is not looked at again, and not counted.
    """

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        more, before = beyond(frame, config, metric, phase, base)
        more = more.sort_values("cycle")
        stays = more.assign(value=more["value"].clip(upper=more.groupby("rank")["value"].shift(-1)))
        if config["cycles"] > 1:
            stays = stays[stays["cycle"] < stays["cycle"].max()]  # after the last nobody looks again
        value, where = most(stays)
        level = int(before.max())
        said = f"{value:g} more {where} and later" if value > 0 else f"never more that stay, {everywhere(config)}"
        return Measured(value, f"{metric} after {phase} against {level} after {base}: {said}")

    return measure


def uninitialised(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_destroyed(config)
    return count_of("idle", "initialised", "ranks whose Megatron still calls itself initialised")(frame, config)


def groups_return(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Registered groups: while released against the start, and once back against before."""
    need_destroyed(config)
    released = more_than("groups", "idle", "start")(frame, config)
    back = more_than("groups", "verify", "build")(frame, config)
    return max(released, back, key=lambda one: one.value or 0)


def old_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Groups that something still holds while released, and the sockets and threads above the level without a job."""
    need_groups(frame, config)
    need_destroyed(config)
    alive, where = most(counted(frame, config, "idle", "old_groups_alive"))
    sockets = max(0.0, most(beyond(frame, config, "sockets", "idle", "baseline")[0])[0])
    threads = max(0.0, most(beyond(frame, config, "threads", "idle", "baseline")[0])[0])
    total = alive + sockets + threads
    if not total:
        return Measured(0, f"no old group, socket or thread left while released, {everywhere(config)}")
    held = f"{alive:g} old groups alive {where}" if alive else "no old group alive"
    return Measured(
        total, f"while released {held}; at most {sockets:g} sockets and {threads:g} threads more than without a job"
    )


def tensors_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    if not config["hashes"]:
        raise NotMeasured("hashes=false, every cycle is unchecked")
    hashed = counted(frame, config, "verify", "tensors_hashed")["value"].sum()
    value, where = most(counted(frame, config, "verify", "tensors_changed"))
    said = f"{value:g} changed {where}" if value else "none changed"
    return Measured(value, f"SHA-256 of {hashed:.0f} tensors before release and after reload: {said}")


def bitwise(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Losses, gradient norms, weights and optimizer state that differ from a run without any release."""
    apart = select(frame, phase="second_control", metric="controls_differ")["value"].max()
    if apart:
        raise NotMeasured(
            f"two controls without any release differ in {apart:g} places: this setup is not deterministic"
        )
    broken = select(frame, phase="verify", metric="broken")
    if broken["value"].any():
        cycle = broken[broken["value"] > 0]["cycle"].min()
        raise NotMeasured(
            f"training ended in cycle {cycle}: layers hold groups that are dead or replaced (handles_alive)"
        )
    rows = select(frame, phase="compare").pivot_table(index="rank", columns="metric", values="value")
    if len(rows) < config["ranks"]:
        raise NotMeasured(f"only {len(rows)} of {config['ranks']} ranks compared")
    steps, tensors, of = rows["steps_differ"].max(), rows["tensors_differ"].max(), rows["steps_compared"].max()
    total = rows["steps_differ"] + rows["tensors_differ"]
    if not total.any():
        return Measured(
            0, f"{of:g} steps and every tensor at the end, bit for bit as without release, {config['ranks']} ranks"
        )
    return Measured(
        float(total.max()), f"{steps:g} of {of:g} steps and {tensors:g} tensors differ from a run without release"
    )


def failure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_groups(frame, config)
    if config["mode"] not in EXACT:
        raise NotMeasured(f"mode={config['mode']}: a failure is rehearsed with mode={' or '.join(EXACT)} only")
    if frame[frame["phase"] == "rehearse_failure"].empty:
        raise NotMeasured("the run ended before a failure was rehearsed")
    rows = frame[(frame["phase"] == "rehearse_failure") & (frame["metric"] == "failure_hidden")]
    if len(rows) < config["ranks"]:
        raise NotMeasured(
            "no group was destroyed by destroy_process_group or shutdown when a failure was to be rehearsed, or handles were stale"
        )
    hidden = list(rows[rows["value"] > 0]["rank"])
    if hidden:
        return Measured(
            1, f"a group refused to be destroyed and no error named it on rank {', '.join(map(str, hidden))}"
        )
    return Measured(0, f"a group refused to be destroyed, and the error named it on all {config['ranks']} ranks")


def as_found(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    rows = select(frame, phase="ownership", metric="not_as_found")
    if len(rows) < config["ranks"]:
        raise NotMeasured(f"only {len(rows)} of {config['ranks']} ranks looked")
    value, _ = most(rows)
    if value:
        return Measured(value, f"things not as found: {value:g}; logs/rank*.log of the run names them")
    return Measured(
        0, "groups, globals, generators as found after success and after an error, own default group or not"
    )
