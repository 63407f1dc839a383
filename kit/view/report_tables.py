"""The tables of a report: what a run measured, as cells of text that are sorted by the numbers behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.errors import BadInput
from kit.labs.split import parity
from kit.labs.stepped import HIDDEN, show
from kit.labs.sync import tables as sync
from kit.results import NotMeasured, compare

if TYPE_CHECKING:
    import pandas as pd

    from kit.results import Run

APART = 8  # ranks that get a column each; beyond it they are summed up
MOST = 200  # rows of a table on the page
CHANGES = 60  # of a comparison
MEMORY = ("anon_rss", "rss", "pss", "driver_used", "process_used", "allocated", "reserved")
LEVELS = (*MEMORY, "groups", "fds", "sockets", "threads")


class Cell(NamedTuple):
    """What is read, and the number it is sorted by; None: by the text."""

    text: str
    number: float | None = None


class Table(NamedTuple):
    """`right` says of each column whether it holds numbers. `more` tells what was left out."""

    title: str
    head: Sequence[str]
    right: Sequence[bool]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    more: str = ""


def tables(run: Run) -> list[Table]:
    """Times first, then levels, then what the lab itself makes tables of."""
    frame = run.frame()
    made = [times(frame), levels(frame), *(_own(run, frame))]
    return [table for table in made if table.rows]


def times(frame: pd.DataFrame) -> Table:
    """Seconds of each phase on each rank: the median over the cycles, and from where to where they went."""
    timed = frame[(frame["metric"] == "seconds") & frame["value"].notna()]
    ranks = sorted(timed["rank"].unique())
    apart = len(ranks) <= APART
    columns = [f"rank {rank}" for rank in ranks] if apart else ["all ranks", "slowest rank"]
    rows = []
    for phase, mine in timed.groupby("phase", sort=False):
        by_rank = mine.groupby("rank")["value"]
        counts = by_rank.count()
        cells = [Cell(str(phase)), whole(counts.max())]
        if apart:
            cells += [spread(by_rank.get_group(rank), "s") if rank in counts else Cell("-") for rank in ranks]
        else:
            longest, slowest = max((median, rank) for rank, median in by_rank.median().items())
            cells += [spread(mine["value"], "s"), Cell(f"rank {slowest}: {amount(longest, 's')}", longest)]
        rows.append(cells)
    note = "Median over the cycles (least to most); n counts the cycles."
    return Table("Time per phase and rank", ["phase", "n", *columns], [False, *[True] * (1 + len(columns))], rows, note)


def levels(frame: pd.DataFrame) -> Table:
    """Memory and counts at the end of each phase, over all ranks and cycles."""
    names = [name for name in LEVELS if name in set(frame["metric"])]
    rows = []
    for phase, mine in frame[frame["metric"].isin(names) & frame["value"].notna()].groupby("phase", sort=False):
        seen = {name: mine[mine["metric"] == name] for name in names}
        if seen[names[0]].empty and len(names) > 1:  # taken outside of any phase
            continue
        cells = [spread(part["value"], part["unit"].iloc[0]) if len(part) else Cell("-") for part in seen.values()]
        rows.append([Cell(str(phase)), *cells])
    note = "At the end of each phase: median over ranks and cycles (least to most)."
    return Table("Memory and counts per phase", ["phase", *names], [False, *[True] * len(names)], rows, note)


def compared(runs: Sequence[Run]) -> Table:
    """What changed most against the first run."""
    found = compare(runs)
    changed = found[(found["found_in"] == "both") & (found["base"] != found["value"]) & found["value"].notna()]
    changed = changed[~changed["metric"].str.endswith("_before") & ~changed["metric"].isin(HIDDEN)]
    rows = [
        [
            Cell(str(row["run"])),
            Cell(str(row["phase"])),
            whole(row["rank"]),
            Cell(str(row["metric"])),
            Cell(amount(row["base"], row["unit"]), row["base"]),
            Cell(amount(row["value"], row["unit"]), row["value"]),
            Cell("-" if math.isnan(row["ratio"]) else f"{row['ratio']:.3g}", row["ratio"]),
            Cell(f"{row['base_n']} / {row['n']}", row["n"]),
        ]
        for row in changed.head(CHANGES).to_dict("records")
    ]
    head = ["run", "phase", "rank", "metric", f"in {runs[0].id}", "here", "ratio", "n"]
    note = f"Medians over the cycles against {runs[0].id}. What changed most comes first; what is equal or in one alone is left out."
    right = [False, False, True, False, True, True, True, True]
    more = f"{len(changed) - CHANGES} rows that changed less are left out." if len(changed) > CHANGES else ""
    return Table("Runs compared", head, right, rows, note, more)


def _own(run: Run, frame: pd.DataFrame) -> list[Table]:
    """The lab's own tables, as far as the run got. A damaged or older config leaves them out, never the report."""
    made = []
    for title, make, units in OWN.get(run.lab, ()):
        try:
            found = make(frame, run.config)
        except (NotMeasured, KeyError, BadInput):
            continue
        made.append(of_frame(found, title, units))
    return made


