"""`kit doctor`: what this box can and cannot do, and why. It runs the ranks' interpreter in a subprocess and does not load torch."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import machine
from kit.errors import BadInput, RankTimeout
from kit.measure.facts import code_in_words
from kit.measure.recorder import git_state, gpu_state
from kit.results import Run, runs_dir
from kit.results.frames import own_numbers
from kit.results.run import unused_gpu
from kit.results.units import size
from kit.results.verdict import Verdict
from kit.world import asked, leftovers

if TYPE_CHECKING:
    from kit.labs.lab import Lab

# Runs in the ranks' interpreter, which may not have the kit.
PROBE = """
import contextlib, importlib.util, json, runpy, sys
if importlib.util.find_spec("kit") is None:
    runpy.run_path(sys.argv[1])["make_kit_importable"]()
with contextlib.redirect_stdout(sys.stderr):
    from kit.measure.facts import stack_findings, gpu_code, imported
    facts = {"python": sys.version.partition(" ")[0]}
    for module, package in (("torch", "torch"), ("numpy", "numpy"), ("megatron.core", "megatron-core")):
        facts[module], facts[module + "_why"] = imported(module, package)
    if facts["torch"]:
        import torch
        from kit import nccl, routing
        from kit.measure.recorder import cuda_state
        from kit.world.device import choose_device
        device, why, _ = choose_device("auto", 0, 1)
        count = torch.cuda.device_count()
        facts.update(cuda_state(), device=device.type, device_why=why, gpus=count)
        facts["torch"] = torch.__version__
        running = nccl.running()
        shared = nccl.sharing_env(running, 0)
        facts["suspend_why"] = nccl.no_suspend(running, torch.__version__, gpus=count) or None
        facts["shared_gpus"] = shared and shared.words
        pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
        facts["no_peer_access"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        facts["findings"] = stack_findings() if torch.version.cuda else []  # elsewhere none of it runs
        facts["torchcomms"] = routing.probe()
        facts["nccl2"] = not routing.missing(routing.NCCL2)
        facts["code"] = gpu_code() if torch.version.cuda else []
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
    gpu, limits = gpu_state(), asked.rank_limits(LEAST_RANKS)
    problems += silent_cpu(gpu, ranks or {})
    problems += [limit.why for limit in limits if limit.most < LEAST_RANKS]
    return {
        "problems": problems,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "interpreters": interpreters,
        "ranks": ranks,
        "gpu": gpu,
        "cores": {"usable": len(os.sched_getaffinity(0)), "machine": os.cpu_count()},
        "memory": {"free": machine.free_memory(), "machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")},
        "cgroup": machine.cgroup_limits(),
        "most_ranks": max(0, min(limit.most for limit in limits)),
        "threads": {"a_rank": machine.threads_a_rank(LEAST_RANKS), "set": os.environ.get("OMP_NUM_THREADS")},
        "shm": ask_shm(),
        "runs": runs,
        "leftovers": [leftover.to_json() for leftover in leftovers.find_leftovers()],
        "openssl": shutil.which("openssl"),
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
            "path": interpreter.path,
            "where": interpreter.where,
            "verdict": interpreter.verdict(),
            "fit": interpreter.torch and interpreter.megatron,
            "chosen": interpreter.path == chosen,
        }
        for interpreter in asked.search_pythons()
    ]
    return rows, ask_ranks_python(chosen, problems) if chosen else None


def ask_ranks_python(path: str, problems: list[str]) -> Found:
    agent = Path(asked.__file__).with_name("agent.py")
    printed, why = asked.run_python(path, PROBE, str(agent), timeout_s=ANSWERS_S)
    if why:
        problems.append(f"the ranks' Python {path} fails: {why}; try to import torch with it")
        return {"path": path, "why": why}
    facts: Found = {"path": path, **json.loads(printed)}
    problems += [f"{path} cannot import {name}: {why}" for name in ("torch", "numpy") if (why := facts[f"{name}_why"])]
    problems += without_code(facts.get("code", []))
    return facts


def silent_cpu(gpu: Found, ranks: Found) -> list[str]:
    """Ranks with device=auto would run on the CPU although there is a GPU."""
    why = unused_gpu(gpu, ranks.get("device"), ranks.get("device_why"))
    return [f"ranks would run on the CPU although {why}"] if why else []


