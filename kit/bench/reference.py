"""`kit reference --out DIR`: run every lab and every bench at this box's sizes and keep the results, to compare with.

Each part is a process of its own, as a person would start it. Its files are written when it ends, and a part whose files exist does not
run again, so an interrupted reference resumes. A part that reached its time limit with rows (a lab: with records) counts as run.
A part's time limit is what it took on the machine named in `TIMED_ON`, times this box's factor, which comes from the times of `kit doctor
--deep`. The reference needs no Jupyter and no network.

    NAME.json, NAME.txt           rows of a bench, or of some of its parts, with provenance; the same as text
    NAME.json, NAME.png, -dark    a lab's verdict, its medians by phase and metric, provenance; its picture
    README.md                     what ran, what failed, missed limits, predicted and measured seconds
    rows/, runs/                  rows as they were measured; the runs themselves, with every record

`kit bench limits`: how near these predictions are. Parts run, and their seconds are compared with the predicted ones.
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
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import doctor
from kit.bench.session import (
    INTERRUPTED,
    Bench,
    Row,
    Session,
    read_rows,
    row,
    seat_of,
    seated,
    unmeasured,
)
from kit.errors import BadInput
from kit.labs.discover import spelled
from kit.machine import free_memory
from kit.preflight import run as preflight
from kit.results import runs_dir
from kit.results.comparison import machine
from kit.results.frames import labels
from kit.results.records import make_folder, read_json, replacing, write_json, write_text

if TYPE_CHECKING:
    from kit.results import Run

DOCTOR = "doctor.json"
SUMMARY = "README.md"
HEADS = ("part", "command", "ended", "s", "predicted s", "seats", "fell short")
GPU_MINUTES = 8.0
# One H200 with torch 2.11, in doctor's words.
ASSUMED = (1.0, "assumed: no probe was asked")
ASSUMED_BOX = {"ranks": {"suspend_why": "NCCL 2.28.9 cannot suspend communicators"}}
TIMED_ON = {"cpu": "measured on two idle cores", "cuda": "assumed for one H200 with two ranks on it"}
# What a probe of `kit doctor --deep` takes, there; their sum, measured here, over the sum there is this box's factor.
PROBE_S: dict[str, dict[str, float]] = {
    "cpu": {"world_megatron": 2.7, "layout": 0.17, "job": 0.015, "step": 0.05},
    "cuda": {"world_megatron": 8.0, "layout": 1.5, "job": 1.0, "step": 0.5},
}
WORDS = {"world_megatron": "two ranks with Megatron", "layout": "groups", "job": "a tiny job", "step": "its step"}
TIMES = "times.json"
SLACK, LEAST_S = 2.5, 20.0  # a part's time limit: in predictions, and at least
GIB = 2**30
KIT = (sys.executable, "-m", "kit")
ENDED = {0: "no check failed", 1: "a check failed", 2: "refused", 3: "broke", INTERRUPTED: "interrupted"}
MEASURED = ("rows", "medians")  # of a bench, and of a lab
MOST = 16 * 2**20
KEPT_FREE = 2**16  # for headers and the list of what is left out
LEFT_OUT = "LEFT-OUT.txt"
WITHIN = 1.5  # how far a prediction may be off, times or divided by
LAYOUTS: dict[str, dict[str, Any]] = {  # in addition to each lab's own
    "pp2": {"ranks": 2, "tp": 1, "pp": 2},
    "tp2-pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "ep2": {"ranks": 2, "tp": 1, "ep": 2, "experts": 4},
    "sharded": {"ranks": 2, "tp": 1, "distributed_optimizer": True},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One command with its files. `seconds` are those of `TIMED_ON`; `needs` is what NCCL must have ("suspend")."""

    name: str
    command: tuple[str, ...]
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def lab(self) -> str:
        """Its lab; empty for a bench."""
        return self.command[1] if self.command[0] == "run" else ""

    def limit(self, factor: float) -> float:
        return max(LEAST_S, SLACK * factor * self.seconds)


