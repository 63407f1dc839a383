"""Megatron's communicators: snapshot, destroy, reload, and a sum over each.

`install()` once, before Megatron makes its groups (`kit.megatron.model.build` does it). Then `destroy(mode)` gives the groups back and
`reload(snapshot)` brings them back. Every rank calls; order matters as for any collective. Modes:

exact     groups are really released, and every holder lives on
abort     as exact, with NCCL's abort in place of its destroy
suspend   NCCL keeps the communicators and gives back what memory it can
manual    in common use: destroys by hand what the `*_GROUP*` globals hold except gloo groups, forgets all of them, and calls Megatron's
          reset, so that the gloo groups are lost
official  in common use: Megatron's own reset alone, which forgets the device groups without destroying them

The last two are kept faithful so that they can be compared. They rebuild through `initialize_model_parallel`, and handles that layers keep
go stale.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import BadInput, KitError
from kit.megatron.groups import exact
from kit.megatron.groups.exact import DestroyFailed, communicators, registered_left
from kit.megatron.groups.exact import refuse as refuse_keeping
from kit.megatron.groups.handle import (
    groups_in,
    initialised,
    install,
    megatron_groups,
    parallel_state,
    snapshot,
    state,
    uninstall,
)
from kit.megatron.tensors import memory

# What comes from the files of this folder; the rest is below.
__all__ = ["DestroyFailed", "communicators", "initialised", "install", "refuse_keeping", "snapshot", "uninstall"]

MODES = ("exact", "abort", "manual", "official", "suspend")
EXACT = ("exact", "abort")  # groups are gone, and come back inside the handles that everybody kept
KEEPING = ("suspend",)  # groups stay, without their memory


def destroy(mode: str = "exact", *, include_world: bool = False, timeout_s: float = 60.0) -> dict[str, Any]:
    """Give the groups back. Stats: initialised, mode, destroyed, left, alive, bytes (freed by source), seconds, snapshot.

    Not initialised: nothing is done and the snapshot is empty. A failure raises `DestroyFailed` after the rest was tried.
    """
    if mode not in MODES:
        raise BadInput(f"mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
    if include_world and mode not in (*EXACT, *KEEPING):
        raise BadInput(f"include_world is not allowed with mode {mode!r}: it cannot bring the default group back")
    if mode in KEEPING:
        exact.refuse()
    stats: dict[str, Any] = {"initialised": initialised(), "mode": mode, "destroyed": 0, "left": 0, "left_names": []}
    stats |= {"alive": [], "bytes": {}, "seconds": 0.0, "snapshot": {}}
    if not stats["initialised"]:
        return stats
    before, start = memory(), time.perf_counter()
    taken = {"mode": mode, **snapshot(include_world=include_world)}
    failed: list[tuple[str, str]] = []
    if mode in EXACT:
        stats["destroyed"], failed, stats["alive"] = exact.destroy(
            include_world=include_world, timeout_s=timeout_s, abort=mode == "abort"
        )
    elif mode in KEEPING:
        taken["suspended"] = kept = exact.suspend(include_world=include_world, timeout_s=timeout_s)
        stats["destroyed"], failed = len(kept["suspended"]), kept["failed"]
    elif mode == "manual":
        stats["destroyed"], failed = _manual()
    else:
        parallel_state().destroy_model_parallel()
        stats["destroyed"] = -1
    stats["seconds"] = time.perf_counter() - start
    after = memory()
    stats["left_names"] = registered_left()
    stats["left"] = len(stats["left_names"])
    stats["bytes"] = {source: before[source] - after[source] for source in before}
    stats["snapshot"] = json.loads(json.dumps(taken))
    if failed:
        raise DestroyFailed(failed, stats)
    return stats


def _manual() -> tuple[int, list[tuple[str, str]]]:
    """Destroy each device group by hand, null every name, reset. Gives the number destroyed, and what failed with why."""
    module = parallel_state()
    names = [n for n, v in vars(module).items() if n.startswith("_") and "_GROUP" in n and not isinstance(v, dict)]
    seen: list[Any] = []
    failed: list[tuple[str, str]] = []
    for name in names:
        for group in groups_in(getattr(module, name)):
            if "_GLOO" in name or any(group is each for each in seen):
                continue
            seen.append(group)
            try:
                dist.destroy_process_group(group)
            except Exception as error:  # noqa: BLE001 - collected, and raised by the caller after the rest was tried
                failed.append((name, str(error)))
    for name in names:
        setattr(module, name, None)
    module.destroy_model_parallel()
    return len(seen) - len(failed), failed


def reload(taken: dict[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
    """Bring back what a snapshot of `destroy` describes. Already initialised: nothing is done. Stats: reloaded, seconds."""
    if not taken or taken.get("mode") not in MODES:
        raise BadInput("the snapshot is empty or not one that destroy() made: there is nothing to reload")
    if initialised() and not exact.asleep:
        return {"mode": taken["mode"], "reloaded": 0, "seconds": 0.0}
    start = time.perf_counter()
    if taken["mode"] in KEEPING:
        count = exact.resume(timeout_s=timeout_s)
    elif taken["mode"] in EXACT:
        count = exact.reload(taken, timeout_s=timeout_s)
    else:
        if not taken["init_arguments"]:
            raise KitError(
                "how Megatron was initialised is not known: call kit.megatron.groups.install() before it initialises"
            )
        functions = {k: v for k, v in (state.init_arguments or {}).items() if callable(v)}
        parallel_state().initialize_model_parallel(**functions, **taken["init_arguments"])
        count = len(taken["groups"])
    return {"mode": taken["mode"], "reloaded": count, "seconds": time.perf_counter() - start}


def talk(over: list[Any] | None = None) -> list[dict[str, Any]]:
    """All-reduce over every group of Megatron's (or over these) with values that depend on the rank; `exact` says whether the
    sum is right."""
    if not initialised():
        return []
    results = []
    for group in megatron_groups() if over is None else over:
        ranks = dist.get_process_group_ranks(group)
        on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
        value = torch.tensor([(dist.get_rank() + 1) ** 2], dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(value, group=group)
        right = value.item() == sum((rank + 1) ** 2 for rank in ranks)
        results.append({"group": group.group_desc, "ranks": ranks, "sum": float(value.item()), "exact": right})
    return results
