"""What a rank does for torchcomms beyond torch: a communicator gets its own group's rank and size, GPU, options and timeout.

torch makes communicators by `new_comm` and passes neither the group's rank and size (torchcomms then asks the environment, and finds those
of the whole job), nor the number of the GPU, the timeout or NCCL's options, which torchcomms would take as hints. All are put in here,
around torch's own functions, on ranks that have the flag. Groups are made by torch's `_new_process_group_helper` as without routing, each
with a communicator of its own: torch's way with torchcomms, to split WORLD's, takes no options, and on GPUs no gloo groups.

Standard library and torch only. Has run with a stand-in for torchcomms only, over gloo: nothing of it has run on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
from torch._C._distributed_c10d import HashStore

from kit.routing import backends, describe, is_routed, requested, state, unimportable

c10d: Any = _c10d  # torch's registry of groups and its helpers carry no types

# NCCL's options as torch spells them, and the hints that torchcomms reads.
SAME = ("blocking", "cga_cluster_size", "collnet_enable", "cta_policy", "max_ctas", "min_ctas", "nvls_ctas")
CONFIG_HINTS = {"net_name": "netName", **{name: name for name in (*SAME, "split_share", "traffic_class")}}
# What torch itself sets in options for its own use, and the timeout, which goes another way.
TORCHS_OWN = {"_timeout", "backend", "config", "global_ranks_in_group", "group_name", "split_color", "split_from"}
HIGH_PRIORITY = "is_high_priority_stream"
DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class Making(NamedTuple):
    """A group that is being made."""

    rank: int
    size: int
    hints: dict[str, str]
    timeout: Any


_making: list[Making] = []  # the last one is made now


def install() -> None:
    """Put in what torch leaves out. Without the flag, or where torch cannot route, nothing is touched; repeating it changes nothing."""
    if not requested() or state.undo is not None or not hasattr(c10d, "new_comm"):
        return
    names = {
        "new_comm": functools.wraps(c10d.new_comm)(functools.partial(new_comm, c10d.new_comm)),
        "_new_process_group_helper": _helper(c10d._new_process_group_helper),
    }
    if hasattr(c10d, "_new_group_via_split_group"):
        names["_new_group_via_split_group"] = new_group
    before = {name: getattr(c10d, name) for name in names}

    def put(functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(c10d, name, function)

    put(names)
    state.undo = functools.partial(put, before)
    c10d.logger.addFilter(said_already)


def uninstall() -> None:
    """torch's own functions again."""
    if state.undo is not None:
        state.undo()
        state.undo = None
        c10d.logger.removeFilter(said_already)


def said_already(record: logging.LogRecord) -> bool:
    """torch warns with every group that it routes; a lab makes hundreds, and has it in its records."""
    return not str(record.msg).startswith("Using TorchComms backend")


def new_comm(plain: Any, backend: str, device: Any, *args: Any, **kwargs: Any) -> Any:
    """A communicator with the rank, size, options and timeout of the group that is made now, on this rank's own GPU."""
    if not _making:
        return plain(backend, device, *args, **kwargs)
    making = _making[-1]
    more = {} if backend == "gloo" else making.hints
    kwargs = {**kwargs, "hints": {**(kwargs.get("hints") or {}), **more}, "timeout": making.timeout}
    with seeded(making.rank, making.size):
        return plain(backend, indexed(device), *args, **kwargs)


@contextlib.contextmanager
def seeded(rank: int, size: int) -> Iterator[None]:
    """torchcomms asks the environment which rank of how many it is; without these it finds torchrun's, of the whole job."""
    values = {"TORCHCOMM_RANK": str(rank), "TORCHCOMM_SIZE": str(size)}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def indexed(device: Any) -> Any:
    """A GPU by its number: torchcomms would take the one that has the number of the rank in its group."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def qualified(backend: str) -> str:
    """A backend with the device it is for: `gloo` alone is also taken for GPUs, which torchcomms' gloo cannot reach."""
    return f"{DEVICES[backend]}:{backend}" if backend in DEVICES else backend


