"""Collectives beside torch's own way: through torchcomms, or through torch's backend `nccl2`. Whether they can be had, are requested, are
in effect; and what ranks do for them beyond torch.

**torchcomms.** torch takes it where it can be imported and `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` is set; otherwise torch ignores the flag
without a message. Whether it is in effect is read from the groups' backend objects. torch makes communicators by `new_comm` and passes
neither the group's rank and size (torchcomms then reads the environment, which describes the whole job), nor the number of the GPU, the
timeout or NCCL's options, which torchcomms would take as hints. `install` puts all of them in, around torch's own functions. Groups are
made by torch's `_new_process_group_helper` as without routing, each with its own communicator: torch's way with torchcomms, to split
WORLD's, takes no options, and on GPUs makes no gloo groups. Has run with a stand-in for torchcomms only, over gloo.

**nccl2** is `torch.distributed.ProcessGroupNCCL2`, in builds after 2.13. Under a bound default group every rank of the World takes part
when torch makes a communicator, also those outside of the group, which this backend's first builds cannot do in `new_group`
(pytorch/pytorch#192276). So groups are split off WORLD with `torch.distributed.split_group`, which makes all groups of a partition at once:
as many calls as Megatron has kinds of groups, and not as many as it has groups. A rehearsal, which makes no group, shows which groups are
requested. Groups over gloo are made by their members. Follows pytorch/pytorch#188587, #190943 and the routing of
NVIDIA/Megatron-LM#6227; no torch with this backend has run it.

Every room may use this module, and ranks do; it imports torch only where it is used. Nothing of it has run on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from kit.nccl import unbound

TORCHCOMMS, NCCL2 = "torchcomms", "nccl2"
FLAGS = {TORCHCOMMS: "TORCH_DISTRIBUTED_USE_TORCHCOMMS", NCCL2: "KIT_NCCL2"}  # in the environment of ranks
OVER_NCCL2 = f"cpu:gloo,cuda:{NCCL2}"


@dataclasses.dataclass(slots=True)
class Routed:
    """What a process knows of its groups through torchcomms: how many were made, how many of them are routed, and with which settings."""

    installed: bool = False
    groups: int = 0
    routed: int = 0
    lost: set[str] = dataclasses.field(default_factory=set)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


state = Routed()


def requested(name: str) -> bool:
    """Whether this process's flag is set; as for torch, any value but 0 sets it."""
    return os.environ.get(FLAGS[name], "") not in {"", "0"}


def missing(name: str) -> str:
    """Why this process cannot use a backend, in the words of the import that failed; empty if it can."""
    try:
        if name == TORCHCOMMS:
            import_torchcomms()
        else:
            import_module("torch.distributed").ProcessGroupNCCL2  # noqa: B018 - looked for, not used
    except Exception as error:  # noqa: BLE001 - reported as it is
        return f"{type(error).__name__}: {error}"
    return ""


def import_torchcomms() -> None:
    """The names that torch needs to route; the first missing one raises."""
    c10d()  # torch first: it looks for torchcomms while it loads
    try:
        import_module("torchcomms._comms")._BackendWrapper  # noqa: B018 - looked for, not used
    except ImportError:
        import_module("torchcomms._backend_wrapper")._BackendWrapper  # noqa: B018
    import_module("torchcomms").new_comm  # noqa: B018
    import_module("torchcomms.hooks").FlightRecorderHook  # noqa: B018


def is_routing(name: str) -> bool:
    """Whether the groups of this process are made through a backend. Imports nothing of it."""
    if name == NCCL2:
        return splits.plain is not None
    world = c10d()._world.default_pg
    return world is not None and is_routed(world)


def world_backend() -> str:
    """The backend of WORLD on a GPU."""
    return OVER_NCCL2 if requested(NCCL2) else "cpu:gloo,cuda:nccl"


