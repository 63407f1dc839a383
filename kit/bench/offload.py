"""`kit bench offload`, `release` and `routing`: the time to release and restore a job's memory and communicators.

`offload`: how fast a job's tensors are offloaded and reloaded. Plain copies of the same bytes take turns with each move in the same
processes. Ratios are of times: 1.43 times memcpy's time is 0.7 of its speed.

`release`: ways to release communicators, by number of groups and ranks. Ways take turns, each in new ranks, because two of them leave
groups behind. Times are of the slowest rank; freed bytes are the minimum over ranks, bytes left at the end the maximum. Each row names the
mechanism that remade its communicators; a way is judged only against ways with the same mechanism.

`routing`: the offload lab with collectives through torch's own backends and through torchcomms, turn by turn, each run in fresh ranks. The
results of the job (losses, gradient norms, a digest of all tensors) must be bit-identical; a time is a ratio, on over off. Where
routing has no effect, nothing is measured and the rows say why.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.bench.session import Bench, Part, Row, Session, number, over, progress, row, unmeasured
from kit.errors import BadInput, KitError
from kit.results.units import columns
from kit.routing import FLAGS, TORCHCOMMS

if TYPE_CHECKING:
    from kit.results import Run

JOBS = "kit.bench.onranks.jobs"
MIB, GIB = 2**20, 2**30

# -- offload: tensors out and back beside plain copies of the same bytes ---------------------------------------------------

OUT, BACK, ON_CUDA = 1 / 0.7, 1 / 0.8, 1 / 0.8
SAVER = "torch_memory_saver"


def offload_parts(
    _: str, *, models: Sequence[str] = ("125m", "qwen2.5-0.5b"), trials: int = 2, cycles: int = 5
) -> dict[str, Part]:
    """`trials` are fresh processes per model, each with one first cycle. `cycles` are the steady ones in each trial."""
    ways = {"tensors": tensors, "saver": saved}
    return {
        f"{name}.{model}": partial(way, model=model, trials=trials, cycles=cycles)
        for name, way in ways.items()
        for model in models
    }


def tensors(session: Session, model: str, *, trials: int, cycles: int) -> Iterator[Row]:
    """One rank with no other at work, because copies of several ranks share the memory bandwidth, as do memcpy's."""
    from kit.labs.offload.lab import LAB

    assert LAB.fits is not None
    try:
        LAB.fits(LAB.config(size=model, ranks=1, tp=1))  # type: ignore[call-arg]  # fields of this lab's own config
    except BadInput as error:
        yield unmeasured(f"{model}: tensors", error)
        return
    for seen in in_trials(session, f"tensors of {model}", trials, "tensors", size=model, cycles=cycles):
        yield from _cuda_rows(model, seen) if session.device == "cuda" else _cpu_rows(model, seen)


def saved(session: Session, model: str, *, trials: int, cycles: int) -> Iterator[Row]:
    """torch_memory_saver in separate ranks, because it can only release memory that it allocated."""
    what = f"{model}: out and back"
    if session.device == "cpu":
        yield unmeasured(what, "it pauses CUDA memory, which needs a GPU", who=SAVER)
        return
    try:
        for seen in in_trials(session, f"{SAVER} with {model}", trials, "saved", size=model, cycles=cycles):
            if refused := seen[-1].get("refused"):
                yield Row(what=what, who=SAVER, note=refused)
                return
            note = f"{min(one['left'] for one in seen) / GIB:.2f} GiB left the GPU, with what training leaves cached"
            for way in ("out", "back"):
                taken = [value for one in seen for value in one["times"][way]]
                yield row(f"{model}: {way}", taken, who=SAVER, note=note)
    except KitError as error:
        yield unmeasured(what, error, who=SAVER)


def in_trials(session: Session, what: str, trials: int, function: str, **asked: Any) -> Iterator[list[dict[str, Any]]]:
    """After each trial in fresh processes, the answers of all trials so far."""
    seen: list[dict[str, Any]] = []
    with session.world(1, preload=("megatron.core",), timeout_s=600) as world:
        for trial in range(trials):
            progress(f"{what}, {trial + 1} of {trials}")
            if trial:
                world.restart()
            seen += world.call(f"{JOBS}:{function}", **asked)
            yield seen


