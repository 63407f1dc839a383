"""`kit reference --out DIR`: run every lab and every bench at this box's sizes and keep the results, to compare with.

Each part is a separate process, as a person would start it, with a separate run. Its files are written when it ends, and a part whose
files exist does not run again, so an interrupted reference resumes. A part that reached its time limit with records counts as run. The
reference needs no Jupyter and no network.

    runs/NAME                     the run, with every row
    NAME.json, NAME.txt           of a bench: rows and their provenance; the same as text
    NAME.json, NAME.png, -dark    of a lab: verdict, medians by phase and metric, provenance; its picture
    README.md                     what ran, what failed, missed limits, seconds
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import doctor
from kit.errors import BadInput
from kit.labs.discover import find, setting_text
from kit.machine import GIB, MIB, free_memory, has_gpu_driver
from kit.results.comparison import FOLDER, machine
from kit.results.frames import labels
from kit.results.records import make_folder, read_json, replacing, write_json, write_text
from kit.results.samples import reported_rows, rows_text, seat_of, seated

if TYPE_CHECKING:
    from kit.results import Run

DOCTOR = "doctor.json"
SUMMARY = "README.md"
HEADS = ("part", "command", "ended", "s", "last time", "seats", "fell short")
GPU_MINUTES = 8.0
# A part's time limit: a multiple of what it took last time, at least; and where it was never measured.
SLACK, LEAST_S, NEVER_S = 4.0, 60.0, 1800.0
KIT = (sys.executable, "-m", "kit")
INTERRUPTED = 130
ENDED = {0: "no check failed", 1: "a check failed", 2: "refused", 3: "broke", INTERRUPTED: "interrupted"}
MEASURED = ("rows", "medians")  # of a bench, and of a lab
MOST = 16 * MIB
KEPT_FREE = 2**16  # for headers and the list of what is left out
LEFT_OUT = "LEFT-OUT.txt"
LAYOUTS: dict[str, dict[str, Any]] = {  # in addition to each lab's own
    "pp2": {"ranks": 2, "tp": 1, "pp": 2},
    "tp2-pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "ep2": {"ranks": 2, "tp": 1, "ep": 2, "experts": 4},
    "sharded": {"ranks": 2, "tp": 1, "distributed_optimizer": True},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePart:
    """One command with its files; `needs` is what NCCL must have ("suspend")."""

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def lab(self) -> str:
        """Its lab; empty for a bench."""
        return self.command[1] if self.command[0] == "run" else ""


def lab_part(name: str, called: str = "", *, needs: str = "", **settings: Any) -> ReferencePart:
    return ReferencePart(name=f"lab-{called or name}", command=("run", name), settings=settings, needs=needs)


def bench(name: str, *words: str, called: str = "", quick: bool = False, device: str = "") -> ReferencePart:
    """Some parts of a bench, or all of it."""
    command = ["bench", name, *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    command += [option for word in words for option in ("--part", word)]
    label = "".join(f".{text}" for text in [called or "-".join(words)] if text)
    return ReferencePart(name=f"bench-{name}{label}", command=tuple(command))


def on_cpu() -> tuple[ReferencePart, ...]:
    """With as many bytes as are needed to see a difference in memory."""
    small: dict[str, Any] = {"size": "125m", "layers": 1, "seq": 16, "steps": 1, "microbatches": 1}
    return (
        lab_part("smoke", cycles=5),
        *(
            lab_part("offload", f"offload-{mode}", mode=mode, cycles=5, **small)
            for mode in ("exact", "abort", "manual", "official")
        ),
        lab_part("offload", "offload-leaks", ranks=4, tp=2, steps=1, cycles=20),
        *(lab_part("offload", f"offload-{name}", steps=1, cycles=2, **layout) for name, layout in LAYOUTS.items()),
        lab_part("split", microbatches=10),
        *(lab_part("split", f"split-{name}", steps=2, reduce="mean", **layout) for name, layout in LAYOUTS.items()),
        lab_part("split", "split-fsdp2", backend="fsdp2", steps=2),
        lab_part("sync", cycles=3),
        lab_part("stream"),
        bench("stream", "lockstep"),
        bench("stream", "stamps"),
        bench("stream", "paced"),
        bench("stream", "learns"),
        lab_part("share"),
        bench("share", "together", "scheduler", called="together"),
        bench("share", "load"),
        bench("share", "seeds"),
        bench("share", "makespan"),
        bench("share", "switch"),
        bench("world", "start", "megatron", called="start"),
        bench("world", "step", "death", "restart", "calls", "notebook", "help", called="steps"),
        bench("offload", "tensors.125m", called="125m"),
        bench("offload", "tensors.qwen2.5-0.5b", "saver", called="qwen2.5-0.5b"),
        bench("release", "groups"),
        bench("release", "ranks"),
        *(bench("sync", shape) for shape in ("model", "small", "large")),
        bench("sync", "digests", "growth", called="others"),
        bench("sync", "terms", "stalls"),
        bench("sync", "arena"),
        bench("sync", "deltas"),
        bench("sync", "engine"),
        bench("routing"),
        bench("split", "steps.megatron", "steps.pipeline", called="steps"),
        bench("split", "steps.fsdp2", "steps.experts", called="more-steps"),
        bench("split", "losses", "memory", called="losses-and-memory"),
    )


def gpu_parts() -> tuple[ReferencePart, ...]:
    """The most telling first, since there may be time for some only. Each asks for the GPU by name: one that cannot have it fails."""
    gpu = {"device": "cuda"}
    large: dict[str, Any] = {"size": "qwen2.5-0.5b", "layers": 2, "dtype": "bfloat16", "seq": 512, "steps": 1}
    large |= {"microbatches": 1, **gpu}
    fewer: dict[str, Any] = {"steps": 2, "chunks": [1, 2], "microbatches": 4, "level": "tokens", **gpu}
    return (
        lab_part("offload", "offload-exact", mode="exact", cycles=2, **large),
        lab_part("offload", "offload-suspend", needs="suspend", mode="suspend", cycles=2, **large),
        *(lab_part("offload", f"offload-{mode}", mode=mode, cycles=2, **large) for mode in ("manual", "abort")),
        bench("release", "groups.own", called="own", quick=True, **gpu),
        lab_part("split", "split-bfloat16", dtype="bfloat16", **fewer),
        bench("split", "steps.megatron", quick=True, **gpu),
        *(bench("sync", f"gpus.{way}", called=f"gpus-{way}", quick=True, **gpu) for way in ("ipc", "shm", "broadcast")),
        lab_part("sync", cycles=1, **gpu),
        bench("offload", "tensors.125m", called="125m", quick=True, **gpu),
        lab_part("smoke", cycles=3, **gpu),
        lab_part("stream", steps=2, **gpu),
        lab_part("share", scenario="A", steps=2, rehearse=False, **gpu),
        bench("world", "step", "restart", called="steps", quick=True),
        bench("routing", quick=True, **gpu),
    )


def able(parts: Sequence[ReferencePart], answer: Mapping[str, Any]) -> tuple[list[ReferencePart], dict[str, str]]:
    """What this box can run, and why it cannot run the rest, both as doctor found."""
    why = answer["ranks"].get("suspend_why") or ""
    out = {part.name: why for part in parts if part.needs == "suspend" and why}
    return [part for part in parts if part.name not in out], out


# -- the whole of it --------------------------------------------------------------------------------------------------


def make_reference(
    out: Path,
    *,
    parts: Sequence[ReferencePart] | None = None,
    device: str = "auto",
    minutes: float | None = None,
    pack: Path | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Run what is not there yet, as far as it fits into `minutes`. Ends with the worst of what parts ended with: 0, 1 or 3; what this
    box refuses is no failure, and neither is what there was no time for."""
    began = time.monotonic()
    make_folder(out)
    if pack is not None:
        make_folder(pack.parent)
    missing: dict[str, str] = {}
    if parts is None:
        device, parts, missing = sizes_here(out, device)
    if minutes is None and device == "cuda":
        minutes = GPU_MINUTES
    say(plan_text(out, parts, device, minutes))

    def keep(parts: Sequence[ReferencePart] = parts) -> list[str]:
        """Write the page, and the archive if one is wanted; returns the files that do not fit into it."""
        write_page(out, parts, missing)
        return pack_into(out, pack) if pack is not None else []

    try:
        for number, part in enumerate(parts, start=1):
            place = f"{number} of {len(parts)}, {part.name}"
            if part_settled(out, part):
                say(f"{place}: there already")
                continue
            last, _ = last_time(out, part, device)
            left = float("inf") if minutes is None else 60 * minutes - (time.monotonic() - began)
            if left < (last or LEAST_S):
                missing[part.name] = f"{left:.0f} s were left of {minutes:g} min: run `kit reference` again"
                say(f"{place}: {missing[part.name]}")
                continue
            say(f"{place} ...")
            ended = perform(out, part, min(left, limit_of(last)), last)
            say(f"{place}: {ended['state']}, {ended['seconds']:.0f} s")
            keep()
    finally:
        left_out = keep()
    if pack is not None:
        say(f"packed into {pack}" + (f"; {len(left_out)} files did not fit" if left_out else ""))
    say(f"the reference is in {out}")
    done = results_of(out, parts)
    return 3 if not all(map(is_settled, done)) else int(any(result["exit"] == 1 for result in done))


