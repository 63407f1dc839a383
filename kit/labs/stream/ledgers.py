"""The ledgers of a run, by phase, and the rules that need a run's config or many groups beside what `kit.stream.judge` asks."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from kit.labs.growth import PerFrame, events, rows_of
from kit.results import Measured, Missing, NotMeasured
from kit.results.units import counted
from kit.stream.history import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

LOOPS = ("lockstep", "stream")  # phases with a ledger
ABORTS_SLOW = ("windowed",)  # samplers that end unfinished groups
MANY = 100  # groups whose lengths show a bias


def read_ledger(frame: pd.DataFrame, phase: str) -> Ledger | None:
    """What the controller and its ports did in a phase. If the run is not of this lab, all its events stand for the phase `stream`."""
    rows = events(frame, phase, lab="stream", main="stream")
    if rows.empty:
        return None
    loops = rows.index[rows["metric"] == "capacity"]
    if (
        len(loops) and (rows["lab"] == "stream").all()
    ):  # the phase resume has two loops; the second tells whether the first was right
        rows = rows.loc[loops[-1] :]
    return Ledger(rows_of(rows))


ledger = PerFrame(read_ledger).of


def of_ledger(question: Callable[[Ledger], Measured], phases: Sequence[str] = LOOPS) -> Measure:
    """The first violation in any loop, else what a loop lacks, else the last answer. A loop may have no answer if another has."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
        answers: list[Measured] = []
        lacking: list[NotMeasured] = []
        for phase in phases:
            rows = ledger(frame, phase)
            if rows is None:
                continue
            try:
                answer = question(rows)
            except NotMeasured as error:
                lacking.append(error)
                continue
            answers.append(Measured(answer.value, f"{phase}: {answer.why}"))
            if answer.value:
                return answers[-1]
        missing = [error for error in lacking if isinstance(error, Missing)]
        if missing or not answers:
            raise [*missing, *lacking, Missing("no phase recorded a ledger")][0]
        return answers[-1]

    return measure


def replicas_answer(rows: Ledger) -> Measured:
    """Did every replica answer in every loop?"""
    error = rows.ended is not None and rows.ended.get("why") == "error"
    died = [f"replica {row['replica']} died: {row.get('why', 'no reason given')}" for row in rows.by_event["died"]]
    silent = [str(row.get("why")) for row in rows.by_event["error"] if row.get("of") == "port"]
    if error and (gone := died + silent):
        return Measured(float(len(gone)), gone[0])
    return Measured(0.0, "the loop went on without a replica" if died else "all requests were answered")


def no_length_bias(rows: Ledger) -> Measured:
    """Are trained samples as long as all that were started?

    Of a sample that was given up only a lower bound of its length is known; Kaplan and Meier's estimate takes such into account.
    """
    gone = {row["group"] for row in rows.trained()}
    pairs = [(group in gone, sample) for group, samples in rows.samples.items() for sample in samples.values()]
    trained = [sample.tokens for counts, sample in pairs if counts]
    if not any(not counts and sample.tokens for counts, sample in pairs):
        return Measured(0.0, "no token was generated for a group that was not trained")
    if rows.setting("sampler") in ABORTS_SLOW:
        raise NotMeasured(f"the sampler {rows.setting('sampler')} gives up groups that are slower than its window")
    if len(gone) < MANY:
        raise NotMeasured(f"{counted(len(gone), 'group')} trained; the lengths of at least {MANY} show a bias")
    wanted = mean_length([(sample.tokens, bool(sample.completed)) for _, sample in pairs if sample.tokens])
    error = statistics.stdev(trained) / math.sqrt(len(trained))
    mean = statistics.fmean(trained)
    return Measured(
        abs(wanted - mean) / error,
        f"mean length of {len(trained)} trained samples: {mean:.2f} tokens, of all {len(pairs)} that were started: {wanted:.2f} "
        f"(standard error {error:.2f})",
    )


def mean_length(seen: Sequence[tuple[int, bool]]) -> float:
    """Of samples with so many tokens, complete or given up then."""
    whole = Counter(length for length, complete in seen if complete)
    lengths = sorted(length for length, _ in seen)
    longer, mean, before = 1.0, 0.0, 0  # the share of samples that are longer
    for length in sorted(whole):
        mean += longer * (length - before)
        longer *= 1 - whole[length] / (len(lengths) - bisect.bisect_left(lengths, length))
        before = length
    return mean
