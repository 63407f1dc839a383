"""Checks of the offload lab that count: groups, handles, tensors, random numbers and steps that are not as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.offload.config import EXACT, KIT_MODEL
from kit.results import Measured, Missing, NotMeasured, Unjudged, incomplete, select

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

WHOLE_STATE = 0.99  # of the arithmetic size that the walk over the job must have found


def everywhere(config: Mapping[str, Any]) -> str:
    """How much was looked at."""
    return ", ".join(f"{config[name]} {name if config[name] > 1 else name[:-1]}" for name in ("ranks", "cycles"))


def counted(frame: pd.DataFrame, config: Mapping[str, Any], phase: str, metric: str) -> pd.DataFrame:
    """A number from every rank in every cycle; with any missing the check cannot pass."""
    rows = select(frame, phase=phase, metric=metric)
    wanted = config["ranks"] * config["cycles"]
    if len(rows) < wanted:
        incomplete(f"{metric} was recorded {len(rows)} times, not {wanted} (once per rank and cycle)")
    return rows


def most(rows: pd.DataFrame) -> tuple[float, str]:
    """The largest value and where it was, with what was noted there."""
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    noted = f": {row['text']}" if row.get("text") else ""
    return float(row["value"]), f"(rank {row['rank']}, cycle {row['cycle']}){noted}"


def kept_groups(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what happens to groups: none is given back."""
    return "" if config["groups"] else "groups=false releases no group"


