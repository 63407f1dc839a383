"""What an offload run did from cycle to cycle: times with the first apart, drift while released, and counts before, while, after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from kit.view.drawings import APART, count_word, time_unit, widen
from kit.view.style import LINES, MARKERS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.results import Verdict
    from kit.view.steps import Steps
    from kit.view.style import Theme

# What is timed: a phase, or a part of it that the code under test tells of itself.
TIMED = (
    ("release", "seconds", "release"),
    ("release", "groups_seconds", "its groups"),
    ("release", "tensors_seconds", "its tensors"),
    ("reload", "seconds", "reload"),
    ("reload", "groups_seconds", "its groups"),
    ("reload", "tensors_seconds", "its tensors"),
    ("talk", "seconds", "first\ncollective"),
    ("train", "seconds", "train"),
)
CONTROLS = ("control_build", "control", "control_end", "second_control")
CHECKING = ("fingerprint", "verify", "compare", "rehearse_failure", "ownership")
DRIFT = ("memory_drift", "memory_growth")  # the checks that limit it
COUNTS = {"groups": "Process groups", "fds": "Open files", "sockets": "Sockets", "threads": "Threads"}
STATES = (("before the release", "fingerprint", 0), ("released", "idle", 4), ("back", "verify", 2))
MIB = 2**20


def rows_of(seen: Steps, phase: str, metric: str) -> pd.DataFrame:
    rows = seen.of(metric)
    return rows[rows["phase"] == phase]


def times(ax: Axes, seen: Steps, theme: Theme) -> None:
    """Time per phase and rank: the first cycle hollow, the later ones filled, with their range and a tick at the median."""
    shown = [(timed(seen, phase, metric), label) for phase, metric, label in TIMED]
    shown = [(rows, label) for rows, label in shown if not rows.empty]
    scale, unit = time_unit(max(float(rows["value"].max()) for rows, _ in shown))
    lanes = [[rank] for rank in seen.ranks] if len(seen.ranks) <= APART else [seen.ranks]
    for index, (rows, _) in enumerate(shown):
        for lane, ranks in enumerate(lanes):
            mine = rows[rows["rank"].isin(ranks)]
            x = index + (lane - (len(lanes) - 1) / 2) * 0.6 / len(lanes)
            draw_times(ax, x, mine.set_index("cycle")["value"] * scale, MARKERS[lane], theme)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * 4)  # room for the legend
    ax.set_xticks(range(len(shown)), [label for _, label in shown])
    ax.tick_params(axis="x", labelsize=8)
    for tick, (_, label) in zip(ax.get_xticklabels(), shown, strict=True):
        tick.set_color(theme.faint if label.startswith("its") else theme.ink)
    ax.set_xlim(-0.6, len(shown) - 0.4)
    ax.set_ylabel(f"time [{unit}]")
    ax.set_title(f"Time per phase{' and rank' if len(lanes) > 1 else ', all ranks'}")
    marks = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=MARKERS[lane],
            color=theme.faint,
            label=f"rank {ranks[0]}" if len(lanes) > 1 else f"{len(ranks)} ranks",
        )
        for lane, ranks in enumerate(lanes)
    ]
    marks.append(
        Line2D([], [], linestyle="", marker="o", color=theme.series[1], markerfacecolor="none", label="cycle 1, n = 1")
    )
    later = {len(mine) for rows, _ in shown for _, mine in rows[rows["cycle"] > 1].groupby("rank")}
    if later:
        word = f"later, {count_word(later)}"
        marks.append(Line2D([], [], linestyle="", marker="o", color=theme.series[0], label=word))
    ax.legend(handles=marks, ncols=len(marks), loc="upper right", handletextpad=0.1, columnspacing=0.8)
    ax.set_xlabel(aside(seen), color=theme.faint, fontsize=8.5)


def timed(seen: Steps, phase: str, metric: str) -> pd.DataFrame:
    """The times of a phase; a training that had to be skipped took none."""
    rows = rows_of(seen, phase, metric)
    if phase != "train":
        return rows
    trained = seen.of("trained_steps")["step"]
    return rows[rows["step"].isin(trained)] if len(trained) else rows


def draw_times(ax: Axes, x: float, mine: pd.Series[float], marker: str, theme: Theme) -> None:
    """`mine` has the cycle as its index."""
    first, later = mine[mine.index == 1], mine[mine.index > 1]
    if not later.empty:
        ax.plot(
            [x, x], [later.min(), later.max()], color=theme.series[0], linewidth=5, alpha=0.3, solid_capstyle="round"
        )
        ax.plot([x] * len(later), later, marker, color=theme.series[0], markersize=4.5, markeredgecolor=theme.paper)
        if len(later) > 1:
            ax.plot(x, later.median(), "_", color=theme.ink, markersize=10, markeredgewidth=1.4)
    ax.plot(
        [x] * len(first),
        first,
        marker,
        color=theme.series[1],
        markersize=5.5,
        markerfacecolor="none",
        markeredgewidth=1.4,
    )


def aside(seen: Steps) -> str:
    """The time of what is not drawn: the slowest rank of each phase."""
    slowest = seen.of("seconds").groupby("step").agg({"phase": "first", "value": "max"})
    sums = {
        word: float(slowest[slowest["phase"].isin(phases)]["value"].sum())
        for word, phases in (("controls", CONTROLS), ("hashing and checks", CHECKING))
    }
    return "not drawn: " + ", ".join(f"{word} {seconds:.1f} s" for word, seconds in sums.items())


def drift(ax: Axes, seen: Steps, verdict: Verdict, theme: Theme, phase: str = "idle") -> None:
    """Memory after a phase of each cycle against the first cycle, by rank; a job that is never released beside it; the limit."""
    table = levels_of(seen, phase)
    table = (table - table.iloc[0]) / MIB
    draw_ranks(ax, table, theme, each=seen.memory.whose)
    control = levels_of(seen, "control")
    control = control[control.index.isin(table.index)]
    if not control.empty:
        moved = ((control - control.iloc[0]) / MIB).median(axis=1)
        ax.plot(
            moved.index, moved, color=theme.faint, linestyle=LINES[1], linewidth=1.2, label="control, never released"
        )
    limit = next((row.limit for row in verdict if row.check in DRIFT), None)
    if limit is not None:
        draw_limit(ax, limit, f"limit {limit:g} MiB", theme)
        if limit > 8 * float(table.abs().max().max()):
            ax.set_yscale("symlog", linthresh=1)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, -2), max(high, 2) * (15 if ax.get_yscale() == "symlog" else 1.3))
    ax.axhline(0, color=theme.faint, linewidth=1.0, zorder=1)
    cycle_axis(ax)
    ax.set_xlabel("cycle (a point is one sample)")
    ax.set_ylabel(f"since cycle {table.index[0]} [MiB]")
    word = "anonymous memory" if seen.memory.metric == "anon_rss" else "GPU memory"
    when = "while released" if phase == "idle" else f"after {phase}"
    ax.set_title(f"Drift of {word} {when}")
    ax.legend(loc="upper left", ncols=3, handletextpad=0.4, columnspacing=0.9)


def levels_of(seen: Steps, phase: str) -> pd.DataFrame:
    """What the memory checks look at: a column a rank, or a card that ranks share."""
    rows = rows_of(seen, phase, seen.memory.metric)
    columns = rows["rank"].map(lambda rank: seen.memory.card_of.get(rank, rank))
    return rows.assign(rank=columns).pivot_table(index="cycle", columns="rank", values="value", aggfunc="max")


def draw_ranks(ax: Axes, table: pd.DataFrame, theme: Theme, each: str) -> None:
    """A line for each (rank or card), a point a cycle; many are their median and range."""
    if len(table.columns) <= APART:
        for lane, rank in enumerate(table.columns):
            ax.plot(
                table.index,
                table[rank],
                marker=MARKERS[lane],
                color=theme.series[0],
                markersize=4.5,
                linewidth=1.2,
                label=f"{each} {rank}",
            )
        return
    ax.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=theme.series[0], alpha=0.25, linewidth=0)
    ax.plot(
        table.index,
        table.median(axis=1),
        marker="o",
        color=theme.series[0],
        markersize=4.5,
        label=f"median and range of {len(table.columns)} {each}s",
    )


def draw_limit(ax: Axes, limit: float, word: str, theme: Theme) -> None:
    """A limit across the drawing, named at its right end."""
    ax.axhline(limit, color=theme.bad, linewidth=1.4, linestyle=LINES[2], gid="limit")
    ax.annotate(
        word,
        (1, limit),
        (0, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=theme.bad,
        fontsize=8.5,
    )


def census(ax: Axes, seen: Steps, metric: str, theme: Theme, *, allowed: float | None = None) -> None:
    """A count in each cycle while training, while released and once back, with the level of a process without the job.

    `allowed` is by how much the check of it lets it grow, above what that check starts from.
    """
    for place, (_, phase, colour) in enumerate(STATES):
        groups = rows_of(seen, phase, metric).groupby("cycle")["value"]
        if not len(groups):
            continue
        middle = groups.median()
        ax.fill_between(middle.index, groups.min(), groups.max(), color=theme.series[colour], alpha=0.25, linewidth=0)
        ax.plot(
            middle.index,
            middle,
            marker=MARKERS[place],
            color=theme.series[colour],
            linewidth=1.2,
            markersize=(7.5, 5, 3.8)[place],
            markerfacecolor="none" if place == 0 else theme.series[colour],
        )
    base = rows_of(seen, "baseline", metric)["value"]
    if not base.empty:
        ax.axhline(base.median(), color=theme.faint, linewidth=1.2, linestyle=LINES[1], zorder=1)
    judged = rows_of(seen, "baseline" if metric == "groups" else "build", metric)["value"]
    if allowed is not None and not judged.empty:
        level = float(judged.median()) + allowed
        draw_limit(ax, level, f"limit {allowed:+g}: {level:g}", theme)
    widen(ax, least=4)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.set_ylim(bottom=0, top=ax.get_ylim()[1] * 1.08)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    cycle_axis(ax)
    ax.set_xlabel("cycle" if len(seen.ranks) == 1 else f"cycle (range of {len(seen.ranks)} ranks)")
    ax.set_ylabel("count")
    ax.set_title(COUNTS[metric] + ("" if base.empty else f" (without a job {base.median():g})"))


def census_legend(ax: Axes, theme: Theme) -> None:
    """What the lines of the counts are."""
    ax.set_axis_off()
    marks = [
        Line2D(
            [],
            [],
            marker=MARKERS[place],
            color=theme.series[colour],
            markerfacecolor="none" if place == 0 else theme.series[colour],
            label=word,
        )
        for place, (word, _, colour) in enumerate(STATES)
    ]
    marks.append(Line2D([], [], color=theme.faint, linestyle=LINES[1], label="a process without a job"))
    ax.legend(handles=marks, ncols=len(marks), loc="center left", borderaxespad=0)


def cycle_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    left, right = ax.get_xlim()
    if right - left < 1:
        ax.set_xlim(0.5, 1.5)
    ax.set_xlabel("cycle")