def routing_status(name: str) -> dict[str, Any]:
    """Requested, importable, and in effect for WORLD; how many groups there are, how many of them are routed, which options were lost."""
    lacks = missing(name)
    if name == TORCHCOMMS:
        world, effective = c10d()._world.default_pg, is_routing(TORCHCOMMS)
        kinds = {type(backend).__name__ for backend in backends(world)} if world is not None else set()
        groups, routed, lost = state.groups, state.routed, sorted(state.lost)
        unused = "torch could route and did not"
        if not hasattr(c10d(), "_use_torchcomms_enabled"):
            unused = "the ranks' torch does not know torchcomms"
    else:
        on_gpus = {group: kind for group in c10d()._world.pg_map if (kind := kind_on_gpu(group))}
        effective = on_gpus.get(c10d()._world.default_pg) == "ProcessGroupNCCL2"
        kinds = set(on_gpus.values())
        groups, routed, lost = len(on_gpus), [*on_gpus.values()].count("ProcessGroupNCCL2"), []
        unused = "WORLD has no nccl2"
    reason = "" if effective else lacks or unused
    return {
        "requested": requested(name),
        "importable": not lacks,
        "effective": effective,
        "backends": sorted(kinds),
        "groups": groups,
        "groups_effective": routed,
        "options_lost": lost,
        "reason": reason,
        "why": reason or None,
    }


def probe() -> dict[str, Any]:
    """For doctor: whether torchcomms is requested and importable, and if both, whether a group of one rank is routed; touches no GPU."""
    lacks = missing(TORCHCOMMS)
    asked = requested(TORCHCOMMS)
    about: dict[str, Any] = {"requested": asked, "importable": not lacks, "effective": None, "why": lacks or None}
    if not asked or lacks:
        return about
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    try:
        install_routes()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        described = routing_status(TORCHCOMMS)
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - what it raises is the answer
        return {**about, "effective": False, "why": f"a group cannot be made ({type(error).__name__}: {error})"}
    return {**about, "effective": described["effective"], "why": described["why"]}


def c10d() -> Any:
    """torch's registry of groups and its helpers, which carry no types; loaded only where it is used."""
    return import_module("torch.distributed.distributed_c10d")


def install_routes() -> None:
    """Change torch's functions for the requested backends; without a flag nothing is touched. Repeating it changes nothing."""
    if requested(TORCHCOMMS) and not state.installed and hasattr(c10d(), "new_comm"):
        install_torchcomms()
    if requested(NCCL2) and splits.plain is None:
        install_nccl2()


# -- torchcomms: its groups ------------------------------------------------------------------------------------------------


def made_with(group: Any) -> Any:
    """Timeout and NCCL options that a routed group was made with: its backend object does not have them. None for any other group."""
    return state.settings.get(group.group_name)


def backends(group: Any) -> list[Any]:
    from torch import device

    return [group._get_backend(device(served)) for served in group._device_types]


def is_routed(group: Any) -> bool:
    """Whether all of a group goes through torchcomms: asked of its backend objects."""
    wrapper = getattr(c10d(), "_BackendWrapper", None)
    return wrapper is not None and all(isinstance(backend, wrapper) for backend in backends(group))


# -- torchcomms: what torch leaves out -------------------------------------------------------------------------------------

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


def install_torchcomms() -> None:
    """Put in what torch leaves out."""
    module = c10d()
    state.installed = True
    module.new_comm = functools.wraps(module.new_comm)(functools.partial(new_comm, module.new_comm))
    module._new_process_group_helper = _helper(module._new_process_group_helper)
    if hasattr(module, "_new_group_via_split_group"):
        module._new_group_via_split_group = new_group
    # torch warns with every group that it routes; a lab makes hundreds, and has it in its records.
    module.logger.addFilter(lambda record: not str(record.msg).startswith("Using TorchComms backend"))


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
    """Count the group, and set its timeout: a routed backend starts with another default."""
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


def changes(options: Any, plain: Any) -> dict[str, Any]:
    """The fields of options that differ from the defaults."""
    values = {name: getattr(options, name) for name in dir(options) if not name.startswith("_")}
    return {
        name: value for name, value in values.items() if not callable(value) and value != getattr(plain, name, None)
    }


