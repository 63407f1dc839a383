"""`kit doctor`: what this box can and cannot do, and why. It runs the ranks' interpreter in a subprocess and does not load torch."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kit import machine
from kit.errors import BadInput
from kit.measure.recorder import git_state, gpu_state
from kit.results import runs_dir
from kit.results.units import size
from kit.world import asked, leftovers

# Runs in the ranks' interpreter, which may not have the kit.
PROBE = """
import contextlib, importlib, importlib.metadata, importlib.util, json, runpy, sys
if importlib.util.find_spec("kit") is None:
    runpy.run_path(sys.argv[1])["make_kit_importable"]()
def imported(module, package):
    try:
        importlib.import_module(module)
        return importlib.metadata.version(package), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
def code_for_gpus(torch, running):
    from kit import machine, nccl
    built_for = torch.cuda.get_arch_list()
    found = sorted({torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())})
    return [
        {
            "gpu": "sm_{}{}".format(*one),
            "built_for": built_for,
            "torch": machine.runs_on_gpu(built_for, one),
            "nccl_why": nccl.no_code(running, torch.version.cuda, one),
        }
        for one in found
    ]
with contextlib.redirect_stdout(sys.stderr):
    facts = {"python": sys.version.partition(" ")[0]}
    for module, package in (("torch", "torch"), ("numpy", "numpy"), ("megatron.core", "megatron-core")):
        facts[module], facts[module + "_why"] = imported(module, package)
    if facts["torch"]:
        import torch
        from kit import nccl, routing
        from kit.measure.recorder import cuda_state, findings
        from kit.world.device import choose
        device, why, _ = choose("auto", 0, 1)
        count = torch.cuda.device_count()
        facts.update(cuda_state(), device=device.type, device_why=why, gpus=count)
        facts["torch"] = torch.__version__
        running = nccl.running()
        shared = nccl.sharing(running, 0)
        facts["suspend_why"] = nccl.no_suspend(running, torch.__version__, gpus=count) or None
        facts["shared_gpus"] = shared and shared.words
        pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
        facts["no_peer_access"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        facts["findings"] = [one._asdict() for one in findings()] if torch.version.cuda else []  # elsewhere none of it runs
        facts["torchcomms"] = routing.probe()
        facts["nccl2"] = not routing.missing(routing.NCCL2)
        facts["code"] = code_for_gpus(torch, running) if torch.version.cuda else []
print(json.dumps(facts))
"""
Found = dict[str, Any]
LEAST_RANKS = 2  # of a lab
ANSWERS_S = 120.0  # time limit for the ranks' Python to import torch and Megatron


def examine() -> Found:
    """All findings as JSON values. `problems` has a sentence for each problem that prevents labs from running."""
    problems: list[str] = []
    interpreters, ranks = ask_interpreters(problems)
    runs = ask_runs(problems)
    limits = asked.rank_limits(LEAST_RANKS)
    problems += [limit.why for limit in limits if limit.most < LEAST_RANKS]
    return {
        "problems": problems,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "interpreters": interpreters,
        "ranks": ranks,
        "gpu": gpu_state(),
        "cores": {"usable": len(os.sched_getaffinity(0)), "machine": os.cpu_count()},
        "memory": {"free": machine.free_memory(), "machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")},
        "cgroup": machine.cgroup_limits(),
        "most_ranks": max(0, min(limit.most for limit in limits)),
        "shm": ask_shm(),
        "runs": runs,
        "leftovers": [one.to_json() for one in leftovers.find()],
        "git": git_state(Path(__file__).resolve().parents[1]),
    }


def ask_interpreters(problems: list[str]) -> tuple[list[Found], Found | None]:
    """Return the candidates for the ranks' interpreter, and the packages of the chosen one."""
    chosen = ""
    try:
        chosen = asked.find_python().path
    except BadInput as error:
        problems.append(str(error))
    rows = [
        {
            "path": one.path,
            "where": one.where,
            "verdict": one.verdict(),
            "fit": one.torch and one.megatron,
            "chosen": one.path == chosen,
        }
        for one in asked.search_pythons()
    ]
    return rows, ask_ranks_python(chosen, problems) if chosen else None


def ask_ranks_python(path: str, problems: list[str]) -> Found:
    agent = Path(asked.__file__).with_name("agent.py")
    printed, why = asked.run_python(path, PROBE, str(agent), timeout_s=ANSWERS_S)
    if why:
        problems.append(f"the ranks' Python {path} fails: {why}; try to import torch with it")
        return {"path": path, "why": why}
    found: Found = {"path": path, **json.loads(printed)}
    problems += [f"{path} cannot import {name}: {why}" for name in ("torch", "numpy") if (why := found[f"{name}_why"])]
    problems += without_code(found.get("code", []))
    return found


def without_code(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"torch has no code for this box's GPU ({one['gpu']}), only for {' '.join(one['built_for'])}; install a matching build"
        for one in rows
        if not one["torch"]
    ]


def ask_shm() -> Found:
    shm = Path("/dev/shm")  # noqa: S108 - this path itself is inspected
    if not shm.is_dir():
        return {"total": None, "free": None, "why": "there is no /dev/shm"}
    usage = shutil.disk_usage(shm)
    return {"total": usage.total, "free": usage.free, "why": None}


def ask_runs(problems: list[str]) -> Found:
    folder, why = runs_dir(), None
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        free, why = 0, error.strerror or str(error)
        problems.append(f"runs cannot be written to {folder}: {why}; set KIT_RUNS to another folder")
    return {"path": str(folder), "writable": why is None, "free": free, "why": why}


def describe(found: Found) -> str:
    lines = [f"{name:<12}{text}" for name, text in rows(found)]
    if found["problems"]:
        lines += ["", "Problems that prevent labs from running:", *(f"- {problem}" for problem in found["problems"])]
    else:
        lines += ["", "Labs can run here."]
    return "\n".join(lines)


def rows(found: Found) -> list[tuple[str, str]]:
    ranks, limits, shm, runs, git = found["ranks"], found["cgroup"], found["shm"], found["runs"], found["git"]
    table = [("python", f"{found['python']['version']}  {found['python']['path']}")]
    for one in found["interpreters"]:
        mark = "->" if one["chosen"] else "  "
        use = f"; to use it: export KIT_PYTHON={one['path']}" if one["fit"] and not one["chosen"] else ""
        table.append(("ranks use", f"{mark} {one['path']} ({one['where']}): {one['verdict']}{use}"))
    if ranks is not None and "python" in ranks:
        without = f"no megatron.core, so only labs without it: {ranks['megatron.core_why']}"
        table += [
            ("versions", f"Python {ranks['python']}, torch {ranks['torch']}, numpy {ranks['numpy']}"),
            ("megatron", ranks["megatron.core"] or without),
        ]
    if ranks is not None and "device" in ranks:
        table += [
            ("device", f"{ranks['device']}: {ranks['device_why']}"),
            ("nccl", ranks["nccl"] or f"none: {ranks['why']}"),
            *communication(ranks),
        ]
    caps = f"memory {size(most) if (most := limits['memory_max']) else 'without limit'}, processes {limits['pids_max'] or 'without limit'}"
    room = f"{size(runs['free'])} free" if runs["writable"] else f"not writable: {runs['why']}"
    state = {True: "with changes", False: "clean", None: "unknown state"}[git["dirty"]]
    return [
        *table,
        *(("gpus", text) for text in gpus(found["gpu"]) or [f"none: {found['gpu']['why']}"]),
        ("cores", f"{found['cores']['usable']} usable of {found['cores']['machine']}"),
        ("memory", f"{size(found['memory']['free'])} free of {size(found['memory']['machine'])}"),
        ("cgroup", caps if limits["version"] else "none"),
        ("ranks", f"at most {found['most_ranks']}"),
        ("shm", shm["why"] or f"{size(shm['free'])} free of {size(shm['total'])}"),
        ("runs", f"{runs['path']}: {room}"),
        *(("leftovers", text) for text in list(map(line_of, found["leftovers"])) or ["none"]),
        ("git", f"{git['commit'][:12]}, {state}" if git["commit"] else f"none: {git['why']}"),
    ]


ENDED = "`kit clean` ends it"
NOT_ENDED = "may only have inherited KIT_WORLD, so `kit clean` does not end it; `kill` it if it is yours"


def line_of(one: Mapping[str, Any]) -> str:
    return f"pid {one['pid']}, started {one['since']}: {one['command']}  ({ENDED if one['sure'] else NOT_ENDED})"


def clean(*, dry_run: bool, yes: bool) -> Found:
    found = leftovers.find()
    sure = [one for one in found if one.sure]
    folders = leftovers.dead_folders(one for one in found if not one.sure)
    for one in found:
        print(line_of(one.to_json()))
    for folder in folders:
        print(f"folder {folder}")
    listed = {"found": [one.to_json() for one in found], "folders": [str(folder) for folder in folders]}
    asked = f"End {len(sure)} processes and remove {len(folders)} folders?"
    ends = bool(sure or folders) and not dry_run
    if ends and not yes:
        if not sys.stdin.isatty():
            raise BadInput("kit clean needs a terminal to ask for confirmation; use --yes, or --dry-run for the list")
        ends = input(f"{asked} [y/N] ").strip().lower() in {"y", "yes"}
    if not sure and not folders:
        print("nothing to end or remove")
    elif ends:
        print(f"ended {len(sure)} processes, removed {len(leftovers.end(sure))} folders")
    else:
        print("nothing was ended or removed")
    return {**listed, "ended": [one.pid for one in sure] if ends else []}


def gpus(gpu: Found) -> list[str]:
    driver = f", driver {gpu['driver']}" if gpu["driver"] else ""
    return [
        f"{one['name']}, {one['memory_free_mib']} of {one['memory_mib']} MiB free, PCIe {one['pcie_gen_max']} x{one['pcie_width']}{driver}"
        for one in gpu["gpus"]
    ]


def code(one: Mapping[str, Any]) -> str:
    has = "has code" if one["torch"] else "has no code"
    kernels = one["nccl_why"] or "NCCL has kernels"
    return f"{one['gpu']}: torch {has} (built for {' '.join(one['built_for'])}); {kernels}"


def communication(ranks: Found) -> list[tuple[str, str]]:
    """How communicators can be released here, how ranks share GPUs, and other parts of the environment that affect a release."""
    suspend = (
        f"no suspend: {why}"
        if (why := ranks["suspend_why"])
        else "suspend should work, but has not been tested on a GPU yet"
    )
    table = [("release", f"exact, abort, manual, official; {suspend}")]
    if ranks["gpus"]:
        table.append(("sharing", f"more ranks than GPUs share them {ranks['shared_gpus']}"))
    table += [("code", code(one)) for one in ranks["code"]]
    if ranks["no_peer_access"]:
        pairs = ", ".join(f"{a}-{b}" for a, b in ranks["no_peer_access"])
        table.append(("peers", f"no peer access between GPUs {pairs}"))
    comms = ranks["torchcomms"]
    requested = "requested" if comms["requested"] else "not requested"
    effect = {True: ", in effect", False: ", not in effect", None: ""}[comms["effective"]]
    able = "importable" if comms["importable"] else "not importable"
    return [
        *table,
        ("torchcomms", f"{requested}; {able}{effect}" + (f": {comms['why']}" if comms["why"] else "")),
        ("nccl2", "this torch has the backend" if ranks["nccl2"] else "this torch has no such backend"),
        *(("found", f"{one['name']} ({one['what']}): {one['means']}") for one in ranks["findings"] if one["what"]),
    ]
