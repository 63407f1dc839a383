"""What a World is asked for: checks before any rank starts or is called (each problem is one sentence), its plan, its Python."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kit import machine
from kit.errors import BadInput, how_ended
from kit.target import is_target
from kit.tls import check_openssl
from kit.world.launch import RAY, TORCHRUN

RANK_BYTES = 300 * 2**20  # with torch loaded and one group: about 250 MiB resident, of which the fork shares part
RANK_TASKS = 24  # threads of a rank over gloo
MOST_PER_CORE = 16
MOST_RANKS = 1_000_000
ENGINES = (TORCHRUN, RAY)
MOST_SECONDS = 2_000_000  # 23 days; the kernel's waits overflow after 24
CREWS: weakref.WeakSet[Any] = weakref.WeakSet()  # every `Crew` of this process


def check_layout(ranks: int, nodes: int, endpoint: str) -> None:
    check_count("ranks", ranks)
    check_count("nodes", nodes)
    if ranks % nodes:
        raise BadInput(f"{ranks} ranks cannot be spread evenly over {nodes} nodes; give a multiple of {nodes}")
    check_endpoint(nodes, endpoint)
    check_ranks(ranks // nodes)


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"{name} must be a whole number of at least 1, not {value!r}")
    if value > MOST_RANKS:
        raise BadInput(f"{name} must be at most {MOST_RANKS}, not {_spelled(value)}")


def check_endpoint(nodes: int, endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    if nodes > 1 and not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise BadInput(
            f"{nodes} nodes need endpoint='host:port' with a port of this machine that the others reach, not {endpoint!r}"
        )
    if nodes > 1:
        check_openssl()
        check_host(host.strip("[]"))
    if nodes == 1 and endpoint:
        raise BadInput("endpoint= is for several nodes; leave it out, or give nodes=2 or more")


def check_worlds(sizes: Sequence[int], nodes: int, endpoint: str, on: Sequence[int] = ()) -> None:
    """Several Worlds, each of them on one machine: see `spread`."""
    for size in sizes:
        check_layout(size, 1, "")
    check_count("nodes", nodes)
    if nodes > len(sizes):
        raise BadInput(
            f"nodes={nodes} exceeds the {len(sizes)} Worlds, each of which is on one machine; use at most {len(sizes)}"
        )
    check_endpoint(nodes, endpoint)
    check_ranks(max(part.neighbours for part in spread(sizes, nodes, on)))


def check_host(host: str) -> None:
    """The host of an endpoint must be an address of this machine, because the notebook listens there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"endpoint= names {host!r}, where this machine cannot listen: {why}") from None


class RankLimit(NamedTuple):
    """How many more ranks a part of this machine can carry, and the sentence for a number above that."""

    most: int
    why: str


