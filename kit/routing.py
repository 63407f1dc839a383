"""torchcomms: whether torch routes collectives through it (asked for, importable, in effect), and what ranks do for it beyond torch.

torch takes torchcomms where that can be imported and `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` is set; where it cannot, the flag is silently
nothing. Whether it is in effect is seen from the groups' backend objects.

torch makes communicators by `new_comm` and passes neither the group's rank and size (torchcomms then asks the environment, and finds those
of the whole job), nor the number of the GPU, the timeout or NCCL's options, which torchcomms would take as hints. `install` puts all of
them in, around torch's own functions, on ranks that have the flag. Groups are made by torch's `_new_process_group_helper` as without
routing, each with a communicator of its own: torch's way with torchcomms, to split WORLD's, takes no options, and on GPUs no gloo groups.

Every room may use it. Has run with a stand-in for torchcomms only, over gloo: nothing of it has run on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import types
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

FLAG = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
PLACEHOLDER = "0.0.1"  # of torchcomms on the package index: it has a name and no code

# Why it is not in effect.
MISSING = "torchcomms is not installed for the ranks"
EMPTY = "the torchcomms that the ranks have is the package index's placeholder, which has a name and no code"
BROKEN = "the ranks have torchcomms and cannot import it"
UNKNOWN = "the ranks' torch does not know torchcomms"
IGNORED = "torch could route and did not"


@dataclasses.dataclass(slots=True)
class State:
    """What a process knows of its routing: how many groups were made, how many of them are routed, and with which settings."""

    installed: bool = False
    groups: int = 0
    routed: int = 0
    lost: set[str] = dataclasses.field(default_factory=set)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


state = State()


def requested() -> bool:
    """Whether this process's torch is set to route: any value but 0 does it."""
    return os.environ.get(FLAG, "") not in {"", "0"}


def unimportable() -> tuple[str, str]:
    """Which of the reasons keeps torch from importing torchcomms, and the details; ("", "") where nothing does."""
    if find_spec("torchcomms") is None:
        return MISSING, "torchcomms is not installed"
    try:
        found = version("torchcomms")
    except PackageNotFoundError:
        found = "of unknown version"
    try:
        what_torch_imports()
    except Exception as error:  # noqa: BLE001 - reported as it is
        why = f"torchcomms {found} cannot be imported ({type(error).__name__}: {error})"
        if found == PLACEHOLDER:
            return EMPTY, f"{why}: it is the package index's placeholder"
        return BROKEN, why
    return "", ""


def what_torch_imports() -> None:
    """The names that torch needs to route; the first that is not there raises."""
    c10d()  # torch first: it looks for torchcomms while it loads
    try:
        import_module("torchcomms._comms")._BackendWrapper  # noqa: B018 - looked for, not used
    except ImportError:
        import_module("torchcomms._backend_wrapper")._BackendWrapper  # noqa: B018
    import_module("torchcomms").new_comm  # noqa: B018
    import_module("torchcomms.hooks").FlightRecorderHook  # noqa: B018


def c10d() -> Any:
    """torch's registry of groups and its helpers, which carry no types; loaded only where it is used."""
    return import_module("torch.distributed.distributed_c10d")


def settings(group: Any) -> Any:
    """Timeout and NCCL options that a routed group was made with: its backend object does not have them. None for any other group."""
    return state.settings.get(group.group_name)


def backends(group: Any) -> list[Any]:
    from torch import device

    return [group._get_backend(device(one)) for one in group._device_types]


def is_routed(group: Any) -> bool:
    """Whether all of a group goes through torchcomms: asked of its backend objects."""
    wrapper = getattr(c10d(), "_BackendWrapper", None)
    return wrapper is not None and all(isinstance(backend, wrapper) for backend in backends(group))


def effective() -> bool:
    """Whether WORLD goes through torchcomms. Imports nothing of it."""
    world = c10d()._world.default_pg
    return world is not None and is_routed(world)


def describe() -> dict[str, Any]:
    """Requested, importable, and in effect for WORLD; how many groups were made since, how many of them are routed, what was lost."""
    reason, why = unimportable()
    world, routed = c10d()._world.default_pg, effective()
    if not reason and not routed:
        reason = why = IGNORED if hasattr(c10d(), "_use_torchcomms_enabled") else UNKNOWN
    return {
        "requested": requested(),
        "importable": reason not in {MISSING, EMPTY, BROKEN},
        "effective": routed,
        "backends": sorted({type(backend).__name__ for backend in backends(world)}) if world is not None else [],
        "groups": state.groups,
        "groups_effective": state.routed,
        "options_lost": sorted(state.lost),
        "reason": reason,
        "why": why or None,
    }


# -- on ranks: what torch leaves out -------------------------------------------------------------------------------------

