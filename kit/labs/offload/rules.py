"""The rules of the offload lab: what is not as it was (counts), and memory while released and during a reload. A rule that this device
or config cannot answer is null and says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.labs.offload.faults import EXACT, KIT_RELEASER
from kit.labs.offload.lab import KINDS, KIT_MODEL
from kit.machine import MIB
from kit.megatron.config import ModelConfig, dtype_on, model_bytes
from kit.results import Measured, Missing, NotMeasured, Rule, Unjudged, rule, select
from kit.results.frames import Source, read_ids, source
from kit.results.growth import (
    COUNTS,
    DRIFT_CYCLES,
    LEAST_S,
    PILES_UP,
    RISING,
    SLOPE_CYCLES,
    WARM_UP,
    by_owner,
    bystander_change,
    each_rank,
    growth,
    largest,
    need_cuda,
    nothing_piles_up,
    rise,
    slope_limit,
    slopes,
    steady,
    worst,
    worst_of,
)
from kit.results.records import ZEROS
from kit.results.units import counted

if TYPE_CHECKING:
    import pandas as pd

    from kit.results.growth import Measure

WHOLE_STATE = 0.99  # of the arithmetic size that the walk over the job must have found
SEEN_BYTES = 64 * MIB  # below this a job's bytes drown in the interpreter's own memory
SEEN_BY_DRIVER = 1024 * MIB  # below this they drown in what kernels and libraries take of a GPU meanwhile
COMMUNICATORS = 32 * MIB  # below this the driver's pages and its own noise are most of what they took
TOO_SMALL = "{:.1f} MiB are too small to see next to the interpreter's own memory; use a larger size"
LEAST_RISE = 2.0  # from the second cycle to the last


# -- why a config cannot have an answer ----------------------------------------------------------------------------------


def kept_groups(config: Mapping[str, Any]) -> str:
    return "" if config["groups"] else "groups=false releases no group"


def undestroyed(config: Mapping[str, Any]) -> str:
    suspended = config["mode"] == "suspend"
    return "mode=suspend keeps the groups and frees their memory only" if suspended else kept_groups(config)


def kept_world(config: Mapping[str, Any]) -> str:
    return undestroyed(config) or ("" if config["include_world"] else "include_world=false keeps WORLD")


def unrehearsed(config: Mapping[str, Any]) -> str:
    if config["mode"] not in EXACT:
        return f"a failure is rehearsed only with mode={' or '.join(EXACT)}, not {config['mode']}"
    return kept_groups(config)


def unhashed(config: Mapping[str, Any]) -> str:
    return "" if config["hashes"] else "hashes=false compares no tensors"


def unmoved(config: Mapping[str, Any]) -> str:
    moved = any(config[kind] for kind in KINDS)
    return "" if moved else "weights, grads and optimizer are false: no tensor is released"


def unseen_bytes(config: Mapping[str, Any]) -> str:
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


def of_groups(count: Measure) -> Measure:

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        need_groups(frame, config)
        return count(frame, config)

    return measure


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


def tensors_restored(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Is every tensor, and every number of the optimizer, bit-identical when a reload returns (SHA-256)?"""
    need_whole_state(frame)
    hashed = each_rank(frame, config, "verify", "tensors_hashed")["value"]
    if not hashed.min():
        raise Unjudged("no tensor was found on some rank")
    changed = worst(each_rank(frame, config, "verify", "tensors_changed"))
    late = frame[frame["metric"] == "tensors_late"]  # not in records of an older kit
    if late["value"].any() and not changed.value:
        came = worst(late)
        return dataclasses.replace(came, why=f"after the reload had returned, bytes still came: {came.why}")
    return dataclasses.replace(
        changed,
        why=f"{changed.why}; {hashed.sum():.0f} tensors hashed before release and after reload{dropped(frame, config)}",
        if_passed="dropped_grads=true allows gradients to come back as zeros" if config.get("dropped_grads") else "",
    )


