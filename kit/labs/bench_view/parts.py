"""The parts of the bench of panels, on the notebook side only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import kit
from kit.draw.data import read
from kit.draw.general import every_record
from kit.draw.picture import inline
from kit.labs.bench import Bench, Samples, ratios, run_part, show_progress
from kit.labs.bench_view.made_up import RANKS, made_up, made_up_runs
from kit.labs.discover import find
from kit.labs.lab import Drive
from kit.measure.turns import seconds_of
from kit.public import load
from kit.results.runtable import KEPT
from kit.view.model import PanelModel
from kit.view.named import album
from kit.view.runs import RunsTab
from kit.view.tabs import Grid, PlotsTab, VerdictTab

# Each with the limit that moves in it.
PLOTS = {"drift": "memory_drift", "census": "fds_return", "verdict": "memory_drift", "overview": "memory_drift"}
MADE_UP = "made-up records in the shape of the offload lab's"


def open_runs(bench: Bench, folder: Path) -> Iterator[Samples]:
    """From the folder to the table and to the verdict, without caches."""
    count = len(load(folder).frame())
    for name, work in (("table", lambda: load(folder).frame()), ("verdict", lambda: load(folder).verdict())):
        title = f"a run of {count} records, opened to its {name}"
        values = [seconds_of(work) for _ in range(bench.config.opens)]
        yield Samples(what=title, values=values, metric="run_opened", note=MADE_UP)


def panels(bench: Bench, folder: Path) -> Iterator[Samples]:
    """All of a panel's widgets, with the newest run found, judged and drawn."""
    os.utime(folder / "run.json")  # make it the newest run
    first, *later = [seconds_of(lambda: kit.panel("offload").close()) for _ in range(bench.config.panels + 1)]
    title = "a panel made, with its last run judged and a first plot drawn"
    yield Samples(what=title, values=later, note=f"{MADE_UP}; the first one took {first:.2g} s")


def moving(bench: Bench, folder: Path) -> Iterator[Samples]:
    """A limit that moves by a different step each time, including everything sent to the browser; the first move is not counted."""
    records, moves = len(load(folder).frame()), bench.config.moves

    def opened(tab_of: Callable[[PanelModel], object]) -> PanelModel:
        model = PanelModel(find("offload"))
        model.show(load(folder))
        tab_of(model)
        return model

    def plot(model: PanelModel, name: str) -> None:
        tab = PlotsTab(model)
        tab.visible = True
        tab.choice.value = name

    def move(model: PanelModel, limit: str, step: int) -> float:
        return 1e3 * seconds_of(partial(model.move, limit, float(1000 + step)))

    model = opened(VerdictTab)
    title = f"a limit moved, to the verdict shown anew, {records} records"
    _, *values = [move(model, "memory_drift", step) for step in range(moves + 1)]
    yield Samples(what=title, values=values, metric="verdict_moved", unit="ms", note=MADE_UP)

    def first_drawing(name: str) -> float:
        fresh = album(load(folder))
        return 1e3 * seconds_of(lambda: inline(fresh.draw(name), name))

    for name, limit in PLOTS.items():
        model = opened(partial(plot, name=name))
        anew, first = [], []
        for step in range(moves + 1):
            anew.append(move(model, limit, step))
            first.append(first_drawing(name))
        title = f"a limit moved, to the plot {name!r} drawn anew, {records} records"
        yield Samples(what=title, values=anew[1:], metric="plot_moved", unit="ms", note=MADE_UP)
        against = f"{title}, over its first drawing"
        yield ratios("moved_over_first", against, anew[1:], first[1:], note=MADE_UP)


def filtering(bench: Bench, folder: Path) -> Iterator[Samples]:
    run, grid = load(folder), Grid()
    grid.show(every_record(read(run)))
    title = f"a word more in the filter of a table of {len(run.frame())} rows"
    words = [f'phase == "reload" and rank == {step % RANKS} and value > {step}' for step in range(bench.config.moves)]
    values = [1e3 * seconds_of(partial(setattr, grid.words, "value", text)) for text in words]
    yield Samples(what=title, values=values, unit="ms", note=MADE_UP)


def listing(bench: Bench, folder: Path) -> Iterator[Samples]:
    """From the folder of runs to the first page of their table, by a process that has read none of them and by one that has."""
    made_up_runs(runs := folder.parent / "listed", bench.config.runs)
    model = PanelModel(find("smoke"))

    def listed() -> None:
        RunsTab(model).visible = True

    with patch.dict(os.environ, {"KIT_RUNS": str(runs)}):
        listed()  # loads the grid's library
        for which in ("read anew", "read before"):
            values = []
            for _ in range(bench.config.opens):
                if which == "read anew":
                    KEPT.clear()
                values.append(seconds_of(listed))
            title = f"the table of {bench.config.runs} runs, {which}"
            yield Samples(what=title, values=values, metric="runs_listed", note="copies of one small run")


PARTS = {"opening": open_runs, "panels": panels, "moving": moving, "filtering": filtering, "listing": listing}


def measure_view(drive: Drive) -> None:
    """Run a part with a run of that size, which is also the newest."""
    size = drive.config.many if drive.phase in {"opening", "filtering"} else drive.config.records
    runs = drive.folder / "runs"
    runs.mkdir(exist_ok=True)
    folder = runs / f"{size}-records"
    if not folder.exists():
        show_progress(f"{size} records")
        made_up(runs, size).rename(folder)
    with patch.dict(os.environ, {"KIT_RUNS": str(runs)}):  # where a panel looks for the newest run
        run_part(drive, partial(PARTS[drive.phase], folder=folder))
