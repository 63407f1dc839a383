"""`kit bench view`: how long a user waits for a panel: moving a limit, redrawing a plot, opening a large run.

Records are synthetic, in the format of the offload lab; no lab runs. Times do not include rendering in the browser.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kit
from kit import results
from kit.bench.session import Bench, Part, Row, Session, progress, row, samples, seconds_of
from kit.draw.general import records_table
from kit.labs.definition import Step
from kit.labs.discover import find
from kit.labs.offload.lab import OffloadConfig
from kit.measure import provenance
from kit.public import load
from kit.view.model import PanelModel
from kit.view.tabs import Grid, PlotsTab, VerdictTab

MIB = 2**20
RANKS = 4
# Phases after which the job has released its memory.
HELD = {"release", "idle", "talk", "start", "baseline", "end", "ownership"}
# Each with the limit that moves in it.
PLOTS = {"drift": "drift_mib", "census": "fds_more", "verdict": "drift_mib", "overview": "drift_mib"}
MADE_UP = "made-up records in the shape of the offload lab's"


def parts(
    _: str, *, records: int = 10_000, many: int = 100_000, moves: int = 30, opens: int = 5, panels: int = 7
) -> dict[str, Part]:
    """The sizes of the runs, and the number of samples of each."""
    made: dict[int, Path] = {}

    def among_runs(part: Callable[[Path, int], list[Row]], size: int, n: int) -> Part:
        """A part that gets a run with this number of records, which is also the newest run."""

        def work(session: Session) -> list[Row]:
            folder = session.logs / "runs"
            folder.mkdir(exist_ok=True)
            if session.book.provenance is None:
                session.book.describe(provenance())
            if size not in made:
                progress(f"{size} records")
                made[size] = made_up(folder, size)
            with patch.dict(os.environ, {"KIT_RUNS": str(folder)}):  # where a panel looks for the newest run
                return part(made[size], n)

        return work

    return {
        "opening": among_runs(opening, many, opens),
        "panels": among_runs(panels_made, records, panels),
        "moving": among_runs(moving, records, moves),
        "filtering": among_runs(filtering, many, moves),
    }


# -- a run ---------------------------------------------------------------------------------------------------------------


def made_up(folder: Path, records: int) -> Path:
    """A run with at least this number of records: a job on four ranks, released and reloaded as often as needed."""
    lab = find("offload")
    cycles = 1
    while sum(len(rows_of(step, 0)) for step in lab.plan(OffloadConfig(ranks=RANKS, cycles=cycles))) * RANKS < records:
        cycles += 1
    config = OffloadConfig(ranks=RANKS, cycles=cycles)
    writer = results.create_run(folder, lab.name, asdict(config), provenance())
    clock = 1.8e9
    for step in lab.plan(config):
        clock += 0.2
        for rank in range(RANKS):
            about: dict[str, Any] = {"run": writer.id, "lab": lab.name, "cycle": step.cycle, "phase": step.phase}
            about |= {"rank": rank, "time": clock}
            found = rows_of(step, rank)
            writer.append(
                [results.Row(**about, metric=metric, value=value, unit=unit) for metric, value, unit in found]
            )
    writer.finish()
    return writer.dir


def rows_of(step: Step, rank: int) -> list[tuple[str, float, str]]:
    """A rank's answer after a phase."""
    held = 0 if step.phase in HELD else 348
    sizes = {"rss": 320 + held, "anon_rss": 280 + held + 0.01 * step.cycle + rank, "shared_rss": 40, "pss": 300 + held}
    counts = dict.fromkeys(("groups", "fds", "sockets", "threads"), 20 if held else 1)
    rows = [("seconds", 0.15 / (1 + step.cycle % 7), "s"), ("overhead_seconds", 1e-3, "s")]
    rows += [(name + when, size * MIB, "B") for name, size in sizes.items() for when in ("", "_before")]
    rows += [(name + when, count, "1") for name, count in counts.items() for when in ("", "_before")]
    rows.append(("peak_rss", (330 + held) * MIB, "B"))
    if step.phase in {"release", "reload"}:
        rows += [("groups_seconds", 0.02, "s"), ("tensors_seconds", 0.1, "s")]
        rows += [(f"{kind}_bytes", 87.0 * MIB, "B") for kind in ("weights", "grads", "optimizer", "total")]
    if step.phase == "idle":
        rows += [(name, 0, "1") for name in ("left_bytes", "initialised", "old_groups_alive", "stale_usable")]
    if step.phase == "verify":
        zeros = ("membership_changed", "options_changed", "stale_holders", "unchecked", "tensors_changed", "broken")
        rows += [*((name, 0, "1") for name in zeros), ("tensors_hashed", 300, "1")]
    return rows


# -- what is measured ------------------------------------------------------------------------------------------------------


def opening(folder: Path, n: int) -> list[Row]:
    """From the folder to the table and to the verdict, without caches."""
    count = len(load(folder).frame())
    made = []
    for name, work in (("table", lambda: load(folder).frame()), ("verdict", lambda: load(folder).verdict())):
        taken = samples(f"opening {count} records", n, partial(seconds_of, work))
        made.append(row(f"a run of {count} records, opened to its {name}", taken, limit=2.0, note=MADE_UP))
    return made


def panels_made(run: Path, n: int) -> list[Row]:
    """All of a panel's widgets, with the newest run found, judged and drawn."""
    os.utime(run / "run.json")  # make it the newest run
    what = "a panel made, with its last run judged and a first plot drawn"
    first, *later = samples(what, n + 1, lambda: seconds_of(lambda: kit.panel("offload").close()))
    return [row(what, later, note=f"{MADE_UP}; the first one took {first:.2g} s")]


def moving(folder: Path, n: int) -> list[Row]:
    """A limit that moves by a different step each time, including everything sent to the browser; the first move is not counted."""
    count = len(load(folder).frame())

    def moved(what: str, limit: str, at_most: float, tab_of: Callable[[PanelModel], object]) -> Row:
        model = PanelModel(find("offload"))
        model.show(load(folder))
        _shown = tab_of(model)
        values = iter(range(1000, 1001 + n))
        what = f"a limit moved, to {what}, {count} records"
        move = partial(model.move, limit)
        _, *taken = samples(what, n + 1, lambda: 1e3 * seconds_of(lambda: move(float(next(values)))))
        return row(what, taken, unit="ms", limit=at_most, note=MADE_UP)

    def plot(model: PanelModel, name: str) -> PlotsTab:
        tab = PlotsTab(model)
        tab.visible = True
        tab.choice.value = name
        return tab

    plots = (moved(f"the plot {name!r} drawn anew", PLOTS[name], 300.0, partial(plot, name=name)) for name in PLOTS)
    return [moved("the verdict shown anew", "drift_mib", 100.0, VerdictTab), *plots]


def filtering(folder: Path, n: int) -> list[Row]:
    run, grid = load(folder), Grid()
    grid.show(records_table(run))
    what = f"a word more in the filter of a table of {len(run.frame())} rows"
    words = iter([f'phase == "reload" and rank == {index % RANKS} and value > {index}' for index in range(n)])
    taken = samples(what, n, lambda: 1e3 * seconds_of(lambda: setattr(grid.words, "value", next(words))))
    return [row(what, taken, unit="ms", note=MADE_UP)]


VIEW = Bench(parts, {"many": 20_000, "moves": 5, "opens": 2, "panels": 2})
