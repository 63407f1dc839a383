"""What each probe must show. A rule begins with the name of its probe.

Null is for what this machine cannot have: a rule that needs a GPU, Megatron or a newer NCCL says so. A probe that broke is named by
`every_probe_ends`; its own rules judge what it recorded before, which can fail them and cannot pass them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from kit.labs.box.lab import DEADLINE_S, chosen
from kit.labs.lab import BROKE
from kit.machine import MIB
from kit.nccl import SHARED_GPU
from kit.results import Measured, NotMeasured, Rule, Unjudged, incomplete, rule, select
from kit.results.frames import sharing, with_ids

if TYPE_CHECKING:
    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

LATE_S = 2.0  # how much later an error may come
# What probes record on a GPU only. Anything else that a probe which ran did not record fails its rule.
NEED_A_GPU = {
    ("seats", "dead_context"),
    ("seats", "no_code"),
    ("seats", "watchdog"),
    ("seats", "exclusive"),
    ("all_reduce", "unconnected"),
    ("groups", "nccl_wrong"),
    ("host_memory", "register_error"),
    *(("host_memory", f"{kind}_{way}") for kind in ("pinned", "pageable") for way in ("to_device", "to_host")),
    ("rebuild", "driver_off"),
}
GPU_PROBES = {"suspend", "resize_expandable", "driver_memory", "ipc", "ipc_expandable"}


def rows_of_probe(frame: pd.DataFrame, config: Mapping[str, Any], probe: str, metric: str) -> pd.DataFrame:
    """What a probe recorded of one metric. Without such rows: null if the config or this machine cannot have them."""
    if probe not in chosen(config["probes"]):
        raise NotMeasured(f"probes={config['probes']} leaves this probe out")
    rows = frame[frame["phase"] == probe]
    broke = (rows["metric"] == BROKE).any()
    if broke:
        incomplete(f"{probe} broke")
    if not (rows["metric"] == metric).any():
        refused = rows[rows["metric"].isin(["megatron_missing", "suspend_refused", "refused"])]
        if len(refused):
            raise NotMeasured(refused["text"].iloc[0])
        if not (frame["metric"] == "driver_used").any() and (probe in GPU_PROBES or (probe, metric) in NEED_A_GPU):
            raise NotMeasured("needs a GPU, but these ranks run on the CPU")
        if (rows["metric"] == "seconds").any() and not broke:
            raise Unjudged(f"{probe} ended without a record of {metric}")
    return select(rows, metric=metric)


def worst_reading(probe: str, metric: str, fine: str = "", *, scale: float = 1.0, least: bool = False) -> Measure:
    """The largest value over ranks (with `least` the smallest) and its text; `fine` explains a value that passes."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        rows = rows_of_probe(frame, config, probe, metric)
        unknown = rows[rows["value"].isna() & (rows["text"] != "")]  # a NaN without a reason was measured
        if len(unknown):
            raise NotMeasured(unknown["text"].iloc[0])
        values = rows["value"].to_numpy()
        row = rows.iloc[int(values.argmin() if least else values.argmax())]
        text = row["text"] or f"{metric}: {row['value']:g}"
        where = f" (rank {row['rank']})" if row["rank"] >= 0 else ""
        return Measured(float(row["value"]) / scale, f"{text}{where}", if_passed=fine)

    return measure


# -- the probes, in the order of the plan ------------------------------------------------------------------------------


def every_probe_ends(frame: pd.DataFrame, config: Mapping[str, Any]) -> Generator[str, None, str]:  # noqa: ARG001 - rules are called alike
    """Does every probe end by itself, within its time limit?"""
    for phase, text in frame.loc[frame["metric"] == BROKE, ["phase", "text"]].itertuples(index=False):
        yield f"{phase}: {text}"
    return "all probes ended by themselves"


