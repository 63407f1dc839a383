"""`kit reference --out DIR`: every lab and every bench at this box's sizes, a file or two for each, to keep and to compare with.

Each part runs in a process of its own, as a person would run it, and its files are written when it is through: what is there
already is not run again, so that an interrupted reference goes on where it was. Needs no Jupyter and no network.

    NAME.json, NAME.txt           a bench's rows with their provenance, and the same for people
    NAME.json, NAME.png, -dark    a lab's verdict, its medians by phase and metric, its provenance; its picture
    README.md                     what is there, what failed, what fell short
    runs/                         the runs themselves, with every record
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.results import Run
from kit.results.files import read_json, write_json, write_text
from kit.results.recorded import machine
from kit.world.capacity import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GIB = 2**30
SUMMARY = "README.md"
DOCTOR = "doctor.json"
SETTLED = (0, 1, 2)
ENDED = {0: "no check failed", 1: "a check failed", 2: "refused", 3: "broke", 130: "interrupted"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing to run. `most_s` is what it may take before it is ended; what it measured by then is kept."""

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    most_s: float = 600.0

    @property
    def lab(self) -> str:
        """Its lab; empty for a bench."""
        return self.command[1] if self.command[0] == "run" else ""


def lab(name: str, called: str = "", *, most_s: float = 300.0, **settings: Any) -> Part:
    return Part(name=f"lab-{called or name}", command=("run", name), settings=settings, most_s=most_s)


def bench(name: str, *, most_s: float = 1800.0, quick: bool = False) -> Part:
    return Part(name=f"bench-{name}", command=("bench", name, *(["--quick"] if quick else [])), most_s=most_s)


SEEN: dict[str, Any] = {
    "size": "125m",
    "layers": 1,
    "seq": 16,
    "steps": 1,
    "microbatches": 1,
    "cycles": 5,
}  # enough bytes to be seen
ON_CPU = (
    lab("smoke", cycles=5),
    *(lab("offload", f"offload-{mode}", mode=mode, **SEEN) for mode in ("exact", "abort", "manual", "official")),
    lab("split"),
    lab("sync", cycles=3),
    *(bench(name) for name in ("world", "offload", "release", "sync", "routing")),
    bench("split", most_s=3600),
)
# Two ranks on one card talk through the host, and every hash of such a job reads some 5 GB of each.
LARGE: dict[str, Any] = {"size": "qwen2.5-0.5b", "dtype": "bfloat16", "seq": 512, "steps": 1, "microbatches": 1}
ON_CARDS = (
    lab("smoke", cycles=5, most_s=60),
    lab("offload", "offload-exact", mode="exact", most_s=240, cycles=5, **LARGE),
    *(
        lab("offload", f"offload-{mode}", mode=mode, most_s=150, cycles=3, **LARGE)
        for mode in ("abort", "manual", "official", "suspend")
    ),
    lab("split", "split-float32", dtype="float32", most_s=120),
    lab("split", "split-bfloat16", dtype="bfloat16", most_s=120),
    lab("sync", cycles=3, most_s=120),
    *(bench(name, quick=True, most_s=120) for name in ("release", "offload", "sync", "world", "split", "routing")),
)


