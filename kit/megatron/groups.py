"""Megatron's communicators: snapshot, destroy, reload, and a sum over each.

`install()` once, before Megatron makes its groups (`kit.megatron.model.build` does it). Then `destroy(mode)` gives the groups back and
`reload(snapshot)` brings them back. Every rank calls; order matters as for any collective. Modes:

exact     groups are destroyed, and every handle stays valid
abort     like exact, with NCCL's abort instead of its destroy
suspend   NCCL keeps the communicators and frees what memory it can
manual    in common use: destroys by hand what the `*_GROUP*` globals hold except gloo groups, forgets all of them, and calls Megatron's
          reset, so that the gloo groups are lost
official  in common use: Megatron's own reset alone, which forgets the device groups without destroying them

The last two are kept faithful so that they can be compared. They rebuild through `initialize_model_parallel`, and handles that layers keep
go stale.

Over gloo a group lives as long as anything refers to it, so its sockets and threads go only when the last reference does: handles let go of
the inner groups, on threads, because each takes about 15 ms to wind down. Over NCCL the groups are shut down one after the other in reverse
order of creation, since destroying is collective there; what a group has of gloo beside NCCL winds down as above. All ranks meet at the
store before anything is destroyed, made or suspended; a rank that does not come is named.

With `abort`, NCCL frees a communicator at once; a shutdown flushes it first and waits for its peers.
In both modes nothing is in flight by then, since all ranks have met and the device is idle. Gloo has neither call.

A suspended group that never ran a collective has no communicator yet, and one over gloo none on the GPU: they are skipped, and listed.
While suspended a group's handle is empty, so that a use raises in Python: nothing in NCCL guards it, and the GPU could fault. Limits: NCCL
keeps what it cannot give back (`persist` in its statistics) and refuses communicators that share their memory with others. Suspending has
not run on a GPU yet.
"""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from kit import nccl
from kit.errors import BadInput, KitError
from kit.measure.host import join_threads
from kit.megatron.handles import (
    Handle,
    c10d,
    decode,
    forget,
    groups_in,
    initialised,
    install,
    make_options,
    megatron_globals,
    megatron_groups,
    parallel_state,
    registered,
    rekey,
    snapshot,
    state,
    title,
    uninstall,
)
from kit.megatron.tensors import process_memory
from kit.nccl import unbound

__all__ = ["DestroyFailed", "communicators", "initialised", "install", "refuse_keeping", "snapshot", "uninstall"]

MODES = ("exact", "abort", "manual", "official", "suspend")
EXACT = ("exact", "abort")  # groups are gone, and come back inside the handles that everybody kept
KEEPING = ("suspend",)  # groups stay, without their memory