def results_of(out: Path, parts: Sequence[ReferencePart]) -> list[dict[str, Any]]:
    """Of the parts that ran; a file without an exit status was not written by `kit reference`."""
    there = [path for part in parts if (path := out / f"{part.name}.json").exists()]
    return [result for result in map(read_json, there) if "exit" in result]


def print_plan(out: Path | None, *, device: str = "auto", minutes: float | None = None) -> int:
    """Print what would run, and what each part took when it was last measured. Asks nothing of this box and runs nothing."""
    cuda = device == "cuda" or (device == "auto" and has_gpu_driver())
    parts = gpu_parts() if cuda else on_cpu()
    print(plan_text(out, parts, "cuda" if cuda else "cpu", minutes or (GPU_MINUTES if cuda else None)))
    return 0


def last_time(out: Path | None, part: ReferencePart, device: str) -> tuple[float | None, str]:
    """What a part took when it was last measured on such a device, and where: in this folder, else on a machine that comes with the
    kit."""
    homes = [*([out] if out is not None else []), *sorted(FOLDER.iterdir())]
    for home in homes:
        path = home / f"{part.name}.json"
        result = read_json(path) if path.is_file() else {}
        devices = [device for seat in result.get("seats") or () for device in seat["devices"]]
        cuda = any(device.startswith("cuda") for device in devices)
        if result.get("seconds") and cuda == (device == "cuda"):
            return float(result["seconds"]), home.name
    return None, ""