class Samples:
    """All trials of one model."""

    def __init__(self, model: str, seen: list[dict[str, Any]]) -> None:
        self.seen = seen
        self.what = f"{model}, {seen[0]['tensors']} tensors, {seen[0]['bytes'] / GIB:.2f} GiB"

    def of(self, name: str) -> list[float]:
        return [value for one in self.seen for value in one["times"].get(name, [])]

    def row(self, what: str, name: str, who: str = "kit", **about: Any) -> Row:
        return row(f"{self.what}: {what}", self.of(name), who=who, **about)

    def ratio(self, what: str, name: str, other: str, limit: float) -> Row:
        return over(f"{self.what}: {what}", self.of(name), self.of(other), limit=limit)

    def common(self, one_by_one: str) -> list[Row]:
        refused = self.seen[0]["refused"]
        native = "Megatron's own"
        return [
            self.row("out", "clone_out", one_by_one, note="into new memory; frees nothing"),
            self.row("back", "clone_back", one_by_one),
            *([] if refused else [self.row("back", "native_back", native)]),
            self.row("out and back" if refused else "out", "native_out", native, note=refused),
        ]


def _cpu_rows(model: str, seen: list[dict[str, Any]]) -> list[Row]:
    s, threads = Samples(model, seen), f"{seen[0]['threads']} thread(s)"
    left = [100 * (1 - (full - empty) / one["bytes"]) for one in seen for full, empty in one["resident"]]
    return [
        s.row("out, first cycle", "first_out", note="includes populating the host memory"),
        s.row("back, first cycle", "first_back"),
        s.row("out", "steady_out", note=threads),
        s.row("out", "copy_out", "memcpy", note="one thread, blocks of at most 1 GiB, both places warm"),
        s.ratio("out, time over memcpy's", "steady_out", "copy_out", OUT),
        s.row("back", "steady_back", note=threads),
        s.row("back", "populate", "populate, then copy", note="one thread, new memory, large pages requested"),
        s.row("back", "pieces", "populate and copy by pieces", note=f"the same, but {threads} and 8 MiB at a time"),
        s.row("back", "copy_back", "memcpy", note="warm: all pages are populated"),
        s.ratio("back, time over populate-then-copy's", "steady_back", "populate", BACK),
        *s.common("a copy of every tensor"),
        row(f"{s.what}: of it still in anonymous memory when out", left, unit="%", limit=10.0),
    ]


def _cuda_rows(model: str, seen: list[dict[str, Any]]) -> list[Row]:
    s = Samples(model, seen)
    return [
        s.row("out, first cycle", "first_out", note="includes pinning the host memory"),
        s.row("back, first cycle", "first_back"),
        s.row("out", "steady_out"),
        s.row("out", "copy_out", "pinned copy"),
        s.ratio("out, time over a pinned copy's", "steady_out", "copy_out", ON_CUDA),
        s.row("back", "steady_back"),
        s.row("back", "copy_back", "pinned copy"),
        s.ratio("back, time over a pinned copy's", "steady_back", "copy_back", ON_CUDA),
        s.row("out", "pageable_out", "pageable copy", note="populated, unpinned host memory"),
        s.row("back", "pageable_back", "pageable copy"),
        *s.common(".cpu() of every tensor"),
    ]


OFFLOAD = Bench(offload_parts, {"models": ("125m",), "trials": 1, "cycles": 3})

# -- release: communicators, way by way ----------------------------------------------------------------------------------

WAYS = ("exact", "abort", "manual", "official", "suspend")
# Compared with exact if plain `manual` uses another mechanism: communicators are remade over the store, even in a mode that would split
# the default group.
LIKE_EXACT = "manual, by store"
# Milliseconds per group, all three times together. NCCL: half the time of 20 groups on eight H200 in the only public measurement.
AIM_MS = {"gloo": 3.0, "nccl": 300.0}
AIM_RANKS = 2
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


def release_parts(
    _: str,
    *,
    groups: Sequence[int] = (0, 40, 80),
    ranks: int = 2,
    more_ranks: Sequence[int] = (4, 8),
    trials: int = 3,
    cycles: int = 3,
) -> dict[str, Part]:
    """Parts by number of groups on `ranks` ranks (0: as many as Megatron makes), and for `more_ranks` with Megatron's groups.
    Fresh ranks for each way and trial, `cycles` in each."""
    part = partial(ways_compared, trials=trials, cycles=cycles)
    made: dict[str, Part] = {f"groups.{n or 'own'}": partial(part, ranks=ranks, total=n) for n in groups}
    return made | {f"ranks.{n}": partial(part, ranks=n, total=0, most_a_gpu=ranks) for n in more_ranks}


