"""Runs one part of a reference and writes its files; packs them into one, for a box from which little can be copied."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kit.bench.session import INTERRUPTED, Cost, chosen, read_rows, seat_of, total
from kit.machine import free_memory
from kit.results.files import read_json, replacing, write_json, write_text
from kit.results.frames import labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kit.results import Run

GPU_MINUTES = 8.0
ASSUMED_BOX = {
    "ranks": {"suspend_why": "NCCL 2.28.9 cannot suspend communicators"}
}  # one H200, torch 2.11, in doctor's words


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One command with its files. `cost` is what it does, `needs` what NCCL must have for it ("suspend")."""

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    needs: str = ""

    @property
    def lab(self) -> str:
        """Its lab; empty for a bench."""
        return self.command[1] if self.command[0] == "run" else ""


def lab(name: str, called: str = "", *, cost: Cost | None = None, needs: str = "", **settings: Any) -> Part:
    work = Cost(process=1, megatron=1) if cost is None else cost
    return Part(name=f"lab-{called or name}", command=("run", name), settings=settings, cost=work, needs=needs)


def bench(name: str, *words: str, called: str = "", quick: bool = False, device: str = "") -> Part:
    """Some parts of a bench, or all of it."""
    module = import_module(f"kit.bench.{name}")
    parts = module.parts(module.QUICK if quick else module.Sizes(), device or "cpu")
    some = [part.cost for part in chosen(name, parts, words).values()]
    command = ["bench", name, *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    command += [option for word in words for option in ("--part", word)]
    label = "".join(f".{text}" for text in [called or "-".join(words)] if text)
    return Part(name=f"bench-{name}{label}", command=tuple(command), cost=Cost(process=1) + total(some))


def offload(
    mode: str, cycles: int, *, gib: float, weight: float, hashing: tuple[float, float], **settings: Any
) -> Part:
    """The offload lab: three builds, three times the training, and copies and hashes of `gib` for the controls and in each cycle."""
    first, each = hashing
    cost = Cost(process=1, megatron=1, job=3, step=3 * (cycles + 1) * weight, group=25 * cycles)
    cost += Cost(copy=gib * (first + each * cycles))
    needs = "suspend" if mode == "suspend" else ""
    return lab("offload", f"offload-{mode}", cost=cost, needs=needs, mode=mode, cycles=cycles, **settings)


def split(called: str, ways: int, *, microbatches: int = 10, **settings: Any) -> Part:
    """The split lab; `ways` counts steps of every way to cut, beside which there are the rehearsals."""
    cost = Cost(process=1, megatron=1, job=4, step=(20 + 2 * ways) * microbatches / 10)
    return lab("split", called, cost=cost, microbatches=microbatches, **settings)


def on_cpu() -> tuple[Part, ...]:
    # Enough bytes to be seen.
    seen: dict[str, Any] = {"size": "125m", "layers": 1, "seq": 16, "steps": 1, "microbatches": 1}
    sizes: dict[str, Any] = {"gib": 0.68, "weight": 5, "hashing": (12, 9)}
    return (
        lab("smoke", cost=Cost(process=1, world=1, group=40), cycles=5),
        *(offload(mode, 5, **sizes, **seen) for mode in ("exact", "abort", "manual", "official")),
        split("split", 40),
        lab("sync", cost=Cost(process=1, megatron=2, job=2, step=20), cycles=3),
        bench("world", "start", "megatron", called="start"),
        bench("world", "step", "death", "restart", "calls", "notebook", "help", called="steps"),
        bench("world", "peers"),
        bench("offload", "tensors.125m", called="125m"),
        bench("offload", "tensors.qwen2.5-0.5b", "saver", called="qwen2.5-0.5b"),
        bench("offload", "leaks"),
        bench("offload", "bitwise"),
        bench("release", "groups"),
        bench("release", "ranks"),
        *(bench("sync", shape) for shape in ("model", "small", "large")),
        bench("sync", "digests", "growth", called="others"),
        bench("routing"),
        bench("split", "steps.megatron", "steps.pipeline", called="steps"),
        bench("split", "steps.fsdp2", "steps.experts", called="more-steps"),
        bench("split", "losses", "memory", called="losses-and-memory"),
        bench("split", "grid.2"),
        bench("split", "grid.4"),
    )


def on_gpus() -> tuple[Part, ...]:
    """The most telling first, since there may be time for some only. Each asks for the GPU by name: one that cannot have it fails."""
    gpu = {"device": "cuda"}
    large: dict[str, Any] = {"size": "qwen2.5-0.5b", "layers": 2, "dtype": "bfloat16", "seq": 512, "steps": 1}
    sizes: dict[str, Any] = {"gib": 2.8, "weight": 3, "hashing": (5, 4), **large, "microbatches": 1, **gpu}
    fewer: dict[str, Any] = {"steps": 2, "chunks": [1, 2], "microbatches": 4, "level": "tokens", **gpu}
    return (
        offload("exact", 3, **sizes),
        *(offload(mode, 2, **sizes) for mode in ("suspend", "manual", "abort")),
        bench("release", "groups.own", called="own", quick=True, **gpu),
        split("split-bfloat16", 6, dtype="bfloat16", **fewer),
        bench("split", "steps.megatron", "steps.pipeline", called="steps", quick=True, **gpu),
        *(bench("sync", f"gpus.{way}", called=f"gpus-{way}", quick=True, **gpu) for way in ("ipc", "shm", "broadcast")),
        lab("sync", cost=Cost(process=1, megatron=1.5, job=3, step=20), cycles=2, **gpu),
        split("split-float32", 6, dtype="float32", **fewer),
        bench("offload", "tensors.125m", called="125m", quick=True, **gpu),
        lab("smoke", cost=Cost(process=1, world=1, group=24), cycles=3, **gpu),
        bench("world", "step", "restart", called="steps", quick=True),
        bench("routing", quick=True, **gpu),
    )


def able(parts: Sequence[Part], found: Mapping[str, Any]) -> tuple[list[Part], dict[str, str]]:
    """What this box can run, and why it cannot run the rest, both as doctor found."""
    why = found["ranks"].get("suspend_why") or ""
    out = {part.name: why for part in parts if part.needs == "suspend" and why}
    return [part for part in parts if part.name not in out], out


GIB = 2**30
KIT = (sys.executable, "-m", "kit")
SETTLED = (0, 1, 2)
ENDED = {0: "no check failed", 1: "a check failed", 2: "refused", 3: "broke", INTERRUPTED: "interrupted"}
MEASURED = ("rows", "medians")  # what a bench, or a lab, came to
MOST = 16 * 2**20
KEPT_FREE = 2**16  # for headers and the list of what is left out
LEFT_OUT = "LEFT-OUT.txt"


def perform(out: Path, part: Part, limit_s: float, predicted_s: float) -> dict[str, Any]:
    """Run a part and write its files, the one by which it is known last. What broke is kept as such, and run again next time."""
    free, began = free_memory(), time.monotonic()
    run, rows = out / "runs" / part.name, out / "rows" / f"{part.name}.jsonl"
    shutil.rmtree(run, ignore_errors=True)
    rows.unlink(missing_ok=True)
    pairs = [word for name, value in part.settings.items() for word in ("--set", f"{name}={spelled(value)}")]
    place = ("--out", str(run if part.lab else rows))
    stopped: KeyboardInterrupt | None = None
    try:
        status, printed, complaint, late = finish([*KIT, *part.command, *pairs, *place], limit_s)
    except KeyboardInterrupt as error:  # what was measured so far is kept; the part is run again next time
        stopped, (status, printed, complaint, late) = error, (INTERRUPTED, "", "", False)
    told: dict[str, Any] = {
        "part": part.name,
        "command": " ".join(["kit", *part.command, *pairs]),
        "exit": status,
        "state": "",
        "timed_out": late,
        "seconds": round(time.monotonic() - began, 1),
        "predicted": round(predicted_s, 1),
        "limit": round(limit_s, 1),
        "free_gib": round(free / GIB, 1),
        "complaint": complaint,
    }
    if part.lab and (run / "run.json").exists():
        told |= of_run(out, part, run)
    elif found := read_rows(rows):  # also of one that was ended: what it had measured
        told |= found
        if table := printed.strip():
            write_text(out / f"{part.name}.txt", table + "\n")
    told["state"] = state(told)
    write_json(out / f"{part.name}.json", told)
    if stopped is not None:
        raise stopped
    return told


def state(told: Mapping[str, Any]) -> str:
    count = next((len(told[name]) for name in MEASURED if told.get(name)), 0)
    if told["timed_out"]:
        return f"timed out with {count} rows" if count else "timed out without a row"
    if told["exit"] == 0 and "rows" in told:  # a bench judges nothing, and a row may only say why it has no number
        return f"measured {sum(row['median'] is not None for row in told['rows'])} of {count} rows"
    return ENDED.get(told["exit"], f"ended with status {told['exit']}")


def is_settled(told: Mapping[str, Any]) -> bool:
    """Whether it need not run again: it ended as it should, or its limit ended it and it measured something before."""
    if told.get("timed_out"):
        return any(told.get(name) for name in MEASURED)
    return told.get("exit") in SETTLED


def settled(out: Path, part: Part) -> bool:
    path = out / f"{part.name}.json"
    return path.exists() and is_settled(read_json(path))


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def finish(command: Sequence[str], limit_s: float) -> tuple[int, str, str, bool]:
    """Status, what it printed, its last complaint where it did not end well, and whether its limit ended it: first as a person would
    interrupt it, which leaves it time to write what it has."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(2)
        try:
            printed, said = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, said = process.communicate()
        return process.returncode, printed, f"it took more than {limit_s:.3g} s and was ended", True
    except BaseException:
        process.send_signal(2)
        process.communicate(timeout=60)
        raise
    wrong = process.returncode not in {0, 1}
    return process.returncode, printed, (said.strip().splitlines() or [""])[0] if wrong else "", False


def of_run(out: Path, part: Part, folder: Path) -> dict[str, Any]:
    """What is kept of a lab's run beside the run itself."""
    from kit.draw.style import THEMES
    from kit.public import load
    from kit.view.named import plot

    run = load(folder)
    found: dict[str, Any] = {"verdict": run.verdict().to_json(), "medians": medians(run), "provenance": run.provenance}
    if found["medians"]:
        for theme_name in THEMES:
            suffix = "" if theme_name == "light" else f"-{theme_name}"
            plot(run, theme=theme_name).save(out / f"{part.name}{suffix}.png")
    return found | ({"seats": [seat_of(run.provenance)]} if "world" in run.provenance else {})


def medians(run: Run) -> list[dict[str, Any]]:
    """Of every phase and metric over ranks and cycles: the median, its ends, and of how many."""
    frame = run.frame()
    grouped = frame.assign(metric=labels(frame)).groupby(["phase", "metric", "unit"], sort=False)["value"]
    table = grouped.agg(["median", "min", "max", "count"]).reset_index()
    return json.loads(table.to_json(orient="records"))  # type: ignore[no-any-return]


def pack(folder: Path, to: Path, *, most: int = MOST) -> list[str]:
    """Write as much of the folder as fits into a .tgz, the most telling files first; gives the names of what did not fit."""
    room, left = most - KEPT_FREE, []
    with replacing(to) as temporary, tarfile.open(temporary, "w:gz") as tar:
        for path in in_order(folder):
            size = len(zlib.compress(path.read_bytes())) + 1024
            name = str(path.relative_to(folder))
            if size > room:
                left.append(name)
                continue
            room -= size
            tar.add(path, f"{folder.name}/{name}")
        if left:
            text = "\n".join(left).encode()[: KEPT_FREE // 2]
            entry = tarfile.TarInfo(f"{folder.name}/{LEFT_OUT}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    return left


def in_order(folder: Path) -> Iterator[Path]:
    """The page, numbers, tables, light pictures, the rest; then the runs, verdicts before records."""
    ranks = {".md": 0, ".json": 1, ".jsonl": 2, ".txt": 2}

    def order(path: Path) -> tuple[bool, int, int, str]:
        in_runs = path.relative_to(folder).parts[0] == "runs"
        dark = path.stem.endswith("-dark")
        return in_runs, ranks.get(path.suffix, 3) + dark, path.stat().st_size if in_runs else 0, str(path)

    yield from sorted((path for path in folder.rglob("*") if path.is_file()), key=order)