def limit_of(last: float | None) -> float:
    return NEVER_S if last is None else max(LEAST_S, SLACK * last)


def plan_text(out: Path | None, parts: Sequence[ReferencePart], device: str, minutes: float | None) -> str:
    """A line per part with what was last measured and its time limit."""
    width = max((len(part.name) for part in parts), default=0)
    times = [last_time(out, part, device) for part in parts]
    lines = [f"no part starts that may not end within {minutes:g} min"] if minutes else []
    for part, (last, where) in zip(parts, times, strict=True):
        took = "never measured" if last is None else f"{last:.1f} s on {where}"
        lines.append(f"{part.name:<{width}}  {took}, limit {limit_of(last):.0f} s")
    known = [last for last, _ in times if last is not None]
    return "\n".join([*lines, f"{len(known)} of {len(parts)} parts were measured: {sum(known) / 60:.1f} min"])


def sizes_here(out: Path, device: str) -> tuple[str, Sequence[ReferencePart], dict[str, str]]:
    """The device, its parts, and why some of them cannot run here; doctor's answer is kept."""
    answer = doctor.examine()
    if answer["problems"]:
        raise BadInput(f"labs cannot run here: {'; '.join(answer['problems'])}")
    write_json(out / DOCTOR, answer)
    usable = (answer["ranks"] or {}).get("device", "cpu")
    if device == "cuda" and usable != "cuda":
        raise BadInput(f"device=cuda cannot be had: {answer['ranks'].get('device_why')}")
    if "cpu" in {device, usable}:
        return "cpu", on_cpu(), {}
    return "cuda", *able(gpu_parts(), answer)


# -- one part, and its files ------------------------------------------------------------------------------------------


def perform(out: Path, part: ReferencePart, limit_s: float, last_s: float | None = None) -> dict[str, Any]:
    """Run a part and write its files, the one by which it is known last. What broke is kept as such, and run again next time."""
    free, began = free_memory(), time.monotonic()
    run = out / "runs" / part.name
    shutil.rmtree(run, ignore_errors=True)
    pairs = [word for name, value in part.settings.items() for word in ("--set", f"{name}={setting_text(value)}")]
    stopped: KeyboardInterrupt | None = None
    try:
        status, complaint, late = finish_part([*KIT, *part.command, *pairs, "--out", str(run)], limit_s)
    except KeyboardInterrupt as error:  # what was measured so far is kept; the part is run again next time
        stopped, (status, complaint, late) = error, (INTERRUPTED, "", False)
    result: dict[str, Any] = {
        "part": part.name,
        "command": " ".join(["kit", *part.command, *pairs]),
        "exit": status,
        "state": "",
        "timed_out": late,
        "seconds": round(time.monotonic() - began, 1),
        "last": last_s,
        "limit": round(limit_s, 1),
        "free_gib": round(free / GIB, 1),
        "complaint": complaint,
    }
    if (run / "run.json").exists():  # also of one that was ended: what it had measured
        result |= of_run(out, part, run)
    result["state"] = part_state(result)
    write_json(out / f"{part.name}.json", result)
    if stopped is not None:
        raise stopped
    return result


def part_state(result: Mapping[str, Any]) -> str:
    count = next((len(result[name]) for name in MEASURED if result.get(name)), 0)
    if result["timed_out"]:
        return f"timed out with {count} rows" if count else "timed out without a row"
    if result["exit"] == 0 and "rows" in result:  # a bench judges nothing, and a row may only say why it has no number
        return f"measured {sum(row['median'] is not None for row in result['rows'])} of {count} rows"
    return ENDED.get(result["exit"], f"ended with status {result['exit']}")


