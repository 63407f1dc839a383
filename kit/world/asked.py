"""Checks of what a World is asked to do, before any rank starts or is called. Each problem is one sentence."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import machine
from kit.errors import BadInput
from kit.target import is_target
from kit.world.crew import CREWS

RANK_BYTES = 300 * 2**20  # with torch loaded and one group: about 250 MiB resident, of which the fork shares part
RANK_TASKS = 24  # threads of a rank over gloo
MOST_PER_CORE = 16


def check_layout(ranks: int, nodes: int, endpoint: str) -> None:
    for name, value in (("ranks", ranks), ("nodes", nodes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{name} must be a whole number of at least 1, not {value!r}")
    if ranks % nodes:
        raise BadInput(f"{ranks} ranks cannot be spread evenly over {nodes} nodes; give a multiple of {nodes}")
    host, colon, port = endpoint.rpartition(":")
    if nodes > 1 and not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise BadInput(
            f"{nodes} nodes need endpoint='host:port' with a port of this machine that the others reach, not {endpoint!r}"
        )
    if nodes == 1 and endpoint:
        raise BadInput("endpoint= is for several nodes; leave it out, or give nodes=2 or more")
    check_ranks(ranks // nodes)


def check_ranks(count: int) -> None:
    """Refuse more ranks than this machine, or its control group, can carry; the error has the arithmetic."""
    free, cores = machine.free_memory(), len(os.sched_getaffinity(0))
    live = sum(len(crew.members) for crew in CREWS if crew.agents and not crew.inherited)
    if live + count > MOST_PER_CORE * cores:
        beside = f" beside {live} in other Worlds" if live else ""
        raise BadInput(
            f"{count} ranks{beside} on this machine's {cores} cores: at most {MOST_PER_CORE * cores} ({MOST_PER_CORE} a core)"
        )
    if count * RANK_BYTES > free:
        raise BadInput(
            f"{count} ranks need about {count * RANK_BYTES / 2**30:.1f} GiB ({RANK_BYTES >> 20} MiB each) and "
            f"{free / 2**30:.1f} GiB are free; at most {max(0, free // RANK_BYTES)} fit"
        )
    for who, tasks in (("container", machine.cgroup_limit("pids")), ("user (ulimit -u)", machine.user_limit())):
        if tasks.maximum is not None and count * RANK_TASKS > (left := tasks.maximum - (tasks.used or 0)):
            raise BadInput(
                f"{count} ranks need about {count * RANK_TASKS} processes and threads and this {who} may start {left} more "
                f"({tasks.used} of {tasks.maximum} are in use)"
            )


def check_chosen(ranks: Sequence[int] | None, everyone: range) -> list[int]:
    if ranks is None:
        return list(everyone)
    asked = list(ranks) if isinstance(ranks, Iterable) else []
    wrong = [r for r in asked if isinstance(r, bool) or not isinstance(r, int) or r not in everyone]
    if wrong or not asked:
        raise BadInput(f"ranks must be a list of some of {everyone.start} to {everyone.stop - 1}, not {ranks!r}")
    return sorted(set(asked))


def check_call(target: str, args: Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of `package.module:function` and its arguments, from `args` or from keywords, if they can be sent."""
    if not is_target(target):
        raise BadInput(f"a function is named 'package.module:function', not {target!r}")
    if args is not None and keywords:
        raise BadInput(f"give arguments in args= or as keywords, not both; keywords given: {', '.join(keywords)}")
    if args is not None and not (isinstance(args, Mapping) and all(isinstance(name, str) for name in args)):
        raise BadInput(f"args must map parameter names to values, not {args!r}")
    arguments = dict(keywords if args is None else args)
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise BadInput(f"arguments for ranks must be JSON values: {error}") from None
    return target.partition(":")[2], arguments


def check_devices(devices: Sequence[int], ranks: int) -> tuple[int, ...]:
    """A GPU number per rank; none leaves the choice to the ranks."""
    found: tuple[Any, ...] = tuple(devices) if isinstance(devices, Iterable) else (devices,)
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found):
        raise BadInput(f"devices must be a list of GPU numbers from 0 on, one per rank, not {devices!r}")
    if found and len(found) != ranks:
        raise BadInput(f"devices={list(found)} names {len(found)} GPUs for {ranks} ranks; give one number per rank")
    return found


def check_seconds(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise BadInput(f"{name} must be a number of seconds above 0, not {value!r}")


def check_code(code: str, mode: str) -> int:
    """Report a typo here, before any rank sees it. The cell's number: the same for the same code, on all ranks."""
    if not isinstance(code, str):
        raise BadInput(f"code for the ranks is text, not {code!r}; call() runs a function by its name")
    return _numbered(code, mode)


@functools.lru_cache(maxsize=256)
def _numbered(code: str, mode: str) -> int:
    compile(code, "<ranks>", mode)
    return next(_numbers)


_numbers = itertools.count(1)


def check_preload(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise BadInput(f"preload is a list of modules' names, not {names!r}")
    return tuple(names)


def check_env(env: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise BadInput(f"env must map names to strings; {env!r} does not")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise BadInput(f"env must map names to strings; {name!r}: {value!r} does not")
    return dict(env)


def writable_folder(logs: str | os.PathLike[str]) -> Path:
    """The logs' folder, made and tried."""
    path = Path(logs).resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"the folder for logs {path} cannot be written: {error.strerror}; give another one") from None
    return path