# NCCL's options as torch spells them, and the hints that torchcomms reads.
SAME = ("blocking", "cga_cluster_size", "collnet_enable", "cta_policy", "max_ctas", "min_ctas", "nvls_ctas")
CONFIG_HINTS = {"net_name": "netName", **{name: name for name in (*SAME, "split_share", "traffic_class")}}
# What torch itself sets in options for its own use, and the timeout, which goes another way.
TORCHS_OWN = {"_timeout", "backend", "config", "global_ranks_in_group", "group_name", "split_color", "split_from"}
HIGH_PRIORITY = "is_high_priority_stream"
DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class Making(NamedTuple):
    rank: int
    size: int
    hints: dict[str, str]
    timeout: Any


_making: list[Making] = []  # the last one is made now


def install() -> None:
    """Put in what torch leaves out. Without the flag, or where torch cannot route, nothing is touched; repeating it changes nothing."""
    module = c10d()
    if not requested() or state.installed or not hasattr(module, "new_comm"):
        return
    state.installed = True
    module.new_comm = functools.wraps(module.new_comm)(functools.partial(new_comm, module.new_comm))
    module._new_process_group_helper = _helper(module._new_process_group_helper)
    if hasattr(module, "_new_group_via_split_group"):
        module._new_group_via_split_group = new_group
    module.logger.addFilter(said_already)


def said_already(record: logging.LogRecord) -> bool:
    """torch warns with every group that it routes; a lab makes hundreds, and has it in its records."""
    return not str(record.msg).startswith("Using TorchComms backend")


def new_comm(plain: Any, backend: str, device: Any, *args: Any, **kwargs: Any) -> Any:
    """A communicator with the rank, size, options and timeout of the group that is made now, on this rank's own GPU."""
    if not _making:
        return plain(backend, device, *args, **kwargs)
    import torch

    making = _making[-1]
    more = {} if backend == "gloo" else making.hints
    kwargs = {**kwargs, "hints": {**(kwargs.get("hints") or {}), **more}, "timeout": making.timeout}
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        # torchcomms would take the GPU that has the number of the rank in its group.
        device = torch.device("cuda", torch.cuda.current_device())
    with seeded(making.rank, making.size):
        return plain(backend, device, *args, **kwargs)


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


def qualified(backend: str) -> str:
    """A backend with the device it is for: `gloo` alone is also taken for GPUs, which torchcomms' gloo cannot reach."""
    return f"{DEVICES[backend]}:{backend}" if backend in DEVICES else backend


def _helper(plain: Any) -> Any:
    """torch's maker of groups: passes on which group is made, and flushes a new WORLD."""
    signature, module = inspect.signature(plain), c10d()

    @functools.wraps(plain)
    def helper(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        asked, options, timeout, device = (given[n] for n in ("backend", "backend_options", "timeout", "device_id"))
        backend = qualified(str(asked))
        devices = {pair.partition(":")[0] for pair in backend.split(",")}
        given["backend"] = module.Backend(backend)
        if device is not None and device.type not in devices:
            given["device_id"] = None  # torch would look for a backend of a device that this group is not for
        hints, lost = ({}, set()) if backend == "cpu:gloo" else hints_of(options)
        _making.append(Making(given["group_rank"], given["group_size"], hints, timeout))
        try:
            made = plain(*call.args, **call.kwargs)
        finally:
            _making.pop()
        # torch finalizes what is in this list once more with WORLD, which torchcomms refuses; the group itself keeps its communicator.
        module._world.comms.clear()
        group = made[0]
        if isinstance(group, module.ProcessGroup):
            if backend != str(asked):
                group._set_default_backend(module.Backend.backend_type_map[str(asked)])
                module._world.pg_map[group] = (asked, made[1])  # by which name it is known
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
    import torch

    options = c10d().BarrierOptions()
    options.device = torch.device("cpu") if device is None else device
    if device is not None:
        options.device_ids = [device.index]
    group.barrier(options).wait()


def new_group(*, pg_options: Any, **asked: Any) -> Any:
    """In the place of torch's way to split WORLD's communicator."""
    return c10d()._new_group_with_tag(backend_options=pg_options, **asked)


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
    """The fields of one that differ from the defaults."""
    values = {name: getattr(one, name) for name in dir(one) if not name.startswith("_")}
    return {
        name: value for name, value in values.items() if not callable(value) and value != getattr(plain, name, None)
    }


def probe() -> dict[str, Any]:
    """For doctor: requested, importable, and where both are, whether a group of one rank really is routed; touches no GPU."""
    reason, why = unimportable()
    found: dict[str, Any] = {"requested": requested(), "importable": not reason, "effective": None, "why": why or None}
    if not found["requested"] or reason:
        return found
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    try:
        install()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        described = describe()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - what it raises is the answer
        return {**found, "effective": False, "why": f"a group cannot be made ({type(error).__name__}: {error})"}
    return {**found, "effective": described["effective"], "why": described["why"]}
