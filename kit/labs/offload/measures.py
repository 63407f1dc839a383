"""What the checks of the offload lab measure: what is not as it was (counts), and memory while released and on the way back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kit.labs.growth import MIB, by_owner
from kit.labs.offload import EXACT, KIT_MODEL
from kit.megatron.config import ModelConfig, dtype_on, model_bytes
from kit.results import Measured, Missing, NotMeasured, Unjudged, incomplete, select
from kit.results.frames import source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]
    from collections.abc import Mapping

    from kit.results.frames import Source

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
    """Questions about Megatron's groups have no answer for your own job without any."""
    if not select(frame, phase="fingerprint", metric="groups_watched")["value"].max():
        if config["model"] == KIT_MODEL:
            raise Unjudged("no group was found in Megatron's globals before the release")
        raise NotMeasured("the job has no Megatron groups")


def count_of(phase: str, metric: str, what: str = "", *, found: str = "", none: str = "") -> Measure:
    """The largest number that the observers counted of something wrong; right is 0. `what` is counted of Megatron's groups; anything else
    has words of its own for what was found, and for none."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if what:
            need_groups(frame, config)
        value, where = most(counted(frame, config, phase, metric))
        if value:
            return Measured(value, (found or what + ": {value:g} {where}").format(value=value, where=where))
        return Measured(value, (none or what + ": 0 in {everywhere}").format(everywhere=everywhere(config)))

    return measure


def more_than(frame: pd.DataFrame, config: Mapping[str, Any], metric: str, phase: str, base: str) -> Measured:
    """How many more there are after any cycle's `phase` than after `base`, on the worst rank."""
    before = select(frame, phase=base, metric=metric).groupby("rank")["value"].first()
    rows = counted(frame, config, phase, metric)
    value, where = most(rows.assign(value=rows["value"] - rows["rank"].map(before)))
    said = f"+{value:g} {where}" if value > 0 else f"no increase in {everywhere(config)}"
    return Measured(value, f"{metric} after {phase}, baseline {int(before.max())} after {base}: {said}")