def make(out: Path, *, parts: Sequence[Part] | None = None, say: Callable[[str], None] = print) -> int:
    """Run what is not there yet. Ends with the worst of what parts ended with: 0, 1 or 3; what this box refuses is no failure."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file: name a folder for the reference")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make a folder at {out}: {error.strerror}") from error
    if parts is None:
        parts = sizes_here(out)
    for number, part in enumerate(parts, start=1):
        place = f"{number} of {len(parts)}, {part.name}"
        if through(out, part):
            say(f"{place}: there already")
            continue
        say(f"{place} ...")
        told = perform(out, part)
        say(f"{place}: {told['state']}, {told['seconds']:.0f} s")
        summarise(out, parts)
    summarise(out, parts)
    say(f"the reference is in {out}")
    ended = [read_json(out / f"{part.name}.json")["exit"] for part in parts]
    return 3 if any(status not in SETTLED for status in ended) else int(1 in ended)


def sizes_here(out: Path) -> Sequence[Part]:
    """The parts for cards where the ranks would take some, else those for the host; asked of doctor, whose answer is kept."""
    said = subprocess.run([*KIT, "doctor", "--json"], capture_output=True, text=True, check=False, timeout=300)
    try:
        found = json.loads(said.stdout)
    except ValueError:
        raise BadInput(f"`kit doctor` does not answer here: {said.stderr.strip().splitlines()[-1:]}") from None
    if found["problems"]:
        raise BadInput(f"labs cannot run here: {'; '.join(found['problems'])}")
    write_json(out / DOCTOR, found)
    return ON_CARDS if found["ranks"] and found["ranks"].get("device") == "cuda" else ON_CPU


KIT = (sys.executable, "-m", "kit")


def perform(out: Path, part: Part) -> dict[str, Any]:
    """Run a part and write its files, the one by which it is known last. What broke is kept as such, and run again next time."""
    free, began = available_bytes(), time.monotonic()
    folder = out / "runs" / part.name
    shutil.rmtree(folder, ignore_errors=True)
    place = ("--out", str(folder)) if part.lab else ()
    pairs = [word for name, value in part.settings.items() for word in ("--set", f"{name}={spelled(value)}")]
    command = [*KIT, *part.command, *pairs, *place, "--json"]
    status, printed, complaint = finish(command, part.most_s)
    told: dict[str, Any] = {
        "part": part.name,
        "command": " ".join(["kit", *part.command, *pairs]),
        "exit": status,
        "state": ENDED.get(status, f"ended with status {status}"),
        "seconds": round(time.monotonic() - began, 1),
        "free_gib": round(free / GIB, 1),
        "complaint": complaint,
    }
    if part.lab and (folder / "run.json").exists():
        told |= of_run(out, part, folder)
    elif rows := rows_of(printed):  # also of one that was interrupted: what it had measured
        told |= rows
        write_text(out / f"{part.name}.txt", printed.strip().rpartition("\n")[0].rstrip() + "\n")
    write_json(out / f"{part.name}.json", told)
    return told


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def finish(command: Sequence[str], most_s: float) -> tuple[int, str, str]:
    """Status, what it printed, and its last complaint where it did not end well. Past its time it is interrupted, as by a person."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=dict(os.environ)
    )
    try:
        printed, said = process.communicate(timeout=most_s)
    except subprocess.TimeoutExpired:
        process.send_signal(2)
        try:
            printed, said = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, said = process.communicate()
        return 3, printed, f"it took more than {most_s:g} s and was ended"
    except BaseException:
        process.send_signal(2)
        process.wait(60)
        raise
    wrong = process.returncode not in {0, 1}
    return process.returncode, printed, (said.strip().splitlines() or [""])[0] if wrong else ""


def rows_of(printed: str) -> dict[str, Any]:
    """What a bench said in its last line; nothing where it came to none."""
    try:
        said = json.loads(printed.strip().rpartition("\n")[2])
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def of_run(out: Path, part: Part, folder: Path) -> dict[str, Any]:
    """What is kept of a lab's run beside the run itself."""
    from kit.public import load
    from kit.view.plots import plot_run
    from kit.view.style import THEMES

    run = load(folder)
    for theme_name in THEMES:
        suffix = "" if theme_name == "light" else f"-{theme_name}"
        plot_run(run, theme_name=theme_name).save(out / f"{part.name}{suffix}.png")
    return {"verdict": run.verdict().to_json(), "medians": medians(run), "provenance": run.provenance}


def medians(run: Run) -> list[dict[str, Any]]:
    """Of every phase and metric over ranks and cycles: the median, its ends, and of how many."""
    grouped = run.frame().groupby(["phase", "metric", "unit"], sort=False)["value"]
    table = grouped.agg(["median", "min", "max", "count"]).reset_index()
    return json.loads(table.to_json(orient="records"))  # type: ignore[no-any-return]


def through(out: Path, part: Part) -> bool:
    """Whether it is there, and did not break."""
    path = out / f"{part.name}.json"
    return path.exists() and read_json(path).get("exit") in SETTLED


def summarise(out: Path, parts: Sequence[Part]) -> None:
    """The folder in a page, from its files."""
    told = [
        one for part in parts if (path := out / f"{part.name}.json").exists() and "exit" in (one := read_json(path))
    ]
    provenance = next((one["provenance"] for one in told if "provenance" in one), None)
    lines = [f"# Reference: {out.name}", ""]
    lines += [machine(provenance), ""] if provenance else []
    lines += [
        "Recorded by `kit reference`. Each part was one process; what it says of itself is in its files.",
        "",
        "| part | command | ended | s | fell short |",
        "|---|---|---|---|---|",
    ]
    for one in told:
        state = one["state"] + (f": {one['complaint']}" if one["complaint"] else "")
        cells = [
            one["part"],
            f"`{one['command']}`",
            state,
            f"{one['seconds']:.0f}",
            "; ".join(short_of(one)) or "nothing",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    missing = [part.name for part in parts if not (out / f"{part.name}.json").exists()]
    lines += ["", f"Not there yet: {', '.join(missing)}."] if missing else []
    write_text(out / SUMMARY, "\n".join(lines) + "\n")


def short_of(told: Mapping[str, Any]) -> list[str]:
    """Checks that failed, and rows of a bench that missed their limit or their aim."""
    checks = [row["check"] for row in told.get("verdict", ()) if row["passed"] is False]
    return checks + [f"{row['what']}" for row in told.get("rows", ()) if row["met"] is False]