def without_code(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"torch has no code for this box's GPU ({row['gpu']}), only for {' '.join(row['built_for'])}; install a matching build"
        for row in rows
        if not row["torch"]
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


def describe_box(found: Found) -> str:
    lines = [f"{name:<12}{text}" for name, text in box_rows(found)]
    if found["problems"]:
        lines += ["", "Problems that prevent labs from running:", *(f"- {problem}" for problem in found["problems"])]
    else:
        lines += ["", "Labs can run here."]
    return "\n".join(lines)


def box_rows(found: Found) -> list[tuple[str, str]]:
    ranks, limits, shm, runs, git = found["ranks"], found["cgroup"], found["shm"], found["runs"], found["git"]
    table = [("python", f"{found['python']['version']}  {found['python']['path']}")]
    for interpreter in found["interpreters"]:
        mark = "->" if interpreter["chosen"] else "  "
        use = (
            f"; to use it: export KIT_PYTHON={interpreter['path']}"
            if interpreter["fit"] and not interpreter["chosen"]
            else ""
        )
        table.append(
            ("ranks use", f"{mark} {interpreter['path']} ({interpreter['where']}): {interpreter['verdict']}{use}")
        )
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
        *(("gpus", text) for text in gpu_lines(found["gpu"]) or [f"none: {found['gpu']['why']}"]),
        ("cores", f"{found['cores']['usable']} usable of {found['cores']['machine']}"),
        ("memory", f"{size(found['memory']['free'])} free of {size(found['memory']['machine'])}"),
        ("cgroup", caps if limits["version"] else "none"),
        ("ranks", f"at most {found['most_ranks']}"),
        ("threads", threads_line(found)),
        ("shm", shm["why"] or f"{size(shm['free'])} free of {size(shm['total'])}"),
        ("runs", f"{runs['path']}: {room}"),
        ("openssl", found["openssl"] or "none: labs over several machines need it, for their certificates"),
        *(("leftovers", text) for text in list(map(line_of, found["leftovers"])) or ["none"]),
        ("git", f"{git['commit'][:12]}, {state}" if git["commit"] else f"none: {git['why']}"),
    ]


def threads_line(found: Found) -> str:
    if given := found["threads"]["set"]:
        return f"{given} for the computations of a rank: OMP_NUM_THREADS is set"
    share, cores, limit = found["threads"]["a_rank"], found["cores"]["usable"], found["cgroup"]["pids_max"]
    words = f"{share} for the computations of each of {LEAST_RANKS} ranks, fewer with more ranks"
    if share < max(1, cores // LEAST_RANKS):
        words += f"; half of the limit of {limit or 'this user'} processes and threads is less than {cores} cores"
    return f"{words}; set OMP_NUM_THREADS to change it"


ENDED = "`kit clean` ends it"
NOT_ENDED = "may only have inherited KIT_WORLD, so `kit clean` does not end it; `kill` it if it is yours"


def line_of(leftover: Mapping[str, Any]) -> str:
    ending = ENDED if leftover["sure"] else NOT_ENDED
    return f"pid {leftover['pid']}, started {leftover['since']}: {leftover['command']}  ({ending})"


def clean(*, dry_run: bool, yes: bool) -> Found:
    remaining = leftovers.find_leftovers()
    sure = [leftover for leftover in remaining if leftover.sure]
    folders = leftovers.dead_folders(leftover for leftover in remaining if not leftover.sure)
    for leftover in remaining:
        print(line_of(leftover.to_json()))
    for folder in folders:
        print(f"folder {folder}")
    listed = {"found": [leftover.to_json() for leftover in remaining], "folders": [str(folder) for folder in folders]}
    asked = f"End {len(sure)} processes and remove {len(folders)} folders?"
    ends = bool(sure or folders) and not dry_run
    if ends and not yes:
        if not sys.stdin.isatty():
            raise BadInput("kit clean needs a terminal to ask for confirmation; use --yes, or --dry-run for the list")
        ends = input(f"{asked} [y/N] ").strip().lower() in {"y", "yes"}
    if not sure and not folders:
        print("nothing to end or remove")
    elif ends:
        print(f"ended {len(sure)} processes, removed {len(leftovers.end_leftovers(sure))} folders")
    else:
        print("nothing was ended or removed")
    return {**listed, "ended": [leftover.pid for leftover in sure] if ends else []}


def gpu_lines(gpu: Found) -> list[str]:
    driver = f", driver {gpu['driver']}" if gpu["driver"] else ""
    return [
        f"{device['name']}, {device['memory_free_mib']} of {device['memory_mib']} MiB free, "
        f"PCIe {device['pcie_gen_max']} x{device['pcie_width']}{driver}"
        for device in gpu["gpus"]
    ]


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
    table += [("code", code_in_words(row)) for row in ranks["code"]]
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
        *(
            ("found", f"{finding['name']} ({finding['what']}): {finding['means']}")
            for finding in ranks["findings"]
            if finding["what"]
        ),
    ]


