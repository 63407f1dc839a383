"""`kit bench share`: what time sharing costs against its bound, whether it changes numbers, what a switch takes, and the scheduler's speed.

Ranks of the part `makespan` wait for each token and each trained sample, so that a device is a device however many cores there are. Each
part is by itself: `scheduler` needs no ranks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.bench.session import Row, Session, none_of, progress, ratio, row
from kit.loop.messages import Event
from kit.share.core import Scheduler
from kit.share.state import Plan, Settings, State, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pandas as pd

    from kit.results import Run
    from kit.world.world import Worlds

# B's answers are half as long as A's, so that a static half of the devices is too little for A: by arithmetic 1.38 times the bound. Each
# trains where the planner lets it generate first. A replica writes 20 ms a token, two groups of a pipeline are in flight at once.
PACED: dict[str, Any] = {
    "train_a": (1,),
    "train_b": (0,),
    "answer_a": (12, 12),
    "answer_b": (6, 6),
    "pace_ms": (20, 20),
}
PACED |= {"train_pace_ms": (5, 5), "groups": 24, "group": 2, "slots": 2, "decode": 2, "layers": 1, "warm": 0}
PACED |= {"controls": "all", "rehearse": False}
# 174 MiB of weights. A replica looks for orders after each token, so that a switch hardly waits for a call that is under way.
LARGE: dict[str, Any] = {"size": "125m", "layers": 1, "warm": 0, "steps_a": 2, "steps_b": 2, "groups": 2, "group": 2}
LARGE |= {"answer_a": (4, 4), "answer_b": (4, 4), "decode": 1, "deadline_s": 120.0, "rehearse": False}
PIPELINES, DEVICES = 32, 512  # of the scheduler alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    steps: int = 5
    paced_steps: int = 9
    runs: int = 5  # of the part switch; each has one or two switches
    rounds: int = 100
    plans: int = 9


QUICK = Sizes(steps=2, paced_steps=2, runs=1, rounds=20, plans=3)


def parts(sizes: Sizes, _: str) -> dict[str, Callable[[Session], Iterator[Row]]]:
    return {part.__name__: partial(part, sizes=sizes) for part in (together, makespan, switch, scheduler)}


# -- on ranks --------------------------------------------------------------------------------------------------------------


def together(session: Session, sizes: Sizes) -> Iterator[Row]:
    """Outcomes of both pipelines together beside each alone, and what observers saw of the devices meanwhile."""
    progress("both together beside each alone")
    run = session.lab("share", session.logs / "together", steps_a=sizes.steps, steps_b=sizes.steps, rehearse=False)
    yield from judged(run, f"{sizes.steps} steps each, staleness 0")


def judged(run: Run, note: str) -> Iterator[Row]:
    """Rows of the two claims that hold of any run."""
    answers = {each.check: each for each in run.verdict()}
    same = answers["same_numbers"]
    why = f"{note}; control: each alone; {same.why}"
    yield none_of("outcomes of two pipelines that differ from those alone", same.measured, why)
    seen, two, blind = owners(run.frame())
    why = f"{note}; locks of {run.config['devices']} devices, seen {seen} times from outside, every 20 ms"
    if blind:
        why = "not measured: this kernel shows no locks of other processes"
    yield none_of("samples of devices with two owners", None if blind else two, why)


def owners(frame: pd.DataFrame) -> tuple[int, int, bool]:
    """How often an observer looked at the devices of the phase shared, how often it saw two owners, and whether it saw nothing."""
    from kit.results import with_ids  # here, as what tables are made of is not the ranks' to have

    rows = with_ids(frame[(frame["phase"] == "shared") & (frame["metric"] == "seen_samples")], "two_owners", "blind")
    return int(rows["value"].sum()), int(rows["two_owners"].sum()), bool(rows["blind"].max())


def makespan(session: Session, sizes: Sizes) -> Iterator[Row]:
    """Two unequal pipelines: together, each alone, one after the other, and each on half of the devices, in one run."""
    from kit.labs.share import tables  # here, as above

    steps = sizes.paced_steps
    progress(f"two unequal paced pipelines, {steps} steps each, in five loops")
    config = {**PACED, "steps_a": steps, "steps_b": steps}
    run = session.lab("share", session.logs / "makespan", **config)
    frame = run.frame()
    by, loops = tables.arithmetic(frame), tables.loops(frame).set_index("loop")
    work = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in by.work.items())
    alone = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in by.alone.items())
    note = (
        f"2 devices, K={steps} steps of 24 groups of 2; answers of 12 (A) and 6 (B) tokens at 20 ms; device-seconds of work {work}; alone "
        f"{alone}; bound {by.bound:.1f} s = max(work / devices, longest alone) + switches / devices; no times of a product"
    )

    def over(what: str, seconds: float, limit: float | None = None) -> Row:
        return ratio(f"{what} over the bound", seconds / by.bound, limit, f"{note}; {seconds:.1f} s")

    yield over("time of both pipelines", float(loops["seconds"]["shared"]), 1.15)
    for loop, words in (("serial", "one after the other"), ("static", "half of the devices each")):
        yield replace(over(words, getattr(by, loop)), what=f"{words} over the bound, by arithmetic")
        if loops["known by"][loop] == "measured":
            yield over(words, float(loops["seconds"][loop]))


def switch(session: Session, sizes: Sizes) -> Iterator[Row]:
    """A switch, from the plan until the weights are in, beside the medians of its parts where one pipeline has all devices. All are taken
    from the ledger; the seconds in which ranks hash weights for a check are not counted in either."""
    note = f"174 MiB of weights, {sizes.runs} runs with another seed each"
    alone: dict[str, list[float]] = {"shrink": [], "expand": [], "weights": []}
    found, hashed = list[float](), list[float]()
    with session.worlds((1, 1, 1)) as worlds:
        for frame in several(session, worlds, "switch-alone", sizes, scenario="A"):
            for part, seconds in of_parts(frame).items():
                alone[part] += seconds
    sums = sum(statistics.median(seconds) for seconds in alone.values())
    with session.worlds((1,) * 6) as worlds:
        for frame in several(session, worlds, "switch", sizes):
            some = switched(frame)
            found += some["total"]
            hashed += some["check"]
    each = ", ".join(f"{part} {statistics.median(seconds):.3f} s (n={len(seconds)})" for part, seconds in alone.items())
    yield row(
        "a switch over the sum of its parts alone",
        [one / sums for one in found],
        unit="ratio",
        limit=1.3,
        note=f"{note}; shrink A, wake B, weights in: median {statistics.median(found):.3f} s, without the check's SHA-256 of all weights "
        f"({statistics.median(hashed):.3f} s); control: one pipeline, {each}"
        if found
        else f"not measured: no switch in {note}",
    )


def several(session: Session, worlds: Worlds, name: str, sizes: Sizes, **config: Any) -> Iterator[pd.DataFrame]:
    for turn in range(sizes.runs):
        progress(f"{name}, run {turn + 1} of {sizes.runs}")
        whole = {**LARGE, **config, "seed": 1234 + turn}
        yield session.lab("share", session.logs / f"{name}-{turn}", world=worlds, **whole).frame()


def of_parts(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Of each cycle of one pipeline that moved one replica: how long it took to sleep, to wake, to get its weights."""
    from kit.labs.share import tables  # here, as above

    table = tables.switches(frame)
    table = table[~(table["shrinks"] + table["expands"]).str.contains(",")]
    slept, woke = table[table["shrinks"] != ""], table[(table["expands"] != "") & (table["weights"] > 0)]
    given = woke["weights"] - woke["check"]
    return {"shrink": slept["shrink"].tolist(), "expand": woke["expand"].tolist(), "weights": given.tolist()}


