"""Which Python the ranks run in: the one asked for, or the first on the box that has torch and megatron.core."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kit.errors import BadInput

HOMES = ("/opt", "/venv", "/workspace", "~")  # where images and people put environments
PROBE = """
import importlib.util as u, json, sys
def has(name):
    try:
        return u.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(json.dumps([has("torch"), has("megatron.core"), list(sys.version_info[:2])]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """One candidate and what it has. `where` says how it was found."""

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
    found = [(sys.executable, "this interpreter")]
    roots = [(name, os.environ.get(name)) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    found += [(f"{root}/bin/python", name) for name, root in roots if root]
    found += [(path, f"{name} on PATH") for name in ("python3", "python") if (path := shutil.which(name))]
    for home in HOMES:
        for inside in ("", ".venv", "venv", "*", "*/.venv", "*/venv", "*/envs/*"):
            places = sorted(Path(home).expanduser().glob(f"{inside}/bin/python".removeprefix("/")))
            found += [(str(path), f"found under {home}") for path in places]
    unique: dict[str, tuple[str, str]] = {}
    for path, where in found:
        if Path(path).exists():
            unique.setdefault(path, (path, where))
    return list(unique.values())


@functools.lru_cache(maxsize=64)
def probe(path: str, where: str) -> Interpreter:
    """What an interpreter has, without importing any of it."""
    if path == sys.executable:
        return Interpreter(path=path, where=where, torch=has("torch"), megatron=has("megatron.core"))
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=30, check=True)
        torch, megatron, (major, minor) = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"it exits with status {error.returncode}"])[-1]
        problem = no_python(path) or f"does not run: {said}"
    except subprocess.TimeoutExpired:
        problem = "does not answer within 30 s"
    except OSError as error:
        problem = f"does not run: {error.strerror}"
    except ValueError:
        problem = no_python(path) or "does not behave like a Python"
    else:
        if (major, minor) >= (3, 11):
            return Interpreter(path=path, where=where, torch=torch, megatron=megatron)
        problem = f"is Python {major}.{minor}; 3.11 or newer is needed"
    return Interpreter(path=path, where=where, problem=problem)


def no_python(path: str) -> str:
    """That it is none, where it cannot tell the version of one; what else it was asked it may only have quoted."""
    try:
        done = subprocess.run([path, "-V"], capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "is no Python"
    if done.stdout.startswith("Python "):
        return ""
    said = (done.stderr.strip() or done.stdout.strip()).partition("\n")[0]
    return f"is no Python: to -V it says {said}" if said else "is no Python"


def has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def find(python: str | None = None) -> Interpreter:
    """The ranks' interpreter. An explicit wish that cannot be met is an error, never replaced by another one."""
    for path, where in ((python, "python="), (os.environ.get("KIT_PYTHON"), "KIT_PYTHON")):
        if path:
            resolved = shutil.which(path) or path
            chosen = probe(resolved, where)
            if not chosen.torch:
                raise BadInput(
                    f"{where} names {path}, which {chosen.verdict()}; give a Python 3.11 or newer that has torch"
                )
            return chosen
    seen: list[Interpreter] = []
    for path, where in candidates():
        found = probe(path, where)
        if found.torch and found.megatron:
            return found
        seen.append(found)
    for found in seen:
        if found.torch:
            return found
    tried = "; ".join(f"{found.path} {found.verdict()}" for found in seen)
    raise BadInput(f"no Python with torch was found for the ranks ({tried}); give one with python= or KIT_PYTHON")


def search() -> list[Interpreter]:
    """Every candidate with its verdict, in the order of the search; for `kit doctor`."""
    wished = os.environ.get("KIT_PYTHON")
    first = [probe(shutil.which(wished) or wished, "KIT_PYTHON")] if wished else []
    return first + [probe(path, where) for path, where in candidates()]
