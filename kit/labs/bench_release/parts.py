"""The parts of the bench of releasing: one number of groups and of ranks, way by way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from kit.errors import KitError
from kit.labs.bench import Bench, Samples, run_part, show_progress, unmeasured
from kit.labs.bench_release.lab import RANKS
from kit.labs.lab import Drive
from kit.machine import MIB

CYCLES = "kit.labs.bench_release.ranks.cycles"
WAYS = ("exact", "abort", "manual", "official", "suspend")
# Compared with exact if plain `manual` uses another mechanism: communicators are remade over the store, even in a mode that would split
# the default group.
LIKE_EXACT = "manual, by store"
TIMES = ("release", "back", "first collective")
ROUND = "round"  # all three, because a lazy communicator is only made by its first collective
# Sources of freed resources: label and unit. Sources that a machine lacks are left out.
SOURCES = {
    "groups": ("groups", "1"),
    "sockets": ("sockets", "1"),
    "threads": ("threads", "1"),
    "rss_anon": ("host memory", "MiB"),
    "reserved": ("allocator", "MiB"),
    "driver": ("driver", "MiB"),
    "comm_total": ("communicators", "MiB"),
}
Seen = dict[str, Any]  # one rank's answer


def ways_compared(bench: Bench, ranks: int, total: int, *, most_a_gpu: int = 0) -> Iterator[Samples]:
    """Fresh ranks for each way and trial. Ways take turns, so that the exact one is compared with a neighbour in time."""
    title = f"{total or 'own'} groups, {ranks} ranks"
    about = {"ranks": ranks}
    broken: set[str] = set()
    with bench.world(ranks, preload=("megatron.core",), timeout_s=300.0) as world:
        places = [place["device"] for place in world.status()]
        if most_a_gpu and bench.device == "cuda" and (most := max(map(places.count, places))) > most_a_gpu:
            yield unmeasured(title, f"{most} ranks would share a GPU", ids=about)
            return
        for way in WAYS:
            if why := world.call(f"{CYCLES}:refused", mode=way)[0]:
                broken.add(way)
                yield unmeasured(title, why, who=way, ids={**about, "way": way})
        ways = [way for way in (*WAYS, LIKE_EXACT) if bench.device == "cuda" or way != LIKE_EXACT]
        for trial in range(bench.config.trials):
            answers_of: dict[str, list[Seen]] = {}
            for way in ways:
                if way in broken:
                    continue
                show_progress(f"{title}, {way}, {trial + 1} of {bench.config.trials}")
                world.restart()
                asked: Seen = {"mode": way.partition(",")[0], "by_store": way == LIKE_EXACT, "total": total}
                try:
                    answers_of[way] = world.call(f"{CYCLES}:cycles", **asked, n=bench.config.cycles)
                except KitError as error:
                    broken.add(way)
                    yield unmeasured(title, error, who=way, ids={**about, "way": way})
                    continue
                yield from of_trial(ranks, way, answers_of[way])
            if "exact" in answers_of:
                yield exact_over_common(ranks, answers_of)


def of_trial(ranks: int, way: str, answers: Sequence[Seen]) -> Iterator[Samples]:
    """The times of one way in one trial, and what it freed and left."""
    groups, mechanism = answers[0]["groups"], answers[0]["mechanism"]
    title = f"{groups} groups a rank, {ranks} ranks: "
    ids: dict[str, str | int] = {"ranks": ranks, "groups": groups, "way": way, "mechanism": mechanism}
    for part in (*TIMES, ROUND):
        values = milliseconds(answers, part)
        about: Seen = {"who": way, "unit": "ms", "ids": {**ids, "of": part}, "note": mechanism}
        yield Samples(what=title + part, values=values, **about)
    for source, (word, unit) in SOURCES.items():
        if not any(source in rank["left"] for rank in answers):
            continue
        scale = MIB if unit == "MiB" else 1
        freed = [min(cycle["freed"].get(source, 0) for cycle in turn) / scale for turn in answers_by_cycle(answers)]
        left = [max(rank["left"].get(source, 0) for rank in answers) / scale]
        for name, values in ((f"freed {word}", freed), (f"left {word}", left)):
            about = {"who": way, "unit": unit, "ids": {**ids, "of": name}}
            yield Samples(what=title + name, values=values, metric=name.partition(" ")[0], **about)


def exact_over_common(ranks: int, answers_of: dict[str, list[Seen]]) -> Samples:
    """The round of `exact` over that of a common way, if that remakes communicators by the same mechanism; of neighbours in one turn."""
    first = answers_of["exact"][0]
    title, mechanism = f"{first['groups']} groups a rank, {ranks} ranks: exact over a common way", first["mechanism"]
    about: Seen = {"metric": "exact_over_common", "unit": "x", "who": "exact"}
    about["ids"] = {"ranks": ranks, "groups": first["groups"], "way": "exact", "mechanism": mechanism}
    ways = [way for way in (LIKE_EXACT, "manual") if way in answers_of]
    alike = next((way for way in ways if answers_of[way][0]["mechanism"] == mechanism), "")
    if not alike:
        note = f"not measured: {mechanism}; no comparable way was measured with the same mechanism"
        return Samples(what=title, note=note, **about)
    control = statistics.median(milliseconds(answers_of[alike], ROUND))
    values = [milliseconds_of_turn / control for milliseconds_of_turn in milliseconds(answers_of["exact"], ROUND)]
    return Samples(
        what=title, values=values, note=f"{mechanism}; over {alike!r}, which uses the same mechanism", **about
    )


def milliseconds(answers: Sequence[Seen], part: str) -> list[float]:
    """One sample per cycle: the ranks meet after each part, so each part takes as long as its slowest rank."""
    parts = TIMES if part == ROUND else (part,)
    return [
        1e3 * sum(max(cycle["seconds"][name] for cycle in turn) for name in parts) for turn in answers_by_cycle(answers)
    ]


def answers_by_cycle(answers: Sequence[Seen]) -> list[tuple[Seen, ...]]:
    """For each cycle, the answers of all ranks."""
    return list(zip(*(rank["cycles"] for rank in answers), strict=True))


def measure_release(drive: Drive) -> None:
    kind, _, count = drive.phase.partition(".")
    if kind == "ranks":
        run_part(drive, lambda bench: ways_compared(bench, int(count), 0, most_a_gpu=RANKS))
    else:
        run_part(drive, lambda bench: ways_compared(bench, RANKS, 0 if count == "own" else int(count)))
