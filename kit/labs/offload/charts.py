"""The charts of an offload run: memory through the phases, times, drift over cycles, counts; and modes of releasing side by side.

Memory after each phase is a bar; the first cycle stands apart from the later ones, which are drawn as their median. On the host,
bars are levels above the phase `baseline`, beside the job's tensors where these live there. On a GPU, bars reach up to what the driver
reports as used, and each part names its source. A part without a source is a difference: where NCCL gives no statistics, communicators
are what the driver reports beyond the allocator and beyond the level without a job. Ranks that share a GPU are drawn as one bar, unless
the driver reports each process. Controls and checks of content are most of a run's steps and not what it is about: one line sums them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from kit.draw.album import Charts
from kit.draw.chart import Plot
from kit.draw.data import RunData, Tables, read, with_attrs
from kit.draw.general import COUNT_LIMITS, COUNTS, TONES, drift_chart
from kit.draw.levels import Levels
from kit.draw.lines import Lines
from kit.draw.matrix import Matrix
from kit.draw.picture import Picture, paint
from kit.draw.points import Points, counts_in_words
from kit.draw.style import MARKERS, Look, theme
from kit.errors import BadInput
from kit.labs.offload.lab import KINDS
from kit.results import NotMeasured, Run, Verdict, VerdictRow
from kit.results.comparison import warnings
from kit.results.units import counted, size, size_unit
from kit.results.verdict import MARKS

WITHOUT = "baseline"  # the phase after which there are a context, loaded kernels and WORLD, and no job
BEFORE, IN_CYCLE = (WITHOUT, "build"), ("train", "release", "idle", "reload")
RESIDENT = ("anon_rss", "shared_rss")  # parts of the resident set
ASKED_AT = {WITHOUT: WITHOUT, "train": "fingerprint", "release": "idle", "idle": "idle"}  # where NCCL is asked
BELOW_TENSORS = ("others", "without", "nccl", "residual")  # what the allocator does not have
DIFFERENCE = "////"  # no source reports it


class Place(NamedTuple):
    """A place on the axis: a phase of some cycles, under a heading."""

    phase: str
    cycles: Sequence[int]
    part: str


def places_of(data: RunData) -> list[Place]:
    """Before the cycles, the first, the later ones taken together, and after them: those that were measured."""
    cycles = sorted(cycle for cycle, phase in data.order if phase == "release")
    later = cycles[1:]
    places = [Place(phase, [0], "before") for phase in BEFORE]
    places += [Place(phase, cycles[:1], "cycle 1") for phase in IN_CYCLE]
    if later:
        span = f"cycles {later[0]} to {later[-1]}, median" if later[1:] else f"cycle {later[0]}"
        places += [Place(phase, later, span) for phase in IN_CYCLE]
    places += [Place("train", [cycle + 1 for cycle in cycles[-1:]], "after")]
    measured = set(data.order)
    return [place for place in places if any((cycle, place.phase) in measured for cycle in place.cycles)]


def samples_at(data: RunData, metric: str, phase: str, cycles: Sequence[int]) -> pd.Series[float]:
    rows = data.of(metric, phase)
    return rows[rows["cycle"].isin(cycles)].set_index(["rank", "cycle"])["value"]


def level_of(
    data: RunData, metric: str, phase: str, cycles: Sequence[int], *, add: bool = True, of: str = "median"
) -> float | None:
    """The median (or what `of` names) over GPUs, or over ranks where each has its own number. With `add`, the sum over the ranks of a
    GPU of what each reports of itself; a number of the GPU counts once."""
    rows = samples_at(data, metric, phase, cycles)
    if rows.empty:
        return None
    gpu_of = data.memory.gpu_of
    groups = rows.groupby([rows.index.get_level_values(0).map(lambda rank: gpu_of.get(rank, rank)), "cycle"])
    return float((groups.sum() if add else groups.max()).agg(of))


def job_bytes(data: RunData, place: Place) -> dict[str, float]:
    """The job's tensors by kind after a phase, where the code under test reports them; what a release forgot is `left`."""
    if place.phase in {"release", "idle"}:
        left = level_of(data, "left_bytes", "idle", place.cycles, of="max")
        return {} if left is None else {"left": left}
    phase, cycles = ("release" if place.phase == "train" else "reload"), place.cycles
    if place.part == "after":
        phase, cycles = "reload", [cycle - 1 for cycle in cycles]
    sizes = {kind: level_of(data, f"{kind}_bytes", phase, cycles) for kind in KINDS}
    return {kind: size for kind, size in sizes.items() if size is not None and place.part != "before"}


