"""The records of a run by phase: the ledgers of its pipelines and their desk, the records of ranks about themselves, and those of outside
observers. Also makes checks of ledger rules.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from kit.labs.definition import made, own_code
from kit.labs.share.lab import ALONE, MAIN, OWN, ShareConfig
from kit.results import Measured, Missing, NotMeasured, with_ids
from kit.results.frames import read_ids, rows_of
from kit.results.ledger import PerFrame, by_cores, events
from kit.results.records import Row, Unjudged, numbers
from kit.results.rules import Violations, settle
from kit.results.units import counted
from kit.share.judge.books import Books, DeskLedger
from kit.share.judge.pipelines import pipeline_rows
from kit.stream import judge as stream
from kit.stream.judge.history import LoopLedger

if TYPE_CHECKING:
    import pandas as pd

Measure = Callable[["pd.DataFrame", Mapping[str, Any]], Measured]
State = TypeVar("State")
Key = TypeVar("Key")
Value = TypeVar("Value")

# Of a pipeline's loop: a step may wait for all its groups.
LOOP_RULES = tuple(rule for rule in stream.RULES if rule.__name__ != "trains_before_straggler")

# -- ledgers --------------------------------------------------------------------------------------------------------------


def phase_runs(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows of each run of a phase. A new run begins with the settings of its pipelines, or when a core begins a second time."""
    part: list[Row] = []
    begun: set[str] = set()
    for row in rows:
        core = str(row.get("core", "")) if row.event == "begins" else ""
        if core in begun or (row.event == "capacity" and begun):
            yield part
            part, begun = [], set()
        begun |= {core} if core else set()
        part.append(row)
    if part:
        yield part


def read_parts(frame: pd.DataFrame, phase: str) -> list[list[Row]]:
    """The runs of a phase. In a run of another lab, all events are one run of the phase `shared`."""
    rows = rows_of(events(frame, phase, lab="share", main=MAIN))
    return [*phase_runs(rows)] if (frame["lab"] == "share").any() else [rows] if rows else []


def read_ledgers(frame: pd.DataFrame, phase: str) -> list[DeskLedger]:
    """The runs of a phase in which devices were requested."""
    asks = ("limits", "acquire", "granted")
    return [DeskLedger(part) for part in runs(frame, phase) if any(row.event in asks for row in part)]


runs = PerFrame(read_parts).of
ledgers = PerFrame(read_ledgers).of


def alone_phases(frame: pd.DataFrame) -> list[str]:
    return [phase for phase in frame["phase"].unique() if str(phase).startswith(ALONE)]


def judged_phases(frame: pd.DataFrame, config: Mapping[str, Any]) -> tuple[str, ...]:
    """All phases with ledgers, `shared` first; with own code only those that run it."""
    if own_code(config, OWN):
        return MAIN, "scripted", "rehearse"
    return (MAIN, "scripted", *alone_phases(frame), "static", "rehearse")


def every_ledger(frame: pd.DataFrame, phases: Iterable[str]) -> Iterator[tuple[str, DeskLedger]]:
    """Every ledger of these phases, with its origin."""
    for phase in phases:
        books = ledgers(frame, phase)
        for number, book in enumerate(books, 1):
            yield phase if len(books) == 1 else f"{phase} {number}", book


def loops(frame: pd.DataFrame, phases: Iterable[str]) -> Iterator[tuple[str, LoopLedger]]:
    """The ledger of each pipeline's loop, as the checks of the lab `stream` need it, with its origin."""
    for phase in phases:
        for part in runs(frame, phase):
            yield from ((f"{phase}, pipeline {name}", loop) for name, loop in loops_in(part))


def loops_in(rows: Sequence[Row]) -> Iterator[tuple[str, LoopLedger]]:
    """The ledger of each pipeline's loop, by the pipeline's name."""
    of_cores = by_cores(rows)
    for at, row in enumerate(rows):
        if row.event == "capacity" and "pipeline" in row.ids:
            name = str(row["pipeline"])
            own = rows if of_cores else until_new_ranks(rows[at + 1 :], name)
            yield name, LoopLedger([row, *pipeline_rows(own, name)])


def until_new_ranks(rows: Iterable[Row], name: str) -> list[Row]:
    """The rows of a pipeline of another system up to its next `capacity`, with which new ranks begin."""
    own = (row for row in rows if row.who == name)
    return [*itertools.takewhile(lambda row: row.event != "capacity", own)]


def judged_loop(loop: LoopLedger) -> Iterator[tuple[str, Measured]]:
    """The answers of the rules of the lab `stream` that have the rows they need in a loop, by their names."""
    for rule in LOOP_RULES:
        try:
            answer = settle(rule(loop))
        except NotMeasured:
            continue
        yield rule.__name__, answer


