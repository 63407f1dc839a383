"""`kit bench stream` and `kit bench share`: gain and cost of asynchrony and time sharing, on the labs' loops.

`stream`: the gain over the plain loop, the accuracy of the recomputation, and whether the loop learns. Every row comes from one
run of the lab with the phases that it needs.

`share`: the cost of time sharing compared with its bound, whether it changes numbers, the time of a switch, and the scheduler's speed.
Parts are independent; `scheduler` needs no ranks.

Ranks of the parts `paced` and `makespan` wait for each token and each trained sample, as with a larger model, so the loop is measured
instead of the ranks' competition for this machine's cores.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import pandas as pd

from kit.bench.session import Bench, Part, Row, Session, progress, row
from kit.labs.share import tables as share_tables
from kit.labs.stream import tables as stream_tables
from kit.labs.stream.rules import ledger, verified
from kit.loop.messages import Event
from kit.results import with_ids
from kit.share.core import Scheduler
from kit.share.state import Plan, Settings, State, Turn
from kit.stream.history import LoopLedger
from kit.world.world import Worlds


def ratio(what: str, value: float, limit: float | None, note: str, **about: Any) -> Row:
    return row(what, [value], unit="ratio", limit=limit, note=note, **about)


def none_of(what: str, found: float | None, note: str) -> Row:
    """A count that must be 0; if it is missing, the note gives the reason."""
    return row(what, [] if found is None else [found], unit="1", limit=0.0, note=note)


# -- stream ----------------------------------------------------------------------------------------------------------------

RANKS: dict[str, Any] = {"ranks": 3, "replicas": 2, "groups": 4, "group": 4}
# Long answers with few in flight, so many span a sync; a learning rate at which versions differ measurably.
STAMPED: dict[str, Any] = {**RANKS, "groups": 8, "slots": 8, "answer": (8, 28), "decode": 2, "lr": 3e-3}
STAMPED |= {"phases": "stream,verify"}
# A sample has 16 tokens, and a call of a replica writes 4 tokens of each sample: a step takes 16 x 150 ms to generate and 16 samples x
# 150 ms to train. The pace is slow compared with messages and a small model's work. Only one step's groups are generated at a time.
PACED: dict[str, Any] = {**RANKS, "answer": (16, 16), "decode": 4, "pace_ms": 150.0, "train_pace_ms": 150.0}
PACED |= {"window": 1, "slots": 4, "layers": 1, "previous": "recorded", "phases": "plain,stream"}
# Sums and differences of 0, 1 and 2. After 40 supervised updates some answers are right and most have the right form.
TASK: dict[str, Any] = {"numbers": 3, "answer": (1, 2), "warm": 40, "lr": 2e-3, "layers": 2}
LEARNS: dict[str, Any] = {**RANKS, **TASK, "groups": 8, "group": 8, "micro_batch": 8, "decode": 2, "phases": "stream"}
ERRORS = 5.0  # least rise of the reward in standard errors
ON_POLICY: dict[str, Any] = {"sampler": "strict", "window": 0}
STALE: tuple[dict[str, Any], ...] = tuple(
    {"window": window, **correction}
    for window in (1, 4)
    for correction in ({"correction": True}, {"correction": False, "previous": "recorded"})
)


def stream_parts(
    _: str, *, steps: int = 5, paced_steps: int = 9, decidable: int = 10_000, learning_steps: int = 40, seeds: int = 3
) -> dict[str, Part]:
    """`decidable` is the number of tokens needed to judge the stamps."""
    return {
        "lockstep": partial(lockstep, steps=steps),
        "stamps": partial(stamps, steps=steps, decidable=decidable),
        "paced": partial(paced, steps=paced_steps),
        "learns": partial(learns, steps=learning_steps, seeds=seeds),
    }


def lockstep(session: Session, steps: int) -> Iterator[Row]:
    progress("lockstep compared with plain")
    run = session.lab("stream", session.logs / "lockstep", **RANKS, steps=steps, phases="plain,lockstep")
    answer = next(each for each in run.verdict() if each.check == "equals_plain")
    yield none_of("outcomes of the loop with staleness 0 that differ from the plain loop", answer.measured, answer.why)


def stamps(session: Session, steps: int, decidable: int) -> Iterator[Row]:
    """Runs with different seeds until enough tokens are decidable."""
    total: dict[str, float] = {"decidable": 0.0}
    turn = 0
    with session.worlds((1, 1, 1)) as worlds:
        while total["decidable"] < decidable:
            progress(f"stamps, run {turn + 1}: {total['decidable']:.0f} of {decidable} decidable tokens")
            config = {**STAMPED, "steps": steps, "seed": 1234 + turn}
            found = verified(session.lab("stream", session.logs / f"stamps-{turn}", world=worlds, **config).frame())
            total = {name: total.get(name, 0.0) + value for name, value in found.items()}
            turn += 1
    note = (
        f"{total['tokens']:.0f} tokens of {total['samples']:.0f} samples, {total['decidable']:.0f} decidable: no other version "
        f"comes within 10 times the noise; runs with different seeds: {turn}"
    )
    yield none_of("wrong stamps among decidable tokens", total["wrong_stamps"], note)
    yield ratio("share of undecidable tokens", 1 - total["decidable"] / total["tokens"], 0.5, note)
    yield ratio("share of samples without a sync inside", 1 - total["samples_over_syncs"] / total["samples"], 0.9, note)
    missed = 1 - total["shuffled_found"] / total["shuffled"]
    note = f"{total['shuffled']:.0f} decidable tokens of the first samples of each run, with every stamp off by one version"
    yield ratio("share of wrong stamps of a control that were not found", missed, 0.01, note)


def paced(session: Session, steps: int) -> Iterator[Row]:
    """K steps with equal times for generation and training: at best 2K / (K + 1) times as fast as in sequence."""
    progress(f"{steps} paced steps, plain and streamed")
    frame = session.lab("stream", session.logs / "paced", **PACED, steps=steps).frame()
    loops = stream_tables.loops(frame).set_index("loop")
    plain, streamed = (float(loops["total"][loop]) for loop in ("plain", "stream"))
    possible, gain = 2 * steps / (steps + 1), plain / streamed
    exposed = float(stream_tables.steps(frame)["exposed_generation"][1:].sum())
    note = f"4 groups of 4 samples, two replicas, window 1, 150 ms per token and trained sample; K={steps}; control: the plain loop, "
    why = (
        f"{note}{plain:.1f} s, streamed {streamed:.1f} s: speed-up {gain:.2f} of {possible:.2f}; paced, not real, times"
    )
    yield ratio("possible over reached speed-up of streaming", possible / gain, 1 / 0.9, why)
    whole, all_of_it = (float(loops["exposed_generation"][loop]) for loop in ("plain", "stream"))
    why = f"{note}{whole:.1f} s, streamed {exposed:.2f} s after the first step's {all_of_it - exposed:.1f} s"
    yield ratio("exposed generation after the first fill over the plain loop's", exposed / whole, 0.1, why)


def learns(session: Session, steps: int, seeds: int) -> Iterator[Row]:
    """Mean reward of the last fifth of steps compared with the first fifth, on policy and stale, from the same warm start."""
    with session.worlds((1, 1, 1)) as worlds:
        for seed in range(1234, 1234 + seeds):
            rose = math.nan  # the reward for the time to reach it
            for more in (ON_POLICY, *STALE):
                window, correction = more["window"], more.get("correction", True)
                about = f"seed {seed}, staleness {window}{'' if correction else ', no correction'}"
                progress(f"learning, {about}")
                out = session.logs / about.replace(", ", "-").replace(" ", "")
                config = {**LEARNS, **more, "seed": seed, "steps": steps}
                rows = ledger(session.lab("stream", out, world=worlds, **config).frame(), "stream")
                assert rows is not None  # a broken run has raised
                curve = Curve(rows, config)
                rose = curve.middle if window == 0 else rose
                ids = {"seed": seed, "staleness": window, "correction": int(correction), **curve.ids(rose)}
                over = curve.error / max(curve.gain, curve.error / 100)  # 100: no gain
                limit = 1 / ERRORS if window == 0 else None
                yield ratio(f"standard error over gain of reward, {about}", over, limit, curve.note(rose), ids=ids)


class Curve:
    """Rewards of the groups trained in each step, and the step's end."""

    def __init__(self, rows: LoopLedger, config: Mapping[str, Any]) -> None:
        from kit.train.arithmetic import DIGITS, END, problem, reward  # loads torch

        self.fifth = fifth = max(1, config["steps"] // 5)
        self.steps: list[list[float]] = [[] for _ in range(config["steps"])]  # the mean reward of each group
        lags, asked = [], []
        for one in rows.by_event["trained"]:
            group, step = one.number("group"), one.number("step")
            samples = rows.samples[group].values()
            self.steps[step].append(statistics.fmean(float(sample.completed[-1]["reward"]) for sample in samples))
            lags.append(one.number("version") - min(rows.oldest(group).values()))
            if step >= config["steps"] - fifth:
                asked.append(problem(config["seed"], group, config["numbers"]))
        self.ends = [one.since for one in rows.by_event["bumped"]]
        self.lag = statistics.fmean(lags)
        first, last = ([*chain(*some)] for some in (self.steps[:fifth], self.steps[-fifth:]))
        self.first, self.last = statistics.fmean(first), statistics.fmean(last)
        self.gain, self.middle = self.last - self.first, (self.first + self.last) / 2
        self.error = math.sqrt(sum(statistics.variance(some) / len(some) for some in (first, last)))
        answers = [answer for length in (1, 2) for answer in product(range(DIGITS), repeat=length)]
        self.constant = max(statistics.fmean(reward(each, [*one, END]) for each in asked) for one in answers)

    def reached(self, level: float) -> int | None:
        """The first step that starts a fifth of the steps with this mean reward."""
        ends = range(self.fifth, len(self.steps) + 1)
        means = ((end, statistics.fmean(chain(*self.steps[end - self.fifth : end]))) for end in ends)
        return next((end for end, mean in means if mean >= level), None)

    def ids(self, level: float) -> dict[str, float]:
        step = self.reached(level)
        found = {"gain": self.gain, "error": self.error, "constant": self.constant, "lag": self.lag}
        return found if step is None else {**found, "reached_steps": step, "reached_s": self.ends[step - 1]}

    def note(self, level: float) -> str:
        step = self.reached(level)
        when = "never" if step is None else f"after {step} steps, {self.ends[step - 1]:.1f} s"
        return (
            f"reward {self.first:.3f} to {self.last:.3f}, {self.gain / self.error:.1f} standard errors; the best constant answer "
            f"gets {self.constant:.3f}; {level:.3f} reached {when}; mean lag {self.lag:.1f}; {len(self.steps)} steps"
        )


STREAM = Bench(stream_parts, {"steps": 2, "paced_steps": 3, "decidable": 100, "learning_steps": 10, "seeds": 1})

# -- share -----------------------------------------------------------------------------------------------------------------

# B's answers are half as long as A's, so a static half of the devices is too little for A: 1.38 times the bound by arithmetic. Each trains
# where the planner lets it generate first. A replica needs 20 ms per token; two groups per pipeline are in flight at once.
TWO_PACED: dict[str, Any] = {
    "train_a": (1,),
    "train_b": (0,),
    "answer_a": (12, 12),
    "answer_b": (6, 6),
    "pace_ms": (20, 20),
}
TWO_PACED |= {"train_pace_ms": (5, 5), "groups": 24, "group": 2, "slots": 2, "decode": 2, "layers": 1, "warm": 0}
TWO_PACED |= {"controls": "all", "rehearse": False}
# 174 MiB of weights. A replica handles orders after each token, so a switch hardly waits for a call in flight.
LARGE: dict[str, Any] = {"size": "125m", "layers": 1, "warm": 0, "steps_a": 2, "steps_b": 2, "groups": 2, "group": 2}
LARGE |= {"answer_a": (4, 4), "answer_b": (4, 4), "decode": 1, "deadline_s": 120.0, "rehearse": False}
PIPELINES, DEVICES = 32, 512  # for the part scheduler


def share_parts(
    _: str, *, steps: int = 5, paced_steps: int = 9, runs: int = 5, rounds: int = 100, plans: int = 9
) -> dict[str, Part]:
    """`runs` is the number of runs of the part switch; each has one or two switches."""
    return {
        "together": partial(together, steps=steps),
        "makespan": partial(makespan, steps=paced_steps),
        "switch": partial(switch, runs=runs),
        "scheduler": lambda _: scheduler(rounds, plans),
    }


def together(session: Session, steps: int) -> Iterator[Row]:
    """Outcomes of both pipelines together compared with each alone, and the observers' samples of the devices."""
    progress("both together compared with each alone")
    run = session.lab("share", session.logs / "together", steps_a=steps, steps_b=steps, rehearse=False)
    same = next(each for each in run.verdict() if each.check == "same_numbers")
    note = f"{steps} steps each, staleness 0"
    why = f"{note}; control: each alone; {same.why}"
    yield none_of("outcomes of two pipelines that differ from those alone", same.measured, why)
    seen, two, blind = owners(run.frame())
    why = f"{note}; locks of {run.config['devices']} devices, {seen} samples from outside, every 20 ms"
    if blind:
        why = "not measured: this kernel shows no locks of other processes"
    yield none_of("samples of devices with two owners", None if blind else two, why)


def owners(frame: pd.DataFrame) -> tuple[int, int, bool]:
    """The observer's samples of devices in the phase shared, the number with two owners, and whether it was blind."""
    rows = with_ids(frame[(frame["phase"] == "shared") & (frame["metric"] == "seen_samples")], "two_owners", "blind")
    return int(rows["value"].sum()), int(rows["two_owners"].sum()), bool(rows["blind"].max())


def makespan(session: Session, steps: int) -> Iterator[Row]:
    """Two unequal pipelines: together, each alone, in sequence, and each on half of the devices, in one run."""
    progress(f"two unequal paced pipelines, {steps} steps each, in five loops")
    frame = session.lab("share", session.logs / "makespan", **TWO_PACED, steps_a=steps, steps_b=steps).frame()
    by, loops = share_tables.arithmetic(frame), share_tables.loops(frame).set_index("loop")
    work = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in by.work.items())
    alone = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in by.alone.items())
    note = (
        f"2 devices, K={steps} steps of 24 groups of 2; answers of 12 (A) and 6 (B) tokens at 20 ms; device-seconds of work {work}; alone "
        f"{alone}; bound {by.bound:.1f} s = max(work / devices, longest alone) + switches / devices; paced, not real, times"
    )

    def over(what: str, seconds: float, limit: float | None = None) -> Row:
        return ratio(f"{what} over the bound", seconds / by.bound, limit, f"{note}; {seconds:.1f} s")

    yield over("time of both pipelines", float(loops["seconds"]["shared"]), 1.15)
    for loop, words in (("serial", "one after the other"), ("static", "half of the devices each")):
        yield replace(over(words, getattr(by, loop)), what=f"{words} over the bound, by arithmetic")
        if loops["known by"][loop] == "measured":
            yield over(words, float(loops["seconds"][loop]))