def destroy(mode: str = "exact", *, include_world: bool = False, timeout_s: float = 60.0) -> dict[str, Any]:
    """Give the groups back. Stats: initialised, mode, destroyed, left, alive, bytes (freed by source), seconds, snapshot.

    If Megatron is not initialised, do nothing and return an empty snapshot. A failure raises `DestroyFailed` after the rest was tried.
    """
    if mode not in MODES:
        raise BadInput(f"mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
    if include_world and mode not in (*EXACT, *KEEPING):
        raise BadInput(f"include_world is not allowed with mode {mode!r}: it cannot bring the default group back")
    if mode in KEEPING:
        refuse_keeping()
    stats: dict[str, Any] = {
        "initialised": initialised(),
        "mode": mode,
        "destroyed": 0,
        "left": 0,
        "left_names": [],
        "alive": [],
        "bytes": {},
        "seconds": 0.0,
        "snapshot": {},
    }
    if not stats["initialised"]:
        return stats
    before, start = process_memory(), time.perf_counter()
    taken = {"mode": mode, **snapshot(include_world=include_world)}
    failed: list[tuple[str, str]] = []
    if mode in EXACT:
        stats["destroyed"], failed, stats["alive"] = release(
            include_world=include_world, timeout_s=timeout_s, abort=mode == "abort"
        )
    elif mode in KEEPING:
        taken["suspended"] = kept = suspend(include_world=include_world, timeout_s=timeout_s)
        stats["destroyed"], failed = len(kept["suspended"]), kept["failed"]
    elif mode == "manual":
        stats["destroyed"], failed = _manual()
    else:
        parallel_state().destroy_model_parallel()
        stats["destroyed"] = -1
    stats["seconds"] = time.perf_counter() - start
    stats["bytes"] = {source: before[source] - size for source, size in process_memory().items()}
    stats["left_names"] = registered_left()
    stats["left"] = len(stats["left_names"])
    # A snapshot is plain JSON, also where own code keeps it in a file: whatever is not would raise here, before it is needed.
    stats["snapshot"] = json.loads(json.dumps(taken))
    if failed:
        raise DestroyFailed(failed, stats)
    return stats


def _manual() -> tuple[int, list[tuple[str, str]]]:
    """Destroy each device group by hand, set every name to None, reset. Return the number destroyed, and each failure with its reason."""
    module = parallel_state()
    names = [n for n, v in vars(module).items() if n.startswith("_") and "_GROUP" in n and not isinstance(v, dict)]
    seen: list[Any] = []
    failed: list[tuple[str, str]] = []
    for name in names:
        for group in groups_in(getattr(module, name)):
            if "_GLOO" in name or any(group is known for known in seen):
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
    """Rebuild what a snapshot of `destroy` describes; do nothing if already initialised. Stats: reloaded, seconds."""
    if not taken or taken.get("mode") not in MODES:
        raise BadInput("the snapshot is empty or not one that destroy() made: there is nothing to reload")
    if initialised() and not asleep:
        return {"mode": taken["mode"], "reloaded": 0, "seconds": 0.0}
    start = time.perf_counter()
    if taken["mode"] in KEEPING:
        count = wake_suspended(timeout_s=timeout_s)
    elif taken["mode"] in EXACT:
        count = rebuild(taken, timeout_s=timeout_s)
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
        expected = sum((rank + 1) ** 2 for rank in ranks)
        sums = []
        for kind in sorted({device.type for device in group._device_types}):  # each may have its own backend
            if kind == "cpu" or torch.cuda.is_available():
                value = torch.tensor([(dist.get_rank() + 1) ** 2], dtype=torch.float64, device=kind)
                dist.all_reduce(value, group=group)
                sums.append(float(value.item()))
        exact = all(total == expected for total in sums)
        results.append({"group": group.group_desc, "ranks": ranks, "sum": sums[-1], "exact": exact})
    return results


# -- exact release and rebuild; suspend and resume ---------------------------------------------------------------------

# Handles between a destroy and the reload that fills them again, by group name.
_released: dict[str, Handle] = {}
_rounds: dict[str, int] = {}


class DestroyFailed(KitError):  # noqa: N818 - reads as what happened
    """Some groups could not be destroyed. `held` names them; `stats` is what destroy would have returned."""

    def __init__(self, failed: list[tuple[str, str]], stats: dict[str, Any]) -> None:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed)
        super().__init__(f"{len(failed)} groups may still be held: {reasons}")
        self.held = [name for name, _ in failed]
        self.stats = stats


