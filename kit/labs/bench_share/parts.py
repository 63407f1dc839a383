"""The parts of the bench of time sharing: runs of the lab, what their ledgers say, and the scheduler alone."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from kit.labs.bench import Bench, Part, Samples, ratios, run_part, show_progress
from kit.labs.bench_share.loads import EVEN, FIRST_SEED, STANDARD
from kit.labs.definition import made
from kit.labs.lab import Drive
from kit.labs.share import tables
from kit.labs.share.drive import own_part, simulate_alone, simulate_pipelines
from kit.labs.share.lab import DESK, ShareConfig
from kit.labs.share.planned import planned_work
from kit.labs.share.simulated import refuse_broken
from kit.loop.messages import Event
from kit.results import with_ids
from kit.share.core import Scheduler
from kit.share.judge.specified import SPECIFIED
from kit.share.state import DeskSettings, DeskState, DeskTurn, Plan
from kit.world.world import Worlds

# 174 MiB of weights. A replica handles orders after each token, so a switch hardly waits for a call in flight.
LARGE: dict[str, Any] = {"size": "125m", "layers": 1, "warm": 0, "steps": 2, "groups": 2, "group": 2}
LARGE |= {"answer": (4, 4), "decode": 1, "deadline_s": 120.0, "rehearse": False}
ADAPTERS = 4  # on a replica, for the part adapters
# Pipelines and devices for the part scheduler.
SIZE, LARGE_SIZE = (32, 512), (64, 1024)


def compare_together(bench: Bench) -> Iterator[Samples]:
    """Outcomes of both pipelines together compared with each alone, and the observers' samples of the devices."""
    steps = bench.config.steps
    run = bench.lab("share", "together", steps=steps, rehearse=False)
    same = next(row for row in run.verdict() if row.check == "same_numbers")
    note = f"{steps} steps each, staleness 0"
    yield Samples(
        what="outcomes of two pipelines that differ from those alone",
        values=[] if same.measured is None else [same.measured],
        metric="outcomes_differ",
        unit="1",
        note=f"{note}; control: each alone; {same.why}",
    )
    seen, two, blind = owners(run.frame())
    why = f"{note}; locks of {run.config['devices']} devices, {seen} samples from outside, every 20 ms"
    if blind:
        why = "not measured: this kernel shows no locks of other processes"
    title = "samples of devices with two owners"
    yield Samples(what=title, values=[] if blind else [float(two)], metric="two_owners", unit="1", note=why)


def owners(frame: pd.DataFrame) -> tuple[int, int, bool]:
    """The observer's samples of devices in the phase shared, the number with two owners, and whether it was blind."""
    rows = with_ids(frame[(frame["phase"] == "shared") & (frame["metric"] == "seen_samples")], "two_owners", "blind")
    return int(rows["value"].sum()), int(rows["two_owners"].sum()), bool(rows["blind"].max())


# -- paced loads ---------------------------------------------------------------------------------------------------------------


class Loops(NamedTuple):
    """Seconds of the same work: `shared` under the desk, by planner; `serial` in turn; `static` with a part of the devices each."""

    shared: dict[str, float]
    serial: float
    static: float


def standard(bench: Bench) -> Iterator[Samples]:
    """Pipelines whose devices are idle at different times, with several seeds."""
    steps = bench.config.load_steps
    settings = [
        {**STANDARD, "steps": steps, "seed": FIRST_SEED + turn, "planner": "home"} for turn in range(bench.config.loads)
    ]
    bounds = [planned(each) for each in settings]  # before any run
    frames = [bench.lab("share", f"load-{turn}", **each).frame() for turn, each in enumerate(settings)]
    loops = [measured_loops(frame, "home") for frame in frames]
    note = f"2 devices, K={steps} steps of 6 groups of 4, {len(loops)} seeds; long answers, tools, rewards; paced, not real, times"
    yield from compared("two pipelines that wait", loops, bounds, note)
    yield Samples(
        what="two pipelines that wait, time together (home) over one after the other",
        values=[each.shared["home"] / each.serial for each in loops],
        metric="shared_over_serial",
        unit="ratio",
        note=note,
    )
    yield from device_time(frames, note)


