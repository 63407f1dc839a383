"""A sync of weights as it went: busy time by stage beside the time that passed, and the events of one sync, a lane a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kit.draw.axes import grid_across, legend_of, stack
from kit.labs.sync import tables
from kit.results.units import time_unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from kit.draw.style import Theme

# A stage's colour, by its place in the theme. Sending and receiving are two ends of one thing, as are keeping the weights that were
# and applying the new ones. What is short is one: the rest.
STAGES = {
    "gather": 0,
    "pack": 3,
    "send": 1,
    "receive": 1,
    "verify": 2,
    "keep": 4,
    "apply": 4,
    "teardown": 5,
    "rest": None,
}
WORDS = {**{stage: stage for stage in STAGES}, "keep": "undo copy", "rest": "finalize to activate"}
REST = {"gate": "rest", "finalize": "rest", "publish": "rest", "activate": "rest"}
HATCH = {"receive": "///", "keep": "..."}
# Which stage an event ends. What leads to any other is drawn as waiting.
ENDS = {
    "gathered": "gather",
    "packed": "pack",
    "sent": "send",
    "received": "receive",
    "verified": "verify",
    "apply": "apply",
    "applied": "apply",
    "teardown": "teardown",
    "finalize": "rest",
    "publish": "rest",
    "activate": "rest",
    "end": "rest",
}
CYCLES = 5  # as many are drawn, the last ones
LANES = 6
LANE = 0.52  # inches
LETTER = 0.0057  # of the width of the drawing, at this size of type
LONG = 28  # letters in a line
WIDTH = 0.36


def colour(stage: str, theme: Theme) -> str:
    index = STAGES[stage]
    return theme.faint if index is None else theme.series[index]


def stages_legend(ax: Axes, theme: Theme) -> None:
    marks: list[Artist] = [
        Patch(
            facecolor=colour(stage, theme), hatch=HATCH.get(stage, ""), edgecolor=theme.paper, linewidth=0, label=word
        )
        for stage, word in WORDS.items()
    ]
    marks.append(Line2D([], [], color=theme.ink, linewidth=1.8, label="elapsed time"))
    legend_of(ax, marks, columnspacing=1.0, handlelength=1.2)


def stages(ax: Axes, frame: pd.DataFrame, theme: Theme) -> None:
    """Two bars for each sync: the sender's stages, and those of the receiver that was last. A line: the time that passed."""
    table = tables.stages(frame)
    table = table[table["cycle"].isin(sorted(table["cycle"].unique())[-CYCLES:])]
    scale, unit = time_unit(float(table["seconds"].max()))
    places: dict[tuple[int, str], float] = {}
    for cycle, path in dict.fromkeys(zip(table["cycle"], table["path"], strict=True)):
        last = list(places)[-1:]
        places[cycle, path] = (places[last[0]] + (1.0 if last[0][0] == cycle else 1.35)) if last else 0.0
    ticks = {}
    for (cycle, path), x in places.items():
        mine = table[(table["cycle"] == cycle) & (table["path"] == path)]
        for side, who in ((-1, "sender"), (1, "receiver")):
            draw_stages(ax, x + side * WIDTH / 2, mine[mine["who"] == who], scale, theme)
        ticks[x] = f"{path}\ncycle {cycle}"
        for passed in mine[(mine["who"] == "sender") & (mine["stage"] == "wall")]["seconds"] * scale:
            ax.plot([x - WIDTH, x + WIDTH], [passed] * 2, color=theme.ink, linewidth=1.8, zorder=4)
            ticks[x] += f"\ntook {passed:.3g} {unit}"
    ax.set_xlim(-0.7, max(4.0, *places.values()) + 0.7)  # one sync is not drawn as wide as all of it
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel(f"busy [{unit}]")
    ax.set_title("Stages of each sync, n = 1 each (left: sender; right: last receiver; stages overlap)")


def draw_stages(ax: Axes, x: float, rows: pd.DataFrame, scale: float, theme: Theme) -> None:
    """Stages on one another."""
    busy = rows.assign(stage=rows["stage"].replace(REST)).groupby("stage")["seconds"].sum() * scale
    shown = [stage for stage in STAGES if stage in busy]
    stack(ax, x, WIDTH * 0.9, [(float(busy[stage]), look_of(stage, theme)) for stage in shown])


def look_of(stage: str, theme: Theme) -> dict[str, Any]:
    return {"color": colour(stage, theme), "hatch": HATCH.get(stage, ""), "edgecolor": theme.paper, "linewidth": 0}


# -- events ----------------------------------------------------------------------------------------------------------------


