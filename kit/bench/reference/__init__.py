"""`kit reference --out DIR`: every lab and every bench at this box's sizes, a file or two for each, to keep and to compare with.

Each part runs in a process of its own, as a person would run it, and its files are written when it is through: what is there
already is not run again, so that an interrupted reference goes on where it was. A part that its limit ended and that has rows (a lab:
records) is settled too. Limits are arithmetic: how often a part does each thing that `pace.py` measures. Needs no Jupyter and no network.

    NAME.json, NAME.txt           rows of a bench, or of some of its parts, with their provenance, and the same for people
    NAME.json, NAME.png, -dark    a lab's verdict, its medians by phase and metric, its provenance; its picture
    README.md                     what is there, what failed, what fell short, what was predicted
    rows/, runs/                  rows as they were measured; the runs themselves, with every record
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kit import doctor
from kit.bench import pace as paces
from kit.bench.pace import ASSUMED
from kit.bench.reference.running import (
    ASSUMED_BOX,
    GPU_MINUTES,
    able,
    is_settled,
    on_cpu,
    on_gpus,
    perform,
    settled,
)
from kit.bench.reference.running import pack as pack_into
from kit.bench.rows import seated
from kit.bench.session import LEAST_S, SLACK
from kit.errors import BadInput
from kit.results.files import make_folder, read_json, write_json, write_text
from kit.results.recorded import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kit.bench.pace import Pace
    from kit.bench.reference.running import Part

DOCTOR = "doctor.json"
SUMMARY = "README.md"
HEADS = ("part", "command", "ended", "s", "predicted s", "seats", "fell short")


def make(
    out: Path,
    *,
    parts: Sequence[Part] | None = None,
    pace: Pace | None = None,
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
    if parts is None:
        device, parts, missing = sizes_here(out, device)
    if pace is None:
        pace = ASSUMED if assumed else paces.find(out, device)
    if minutes is None and device == "cuda":
        minutes = GPU_MINUTES
    say(plan_text(parts, pace, minutes))
    try:
        for number, part in enumerate(parts, start=1):
            place = f"{number} of {len(parts)}, {part.name}"
            if settled(out, part):
                say(f"{place}: there already")
                continue
            predicted, limit = part.cost.seconds(pace), part.cost.limit(pace)
            if minutes is not None:
                left = 60 * minutes - (time.monotonic() - began)
                if left < predicted:
                    missing[part.name] = f"{left:.0f} s were left of {minutes:g} min: run `kit reference` again"
                    say(f"{place}: {missing[part.name]}")
                    continue
                limit = min(limit, left)
            say(f"{place} ...")
            told = perform(out, part, limit, predicted)
            say(f"{place}: {told['state']}, {told['seconds']:.0f} s (predicted: {told['predicted']:.0f} s)")
            keep(out, parts, pace, missing, pack)
    finally:
        left_out = keep(out, parts, pace, missing, pack)
    if pack is not None:
        say(f"packed into {pack}" + (f"; {len(left_out)} files did not fit" if left_out else ""))
    say(f"the reference is in {out}")
    done = [path for part in parts if (path := out / f"{part.name}.json").exists()]
    ended = [told for told in map(read_json, done) if "exit" in told]
    return 3 if not all(map(is_settled, ended)) else int(any(told["exit"] == 1 for told in ended))


def keep(out: Path, parts: Sequence[Part], pace: Pace, missing: dict[str, str], pack: Path | None) -> list[str]:
    """The page, and the pack if one is wanted; gives the files that it has no room for."""
    write_page(out, parts, pace, missing)
    return pack_into(out, pack) if pack is not None else []


def plan(out: Path | None, *, device: str = "auto", assumed: bool = False, minutes: float | None = None) -> int:
    """Print what would run, with the arithmetic. Runs no part; measures the pace where none is known."""
    if assumed and device == "cuda":  # asks nothing of this box: a plan for one that is to be rented
        parts: Sequence[Part] = able(on_gpus(), ASSUMED_BOX)[0]
    else:
        if out is not None:
            make_folder(out)
        device, parts, _ = sizes_here(out, device)
    pace = ASSUMED if assumed else paces.find(out, device)
    print(plan_text(parts, pace, minutes or (GPU_MINUTES if device == "cuda" else None)))
    return 0


def sizes_here(out: Path | None, device: str) -> tuple[str, Sequence[Part], dict[str, str]]:
    """The device, its parts, and why some of them cannot run here; asked of doctor, whose answer is kept."""
    found = doctor.examine()
    if found["problems"]:
        raise BadInput(f"labs cannot run here: {'; '.join(found['problems'])}")
    if out is not None:
        write_json(out / DOCTOR, found)
    here = (found["ranks"] or {}).get("device", "cpu")
    if device == "cuda" and here != "cuda":
        raise BadInput(f"device=cuda cannot be had: {found['ranks'].get('device_why')}")
    if "cpu" in {device, here}:
        return "cpu", on_cpu(), {}
    return "cuda", *able(on_gpus(), found)


# -- the page, and the plan with its arithmetic -----------------------------------------------------------------------------


def write_page(out: Path, parts: Sequence[Part], pace: Pace, missing: Mapping[str, str]) -> None:
    """The folder in a page, from its files."""
    told = [
        one for part in parts if (path := out / f"{part.name}.json").exists() and "exit" in (one := read_json(path))
    ]
    provenance = next((one["provenance"] for one in told if one.get("provenance")), None)
    lines = [f"# Reference: {out.name}", ""]
    lines += [machine(provenance), ""] if provenance else []
    lines += ["Recorded by `kit reference`. Each part was one process; what it says of itself is in its files.", ""]
    lines += [markdown(HEADS), markdown(["---"] * len(HEADS)), *(markdown(cells_of(one)) for one in told)]
    there = {one["part"] for one in told}
    lines += [f"\nNot run: {name}: {why}." for name, why in missing.items() if name not in there]
    rest = [part.name for part in parts if part.name not in there and part.name not in missing]
    lines += ["", f"Not there yet: {', '.join(rest)}."] if rest else []
    lines += ["", "## Arithmetic", "```", plan_text(parts, pace), "```"]
    if apart := differences(pace):
        lines += ["", "## Assumed and measured", "```", apart, "```"]
    write_text(out / SUMMARY, "\n".join(lines) + "\n")


def cells_of(one: Mapping[str, Any]) -> list[str]:
    state = one["state"] + (f": {one['complaint']}" if one["complaint"] else "")
    seats = "; ".join(map(seated, one.get("seats") or ())) or "unknown"
    short = "; ".join(short_of(one)) or "nothing"
    times = [f"{seconds:.0f}" for seconds in (one["seconds"], one.get("predicted", 0))]
    return [one["part"], f"`{one['command']}`", state, *times, seats, short]


def markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def short_of(told: Mapping[str, Any]) -> list[str]:
    """Checks that failed, and rows of a bench that missed their limit or their aim."""
    checks = [row["check"] for row in told.get("verdict", ()) if row["passed"] is False]
    return checks + [row["what"] for row in told.get("rows", ()) if row["met"] is False]


def differences(pace: Pace) -> str:
    """What a GPU box measured, beside what was assumed before any had: a line for each primitive; empty on other boxes."""
    if pace.device != ASSUMED.device or pace.source == ASSUMED.source:
        return ""
    lines = ["measured here, against what was assumed:"]
    for name in seconds_of(ASSUMED):
        measured, assumed = seconds_of(pace)[name], seconds_of(ASSUMED)[name]
        lines.append(
            f"{name.removesuffix('_s'):<9}{measured:8.3g} s, assumed {assumed:6.3g} s: {measured / assumed:5.2f} times"
        )
    return "\n".join(lines)


def seconds_of(pace: Pace) -> dict[str, float]:
    return {name: value for name in pace.__slots__ if isinstance(value := getattr(pace, name), float)}


def plan_text(parts: Sequence[Part], pace: Pace, minutes: float | None = None) -> str:
    """A line for each part: predicted seconds, its limit, and of what they are the sum."""
    times = seconds_of(pace)
    width = max((len(part.name) for part in parts), default=0)
    whole = sum(part.cost.seconds(pace) for part in parts)
    lines = [
        f"{part.name:<{width}}  {part.cost.seconds(pace):6.1f} s, limit {part.cost.limit(pace):5.0f} s = {part.cost.told(pace)}"
        for part in parts
    ]
    budget = f"; no part starts that would not end within {minutes:g} min" if minutes else ""
    shown = ", ".join(f"{name.removesuffix('_s')} {one:.3g}" for name, one in times.items())
    heads = [
        f"seconds ({pace.source}): {shown}",
        f"a limit is {SLACK:g} times the prediction, and at least {LEAST_S:g} s{budget}",
    ]
    return "\n".join([*heads, *lines, f"{'in all':<{width}}  {whole:6.1f} s, {whole / 60:.1f} min"])