def shared_gpu(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The same sums as on the device, where ranks share one."""
    if sharing(frame) < 2:
        raise NotMeasured("no GPU is shared here")
    return worst_reading("all_reduce", "all_reduce_wrong", SHARED_GPU)(frame, config)


def registered_rate(direction: str) -> Measure:
    """The rate of copies from or to registered memory, over that of torch's pinned memory."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        pinned, pageable = (
            rows_of_probe(frame, config, "host_memory", f"{kind}_{direction}")["value"].iloc[0]
            for kind in ("pinned", "pageable")
        )
        beside = f"torch's pinned memory {pinned:.1f} GB/s, pageable {pageable:.1f} GB/s"
        if rows_of_probe(frame, config, "host_memory", "register_error")["value"].iloc[0]:
            raise NotMeasured(f"the memory is not registered; {beside}")
        rate = rows_of_probe(frame, config, "host_memory", f"registered_{direction}")["value"].iloc[0]
        return Measured(float(rate / pinned), f"{rate:.1f} GB/s; {beside}")

    return measure


def residuals(frame: pd.DataFrame, config: Mapping[str, Any]) -> list[Measured]:
    """What each rank holds on its GPU besides its allocator's memory: by process where NVML lists it, else the GPU's memory divided by
    the ranks that share it."""
    rows = rows_of_probe(frame, config, "driver_memory", "seen_reserved")
    seats = dict(zip(rows["rank"], rows["text"], strict=True))
    reserved = dict(zip(rows["rank"], rows["value"], strict=True))
    levels = {
        name: select(frame, phase="driver_memory", metric=f"seen_{name}").set_index("rank")["value"]
        for name in ("process_used", "driver_used")
    }
    listed = not levels["process_used"].isna().any()
    measured = []
    for rank, seat in seats.items():
        sharers = [number for number, place in seats.items() if place == seat]
        whole = levels["driver_used"][sharers].max()
        if listed:
            source, residual = "NVML, this process", levels["process_used"][rank] - reserved[rank]
        else:
            source = f"whole GPU / {len(sharers)} ranks"
            residual = (whole - sum(reserved[number] for number in sharers)) / len(sharers)
        why = f"{source}; allocator {reserved[rank] / MIB:.1f} MiB, whole GPU {whole / MIB:.1f} MiB"
        measured.append(Measured(float(residual) / MIB, why, of=f"rank {rank}"))
    return measured


