"""Megatron's communicators: snapshot, destroy, reload, and a sum over each.

`install()` once, before Megatron makes its groups (`kit.megatron.model.build` does it). Then `destroy(mode)` gives the
groups back and `reload(snapshot)` brings them back. Modes: `exact` (really released, every holder lives on), `abort` (as
exact, with NCCL's abort in place of its destroy), `manual` and `official` (the two ways in common use, with their leaks),
and `suspend` (NCCL keeps the communicators and gives back what memory it can). Every rank calls; order matters as for any
collective.
"""

from __future__ import annotations

import json
import time
from typing import Any

from kit.errors import BadInput
from kit.megatron.groups import common, exact
from kit.megatron.groups import suspend as keeping
from kit.megatron.groups.common import talk
from kit.megatron.groups.exact import DestroyFailed, registered_left
from kit.megatron.groups.handle import GroupReleased, Handle, install, uninstall
from kit.megatron.groups.snapshot import initialised, snapshot
from kit.megatron.groups.suspend import communicators
from kit.megatron.groups.suspend import refuse as refuse_keeping
from kit.megatron.tensors import memory

__all__ = [
    "EXACT",
    "KEEPING",
    "MODES",
    "DestroyFailed",
    "GroupReleased",
    "Handle",
    "communicators",
    "destroy",
    "initialised",
    "install",
    "refuse_keeping",
    "reload",
    "snapshot",
    "talk",
    "uninstall",
]

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
        keeping.refuse()
    stats: dict[str, Any] = {"initialised": initialised(), "mode": mode, "destroyed": 0, "left": 0, "left_names": []}
    stats |= {"alive": [], "bytes": {}, "seconds": 0.0, "snapshot": {}}
    if not stats["initialised"]:
        return stats
    before, start = memory(), time.perf_counter()
    taken = {"mode": mode, **snapshot(include_world=include_world)}
    failed: list[str] = []
    reasons: list[str] = []
    if mode in EXACT:
        stats["destroyed"], failed, reasons, stats["alive"] = exact.destroy(
            include_world=include_world, timeout_s=timeout_s, abort=mode == "abort"
        )
    elif mode in KEEPING:
        kept = keeping.suspend(include_world=include_world, timeout_s=timeout_s)
        taken["suspended"] = kept
        stats["destroyed"] = len(kept["suspended"])
        failed, reasons = [name for name, _ in kept["failed"]], [f"{name}: {why}" for name, why in kept["failed"]]
    elif mode == "manual":
        stats["destroyed"], failed, reasons = common.manual()
    else:
        common.official()
        stats["destroyed"] = -1
    stats["seconds"] = time.perf_counter() - start
    after = memory()
    stats["left_names"] = registered_left()
    stats["left"] = len(stats["left_names"])
    stats["bytes"] = {source: before[source] - after[source] for source in before}
    stats["snapshot"] = json.loads(json.dumps(taken))
    if failed:
        raise DestroyFailed(failed, reasons, stats)
    return stats


def reload(taken: dict[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
    """Bring back what a snapshot of `destroy` describes. Already initialised: nothing is done. Stats: reloaded, seconds."""
    if not taken or taken.get("mode") not in MODES:
        raise BadInput("the snapshot is empty or not one that destroy() made: there is nothing to reload")
    if initialised() and not keeping.asleep():
        return {"mode": taken["mode"], "reloaded": 0, "seconds": 0.0}
    start = time.perf_counter()
    if taken["mode"] in KEEPING:
        count = keeping.resume(timeout_s=timeout_s)
    elif taken["mode"] in EXACT:
        count = exact.reload(taken, timeout_s=timeout_s)
    else:
        common.reload(taken)
        count = len(taken["groups"])
    return {"mode": taken["mode"], "reloaded": count, "seconds": time.perf_counter() - start}