# -- the preflight: a lab that is a box's, run probe by probe, with a line for each ------------------------------------

TAG = "box"


class Preflight:
    """Steps a lab made of probes, and reports each of them. A rule belongs to the probe that its name begins with."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.seconds: dict[str, float] = {}

    def run(self, lab: Lab) -> None:
        """Start the ranks and run every probe; each ends with a line. The lab itself is left to be judged."""
        self.lab = lab
        self.names = [step.phase for step in lab.steps]
        self.say(f"{len(self.names)} probes, each with a time limit of {lab.config.timeout_s:g} s")
        began = time.monotonic()
        lab.start()
        self.say(f"{'start of the ranks':<36}{time.monotonic() - began:6.1f} s")
        for name in self.names:
            began = time.monotonic()
            try:
                lab.step()
            finally:
                self.seconds[name] = time.monotonic() - began
            probe = self.probe(name, lab.verdict())
            failed = [f"{row['check']}: {row['why']}" for row in probe["rows"] if row["passed"] is False]
            why = "; ".join([probe["why"]] if probe["why"] else failed)
            self.say(f"{name:<20}{probe['result']:<16}{self.seconds[name]:6.1f} s  {why}".rstrip())

    def probe(self, name: str, verdict: Verdict) -> dict[str, Any]:
        """How a probe ended, and what its rules say."""
        number = self.names.index(name)
        broke = self.lab.broken.get(name)
        ended, why = ("finished" if number < self.lab.done else "not run"), ""
        if broke is not None:
            ended, why = ("cut" if isinstance(broke, RankTimeout) else "crashed"), str(broke).partition("\n")[0]
        elif number == self.lab.done and self.lab.error and name in self.seconds:
            ended, why = ("interrupted" if self.lab.error.startswith("stopped") else "crashed"), self.lab.error
        rows = [row for row in verdict.to_json() if self.owner(row["check"]) == name]
        answers = {row["passed"] for row in rows}
        failed = bool(why) or False in answers
        return {
            "number": str(number + 1),
            "title": name,
            "result": "fail" if failed else "pass" if True in answers else "not measurable",
            "ended": ended,
            "seconds": round(self.seconds.get(name, 0.0), 2),
            "limit_s": self.lab.config.timeout_s,
            "rows": rows,
            "why": why,
        }

    def owner(self, check: str) -> str:
        return max((name for name in self.names if check.startswith(f"{name}_")), key=len, default="")

    def report(self, run: Mapping[str, Any]) -> Found:
        """The probes and the times that they measured, beside what the answer of any run has."""
        verdict = self.lab.verdict()
        return {
            **run,
            "device": self.lab.world.device if self.lab.started else self.lab.config.device,
            "seconds": round(sum(self.seconds.values()), 1),
            "probes": [self.probe(name, verdict) for name in self.names],
            "times": operation_times(Run(self.lab.dir)),
        }


def operation_times(run: Run) -> dict[str, Any]:
    """Seconds of one of each operation that a preflight measured, on the slowest rank and the fastest of several; and of which box."""
    frame, about = run.frame(), run.provenance
    rows = own_numbers(frame)
    rows = rows[rows["metric"].str.endswith("_seconds")]
    seconds = rows.groupby(["metric", "rank"])["value"].min().groupby("metric").max()
    timed = frame[frame["metric"] == "seconds"]
    started = datetime.fromisoformat(run.info()["started"]).timestamp()
    if len(timed):
        seconds["start_seconds"] = float((timed["time"] - timed["value"]).min() - started)
    ranks, device = about.get("rank0") or {}, (about.get("world") or {}).get("device", "cpu")
    gpus = about["gpu"]["gpus"] if device == "cuda" else []
    return {
        "device": device,
        "host": about["host"],
        "gpu": str(gpus[0]["name"]) if gpus else "",
        "torch": ranks.get("versions", {}).get("torch"),
        "nccl": ranks.get("cuda", {}).get("nccl"),
        "measured": run.info()["started"],
        **{str(name).removesuffix("_seconds"): float(value) for name, value in seconds.items()},
    }