def rank_limits(count: int) -> list[RankLimit]:
    """The limits of cores, memory and tasks; their sentences are about `count` ranks."""
    free, cores = machine.free_memory(), len(os.sched_getaffinity(0))
    live = sum(len(crew.members) for crew in CREWS if crew.agents and not crew.inherited)
    beside = f" beside {live} in other Worlds" if live else ""
    per_core = f"{count} ranks{beside} on this machine's {cores} cores: at most {MOST_PER_CORE * cores} ({MOST_PER_CORE} a core)"
    limits = [RankLimit(MOST_PER_CORE * cores - live, per_core)]

    fit = max(0, free // RANK_BYTES)
    memory = (
        f"{count} ranks need about {count * RANK_BYTES / 2**30:.1f} GiB ({RANK_BYTES >> 20} MiB each) and "
        f"{free / 2**30:.1f} GiB are free; at most {fit} fit"
    )
    limits.append(RankLimit(fit, memory))

    for who, tasks in (("container", machine.cgroup_limit("pids")), ("user (ulimit -u)", machine.user_limit())):
        if tasks.maximum is None:
            continue
        left = tasks.maximum - (tasks.used or 0)
        why = (
            f"{count} ranks need about {count * RANK_TASKS} processes and threads and this {who} may start {left} more "
            f"({tasks.used} of {tasks.maximum} are in use)"
        )
        limits.append(RankLimit(left // RANK_TASKS, why))
    return limits


def check_ranks(count: int) -> None:
    """Refuse more ranks than this machine, or its control group, can carry; the error has the arithmetic."""
    if too_many := [limit.why for limit in rank_limits(count) if count > limit.most]:
        raise BadInput(too_many[0])


def check_chosen(ranks: Sequence[int] | None, everyone: range) -> list[int]:
    if ranks is None:
        return list(everyone)
    asked = list(ranks) if isinstance(ranks, Iterable) else []
    wrong = [r for r in asked if isinstance(r, bool) or not isinstance(r, int) or r not in everyone]
    if wrong or not asked:
        raise BadInput(f"ranks must be a list of some of {everyone.start} to {everyone.stop - 1}, not {ranks!r}")
    return sorted(set(asked))


def check_call(target: str, args: Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The function's name in `package.module:function`, and the request, with arguments from `args` or from keywords."""
    if not is_target(target):
        raise BadInput(f"a function is named 'package.module:function', not {target!r}")
    if args is not None and keywords:
        raise BadInput(f"give arguments in args= or as keywords, not both; keywords given: {', '.join(keywords)}")
    if args is not None and not (isinstance(args, Mapping) and all(isinstance(name, str) for name in args)):
        raise BadInput(f"args must map parameter names to values, not {args!r}")
    arguments = dict(keywords if args is None else args)
    try:
        json.dumps(arguments)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"arguments for ranks must be JSON values: {error}") from None
    return target.partition(":")[2], {"do": "call", "target": target, "with": arguments}


def check_engine(engine: str, nodes: int, python: str | None) -> None:
    """Refuse an engine that is unknown, or that the ranks' Python lacks; `python` as a person gave it."""
    if engine not in ENGINES:
        raise BadInput(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    if engine != RAY:
        return
    if nodes > 1:
        raise BadInput(
            f"engine='ray' starts ranks on this machine, and nodes={nodes}; use launch='ray', by which torchrun runs on the others"
        )
    path = find_python(python or None).path
    if not has_ray(path):
        raise BadInput(f"engine='ray' needs Ray in the ranks' Python: {path} -m pip install ray")


@functools.lru_cache(maxsize=64)
def has_ray(python: str) -> bool:
    if python == sys.executable:
        return has_module("ray")
    printed, _ = run_python(python, f"{inspect.getsource(has_module)}\nprint(has_module('ray'))", timeout_s=30)
    return printed.strip() == "True"


def check_gpu_numbers(devices: Sequence[int], ranks: int) -> tuple[int, ...]:
    """A GPU number per rank; none leaves the choice to the ranks."""
    numbers: tuple[Any, ...] = tuple(devices) if isinstance(devices, Iterable) else (devices,)
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise BadInput(f"devices must be a list of GPU numbers from 0 on, one per rank, not {devices!r}")
    if numbers and len(numbers) != ranks:
        raise BadInput(f"devices={list(numbers)} names {len(numbers)} GPUs for {ranks} ranks; give one number per rank")
    return numbers


def check_seconds(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_SECONDS:
        raise BadInput(f"{name} must be a number of seconds above 0 and at most {MOST_SECONDS}, not {_spelled(value)}")


def _spelled(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        return "a number with thousands of digits"


def check_code(do: str, code: str) -> dict[str, Any]:
    """The request. A typo is reported here, before any rank sees it."""
    if not isinstance(code, str):
        raise BadInput(f"code for the ranks is text, not {code!r}; call() runs a function by its name")
    return {"do": do, "code": code, "cell": _cell_number(do, code)}


@functools.lru_cache(maxsize=256)
def _cell_number(do: str, code: str) -> int:
    """The cell's number: the same for the same code, on all ranks."""
    compile(code, "<ranks>", "exec" if do == "run" else do)
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
    if not isinstance(logs, str | os.PathLike) or not os.fspath(logs):
        raise BadInput(f"logs must be the path of a folder, not {logs!r}")
    path = Path(logs).resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"the folder for logs {path} cannot be written: {error.strerror}; give another one") from None
    return path


# -- which Python the ranks run in: the one asked for, or the first on the box that has torch and megatron.core --------

HOMES = ("/opt", "/venv", "/workspace", "~")  # where images and people put environments
# NeMo-RL has an environment for each kind of worker; the trainer's has Megatron.
INSIDE = ("", ".venv", "venv", "*", "*/.venv", "*/venv", "*/envs/*", "ray_venvs/*MegatronPolicyWorker*")


def has_module(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# What `probe_python` asks another interpreter, which may have no kit.
PROBE = f"""
{inspect.getsource(has_module)}
import json, sys
print(json.dumps([has_module("torch"), has_module("megatron.core"), list(sys.version_info[:2])]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """One candidate and what it has. `where`: how it was found."""

    path: str
    where: str
    torch: bool = False
    megatron: bool = False
    problem: str = ""

    def verdict(self) -> str:
        if self.problem:
            return self.problem
        if not self.torch:
            return "has no torch"
        return "has torch and megatron.core" if self.megatron else "has torch, but no megatron.core"


def candidates() -> list[tuple[str, str]]:
    """(path, where it comes from) in the order of the search, each once."""
    candidates = [(sys.executable, "this interpreter")]
    roots = [(name, os.environ.get(name)) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    candidates += [(f"{root}/bin/python", name) for name, root in roots if root]
    candidates += [(path, f"{name} on PATH") for name in ("python3", "python") if (path := shutil.which(name))]
    for home in HOMES:
        for inside in INSIDE:
            paths = sorted(Path(home).expanduser().glob(f"{inside}/bin/python".removeprefix("/")))
            candidates += [(str(path), f"found under {home}") for path in paths]
    # Backwards, so that of equal paths the first counts.
    places = {path: (path, reason) for path, reason in candidates[::-1] if Path(path).exists()}
    return [places[path] for path in dict.fromkeys(path for path, _ in candidates) if path in places]


@functools.lru_cache(maxsize=64)
def probe_python(path: str, where: str) -> Interpreter:
    """What an interpreter has, without importing any of it."""
    if path == sys.executable:
        return Interpreter(path=path, where=where, torch=has_module("torch"), megatron=has_module("megatron.core"))
    printed, why = run_python(path, PROBE, timeout_s=30)
    if why:
        return Interpreter(path=path, where=where, problem=no_python(path) or f"does not run: {why}")
    try:
        torch, megatron, (major, minor) = json.loads(printed)
    except ValueError:
        return Interpreter(path=path, where=where, problem=no_python(path) or "does not behave like a Python")
    if (major, minor) < (3, 11):
        return Interpreter(path=path, where=where, problem=f"is Python {major}.{minor}; 3.11 or newer is needed")
    return Interpreter(path=path, where=where, torch=torch, megatron=megatron)


@functools.lru_cache(maxsize=64)
def python_has(path: str, module: str) -> bool:
    """Whether an interpreter has a module, without importing it."""
    if path == sys.executable:
        return has_module(module)
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return run_python(path, find, timeout_s=30)[1] == ""


def run_python(
    path: str, code: str, *arguments: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Run code in an interpreter. Returns what it printed and "", or "" and why it failed: the last line of its complaint."""
    command = [path, "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
    except subprocess.TimeoutExpired:
        return "", f"it did not answer within {timeout_s:g} s"
    except OSError as error:
        return "", error.strerror or str(error)
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"it {how_ended(done.returncode)}"])[-1]
    return done.stdout, ""


def no_python(path: str) -> str:
    """That it is no Python, where it does not answer -V like one; its answer to anything else may only quote the question."""
    try:
        done = subprocess.run([path, "-V"], capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.stdout.startswith("Python "):
        return ""
    answer = (done.stderr.strip() or done.stdout.strip()).partition("\n")[0]
    return f"is no Python: it answers -V with {answer}" if answer else "is no Python"


def find_python(python: str | None = None) -> Interpreter:
    """The ranks' interpreter. An explicit wish that cannot be met is an error, never replaced by another one."""
    if not isinstance(python, str | None):
        raise BadInput(f"python must be the path of a Python, not {python!r}")
    for path, reason in ((python, "python="), (os.environ.get("KIT_PYTHON"), "KIT_PYTHON")):
        if path:
            chosen = probe_python(shutil.which(path) or path, reason)
            if not chosen.torch:
                raise BadInput(
                    f"{reason} names {path}, which {chosen.verdict()}; give a Python 3.11 or newer that has torch"
                )
            return chosen
    seen: list[Interpreter] = []
    for interpreter in search_pythons():
        if interpreter.torch and interpreter.megatron:
            return interpreter
        seen.append(interpreter)
    if with_torch := [interpreter for interpreter in seen if interpreter.torch]:
        return with_torch[0]
    tried = "; ".join(f"{interpreter.path} {interpreter.verdict()}" for interpreter in seen)
    raise BadInput(f"no Python with torch was found for the ranks ({tried}); give one with python= or KIT_PYTHON")


def search_pythons() -> Iterator[Interpreter]:
    """Every candidate with its verdict, in the order of the search; a candidate is probed when its turn comes."""
    if wished := os.environ.get("KIT_PYTHON"):
        yield probe_python(shutil.which(wished) or wished, "KIT_PYTHON")
    for path, reason in candidates():
        yield probe_python(path, reason)


# Settings of the notebook's process that would mislead the ranks: its plotting backend, its test, and a job it may itself be part of.
NOT_INHERITED = {"MPLBACKEND", "PYTHONHOME", "PYTEST_CURRENT_TEST", machine.MARK}
NOT_INHERITED |= {
    "KIT_RANK",
    "KIT_FOLDER",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def agent_environment(neighbours: int, nodes: int = 1, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a World's processes on this machine, where `neighbours` ranks work; without the mark."""
    defaults = machine.defaults_of_ranks(neighbours)
    if nodes == 1:  # nothing listens beyond this machine
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return {**defaults, **env, **(given or {})}


# -- what a World is to start, all of it checked ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodePart:
    """The place of a World among several. Its ranks' numbers begin at `first`. It is on machine number `machine` of `machines`, where 0 is
    the notebook's own, together with ranks of other Worlds: `before` of earlier ones, `neighbours` with its own."""

    first: int
    before: int
    neighbours: int
    machine: int = 0
    machines: int = 1


def spread(sizes: Sequence[int], machines: int, on: Sequence[int] = ()) -> list[NodePart]:
    """Worlds of these sizes `on` these machines; without it on all in turn, the first one on the notebook's."""
    on = on or [number % machines for number in range(len(sizes))]
    return [
        NodePart(
            first=sum(sizes[:number]),
            before=sum(size for at, size in zip(on[:number], sizes, strict=False) if at == machine),
            neighbours=sum(size for at, size in zip(on, sizes, strict=True) if at == machine),
            machine=machine,
            machines=machines,
        )
        for number, machine in enumerate(on)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldPlan:
    ranks: int
    nodes: int
    endpoint: str
    launch: tuple[str, ...]  # the command for each other machine; none: a person starts the agents
    engine: str  # what starts the ranks
    device: str
    python: Interpreter
    env: Mapping[str, str]
    preload: Sequence[str]
    logs: Path | None
    start_timeout_s: float
    group_timeout_s: float
    part: NodePart
    devices: tuple[int, ...] = ()
    asynchronous: bool = False  # each rank is an asynchronous actor of Ray

    @property
    def numbers(self) -> range:
        return range(self.part.first, self.part.first + self.ranks)

    @property
    def host(self) -> str:
        """This machine's address that other machines reach; empty with one."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def machines(self) -> range:
        """Where its ranks are."""
        return range(self.nodes) if self.nodes > 1 else range(self.part.machine, self.part.machine + 1)

    @property
    def job_machines(self) -> int:
        """How many machines it and the Worlds beside it are on."""
        return max(self.nodes, self.part.machines)

    @property
    def is_remote(self) -> bool:
        """Whether agents on other machines call the notebook."""
        return self.machines != range(1)