def meet(what: str, rank: int, size: int, timeout_s: float, report: str = "") -> None:
    """Wait at the store until every rank has come; name those that did not within the deadline."""
    number = _rounds[what] = _rounds.get(what, 0) + 1
    state.store.set(f"kit/{what}/{number}/{rank}", report)
    everyone = [f"kit/{what}/{number}/{r}" for r in range(size)]
    try:
        state.store.wait(everyone, dt.timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [r for r in range(size) if not state.store.check([everyone[r]])]
        # Withdraw the arrival: a rank that comes later must not continue alone, and both can try again.
        state.store.delete_key(everyone[rank])
        _rounds[what] -= 1
        raise KitError(
            f"{what}: ranks {missing} did not arrive within {timeout_s:g} s; the other ranks are waiting"
        ) from error
    if number > 1:  # all ranks have begun this round, so nobody reads the keys of the round before any more
        state.store.delete_key(f"kit/{what}/{number - 1}/{rank}")


def reports(what: str, own: str, rank: int, size: int, timeout_s: float) -> list[str]:
    """Meet, and return what every rank reports, in the order of ranks."""
    meet(what, rank, size, timeout_s, report=own)
    return [state.store.get(f"kit/{what}/{_rounds[what]}/{r}").decode() for r in range(size)]


def release(*, include_world: bool, timeout_s: float, abort: bool) -> tuple[int, list[tuple[str, str]], list[str]]:
    """Destroy the groups; return the number destroyed, each failure with its reason, and the names of inner groups still alive."""
    default = c10d._world.default_pg
    groups = [g for g in c10d._world.pg_map if g is not default] if include_world else megatron_groups()
    targets = [default, *groups] if include_world else groups  # as they were made
    plain = [repr(g.group_desc) for g in targets if not isinstance(g, Handle)]
    if plain:
        raise KitError(
            f"group(s) {', '.join(plain)} were made before kit.megatron.groups.install(): "
            "install before Megatron makes its groups"
        )
    meet("destroy", dist.get_rank(), dist.get_world_size(), timeout_s)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    reset_globals()
    failed: list[tuple[str, str]] = []
    boxes: list[list[Any]] = []
    watched: list[tuple[str, Any]] = []
    for handle in reversed(targets):
        facts = handle.kit_facts
        inner = handle.kit_inner
        _released[facts["name"]] = handle
        try:
            if abort:
                inner.abort()
            else:
                finalize(inner)
                inner.shutdown()
        except Exception as error:  # noqa: BLE001 - collected, and raised by the caller after the rest was tried
            failed.append((title(facts), str(error)))
        forget(handle)
        handle.kit_inner = None
        watched.append((title(facts), weakref.ref(inner)))
        boxes.append([inner])
        del inner  # only its box refers to it now
    if include_world:
        c10d._update_default_pg(None)
        c10d._world.tags_to_pg.clear()
        c10d._unregister_all_process_groups()
        c10d._world.group_count = 0  # as torch's own destroy of WORLD does
    # Drop the last references to gloo groups, all at once: each winds down by itself, without its peers.
    threads = [threading.Thread(target=box.clear, name="kit-let-go") for box in boxes]
    for thread in threads:
        thread.start()
    join_threads(threads)
    alive = [name for name, reference in watched if reference() is not None]
    return len(targets) - len(failed), failed, alive


def finalize(group: Any) -> None:
    """Do what torch's own destroy does before a shutdown if groups are routed through torchcomms."""
    if getattr(c10d, "_TORCHCOMM_AVAILABLE", False):
        for device in group._device_types:
            backend = group._get_backend(device)
            if isinstance(backend, c10d._BackendWrapper):
                backend.get_comm().finalize()


def reset_globals(before: Mapping[str, Any] | None = None) -> None:
    """Set every global of parallel_state to its value in `before`, or else to that after a fresh import: None, or an empty dict."""
    before = before or {}
    for name, value in megatron_globals().items():
        setattr(parallel_state(), name, before.get(name, {} if isinstance(value, dict) else None))


def rebuild(snapshot: dict[str, Any], *, timeout_s: float) -> int:
    """Make every group of the snapshot again, in the order of creation, and restore the globals."""
    world = snapshot["world"]
    default = c10d._world.default_pg
    rank, size = _place(world, default)
    meet("reload", rank, size, timeout_s)
    # The store still has the addresses of the groups before, under the same names: each generation has its own prefix.
    state.generation += 1
    store: Any = c10d.PrefixStore(f"kit/{state.generation}", state.store)
    if world:
        default = _make_world(world, store, rank, size)
    made = [_make(plain, store, default, rank) for plain in snapshot["groups"]]
    # torch names new groups by this count: a lower one would give a name that a rebuilt group already has.
    c10d._world.group_count = max(c10d._world.group_count, snapshot["group_count"])
    for name, value in snapshot["globals"].items():
        setattr(parallel_state(), name, decode(value, made))
    return len(made) + bool(world)


def _place(world: dict[str, Any] | None, default: Any) -> tuple[int, int]:
    if world and default is None:
        return world["ranks"].index(_released[world["name"]].kit_facts["rank"]), len(world["ranks"])
    if default is None:
        raise KitError("the default group is gone and this snapshot was taken without it: reload needs one")
    return dist.get_rank(), dist.get_world_size()


def _make_world(plain: dict[str, Any], store: Any, rank: int, size: int) -> Handle:
    dist.init_process_group(
        plain["backend"],
        store=store,
        rank=rank,
        world_size=size,
        timeout=dt.timedelta(seconds=plain["timeout_s"]),
        pg_options=make_options(plain["options"], plain["timeout_s"]),
        device_id=torch.device(plain["bound_device"]) if plain["bound_device"] else None,
    )
    return _fill(plain, c10d._world.default_pg)


def _make(plain: dict[str, Any], store: Any, default: Any, rank: int) -> Handle:
    ranks = plain["ranks"]
    tag = plain["tag"] or ""
    with unbound(default):  # this rank makes only its own groups
        inner, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            ranks,
            c10d.Backend(plain["backend"]),
            store,
            plain["name"],
            backend_options=make_options(plain["options"], plain["timeout_s"]),
            timeout=dt.timedelta(seconds=plain["timeout_s"]),
            # torch itself puts "user:" before a caller's tag, and makes a tag for a group without one.
            pg_tag=tag.removeprefix("user:") if tag.startswith("user:") else None,
            device_id=torch.device(plain["bound_device"]) if plain["bound_device"] else None,
            group_desc=plain["description"],
        )
    c10d._world.pg_group_ranks[inner] = {rank: place for place, rank in enumerate(ranks)}
    return _fill(plain, inner)


def _fill(plain: dict[str, Any], inner: Any) -> Handle:
    handle = _released.pop(plain["name"])
    handle.kit_inner = inner
    rekey(inner, handle)
    return handle


def registered_left() -> list[str]:
    """Groups of Megatron's that are still registered, and any that its globals still hold."""
    groups_found = [*groups_in(megatron_globals()), *(megatron_groups() if dist.is_initialized() else [])]
    return [repr(group) for group in {id(group): group for group in groups_found}.values()]


