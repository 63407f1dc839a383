"""Whether torch routes collectives through torchcomms: asked for, importable, and in effect.

torch takes torchcomms where that can be imported and `TORCH_DISTRIBUTED_USE_TORCHCOMMS=1` is set; where it cannot, the flag is silently
nothing. So it is the groups' backend objects that say whether it is in effect. What ranks do for it is in `kit.world.routing`.

Every room may use it. Has run with a stand-in for torchcomms only, over gloo: nothing of it has run on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

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

    undo: Callable[[], None] | None = None
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
    except Exception as error:  # noqa: BLE001 - told as it is
        why = f"torchcomms {found} cannot be imported ({type(error).__name__}: {error})"
        if found == PLACEHOLDER:
            return EMPTY, f"{why}: it is the package index's placeholder"
        return BROKEN, why
    return "", ""


def what_torch_imports() -> None:
    """The names that torch needs to route; the first that is not there raises."""
    try:
        import_module("torchcomms._comms")._BackendWrapper  # noqa: B018 - looked for, not used
    except ImportError:
        import_module("torchcomms._backend_wrapper")._BackendWrapper  # noqa: B018
    import_module("torchcomms").new_comm  # noqa: B018
    import_module("torchcomms.hooks").FlightRecorderHook  # noqa: B018


def settings(group: Any) -> Any:
    """Timeout and NCCL options that a routed group was made with: its backend object does not tell them. None for any other group."""
    return state.settings.get(group.group_name)


def backends(group: Any) -> list[Any]:
    import torch

    return [group._get_backend(torch.device(device)) for device in group._device_types]


def is_routed(group: Any) -> bool:
    """Whether all of a group goes through torchcomms: asked of its backend objects."""
    import torch.distributed.distributed_c10d as c10d

    wrapper = getattr(c10d, "_BackendWrapper", None)
    return wrapper is not None and all(isinstance(backend, wrapper) for backend in backends(group))


def effective() -> bool:
    """Whether WORLD goes through torchcomms. Imports nothing of it."""
    import torch.distributed.distributed_c10d as module

    c10d: Any = module
    world = c10d._world.default_pg
    return world is not None and is_routed(world)


def describe() -> dict[str, Any]:
    """Requested, importable, and in effect for WORLD; how many groups were made since, how many of them are routed, what was lost."""
    import torch.distributed.distributed_c10d as module

    c10d: Any = module
    reason, why = unimportable()
    world = c10d._world.default_pg
    routed = effective()
    if not reason and not routed:
        reason = IGNORED if hasattr(c10d, "_use_torchcomms_enabled") else UNKNOWN
        why = reason
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
