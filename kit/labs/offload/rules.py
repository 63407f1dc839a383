"""The checks of the offload lab: what is not as it was (counts), and memory while released and during a reload. A check that this device
or config cannot answer is null and says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kit.labs.offload.faults import EXACT
from kit.labs.offload.lab import KIT_MODEL
from kit.megatron.config import ModelConfig, dtype_on, model_bytes
from kit.results import Measured, Missing, NotMeasured, Rule, Unjudged, select
from kit.results.frames import Source, source
from kit.results.growth import (
    MIB,
    by_owner,
    count_of,
    each_rank,
    everywhere,
    few_cycles,
    growth,
    lasting,
    left,
    more_than,
    most,
    on_cuda,
    one_cycle,
    others_untouched,
    slope_limit,
    slopes,
    steady,
)

if TYPE_CHECKING:
    import pandas as pd

    from kit.results.growth import Measure

WHOLE_STATE = 0.99  # of the arithmetic size that the walk over the job must have found
SEEN_BYTES = 64 * MIB  # below this a job's bytes drown in the interpreter's own memory
TOO_SMALL = "{:.1f} MiB are too small to see next to the interpreter's own memory; use a larger size"
KINDS = ("weights", "grads", "optimizer")


# -- why a config cannot have an answer ----------------------------------------------------------------------------------


def without(setting: str, why: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda config: "" if config[setting] else why


kept_groups = without("groups", "groups=false releases no group")


def undestroyed(config: Mapping[str, Any]) -> str:
    suspended = config["mode"] == "suspend"
    return "mode=suspend keeps the groups and frees their memory only" if suspended else kept_groups(config)


def kept_world(config: Mapping[str, Any]) -> str:
    return undestroyed(config) or without("include_world", "include_world=false keeps WORLD")(config)


def unrehearsed(config: Mapping[str, Any]) -> str:
    if config["mode"] not in EXACT:
        return f"a failure is rehearsed only with mode={' or '.join(EXACT)}, not {config['mode']}"
    return kept_groups(config)


def unmoved(config: Mapping[str, Any]) -> str:
    moved = any(config[kind] for kind in KINDS)
    return "" if moved else "weights, grads and optimizer are false: no tensor is released"


def unseen(config: Mapping[str, Any]) -> str:
    if config["model"] != KIT_MODEL:
        return unmoved(config)
    gone = [kind.replace("weights", "params") for kind in KINDS if config[kind]]
    least = min(sum(sizes[kind] for kind in gone) for sizes in sizes_of(config))
    return "" if least >= SEEN_BYTES else unmoved(config) or TOO_SMALL.format(least / MIB)


def kept_by_choice(config: Mapping[str, Any]) -> str:
    stays = [kind for kind in ("groups", *KINDS) if not config[kind]]
    return f"{', '.join(stays)}=false: their memory stays on the GPU" if stays else ""


# -- counts --------------------------------------------------------------------------------------------------------------


def need_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> None:
    """Questions about Megatron's groups have no answer for your own job without any."""
    if not select(frame, phase="fingerprint", metric="groups_watched")["value"].max():
        if config["model"] == KIT_MODEL:
            raise Unjudged("no group was found in Megatron's globals before the release")
        raise NotMeasured("the job has no Megatron groups")


def groups_of(phase: str, metric: str, what: str) -> Measure:
    count = count_of(phase, metric, what + ": {value:g} {where}", what + ": 0 in {everywhere}")

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        need_groups(frame, config)
        return count(frame, config)

    return measure