def switch(session: Session, runs: int) -> Iterator[Row]:
    """A switch, from the plan until the weights have arrived, compared with the medians of its parts when one pipeline has all devices. All
    times come from the ledger and exclude the seconds in which ranks hash weights for a check."""
    note = f"174 MiB of weights, {runs} runs with different seeds"
    alone: dict[str, list[float]] = {"shrink": [], "expand": [], "weights": []}
    found, hashed = list[float](), list[float]()
    with session.worlds((1, 1, 1)) as worlds:
        for frame in several(session, worlds, "switch-alone", runs, scenario="A"):
            for part, seconds in of_parts(frame).items():
                alone[part] += seconds
    sums = sum(statistics.median(seconds) for seconds in alone.values())
    with session.worlds((1,) * 6) as worlds:
        for frame in several(session, worlds, "switch", runs):
            some = switched(frame)
            found += some["total"]
            hashed += some["check"]
    each = ", ".join(f"{part} {statistics.median(seconds):.3f} s (n={len(seconds)})" for part, seconds in alone.items())
    yield row(
        "a switch over the sum of its parts alone",
        [one / sums for one in found],
        unit="ratio",
        limit=1.3,
        note=f"{note}; shrink A, wake B, send weights: median {statistics.median(found):.3f} s, without the check's SHA-256 of all weights "
        f"({statistics.median(hashed):.3f} s); control: one pipeline, {each}"
        if found
        else f"not measured: no switch in {note}",
    )