def on_virtual_clock(bench: Bench) -> Iterator[Samples]:
    """The same pipelines with the kit's desk and controllers on simulated ranks, with more seeds and two planners."""
    steps, loops, bounds = bench.config.load_steps, list[Loops](), list[float]()
    for turn in range(bench.config.seeds):
        show_progress(f"seed {turn + 1} of {bench.config.seeds}")
        settings = {**STANDARD, "steps": steps, "seed": FIRST_SEED + turn, "simulated": True}
        bounds.append(planned(settings))
        loops.append(simulated_loops(made(ShareConfig, settings)))
    note = f"the same load on simulated ranks and a virtual clock, {len(loops)} seeds"
    yield from compared("simulated", loops, bounds, note, judged=False)
    for planner in SPECIFIED:
        values = [each.shared[planner] / each.serial for each in loops]
        title = f"simulated, time together ({planner}) over one after the other"
        yield Samples(what=title, values=values, metric="virtual_over_serial", unit="ratio", note=note)


def makespan(bench: Bench) -> Iterator[Samples]:
    """Pipelines that use all devices alone, one with twice the work of the other: sharing cannot gain."""
    settings = {**EVEN, "steps": bench.config.paced_steps}
    bound = planned(settings)
    loops = measured_loops(bench.lab("share", "makespan", **settings).frame(), "gap-ratio")
    note = f"2 devices, K={bench.config.paced_steps} steps of 24 groups of 2; answers of 12 (A) and 6 (B) tokens at 20 ms; paced"
    yield from compared("two pipelines that never wait", [loops], [bound], note)


def planned(settings: Mapping[str, Any]) -> float:
    return planned_work(made(ShareConfig, settings)).bound


def measured_loops(frame: pd.DataFrame, planner: str) -> Loops:
    seconds = tables.loops(frame).set_index("loop")["seconds"]
    return Loops({planner: seconds["shared"]}, seconds["serial"], seconds["static"])


def simulated_loops(config: ShareConfig) -> Loops:
    alone = [simulate_alone(config, name, range(loop.replicas)) for name, loop in config.loops.items()]
    halves = [simulate_alone(config, name, own_part(config, name)[1]) for name in config.loops]
    together: dict[str, float] = {}
    for planner in SPECIFIED:
        simulated = simulate_pipelines(dataclasses.replace(config, planner=planner))
        refuse_broken(simulated.ended, (*config.names, DESK))
        together[planner] = simulated.seconds
    return Loops(together, sum(alone), max(halves))


def compared(
    title: str, loops: Sequence[Loops], bounds: Sequence[float], note: str, *, judged: bool = True
) -> Iterator[Samples]:
    """Each loop over the bound, and the bound over the fastest loop of its run."""
    note = (
        f"{note}; bound {statistics.median(bounds):.1f} s = max(work / devices, longest path), computed before the runs"
    )
    ways = {f"together ({planner})": [each.shared[planner] for each in loops] for planner in loops[0].shared}
    shared = {*ways}
    ways |= {
        "one after the other": [each.serial for each in loops],
        "half of the devices each": [each.static for each in loops],
    }
    for how, seconds in ways.items():
        yield Samples(
            what=f"{title}, {how}, over the bound",
            values=[took / bound for took, bound in zip(seconds, bounds, strict=True)],
            metric="shared_over_bound" if how in shared and judged else "loop_over_bound",
            unit="ratio",
            note=f"{note}; median {statistics.median(seconds):.1f} s",
        )
    fastest = [bound / min(took) for *took, bound in zip(*ways.values(), bounds, strict=True)]
    what = f"{title}, the bound over the fastest loop"
    yield Samples(what=what, values=fastest, metric="bound_over_fastest", unit="ratio", note=note)


def device_time(frames: Sequence[pd.DataFrame], note: str) -> Iterator[Samples]:
    """The shares of all device time in use by owners, and of what keeps devices from it."""
    shares = [device_shares(frame) for frame in frames]
    for use in shares[0]:
        values = [share[use] for share in shares]
        yield Samples(what=f"device time: {use}", values=values, metric="device_time", unit="share", note=note)


def device_shares(frame: pd.DataFrame) -> dict[str, float]:
    uses, idle = tables.uses(tables.ledger(frame)), tables.idle(frame)
    seconds, total = uses.groupby("use")["seconds"].sum(), uses["seconds"].sum()
    used = {
        "work of owners": seconds.reindex(["generating", "training"]).sum(),
        "owner waits for tools, rewards or its next step": seconds.get("waiting", 0.0),
        "replica falls asleep, wakes or waits for weights": seconds.get("switching", 0.0),
    }
    free = {f"idle, {cause}": idle[cause].sum() for cause in tables.CAUSES}
    return {use: float(value / total) for use, value in {**used, **free}.items()}


