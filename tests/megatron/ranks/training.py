"""For each config, train without interruption, then again with everything released and reloaded in the middle."""

import json
import sys
from typing import Any

import torch.distributed as dist
from common import attempt, census, collect, exercise, write
from holders import holders as holders_of

from kit.megatron import groups, model, ownership
from kit.megatron.config import ModelConfig, model_bytes
from kit.megatron.handles import megatron_globals, megatron_groups, parallel_state

BEFORE, AFTER = 2, 2

gone: list[str] = []  # names of groups in the order in which they were destroyed
plain_forget = groups.forget


def forget(handle: Any) -> None:
    """Record the group's name, then call the kit's own `forget`, which this replaces."""
    gone.append(handle.kit_facts["name"])
    plain_forget(handle)


groups.forget = forget


def uninterrupted(config: ModelConfig) -> dict[str, Any]:
    job = model.build(config)
    steps = job.step(BEFORE + AFTER)
    result = {"steps": steps, "hashes": job.hashes()}
    job.mover.close()
    groups.destroy()
    return result


def interrupted(config: ModelConfig, *, mode: str, include_world: bool) -> dict[str, Any]:
    base = census()
    job = model.build(config)
    steps = job.step(BEFORE)
    stale = megatron_groups()
    plain = [group.kit_inner.group_name for group in stale]
    job.mover.arena.open()  # its file stays open until the mover is closed
    result: dict[str, Any] = {"base": base, "training": census(), "before": job.hashes(), "names": plain}
    described = groups.snapshot()["groups"]
    held = {h.path for h in holders_of(job=job)}

    out = job.mover.release()
    result["guard"] = attempt(job.step)
    gone.clear()
    stats = groups.destroy(mode, include_world=include_world)
    result["order"] = [*gone]
    collect()
    result["released"] = census()
    result["globals_left"] = {
        n: repr(getattr(parallel_state(), n))
        for n in megatron_globals()
        if getattr(parallel_state(), n) not in (None, {})
    }
    result["stale"] = {group.group_desc: attempt(lambda g=group: exercise(g)) for group in stale}
    result["stale_attribute"] = attempt(lambda: stale[0].size() + 0)
    result["again"] = groups.destroy()

    result["reloaded"] = groups.reload(json.loads(json.dumps(stats["snapshot"])))
    result["reload_again"] = groups.reload(stats["snapshot"])
    back = job.mover.restore()
    result["after"] = job.hashes()
    result["described_same"] = groups.snapshot()["groups"] == described
    result["talk"] = groups.talk()
    holders = holders_of(job=job)
    result["holders_same"] = {h.path for h in holders} == held
    result["dead_holders"] = [h.path for h in holders if not (h.alive and h.current)]
    result["holders"] = len(holders)
    steps += job.step(AFTER)
    result |= {"steps": steps, "hashes": job.hashes(), "back": census(), "stats": stats, "out": out, "in": back}
    result["model_bytes"] = model_bytes(
        config, ranks=dist.get_world_size(), stage=parallel_state().get_pipeline_model_parallel_rank()
    )
    job.mover.close()
    groups.destroy()
    return result


def main() -> None:
    dist.init_process_group("gloo")
    results = {}
    for name, settings in json.loads(sys.argv[1]).items():
        how = {"mode": settings.pop("mode", "exact"), "include_world": settings.pop("include_world", False)}
        with ownership.as_found():
            control = uninterrupted(ModelConfig(**settings))
            collect()
            results[name] = {"control": control} | interrupted(ModelConfig(**settings), **how)
        collect()
    write(results)


main()
