"""Checks of the offload lab that weigh: memory while released and on the way back, on the host and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kit.labs.growth import MIB, by_owner
from kit.labs.offload.config import KIT_MODEL
from kit.labs.offload.counts import need_whole_state
from kit.megatron.config import ModelConfig, dtype_on, model_bytes
from kit.results import Measured, Missing, NotMeasured, Unjudged, select
from kit.results.frames import source

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from kit.results.frames import Source

SEEN_BYTES = 64 * MIB  # below this a job's bytes drown in the interpreter's own memory
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
    return Measured(
        min(share, fell), f"of {there.min() / MIB:.0f} MiB: {share:.3f} by tensor storages, {fell:.3f} by {seen.told}"
    )


def unmoved(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what happens to tensors: none is given back."""
    return (
        "" if any(config[kind] for kind in KINDS) else "weights, grads and optimizer are false: no tensor is released"
    )


def unseen(config: Mapping[str, Any]) -> str:
    """Why a config has no answer to what moving tensors takes: they are too few to see beside the interpreter's own memory."""
    if config["model"] != KIT_MODEL:
        return unmoved(config)
    sizes = [moved_bytes(config, stage) for stage in range(config["pp"])]
    if min(sizes) < SEEN_BYTES:
        return unmoved(config) or (
            f"{min(sizes) / MIB:.1f} MiB are too small to see next to the interpreter's own memory; use a larger size"
        )
    return ""


def state_bytes(config: Mapping[str, Any]) -> float:
    """All that the rank with most holds of the kit's own job; 0 for a job of somebody's own, whose size is not known here."""
    if config["model"] != KIT_MODEL:
        return 0
    return max(sizes_of(config, stage)["total"] for stage in range(config["pp"]))


def moved_bytes(config: Mapping[str, Any], stage: int) -> int:
    """What a rank of this stage gives back of the kit's own job."""
    sizes = sizes_of(config, stage)
    return sum(sizes[{"weights": "params"}.get(kind, kind)] for kind in KINDS if config[kind])


def sizes_of(config: Mapping[str, Any], stage: int) -> dict[str, int]:
    """The bytes of the kit's own job by arithmetic."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)} & {*config}
    job = ModelConfig(**{**{name: config[name] for name in fields}, "dtype": dtype_on(config["dtype"])})
    return model_bytes(job, ranks=config["ranks"], stage=stage)


def reload_peak(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """The most memory on the way back against the level of the training that follows it."""
    resident = per_rank(frame, "fingerprint", "resident_bytes")
    if resident.min() < SEEN_BYTES:
        raise NotMeasured(
            f"{resident.min() / MIB:.1f} MiB are too small to see next to the interpreter's own memory; use a larger size"
        )
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
    """Driver memory while released above the level after a context and one matrix product, per rank: what is told of a whole GPU is
    divided by the ranks that share it. What NCCL keeps of a suspended communicator by its own account is no residual."""
    seen = source(frame)
    kept = keeps(frame, seen)
    over = most(frame, seen, "idle") - most(frame, seen, "start") - kept
    each = over / over.index.map(lambda owner: seen.sharers.get(owner, 1))
    worst: Any = each.idxmax()
    said = f"{seen.told} while released, above a CUDA context and one matmul ({seen.whose} {worst})"
    if worst in seen.sharers:
        said += f": {over[worst] / MIB:.0f} MiB divided by its {seen.sharers[worst]} ranks"
    return Measured(float(each.max()) / MIB, said + staying(kept, seen))


def keeps(frame: pd.DataFrame, seen: Source) -> pd.Series | float:
    """What NCCL says that suspended communicators keep: buffers of NVLS and of the network, which it never gives back (tracked as
    ncclMemPersist in its src/transport/nvls.cc and net.cc)."""
    rows = frame[(frame["phase"] == "release") & (frame["metric"] == "comm_persist_after")]
    return most(frame, seen, "release", "comm_persist_after", add=True) if len(rows) else 0.0


def staying(kept: pd.Series | float, seen: Source) -> str:
    """That, in words."""
    if isinstance(kept, float) or not kept.max():
        return ""
    return f"; beside that NCCL keeps up to {kept.max() / MIB:.0f} MiB per {seen.whose}, which it cannot suspend (NVLS, network buffers)"


def most(frame: pd.DataFrame, seen: Source, phase: str, metric: str | None = None, *, add: bool = False) -> pd.Series:
    """The most of all cycles, for each that has memory of its own."""
    return by_owner(frame, seen, phase, metric, add=add).groupby(seen.whose).max()


def comm_released(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
    """Of what communicators took (driver memory beyond the allocator's), the share that came back.

    Held against the level after the controls, not the start: by then every kernel is loaded, which takes memory that never comes back.
    """
    seen = source(frame)
    without, held, idle = (
        most(frame, seen, phase) - most(frame, seen, phase, "reserved", add=True)
        for phase in ("baseline", "fingerprint", "idle")
    )
    kept = keeps(frame, seen)
    taken = held - without - kept
    if taken.min() < MIB:
        raise NotMeasured("communicators took less than 1 MiB of driver memory")
    return Measured(
        float(((held - idle) / taken).min()),
        f"of {taken.max() / MIB:.0f} MiB per {seen.whose}, from {seen.told}{staying(kept, seen)}",
    )