# -- a switch ------------------------------------------------------------------------------------------------------------------


def time_switches(bench: Bench) -> Iterator[Samples]:
    """A switch, from the plan until the weights have arrived, compared with the medians of its parts when one pipeline has all devices. All
    times come from the ledger and exclude the seconds in which ranks hash weights for a check."""
    runs = bench.config.runs
    note = f"174 MiB of weights, {runs} runs with different seeds"
    alone: dict[str, list[float]] = {"shrink": [], "expand": [], "weights": []}
    seconds: dict[str, list[float]] = {"total": [], "check": []}
    with bench.worlds((1, 1, 1)) as worlds:
        for frame in several(bench, worlds, "switch-alone", scenario="A"):
            for part, values in of_parts(frame).items():
                alone[part] += values
    control = sum(statistics.median(values) for values in alone.values())
    with bench.worlds((1,) * 6) as worlds:
        for frame in several(bench, worlds, "switch"):
            for name, values in switched(frame).items():
                seconds[name] += values
    parts = ", ".join(f"{part} {statistics.median(values):.3f} s (n={len(values)})" for part, values in alone.items())
    why = f"not measured: no switch in {note}"
    if total := seconds["total"]:
        why = (
            f"{note}; shrink A, wake B, send weights: median {statistics.median(total):.3f} s, without the check's SHA-256 of all "
            f"weights ({statistics.median(seconds['check']):.3f} s); control: one pipeline, {parts}"
        )
    values = [value / control for value in total]
    title = "a switch over the sum of its parts alone"
    yield Samples(what=title, values=values, metric="switch_over_parts", unit="ratio", note=why)


def several(bench: Bench, worlds: Worlds, name: str, **config: Any) -> Iterator[pd.DataFrame]:
    for turn in range(bench.config.runs):
        show_progress(f"{name}, run {turn + 1} of {bench.config.runs}")
        yield bench.lab("share", f"{name}-{turn}", world=worlds, **{**LARGE, **config, "seed": 1234 + turn}).frame()


def of_parts(frame: pd.DataFrame) -> dict[str, list[float]]:
    """For each cycle of one pipeline that moved one replica: the time to sleep, to wake, to get its weights."""
    table = tables.switches(frame)
    table = table[~(table["shrinks"] + table["expands"]).str.contains(",")]
    slept, woke = table[table["shrinks"] != ""], table[(table["expands"] != "") & (table["weights"] > 0)]
    given = woke["weights"] - woke["check"]
    return {"shrink": slept["shrink"].tolist(), "expand": woke["expand"].tolist(), "weights": given.tolist()}


