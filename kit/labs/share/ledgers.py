"""The ledgers of a run, by phase: one for each time that pipelines and their desk were run. And how their rules become checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.growth import PerFrame, events, rows_of
from kit.results import Measured, Missing, NotMeasured
from kit.results.units import counted
from kit.share.books import Ledger
from kit.share.judge import pipeline_rows
from kit.stream import judge as stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MAIN = "shared"
PHASES = (MAIN, "scripted", "alone_a", "alone_b", "serial", "static", "rehearse")  # those with ledgers


def parts(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each run of a phase. A run begins with the settings of its pipelines, or where a core begins that has begun before."""
    found: list[dict[str, Any]] = []
    begun: set[str] = set()
    for row in rows:
        core = str(row.get("core", "")) if row["event"] == "begins" else ""
        if core in begun or (row["event"] == "capacity" and begun):
            yield found
            found, begun = [], set()
        begun |= {core} if core else set()
        found.append(row)
    if found:
        yield found


def read_parts(frame: pd.DataFrame, phase: str) -> list[list[dict[str, Any]]]:
    """The rows of each run of a phase. If the run is not of this lab, all its events are one run of the phase `shared`."""
    found = events(frame, phase, lab="share", main=MAIN)
    return [*parts(rows_of(found[found["text"].fillna("") == ""]))]  # what observers recorded beside it has a text


def read_ledgers(frame: pd.DataFrame, phase: str) -> list[Ledger]:
    """Those of a phase in which devices were asked for."""
    asks = ("limits", "acquire", "granted")
    return [Ledger(part) for part in runs(frame, phase) if any(row["event"] in asks for row in part)]


runs = PerFrame(read_parts).of
ledgers = PerFrame(read_ledgers).of


def every_ledger(frame: pd.DataFrame, phases: Iterable[str] = PHASES) -> Iterator[tuple[str, Ledger]]:
    """Every ledger with where it is from, that of the phase `shared` first."""
    for phase in phases:
        found = ledgers(frame, phase)
        for number, one in enumerate(found, 1):
            yield phase if len(found) == 1 else f"{phase} {number}", one


def loops(frame: pd.DataFrame, phases: Iterable[str]) -> Iterator[tuple[str, stream.Ledger]]:
    """The ledger of every pipeline's own loop, as the checks of the lab `stream` take it, with where it is from."""
    for phase in phases:
        for part in runs(frame, phase):
            first = [row for row in part if row["event"] == "capacity" and "pipeline" in row]
            for row in first:
                name = str(row["pipeline"])
                yield f"{phase}, pipeline {name}", stream.Ledger([row, *pipeline_rows(part, name)])


def of_ledgers(question: Callable[[Ledger], Measured], phases: Iterable[str] = PHASES) -> Measure:
    """The first violation in any ledger, else the answer of the first that has one. What the first lacks, the check lacks."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        answers: list[Measured] = []
        lacking: list[NotMeasured] = []
        for where, one in every_ledger(frame, phases):
            try:
                answer = question(one)
            except NotMeasured as error:
                if not answers and not lacking and isinstance(error, Missing):
                    raise
                lacking.append(error)
                continue
            answers.append(Measured(answer.value, f"{where}: {answer.why}"))
            if answer.value:
                return answers[-1]
        if not answers:
            raise [*lacking, Missing("no phase recorded a ledger of a desk")][0]
        more = f"; {counted(len(answers) - 1, 'other ledger')} alike" if len(answers) > 1 else ""
        return Measured(0.0, answers[0].why + more)

    return measure