def groups_return(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    found = [more_than("groups", *phases)(frame, config) for phases in (("idle", "start"), ("verify", "build"))]
    return max(found, key=lambda one: one.value or 0)


def old_groups(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_groups(frame, config)
    alive, where = most(each_rank(frame, config, "idle", "old_groups_alive"))
    above = [more_than(metric, "idle", "baseline")(frame, config) for metric in ("sockets", "threads")]
    sockets, threads = (max(0.0, one.value or 0) for one in above)
    if not (total := alive + sockets + threads):
        return Measured(0, f"no old group, socket or thread left while released in {everywhere(config)}")
    why = f"; {alive:g} old groups alive {where}" if alive else ", not explained by any group that the observers know"
    more = f"up to {sockets:g} sockets and {threads:g} threads above the level without a job"
    return Measured(total, f"while released: {more}{why}")


def tensors_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_whole_state(frame)
    hashed = each_rank(frame, config, "verify", "tensors_hashed")["value"]
    if not hashed.min():
        raise Unjudged("no tensor was found on some rank")
    value, where = most(each_rank(frame, config, "verify", "tensors_changed"))
    words = f"{value:g} changed {where}" if value else "none changed"
    dropped = "dropped_grads=true allows gradients to come back as zeros" if config.get("dropped_grads") else ""
    words = f"{hashed.sum():.0f} tensors hashed before release and after reload: {words}"
    return Measured(value, words, if_passed=dropped)


def need_whole_state(frame: pd.DataFrame) -> None:
    """What the walk over the job found must be what the arithmetic of its geometry says."""
    kinds = frame[(frame["phase"] == "fingerprint") & frame["metric"].isin(["state_bytes", "state_arithmetic"])]
    if not (kinds["metric"] == "state_arithmetic").any():
        return  # your own job, or records of an older kit
    table = kinds.pivot_table(index=["rank", "ids"], columns="metric", values="value", aggfunc="max").reset_index()
    short = table[table["state_bytes"].fillna(0) < WHOLE_STATE * table["state_arithmetic"]]
    if len(short):
        words = (
            "found only {state_bytes:.0f} of {state_arithmetic:.0f} bytes of the training state on rank {rank} ({ids})"
        )
        raise Unjudged(words.format_map(short.iloc[0]))


def bitwise(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Losses, gradient norms, weights and optimizer state that differ from a run without any release."""
    if apart := select(frame, phase="second_control", metric="controls_differ")["value"].max():
        differ = f"two control runs without any release differ in {apart:g} places"
        if config["model"] != KIT_MODEL:
            raise Unjudged(f"{differ}: model={config['model']} is not deterministic")
        raise NotMeasured(f"{differ}: this setup is not deterministic")
    broken = select(frame, phase="verify", metric="broken")
    if broken["value"].any():
        cycle = broken[broken["value"] > 0]["cycle"].min()
        raise Unjudged(
            f"training stopped in cycle {cycle}: groups were dead, replaced or silent; see handles_alive, every_group_communicates"
        )
    compared = frame[frame["phase"] == "compare"]
    rows = each_rank(frame, config, "compare", "steps_differ").set_index("rank")["value"]
    tensors = select(compared, metric="tensors_differ")
    total = rows + tensors.set_index("rank")["value"]
    if not (of := select(compared, metric="steps_compared")["value"].max()):
        raise Unjudged("no step was trained")
    if not total.any():
        same = f"{of:g} steps and all final tensors bit-identical to a run without release"
        return Measured(0, f"{same} ({config['ranks']} ranks)")
    worst = tensors.iloc[int(tensors["value"].to_numpy().argmax())]
    words = f"{rows.max():g} of {of:g} steps and {worst['value']:g} final tensors differ from a run without release"
    departs = compared[compared["metric"] == "departs"]
    if len(departs):
        first = departs.iloc[int(departs["value"].to_numpy().argmin())]
        words += f"; first in step {first['value']:g} (rank {first['rank']}): {first['text']}"
    if worst["value"]:
        words += f"; tensors (rank {worst['rank']}): {worst['text']}"
    return Measured(float(total.max()), words)


def failure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    need_groups(frame, config)
    if len(frame[(frame["phase"] == "rehearse_failure") & (frame["metric"] == "seconds")]) < config["ranks"]:
        raise Missing("the run ended before a failure was rehearsed on every rank")
    rows = frame[(frame["phase"] == "rehearse_failure") & (frame["metric"] == "failure_hidden")]
    if len(rows) < config["ranks"]:
        raise Unjudged(
            "the rehearsed failure never happened: no group was destroyed through destroy_process_group or shutdown, or handles were stale"
        )
    if hidden := ", ".join(map(str, rows[rows["value"] > 0]["rank"])):
        return Measured(1, f"a group could not be destroyed and no error named it (rank {hidden})")
    return Measured(0, f"a group could not be destroyed and the error named it on all {config['ranks']} ranks")


# -- memory while released and on the way back, on the host and on a GPU ------------------------------------------------


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
            if_passed=f"too small to see in {seen.label}",
        )
    there = by_owner(frame, seen, "fingerprint", "resident_bytes", add=True)
    gone = by_owner(frame, seen, "fingerprint") - by_owner(frame, seen, "idle")
    fell = float((gone / there).min())
    words = f"of {there.min() / MIB:.0f} MiB: {share:.3f} by tensor storages, {fell:.3f} by {seen.label}"
    return Measured(min(share, fell), words)


def state_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of the kit's own job on the rank with most; 0 for your own job, because its size is unknown."""
    if config["model"] != KIT_MODEL:
        return 0
    return max(sizes["total"] for sizes in sizes_of(config))


def sizes_of(config: Mapping[str, Any]) -> list[dict[str, int]]:
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


def residual(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Driver memory while released above the level after a context and one matrix product, per rank: a number of a whole GPU is divided
    by the ranks that share it. What NCCL keeps of a suspended communicator by its own account is no residual."""
    seen = source(frame)
    kept, staying = keeps(frame, seen)
    over = highest(frame, seen, "idle") - highest(frame, seen, "start") - kept
    each = over / over.index.map(lambda owner: seen.sharers.get(owner, 1))
    worst: Any = each.idxmax()
    words = f"{seen.label} while released, above a CUDA context and one matmul ({seen.owner} {worst})"
    if worst in seen.sharers:
        words += f": {over[worst] / MIB:.0f} MiB divided by its {seen.sharers[worst]} ranks"
    return Measured(float(each.max()) / MIB, words + staying)


def keeps(frame: pd.DataFrame, seen: Source) -> tuple[pd.Series | float, str]:
    """What NCCL says that suspended communicators keep, and that in words: buffers of NVLS and of the network, which it never gives back
    (tracked as ncclMemPersist in its src/transport/nvls.cc and net.cc)."""
    if not ((frame["phase"] == "release") & (frame["metric"] == "comm_persist_after")).any():
        return 0.0, ""
    kept = highest(frame, seen, "release", "comm_persist_after", add=True)
    most = f"{kept.max() / MIB:.0f} MiB per {seen.owner}"
    words = f"; beside that NCCL keeps up to {most}, which it cannot suspend (NVLS, network buffers)"
    return kept, words if kept.max() else ""


def highest(
    frame: pd.DataFrame, seen: Source, phase: str, metric: str | None = None, *, add: bool = False
) -> pd.Series:
    """The most of all cycles, for each that has memory of its own."""
    return by_owner(frame, seen, phase, metric, add=add).groupby(seen.owner).max()


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
    words = f"of {taken.max() / MIB:.0f} MiB per {seen.owner}, from {seen.label}{staying}"
    return Measured(float(((held - idle) / taken).min()), words)


RULES = (
    Rule(
        "groups_return_to_baseline",
        "Are all groups gone while released, and is their number after a reload the same as before?",
        groups_return,
        cannot=undestroyed,
    ),
    Rule(
        "model_parallel_uninitialised",
        "While released, does Megatron report that it has no groups, or does using one raise an error that names it?",
        groups_of(
            "idle", "initialised", "ranks where Megatron reports initialised groups and using one raises no error"
        ),
        cannot=undestroyed,
    ),
    Rule(
        "every_group_communicates",
        "After a reload, does an all-reduce over every group reach the right ranks and return the exact sum?",
        groups_of("talk", "wrong_groups", "groups whose all-reduce fails or reaches the wrong ranks"),
    ),
    Rule(
        "membership_unchanged",
        "After a reload, does every group name refer to the same ranks in the same order as before?",
        groups_of("verify", "membership_changed", "group names that refer to other ranks"),
    ),
    Rule(
        "options_unchanged",
        "Do all groups keep their timeout, backend, options and description after a reload?",
        groups_of("verify", "options_changed", "groups with changed options"),
    ),
    Rule(
        "handles_alive",
        "Does every object that held a group hold a live one after a reload?",
        groups_of("verify", "stale_holders", "references to a dead or replaced group"),
    ),
    Rule(
        "stale_handle_raises",
        "Does using a destroyed group raise an error that names it?",
        groups_of("idle", "stale_usable", "destroyed groups whose use raises no error that names them"),
        cannot=kept_groups,
    ),
    Rule(
        "old_groups_dead",
        "Are the old groups freed while released, with their sockets and threads?",
        old_groups,
        cannot=undestroyed,
    ),
    Rule(
        "world_released",
        "Is WORLD destroyed while released?",
        count_of("idle", "world_left", found="WORLD still existed {where}", none="WORLD was destroyed in {everywhere}"),
        cannot=kept_world,
    ),
    Rule(
        "destroy_failure_raises",
        "Does a group that cannot be destroyed raise an error that names it?",
        failure,
        cannot=unrehearsed,
    ),
    Rule(
        name="tensors_released",
        question="Do weights, gradients and optimizer state free their device memory while released?",
        limit=0.9,
        unit="ratio",
        better=">=",
        measure=tensors_released,
        cannot=unmoved,
    ),
    Rule(
        "no_tensor_left",
        "Does every weight, gradient and optimizer tensor leave the device while released?",
        count_of(
            "idle",
            "left_tensors",
            found="{value:g} tensors still on the device while released {where}",
            none="none left on the device in {everywhere}; scalars do not count",
        ),
        cannot=unmoved,
    ),
    Rule(
        "tensors_restored",
        "Is every tensor bit-identical after a reload (SHA-256)?",
        tensors_restored,
        cannot=without("hashes", "hashes=false compares no tensors"),
    ),
    Rule(
        "random_unchanged",
        "After a reload, are all random number generators in the same state as before the release?",
        count_of(
            "verify",
            "generators_moved",
            found="generators with a changed state: {value:g} {where}",
            none="all generators unchanged in {everywhere}",
        ),
    ),
    Rule(
        "training_continues_bitwise",
        "Is training bit-identical to a run without any release?",
        bitwise,
    ),
    Rule(
        "memory_drift",
        "Is memory while released the same in the last cycle as in the first?",
        growth("idle", "while released"),
        limit=200,
        unit="MiB",
        cannot=one_cycle,
    ),
    Rule(
        "memory_slope",
        "Is memory growth per cycle no larger than in a control run without any release?",
        slopes("idle", control="control"),
        limit=slope_limit(state_bytes),
        unit="MiB/cycle",
        cannot=few_cycles,
    ),
    Rule(
        "reload_peak",
        "Does the memory peak of a reload stay within what training uses?",
        reload_peak,
        limit=1.1,
        unit="ratio",
        cannot=unseen,
    ),
    Rule(
        "residual",
        "Is almost no GPU memory in use while released, beyond a CUDA context?",
        on_cuda(residual),
        limit=500,
        unit="MiB",
        cannot=kept_by_choice,
    ),
    Rule(
        name="comm_released",
        question="Is the GPU memory of the communicators freed while released?",
        limit=0.7,
        unit="ratio",
        better=">=",
        measure=on_cuda(comm_released),
        cannot=kept_groups,
    ),
    Rule(
        "fds_return",
        "Does the number of file descriptors return to the baseline?",
        lasting("fds", "verify", "build", "compare"),
    ),
    Rule(
        "threads_return",
        "Does the number of threads return to the baseline?",
        lasting("threads", "verify", "build", "compare"),
    ),
    Rule(
        "nothing_left",
        "Does the job leave no descriptor, thread, process, shared memory or file behind when it ends?",
        left("end", "baseline"),
    ),
    Rule(
        "time_steady",
        "Do the last releases and reloads take no longer than the earlier ones?",
        steady(("release", "reload")),
        limit=3,
        unit="ratio",
        cannot=few_cycles,
    ),
    Rule(
        "others_untouched",
        "Does another process on the GPU keep its memory unchanged?",
        on_cuda(others_untouched("start")),
        limit=10,
        unit="MiB",
    ),
    Rule(
        "names_restored",
        "Are all patched functions restored at the end?",
        count_of(
            "end",
            "names_replaced",
            "functions that are still replaced: {value:g} {where}",
            "all functions of torch.distributed and megatron.core are the original ones",
        ),
    ),
    Rule(
        "state_as_found",
        "Are the caller's groups, globals and random state unchanged after success and after an error?",
        count_of(
            "ownership",
            "not_as_found",
            "{value:g} differences; logs/rank*.log of the run lists them",
            "groups, globals and generators unchanged after success and after an error, with and without a default group of the caller",
        ),
    ),
)


# Sets of tolerances for the offload lab. A tolerance that a set does not name keeps the lab's default.
PRESETS = {
    "strict": {
        "tensors_released": 0.99,  # all except an allocator's rounding
        "memory_drift": 10.0,  # the host allocator varies by some MiB between two cycles
        "memory_slope": 0.1,  # 100 MiB in a long run of a thousand cycles
        "reload_peak": 1.0,  # a reload needs no more memory than training
        "residual": 500.0,  # about the size of a bare CUDA context, which cannot be released
        "comm_released": 0.9,
        "others_untouched": 0.0,  # memory of other processes may not change
    },
    "common practice": {
        "tensors_released": 0.8,  # freeing most of the GPU counts as success
        "memory_drift": 200.0,  # the same as the lab's default
        "memory_slope": 10.0,  # not visible in a test of some tens of cycles
        "reload_peak": 1.5,  # half a model more during a reload is usually planned for
        "residual": 2048.0,  # on a GPU of 80 GiB, a rest below 2 GiB is rarely questioned
        "comm_released": 0.5,  # usually only the allocator is checked, which does not see communicators
        "fds_return": 16.0,  # usually not counted until a system limit is hit
        "threads_return": 16.0,
        "others_untouched": 50.0,
    },
}