def of_ledgers(rule: Callable[[DeskLedger], Violations]) -> Measure:
    """The first ledger with violations, else the first answer. If the first ledger lacks an event, the rule is not measured."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        answers: list[Measured] = []
        lacking: list[NotMeasured] = []
        for origin, book in every_ledger(frame, judged_phases(frame, config)):
            try:
                answer = settled(rule, book)
            except NotMeasured as error:
                if not answers and not lacking and isinstance(error, Missing):
                    raise
                lacking.append(error)
                continue
            answers.append(Measured(answer.value, f"{origin}: {answer.why}"))
            if answer.value:
                return answers[-1]
        if not answers:
            raise [*lacking, Missing("no phase recorded a ledger of a desk")][0]
        beside = f"; no violation in {counted(len(answers) - 1, 'other ledger')}" if len(answers) > 1 else ""
        return Measured(0.0, answers[0].why + beside)

    return measure


def settled(rule: Callable[[DeskLedger], Violations], ledger: DeskLedger) -> Measured:
    try:
        return settle(rule(ledger))
    except (KeyError, ValueError, IndexError) as error:
        raise Unjudged(f"rows of the ledger contradict each other or lack an id: {error!r}") from error


# -- a ledger over time ---------------------------------------------------------------------------------------------------


def over_time(
    replay: Iterable[tuple[Row, State]], look: Callable[[State], Mapping[Key, Value]]
) -> Iterator[tuple[Key, Value, float, float]]:
    """The intervals in which a value of `look` stays constant: key, value, left, right, in order of their ends.

    `replay` gives each row with the state before it.
    """
    open_: dict[Key, tuple[Value, float]] = {}
    when = None
    for row, state in replay:
        when = row.time if when is None else when
        seen = look(state)
        for key in [key for key, (value, _) in open_.items() if seen.get(key) != value]:
            value, left = open_.pop(key)
            yield key, value, left, when
        for key, value in seen.items():
            open_.setdefault(key, (value, when))
        when = row.time
    yield from ((key, value, left, when) for key, (value, left) in open_.items() if when is not None)


class HolderSpan(NamedTuple):
    """The holders of devices: replicas that are waking, awake or sleeping (falling asleep), and other clusters with a lease."""

    pipeline: str
    role: str
    devices: tuple[int, ...]
    state: str
    left: float
    right: float


def spans(book: DeskLedger) -> list[HolderSpan]:
    return [HolderSpan(*key, *value, left, right) for key, value, left, right in over_time(book.replay(), in_use)]


def in_use(books: Books) -> dict[tuple[str, str], tuple[tuple[int, ...], str]]:
    states = {"sleeping": books.sleeping, "waking": books.waking, "awake": books.awake()}
    by_replica = {
        (name, f"replica {number}"): (tuple(sorted(books.bundle(name, number))), state)
        for state, replicas in states.items()
        for name, number in replicas
    }
    return by_replica | {(name, cluster): (books.clusters[name][cluster], "held") for name, cluster in books.held}


def seats(book: DeskLedger) -> dict[str, tuple[int, ...]]:
    """The devices of each role, by its pipeline and name ("a.replica 0"), and of each rank of it ("a.replica 0#1")."""
    seated: dict[str, tuple[int, ...]] = {}
    for row in book.of("clusters"):
        seated[f"{row.who}.trainer"] = numbers(row.get("trainer", ()))
        devices, tp = numbers(row.get("generation", ())), int(row.get("tp", 1))
        seated |= {f"{row.who}.replica {at // tp}": devices[at : at + tp] for at in range(0, len(devices), tp)}
    ranks = {f"{role}#{place}": (device,) for role, devices in seated.items() for place, device in enumerate(devices)}
    return seated | ranks


# -- ranks and observers --------------------------------------------------------------------------------------------------


def share_config(config: Mapping[str, Any]) -> ShareConfig:
    run: ShareConfig = made(ShareConfig, config)
    return run


def no_ranks(config: Mapping[str, Any]) -> str:
    if config.get("simulated", True):
        return "needs the records of ranks, which a simulated run or another system's ledger lacks"
    return ""


def lacking(frame: pd.DataFrame, what: str) -> NoReturn:
    """Records that every complete run has are missing, perhaps because of the code under test."""
    raise (Unjudged if (frame["phase"] == "end").any() else Missing)(what)


OWNERS = re.compile(r"\w+\.(?:trainer|replica \d+)|pid \d+")


def recorded_on_ranks(frame: pd.DataFrame, phase: str, metric: str, *ids: str) -> pd.DataFrame:
    return with_ids(frame[(frame["phase"] == phase) & (frame["metric"] == metric)], *ids).sort_values(
        "time", kind="stable"
    )


ON_GPUS = "seen_on_gpus"  # bytes of a rank's process, by the driver
RESERVED = "reserved"  # by the rank's allocator, whenever it fell asleep or woke


class Held(NamedTuple):
    """A lease of a device by an owner such as "a.replica 0"; `until` is infinite if no record shows its end."""

    device: int
    owner: str
    since: float
    until: float


def leases(frame: pd.DataFrame, phase: str) -> tuple[list[Held], list[str]]:
    """Leases as recorded by ranks, and a sentence for each time a rank took a device that another one held."""
    open_: dict[int, tuple[str, float]] = {}
    held, wrong = list[Held](), list[str]()
    for row in recorded_on_ranks(frame, phase, "lease", "device", "event").to_dict("records"):
        device, owner, when = int(row["device"]), str(row["text"]), float(row["time"])
        if row["event"] == "taken":
            if device in open_:
                wrong.append(
                    f"{owner} took device {device} while {open_[device][0]} held it, according to their leases"
                )
            open_[device] = owner, when
        elif device in open_ and open_[device][0] == owner:
            held.append(Held(device, owner, open_.pop(device)[1], when))
    held += [Held(device, owner, since, float("inf")) for device, (owner, since) in open_.items()]
    return held, wrong


class Sight(NamedTuple):
    """A period in which an observer saw these owners of a device."""

    owners: tuple[str, ...]
    since: float
    until: float


def sights(frame: pd.DataFrame, phase: str) -> dict[int, list[Sight]]:
    rows = recorded_on_ranks(frame, phase, "seen_owner", "device")
    by_device: dict[int, list[Sight]] = {}
    for device, looks in rows.groupby("device"):
        owners = [tuple(OWNERS.findall(text)) for text in looks["text"]]
        times = [*looks["time"], float("inf")]
        by_device[int(str(device))] = [Sight(*sight) for sight in zip(owners, times, times[1:], strict=False)]
    return by_device


@dataclass(slots=True)
class ResidentBytes:
    """The bytes of a rank over time; each level holds until the next. A reading is somewhere between its start and its end."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def at(self, when: float) -> float:
        return self.bytes[max(0, bisect.bisect_right(self.ends, when) - 1)]

    def between(self, since: float, until: float) -> list[float]:
        """All levels that may have been in an interval, including the one at its start."""
        inside = self.bytes[bisect.bisect_right(self.ends, since) : bisect.bisect_left(self.starts, until)]
        return [self.at(since), *inside]

    def within(self, since: float, until: float) -> list[float]:
        """All levels that were read in an interval, from start to end."""
        return self.bytes[bisect.bisect_left(self.starts, since) : bisect.bisect_left(self.ends, until)]


