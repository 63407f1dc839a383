"""`kit bench stream`: what asynchrony gains over the plain loop, what the recomputation can tell, and whether the loop learns.

Ranks of the part `paced` wait for each token and each trained sample, as they would with a larger model, so that the loop is measured and
not how ranks share this machine's cores. Every row is of one run of the lab, with the phases that it needs.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from kit.bench.session import Row, Session, none_of, progress, ratio
from kit.train.arithmetic import DIGITS, END, problem, reward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kit.stream.history import Ledger

RANKS: dict[str, Any] = {"ranks": 3, "replicas": 2, "groups": 4, "group": 4}
DECIDABLE = 10_000  # tokens that the stamps are judged by
# Long answers, few of them in flight at once, so that many span a sync; a learning rate with which versions differ measurably.
STAMPED: dict[str, Any] = {**RANKS, "groups": 8, "slots": 8, "answer": (8, 28), "decode": 2, "lr": 3e-3}
STAMPED |= {"phases": "stream,verify"}
# A sample has 16 tokens, and a replica writes 4 of all its samples in a call: a step takes 16 x 150 ms to generate and 16 samples x 150 ms
# to train. The pace is long against messages and the work of a small model, and only one step's groups are generated at a time.
PACED: dict[str, Any] = {**RANKS, "answer": (16, 16), "decode": 4, "pace_ms": 150.0, "train_pace_ms": 150.0}
PACED |= {"window": 1, "slots": 4, "layers": 1, "previous": "recorded", "phases": "plain,stream"}
# Sums and differences of 0, 1 and 2. After 40 supervised updates some answers are right and most have the right form.
TASK: dict[str, Any] = {"numbers": 3, "answer": (1, 2), "warm": 40, "lr": 2e-3, "layers": 2}
LEARNS: dict[str, Any] = {**RANKS, **TASK, "groups": 8, "group": 8, "micro_batch": 8, "decode": 2, "phases": "stream"}
ERRORS = 5.0  # standard errors by which the reward must rise
ON_POLICY: dict[str, Any] = {"sampler": "strict", "window": 0}
STALE: tuple[dict[str, Any], ...] = tuple(
    {"window": window, **correction}
    for window in (1, 4)
    for correction in ({"correction": True}, {"correction": False, "previous": "recorded"})
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of each."""

    steps: int = 5
    paced_steps: int = 9
    decidable: int = DECIDABLE
    learning_steps: int = 40
    seeds: int = 3


QUICK = Sizes(steps=2, paced_steps=3, decidable=100, learning_steps=10, seeds=1)


def parts(sizes: Sizes, _: str) -> dict[str, Callable[[Session], Iterator[Row]]]:
    return {part.__name__: partial(part, sizes=sizes) for part in (lockstep, stamps, paced, learns)}


def lockstep(session: Session, sizes: Sizes) -> Iterator[Row]:
    progress("lockstep beside plain")
    run = session.lab("stream", session.logs / "lockstep", **RANKS, steps=sizes.steps, phases="plain,lockstep")
    answer = next(each for each in run.verdict() if each.check == "equals_plain")
    yield none_of("outcomes of the loop with staleness 0 that differ from the plain loop", answer.measured, answer.why)


def stamps(session: Session, sizes: Sizes) -> Iterator[Row]:
    """Runs with another seed each, until enough tokens were decidable."""
    from kit.labs.stream.checks import verified  # here, as what tables are made of is not the ranks' to have

    total: dict[str, float] = {}
    turn = 0
    with session.worlds((1, 1, 1)) as worlds:
        while total.get("decidable", 0.0) < sizes.decidable:
            progress(f"stamps, run {turn + 1}: {total.get('decidable', 0.0):.0f} of {sizes.decidable} decidable tokens")
            config = {**STAMPED, "steps": sizes.steps, "seed": 1234 + turn}
            found = verified(session.lab("stream", session.logs / f"stamps-{turn}", world=worlds, **config).frame())
            total = {name: total.get(name, 0.0) + value for name, value in found.items()}
            turn += 1
    note = (
        f"{total['tokens']:.0f} tokens of {total['samples']:.0f} samples, {total['decidable']:.0f} decidable: no other version "
        f"comes within 10 times the noise; runs with another seed each: {turn}"
    )
    yield none_of("wrong stamps among decidable tokens", total["wrong_stamps"], note)
    yield ratio("share of undecidable tokens", 1 - total["decidable"] / total["tokens"], 0.5, note)
    yield ratio("share of samples without a sync inside", 1 - total["samples_over_syncs"] / total["samples"], 0.9, note)
    missed = 1 - total["shuffled_found"] / total["shuffled"]
    note = f"{total['shuffled']:.0f} decidable tokens of the first samples of each run, every stamp one version off"
    yield ratio("share of wrong stamps of a control that were not found", missed, 0.01, note)