# -- nccl2: groups split off WORLD -------------------------------------------------------------------------------------------

REHEARSED = object()  # stands for a group in a rehearsal


class GroupCall(NamedTuple):
    """One call of `new_group` for a group with a communicator. `how` are its settings, alike for all groups of a partition."""

    ranks: tuple[int, ...]
    how: tuple[Any, ...]


@dataclasses.dataclass
class Partition:
    """Groups that share no rank, made by one call."""

    groups: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    made: list[Any] = dataclasses.field(default_factory=list)  # this rank's group, once it is made

    def has_any(self, ranks: Sequence[int]) -> bool:
        return any(set(ranks) & set(group) for group in self.groups)


@dataclasses.dataclass
class Splits:
    """Of this process: the calls of a rehearsal that is under way, or the partitions that it found and the groups made of them."""

    plain: Any = None
    calls: list[GroupCall] | None = None
    expected: list[tuple[GroupCall, Partition]] = dataclasses.field(default_factory=list)


splits = Splits()


def partitions(calls: Sequence[GroupCall]) -> list[Partition]:
    """For each call the partition that its group is of: the first with the same settings and none of its ranks."""
    known: list[tuple[tuple[Any, ...], Partition]] = []
    of_calls = []
    for call in calls:
        partition = next((p for how, p in known if how == call.how and not p.has_any(call.ranks)), None)
        if partition is None:
            partition = Partition()
            known.append((call.how, partition))
        partition.groups.append(call.ranks)
        of_calls.append(partition)
    return of_calls


def install_nccl2() -> None:
    """Make groups by splitting WORLD from now on."""
    dist: Any = import_module("torch.distributed")
    module = c10d()
    splits.plain = module.new_group
    signature = inspect.signature(splits.plain)

    @functools.wraps(splits.plain)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return group_by_split(module, call.arguments)

    module.new_group = dist.new_group = new_group


def group_by_split(module: Any, given: dict[str, Any]) -> Any:
    ranks = tuple(range(module.get_world_size()) if given["ranks"] is None else sorted(given["ranks"]))
    mine = module.get_rank() in ranks
    backend = str(given["backend"] or OVER_NCCL2).lower()
    call = GroupCall(ranks, (backend, given["timeout"], given["pg_options"] is None, given["group_desc"]))
    if splits.calls is not None:
        if "nccl" in backend:
            splits.calls.append(call)
        return REHEARSED if mine else module.GroupMember.NON_GROUP_MEMBER
    if "nccl" not in backend:
        with unbound(module._get_default_group()):
            return splits.plain(**given)
    if splits.expected:
        expected, partition = splits.expected.pop(0)
        if expected != call:
            raise RuntimeError(
                f"a group of ranks {list(ranks)} was asked for where {list(expected.ranks)} was rehearsed"
            )
    else:
        (partition,) = partitions([call])
    if not partition.made:
        group = module.split_group(
            split_ranks=[list(ranks) for ranks in partition.groups],
            timeout=given["timeout"],
            pg_options=given["pg_options"],
            group_desc=given["group_desc"],
            # A group that was asked for without a backend has WORLD's, for the host as well.
            backend=None if backend == OVER_NCCL2 else f"cuda:{NCCL2}",
        )
        partition.made.append(group)
    return partition.made[0] if mine else module.GroupMember.NON_GROUP_MEMBER


def planned(act: Callable[[], None], undo: Callable[[], None]) -> None:
    """Run what makes groups, such that each partition is one split: once as a rehearsal, which `undo` takes back, and once for real."""
    splits.calls = []
    try:
        act()
    finally:
        calls, splits.calls = splits.calls, None
        undo()
    splits.expected = list(zip(calls, partitions(calls), strict=True))
    try:
        act()
    finally:
        splits.expected = []


def kind_on_gpu(group: Any) -> str:
    """The type of a group's backend on GPUs; empty if it has none."""
    devices = {getattr(device, "type", str(device)): device for device in group._device_types}
    return type(group._get_backend(devices["cuda"])).__name__ if "cuda" in devices else ""
