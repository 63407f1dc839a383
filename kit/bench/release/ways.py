"""All groups of a job released and brought back in every way: the rows, and the table that a person reads."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.bench.report import number, progress
from kit.bench.rows import Row, row
from kit.bench.session import unmeasured
from kit.errors import KitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kit.bench.session import Session


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

Seen = dict[str, Any]  # what one rank said of its cycles


def rows(session: Session, ranks: int, total: int, *, trials: int, cycles: int, most_a_gpu: int = 0) -> Iterator[Row]:
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
            if why := world.call("kit.bench.release.onranks:refused", mode=way.mode)[0]:
                broken.add(way)
                yield unmeasured(what, why, who=way.name, ids={**about, "way": way.name})
        for trial, way in itertools.product(range(trials), ways):
            if way in broken:
                continue
            progress(f"{what}, {way.name}, {trial + 1} of {trials}")
            world.restart()
            asked: dict[str, Any] = {"mode": way.mode, "by_store": way.by_store}
            try:
                told = world.call("kit.bench.release.onranks:cycles", **asked, total=total, n=cycles)
            except KitError as error:
                broken.add(way)
                yield unmeasured(what, error, who=way.name, ids={**about, "way": way.name})
                continue
            seen.setdefault(way, []).append(told)
            yield from of(ranks, seen, aim=total == 0)


def of(ranks: int, seen: dict[Way, list[list[Seen]]], *, aim: bool = True) -> Iterator[Row]:
    """Every row of one number of groups."""
    for way, told in seen.items():
        groups, mechanism = told[0][0]["groups"], told[0][0]["mechanism"]
        what = f"{groups} groups a rank, {ranks} ranks: "
        ids: dict[str, str | int | float] = {"ranks": ranks, "groups": groups, "way": way.name, "mechanism": mechanism}
        for part in (*TIMES, ROUND):
            about = judged(way, seen, ids, aim=aim and ranks == AIM_RANKS) if part == ROUND else {"note": mechanism}
            yield row(what + part, seconds(told, part), who=way.name, unit="ms", ids={**ids, "what": part}, **about)
        for source, (word, unit) in SOURCES.items():
            if not any(source in rank["left"] for trial in told for rank in trial):
                continue
            scale = MIB if unit == "MiB" else 1
            freed = [
                min(rank["cycles"][turn]["freed"].get(source, 0) for rank in trial) / scale
                for trial in told
                for turn in range(len(trial[0]["cycles"]))
            ]
            left = [max(rank["left"].get(source, 0) for rank in trial) / scale for trial in told]
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


def seconds(told: Sequence[Sequence[Seen]], part: str) -> list[float]:
    """Milliseconds, a sample a cycle: the ranks meet after each part, so that each counts with its slowest."""
    parts = TIMES if part == ROUND else (part,)
    return [
        MS * sum(max(rank["cycles"][turn]["seconds"][each] for rank in trial) for each in parts)
        for trial in told
        for turn in range(len(trial[0]["cycles"]))
    ]


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
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    told = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [heads, *cells]]
    notes = [
        f"{one.who}, {one.what}: {number(one.median)} {one.unit}, at most {number(one.limit)}: {'met' if one.met else 'NOT MET'}"
        for one in made
        if one.met is not None
    ]
    notes += [f"{one.who}, {one.what}: {one.note}" for one in made if one.note and one.ids.get("what") in {None, ROUND}]
    n = " to ".join(str(each) for each in sorted({line["release"].n for line in lines.values()}))
    legend = f"Median, least and greatest, n = {n}; of groups to memory: given back by a release / more at the end than at first."
    return "\n".join([*told, "", *([legend] if lines else []), *notes])


def spread(one: Row) -> str:
    return f"{number(one.median)} ({number(one.low)}-{number(one.high)})"


def there_and_left(line: dict[str, Row], word: str) -> str:
    if f"freed {word}" not in line:
        return ""
    return " / ".join(number(line[f"{what} {word}"].median) for what in ("freed", "left"))