def shown(frame: pd.DataFrame) -> tuple[str, int] | None:
    """The sync whose events are drawn: the last expansion that has any, else the last refresh."""
    events = tables.all_events(frame)
    for path in reversed(tables.PATHS):
        cycles = events[events["phase"] == path]["cycle"]
        if len(cycles):
            return path, int(cycles.max())
    return None


def lanes(events: pd.DataFrame) -> list[int]:
    """The sender and the receivers; of many those that took longest."""
    last = events[events["rank"] != 0].groupby("rank")["seconds"].max().sort_values(ascending=False)
    return [rank for rank in (0,) if rank in set(events["rank"])] + sorted(
        int(rank) for rank in last.index[: LANES - 1]
    )


def height(frame: pd.DataFrame) -> float:
    found = shown(frame)
    return LANE * (len(lanes(tables.events(frame, *found))) + 1) if found else 0.0


def timeline(ax: Axes, frame: pd.DataFrame, config: Mapping[str, object], theme: Theme) -> None:
    """A lane a rank: what led to each event in the colour of its stage, and its name where it happened."""
    path, cycle = shown(frame) or ("expand", 0)
    events = tables.events(frame, path, cycle)
    ranks = lanes(events)
    low, high = float(events["seconds"].min()), float(events["seconds"].max())
    scale, unit = time_unit(high - low)
    moments = [moments_of(events[events["rank"] == rank], scale) for rank in ranks]
    left, right = (edge * scale for edge in (low - 0.01 * (high - low), high))
    for _ in range(3):  # the last names need room, which makes all others narrower
        ends = [written[-1] for written in (labels(lane, LETTER * (right - left)) for lane in moments)]
        right = max(left + (x - left) / (1 - LETTER * wide(word)) for x, word in ends)
    for lane, mine in enumerate(moments):
        draw_lane(ax, lane, mine, theme)
        for x, word in labels(mine, LETTER * (right - left)):
            ax.text(x, lane - 0.27, fold(word), fontsize=7.5, va="bottom", linespacing=1.0)
    ax.set_yticks(range(len(ranks)), [named(rank, config) for rank in ranks])
    ax.set_ylim(len(ranks) - 0.6, -0.85)
    ax.set_xlim(left, right)
    grid_across(ax)
    ax.set_xlabel(f"time since the sender began [{unit}]")
    receivers = events["rank"].nunique() - (0 in ranks)
    some = f", {len(ranks) - 1} of {receivers} receivers" if receivers > LANES - 1 else ""
    word = {"expand": "Expansion", "refresh": "Refresh"}[path]
    ax.set_title(f"{word} of cycle {cycle}, event by event{some} (grey: preparing, waiting)")


def moments_of(events: pd.DataFrame, scale: float) -> list[tuple[float, str]]:
    """A rank's events, in their order."""
    return [(seconds * scale, str(name)) for seconds, name in zip(events["seconds"], events["event"], strict=True)]


def draw_lane(ax: Axes, lane: int, moments: Sequence[tuple[float, str]], theme: Theme) -> None:
    for index, (x, name) in enumerate(moments):
        if index:
            before = moments[index - 1][0]
            stage = ENDS.get(name)
            ax.barh(
                lane,
                x - before,
                0.34,
                left=before,
                color=colour(stage, theme) if stage else theme.grid,
                hatch=HATCH.get(stage or "", ""),
                edgecolor=theme.paper,
                linewidth=0,
                zorder=2,
            )
        ax.plot([x, x], [lane - 0.24, lane + 0.2], color=theme.ink, linewidth=1.0, zorder=3)


def labels(moments: Sequence[tuple[float, str]], letter: float) -> list[tuple[float, str]]:
    """Where names are written: each at its event, but those that would run into the one before are joined to it."""
    found: list[tuple[float, str]] = []
    for x, name in moments:
        if found and x < found[-1][0] + (wide(found[-1][1]) + 1) * letter:
            found[-1] = found[-1][0], f"{found[-1][1]}, {name}"
        else:
            found.append((x, name))
    return found


def fold(word: str) -> str:
    """Long names in two lines."""
    if len(word) <= LONG:
        return word
    cut = min((at for at, letter in enumerate(word) if letter == " "), key=lambda at: abs(at - len(word) / 2))
    return f"{word[:cut]}\n{word[cut + 1 :]}"


def wide(word: str) -> int:
    return max(map(len, fold(word).split("\n")))


def named(rank: int, config: Mapping[str, object]) -> str:
    """A rank with the replica that it belongs to; inference ranks are the last ones."""
    if rank == 0:
        return "sender, rank 0"
    ranks, replicas, each = (int(str(config[name])) for name in ("ranks", "replicas", "infer_tp"))
    return f"replica {(rank - (ranks - replicas * each)) // each}, rank {rank}"