# -- memory of the host and of a GPU -------------------------------------------------------------------------------------


def host_memory(data: RunData) -> pd.DataFrame:
    """What the kernel reports of a rank; the job's tensors beside it, unless they live on a device."""
    if "anon_rss" not in data.metrics():
        raise NotMeasured("the run has no resident bytes")
    at_home = "driver_used" not in data.metrics()
    base = {name: data.start(name) or 0.0 for name in (*RESIDENT, "rss")}
    bars = []
    for place in places_of(data):
        at = {"place": place.phase, "section": place.part}
        seen = {name: samples_at(data, name, *place[:2]) for name in (*RESIDENT, "rss", "peak_rss")}
        process = {name: float(seen[name].median()) - base[name] for name in RESIDENT if len(seen[name])}
        total, peak = seen["rss"] - base["rss"], seen["peak_rss"] - base["rss"]
        if place.phase == WITHOUT:  # its peak is of the control, which ends there
            peak = peak.iloc[:0]
        bars.append({**at, "side": "process", **process, "low": total.min(), "high": total.max(), "mark": peak.max()})
        if at_home:
            job = job_bytes(data, place)
            released = {"words": "0", "tone": "good"} if job.get("left") == 0 else {}
            bars.append({**at, "side": "job", **job, **released})
    return with_attrs(pd.DataFrame(bars), base=size(base["rss"]), ranks=data.ranks_word())


def gpu_memory(data: RunData) -> pd.DataFrame:
    """The parts of a GPU's memory from the bottom up. Sources are read one after another, so a difference may come out negative: it counts
    as 0."""
    if "driver_used" not in data.metrics():
        raise NotMeasured("the ranks had no CUDA device")
    # Without the driver's number for this process every time, its part of some bars would be missing.
    by_process = len(data.of("process_used")) == len(data.of("driver_used"))

    def own(place: Place) -> float | None:
        """What the driver reports of this process, else of the whole GPU."""
        metric = "process_used" if by_process else "driver_used"
        return level_of(data, metric, *place[:2], add=by_process)

    def beyond_allocator(place: Place) -> float:
        return (own(place) or 0.0) - (level_of(data, "reserved", *place[:2]) or 0.0)

    start = Place(WITHOUT, [0], "before")
    every = [start] if own(start) is not None else [Place(phase, [cycle], "") for cycle, phase in data.order]
    without = min(map(beyond_allocator, every))
    world = level_of(data, "communicators_total", WITHOUT, [0]) or 0.0
    bars = []
    for place in places_of(data):
        at = place[:2]
        beyond = max(beyond_allocator(place) - without + world, 0.0)
        asked_at = ASKED_AT.get(place.phase)
        reported = level_of(data, "communicators_total", asked_at, place.cycles) if asked_at else None
        reported = reported or (world or None)  # where NCCL is not asked WORLD is there all the same
        # NCCL may count what is suspended and not on the GPU.
        nccl = {} if reported is None else {"nccl": min(reported, beyond)}
        job = job_bytes(data, place)
        reserved, allocated = (level_of(data, name, *at) or 0.0 for name in ("reserved", "allocated"))
        parts = {
            "without": without - world,
            "residual": beyond - sum(nccl.values()),
            **nccl,
            **job,
            "other": max(allocated - sum(job.values()), 0.0),
            "slack": max(reserved - allocated, 0.0),
        }
        if by_process:
            parts["others"] = max((level_of(data, "driver_used", *at, add=False) or 0.0) - (own(place) or 0.0), 0.0)
        peak = None if place.phase == WITHOUT else level_of(data, "peak_allocated", *at)
        mark = None if peak is None else peak + sum(parts.get(name, 0.0) for name in BELOW_TENSORS)
        bars.append({"place": place.phase, "section": place.part, **parts, "mark": mark, "total": sum(parts.values())})
    rows = pd.DataFrame(bars)
    scale, _ = size_unit(float(rows["total"].max()))
    rows["words"] = [f"{total * scale:.4g}" for total in rows["total"]]
    ranks, gpus = len(data.ranks), len(set(data.memory.gpu_of.values()))
    shared = f"{counted(gpus, 'GPU')} shared by {ranks} ranks"
    alone = "1 rank" if ranks == 1 else f"median of {ranks} ranks"
    return with_attrs(
        rows,
        ranks=shared if gpus else alone,
        others_words="other processes and ranks"
        if len(set(data.gpus.values())) < len(data.gpus)
        else "other processes",
        context=f"CUDA context{'' if world else ', WORLD'}{'' if by_process else ', others'}",
        residual_words="not counted by NCCL" if "nccl" in rows else "communicators",
    )