def several(session: Session, worlds: Worlds, name: str, runs: int, **config: Any) -> Iterator[pd.DataFrame]:
    for turn in range(runs):
        progress(f"{name}, run {turn + 1} of {runs}")
        whole = {**LARGE, **config, "seed": 1234 + turn}
        yield session.lab("share", session.logs / f"{name}-{turn}", world=worlds, **whole).frame()


def of_parts(frame: pd.DataFrame) -> dict[str, list[float]]:
    """For each cycle of one pipeline that moved one replica: the time to sleep, to wake, to get its weights."""
    table = share_tables.switches(frame)
    table = table[~(table["shrinks"] + table["expands"]).str.contains(",")]
    slept, woke = table[table["shrinks"] != ""], table[(table["expands"] != "") & (table["weights"] > 0)]
    given = woke["weights"] - woke["check"]
    return {"shrink": slept["shrink"].tolist(), "expand": woke["expand"].tolist(), "weights": given.tolist()}


def switched(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Seconds of each cycle in which one pipeline's replica slept and another one's woke and got weights; and of its check."""
    found: dict[str, list[float]] = {"total": [], "check": []}
    for one in share_tables.switches(frame).to_dict("records"):
        owners = {part.partition(".")[0] for part in (one["shrinks"], one["expands"]) if part}
        single = "," not in one["shrinks"] + one["expands"]
        if single and len(owners) == 2 and one["weights"] and not one["grants"]:
            found["total"].append(one["total"] - one["check"])
            found["check"].append(one["check"])
    return found


# -- the scheduler alone -----------------------------------------------------------------------------------------------------


def scheduler(rounds: int, plans: int) -> Iterator[Row]:
    """The scheduler's own time on this machine, with 32 pipelines and 512 devices; nothing else runs."""
    for tp in (1, 8):
        progress(f"the scheduler, tp={tp}")
        note = f"{PIPELINES} pipelines, {DEVICES} devices, replicas of {tp}; simulated"
        ids: Mapping[str, Any] = {"tp": tp, "pipelines": PIPELINES, "devices": DEVICES}
        about: dict[str, Any] = {"unit": "ms", "note": note, "ids": ids}
        moved = [1e3 * one for one in one_bundle(tp, rounds)]
        yield row(f"an event that moves one bundle, tp={tp}", moved, limit=1.0, **about)
        planned = [1e3 * from_nothing(tp) for _ in range(plans)]
        yield row(f"a plan from nothing, tp={tp}", planned, limit=25.0, **about)


class Timed:
    """Feeds a scheduler and answers it at once; `seconds` has the time of each event that moved a replica."""

    def __init__(self, tp: int) -> None:
        names = tuple(f"p{number:02}" for number in range(PIPELINES))
        self.core = Scheduler(Settings(devices=DEVICES, pipelines=names, admission_ms=0))
        self.state, _ = self.core.begin()
        self.seconds: list[float] = []
        every = ",".join(map(str, range(DEVICES)))
        for at, name in enumerate(names):
            self.feed(Event("register", name, generation=every, tp=tp, trainer=str(at * (DEVICES // PIPELINES))))
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


def from_nothing(tp: int) -> float:
    """All pipelines wait for devices in use, which then become free at once: one plan for all of them."""
    timed = Timed(tp)
    state = timed.state
    for name in timed.names:  # requests arrive while no plan may be made
        busy = changed(state, plan=Plan(), sleeping=frozenset({("p00", 0)}))
        state, _ = timed.core.step(busy, Event("acquire", name, kind="generation"))
    free = changed(state, plan=None, sleeping=frozenset(), due=True)
    begun = time.perf_counter()
    _, commands = timed.core.step(free, Event("progress", "p00", completed=1, target=100))
    seconds = time.perf_counter() - begun
    assert sum(one.name == "expand" for one in commands) == DEVICES // tp
    return seconds


def changed(state: State, **fields: Any) -> State:
    turn = Turn(state, Settings(devices=DEVICES, pipelines=("p00",)), "desk")
    for name, value in fields.items():
        setattr(turn, name, value)
    return State(turn)


def one_bundle(tp: int, rounds: int) -> list[float]:
    """Training acquires one device and releases it: events that move one replica, among 512 devices in use."""
    timed = Timed(tp)
    for name in timed.names:
        timed.feed(Event("acquire", name, kind="generation"))
    timed.seconds.clear()
    for number in range(rounds):
        name = timed.names[number % PIPELINES]
        timed.feed(Event("acquire", name, kind="training"))
        timed.feed(Event("release", name, kind="training"))
    return timed.seconds


SHARE = Bench(share_parts, {"steps": 2, "paced_steps": 2, "runs": 1, "rounds": 20, "plans": 3})