def _helper(plain: Any) -> Any:
    """torch's maker of groups: knows whose turn it is, and flushes a new WORLD."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def helper(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        asked, options, timeout, device = (given[n] for n in ("backend", "backend_options", "timeout", "device_id"))
        backend = qualified(str(asked))
        devices = {pair.partition(":")[0] for pair in backend.split(",")}
        given["backend"] = c10d.Backend(backend)
        if device is not None and device.type not in devices:
            given["device_id"] = None  # torch would look for a backend of a device that this group is not for
        hints, lost = ({}, set()) if backend == "cpu:gloo" else hints_of(options)
        _making.append(Making(given["group_rank"], given["group_size"], hints, timeout))
        try:
            made = plain(*call.args, **call.kwargs)
        finally:
            _making.pop()
        # torch finalizes what is in this list once more with WORLD, which torchcomms refuses; the group itself keeps its communicator.
        c10d._world.comms.clear()
        group = made[0]
        if isinstance(group, c10d.ProcessGroup):
            if backend != str(asked):
                group._set_default_backend(c10d.Backend.backend_type_map[str(asked)])
                c10d._world.pg_map[group] = (asked, made[1])  # by which name it is known
            _settle(group, options, timeout, lost)
            if not given["global_ranks_in_group"]:
                flush(group, device)
        return made

    return helper


def _settle(group: Any, options: Any, timeout: Any, lost: set[str]) -> None:
    """Count the group, and give it the timeout: a routed backend starts with one of its own."""
    routed = is_routed(group)
    state.groups += 1
    state.routed += routed
    state.lost |= lost
    state.settings.pop(group.group_name, None)
    if routed:
        for backend in backends(group):
            backend._set_default_timeout(timeout)
        known = {"_timeout": timeout}
        if hasattr(options, "config"):
            known |= {"config": options.config, HIGH_PRIORITY: options.is_high_priority_stream}
        state.settings[group.group_name] = types.SimpleNamespace(**known)


def flush(group: Any, device: Any) -> None:
    """One barrier on the device before anything else is made beside the new WORLD."""
    options = c10d.BarrierOptions()
    options.device = torch.device("cpu") if device is None else device
    if device is not None:
        options.device_ids = [device.index]
    group.barrier(options).wait()


def new_group(*, pg_options: Any, **asked: Any) -> Any:
    """In the place of torch's way to split WORLD's communicator."""
    return c10d._new_group_with_tag(backend_options=pg_options, **asked)


def hints_of(options: Any) -> tuple[dict[str, str], set[str]]:
    """Options of a group as hints, and the names of those that are set and have no hint."""
    if options is None:
        return {}, set()
    if not hasattr(options, "config"):
        return {}, {type(options).__name__}
    plain = type(options)()
    hints = {HIGH_PRIORITY: "true"} if options.is_high_priority_stream else {}
    changed = changes(options.config, plain.config)
    hints |= {CONFIG_HINTS[name]: str(value) for name, value in changed.items() if name in CONFIG_HINTS}
    lost = {f"config.{name}" for name in changed if name not in CONFIG_HINTS}
    others = changes(options, plain).keys() - TORCHS_OWN - {HIGH_PRIORITY}
    return hints, lost | others


def changes(one: Any, plain: Any) -> dict[str, Any]:
    """Fields that are not as they are by themselves."""
    values = {name: getattr(one, name) for name in dir(one) if not name.startswith("_")}
    return {
        name: value for name, value in values.items() if not callable(value) and value != getattr(plain, name, None)
    }


def probe() -> dict[str, Any]:
    """For doctor: requested, importable, and where both are, whether a group of one rank really is routed; touches no GPU."""
    reason, why = unimportable()
    told: dict[str, Any] = {"requested": requested(), "importable": not reason, "effective": None, "why": why or None}
    if not told["requested"] or reason:
        return told
    try:
        install()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        said = describe()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - what it raises is the answer
        return {**told, "effective": False, "why": f"a group cannot be made ({type(error).__name__}: {error})"}
    return {**told, "effective": said["effective"], "why": said["why"]}