def dropped(frame: pd.DataFrame, config: Mapping[str, Any]) -> str:
    """A word on the setting for a release that drops gradients, if gradients came back as zeros and no other tensor did."""
    rows = frame[(frame["phase"] == "verify") & (frame["metric"] == "tensor_differs") & (frame["text"] == ZEROS)]
    kinds = {read_ids(ids)["kind"] for ids in rows["ids"]}
    if kinds != {"grads"} or config.get("dropped_grads"):
        return ""
    return "; dropped_grads=true states that gradients are meant to come back as zeros"


def training_continues_bitwise(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Is training bit-identical to a run without any release?

    Losses, gradient norms, weights and optimizer state that differ."""
    if differing := select(frame, phase="second_control", metric="controls_differ")["value"].max():
        why = f"two control runs without any release differ in {differing:g} places"
        if config["model"] != KIT_MODEL:
            raise Unjudged(f"{why}: model={config['model']} is not deterministic")
        raise NotMeasured(f"{why}: this setup is not deterministic")
    broken = select(frame, phase="verify", metric="broken")
    if broken["value"].any():
        cycle = broken[broken["value"] > 0]["cycle"].min()
        raise Unjudged(
            f"training stopped in cycle {cycle}: groups were dead, replaced or silent; see handles_alive, every_group_communicates"
        )

    compared = frame[frame["phase"] == "compare"]
    steps = each_rank(frame, config, "compare", "steps_differ").set_index("rank")["value"]
    tensors = select(compared, metric="tensors_differ")
    total = steps + tensors.set_index("rank")["value"]
    if not (trained := select(compared, metric="steps_compared")["value"].max()):
        raise Unjudged("no step was trained")
    if not total.any():
        same = f"{trained:g} steps and all final tensors bit-identical to a run without release"
        return Measured(0, f"{same} ({config['ranks']} ranks)")

    row = tensors.iloc[int(tensors["value"].to_numpy().argmax())]
    why = f"{steps.max():g} of {trained:g} steps and {row['value']:g} final tensors differ from a run without release"
    departs = compared[compared["metric"] == "departs"]
    if len(departs):
        first = departs.iloc[int(departs["value"].to_numpy().argmin())]
        why += f"; first in step {first['value']:g} (rank {first['rank']}): {first['text']}"
    if row["value"]:
        why += f"; tensors (rank {row['rank']}): {row['text']}"
    return Measured(float(total.max()), why)


def destroy_failure_raises(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does a group that cannot be destroyed raise an error that names it?"""
    need_groups(frame, config)
    rehearsed = frame[frame["phase"] == "rehearse_failure"]
    if (rehearsed["metric"] == "seconds").sum() < config["ranks"]:
        raise Missing("the run ended before a failure was rehearsed on every rank")
    rows = rehearsed[rehearsed["metric"] == "failure_hidden"]
    if len(rows) < config["ranks"]:
        raise Unjudged(
            "the rehearsed failure never happened: no group was destroyed through destroy_process_group or shutdown, or handles were stale"
        )
    return worst(rows)


FAILED_RESTORE = {
    "restore_silent": "no error",
    "restore_unnamed": "names missing in the error",
    "restore_kept": "bytes of tensors not freed again",
    "retry_raised": "the retry raised an error",
    "retry_differs": "tensors that differ after the retry",
}


NOT_REHEARSED = "the run ended before a failing reload was rehearsed, or its records are older than this rehearsal"


def restore_failure_is_clean(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """If an allocation of a reload fails on one rank, are all tensors away again on every rank, and does a retry restore every bit?

    The first, the middle and the last fail in turn. The error must name the rank and, on that rank, the tensor."""
    rehearsed = frame[frame["phase"] == "rehearse_restore"]
    if rehearsed.empty:
        raise NotMeasured(NOT_REHEARSED)
    if (rehearsed["metric"] == "seconds").sum() < config["ranks"]:
        raise Missing("the run ended before a failing reload was rehearsed on every rank")
    refused = rehearsed[rehearsed["metric"] == "restore_refused"]["value"]
    if refused.empty and config["implementation"] != KIT_RELEASER:
        raise NotMeasured("your releaser does not say `retries = True`, so no failing reload was rehearsed")
    if (frame["metric"].eq("broken") & frame["value"].gt(0)).any():
        raise NotMeasured(
            "groups were dead or silent after a reload, so no failing one was rehearsed; see handles_alive"
        )
    if not refused.sum():
        why = (
            "the reload resized no storage and made no tensor on its own thread, so no allocation could be made to fail"
        )
        raise Unjudged(why) if config["implementation"] == KIT_RELEASER else NotMeasured(why)
    rows = rehearsed[rehearsed["metric"].isin([*FAILED_RESTORE])]
    broken = rows[rows["value"] > 0]
    if broken.empty:
        failures = counted(int(refused.sum()), "failing reload")
        return Measured(
            0, f"tensors are away again after {failures}, and retries restore every bit ({config['ranks']} ranks)"
        )
    first = broken.groupby("metric", sort=False).first()
    reasons = [
        f"{FAILED_RESTORE[str(name)]}: {row['value']:g} (rank {row['rank']}{': ' * bool(row['text'])}{row['text']})"
        for name, row in first.iterrows()
    ]
    return Measured(float(len(broken)), "; ".join(reasons))


def rehearsals_leave_nothing(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - measures are called alike
    """Do failed releases and reloads leave no descriptor, socket, thread, group or arrival at a meeting behind?

    What each further rehearsal of a failure adds; and whether all ranks meet after a meeting that one of them missed."""
    rows = frame[frame["metric"] == "rehearsal_left"]
    if rows.empty and frame[frame["phase"] == "rehearse_restore"].empty:
        raise NotMeasured(NOT_REHEARSED)
    if rows.empty:
        raise NotMeasured("no failure was rehearsed twice: your own releaser does not say `retries = True`")
    row = rows.iloc[int(rows["value"].to_numpy().argmax())]
    ids = read_ids(row["ids"])
    if not row["value"]:
        scenes = ", ".join(sorted({str(read_ids(text)["scene"]) for text in rows["ids"]}))
        return Measured(0, f"nothing is left by a failure ({scenes})")
    return Measured(float(row["value"]), f"{ids['kind']}: {row['text']} (rank {row['rank']}, scene {ids['scene']})")


def piled_up(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    return nothing_piles_up(frame[frame["phase"] != "control"], config)  # which says nothing of the code under test


# -- memory while released and on the way back, on the host and on a GPU ------------------------------------------------


def per_rank(frame: pd.DataFrame, phase: str, metric: str) -> pd.Series:
    return select(frame, phase=phase, metric=metric).groupby("rank")["value"].max()


def tensors_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - measures are called alike
    """Do weights, gradients and optimizer state free their device memory while released?

    The share of the resident bytes that left; and what the kernel (or the driver) says of it, whichever is less."""
    need_whole_state(frame)
    resident = per_rank(frame, "fingerprint", "resident_bytes")
    left = per_rank(frame, "idle", "left_bytes")
    if not resident.min():
        raise Unjudged("the job had no tensors of the kinds to release")
    share = float(((resident - left) / resident).min())
    if (frame["metric"] == "allocated").any():  # by a GPU's allocator, whoever keeps a tensor there
        allocated, idle = (per_rank(frame, phase, "allocated") for phase in ("fingerprint", "idle"))
        share = min(share, float(((allocated - idle) / resident).min()))
    seen = source(frame)
    if resident.min() < (SEEN_BYTES if seen.metric == "anon_rss" else SEEN_BY_DRIVER):
        return Measured(
            share,
            f"{share:.3f} of {resident.min() / MIB:.1f} MiB by tensor storages",
            if_passed=f"too small to see in {seen.label}",
        )
    held = by_owner(frame, seen, "fingerprint", "resident_bytes", add=True)
    freed = by_owner(frame, seen, "fingerprint") - by_owner(frame, seen, "idle")
    fell = float((freed / held).min())
    why = f"of {held.min() / MIB:.0f} MiB: {share:.3f} by tensor storages, {fell:.3f} by {seen.label}"
    return Measured(min(share, fell), why)


def no_copy_kept(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Does a release keep at most one copy of the state, and no more tensors in later cycles than in the first?

    Growth: tensors that Python refers to, on any device, above what the control adds over the same cycles. Copies: these and shared
    memory, in the first cycle."""
    rows = frame[(frame["metric"] == "tensor_bytes") & frame["phase"].isin(["idle", "control"])]
    table = rows.pivot_table(index=["rank", "cycle"], columns="phase", values="value", aggfunc="last")
    if "idle" not in table:
        raise NotMeasured("bytes of tensors were not counted while released")
    each_rank(frame, config, "idle", "tensor_bytes")  # in every cycle
    if "control" not in table:
        table["control"] = 0.0
    first = table.groupby("rank").transform("first")
    added = (table["idle"] - first["idle"] - (table["control"] - first["control"]).clip(lower=0).fillna(0)).dropna()
    place: Any = added.iloc[::-1].idxmax()  # of equal cycles the last
    (rank, cycle), before, after = place, *(column["idle"][place] / MIB for column in (first, table))
    why = f"tensors: {before:.3f} MiB while released in the first cycle, {after:.3f} MiB in cycle {cycle} (rank {rank})"
    grown = Measured(max(0.0, float(added.max())) / MIB, why)
    return max(filter(None, (second_copy(frame), grown)), key=lambda answer: answer.value or 0.0)


def second_copy(frame: pd.DataFrame) -> Measured | None:
    """The largest second copy of what was released, in MiB: what was held when the releaser was made, and from there what the first release
    added beside the state. Less than half of the state counts as none: it may be weights that are kept for replicas, or a buffer on the
    way."""
    first = frame[frame["cycle"] <= 1]
    metrics = ["made_bytes", "beside_bytes", "resident_bytes"]
    table = first[first["metric"].isin(metrics)].pivot_table(
        index="rank", columns=["phase", "metric"], values="value", aggfunc="last"
    )
    wanted = (
        ("build", "made_bytes"),
        ("fingerprint", "beside_bytes"),
        ("fingerprint", "resident_bytes"),
        ("idle", "beside_bytes"),
    )
    if not {*wanted} <= {*table.columns}:  # records of an older kit
        return None
    made, training, resident, idle = (table[column] for column in wanted)
    copied = made + idle - training
    more = (copied - resident).where(copied > 1.5 * resident).dropna()
    if more.empty:
        return None
    rank: Any = more.idxmax()
    state = f"{copied[rank] / resident[rank]:.2f} copies of {resident[rank] / MIB:.3f} MiB"
    return Measured(
        float(more[rank]) / MIB, f"{state} exist while released, in tensors and shared memory (rank {rank})"
    )


def copy_limit(config: Mapping[str, Any]) -> float:
    """In MiB: small tensors that a job keeps for its own records, or 1 % of its state if that is more."""
    return max(0.0625, 0.01 * state_bytes(config) / MIB)


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
    """Does the memory peak of a reload stay within what training uses?

    The peak against the level of the training that follows it."""
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
    """Is almost no GPU memory in use while released, beyond a CUDA context?

    Driver memory above the level after a context and one matrix product, per rank: a number of a whole GPU is divided by the ranks that
    share it. What NCCL keeps of a suspended communicator by its own account is no residual."""
    need_cuda(frame)
    seen = source(frame)
    kept, staying = keeps(frame, seen)
    over = highest(frame, seen, "idle") - highest(frame, seen, "start") - kept
    by_rank = over / over.index.map(lambda owner: seen.sharers.get(owner, 1))
    owner: Any = by_rank.idxmax()
    why = f"{seen.label} while released, above a CUDA context and one matmul ({seen.owner} {owner})"
    if owner in seen.sharers:
        why += f": {over[owner] / MIB:.0f} MiB divided by its {seen.sharers[owner]} ranks"
    return Measured(float(by_rank.max()) / MIB, why + staying)


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
    """The most of all cycles, for each part with separate memory."""
    return by_owner(frame, seen, phase, metric, add=add).groupby(seen.owner).max()


def comm_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Is the GPU memory of the communicators freed while released?

    The share of what they took (driver memory beyond the allocator's). The baseline is after the controls, not at the start: by then every
    kernel is loaded, which takes memory that never comes back."""
    need_cuda(frame)
    seen = source(frame)
    without, held, idle = (
        highest(frame, seen, phase) - highest(frame, seen, phase, "reserved", add=True)
        for phase in ("baseline", "fingerprint", "idle")
    )
    kept, staying = keeps(frame, seen)
    taken = held - without - kept
    if taken.min() < COMMUNICATORS:
        raise NotMeasured(f"communicators took less than {COMMUNICATORS / MIB:.0f} MiB of driver memory")
    why = f"of {taken.max() / MIB:.0f} MiB per {seen.owner}, from {seen.label}{staying}"
    return Measured(float(((held - idle) / taken).min()), why)


def times_do_not_rise(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Do release and reload stop getting slower from cycle to cycle?

    The slope after the first cycle, if each cycle takes longer than the one before and the last at least `LEAST_RISE` times the second.
    Fewer cycles than `RISING` rise by chance on a busy machine. A rise within what the cycles of the control differ does not count."""
    control = seconds_by_cycle(frame, "control").iloc[WARM_UP:]
    noise = (control.max() / control.min()).clip(lower=LEAST_RISE)
    answers = []
    for phase in ("release", "reload"):
        table = seconds_by_cycle(frame, phase)
        times = table.iloc[WARM_UP:]
        if len(times) < config["cycles"] - WARM_UP:
            raise Missing(f"{phase} ran in {len(times) + WARM_UP} of {config['cycles']} cycles")
        first, last = times.iloc[0], times.iloc[-1]
        rises = rise(table).where((times.diff().iloc[1:].min() > 0) & (last > noise * first), 0.0)
        rank: Any = rises.idxmax()
        shown = ", ".join(f"{seconds * 1e3:.0f}" for seconds in times[rank])
        why = f"{phase}: {shown} ms in cycles {times.index[0]} to {times.index[-1]}, {rises[rank]:+.2f} s per cycle (rank {rank})"
        answers.append(Measured(float(rises[rank]), why))
    return max(answers, key=lambda answer: answer.value or 0.0)


def seconds_by_cycle(frame: pd.DataFrame, phase: str) -> pd.DataFrame:
    return select(frame, phase=phase, metric="seconds").pivot_table(index="cycle", columns="rank", values="value")


RULES = (
    dataclasses.replace(PILES_UP, measure=piled_up),
    Rule(
        "groups_return_to_baseline",
        "Are all groups gone while released, and is their number after a reload the same as before?",
        worst_of(largest("groups", after="idle", base="start"), largest("groups", after="verify", base="build")),
        cannot=undestroyed,
    ),
    Rule(
        "model_parallel_uninitialised",
        "While released, does Megatron report that it has no groups, or does using one raise an error that names it?",
        of_groups(largest("initialised", after="idle")),
        cannot=undestroyed,
    ),
    Rule(
        "every_group_communicates",
        "After a reload, does an all-reduce over every group reach the right ranks and return the exact sum?",
        of_groups(largest("wrong_groups", after="talk")),
    ),
    Rule(
        "membership_unchanged",
        "After a reload, does every group name refer to the same ranks in the same order as before?",
        of_groups(largest("membership_changed", after="verify")),
    ),
    Rule(
        "options_unchanged",
        "Do all groups keep their timeout, backend, options and description after a reload?",
        of_groups(largest("options_changed", after="verify")),
    ),
    Rule(
        "handles_alive",
        "Does every object that held a group hold a live one after a reload?",
        of_groups(largest("stale_holders", after="verify")),
    ),
    Rule(
        "stale_handle_raises",
        "Does using a destroyed group raise an error that names it?",
        of_groups(largest("stale_usable", after="idle")),
        cannot=kept_groups,
    ),
    Rule(
        "old_groups_dead",
        "Are the old groups freed while released, with their sockets and threads?",
        of_groups(
            worst_of(
                largest("old_groups_alive", after="idle"),
                largest("sockets", after="idle", base="baseline"),
                largest("threads", after="idle", base="baseline"),
            )
        ),
        cannot=undestroyed,
    ),
    Rule(
        "world_released",
        "Is WORLD destroyed while released?",
        largest("world_left", after="idle"),
        cannot=kept_world,
    ),
    rule(destroy_failure_raises, cannot=unrehearsed),
    rule(restore_failure_is_clean, cannot=unmoved),
    rule(rehearsals_leave_nothing),
    rule(tensors_released, limit=0.9, unit="ratio", better=">=", cannot=unmoved),
    Rule(
        "no_tensor_left",
        "Does every weight, gradient and optimizer tensor (scalars do not count) leave the device while released?",
        largest("left_tensors", after="idle"),
        cannot=unmoved,
    ),
    rule(tensors_restored, cannot=unhashed),
    Rule(
        "random_unchanged",
        "After a reload, are all random number generators and torch's settings as before the release?",
        largest("generators_moved", after="verify"),
    ),
    rule(training_continues_bitwise),
    Rule(
        "memory_drift",
        "Is memory while released the same in the last cycle as in the first?",
        growth("idle"),
        limit=200,
        unit="MiB",
        cycles=DRIFT_CYCLES,
    ),
    Rule(
        "memory_slope",
        "Is memory growth per cycle no larger than in a control run without any release?",
        slopes("idle", control="control", allowed=slope_limit(state_bytes)),
        limit=slope_limit(state_bytes),
        unit="MiB/cycle",
        cycles=SLOPE_CYCLES,
    ),
    rule(no_copy_kept, limit=copy_limit, unit="MiB", cycles=DRIFT_CYCLES),
    rule(reload_peak, limit=1.1, unit="ratio", cannot=unseen_bytes),
    rule(residual, limit=500, unit="MiB", cannot=kept_by_choice),
    rule(comm_released, limit=0.7, unit="ratio", better=">=", cannot=kept_groups),
    Rule(
        "fds_return",
        "Does the number of file descriptors return to the baseline?",
        largest("fds", after="verify", base="build", until="compare", once=True),
    ),
    Rule(
        "threads_return",
        "Does the number of threads return to the baseline?",
        largest("threads", after="verify", base="build", until="compare", once=True),
    ),
    Rule(
        "nothing_left",
        "Does the job leave no descriptor, thread, process, shared memory or file behind when it ends?",
        largest(*COUNTS, after="end", base="baseline"),
    ),
    Rule(
        "time_steady",
        "Do the last releases and reloads take no longer than the earlier ones?",
        steady("release", "reload"),
        limit=3,
        unit="ratio",
        cycles=SLOPE_CYCLES,
    ),
    rule(times_do_not_rise, limit=LEAST_S, unit="s/cycle", when=lambda config: config["cycles"] >= RISING),
    Rule(
        "others_untouched",
        "Does another process on the GPU keep its memory unchanged?",
        bystander_change("start"),
        limit=10,
        unit="MiB",
    ),
    Rule(
        "names_restored",
        "Are all patched functions of torch.distributed and megatron.core restored at the end?",
        largest("names_replaced", after="end"),
    ),
    Rule(
        "state_as_found",
        "Are the caller's groups, globals and random state unchanged after success and after an error?",
        largest("not_as_found", after="ownership"),
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
