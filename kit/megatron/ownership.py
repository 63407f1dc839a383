"""Restore the distributed state and Megatron's globals to what they were on entry.

`as_found()` notes what is there. What was made inside is destroyed on the way out: after a barrier on success; on
failure the error is logged first and groups are aborted without waiting for anybody, and that error is what surfaces.
What the caller had stays: its groups, its parallel state (brought back if it was released inside), microbatch
calculator, scratch buffers, rerun state machine, RNG tracker, generators, and how exactly torch computes. `describe()` tells the state
in plain JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import KitError
from kit.megatron import groups, standin
from kit.megatron.handles import Handle, c10d, forget, megatron_globals, registered, state
from kit.train.plain import Numerics

log = logging.getLogger(__name__)


def _singletons() -> list[tuple[Any, str]]:
    """Megatron's other process-wide state: (module, name)."""
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.core.tensor_parallel import random

    return [
        (num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"),
        (rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE"),
        (random, "_CUDA_RNG_STATE_TRACKER"),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED"),
    ]


@dataclasses.dataclass(kw_only=True, slots=True)
class _OnEntry:
    """The state on entry; `undo` brings back what is not a group, in this order."""

    groups: list[weakref.ref[Any]]  # weak: this list must not keep alive a group that is released inside
    distributed: bool
    snapshot: dict[str, Any]
    undo: list[Callable[[], object]]


def _look() -> _OnEntry:
    from megatron.core.tensor_parallel import random

    undo: list[Callable[[], object]] = [
        partial(groups.reset_globals, megatron_globals()),
        *(partial(setattr, module, name, getattr(module, name)) for module, name in _singletons()),
    ]
    if (tracker := random._CUDA_RNG_STATE_TRACKER) is not None:
        undo.append(partial(tracker.set_states, dict(tracker.get_states())))
    undo.append(Numerics.now().restore)
    if not state.installed:
        undo.append(groups.uninstall)
    if not standin.stands_in():
        undo.append(standin.uninstall)
    undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
    if torch.cuda.is_available():
        undo.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    distributed = dist.is_initialized()
    made = [weakref.ref(group) for group in registered()] if distributed else []
    return _OnEntry(groups=made, distributed=distributed, snapshot=groups.snapshot(), undo=undo)


@contextlib.contextmanager
def as_found(*, timeout_s: float = 60.0) -> Iterator[None]:
    """Restore the distributed and Megatron state on the way out; see the module. Every rank enters and leaves."""
    entry = _look()
    try:
        yield
    except BaseException as error:
        log.error("leaving after %s: %s", type(error).__name__, error, exc_info=error)  # noqa: TRY400 - logged with its trace
        try:
            _abort(entry)
            _put_back(entry)
        except Exception:
            log.exception("cleaning up after that error failed too; the first error is the one to read")
        raise
    _destroy(entry, timeout_s)
    _put_back(entry)


def _made_inside(entry: _OnEntry) -> list[Any]:
    """Groups that are registered now and were not on entry, newest first; a handle stands for the group inside it."""
    before = [reference() for reference in entry.groups]
    now = registered() if dist.is_initialized() else []
    return [g for g in reversed(now) if not any(kept is g or kept is _inner(g) for kept in before)]


def _inner(group: Any) -> Any:
    return group.kit_inner if isinstance(group, Handle) else group


def _destroy(entry: _OnEntry, timeout_s: float) -> None:
    if entry.distributed and not dist.is_initialized():
        raise KitError("the caller's default group was destroyed inside and not rebuilt: reload before leaving")
    if dist.is_initialized():
        if entry.snapshot and not groups.initialised():
            groups.reload({"mode": "exact", **entry.snapshot}, timeout_s=timeout_s)
        dist.barrier()
        for group in _made_inside(entry):
            if group is c10d._world.default_pg:
                continue
            with _emptied(group):
                dist.destroy_process_group(group)
        if not entry.distributed:
            with _emptied(c10d._world.default_pg):
                dist.destroy_process_group()


def _abort(entry: _OnEntry) -> None:
    """Abort without contacting the peers: they may be gone, or wait in a collective that will not end."""
    inside = _made_inside(entry)
    for group in inside:
        _inner(group).abort()
    for group in inside:
        if group is c10d._world.default_pg:
            continue
        with _emptied(group):
            forget(group)
    if not entry.distributed and dist.is_initialized():
        world = c10d._world.default_pg
        with _emptied(world):
            forget(world)
        c10d._update_default_pg(None)
        c10d._world.tags_to_pg.clear()
        c10d._world.group_count = 0


@contextlib.contextmanager
def _emptied(group: Any) -> Iterator[None]:
    """End a registered group inside. Over gloo it lives as long as anything refers to it, so its handle lets go of it; or the handle inside
    another system's wrapper, if that is registered in its place."""
    name = c10d._world.pg_names.get(group)
    handles = [group] if isinstance(group, Handle) else [made for made in state.made if made.group_name == name]
    yield
    for handle in handles:
        handle.kit_inner = None


def _put_back(entry: _OnEntry) -> None:
    for undo in entry.undo:
        undo()


def describe_state() -> dict[str, Any]:
    """The distributed and Megatron state in plain JSON, to compare before and after."""
    names = sorted(c10d._world.pg_names.values()) if dist.is_initialized() else []
    return {
        "distributed": dist.is_initialized(),
        "groups": names,
        "globals": {
            name: type(value).__name__ for name, value in megatron_globals().items() if value not in (None, {})
        },
        "singletons": {name: type(getattr(module, name)).__name__ for module, name in _singletons()},
        "standin": standin.stands_in(),
        "handles": bool(state.installed),
        "numerics": dataclasses.asdict(Numerics.now()),
        "generator": hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest(),
    }