def process_is_listed(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Ranks that NVML does not list by their pid."""
    if rows_of_probe(frame, config, "driver_memory", "seen_process_used")["value"].isna().any():
        raise NotMeasured(
            "NVML does not list this pid (a container's pid namespace), so the GPU's memory is divided by its ranks"
        )
    return Measured(0, "NVML lists the process of every rank")


def ipc_words(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Words that differ. A refusal fails: without expandable segments, nothing in a container forbids it."""
    refused = frame[(frame["phase"] == "ipc") & (frame["metric"] == "refused")]
    if len(refused):
        return Measured(float("inf"), refused["text"].iloc[0])
    return worst_reading("ipc", "wrong_words", "every word in both directions")(frame, config)


def wait_ends_in_time(frame: pd.DataFrame, config: Mapping[str, Any]) -> Generator[str, None, str]:
    """Waits for an absent peer that raised nothing, at once, or late."""
    rows = with_ids(rows_of_probe(frame, config, "absent_peer", "wait_seconds"), "way")
    for rank, way, seconds, error in rows[["rank", "way", "value", "text"]].itertuples(index=False):
        if not error or not DEADLINE_S / 2 <= seconds <= DEADLINE_S + LATE_S:
            yield f"{way}: {error or 'no error'} after {seconds:.1f} s, deadline {DEADLINE_S:g} s (rank {rank})"
    return f"errors after {rows['value'].min():.1f} to {rows['value'].max():.1f} s, deadline {DEADLINE_S:g} s"


def off_baseline(frame: pd.DataFrame, config: Mapping[str, Any]) -> list[Measured]:
    """How far each count is off its first value, in either direction, with groups and without, on the worst rank."""
    rows = with_ids(rows_of_probe(frame, config, "rebuild", "off_baseline"), "counted", "turn")
    measured = []
    for name, group in rows.groupby("counted", sort=False):
        row = group.iloc[int(group["value"].abs().to_numpy().argmax())]
        why = f"{row['text']} (rank {row['rank']}, turn {row['turn']})"
        measured.append(Measured(abs(float(row["value"])), why, of=str(name)))
    return measured


RULES = (
    rule(every_probe_ends),
    Rule("seats_device", "Is every rank on the device that was asked for?", worst_reading("seats", "elsewhere")),
    Rule(
        "seats_kernel",
        "Does a kernel on every rank's device return the right sum?",
        worst_reading("seats", "kernel_error", "a sum on the device, compared with the exact one"),
    ),
    Rule(
        "seats_context",
        "Was CUDA started only after the ranks were forked?",
        worst_reading("seats", "dead_context", "CUDA was not started before the fork"),
    ),
    Rule("seats_architecture", "Does torch have code for every rank's GPU?", worst_reading("seats", "no_code")),
    Rule(
        "seats_watchdog",
        "Is NCCL's watchdog kept from ending a rank that survives?",
        worst_reading("seats", "watchdog"),
    ),
    Rule("seats_compute_mode", "Does the GPU's compute mode let ranks share it?", worst_reading("seats", "exclusive")),
    Rule(
        "all_reduce_connected",
        "Does WORLD have its communicator before its first collective?",
        worst_reading("all_reduce", "unconnected", "WORLD was connected"),
    ),
    Rule(
        "all_reduce_device",
        "Are sums over WORLD exact on the ranks' device?",
        worst_reading("all_reduce", "all_reduce_wrong", "all sums are exact"),
    ),
    Rule(
        "all_reduce_host",
        "Are sums over WORLD exact on the host?",
        worst_reading("all_reduce", "all_reduce_host_wrong", "all sums are exact"),
    ),
    Rule("all_reduce_shared_gpu", "Do ranks that share a GPU communicate?", shared_gpu),
    Rule(
        "groups_nccl",
        "Does every new NCCL group return exact sums?",
        worst_reading("groups", "nccl_wrong", "all sums are exact"),
    ),
    Rule(
        "groups_gloo",
        "Does every new gloo group return exact sums?",
        worst_reading("groups", "gloo_wrong", "all sums are exact"),
    ),
    Rule(
        "suspend_resumes", "Does a communicator work after it was suspended?", worst_reading("suspend", "suspend_wrong")
    ),
    Rule(
        "suspend_frees",
        "Does suspending a communicator free GPU memory?",
        worst_reading("suspend", "suspend_freed", scale=MIB, least=True),
        limit=0.1,
        unit="MiB",
        better=">=",
    ),
    Rule(
        "host_memory_registers",
        "Does CUDA register shared host memory?",
        worst_reading("host_memory", "register_error", "cudaHostRegister accepts it"),
    ),
    Rule(
        "host_memory_bytes",
        "Do copies from and to shared host memory keep every byte?",
        worst_reading("host_memory", "wrong_bytes", "the same bytes in both directions"),
    ),
    Rule(
        "host_memory_to_device",
        "Is registered memory copied to the GPU about as fast as pinned memory?",
        registered_rate("to_device"),
        limit=0.8,
        unit="ratio",
        better=">=",
    ),
    Rule(
        "host_memory_to_host",
        "Is the GPU's memory copied to registered memory about as fast as to pinned memory?",
        registered_rate("to_host"),
        limit=0.8,
        unit="ratio",
        better=">=",
    ),
    *(
        resized
        for probe, words in (("resize", "storage"), ("resize_expandable", "storage in expandable segments"))
        for resized in (
            Rule(
                f"{probe}_gives_back",
                f"Does {words} that is resized to nothing give its memory back?",
                worst_reading(probe, "given_back", least=True),
                limit=0.9,
                unit="ratio",
                better=">=",
            ),
            Rule(
                f"{probe}_takes_again",
                f"Does {words} take its memory again when it is resized back?",
                worst_reading(probe, "taken_again", least=True),
                limit=0.9,
                unit="ratio",
                better=">=",
            ),
            Rule(
                f"{probe}_views",
                f"Do all views of {words} have their bits again?",
                worst_reading(
                    probe, "views_changed", "weighted sums of the buffer and of three views of it, before and after"
                ),
            ),
        )
    ),
    Rule("driver_memory_listed", "Does NVML list the process of every rank?", process_is_listed),
    Rule(
        "driver_memory_residual",
        "Does the driver count what a rank holds besides its tensors?",
        residuals,
        limit=1,
        unit="MiB",
        better=">=",
    ),
    Rule("ipc_bytes", "Do all words of a rank's GPU memory arrive in another rank, and back?", ipc_words),
    Rule(
        "ipc_freed",
        "Is shared GPU memory freed when its owner and then its reader release it?",
        worst_reading("ipc", "still_allocated", "nothing is allocated", scale=MIB),
        unit="MiB",
    ),
    Rule(
        "ipc_expandable_bytes",
        "Do all words arrive and come back from expandable segments?",
        worst_reading("ipc_expandable", "wrong_words", "every word in both directions"),
    ),
    Rule(
        "ipc_expandable_freed",
        "Is shared memory of expandable segments freed when it is released?",
        worst_reading("ipc_expandable", "still_allocated", "nothing is allocated", scale=MIB),
        unit="MiB",
    ),
    Rule(
        "absent_peer_named",
        "Is the rank named that enters a collective late?",
        worst_reading("absent_peer", "late_rank_missed"),
    ),
    Rule(
        "absent_peer_group",
        "Does a group with a deadline return exact sums while all ranks are there?",
        worst_reading("absent_peer", "group_wrong", "all sums are exact"),
    ),
    Rule("absent_peer_deadline", "Does a wait for an absent peer raise by its deadline?", wait_ends_in_time),
    Rule(
        "absent_peer_survivors",
        "Do survivors use WORLD again, on the host and on their device?",
        worst_reading("absent_peer", "world_wrong", "all sums are exact"),
    ),
    Rule(
        "killed_rank_noticed",
        "Is a rank that was killed named as dead?",
        worst_reading("killed_rank", "death_missed"),
    ),
    Rule(
        "killed_rank_leaves_nothing",
        "Is /dev/shm as before once a rank was killed?",
        worst_reading("killed_rank", "names_left", "no name is left"),
    ),
    Rule(
        "rebuild_counts",
        "Are groups, descriptors, sockets and threads at their baseline after groups were destroyed and rebuilt?",
        off_baseline,
    ),
    Rule(
        "rebuild_driver",
        "Is driver memory at its baseline after groups were destroyed and rebuilt?",
        worst_reading("rebuild", "driver_off", scale=MIB),
        limit=64,  # for two ranks on one GPU: pages of the driver, and lazy communicators and kernels
        unit="MiB",
    ),
    Rule(
        "rebuild_objects",
        "Are all group objects gone after an exact destroy?",
        worst_reading("rebuild", "objects_alive", "no group object is alive"),
    ),
    Rule(
        "rebuild_options",
        "Do rebuilt groups have the options that they had?",
        worst_reading("rebuild", "options_changed", "no option changed"),
    ),
    Rule(
        "rebuild_bits",
        "Do sums over rebuilt groups have the bits that they had?",
        worst_reading("rebuild", "bits_changed", "an all-reduce over every group, before and after"),
    ),
    *(
        Rule(
            f"job_{layout}_bits",
            f"Do two equal jobs with {layout}=2 end in equal losses, gradient norms and tensors?",
            worst_reading(f"job_{layout}", "values_changed"),
        )
        for layout in ("tp", "pp")
    ),
    *(
        Rule(
            f"job_{kind}_finite",
            f"Are losses and gradient norms of a job with {words} finite?",
            worst_reading(f"job_{kind}", "not_finite", "all are finite"),
        )
        for kind, words in (("tp", "tp=2"), ("pp", "pp=2"), ("experts", "experts"))
    ),
)
