"""Whether trainer, replicas and the copies between them fit this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.labs.fits import check_fits
from kit.labs.sync.config import replica_model, trainer_model
from kit.megatron.config import model_bytes

if TYPE_CHECKING:
    from kit.labs.sync.config import SyncConfig

GATHERED, CACHED = 1, 2  # models on the sender's host
STAGED = 2  # of a serving replica's shards: the old weights for an undo, and the received buckets


def fits(config: SyncConfig) -> None:
    trainer = trainer_model(config)
    jobs = [model_bytes(trainer, ranks=config.trainer_ranks, stage=stage)["total"] for stage in range(config.pp)]
    jobs = [job for job in jobs for _ in range(config.trainer_ranks // config.pp)]
    whole = model_bytes(replica_model(config), ranks=config.infer_tp)["params"] * config.infer_tp
    replicas = whole * config.replicas
    copies = whole * (GATHERED + CACHED + STAGED * config.awake)
    check_fits(
        config.size,
        config.ranks,
        config.device,
        job=(sum(jobs) + replicas) // config.ranks,
        host=copies // config.ranks,
        kept="for copies on the way to the replicas",
    )