HOST = Levels(
    rows=host_memory,
    heading="Host memory of a rank, {base} at the baseline ({ranks})",
    looks={
        "anon_rss": Look("faint", "anonymous", outline=True),
        "shared_rss": Look("grid", "shared, host arena included", outline=True),
        **{kind: Look(colour, f"job's {kind}") for colour, kind in enumerate(KINDS)},
    },
    mark_word="peak in the phase",
    label="above baseline",
    unit="B",
    height=3.4,
)
GPU = Levels(
    rows=gpu_memory,
    heading="GPU memory by use ({ranks})",
    looks={
        "others": Look("paper", "{others_words} (driver)", outline=True),
        "without": Look("grid", "{context} (driver, baseline)", outline=True),
        "nccl": Look(3, "communicators (NCCL's statistics)", outline=True),
        "residual": Look(3, "{residual_words} (driver's residual)", DIFFERENCE, outline=True),
        "weights": Look(0, "weights (the job)", outline=True),
        "grads": Look(1, "gradients (the job)", outline=True),
        "optimizer": Look(2, "optimizer (the job)", outline=True),
        "left": Look("bad", "not released (the job)", outline=True),
        "other": Look(5, "other tensors (allocator)", outline=True),
        "slack": Look("faint", "slack (allocator)", DIFFERENCE, outline=True),
    },
    mark_word="peak in the phase (allocator)",
    label="in use",
    unit="B",
    height=3.8,
)


# -- times and counts ----------------------------------------------------------------------------------------------------

# What is timed: a phase, or a part of it that the code under test reports.
TIMED = (
    ("release", "seconds", "release"),
    ("release", "groups_seconds", "its groups"),
    ("release", "tensors_seconds", "its tensors"),
    ("reload", "seconds", "reload"),
    ("reload", "groups_seconds", "its groups "),
    ("reload", "tensors_seconds", "its tensors "),
    ("talk", "seconds", "first collective"),
    ("train", "seconds", "train"),
)
LEFT_OUT = {
    "controls": ("control_build", "control", "control_end", "second_control"),
    "hashing and checks": ("fingerprint", "verify", "compare", "rehearse_restore", "rehearse_failure", "ownership"),
}


def release_times(data: RunData) -> pd.DataFrame:
    """Times of the first cycle and of the later ones; a training that had to be skipped took none."""
    trained, parts = data.of("trained_steps")["step"], []
    for phase, metric, name in TIMED:
        rows = data.of(metric, phase)
        if phase == "train" and len(trained):
            rows = rows[rows["step"].isin(trained)]
        parts.append(rows[rows["cycle"] > 0].assign(place=name))
    rows = pd.concat(parts)
    rows = rows.assign(lane=data.lanes(rows), kind=(rows["cycle"] > 1).map({False: "first", True: "later"}))
    later, slowest = rows[rows["cycle"] > 1], data.of("seconds").groupby("step").agg({"phase": "first", "value": "max"})
    seconds = {words: slowest[slowest["phase"].isin(phases)]["value"].sum() for words, phases in LEFT_OUT.items()}
    return with_attrs(
        rows,
        each=" and rank" if rows["lane"].nunique() == len(data.ranks) > 1 else ", all ranks",
        later=counts_in_words(later, "place", "rank") if len(later) else "",
        left_out="not drawn: " + ", ".join(f"{words} {total:.1f} s" for words, total in seconds.items()),
    )


