"""The parts of the bench of streaming: runs of the lab, and what their ledgers say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import chain, product
from typing import Any

from kit.labs.bench import Bench, Part, Samples, run_part, show_progress
from kit.labs.lab import Drive
from kit.labs.stream import tables
from kit.labs.stream.rules import ledger, verified
from kit.stream.judge.history import LoopLedger

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
ON_POLICY: dict[str, Any] = {"sampler": "strict", "window": 0}
STALE: tuple[dict[str, Any], ...] = tuple(
    {"window": window, **correction}
    for window in (1, 4)
    for correction in ({"correction": True}, {"correction": False, "previous": "recorded"})
)


def ratio(metric: str, title: str, value: float, note: str, **about: Any) -> Samples:
    return Samples(what=title, values=[value], metric=metric, unit="ratio", note=note, **about)


def compare_lockstep(bench: Bench) -> Iterator[Samples]:
    run = bench.lab("stream", "lockstep", **RANKS, steps=bench.config.steps, phases="plain,lockstep")
    answer = next(row for row in run.verdict() if row.check == "equals_plain")
    title = "outcomes of the loop with staleness 0 that differ from the plain loop"
    values = [] if answer.measured is None else [answer.measured]
    yield Samples(what=title, values=values, metric="outcomes_differ", unit="1", note=answer.why)


def stamps(bench: Bench) -> Iterator[Samples]:
    """Runs with different seeds until enough tokens are decidable."""
    total: dict[str, float] = {"decidable": 0.0}
    turn, decidable = 0, bench.config.decidable
    with bench.worlds((1, 1, 1)) as worlds:
        while total["decidable"] < decidable:
            show_progress(f"stamps, run {turn + 1}: {total['decidable']:.0f} of {decidable} decidable tokens")
            config = {**STAMPED, "steps": bench.config.steps, "seed": 1234 + turn}
            counts = verified(bench.lab("stream", f"stamps-{turn}", world=worlds, **config).frame())
            total = {name: total.get(name, 0.0) + value for name, value in counts.items()}
            turn += 1
    note = (
        f"{total['tokens']:.0f} tokens of {total['samples']:.0f} samples, {total['decidable']:.0f} decidable: no other version "
        f"comes within 10 times the noise; runs with different seeds: {turn}"
    )
    title = "wrong stamps among decidable tokens"
    yield Samples(what=title, values=[total["wrong_stamps"]], metric="wrong_stamps", unit="1", note=note)
    yield ratio("undecidable_tokens", "share of undecidable tokens", 1 - total["decidable"] / total["tokens"], note)
    whole = 1 - total["samples_over_syncs"] / total["samples"]
    yield ratio("samples_without_sync", "share of samples without a sync inside", whole, note)
    missed = 1 - total["shuffled_found"] / total["shuffled"]
    note = f"{total['shuffled']:.0f} decidable tokens of the first samples of each run, with every stamp off by one version"
    yield ratio("wrong_stamps_missed", "share of wrong stamps of a control that were not found", missed, note)


def paced(bench: Bench) -> Iterator[Samples]:
    """K steps with equal times for generation and training: at best 2K / (K + 1) times as fast as in sequence."""
    steps = bench.config.paced_steps
    frame = bench.lab("stream", "paced", **PACED, steps=steps).frame()
    loops = tables.loops(frame).set_index("loop")
    plain, streamed = (float(loops["total"][loop]) for loop in ("plain", "stream"))
    possible, gain = 2 * steps / (steps + 1), plain / streamed
    exposed = float(tables.steps(frame)["exposed_generation"][1:].sum())
    note = f"4 groups of 4 samples, two replicas, window 1, 150 ms per token and trained sample; K={steps}; control: the plain loop, "
    why = (
        f"{note}{plain:.1f} s, streamed {streamed:.1f} s: speed-up {gain:.2f} of {possible:.2f}; paced, not real, times"
    )
    yield ratio("possible_over_gain", "possible over reached speed-up of streaming", possible / gain, why)
    whole, all_of_it = (float(loops["exposed_generation"][loop]) for loop in ("plain", "stream"))
    why = f"{note}{whole:.1f} s, streamed {exposed:.2f} s after the first step's {all_of_it - exposed:.1f} s"
    title = "exposed generation after the first fill over the plain loop's"
    yield ratio("exposed_over_plain", title, exposed / whole, why)


def learns(bench: Bench) -> Iterator[Samples]:
    """Mean reward of the last fifth of steps compared with the first fifth, on policy and stale, from the same warm start."""
    with bench.worlds((1, 1, 1)) as worlds:
        for seed in range(1234, 1234 + bench.config.seeds):
            rose = math.nan  # the reward for the time to reach it
            for more in (ON_POLICY, *STALE):
                window, correction = more["window"], more.get("correction", True)
                about = f"seed {seed}, staleness {window}{'' if correction else ', no correction'}"
                show_progress(f"learning, {about}")
                config = {**LEARNS, **more, "seed": seed, "steps": bench.config.learning_steps}
                out = about.replace(", ", "-").replace(" ", "")
                rows = ledger(bench.lab("stream", out, world=worlds, **config).frame(), "stream")
                assert rows is not None  # a broken run has raised
                curve = Curve(rows, config)
                rose = curve.middle if window == 0 else rose
                ids = {"seed": seed, "staleness": window, "correction": int(correction), **curve.ids(rose)}
                over = curve.error / max(curve.gain, curve.error / 100)  # 100: no gain
                metric = "error_over_gain" if window == 0 else "stale_error_over_gain"
                title = f"standard error over gain of reward, {about}"
                yield ratio(metric, title, over, curve.note(rose), ids=ids)


class Curve:
    """Rewards of the groups trained in each step, and the step's end."""

    def __init__(self, rows: LoopLedger, config: Mapping[str, Any]) -> None:
        from kit.train.arithmetic import DIGITS, END, problem, reward  # loads torch

        self.fifth = fifth = max(1, config["steps"] // 5)
        self.steps: list[list[float]] = [[] for _ in range(config["steps"])]  # the mean reward of each group
        lags, asked = [], []
        for trained in rows.by_event["trained"]:
            group, step = trained.number("group"), trained.number("step")
            samples = rows.samples[group].values()
            self.steps[step].append(statistics.fmean(float(sample.completed[-1]["reward"]) for sample in samples))
            lags.append(trained.number("version") - min(rows.oldest(group).values()))
            if step >= config["steps"] - fifth:
                asked.append(problem(config["seed"], group, config["numbers"]))
        self.ends = [bumped.since for bumped in rows.by_event["bumped"]]
        self.lag = statistics.fmean(lags)
        first, last = [*chain(*self.steps[:fifth])], [*chain(*self.steps[-fifth:])]
        self.first, self.last = statistics.fmean(first), statistics.fmean(last)
        self.gain, self.middle = self.last - self.first, (self.first + self.last) / 2
        self.error = math.sqrt(sum(statistics.variance(rewards) / len(rewards) for rewards in (first, last)))
        answers = [answer for length in (1, 2) for answer in product(range(DIGITS), repeat=length)]
        self.constant = max(
            statistics.fmean(reward(question, [*answer, END]) for question in asked) for answer in answers
        )

    def reached(self, level: float) -> int | None:
        """The first step that starts a fifth of the steps with this mean reward."""
        ends = range(self.fifth, len(self.steps) + 1)
        means = ((end, statistics.fmean(chain(*self.steps[end - self.fifth : end]))) for end in ends)
        return next((end for end, mean in means if mean >= level), None)

    def ids(self, level: float) -> dict[str, str | int]:
        """Numbers for programs, as text where they are not whole."""
        numbers = {"gain": self.gain, "error": self.error, "constant": self.constant, "lag": self.lag}
        ids: dict[str, str | int] = {name: f"{value:.6g}" for name, value in numbers.items()}
        step = self.reached(level)
        return ids if step is None else {**ids, "reached_steps": step, "reached_s": f"{self.ends[step - 1]:.6g}"}

    def note(self, level: float) -> str:
        step = self.reached(level)
        when = "never" if step is None else f"after {step} steps, {self.ends[step - 1]:.1f} s"
        return (
            f"reward {self.first:.3f} to {self.last:.3f}, {self.gain / self.error:.1f} standard errors; the best constant answer "
            f"gets {self.constant:.3f}; {level:.3f} reached {when}; mean lag {self.lag:.1f}; {len(self.steps)} steps"
        )


PARTS: dict[str, Part] = {"lockstep": compare_lockstep, "stamps": stamps, "paced": paced, "learns": learns}


def measure_stream(drive: Drive) -> None:
    run_part(drive, PARTS[drive.phase])