def memory_source(frame: pd.DataFrame, phase: str) -> str:
    """The metric of the ranks' memory. On GPUs it is what observers saw in the driver's list; where that lacks a rank, or has another
    process under its pid, which then has less than the rank's allocator, it is what the ranks themselves recorded."""
    own, seen = (
        {str(who): size for who, size in most_bytes(frame, phase, metric).items()} for metric in (RESERVED, ON_GPUS)
    )
    if not own:
        return ON_GPUS if seen else "seen_resident"
    return ON_GPUS if all(seen.get(who, -1.0) >= size for who, size in own.items()) else RESERVED


def most_bytes(frame: pd.DataFrame, phase: str, metric: str) -> dict[object, float]:
    return recorded_on_ranks(frame, phase, metric, "who").groupby("who")["value"].max().to_dict()


def residents(frame: pd.DataFrame, phase: str) -> dict[str, ResidentBytes]:
    rows = recorded_on_ranks(frame, phase, memory_source(frame, phase), "who")
    rows = rows.assign(start=rows["start"].fillna(rows["time"]))  # older runs have no start
    return {
        str(who): ResidentBytes(*(readings[name].tolist() for name in ("start", "time", "value")))
        for who, readings in rows.groupby("who", sort=False)
    }


def machines_of(rows: pd.DataFrame) -> pd.Series[int]:
    """The machine on which each row was observed. Older runs, which do not name it, are of one."""
    return rows["ids"].map(lambda text: read_ids(text).get("machine", 0)).astype(int)


def watched(frame: pd.DataFrame, phase: str, config: Any) -> Callable[[int, float, float], float]:
    """For a device, the seconds of an interval without those in which its machine was too busy for the observer to look."""
    rows = recorded_on_ranks(frame, phase, "seen_gap")
    machines = machines_of(rows)

    def seconds(device: int, since: float, until: float) -> float:
        here = rows[machines == config.machine_of(device)]
        unseen = (max(0.0, min(until, gap.time) - max(since, gap.start)) for gap in here.itertuples())
        return until - since - math.fsum(unseen)

    return seconds


def role_of(rank: str) -> str:
    """The owner of a rank: "a.trainer" for "a.trainer#1", the second of its ranks."""
    return rank.partition("#")[0]


def devices_of(config: Any, owner: str) -> tuple[int, ...]:
    """The devices of an owner ("a.replica 0") or of one of its ranks ("a.replica 0#1"), from a run's config."""
    name, _, place = owner.partition("#")
    pipeline, _, role = name.partition(".")
    devices: tuple[int, ...] = config.loops[pipeline].on_devices(role)
    return devices[int(place) : int(place) + 1] if place else devices