STATES = {"before the release": "fingerprint", "released": "idle", "reloaded": "verify"}


def counts_by_cycle(data: RunData) -> pd.DataFrame:
    """A count in each cycle while training, while released and once reloaded, beside that of a process without the job. The limit is
    drawn above the level that the rule starts from: of groups the baseline, of the others what the job has once it is built."""
    parts = []
    for metric in [name for name in COUNTS if name in data.metrics()]:
        start = data.of(metric, WITHOUT)["value"].median()
        judged = start if metric == "groups" else data.of(metric, "build")["value"].median()
        about: dict[str, Any] = {
            "panel": COUNTS[metric] + ("" if pd.isna(start) else f" (without a job {start:g})"),
            "base": judged,
        }
        for state, phase in STATES.items():
            level = data.of(metric, phase).groupby("cycle")["value"].agg(["min", "median", "max"])
            level = level.set_axis(["low", "value", "high"], axis=1).rename_axis("x").reset_index()
            judged_state = "released" if metric == "groups" else "reloaded"
            parts.append(level.assign(kind=state, judged=state == judged_state, **about))
        cycles = pd.DataFrame({"x": [cycle for cycle, phase in data.order if phase == "idle"], "value": start})
        parts.append(cycles.assign(kind="process without a job", judged=False, **about))
    if not parts:
        raise NotMeasured("the run has no records of groups, files or threads")
    return with_attrs(pd.concat(parts), ranks="" if len(data.ranks) == 1 else f" (range of {len(data.ranks)} ranks)")


def is_released(data: RunData) -> bool:
    return {"release", "idle"} <= set(data.phases)


OURS = "kit.labs."


def heading(data: RunData) -> list[str]:
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp", "ep") if config.get(name, 1) > 1]
    own = str(config.get("implementation", OURS))
    how = f"mode {config.get('mode')}" if own.startswith(OURS) else own
    number = sum(phase == "release" for _, phase in data.order)
    return [", ".join([str(config.get("size", "")), *sizes]), how, counted(number, "cycle")]


TIMES = Points(
    rows=release_times,
    title="Time per phase and rank",
    heading="Time per phase{each}",
    looks={
        "first": Look(1, "cycle 1, n = 1", hollow=True, marker="o"),
        "later": Look(0, "later, {later}", marker="o"),
    },
    label="time",
    about="{left_out}",
    unit="s",
    height=3.5,
)
CENSUS = Lines(
    rows=counts_by_cycle,
    title="Groups, files, threads",
    heading="{panel}",
    looks={
        "before the release": Look(0, hollow=True, marker="o", size=7.5),
        "released": Look(4, marker="s"),
        "reloaded": Look(2, marker="^", size=4.0),
        "process without a job": Look("faint", marker="", line=1),
    },
    label="count",
    about="cycle{ranks}",
    limits=tuple(replace(limit, words="limit {limit:+g}: {at:g}") for limit in COUNT_LIMITS),
    least=4.0,
    zero=True,
    height=2.5,
)
CHARTS = Charts(
    plots={
        "memory": Plot("Memory by source", [HOST, GPU], below=True),
        "drift": drift_chart(phase="idle", when="while released"),
        "times": TIMES,
        "census": CENSUS,
    },
    overview=(("memory",), ("times", "drift"), ("census",), ("verdict",)),
    ready=is_released,
    words=heading,
)


# -- modes of releasing side by side: what each leaves behind, what its groups cost, and which checks see it -------------


