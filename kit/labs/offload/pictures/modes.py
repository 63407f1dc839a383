"""Ways of releasing side by side: what each leaves behind while released, what its groups cost, and which checks see it.

For runs of the offload lab with the same ranks and cycles: its modes, a fault, a person's own code. A way's name is its fault,
its implementation or its mode, whichever sets it apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from kit.draw.axes import cycle_axis, log_scale
from kit.draw.general import COUNTS
from kit.draw.plots import Picture, RunData, read
from kit.draw.style import MARKERS, Theme, theme
from kit.errors import BadInput
from kit.labs.offload.pictures import OURS, rows_of
from kit.results.comparison import warnings
from kit.results.units import counted
from kit.results.verdict import MARKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kit.results import Run, Verdict, VerdictRow

# Each keeps its colour and shape, whichever are shown.
WAYS = ("exact", "abort", "manual", "official", "suspend", "manual, by store")
Styles = Mapping[str, Mapping[str, Any]]  # the marker and the colour of each way
PARTS = {"release": "destroy groups", "reload": "rebuild groups"}


def plot_modes(runs: Sequence[Run], *, theme_name: str = "light") -> Picture:
    """Two or more offload runs. `theme_name` is light or dark."""
    if len(runs) < 2 or any(run.lab != "offload" for run in runs):
        raise BadInput("plot_modes compares modes: give it two or more runs of the offload lab")
    look, seen = theme(theme_name), {name(run): read(run) for run in runs}
    if len(seen) < len(runs):
        raise BadInput(f"two of these runs have the same mode; give one run per mode (here: {', '.join(seen)})")
    numbers = numbered(seen)
    styles = {way: {"marker": MARKERS[n % len(MARKERS)], "color": look.colour(n)} for way, n in numbers.items()}
    verdicts = {name(run): run.verdict() for run in runs}
    table = differing(verdicts)
    counts = [metric for metric in COUNTS if all(metric in one.metrics() for one in seen.values())]
    with mpl.rc_context(look.rc()):
        high = max(2.2, 0.2 * (len(table) + 3))
        warned = [f"Warning: {why}" for why in warnings(runs)]
        picture = Picture(2.1 + high + 1.0 + 0.2 * len(warned))
        names: list[Any] = [[metric for metric in counts for _ in range(12 // len(counts))]]
        names.append(["times"] * 4 + ["checks"] * 8)
        axes = picture.subplot_mosaic(names, height_ratios=[2.1, high])
        for metric in counts:
            left_behind(axes[metric], seen, metric, styles, look)
        labels = axes[counts[0]].get_legend_handles_labels()
        picture.legend(*labels, loc="outside upper right", ncols=len(seen), handletextpad=0.4)
        group_times(axes["times"], seen, styles, look)
        checks(axes["checks"], table, verdicts, styles, look)
        ranks = counted(len(next(iter(seen.values())).ranks), "rank")
        title = f"offload · {ranks} · modes of releasing · counts of the worst rank"
        picture.suptitle("\n".join([title, *warned]), x=0.01, ha="left", fontsize=11.5)
    return picture


def name(run: Run) -> str:
    own = str(run.config["implementation"])
    return run.fault or (own.rpartition(":")[2] if not own.startswith(OURS) else str(run.config["mode"]))


def numbered(ways: Iterable[str]) -> dict[str, int]:
    """Numbers for colours and shapes: a mode has its own, as in the picture of the bench; others take what is free."""
    shown = list(ways)
    free = [index for index in range(len(WAYS) + len(shown)) if index >= len(WAYS) or WAYS[index] not in shown]
    others = [way for way in shown if way not in WAYS]
    return {**{way: WAYS.index(way) for way in shown if way in WAYS}, **dict(zip(others, free, strict=False))}


def left_behind(ax: Axes, seen: Mapping[str, RunData], metric: str, styles: Styles, look: Theme) -> None:
    """More than a process without the job has, while released: the worst rank of each cycle."""
    for place, (way, one) in enumerate(seen.items()):
        size = 5.5 + 1.2 * (len(seen) - 1 - place)  # those below stay in sight where ways are alike
        base = rows_of(one, "baseline", metric).set_index("rank")["value"]
        rows = rows_of(one, "idle", metric)
        more = rows.assign(value=rows["value"] - rows["rank"].map(base)).groupby("cycle")["value"].max()
        ax.plot(more.index, more, linewidth=1.4, markersize=size, label=way, **styles[way])
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, -1), max(high, 4) * 1.05)
    ax.axhline(0, color=look.faint, linewidth=1.0, zorder=1)
    cycle_axis(ax)
    ax.set(ylabel="more than without a job", title=f"{COUNTS[metric]} while released")


def group_times(ax: Axes, seen: Mapping[str, RunData], styles: Styles, look: Theme) -> None:
    """What the code under test says its groups took: a point per rank and cycle, a tick at the median."""
    counts = set()
    for index, (way, one) in enumerate(seen.items()):
        for place, phase in enumerate(PARTS):
            found = rows_of(one, phase, "groups_seconds")["value"] * 1e3
            if found.empty:
                continue
            counts.add(len(found))
            x = place + (index - (len(seen) - 1) / 2) * min(0.22, 0.8 / len(seen))
            ax.plot([x] * len(found), found, linestyle="", markersize=5, alpha=0.75, **styles[way])
            ax.plot(x, found.median(), "_", color=look.ink, markersize=14, markeredgewidth=1.6)
    log_scale(ax)
    ax.set_xticks(range(len(PARTS)), list(PARTS.values()))
    title = f"Time for groups (n = {', '.join(map(str, sorted(counts)))} each, median)"
    ax.set(xlim=(-0.6, len(PARTS) - 0.4), ylabel="time [ms]", title=title)


def differing(verdicts: Mapping[str, Verdict]) -> dict[str, dict[str, VerdictRow]]:
    """The checks that do not pass for every way, unless none was measured: a row by way."""
    rows: dict[str, dict[str, VerdictRow]] = {}
    for way, verdict in verdicts.items():
        for row in verdict:
            rows.setdefault(row.check, {})[way] = row
    answers = {check: {row.passed for row in ways.values()} for check, ways in rows.items()}
    return {check: ways for check, ways in rows.items() if answers[check] not in ({True}, {None})}


def checks(
    ax: Axes,
    table: Mapping[str, Mapping[str, VerdictRow]],
    verdicts: Mapping[str, Verdict],
    styles: Styles,
    look: Theme,
) -> None:
    """A line per check on which the ways differ or fail, with what was measured."""
    ax.set_axis_off()
    lines = max(len(table) + 3, 11)
    where = {way: 0.5 + 0.5 * (index + 0.5) / len(verdicts) for index, way in enumerate(verdicts)}

    def write(x: float, line: float, text: str, **how: Any) -> None:
        ax.text(x, 1 - (line + 0.5) / lines, text, va="center", transform=ax.transAxes, **{"fontsize": 8.5, **how})

    write(0.06, 0, "Checks", fontweight="bold", fontsize=10)
    for way, x in where.items():
        write(x, 0, way, ha="center", fontweight="bold", color=styles[way]["color"])
    for line, (check, ways) in enumerate(table.items(), start=1):
        write(0.06, line, check)
        for way, row in ways.items():
            measured = "" if row.measured is None or row.passed else f" {row.measured:g}"
            text = f"{MARKS[row.passed].sign} {'not measured' if row.passed is None else measured}".strip()
            write(where[way], line, text, ha="center", color=look.answer(row.passed))
    rest = [row for row in next(iter(verdicts.values())) if row.check not in table]
    passed = sum(row.passed is True for row in rest)
    left_out = f"{passed} more pass in every run; {len(rest) - passed} not measured in any"
    write(0.06, len(table) + 1.6, left_out, color=look.faint)
