"""A reference's page: what is there, who sat where, what failed, what fell short; and the plan, with its arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.bench.cost import LEAST_S, SLACK
from kit.bench.pace import ASSUMED
from kit.bench.report import seated
from kit.results.files import read_json, write_text
from kit.results.recorded import machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kit.bench.pace import Pace
    from kit.bench.reference.parts import Part

SUMMARY = "README.md"
HEADS = ("part", "command", "ended", "s", "predicted s", "seats", "fell short")


def write(out: Path, parts: Sequence[Part], pace: Pace, missing: Mapping[str, str]) -> None:
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
    return [
        one["part"],
        f"`{one['command']}`",
        state,
        f"{one['seconds']:.0f}",
        f"{one.get('predicted', 0):.0f}",
        seats,
        short,
    ]


def markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def short_of(told: Mapping[str, Any]) -> list[str]:
    """Checks that failed, and rows of a bench that missed their limit or their aim."""
    checks = [row["check"] for row in told.get("verdict", ()) if row["passed"] is False]
    return checks + [f"{row['what']}" for row in told.get("rows", ()) if row["met"] is False]


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
    return "\n".join(
        [
            f"seconds ({pace.source}): "
            + ", ".join(f"{name.removesuffix('_s')} {one:.3g}" for name, one in times.items()),
            f"a limit is {SLACK:g} times the prediction, and at least {LEAST_S:g} s{budget}",
            *lines,
            f"{'in all':<{width}}  {whole:6.1f} s, {whole / 60:.1f} min",
        ]
    )