def groups_return(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Registered groups: while released against the start, and once back against before."""
    found = [more_than(frame, config, "groups", *phases) for phases in (("idle", "start"), ("verify", "build"))]
    return max(found, key=lambda one: one.value or 0)


def old_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Groups that something still holds while released, and the sockets and threads above the level without a job."""
    need_groups(frame, config)
    alive, where = most(counted(frame, config, "idle", "old_groups_alive"))
    above = [more_than(frame, config, metric, "idle", "baseline") for metric in ("sockets", "threads")]
    sockets, threads = (max(0.0, one.value or 0) for one in above)
    total = alive + sockets + threads
    if not total:
        return Measured(0, f"no old group, socket or thread left while released in {everywhere(config)}")
    more = f"up to {sockets:g} sockets and {threads:g} threads above the level without a job"
    if not alive:
        return Measured(total, f"while released: {more}, not explained by any group that the observers know")
    return Measured(total, f"while released: {more}; {alive:g} old groups alive {where}")


def tensors_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_whole_state(frame)
    hashed = counted(frame, config, "verify", "tensors_hashed")["value"]
    if not hashed.min():
        raise Unjudged("no tensor was found on some rank")
    value, where = most(counted(frame, config, "verify", "tensors_changed"))
    said = f"{value:g} changed {where}" if value else "none changed"
    dropped = "dropped_grads=true allows gradients to come back as zeros" if config.get("dropped_grads") else ""
    said = f"{hashed.sum():.0f} tensors hashed before release and after reload: {said}"
    return Measured(value, said, if_passed=dropped)


def need_whole_state(frame: pd.DataFrame) -> None:
    """What the walk over the job found must be what the arithmetic of its geometry says."""
    kinds = frame[(frame["phase"] == "fingerprint") & frame["metric"].isin(["state_bytes", "state_arithmetic"])]
    if kinds.empty:
        return  # your own job, or records of an older kit
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


def looked(frame: pd.DataFrame, config: Mapping[str, Any], phase: str, metric: str) -> pd.Series:
    """The row of the rank with most, where every rank looked once."""
    rows = select(frame, phase=phase, metric=metric)
    if len(rows) < config["ranks"]:
        incomplete(f"only {len(rows)} of {config['ranks']} ranks looked")
    return rows.iloc[int(rows["value"].to_numpy().argmax())]


def names_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    row = looked(frame, config, "end", "names_replaced")
    if value := float(row["value"]):
        return Measured(value, f"{value:g} functions are still replaced (rank {row['rank']}): {row['text']}")
    return Measured(0, "all functions of torch.distributed and megatron.core are the original ones")


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
        same = f"{of:g} steps and all final tensors bit-identical to a run without release"
        return Measured(0, f"{same} ({config['ranks']} ranks)")
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
    if value := float(looked(frame, config, "ownership", "not_as_found")["value"]):
        return Measured(value, f"{value:g} differences; logs/rank*.log of the run lists them")
    return Measured(
        0,
        "groups, globals and generators unchanged after success and after an error, with and without a default group of the caller",
    )


# -- memory while released and on the way back, on the host and on a GPU ------------------------------------------------


SEEN_BYTES = 64 * MIB  # below this a job's bytes drown in the interpreter's own memory
TOO_SMALL = "{:.1f} MiB are too small to see next to the interpreter's own memory; use a larger size"
KINDS = ("weights", "grads", "optimizer")


def per_rank(frame: pd.DataFrame, phase: str, metric: str) -> pd.Series:
    return select(frame, phase=phase, metric=metric).groupby("rank")["value"].max()


def tensors_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
    """Of the resident bytes, what left; and what the kernel (or the driver) says of it, whichever is less."""
    need_whole_state(frame)
    resident = per_rank(frame, "fingerprint", "resident_bytes")
    left = per_rank(frame, "idle", "left_bytes")
    if not resident.min():
        raise Unjudged("the job had no tensors of the kinds to release")
    share = float(((resident - left) / resident).min())
    if (frame["metric"] == "allocated").any():  # by a GPU's allocator, whoever keeps a tensor there
        held, idle = per_rank(frame, "fingerprint", "allocated"), per_rank(frame, "idle", "allocated")
        share = min(share, float(((held - idle) / resident).min()))
    seen = source(frame)
    if resident.min() < SEEN_BYTES:
        return Measured(
            share,
            f"{share:.3f} of {resident.min() / MIB:.1f} MiB by tensor storages",
            if_passed=f"too small to see in {seen.told}",
        )
    there = by_owner(frame, seen, "fingerprint", "resident_bytes", add=True)
    gone = by_owner(frame, seen, "fingerprint") - by_owner(frame, seen, "idle")
    fell = float((gone / there).min())
    said = f"of {there.min() / MIB:.0f} MiB: {share:.3f} by tensor storages, {fell:.3f} by {seen.told}"
    return Measured(min(share, fell), said)


def unmoved(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what happens to tensors: none is given back."""
    moved = any(config[kind] for kind in KINDS)
    return "" if moved else "weights, grads and optimizer are false: no tensor is released"


def unseen(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what moving tensors takes: they are too few to see beside the interpreter's own memory."""
    if config["model"] != KIT_MODEL:
        return unmoved(config)
    gone = [kind.replace("weights", "params") for kind in KINDS if config[kind]]
    least = min(sum(sizes[kind] for kind in gone) for sizes in sizes_of(config))
    return "" if least >= SEEN_BYTES else unmoved(config) or TOO_SMALL.format(least / MIB)


def state_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of the kit's own job on the rank with most; 0 for your own job, because its size is unknown."""
    if config["model"] != KIT_MODEL:
        return 0
    return max(sizes["total"] for sizes in sizes_of(config))


def sizes_of(config: Mapping[str, Any]) -> list[dict[str, int]]:
    """The bytes of the kit's own job by arithmetic, for each pipeline stage."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)} & {*config}
    job = ModelConfig(**{**{name: config[name] for name in fields}, "dtype": dtype_on(config["dtype"])})
    return [model_bytes(job, ranks=config["ranks"], stage=stage) for stage in range(config["pp"])]


def reload_peak(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """The most memory on the way back against the level of the training that follows it."""
    resident = per_rank(frame, "fingerprint", "resident_bytes")
    if resident.min() < SEEN_BYTES:
        raise NotMeasured(TOO_SMALL.format(resident.min() / MIB))
    cuda = (frame["metric"] == "peak_allocated").any()
    peak, level = ("peak_allocated", "allocated") if cuda else ("peak_rss", "rss")
    peaks = select(frame, phase="reload", metric=peak).set_index(["rank", "cycle"])["value"]
    training = select(frame, phase="train", metric=level)
    after = training.assign(cycle=training["cycle"] - 1).set_index(["rank", "cycle"])["value"]
    ratio = (peaks / after).dropna()
    if ratio.empty:
        raise Missing("no training followed a reload")
    rank, cycle = ratio.index[int(ratio.to_numpy().argmax())]
    return Measured(
        float(ratio.max()),
        f"{peak} in reload / {level} in the training after it (rank {rank}, cycle {cycle}); the job has {resident.max() / MIB:.0f} MiB",
    )


def kept_by_choice(config: Mapping[str, Any]) -> str:
    stays = [kind for kind in ("groups", *KINDS) if not config[kind]]
    return f"{', '.join(stays)}=false: their memory stays on the GPU" if stays else ""


def residual(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Driver memory while released above the level after a context and one matrix product, per rank: a number of a whole GPU is divided
    by the ranks that share it. What NCCL keeps of a suspended communicator by its own account is no residual."""
    seen = source(frame)
    kept, staying = keeps(frame, seen)
    over = highest(frame, seen, "idle") - highest(frame, seen, "start") - kept
    each = over / over.index.map(lambda owner: seen.sharers.get(owner, 1))
    worst: Any = each.idxmax()
    said = f"{seen.told} while released, above a CUDA context and one matmul ({seen.whose} {worst})"
    if worst in seen.sharers:
        said += f": {over[worst] / MIB:.0f} MiB divided by its {seen.sharers[worst]} ranks"
    return Measured(float(each.max()) / MIB, said + staying)


def keeps(frame: pd.DataFrame, seen: Source) -> tuple[pd.Series | float, str]:
    """What NCCL says that suspended communicators keep, and that in words: buffers of NVLS and of the network, which it never gives back
    (tracked as ncclMemPersist in its src/transport/nvls.cc and net.cc)."""
    if not ((frame["phase"] == "release") & (frame["metric"] == "comm_persist_after")).any():
        return 0.0, ""
    kept = highest(frame, seen, "release", "comm_persist_after", add=True)
    most = f"{kept.max() / MIB:.0f} MiB per {seen.whose}"
    said = f"; beside that NCCL keeps up to {most}, which it cannot suspend (NVLS, network buffers)"
    return kept, said if kept.max() else ""


def highest(
    frame: pd.DataFrame, seen: Source, phase: str, metric: str | None = None, *, add: bool = False
) -> pd.Series:
    """The most of all cycles, for each that has memory of its own."""
    return by_owner(frame, seen, phase, metric, add=add).groupby(seen.whose).max()


def comm_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Of what communicators took (driver memory beyond the allocator's), the share that came back. The baseline is after the controls, not
    at the start: by then every kernel is loaded, which takes memory that never comes back."""
    seen = source(frame)
    without, held, idle = (
        highest(frame, seen, phase) - highest(frame, seen, phase, "reserved", add=True)
        for phase in ("baseline", "fingerprint", "idle")
    )
    kept, staying = keeps(frame, seen)
    taken = held - without - kept
    if taken.min() < MIB:
        raise NotMeasured("communicators took less than 1 MiB of driver memory")
    said = f"of {taken.max() / MIB:.0f} MiB per {seen.whose}, from {seen.told}{staying}"
    return Measured(float(((held - idle) / taken).min()), said)