def undestroyed(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what happens to destroyed groups: suspended ones are there all the time."""
    if config["mode"] == "suspend":
        return "mode=suspend keeps the groups and frees their memory only"
    return kept_groups(config)


def kept_world(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what happens to WORLD."""
    return undestroyed(config) or ("" if config["include_world"] else "include_world=false keeps WORLD")


def unhashed(config: Mapping[str, Any]) -> str:
    return "" if config["hashes"] else "hashes=false compares no tensors"


def unrehearsed(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what a failure does."""
    if config["mode"] not in EXACT:
        return f"a failure is rehearsed only with mode={' or '.join(EXACT)}, not {config['mode']}"
    return kept_groups(config)


def need_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> None:
    """A question about Megatron's groups has no answer where a job of somebody's own makes none."""
    if not select(frame, phase="fingerprint", metric="groups_watched")["value"].max():
        if config["model"] == KIT_MODEL:
            raise Unjudged("no group was found in Megatron's globals before the release")
        raise NotMeasured("the job has no Megatron groups")


def count_of(phase: str, metric: str, what: str) -> Measure:
    """The largest number that the observers counted of something wrong; right is 0."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        need_groups(frame, config)
        value, where = most(counted(frame, config, phase, metric))
        return Measured(value, f"{what}: {value:g} {where}" if value else f"{what}: 0 in {everywhere(config)}")

    return measure


def beyond(
    frame: pd.DataFrame, config: Mapping[str, Any], metric: str, phase: str, base: str
) -> tuple[pd.DataFrame, pd.Series]:
    """How many more there are after each cycle's `phase` than after `base`, and the levels after `base` by rank."""
    before = select(frame, phase=base, metric=metric).groupby("rank")["value"].first()
    rows = counted(frame, config, phase, metric)
    return rows.assign(value=rows["value"] - rows["rank"].map(before)), before


def more_than(metric: str, phase: str, base: str) -> Measure:
    """How many more there are after any cycle's `phase` than after `base`, on the worst rank."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        more, before = beyond(frame, config, metric, phase, base)
        value, where = most(more)
        level = int(before.max())
        said = f"+{value:g} {where}" if value > 0 else f"no increase in {everywhere(config)}"
        return Measured(value, f"{metric} after {phase}, baseline {level} after {base}: {said}")

    return measure


def groups_return(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Registered groups: while released against the start, and once back against before."""
    released = more_than("groups", "idle", "start")(frame, config)
    back = more_than("groups", "verify", "build")(frame, config)
    return max(released, back, key=lambda one: one.value or 0)


def old_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Groups that something still holds while released, and the sockets and threads above the level without a job."""
    need_groups(frame, config)
    alive, where = most(counted(frame, config, "idle", "old_groups_alive"))
    sockets = max(0.0, most(beyond(frame, config, "sockets", "idle", "baseline")[0])[0])
    threads = max(0.0, most(beyond(frame, config, "threads", "idle", "baseline")[0])[0])
    total = alive + sockets + threads
    if not total:
        return Measured(0, f"no old group, socket or thread left while released in {everywhere(config)}")
    more = f"up to {sockets:g} sockets and {threads:g} threads above the level without a job"
    if not alive:
        return Measured(total, f"while released: {more}, not explained by any group that the observers know")
    return Measured(total, f"while released: {more}; {alive:g} old groups alive {where}")


def world_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The default group of before is gone while released: not initialised, and held by nobody."""
    left, where = most(counted(frame, config, "idle", "world_left"))
    return Measured(left, f"WORLD still existed {where}" if left else f"WORLD was destroyed in {everywhere(config)}")


def tensors_left(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Tensors of the kinds to release that still have memory on the device while released, by name."""
    left, where = most(counted(frame, config, "idle", "left_tensors"))
    found = f"{left:g} tensors still on the device while released {where}"
    return Measured(left, found if left else f"none left on the device in {everywhere(config)}; scalars do not count")


def tensors_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_whole_state(frame)
    hashed = counted(frame, config, "verify", "tensors_hashed")["value"]
    if not hashed.min():
        raise Unjudged("no tensor was found on some rank")
    value, where = most(counted(frame, config, "verify", "tensors_changed"))
    said = f"{value:g} changed {where}" if value else "none changed"
    dropped = "dropped_grads=true allows gradients to come back as zeros" if config.get("dropped_grads") else ""
    return Measured(
        value, f"{hashed.sum():.0f} tensors hashed before release and after reload: {said}", if_passed=dropped
    )


def need_whole_state(frame: pd.DataFrame) -> None:
    """What the walk over the job found must be what the arithmetic of its geometry says."""
    kinds = frame[(frame["phase"] == "fingerprint") & frame["metric"].isin(["state_bytes", "state_arithmetic"])]
    if kinds.empty:
        return  # a job of somebody's own, or records of an older kit
    table = kinds.pivot_table(index=["rank", "ids"], columns="metric", values="value", aggfunc="max")
    if "state_arithmetic" not in table:
        return
    short = table[table["state_bytes"].fillna(0) < WHOLE_STATE * table["state_arithmetic"]]
    if len(short):
        place: Any
        place, row = next(iter(short.iterrows()))
        rank, ids = place
        raise Unjudged(
            f"found only {row['state_bytes']:.0f} of {row['state_arithmetic']:.0f} bytes of the training state on rank {rank} ({ids})"
        )


def random_unchanged(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Generators of random numbers that a release and reload moved."""
    value, where = most(counted(frame, config, "verify", "generators_moved"))
    return Measured(
        value,
        f"generators with a changed state: {value:g} {where}"
        if value
        else f"all generators unchanged in {everywhere(config)}",
    )


def names_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    rows = select(frame, phase="end", metric="names_replaced")
    if len(rows) < config["ranks"]:
        incomplete(f"only {len(rows)} of {config['ranks']} ranks looked")
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    value = float(row["value"])
    said = f"{value:g} functions are still replaced (rank {row['rank']}): {row['text']}"
    return Measured(
        value, said if value else "all functions of torch.distributed and megatron.core are the original ones"
    )


def bitwise(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Losses, gradient norms, weights and optimizer state that differ from a run without any release."""
    apart = select(frame, phase="second_control", metric="controls_differ")["value"].max()
    if apart:
        own = config["model"] != KIT_MODEL
        kind = Unjudged if own else NotMeasured
        whose = f"model={config['model']}" if own else "this setup"
        raise kind(f"two control runs without any release differ in {apart:g} places: {whose} is not deterministic")
    broken = select(frame, phase="verify", metric="broken")
    if broken["value"].any():
        cycle = broken[broken["value"] > 0]["cycle"].min()
        raise Unjudged(
            f"training stopped in cycle {cycle}: groups were dead, replaced or silent; see handles_alive, every_group_communicates"
        )
    compared = frame[frame["phase"] == "compare"]
    rows = select(compared, metric="steps_differ").set_index("rank")["value"]
    tensors = select(compared, metric="tensors_differ")
    if len(rows) < config["ranks"]:
        incomplete(f"only {len(rows)} of {config['ranks']} ranks compared")
    of = select(compared, metric="steps_compared")["value"].max()
    total = rows + tensors.set_index("rank")["value"]
    if not of:
        raise Unjudged("no step was trained")
    if not total.any():
        return Measured(
            0, f"{of:g} steps and all final tensors bit-identical to a run without release ({config['ranks']} ranks)"
        )
    worst = tensors.iloc[int(tensors["value"].to_numpy().argmax())]
    said = f"{rows.max():g} of {of:g} steps and {worst['value']:g} final tensors differ from a run without release"
    departs = compared[compared["metric"] == "departs"]
    if len(departs):
        first = departs.iloc[int(departs["value"].to_numpy().argmin())]
        said += f"; first in step {first['value']:g} (rank {first['rank']}): {first['text']}"
    if worst["value"]:
        said += f"; tensors (rank {worst['rank']}): {worst['text']}"
    return Measured(float(total.max()), said)


def failure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_groups(frame, config)
    if len(frame[(frame["phase"] == "rehearse_failure") & (frame["metric"] == "seconds")]) < config["ranks"]:
        raise Missing("the run ended before a failure was rehearsed on every rank")
    rows = frame[(frame["phase"] == "rehearse_failure") & (frame["metric"] == "failure_hidden")]
    if len(rows) < config["ranks"]:
        raise Unjudged(
            "the rehearsed failure never happened: no group was destroyed through destroy_process_group or shutdown, or handles were stale"
        )
    hidden = list(rows[rows["value"] > 0]["rank"])
    if hidden:
        return Measured(1, f"a group could not be destroyed and no error named it (rank {', '.join(map(str, hidden))})")
    return Measured(0, f"a group could not be destroyed and the error named it on all {config['ranks']} ranks")


def as_found(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    rows = select(frame, phase="ownership", metric="not_as_found")
    if len(rows) < config["ranks"]:
        incomplete(f"only {len(rows)} of {config['ranks']} ranks looked")
    value, _ = most(rows)
    if value:
        return Measured(value, f"{value:g} differences; logs/rank*.log of the run lists them")
    return Measured(
        0,
        "groups, globals and generators unchanged after success and after an error, with and without a default group of the caller",
    )