def of_frame(frame: pd.DataFrame, title: str, units: Mapping[str, str]) -> Table:
    numbers = [frame[name].dtype.kind in "iuf" for name in frame.columns]
    rows = [
        [
            Cell(amount(item, units.get(str(name), "")), float(item)) if number and item == item else _text(item)  # noqa: PLR0124 - NaN differs from itself
            for name, number, item in zip(frame.columns, numbers, row, strict=True)
        ]
        for row in frame.head(MOST).astype(object).itertuples(index=False, name=None)
    ]
    return Table(title, [str(name) for name in frame.columns], numbers, rows, more=left_out(len(frame)))


def left_out(count: int) -> str:
    return f"{count - MOST} more rows are left out; the run's own table has them (kit export)." if count > MOST else ""


def falling(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    return frame.sort_values(column, ascending=False, kind="stable")


def spread(values: pd.Series[float], unit: str) -> Cell:
    middle, low, high = float(values.median()), float(values.min()), float(values.max())
    text = amount(middle, unit)
    if amount(low, unit) != amount(high, unit):
        text += f" ({amount(low, unit)} to {amount(high, unit)})"
    return Cell(text, middle)


def whole(number: Any) -> Cell:
    return Cell(f"{number:.0f}", float(number))


def amount(value: float, unit: str) -> str:
    if value is None or math.isnan(value):
        return "-"
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    if math.isinf(value):
        return str(value)
    if unit == "s" and value > 0.99:  # else what rounds up to a second is 1e+03 ms
        return f"{value:.3g} s"
    return show(float(value), unit)


def _text(item: Any) -> Cell:
    return Cell("-" if item is None or item != item else str(item))  # noqa: PLR0124 - NaN differs from itself


Make = Callable[["pd.DataFrame", Mapping[str, Any]], "pd.DataFrame"]
STAGES = ("gather", "pack", "send", "verify", "apply", "teardown", "finalize", "publish", "activate", "wall")
SECONDS = dict.fromkeys([*STAGES, *(f"receiver {stage}" for stage in (*STAGES, "receive", "keep", "gate"))], "s")
OWN: Mapping[str, Sequence[tuple[str, Make, Mapping[str, str]]]] = {
    "sync": (
        ("Every sync", lambda frame, _: sync.syncs(frame), {**SECONDS, "bytes": "B"}),
        (
            "Transports by size of bucket",
            lambda frame, _: sync.transports(frame),
            {"bucket_bytes": "B", "rate": "B/s"},
        ),
        ("Digests on the receivers, worst first", lambda frame, _: falling(sync.digests(frame), "differ"), {}),
    ),
    "split": (
        ("Every metric, worst first", lambda *of: falling(parity.metrics(*of), "error"), {}),
        ("Every tensor, worst first", lambda *of: falling(parity.tensors(*of), "gradient_error"), {}),
    ),
}