def paced(session: Session, sizes: Sizes) -> Iterator[Row]:
    """K steps whose generation takes as long as their training: at best 2K / (K + 1) times as fast as one after the other."""
    from kit.labs.stream import tables  # here, as above

    steps = sizes.paced_steps
    progress(f"{steps} paced steps, plain and streamed")
    frame = session.lab("stream", session.logs / "paced", **PACED, steps=steps).frame()
    loops = tables.loops(frame).set_index("loop")
    plain, streamed = (float(loops["total"][loop]) for loop in ("plain", "stream"))
    possible, gain = 2 * steps / (steps + 1), plain / streamed
    exposed = float(tables.steps(frame)["exposed_generation"][1:].sum())
    note = f"4 groups of 4 samples, two replicas, window 1, 150 ms a token and a trained sample; K={steps}; control: the plain loop, "
    why = f"{note}{plain:.1f} s, streamed {streamed:.1f} s: {gain:.2f} of {possible:.2f} times; no times of a product"
    yield ratio("possible over reached speed-up of streaming", possible / gain, 1 / 0.9, why)
    whole, all_of_it = (float(loops["exposed_generation"][loop]) for loop in ("plain", "stream"))
    why = f"{note}{whole:.1f} s, streamed {exposed:.2f} s after the first step's {all_of_it - exposed:.1f} s"
    yield ratio("exposed generation after the first fill over the plain loop's", exposed / whole, 0.1, why)


def learns(session: Session, sizes: Sizes) -> Iterator[Row]:
    """Mean reward of the last fifth of steps against the first fifth, on policy and stale, from the same warm start."""
    from kit.labs.stream.checks import ledger  # here, as above

    with session.worlds((1, 1, 1)) as worlds:
        for seed in range(1234, 1234 + sizes.seeds):
            rose = math.nan  # the time until this reward is measured
            for more in (ON_POLICY, *STALE):
                window, correction = more["window"], more.get("correction", True)
                about = f"seed {seed}, staleness {window}{'' if correction else ', no correction'}"
                progress(f"learning, {about}")
                name = about.replace(", ", "-").replace(" ", "")
                config = {**LEARNS, **more, "seed": seed, "steps": sizes.learning_steps}
                rows = ledger(session.lab("stream", session.logs / name, world=worlds, **config).frame(), "stream")
                assert rows is not None  # a run that broke has raised
                curve = Curve(rows, config)
                rose = curve.middle if window == 0 else rose
                ids = {"seed": seed, "staleness": window, "correction": int(correction), **curve.ids(rose)}
                over = curve.error / max(curve.gain, curve.error / 100)  # 100: no gain
                limit = 1 / ERRORS if window == 0 else None
                yield ratio(f"standard error over gain of reward, {about}", over, limit, curve.note(rose), ids=ids)


class Curve:
    """Rewards of the groups that each step trained, and when the step ended."""

    def __init__(self, rows: Ledger, config: Mapping[str, Any]) -> None:
        fifth = max(1, config["steps"] // 5)
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
        first, last = flat(self.steps[:fifth]), flat(self.steps[-fifth:])
        self.first, self.last = statistics.fmean(first), statistics.fmean(last)
        self.gain, self.middle = self.last - self.first, (self.first + self.last) / 2
        self.error = math.sqrt(sum(statistics.variance(some) / len(some) for some in (first, last)))
        answers = [answer for length in (1, 2) for answer in product(range(DIGITS), repeat=length)]
        self.constant = max(statistics.fmean(reward(each, [*one, END]) for each in asked) for one in answers)

    def reached(self, level: float) -> int | None:
        """The first step from which on a fifth of the steps had this mean reward."""
        size = max(1, len(self.steps) // 5)
        windows = range(size, len(self.steps) + 1)
        return next((end for end in windows if statistics.fmean(flat(self.steps[end - size : end])) >= level), None)

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


def flat(steps: Sequence[Sequence[float]]) -> list[float]:
    return [each for step in steps for each in step]