def switched(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Seconds of each cycle in which one pipeline's replica slept and another one's woke and got weights; and of its check."""
    seconds: dict[str, list[float]] = {"total": [], "check": []}
    for row in tables.switches(frame).to_dict("records"):
        pipelines = {part.partition(".")[0] for part in (row["shrinks"], row["expands"]) if part}
        single = "," not in row["shrinks"] + row["expands"]
        if single and len(pipelines) == 2 and row["weights"] and not row["grants"]:
            seconds["total"].append(row["total"] - row["check"])
            seconds["check"].append(row["check"])
    return seconds


# -- adapters --------------------------------------------------------------------------------------------------------------------


def serve_adapters(bench: Bench) -> Iterator[Samples]:
    """Rows of a replica with four adapters, one for each, compared with rows of its base alone, in turns."""
    size = bench.config.serving
    with bench.world(1, preload=("megatron.core",), timeout_s=300) as world:
        (seconds,) = world.call(
            "kit.labs.bench_share.ranks.serving:serve", size=size, adapters=ADAPTERS, rounds=bench.config.served
        )
    note = (
        f"{size}, {ADAPTERS} rows at once, one for each adapter; control: as many rows of the base in the same rounds"
    )
    title = f"a row of a replica with {ADAPTERS} adapters over one of the base"
    yield ratios("adapters_over_base", title, seconds["adapters"], seconds["base"], unit="ratio", note=note)


# -- the scheduler alone -----------------------------------------------------------------------------------------------------


def time_scheduler(bench: Bench) -> Iterator[Samples]:
    """The scheduler's own time on this machine; nothing else runs."""
    for tp in (1, 8):
        show_progress(f"the scheduler, tp={tp}")
        moved = [1e3 * seconds for seconds in one_bundle(tp, SIZE, bench.config.rounds)]
        title = f"an event that moves one bundle, tp={tp}"
        yield Samples(what=title, values=moved, metric="bundle_moved", **about_size(tp, SIZE))
        for what, metric, size in (
            ("a plan from nothing", "plan_from_nothing", SIZE),
            ("a plan for 64 pipelines", "large_plan", LARGE_SIZE),
        ):
            planned = [1e3 * from_nothing(tp, size) for _ in range(bench.config.plans)]
            yield Samples(what=f"{what}, tp={tp}", values=planned, metric=metric, **about_size(tp, size))


def about_size(tp: int, size: tuple[int, int]) -> dict[str, Any]:
    pipelines, devices = size
    note = f"{pipelines} pipelines, {devices} devices, replicas of {tp}; simulated"
    return {"unit": "ms", "ids": {"tp": tp, "pipelines": pipelines, "devices": devices}, "note": note}


class Timed:
    """Feeds a scheduler and answers it at once; `seconds` has the time of each event that moved a replica."""

    def __init__(self, tp: int, size: tuple[int, int]) -> None:
        pipelines, devices = size
        names = tuple(f"p{number:02}" for number in range(pipelines))
        self.core = Scheduler(DeskSettings(devices=devices, pipelines=names, admission_ms=0))
        self.state, _ = self.core.begin()
        self.seconds: list[float] = []
        every = ",".join(map(str, range(devices)))
        for at, name in enumerate(names):
            self.feed(Event("register", name, generation=every, tp=tp, trainer=str(at * (devices // pipelines))))
            self.feed(Event("admit", name))
            self.feed(Event("progress", name, completed=0, target=100 + at))
        self.names = names

    def feed(self, event: Event) -> None:
        begun = time.perf_counter()
        self.state, commands = self.core.step(self.state, event)
        seconds = time.perf_counter() - begun
        if moved := [command for command in commands if command.name in ("left", "expand")]:
            self.seconds.append(seconds)
        for command in moved:
            answer = "shrunk" if command.name == "left" else "expanded"
            self.feed(Event(answer, "desk", who=command.pipeline, replica=command.replica))


def from_nothing(tp: int, size: tuple[int, int]) -> float:
    """All pipelines wait for devices in use, which then become free at once: one plan for all of them."""
    timed = Timed(tp, size)
    state = timed.state
    for name in timed.names:  # requests arrive while no plan may be made
        busy = with_fields(state, plan=Plan(), sleeping=frozenset({("p00", 0)}))
        state, _ = timed.core.step(busy, Event("acquire", name, kind="generation"))
    free = with_fields(state, plan=None, sleeping=frozenset(), due=True)
    begun = time.perf_counter()
    _, commands = timed.core.step(free, Event("progress", "p00", completed=1, target=100))
    seconds = time.perf_counter() - begun
    assert sum(command.name == "expand" for command in commands) == size[1] // tp
    return seconds


def with_fields(state: DeskState, **fields: Any) -> DeskState:
    turn = DeskTurn(state, DeskSettings(devices=1, pipelines=("p00",)), "desk")
    for name, value in fields.items():
        setattr(turn, name, value)
    return DeskState(turn)


def one_bundle(tp: int, size: tuple[int, int], rounds: int) -> list[float]:
    """Training acquires one device and releases it: events that move one replica, with all devices in use."""
    timed = Timed(tp, size)
    for name in timed.names:
        timed.feed(Event("acquire", name, kind="generation"))
    timed.seconds.clear()
    for number in range(rounds):
        name = timed.names[number % len(timed.names)]
        timed.feed(Event("acquire", name, kind="training"))
        timed.feed(Event("release", name, kind="training"))
    return timed.seconds


PARTS: dict[str, Part] = {
    "together": compare_together,
    "load": standard,
    "seeds": on_virtual_clock,
    "makespan": makespan,
    "switch": time_switches,
    "adapters": serve_adapters,
    "scheduler": time_scheduler,
}


def measure_share(drive: Drive) -> None:
    run_part(drive, PARTS[drive.phase])