def lab(name: str, seconds: float, called: str = "", *, needs: str = "", **settings: Any) -> Part:
    return Part(name=f"lab-{called or name}", command=("run", name), seconds=seconds, settings=settings, needs=needs)


def bench(name: str, seconds: float, *words: str, called: str = "", quick: bool = False, device: str = "") -> Part:
    """Some parts of a bench, or all of it."""
    command = ["bench", name, *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    command += [option for word in words for option in ("--part", word)]
    label = "".join(f".{text}" for text in [called or "-".join(words)] if text)
    return Part(name=f"bench-{name}{label}", command=tuple(command), seconds=seconds)


def on_cpu() -> tuple[Part, ...]:
    """With as many bytes as are needed to see a difference in memory."""
    small: dict[str, Any] = {"size": "125m", "layers": 1, "seq": 16, "steps": 1, "microbatches": 1}
    return (
        lab("smoke", 5, cycles=5),
        *(
            lab("offload", 28, f"offload-{mode}", mode=mode, cycles=5, **small)
            for mode in ("exact", "abort", "manual", "official")
        ),
        lab("offload", 45, "offload-leaks", ranks=4, tp=2, steps=1, cycles=20),
        *(lab("offload", 15, f"offload-{name}", steps=1, cycles=2, **layout) for name, layout in LAYOUTS.items()),
        lab("split", 20, microbatches=10),
        *(lab("split", 20, f"split-{name}", steps=2, reduce="mean", **layout) for name, layout in LAYOUTS.items()),
        lab("split", 20, "split-fsdp2", backend="fsdp2", steps=2),
        lab("sync", 15, cycles=3),
        lab("stream", 23),
        bench("stream", 14, "lockstep"),
        bench("stream", 52, "stamps"),
        bench("stream", 72, "paced"),
        bench("stream", 140, "learns"),
        lab("share", 25),
        bench("share", 27, "together", "scheduler", called="together"),
        bench("share", 380, "makespan"),
        bench("share", 250, "switch"),
        bench("world", 50, "start", "megatron", called="start"),
        bench("world", 35, "step", "death", "restart", "calls", "notebook", "help", called="steps"),
        bench("offload", 35, "tensors.125m", called="125m"),
        bench("offload", 105, "tensors.qwen2.5-0.5b", "saver", called="qwen2.5-0.5b"),
        bench("release", 105, "groups"),
        bench("release", 145, "ranks"),
        *(bench("sync", seconds, shape) for shape, seconds in (("model", 150), ("small", 125), ("large", 45))),
        bench("sync", 60, "digests", "growth", called="others"),
        bench("routing", 4),
        bench("split", 380, "steps.megatron", "steps.pipeline", called="steps"),
        bench("split", 375, "steps.fsdp2", "steps.experts", called="more-steps"),
        bench("split", 115, "losses", "memory", called="losses-and-memory"),
    )


def on_gpus() -> tuple[Part, ...]:
    """The most telling first, since there may be time for some only. Each asks for the GPU by name: one that cannot have it fails."""
    gpu = {"device": "cuda"}
    large: dict[str, Any] = {"size": "qwen2.5-0.5b", "layers": 2, "dtype": "bfloat16", "seq": 512, "steps": 1}
    large |= {"microbatches": 1, **gpu}
    fewer: dict[str, Any] = {"steps": 2, "chunks": [1, 2], "microbatches": 4, "level": "tokens", **gpu}
    return (
        lab("offload", 44, "offload-exact", mode="exact", cycles=2, **large),
        lab("offload", 44, "offload-suspend", needs="suspend", mode="suspend", cycles=2, **large),
        *(lab("offload", 44, f"offload-{mode}", mode=mode, cycles=2, **large) for mode in ("manual", "abort")),
        bench("release", 76, "groups.own", called="own", quick=True, **gpu),
        lab("split", 26, "split-bfloat16", dtype="bfloat16", **fewer),
        bench("split", 25, "steps.megatron", quick=True, **gpu),
        *(
            bench("sync", 22, f"gpus.{way}", called=f"gpus-{way}", quick=True, **gpu)
            for way in ("ipc", "shm", "broadcast")
        ),
        lab("sync", 22, cycles=1, **gpu),
        bench("offload", 28, "tensors.125m", called="125m", quick=True, **gpu),
        lab("smoke", 10, cycles=3, **gpu),
        lab("stream", 22, steps=2, **gpu),
        lab("share", 28, scenario="A", steps_a=2, rehearse=False, **gpu),
        bench("world", 10, "step", "restart", called="steps", quick=True),
        bench("routing", 6, quick=True, **gpu),
    )


def able(parts: Sequence[Part], found: Mapping[str, Any]) -> tuple[list[Part], dict[str, str]]:
    """What this box can run, and why it cannot run the rest, both as doctor found."""
    why = found["ranks"].get("suspend_why") or ""
    out = {part.name: why for part in parts if part.needs == "suspend" and why}
    return [part for part in parts if part.name not in out], out


# -- the whole of it --------------------------------------------------------------------------------------------------


def make(
    out: Path,
    *,
    parts: Sequence[Part] | None = None,
    factor: float = 1.0,
    device: str = "auto",
    assumed: bool = False,
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
    why = ""
    if parts is None:
        device, parts, missing, found = sizes_here(out, device)
        factor, why = ASSUMED if assumed else scale(find_times(out, found, device), device)
    if minutes is None and device == "cuda":
        minutes = GPU_MINUTES
    planned = plan_text(parts, factor, device, minutes, why)
    say(planned)

    def keep(parts: Sequence[Part] = parts) -> list[str]:
        """Write the page, and the archive if one is wanted; returns the files that do not fit into it."""
        write_page(out, parts, planned, missing)
        return pack_into(out, pack) if pack is not None else []

    try:
        for number, part in enumerate(parts, start=1):
            place = f"{number} of {len(parts)}, {part.name}"
            if settled(out, part):
                say(f"{place}: there already")
                continue
            predicted = factor * part.seconds
            left = float("inf") if minutes is None else 60 * minutes - (time.monotonic() - began)
            if left < predicted:
                missing[part.name] = f"{left:.0f} s were left of {minutes:g} min: run `kit reference` again"
                say(f"{place}: {missing[part.name]}")
                continue
            say(f"{place} ...")
            ended = perform(out, part, min(left, part.limit(factor)), predicted)
            say(f"{place}: {ended['state']}, {ended['seconds']:.0f} s (predicted: {ended['predicted']:.0f} s)")
            keep()
    finally:
        left_out = keep()
    if pack is not None:
        say(f"packed into {pack}" + (f"; {len(left_out)} files did not fit" if left_out else ""))
    say(f"the reference is in {out}")
    done = results_of(out, parts)
    return 3 if not all(map(is_settled, done)) else int(any(one["exit"] == 1 for one in done))


def results_of(out: Path, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Of the parts that ran; a file without an exit status was not written by `kit reference`."""
    there = [path for part in parts if (path := out / f"{part.name}.json").exists()]
    return [one for one in map(read_json, there) if "exit" in one]


def plan(out: Path | None, *, device: str = "auto", assumed: bool = False, minutes: float | None = None) -> int:
    """Print what would run and its predicted seconds. Runs no part; measures the factor if none is known."""
    factor, why = ASSUMED
    if assumed and device == "cuda":  # asks nothing of this box: a plan for one that is to be rented
        parts: Sequence[Part] = able(on_gpus(), ASSUMED_BOX)[0]
    else:
        if out is not None:
            make_folder(out)
        device, parts, _, found = sizes_here(out, device)
        if not assumed:
            factor, why = scale(find_times(out, found, device), device)
    print(plan_text(parts, factor, device, minutes or (GPU_MINUTES if device == "cuda" else None), why))
    return 0


def find_times(out: Path | None, found: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What probes measured on this box: kept in the folder, by `kit doctor --deep`, or else now, by one of its probes."""
    here = preflight.box(found, device)
    del here["measured"]
    for path in [*([out / TIMES] if out is not None else []), runs_dir() / preflight.TIMES]:
        kept = read_json(path) if path.exists() else {}
        if {name: kept.get(name) for name in here} == here and known(kept, device):
            break
    else:
        kept = preflight.measure(found, device)
    if out is not None:
        write_json(out / TIMES, kept)
    return kept


def known(times: Mapping[str, Any], device: str) -> list[str]:
    return [name for name in PROBE_S[device] if times.get(name)]


def scale(times: Mapping[str, Any], device: str) -> tuple[float, str]:
    """How much longer this box takes than the machine that the parts' seconds are from, and by which arithmetic."""
    names, there = known(times, device), PROBE_S[device]
    if not names:
        return 1.0, "no probe gave a time: `kit doctor --deep` says why"
    factor = sum(times[name] for name in names) / sum(there[name] for name in names)
    sums = (f"{WORDS[name]} {times[name]:.2f} s (there {there[name]:g} s)" for name in names)
    return round(factor, 2), f"by `kit doctor --deep`: {', '.join(sums)}"


def sizes_here(out: Path | None, device: str) -> tuple[str, Sequence[Part], dict[str, str], dict[str, Any]]:
    """The device, its parts, why some of them cannot run here, and doctor's answer, which is kept."""
    found = doctor.examine()
    if found["problems"]:
        raise BadInput(f"labs cannot run here: {'; '.join(found['problems'])}")
    if out is not None:
        write_json(out / DOCTOR, found)
    here = (found["ranks"] or {}).get("device", "cpu")
    if device == "cuda" and here != "cuda":
        raise BadInput(f"device=cuda cannot be had: {found['ranks'].get('device_why')}")
    if "cpu" in {device, here}:
        return "cpu", on_cpu(), {}, found
    return "cuda", *able(on_gpus(), found), found


# -- one part, and its files ------------------------------------------------------------------------------------------


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
    result: dict[str, Any] = {
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
        result |= of_run(out, part, run)
    elif found := read_rows(rows):  # also of one that was ended: what it had measured
        result |= found
        if table := printed.strip():
            write_text(out / f"{part.name}.txt", table + "\n")
    result["state"] = state(result)
    write_json(out / f"{part.name}.json", result)
    if stopped is not None:
        raise stopped
    return result


def state(result: Mapping[str, Any]) -> str:
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


def settled(out: Path, part: Part) -> bool:
    path = out / f"{part.name}.json"
    return path.exists() and is_settled(read_json(path))


def finish(command: Sequence[str], limit_s: float) -> tuple[int, str, str, bool]:
    """Status, what it printed, its last complaint where it did not end well, and whether its limit ended it: first as a person would
    interrupt it, which leaves it time to write what it has."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(2)
        try:
            printed, errors = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, errors = process.communicate()
        return process.returncode, printed, f"it took more than {limit_s:.3g} s and was ended", True
    except BaseException:
        process.send_signal(2)
        process.communicate(timeout=60)
        raise
    wrong = process.returncode not in {0, 1}
    return process.returncode, printed, (errors.strip().splitlines() or [""])[0] if wrong else "", False


def of_run(out: Path, part: Part, folder: Path) -> dict[str, Any]:
    """What is kept of a lab's run beside the run itself."""
    from kit.draw.style import THEMES  # here and below: `kit reference --plan` needs no matplotlib
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


# -- the page, and the plan -----------------------------------------------------------------------------


def write_page(out: Path, parts: Sequence[Part], plan: str, missing: Mapping[str, str]) -> None:
    """The folder in a page, from its files."""
    result = results_of(out, parts)
    provenance = next((one["provenance"] for one in result if one.get("provenance")), None)
    lines = [f"# Reference: {out.name}", ""]
    lines += [machine(provenance), ""] if provenance else []
    lines += ["Recorded by `kit reference`. Each part was one process; what it says of itself is in its files.", ""]
    lines += [markdown(HEADS), markdown(["---"] * len(HEADS)), *(markdown(cells_of(one)) for one in result)]
    there = {one["part"] for one in result}
    lines += [f"\nNot run: {name}: {why}." for name, why in missing.items() if name not in there]
    rest = [part.name for part in parts if part.name not in there | missing.keys()]
    lines += ["", f"Not there yet: {', '.join(rest)}."] if rest else []
    lines += ["", "## Time limits", "```", plan, "```"]
    write_text(out / SUMMARY, "\n".join(lines) + "\n")


def cells_of(one: Mapping[str, Any]) -> list[str]:
    state = one["state"] + (f": {one['complaint']}" if one["complaint"] else "")
    seats = "; ".join(map(seated, one.get("seats") or ())) or "unknown"
    short = "; ".join(short_of(one)) or "nothing"
    times = [f"{seconds:.0f}" for seconds in (one["seconds"], one.get("predicted", 0))]
    return [one["part"], f"`{one['command']}`", state, *times, seats, short]


def markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def short_of(result: Mapping[str, Any]) -> list[str]:
    """Checks that failed, and rows of a bench that missed their limit or their aim."""
    checks = [row["check"] for row in result.get("verdict", ()) if row["passed"] is False]
    return checks + [row["what"] for row in result.get("rows", ()) if row["met"] is False]


def plan_text(parts: Sequence[Part], factor: float, device: str, minutes: float | None = None, why: str = "") -> str:
    """A line per part with its predicted seconds and its time limit."""
    width, whole = max((len(part.name) for part in parts), default=0), sum(factor * part.seconds for part in parts)
    budget = f"; no part starts that would not end within {minutes:g} min" if minutes else ""
    lines = [
        f"seconds: {TIMED_ON[device]}, times {factor:.3g} for this box",
        *([why] if why else []),
        f"a limit is {SLACK:g} times the prediction, and at least {LEAST_S:g} s{budget}",
        *(f"{one.name:<{width}}  {factor * one.seconds:6.1f} s, limit {one.limit(factor):5.0f} s" for one in parts),
    ]
    return "\n".join([*lines, f"{'in all':<{width}}  {whole:6.1f} s, {whole / 60:.1f} min"])


# -- kit bench limits ---------------------------------------------------------------------------------------------------


def limit_parts(_: str, *, parts: Sequence[Part] | None = None) -> dict[str, Any]:
    """All parts of a reference, or some like them. This box's factor is measured first."""
    factor = cache(lambda: scale(preflight.measure(doctor.examine(), "cpu"), "cpu")[0])
    return {part.name: partial(against_prediction, part=part, factor=factor) for part in parts or on_cpu()}


def against_prediction(session: Session, part: Part, factor: Callable[[], float]) -> Iterator[Row]:
    """The larger of measured over predicted and its inverse, so that 1 is exact. On the CPU: the seconds for a GPU are assumed
    until one has run a reference."""
    predicted = factor() * part.seconds
    ended = perform(session.logs / "reference", part, part.limit(factor()), predicted)
    if ended["timed_out"] or not is_settled(ended):
        yield unmeasured(part.name, f"{ended['state']}: {ended['complaint']}")
        return
    over = ended["seconds"] / predicted
    note = f"took {ended['seconds']:.1f} s, predicted {predicted:.1f} s"
    ids = {"part": part.name, "seconds": ended["seconds"], "predicted": round(predicted, 1)}
    what = f"{part.name}: measured against predicted"
    yield row(what, [max(over, 1 / over)], unit="x", limit=WITHIN, note=note, ids=ids)


FEW = (
    *(part for part in on_cpu() if part.name in {"lab-smoke", "lab-sync"}),
    lab("split", 13, steps=2, chunks=[1, 5], level="tokens"),
    bench("release", 7, "groups.own", quick=True),
    bench("split", 10, "steps.megatron", quick=True),
)
LIMITS = Bench(limit_parts, {"parts": FEW})