# Each keeps its colour and shape, whichever are shown.
WAYS = ("exact", "abort", "manual", "official", "suspend", "manual, by store")
GROUP_TIMES = {"release": "destroy groups", "reload": "rebuild groups"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes(Tables):
    """Runs of one lab by the name of what is compared in them."""

    runs: Mapping[str, RunData]
    verdicts: Mapping[str, Verdict]


def plot_modes(runs: Sequence[Run], *, theme_name: str = "light") -> Picture:
    """Two or more offload runs. `theme_name` is light or dark."""
    if len(runs) < 2 or any(run.lab != "offload" for run in runs):
        raise BadInput("plot_modes compares modes: give it two or more runs of the offload lab")
    modes = Modes(
        runs={mode_of(run): read(run) for run in runs}, verdicts={mode_of(run): run.verdict() for run in runs}
    )
    if len(modes.runs) < len(runs):
        raise BadInput(f"two of these runs have the same mode; give one run per mode (here: {', '.join(modes.runs)})")
    looks = {
        way: Look(number, marker=MARKERS[number % len(MARKERS)]) for way, number in look_numbers(modes.runs).items()
    }
    left = Lines(
        rows=left_behind,
        heading="{panel} while released",
        looks=looks,
        label="more than without a job",
        about="cycle",
        least=5.0,
        height=2.5,
    )
    heading = "Time for groups ({n} each, median)"
    times = Points(rows=group_times, heading=heading, looks=looks, label="time", unit="s", share=4)
    checks = Matrix(rows=differing_checks, heading="Checks: {rest}", looks=looks, share=8)
    ranks = counted(len(next(iter(modes.runs.values())).ranks), "rank")
    title = f"offload · {ranks} · modes of releasing · counts of the worst rank"
    warned = [f"Warning: {why}" for why in warnings(runs)]
    rows = [[Plot("", [left])], [Plot("", [times, checks])]]
    return paint(rows, "\n".join([title, *warned]), theme(theme_name), modes)


def mode_of(run: Run) -> str:
    own = str(run.config["implementation"])
    return run.fault or (own.rpartition(":")[2] if not own.startswith(OURS) else str(run.config["mode"]))


def look_numbers(ways: Iterable[str]) -> dict[str, int]:
    """Numbers for colours and shapes: a mode has its own, as in the picture of the bench; others take what is free."""
    shown = list(ways)
    own = {way: WAYS.index(way) for way in shown if way in WAYS}
    free = (index for index in itertools.count() if index not in own.values())
    return own | {way: next(free) for way in shown if way not in WAYS}


def left_behind(modes: Modes) -> pd.DataFrame:
    """More than a process without the job has, while released: the worst rank of each cycle."""
    parts = []
    for metric, name in COUNTS.items():
        if all(metric in data.metrics() for data in modes.runs.values()):
            for way, data in modes.runs.items():
                base = data.of(metric, WITHOUT).set_index("rank")["value"]
                rows = data.of(metric, "idle")
                more = rows.assign(value=rows["value"] - rows["rank"].map(base)).groupby("cycle")["value"].max()
                parts.append(more.rename_axis("x").reset_index().assign(panel=name, kind=way, start=0.0))
    return pd.concat(parts)


def group_times(modes: Modes) -> pd.DataFrame:
    parts = [
        data.of("groups_seconds", phase).assign(place=name, lane=way, kind=way)
        for phase, name in GROUP_TIMES.items()
        for way, data in modes.runs.items()
    ]
    rows = pd.concat(parts)
    return with_attrs(rows, n=counts_in_words(rows, "place", "lane"))


def differing_checks(modes: Modes) -> pd.DataFrame:
    """A row per check on which the modes differ or fail, with what was measured."""
    checks: dict[str, dict[str, VerdictRow]] = {}
    for way, verdict in modes.verdicts.items():
        for row in verdict:
            checks.setdefault(row.check, {})[way] = row
    cells, rest = [], []
    for check, ways in checks.items():
        answers = {row.passed for row in ways.values()}
        if answers in ({True}, {None}):
            rest.append(answers)
            continue
        for way, row in ways.items():
            measured = "" if row.measured is None or row.passed else f" {row.measured:g}"
            words = f"{MARKS[row.passed].sign} {'not measured' if row.passed is None else measured}".strip()
            cells.append({"row": check, "column": way, "words": words, "tone": TONES[row.passed]})
    passed = rest.count({True})
    more = f"{passed} more pass in every run; {len(rest) - passed} not measured in any"
    return with_attrs(pd.DataFrame(cells), rest=more)