def is_settled(result: Mapping[str, Any]) -> bool:
    """Whether it need not run again: it ended as it should, or its limit ended it and it measured something before."""
    if result.get("timed_out"):
        return any(result.get(name) for name in MEASURED)
    return result.get("exit") in {0, 1, 2}


def part_settled(out: Path, part: ReferencePart) -> bool:
    path = out / f"{part.name}.json"
    return path.exists() and is_settled(read_json(path))


def finish_part(command: Sequence[str], limit_s: float) -> tuple[int, str, bool]:
    """Status, its last complaint where it did not end well, and whether its limit ended it: first as a person would
    interrupt it, which leaves it time to write what it has."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(2)
        try:
            _, errors = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        return process.returncode, f"it took more than {limit_s:.3g} s and was ended", True
    except BaseException:
        process.send_signal(2)
        process.communicate(timeout=60)
        raise
    wrong = process.returncode not in {0, 1}
    return process.returncode, (errors.strip().splitlines() or [""])[0] if wrong else "", False


def of_run(out: Path, part: ReferencePart, folder: Path) -> dict[str, Any]:
    """What is kept of a run beside the run itself: the rows of a bench; the verdict, medians and a picture of another lab."""
    from kit.draw.style import THEMES  # here and below: `kit reference --plan` needs no matplotlib
    from kit.public import load
    from kit.view.named import plot_run

    run = load(folder)
    if not part.lab:
        data = reported_rows(run, find(run.lab).all_rules())
        write_text(out / f"{part.name}.txt", rows_text(data) + "\n")
        return data
    result: dict[str, Any] = {
        "verdict": run.verdict().to_json(),
        "medians": phase_medians(run),
        "provenance": run.provenance,
    }
    if result["medians"]:
        for theme_name in THEMES:
            suffix = "" if theme_name == "light" else f"-{theme_name}"
            plot_run(run, theme=theme_name).save(out / f"{part.name}{suffix}.png")
    return result | ({"seats": [seat_of(run.provenance)]} if "world" in run.provenance else {})


def phase_medians(run: Run) -> list[dict[str, Any]]:
    """Of every phase and metric that has numbers, over ranks and cycles: the median, its ends, and of how many."""
    frame = run.frame().dropna(subset="value")
    grouped = frame.assign(metric=labels(frame)).groupby(["phase", "metric", "unit"], sort=False)["value"]
    table = grouped.agg(["median", "min", "max", "count"]).reset_index()
    return json.loads(table.to_json(orient="records"))  # type: ignore[no-any-return]


def pack_into(folder: Path, to: Path, *, most: int = MOST) -> list[str]:
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
        kind = ranks.get(path.suffix, 3) + path.stem.endswith("-dark")
        return in_runs, kind, path.stat().st_size if in_runs else 0, str(path)

    yield from sorted((path for path in folder.rglob("*") if path.is_file()), key=order)


# -- the page ---------------------------------------------------------------------------------


def write_page(out: Path, parts: Sequence[ReferencePart], missing: Mapping[str, str]) -> None:
    """The folder in a page, from its files."""
    result = results_of(out, parts)
    provenance = next((part["provenance"] for part in result if part.get("provenance")), None)
    lines = [f"# Reference: {out.name}", ""]
    lines += [machine(provenance), ""] if provenance else []
    lines += ["Recorded by `kit reference`. Each part was one process; what it says of itself is in its files.", ""]
    lines += [markdown(HEADS), markdown(["---"] * len(HEADS)), *(markdown(cells_of(part)) for part in result)]
    there = {part["part"] for part in result}
    lines += [f"\nNot run: {name}: {why}." for name, why in missing.items() if name not in there]
    rest = [part.name for part in parts if part.name not in there | missing.keys()]
    lines += ["", f"Not there yet: {', '.join(rest)}."] if rest else []
    write_text(out / SUMMARY, "\n".join(lines) + "\n")


def cells_of(result: Mapping[str, Any]) -> list[str]:
    state = result["state"] + (f": {result['complaint']}" if result["complaint"] else "")
    seats = "; ".join(map(seated, result.get("seats") or ())) or "unknown"
    short = "; ".join(short_of(result)) or "nothing"
    last = result.get("last")
    times = [f"{result['seconds']:.0f}", "" if last is None else f"{last:.0f}"]
    return [result["part"], f"`{result['command']}`", state, *times, seats, short]


def markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def short_of(result: Mapping[str, Any]) -> list[str]:
    """Checks that failed, and rows of a bench that missed their limit or their aim."""
    checks = [row["check"] for row in result.get("verdict", ()) if row["passed"] is False]
    return checks + [row["what"] for row in result.get("rows", ()) if row["met"] is False]
