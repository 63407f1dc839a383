"""All groups of a job released and brought back in every way: the rows, and the table that a person reads."""

from __future__ import annotations

import itertools
import re
import statistics
from typing import TYPE_CHECKING, Any

from kit.bench.report import number, progress
from kit.bench.rows import KIT, Row, row
from kit.errors import KitError
from kit.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

WAYS = ("exact", "abort", "manual", "official", "suspend")
AIM_MS, AIM_RANKS = 60.0, 2  # released and back, with as many groups as Megatron makes
MS, MIB = 1e3, 2**20
TIMEOUT_S = 300.0
BOTH = "release + back"
TIMES = ("release", "back", BOTH, "first collective")
# What is counted and weighed, in words and in which unit. A source that a machine does not have is left out.
SOURCES = {
    "groups": ("groups", "1"),
    "sockets": ("sockets", "1"),
    "threads": ("threads", "1"),
    "rss_anon": ("host memory", "MiB"),
    "reserved": ("allocator", "MiB"),
    "driver": ("driver", "MiB"),
    "comm_total": ("communicators", "MiB"),
}
WHAT = re.compile(r"(\d+) groups a rank, (\d+) ranks: (.+)")

Seen = dict[str, Any]  # what one rank said of its cycles


def measure(rows: list[Row], ranks: int, totals: Sequence[int], logs: Path, *, trials: int, cycles: int) -> None:
    """Add rows of this many ranks: number of groups by number, way by way. What was measured is added also where the rest breaks."""
    seen: dict[tuple[int, str], list[list[Seen]]] = {}
    missing: dict[tuple[str, str], str] = {}  # by what and who
    try:
        with World(ranks, logs=logs, preload=("megatron.core",), timeout_s=TIMEOUT_S) as world:
            for way in WAYS:
                if why := world.call("kit.bench.release.onranks:refused", mode=way)[0]:
                    missing[f"groups, {ranks} ranks", way] = why
            refused = {way for _, way in missing}
            for trial, total, way in itertools.product(range(trials), totals, WAYS):
                what = f"{total or 'own'} groups, {ranks} ranks"
                if way in refused or (what, way) in missing:
                    continue
                progress(f"{what}, {way}, {trial + 1} of {trials}")
                world.restart()
                try:
                    told = world.call("kit.bench.release.onranks:cycles", mode=way, total=total, n=cycles)
                    seen.setdefault((told[0]["groups"], way), []).append(told)
                except KitError as error:
                    missing[what, way] = in_a_line(error)
    except KitError as error:
        missing[f"groups, {ranks} ranks", KIT] = in_a_line(error)
    finally:
        rows += [one for total in dict.fromkeys(total for total, _ in seen) for one in of(total, ranks, seen)]
        rows += [Row(what=what, who=who, note=f"not measured: {why}") for (what, who), why in missing.items()]


def in_a_line(error: KitError) -> str:
    return str(error).partition("\n")[0]


def of(total: int, ranks: int, seen: dict[tuple[int, str], list[list[Seen]]]) -> Iterator[Row]:
    """Every row of one number of groups. Exact is held against what is in common use, manual."""
    what = f"{total} groups a rank, {ranks} ranks: "
    for way in WAYS:
        if not (told := seen.get((total, way))):
            continue
        for part in TIMES:
            about: dict[str, Any] = {}
            if (way, part) == ("exact", BOTH):
                manual = seconds(seen.get((total, "manual"), []), BOTH)
                about["limit"] = statistics.median(manual) if manual else None
                about["aim"] = AIM_MS if ranks == AIM_RANKS and total == min(each for each, _ in seen) else None
            yield row(what + part, seconds(told, part), who=way, unit="ms", **about)
        for source, (word, unit) in SOURCES.items():
            scale = MIB if unit == "MiB" else 1
            freed = [
                min(rank["cycles"][turn]["freed"].get(source, 0) for rank in trial) / scale
                for trial in told
                for turn in range(len(trial[0]["cycles"]))
            ]
            left = [max(rank["left"].get(source, 0) for rank in trial) / scale for trial in told]
            if any(source in rank["left"] for trial in told for rank in trial):
                yield row(f"{what}freed {word}", freed, who=way, unit=unit)
                yield row(f"{what}left {word}", left, who=way, unit=unit)


def seconds(told: Sequence[Sequence[Seen]], part: str) -> list[float]:
    """Milliseconds, a sample a cycle: the ranks meet after each part, so that each counts with its slowest."""
    parts = ("release", "back") if part == BOTH else (part,)
    return [
        MS * sum(max(rank["cycles"][turn]["seconds"][each] for rank in trial) for each in parts)
        for trial in told
        for turn in range(len(trial[0]["cycles"]))
    ]


def table(rows: Sequence[Row]) -> str:
    """A line for each way and number, with times as median and spread; under it what was judged and what was not measured."""
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for one in rows:
        if found := WHAT.fullmatch(one.what):
            lines.setdefault((found[2], found[1], one.who), {})[found[3]] = one
    times = [part for part in TIMES if part != BOTH]
    sources = {word: unit for word, unit in SOURCES.values() if any(f"freed {word}" in line for line in lines.values())}
    heads = ["ranks", "groups", "way", *(f"{part} [ms]" for part in times)]
    heads += [f"{word} [MiB]" if unit == "MiB" else word for word, unit in sources.items()]
    cells = [
        [*key, *(spread(line[part]) for part in times), *(there_and_left(line, word) for word in sources)]
        for key, line in lines.items()
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    told = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [heads, *cells]]
    judged = [
        f"{one.who}, {one.what}: {number(one.median)} {one.unit}, at most {number(one.limit)}: {'met' if one.met else 'NOT MET'}"
        for one in rows
        if one.met is not None
    ]
    under = [*judged, *(f"{one.who}, {one.what}: {one.note}" for one in rows if one.note)]
    n = " to ".join(str(each) for each in sorted({line["release"].n for line in lines.values()}))
    legend = f"Median, least and greatest, n = {n}; of groups to memory: given back by a release / more at the end than at first."
    return "\n".join([*told, "", legend, *under])


def spread(one: Row) -> str:
    return f"{number(one.median)} ({number(one.low)}-{number(one.high)})"


def there_and_left(line: dict[str, Row], word: str) -> str:
    if f"freed {word}" not in line:
        return ""
    return " / ".join(number(line[f"{what} {word}"].median) for what in ("freed", "left"))