def switched(frame: pd.DataFrame) -> dict[str, list[float]]:
    """Seconds of each cycle in which one pipeline's replica slept and another one's woke and got weights; and of the check in it."""
    from kit.labs.share import tables  # here, as above

    found: dict[str, list[float]] = {"total": [], "check": []}
    for one in tables.switches(frame).to_dict("records"):
        owners = {part.partition(".")[0] for part in (one["shrinks"], one["expands"]) if part}
        single = "," not in one["shrinks"] + one["expands"]
        if single and len(owners) == 2 and one["weights"] and not one["grants"]:
            found["total"].append(one["total"] - one["check"])
            found["check"].append(one["check"])
    return found


# -- the scheduler alone -----------------------------------------------------------------------------------------------------


def scheduler(_: Session, sizes: Sizes) -> Iterator[Row]:
    """Its own time on this machine, at 32 pipelines and 512 devices; nothing else runs."""
    for tp in (1, 8):
        progress(f"the scheduler, tp={tp}")
        note = f"{PIPELINES} pipelines, {DEVICES} devices, replicas of {tp}; simulated"
        ids: Mapping[str, Any] = {"tp": tp, "pipelines": PIPELINES, "devices": DEVICES}
        about: dict[str, Any] = {"unit": "ms", "note": note, "ids": ids}
        moved = [1e3 * one for one in one_bundle(tp, sizes.rounds)]
        yield row(f"an event that moves one bundle, tp={tp}", moved, limit=1.0, **about)
        planned = [1e3 * from_nothing(tp) for _ in range(sizes.plans)]
        yield row(f"a plan from nothing, tp={tp}", planned, limit=25.0, **about)


class Timed:
    """Feeds a scheduler and answers it at once; `seconds` has what each event took that moved a replica."""

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
    """All pipelines wait for devices that are in use, which then come free at once: one plan for all of them."""
    timed = Timed(tp)
    state = timed.state
    for name in timed.names:  # requests come in while a plan may not be made
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
    """Training takes one device, and gives it back: events that move one replica, among 512 devices in use."""
    timed = Timed(tp)
    for name in timed.names:
        timed.feed(Event("acquire", name, kind="generation"))
    timed.seconds.clear()
    for number in range(rounds):
        name = timed.names[number % PIPELINES]
        timed.feed(Event("acquire", name, kind="training"))
        timed.feed(Event("release", name, kind="training"))
    return timed.seconds
