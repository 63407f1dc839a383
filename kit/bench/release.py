"""`kit bench release`: ways to release communicators, side by side, by the number of groups and of ranks.

Ways take turns, each in new ranks, since two of them leave groups behind. A time is that of the slowest rank; what was freed is the least
of all ranks, and what is left at the end the most. Each row names the mechanism that made its communicators again, and a way is judged
against ways with the same mechanism.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kit.bench.session import Part, Row, Session, number, progress, row, unmeasured
from kit.errors import KitError
from kit.results.units import columns


class Way(NamedTuple):
    """A mode of releasing. `by_store`: communicators come back over the store also in a mode that would split the default group."""

    mode: str
    by_store: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode}, by store" if self.by_store else self.mode


WAYS = tuple(map(Way, ("exact", "abort", "manual", "official", "suspend")))
LIKE_EXACT = Way("manual", by_store=True)  # what exact is compared with where plain `manual` uses another mechanism
# Milliseconds a group, all three times together. NCCL: half of what 20 groups took on eight H200 in the one public measurement.
AIM_MS = {"gloo": 3.0, "nccl": 300.0}
AIM_RANKS = 2
MS, MIB = 1e3, 2**20
TIMEOUT_S = 300.0
TIMES = ("release", "back", "first collective")
ROUND = "round"  # all three: a communicator that comes back lazily is only made by its first collective
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
WORDS = dict(SOURCES.values())

Seen = dict[str, Any]  # one rank's answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    groups: tuple[int, ...] = (0, 40, 80)  # 0: as many as Megatron makes
    ranks: int = 2  # of these
    more_ranks: tuple[int, ...] = (4, 8)  # with as many groups as Megatron makes
    trials: int = 3  # fresh ranks for each way and number
    cycles: int = 3  # in each


QUICK = Sizes(groups=(0, 40), more_ranks=(), trials=1, cycles=2)


def parts(sizes: Sizes, _: str) -> dict[str, Part]:
    part = partial(side_by_side, trials=sizes.trials, cycles=sizes.cycles)
    made: dict[str, Part] = {f"groups.{n or 'own'}": partial(part, ranks=sizes.ranks, total=n) for n in sizes.groups}
    return made | {f"ranks.{n}": partial(part, ranks=n, total=0, most_a_gpu=sizes.ranks) for n in sizes.more_ranks}


def side_by_side(
    session: Session, ranks: int, total: int, *, trials: int, cycles: int, most_a_gpu: int = 0
) -> Iterator[Row]:
    """Of one number of groups and of ranks, way by way; after each trial the rows of all that was measured so far."""
    what = f"{total or 'own'} groups, {ranks} ranks"
    about = {"ranks": ranks}
    seen: dict[Way, list[list[Seen]]] = {}
    broken: set[Way] = set()
    with session.world(ranks, preload=("megatron.core",), timeout_s=TIMEOUT_S) as world:
        places = [place["device"] for place in world.status()]
        if most_a_gpu and session.device == "cuda" and (most := max(map(places.count, places))) > most_a_gpu:
            yield unmeasured(what, f"{most} ranks would share a GPU", ids=about)
            return
        ways = list(WAYS)
        if session.device == "cuda":
            ways.insert(ways.index(Way("official")), LIKE_EXACT)
        for way in WAYS:
            if why := world.call("kit.bench.onranks.release:refused", mode=way.mode)[0]:
                broken.add(way)
                yield unmeasured(what, why, who=way.name, ids={**about, "way": way.name})
        for trial, way in itertools.product(range(trials), ways):
            if way in broken:
                continue
            progress(f"{what}, {way.name}, {trial + 1} of {trials}")
            world.restart()
            asked: dict[str, Any] = {"mode": way.mode, "by_store": way.by_store}
            try:
                answers = world.call("kit.bench.onranks.release:cycles", **asked, total=total, n=cycles)
            except KitError as error:
                broken.add(way)
                yield unmeasured(what, error, who=way.name, ids={**about, "way": way.name})
                continue
            seen.setdefault(way, []).append(answers)
            yield from of(ranks, seen, aim=total == 0)


def of(ranks: int, seen: dict[Way, list[list[Seen]]], *, aim: bool = True) -> Iterator[Row]:
    """Every row of one number of groups."""
    for way, answers in seen.items():
        groups, mechanism = answers[0][0]["groups"], answers[0][0]["mechanism"]
        what = f"{groups} groups a rank, {ranks} ranks: "
        ids: dict[str, str | int | float] = {"ranks": ranks, "groups": groups, "way": way.name, "mechanism": mechanism}
        for part in (*TIMES, ROUND):
            about = judged(way, seen, ids, aim=aim and ranks == AIM_RANKS) if part == ROUND else {"note": mechanism}
            yield row(what + part, seconds(answers, part), who=way.name, unit="ms", ids={**ids, "what": part}, **about)
        for source, (word, unit) in SOURCES.items():
            if not any(source in rank["left"] for trial in answers for rank in trial):
                continue
            scale = MIB if unit == "MiB" else 1
            freed = [min(cycle["freed"].get(source, 0) for cycle in turn) / scale for turn in turns(answers)]
            left = [max(rank["left"].get(source, 0) for rank in trial) / scale for trial in answers]
            for kind, values in (("freed", freed), ("left", left)):
                name = f"{kind} {word}"
                yield row(what + name, values, who=way.name, unit=unit, ids={**ids, "what": name})


def judged(way: Way, seen: dict[Way, list[list[Seen]]], ids: Seen, *, aim: bool) -> Seen:
    """What the whole round of `exact` may take: that of what is in common use, if it makes communicators by the same mechanism."""
    note = ids["mechanism"]
    if way != Way("exact"):
        return {"note": note}
    about: Seen = {"aim": AIM_MS["gloo" if note.startswith("gloo") else "nccl"] * ids["groups"] if aim else None}
    like = [one for one in (LIKE_EXACT, Way("manual")) if one in seen and seen[one][0][0]["mechanism"] == note]
    if not like:
        return {**about, "note": f"{note}; nothing was measured here by the same mechanism"}
    limit = statistics.median(seconds(seen[like[0]], ROUND))
    return {**about, "limit": limit, "note": f"{note}; the limit is what {like[0].name!r} takes, by the same mechanism"}


def seconds(answers: Sequence[Sequence[Seen]], part: str) -> list[float]:
    """Milliseconds, a sample a cycle: the ranks meet after each part, so that each counts with its slowest."""
    parts = TIMES if part == ROUND else (part,)
    return [MS * sum(max(cycle["seconds"][each] for cycle in turn) for each in parts) for turn in turns(answers)]


def turns(answers: Sequence[Sequence[Seen]]) -> list[tuple[Seen, ...]]:
    """For each cycle of each trial, what every rank answered."""
    return [turn for trial in answers for turn in zip(*(rank["cycles"] for rank in trial), strict=True)]


def table(made: Sequence[Row]) -> str:
    """A line for each way and number, with times as median and spread; under it what was judged and what was not measured."""
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for one in made:
        if "what" in one.ids:
            key = (str(one.ids["ranks"]), str(one.ids["groups"]), str(one.ids["way"]))
            lines.setdefault(key, {})[str(one.ids["what"])] = one
    sources = {word: unit for word, unit in WORDS.items() if any(f"freed {word}" in line for line in lines.values())}
    heads = ["ranks", "groups", "way", *(f"{part} [ms]" for part in TIMES)]
    heads += [f"{word} [MiB]" if unit == "MiB" else word for word, unit in sources.items()]
    cells = [
        [*key, *(spread(line[part]) for part in TIMES), *(there_and_left(line, word) for word in sources)]
        for key, line in lines.items()
    ]
    notes = [
        f"{one.who}, {one.what}: {number(one.median)} {one.unit}, at most {number(one.limit)}: {'met' if one.met else 'NOT MET'}"
        for one in made
        if one.met is not None
    ]
    notes += [f"{one.who}, {one.what}: {one.note}" for one in made if one.note and one.ids.get("what") in {None, ROUND}]
    n = " to ".join(str(each) for each in sorted({line["release"].n for line in lines.values()}))
    legend = f"Median, least and greatest, n = {n}; groups to memory: "
    legend += "freed by a release / more at the end than at first."
    return "\n".join([columns([heads, *cells], right=range(len(heads))), "", *([legend] if lines else []), *notes])


def spread(one: Row) -> str:
    return f"{number(one.median)} ({number(one.low)}-{number(one.high)})"


def there_and_left(line: dict[str, Row], word: str) -> str:
    if f"freed {word}" not in line:
        return ""
    return " / ".join(number(line[f"{what} {word}"].median) for what in ("freed", "left"))
