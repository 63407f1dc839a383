"""Runs as a single page to share: `kit report DIR... --to report.html`.

The file contains everything: pictures as data, style, a short script that sorts tables. It makes no network requests (and forbids them),
and is readable without scripts, on a phone, light and dark.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import kit
from kit.draw.compare import plot_against
from kit.draw.data import RunData
from kit.draw.picture import image_uri
from kit.draw.style import THEMES
from kit.errors import BadInput, KitError
from kit.labs.discover import describe_folder, rules_of
from kit.machine import MIB
from kit.results import NotMeasured, Rule, Run, Verdict, VerdictRow, trace
from kit.results.comparison import Comparison, compact, machine, run_differences, settings_of_runs
from kit.results.frames import readable
from kit.results.records import ESCAPES, PATTERN, flat, output_file, to_json, write_text
from kit.results.run import memory_snapshots
from kit.results.runtable import run_frame
from kit.results.units import ROW, amount
from kit.results.verdict import MARKS, SIGNS, beside_mark, cells, folded_rows, tally, without_parts, worst_first
from kit.view.named import album, tables
from kit.view.runs import FACES, grid_html

SUFFIXES = (".html", ".htm")
TAIL = 60  # lines of a rank's log
WIDE = 2000  # characters of a line of it
MOST = 200  # rows of a table on the page
CHANGES = 60  # of a comparison
LARGEST = MIB  # of a timeline on the page


def write_report(
    runs: Sequence[Run], to: str | Path, *, processes: int = 1, tell: Callable[[str], None] = lambda _: None
) -> Path:
    """`processes` share the work where there are several runs; they are forked, so a process that has threads asks for one."""
    if Path(to).suffix.lower() not in SUFFIXES:
        raise BadInput(f"the report's file must end in {' or '.join(SUFFIXES)}, not {Path(to).name!r}")
    target = output_file(to)
    write_text(target, report_page(runs, processes=processes, tell=tell))
    return target


def report_page(runs: Sequence[Run], *, processes: int = 1, tell: Callable[[str], None] = lambda _: None) -> str:
    if not runs:
        raise BadInput("a report needs at least one run")
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    runs = list({run.dir: run for run in runs}.values())  # drop duplicates
    compared, *made = make_parts(runs, processes, tell)
    differences = run_differences(runs)
    chapters = [{**part, "differs": differs} for part, differs in zip(made, differences, strict=True)]
    return environment.get_template("report.html").render(
        title=f"Lifecycle Kit: {', '.join(dict.fromkeys(run.lab for run in runs))}",
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        kit=kit.__version__,
        themes=THEMES,
        chapters=sorted(chapters, key=lambda chapter: chapter["weight"]),
        run_grid=run_grid(runs) if len(runs) > 1 else None,
        compared=compared or None,
    )


def make_parts(runs: Sequence[Run], processes: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The comparison, empty if there is nothing to compare, and each run's chapter: nearly all of the time goes into their pictures."""
    several = len({run.id for run in runs}) > 1
    tasks: list[Callable[[], dict[str, Any]]] = [partial(comparison, runs) if several else dict]
    tasks += [partial(chapter, run, number) for number, run in enumerate(runs, start=1)]
    parts: list[dict[str, Any]] = []
    PARTS[:] = tasks
    with contextlib.ExitStack() as stack:
        stack.callback(PARTS.clear)
        if processes > 1 and several:
            for run in runs:
                run.frame()  # read once, before the fork
            pool = ProcessPoolExecutor(processes, get_context("fork"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
            stack.callback(pool.shutdown, cancel_futures=True)
            made: Iterable[dict[str, Any]] = pool.map(do_part, range(len(tasks)))
        else:
            made = map(do_part, range(len(tasks)))
        try:
            for number, part in enumerate(made):
                tell(f"{number} of {len(runs)} runs are drawn")
                parts.append(part)
        except BrokenProcessPool as error:
            raise KitError(f"the report is not written, because a process that draws it broke: {error}") from error
    return parts


PARTS: list[
    Callable[[], dict[str, Any]]
] = []  # what the forked processes find here: runs and their rules cannot be sent to them


def do_part(number: int) -> dict[str, Any]:
    return PARTS[number]()


def run_grid(runs: Sequence[Run]) -> dict[str, str]:
    """The runs as the table of all runs shows them, with the settings that differ; the checks' numbers are columns to choose."""
    rows = [describe_folder(run.dir) for run in runs]
    apart = [name for name in settings_of_runs(runs) if any(name in row["config"] for row in rows)]
    checks = list(
        dict.fromkeys(name for row in rows for name in row["numbers"] if "/" not in name and name not in apart)
    )
    frame = run_frame(rows, [*apart, *checks])
    return {"html": grid_html(frame, frame.attrs["picks"][len(apart) :]), "style": FACES}


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """The largest changes as a picture and a table, and the settings that differ."""
    compared = Comparison(runs)
    return {
        "warnings": compared.warnings,
        "answers": compared.answers,
        "settings": compared.settings_in_words,
        "ids": [run.id for run in runs],
        "picture": image_uri(plot_against(runs, table=compared.table)),
        "table": changed_answers(compared),
    }


def chapter(run: Run, number: int) -> dict[str, Any]:
    refuse_links(run)
    verdict = run.shown_verdict()
    words, kind, weight = outcome(run, verdict)
    limits, drawn, rows = moved_limits(run, verdict), album(run), answer_rows(run, verdict)
    return {
        "anchor": f"run-{number}",
        "id": run.id,
        "name": run.label or run.id,
        "fault": run.fault or "",
        "outcome": words,
        "kind": kind,
        "weight": weight,
        "partial": run.partial,
        "notes": run.notes,
        "facts": run_facts(run),
        "checks": [row for row in rows if row["kind"] != MARKS[True].kind],
        "passed": [row for row in rows if row["kind"] == MARKS[True].kind],
        "parts": [row for row in rows if row["parts"]],
        "trace": trace_of(run),
        "picture": image_uri(drawn.draw(tolerances=limits)),
        "tables": chapter_tables(drawn.data),
        "logs": logs(run) if run.broke else [],
        "config": {name: to_json(value) for name, value in flat(run.config).items()},
        "provenance": to_json(run.provenance, indent=1),
    }


def trace_of(run: Run) -> str:
    """The run's timeline for the page's button, gzipped, as base64; empty if there is none or it is too large for a page."""
    try:
        packed = gzip.compress(to_json(trace(run)).encode(), mtime=0)
    except BadInput:  # no timed phase
        return ""
    return base64.b64encode(packed).decode() if len(packed) <= LARGEST else ""


def refuse_links(run: Run) -> None:
    """Refuse links to files outside the run, because the page is shared and would contain those files."""
    home = run.dir.resolve()
    for name in ("run.json", "verdict.json", PATTERN, "logs/*", "memory/*"):
        for path in run.dir.glob(name):
            if not Path(os.path.realpath(path)).is_relative_to(home):
                raise BadInput(f"{path} links to a file outside the run; put a copy in its place to report this run")


def outcome(run: Run, verdict: Verdict) -> tuple[str, str, int]:
    """Text, colour, and sort order: the worst first."""
    rows = without_parts(verdict)
    answers = {row.passed for row in rows}
    words = tally(rows)
    if run.status == "failed":
        return f"the run broke; {words}", "bad", 0
    words = words if run.status == "finished" else f"{run.status}; {words}"
    if False in answers:
        return words, "bad", 1
    if run.status != "finished":
        return words, "open", 2
    return words, "open" if None in answers or not rows else "good", 3


def run_facts(run: Run) -> dict[str, str]:
    info, about = run.info(), run.provenance
    on = about.get("rank0") or about
    world = about.get("world") or on.get("world") or {}
    facts = {
        "run": run.id if run.label else "",
        "lab": run.lab,
        "fault": f"{run.fault} (a known bug, switched on)" if run.fault else "",
        "when": when(info.get("started"), info.get("finished")),
        "where": str(on.get("host") or ""),
        "machine": machine({**on, "kit": info.get("kit"), "git": about.get("git"), "time": None}),
        "ranks": f"{world['ranks']} on {world['device']}: {world['why']}"
        if {"ranks", "device", "why"} <= set(world)
        else "",
        "memory snapshots": memory_snapshots(run),
    }
    return {name: value for name, value in facts.items() if value}


def when(started: str | None, finished: str | None) -> str:
    try:
        begin, end = (datetime.fromisoformat(moment) if moment else None for moment in (started, finished))
        took = f", took {amount((end - begin).total_seconds(), 's')}" if begin and end else ""
    except (ValueError, TypeError):  # no dates, or one with a time zone and one without
        return f"{started} to {finished}"
    return f"{begin.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC{took}" if begin else ""


def moved_limits(run: Run, verdict: Verdict) -> dict[str, float]:
    """The tolerances of a stored verdict that differ from the lab's."""
    limits = {row.check: row.limit for row in verdict}
    shown = {rule: limits[rule.name] for rule in rules_of(run.lab) if rule.name in limits}
    return {rule.name: limit for rule, limit in shown.items() if is_moved(limit, own_limit(rule, run, limit))}


def is_moved(limit: float, own: float) -> bool:
    return limit != own and not math.isnan(limit)  # NaN: the run's config does not give the limit


def own_limit(rule: Rule, run: Run, shown: float) -> float:
    """The lab's limit for this run; the shown limit if the run's config lacks what the limit depends on."""
    try:
        return rule.limit_for(run.config)
    except NotMeasured:
        return shown


def answer_rows(run: Run, verdict: Verdict) -> list[dict[str, Any]]:
    """The checks, worst first, each with its question and its rows in detail.

    Checks not measured for the same reason share one row."""
    asked = {check.name: check for check in rules_of(run.lab)}
    made: list[dict[str, Any]] = []
    for group in folded_rows(without_parts(verdict)):
        row, alone = group[0], len(group) == 1
        check = asked.get(row.check) if alone else None
        own = own_limit(check, run, row.limit) if check else row.limit
        parts = [part for part in verdict if alone and part.check.startswith(f"{row.check}/")]
        made.append(
            {
                **answer_cells(group),
                "question": check.question if check else "",
                "better": SIGNS[check.better] if check else "",
                "moved": f"moved from the lab's {amount(own, row.unit)}" if is_moved(row.limit, own) else "",
                "parts": [answer_cells([part]) for part in worst_first(parts)],
            }
        )
    return made


def answer_cells(rows: Sequence[VerdictRow]) -> dict[str, str]:
    mark = MARKS[rows[0].passed]
    check, measured, limit, why = cells(rows)
    return {
        "kind": mark.kind,
        "mark": str(mark),
        "check": check,
        "measured": measured,
        "limit": limit,
        "why": beside_mark(why),
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def chapter_tables(data: RunData) -> list[dict[str, Any]]:
    """The run's tables, as far as it has data. A damaged or older config skips a table but never fails the report."""
    made = []
    for name, table in tables(data.run).items():
        if name == "records":
            continue
        try:
            frame = table.rows(data)
        except (NotMeasured, KeyError, BadInput):
            continue
        if len(frame):
            made.append(table_cells(frame, table.title, table.units, worst=table.worst))
    return made


def table_cells(
    frame: pd.DataFrame, title: str, units: Mapping[str, str], *, worst: str = "", most: int = MOST
) -> dict[str, Any]:
    """Each cell as its text and its number for sorting, if any."""
    if worst:
        frame = frame.sort_values(worst, ascending=False, kind="stable")
    shown = frame.head(most)
    texts = readable(shown, units)
    right, names = texts.attrs["right"], texts.columns.tolist()
    numbers = shown[names].astype(object).where(shown[names].notna(), None)
    numbers.loc[:, [not number for number in right]] = None
    rows = [
        list(zip(*row, strict=True)) for row in zip(texts.to_numpy().tolist(), numbers.to_numpy().tolist(), strict=True)
    ]
    left = len(frame) - most
    note = f"{left} more rows are left out; kit export writes the whole table." if left > 0 else ""
    return {"title": title, "head": names, "right": right, "rows": rows, "more": note}


def changed_answers(compared: Comparison) -> dict[str, Any]:
    """Changes from the first run that exceed the spread, as medians over the cycles."""
    shown = compact(compared.changed, several=len(compared.runs) > 2)
    return table_cells(shown, "Largest changes", {"base": ROW, "value": ROW}, most=CHANGES)


# -- logs -------------------------------------------------------------------------------------------------


def logs(run: Run) -> list[tuple[str, str]]:
    ranks = sorted(run.dir.glob("logs/rank*.log"), key=lambda path: (len(path.name), path.name))
    files = [run.dir / "logs" / "error.txt", *ranks]
    return [(path.name, text) for path in files if path.is_file() and (text := tail(path))]


def tail(path: Path) -> str:
    lines = ESCAPES.sub("", path.read_text(errors="replace")).rstrip().splitlines()
    left = [f"... {len(lines) - TAIL} lines before"] if len(lines) > TAIL else []
    return "\n".join([*left, *(line[:WIDE] for line in lines[-TAIL:])])
