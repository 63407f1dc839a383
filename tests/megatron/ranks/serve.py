"""Functions that test_serve.py calls: some ranks train and the others serve, in one World; each function returns JSON."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist

from kit.megatron import groups, model, ownership, serve, shards
from kit.megatron.config import GEOMETRIES, ModelConfig
from kit.megatron.serve import as_world
from kit.megatron.tensors import process_memory
from tests.megatron.ranks.common import attempt
from tests.megatron.ranks.shards import unequal

TOKENS = torch.randint(0, 250, (3, 16), generator=torch.Generator().manual_seed(6))
WIDE = dataclasses.replace(
    GEOMETRIES["tiny"], layers=1, hidden=512, ffn=1024, vocab=40_000
)  # 90 MB, most of it in one storage


def served(trainer: dict[str, Any], infer_tp: int, **settings: Any) -> dict[str, Any]:
    """Train on the first two ranks; send the weights one by one to replicas on the other ranks, which were asleep before."""
    with ownership.as_found():
        groups.install()
        roles = [[0, 1], *([*range(start, start + infer_tp)] for start in range(2, dist.get_world_size(), infer_tp))]
        made = [dist.new_group(ranks) for ranks in roles]
        place = next(place for place, ranks in enumerate(roles) if dist.get_rank() in ranks)
        sent: list[Any] = [None, None]
        result: dict[str, Any] = {}
        with as_world(made[place]):
            if place == 0:
                result, *sent = trained(ModelConfig(**trainer, **settings))
            else:
                replica = serve.ServingModel(ModelConfig(tp=infer_tp, **settings))
        dist.broadcast_object_list(sent, src=0)
        if place:
            with as_world(made[place]):
                result = filled(replica, *sent)
        return result


def trained(config: ModelConfig) -> tuple[dict[str, Any], torch.Tensor | None, dict[str, torch.Tensor]]:
    job = model.build(config)
    job.step(2)
    before = job.hashes()
    logits = serve.logits(job, TOKENS)
    full = {name: value.clone() for name, value in shards.full_tensors(job.chunks)}
    job.mover.release()
    away = attempt(lambda: serve.logits(job, TOKENS))
    job.mover.close()
    result = {"has_logits": logits is not None, "full": len(full), "same": job.hashes() == before, "away": away}
    return result, logits, full


def filled(replica: serve.ServingModel, wanted: torch.Tensor, full: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Put a replica to sleep, wake it and load every tensor of a job; compare its logits with the job's."""
    params = dict(replica.chunks[0].named_parameters())
    where = [(name, *each) for name, places in shards.destinations(replica.chunks).items() for each in places]
    first = replica.logits(TOKENS)
    wake_early = attempt(replica.wake)
    replica.sleep()
    result = {
        "wake_early": wake_early,
        "asleep": replica.asleep,
        "bytes": sum(param.untyped_storage().nbytes() for param in params.values()),
        "names": [*dict(replica.chunks[0].named_parameters())] == [*params],
        "serve_asleep": attempt(lambda: replica.logits(TOKENS)),
        "sleep_twice": attempt(replica.sleep),
    }
    replica.wake()
    result |= {"awake": not replica.asleep, "nan": all(bool(param.isnan().all()) for param in params.values())}
    random.Random(dist.get_rank()).shuffle(where)
    for name, into, take in where[1:]:
        into.copy_(take(full[name]))
    lacking = replica.logits(TOKENS)
    name, into, take = where[0]
    into.copy_(take(full[name]))
    found = replica.logits(TOKENS)
    return result | {
        "lacking_shows": bool(lacking.isnan().any()),
        "unequal": unequal(shards.merge(replica.chunks), full),
        "changed": not torch.equal(first, found),
        "dtype": str(found.dtype),
        "shape": [*found.shape],
        "equal": torch.equal(found, wanted),
        "again": torch.equal(found, replica.logits(TOKENS)),
        "apart": float((found - wanted).abs().max() / wanted.abs().max()),
    }


def weighed() -> dict[str, int]:
    """Measure a larger replica: the bytes of its weights, and by how much anonymous memory falls asleep and rises on waking."""
    with ownership.as_found():
        replica = serve.ServingModel(ModelConfig(size=WIDE))
        size = sum(param.nbytes for param in replica.chunks[0].parameters())
        levels = [process_memory()["rss_anon"]]
        replica.sleep()
        levels.append(process_memory()["rss_anon"])
        replica.wake()
        return {"size": size, "fell": levels[0] - levels[1], "rose": process_memory()["rss_anon"] - levels[1]}


def in_stages() -> str:
    with ownership.as_found():
        return attempt(lambda: serve.ServingModel(ModelConfig(pp=2)))


def fixed() -> dict[str, Any]:
    """A weight with a numpy view cannot be released: return the error, and whether all weights were kept."""
    with ownership.as_found():
        replica = serve.ServingModel(ModelConfig())
        replica.chunks[0].decoder.final_layernorm.weight.detach().numpy()
        message = attempt(replica.sleep)
        kept = all(param.untyped_storage().nbytes() > 0 for param in replica.chunks[0].parameters())
        return {"message": message, "kept": kept and not replica.asleep}