def ways_compared(
    session: Session, ranks: int, total: int, *, trials: int, cycles: int, most_a_gpu: int = 0
) -> Iterator[Row]:
    """One number of groups and of ranks, way by way; after each trial the rows of all measurements so far."""
    what = f"{total or 'own'} groups, {ranks} ranks"
    about = {"ranks": ranks}
    seen: dict[str, list[list[Seen]]] = {}
    broken: set[str] = set()
    with session.world(ranks, preload=("megatron.core",), timeout_s=300.0) as world:
        places = [place["device"] for place in world.status()]
        if most_a_gpu and session.device == "cuda" and (most := max(map(places.count, places))) > most_a_gpu:
            yield unmeasured(what, f"{most} ranks would share a GPU", ids=about)
            return
        for way in WAYS:
            if why := world.call(f"{JOBS}:refused", mode=way)[0]:
                broken.add(way)
                yield unmeasured(what, why, who=way, ids={**about, "way": way})
        ways = [way for way in (*WAYS, LIKE_EXACT) if session.device == "cuda" or way != LIKE_EXACT]
        for trial, way in itertools.product(range(trials), ways):
            if way in broken:
                continue
            progress(f"{what}, {way}, {trial + 1} of {trials}")
            world.restart()
            asked: Seen = {"mode": way.partition(",")[0], "by_store": way == LIKE_EXACT, "total": total, "n": cycles}
            try:
                answers = world.call(f"{JOBS}:cycles", **asked)
            except KitError as error:
                broken.add(way)
                yield unmeasured(what, error, who=way, ids={**about, "way": way})
                continue
            seen.setdefault(way, []).append(answers)
            yield from of(ranks, seen, aim=total == 0)


def of(ranks: int, seen: dict[str, list[list[Seen]]], *, aim: bool = True) -> Iterator[Row]:
    """Every row of one number of groups."""
    for way, answers in seen.items():
        groups, mechanism = answers[0][0]["groups"], answers[0][0]["mechanism"]
        what = f"{groups} groups a rank, {ranks} ranks: "
        ids: dict[str, str | int | float] = {"ranks": ranks, "groups": groups, "way": way, "mechanism": mechanism}
        for part in (*TIMES, ROUND):
            about = judged(way, seen, ids, aim=aim and ranks == AIM_RANKS) if part == ROUND else {"note": mechanism}
            yield row(what + part, milliseconds(answers, part), who=way, unit="ms", ids={**ids, "what": part}, **about)
        for source, (word, unit) in SOURCES.items():
            if not any(source in rank["left"] for trial in answers for rank in trial):
                continue
            scale = MIB if unit == "MiB" else 1
            freed = [min(cycle["freed"].get(source, 0) for cycle in turn) / scale for turn in turns(answers)]
            left = [max(rank["left"].get(source, 0) for rank in trial) / scale for trial in answers]
            for name, values in ((f"freed {word}", freed), (f"left {word}", left)):
                yield row(what + name, values, who=way, unit=unit, ids={**ids, "what": name})


def judged(way: str, seen: dict[str, list[list[Seen]]], ids: Seen, *, aim: bool) -> Seen:
    """The limit for the round of `exact`: the time of a common way, if that remakes communicators by the same mechanism."""
    note = ids["mechanism"]
    if way != "exact":
        return {"note": note}
    about: Seen = {"aim": AIM_MS["gloo" if note.startswith("gloo") else "nccl"] * ids["groups"] if aim else None}
    like = [one for one in (LIKE_EXACT, "manual") if one in seen and seen[one][0][0]["mechanism"] == note]
    if not like:
        return {**about, "note": f"{note}; no comparable way was measured with the same mechanism"}
    limit = statistics.median(milliseconds(seen[like[0]], ROUND))
    return {
        **about,
        "limit": limit,
        "note": f"{note}; the limit is the time of {like[0]!r}, which uses the same mechanism",
    }


def milliseconds(answers: Sequence[Sequence[Seen]], part: str) -> list[float]:
    """One sample per cycle: the ranks meet after each part, so each part takes as long as its slowest rank."""
    parts = TIMES if part == ROUND else (part,)
    return [1e3 * sum(max(cycle["seconds"][each] for cycle in turn) for each in parts) for turn in turns(answers)]


def turns(answers: Sequence[Sequence[Seen]]) -> list[tuple[Seen, ...]]:
    """For each cycle of each trial, the answers of all ranks."""
    return [turn for trial in answers for turn in zip(*(rank["cycles"] for rank in trial), strict=True)]