STATS = ("suspend", "persist", "total")  # bytes; NCCL also reports whether it is suspended now
UNUSED = "not initialized"  # in NCCL's statistics of a communicator that does not exist yet
NEVER_USED = "never used, so that it has no communicator"

# Handles between suspend and resume, in the order that both use.
asleep: list[tuple[Handle, Any]] = []


def refuse_keeping() -> None:
    """Where this process cannot suspend anything: by the versions that run, and by what torch was built with, which WORLD's statistics
    tell. A torch that was built for an older NCCL refuses whatever runs (TORCH_CHECK in torch/csrc/distributed/c10d/NCCLUtils.cpp)."""
    why = nccl.no_suspend(nccl.running(), torch.__version__, gpus=torch.cuda.device_count()) or unbuilt()
    if why:
        raise BadInput(f"mode=suspend is not available: {why}")


def unbuilt() -> str:
    """The reason why this torch shows no statistics of WORLD's communicator; empty if it does, or if there is no such WORLD."""
    world = c10d._world.default_pg
    backend = None if world is None else nccl_backend(world)
    if backend is None:
        return ""
    try:
        backend.memory_stats()
    except AttributeError:
        return f"torch {torch.__version__} shows no statistics of communicators"
    except RuntimeError as error:
        if UNUSED not in str(error):
            return f"torch {torch.__version__} cannot ask NCCL: {brief(error)}"
    return ""


def brief(error: BaseException) -> str:
    return " ".join(str(error).partition("\n")[0].split())


def suspend(*, include_world: bool, timeout_s: float) -> dict[str, Any]:
    """Suspend the groups; return those suspended with NCCL's statistics before and after, what was skipped or failed, and why."""
    default = c10d._world.default_pg
    targets = [*([default] if include_world else []), *megatron_groups()]
    meet("suspend", dist.get_rank(), dist.get_world_size(), timeout_s)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    done: list[dict[str, Any]] = []
    skipped: list[tuple[str, str]] = []
    failed: list[tuple[str, str]] = []
    for handle in targets:
        name, backend = title(handle.kit_facts), nccl_backend(handle)
        if backend is None:
            skipped.append((name, "over gloo"))
            continue
        try:
            before = backend.memory_stats()
        except RuntimeError as error:
            if UNUSED not in str(error):
                raise
            skipped.append((name, NEVER_USED))
            continue
        try:
            backend.suspend()
        except RuntimeError as error:
            failed.append((name, brief(error)))
            continue
        after = backend.memory_stats()
        done.append({"group": name, "before": picked(before), "after": picked(after)})
        asleep.append((handle, handle.kit_inner))
        handle.kit_inner = None
    return {"suspended": done, "skipped": skipped, "failed": failed}


def wake_suspended(*, timeout_s: float) -> int:
    """Put every suspended group back into its handle, in the same order; return their number."""
    meet("resume", dist.get_rank(), dist.get_world_size(), timeout_s)
    count = len(asleep)
    while asleep:
        handle, inner = asleep[0]
        handle.kit_inner = inner
        try:
            nccl_backend(handle).resume()
        except BaseException:
            handle.kit_inner = None  # still asleep: a use would fault
            raise
        asleep.pop(0)
    return count


def communicators() -> dict[str, int]:
    """What NCCL says that this process's communicators take, summed over every registered group; empty where it says nothing:
    without NCCL, or with one or a torch that keeps no such statistics."""
    suspended = {id(handle): inner for handle, inner in asleep}
    statistics: list[dict[str, int]] = []
    for group in registered():
        inner = suspended.get(id(group), group)
        if "nccl" in str(c10d._world.pg_backend_config.get(group, "")):
            try:
                statistics.append(picked(inner._get_backend(torch.device("cuda")).memory_stats()))
            except AttributeError:
                return {}  # a torch that cannot ask
            except RuntimeError as error:
                if UNUSED not in str(error):
                    return {}  # a sum that lacks one of them would look complete
    return {name: sum(row.get(name, 0) for row in statistics) for name in STATS} if statistics else {}


def nccl_backend(handle: Any) -> Any:
    """The group's NCCL backend, or None."""
    if "nccl" not in str(c10d._world.pg_backend_config.get(handle, "")):
        return None
    return handle._get_backend(torch.device("cuda"))


def picked(stats: dict[str, int]) -> dict[str, int]:
    """Bytes that are on the GPU now. NCCL's own sums go on counting what is suspended: only allocating and freeing changes them
    (ncclCommMemStats and ncclCommMemSuspend in its src/mem_manager.cc, 2.29.7 to 2.30.7)."""
    there = {name: stats[name] for name in STATS if name in stats}
    if stats.get("suspended"):
        there |= {"suspend": 0, "total": there.get("persist", 0)}
    return there