def release_table(made: Sequence[Row]) -> str:
    """A line per way and number, with times as median and spread; below, the judged and the unmeasured rows."""
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for one in made:
        if "what" in one.ids:
            key = tuple(str(one.ids[name]) for name in ("ranks", "groups", "way"))
            lines.setdefault(key, {})[str(one.ids["what"])] = one
    sources = dict(pair for pair in SOURCES.values() if any(f"freed {pair[0]}" in line for line in lines.values()))
    heads = ["ranks", "groups", "way", *(f"{part} [ms]" for part in TIMES)]
    heads += [f"{word} [MiB]" if unit == "MiB" else word for word, unit in sources.items()]
    cells = []
    for key, line in lines.items():
        times = [f"{number(one.median)} ({number(one.low)}-{number(one.high)})" for one in map(line.get, TIMES) if one]
        pairs = [[line.get(f"{kind} {word}") for kind in ("freed", "left")] for word in sources]
        cells.append([*key, *times, *(" / ".join(number(one.median) for one in pair if one) for pair in pairs)])
    notes = [
        f"{one.who}, {one.what}: {number(one.median)} {one.unit}, at most {number(one.limit)}: {'met' if one.met else 'NOT MET'}"
        for one in made
        if one.met is not None
    ]
    notes += [f"{one.who}, {one.what}: {one.note}" for one in made if one.note and one.ids.get("what") in {None, ROUND}]
    n = " to ".join(str(each) for each in sorted({line["release"].n for line in lines.values()}))
    legend = f"Median (minimum-maximum), n = {n}; groups to memory: freed by a release / increase from start to end."
    return "\n".join([columns([heads, *cells], right=range(len(heads))), "", *([legend] if lines else []), *notes])


RELEASE = Bench(release_parts, {"groups": (0, 40), "more_ranks": (), "trials": 1, "cycles": 2}, table=release_table)

# -- routing: the same numbers through torchcomms --------------------------------------------------------------------------

PHASES = ("build", "train", "release", "reload", "talk")
NUMBERS = "losses, gradient norms and digests that differ, on against off"


def routing_parts(_: str, *, turns: int = 5, cycles: int = 3) -> dict[str, Part]:
    def offload(session: Session) -> Iterator[Row]:
        with session.world(1, env={FLAGS[TORCHCOMMS]: "1"}) as world:
            routing = world.call("kit.routing:describe", name=TORCHCOMMS)[0]
        yield from routed(session, turns, cycles) if routing["effective"] else not_measured(str(routing["why"]))

    return {"offload": offload}


def not_measured(why: str) -> list[Row]:
    times = [unmeasured(f"{phase}, time on over off", why, unit="ratio") for phase in PHASES]
    return [unmeasured(NUMBERS, why, unit="1", limit=0.0), *times]


def routed(session: Session, turns: int, cycles: int) -> Iterator[Row]:
    """After each turn the rows of all turns so far."""
    from kit.results import outcomes  # here, because the ranks' interpreter may lack the packages for tables

    differ = 0
    ratios: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(turns):
        progress(f"offload through torch and through torchcomms, turn {turn + 1} of {turns}")
        order = ("torch", "torchcomms")[:: -1 if turn % 2 else 1]  # so neither profits from its position
        runs = {way: routed_run(session, session.logs / f"{turn}-{way}", way, cycles) for way in order}
        off, on = runs["torch"], runs["torchcomms"]
        if missed := [row.why for row in on.verdict() if row.check == "routing_effective" and not row.passed]:
            yield from not_measured(missed[0])
            return
        compared, found = outcomes(off, on)
        if not compared:
            yield from not_measured("the runs have no comparable number")
            return
        differ += found  # over all turns: one is enough
        note = f"{compared} numbers in each turn; turns: {turn + 1}"
        yield row(NUMBERS, [float(differ)], unit="1", limit=0.0, note=note)
        for phase, some in ratios.items():
            some.append(seconds_in(on, phase) / seconds_in(off, phase))
            yield row(f"{phase}, time on over off", some, unit="ratio")


def routed_run(session: Session, out: Path, way: str, cycles: int) -> Run:
    return session.lab("offload", out, routing=way, cycles=cycles, steps=1)


def seconds_in(run: Run, phase: str) -> float:
    """All cycles of a phase, by the slowest rank of each."""
    frame = run.frame()
    taken = frame[(frame["phase"] == phase) & (frame["metric"] == "seconds")]
    return float(taken.groupby("cycle")["value"].max().sum())


ROUTING = Bench(routing_parts, {"turns": 1, "cycles": 1})
