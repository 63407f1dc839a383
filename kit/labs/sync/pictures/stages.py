"""A sync of weights as it went: busy time by stage beside the time that passed, and the events of one sync, a lane a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kit.draw.axes import grid_across, legend_of, marks_of, stack
from kit.labs.sync import tables
from kit.results.units import time_unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from kit.draw.plots import Scene
    from kit.draw.style import Theme


class Stage(NamedTuple):
    """How a stage is drawn: the place of its colour in the theme (None: grey), its hatch, and its word where its name says too little."""

    colour: int | None
    hatch: str = ""
    word: str = ""


# Sending and receiving are two ends of one thing, as are keeping the old weights and applying the new ones. What is short is one: the rest.
STAGES = {
    "gather": Stage(0),
    "pack": Stage(3),
    "send": Stage(1),
    "receive": Stage(1, "///"),
    "verify": Stage(2),
    "keep": Stage(4, "...", "undo copy"),
    "apply": Stage(4),
    "teardown": Stage(5),
    "rest": Stage(None, word="finalize to activate"),
}
SHORT = dict.fromkeys(("finalize", "publish", "activate"), "rest")
# Which stage an event ends. What leads to any other is drawn as waiting.
ENDS = {"gathered": "gather", "packed": "pack", "sent": "send", "received": "receive", "verified": "verify"}
ENDS |= {"apply": "apply", "applied": "apply", "teardown": "teardown", "end": "rest", **SHORT}
CYCLES = 5  # as many are drawn, the last ones
LANES = 6
LANE = 0.52  # inches
LETTER = 0.0057  # of the width of the drawing, at this size of type
LONG = 28  # letters in a line
WIDTH = 0.36


def look_of(stage: str | None, theme: Theme) -> dict[str, Any]:
    index, hatch, _ = STAGES[stage] if stage else (None, "", "")
    colour = theme.series[index] if index is not None else theme.faint if stage else theme.grid
    return {"facecolor": colour, "hatch": hatch, "edgecolor": theme.paper, "linewidth": 0}


def bars(scene: Scene) -> None:
    """Two bars for each sync: the sender's stages, and those of the receiver that was last. A line: the time that passed."""
    theme = scene.theme
    legend, ax = scene.figure.subplots(2, 1, height_ratios=(0.05, 1))
    marks = {stage.word or name: look_of(name, theme) for name, stage in STAGES.items()}
    marks["elapsed time"] = {"color": theme.ink, "linewidth": 1.8}
    legend_of(legend, marks_of(marks), columnspacing=1.0, handlelength=1.2)
    table = tables.stages(scene.data.records)
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
            rows = mine[mine["who"] == who]
            busy = (
                rows.assign(stage=rows["stage"].replace({"gate": "rest", **SHORT})).groupby("stage")["seconds"].sum()
                * scale
            )
            parts = [(float(busy[stage]), look_of(stage, theme)) for stage in STAGES if stage in busy]
            stack(ax, x + side * WIDTH / 2, WIDTH * 0.9, parts)
        ticks[x] = f"{path}\ncycle {cycle}"
        for passed in mine[(mine["who"] == "sender") & (mine["stage"] == "wall")]["seconds"] * scale:
            ax.plot([x - WIDTH, x + WIDTH], [passed] * 2, color=theme.ink, linewidth=1.8, zorder=4)
            ticks[x] += f"\ntook {passed:.3g} {unit}"
    ax.set_xlim(-0.7, max(4.0, *places.values()) + 0.7)  # one sync is not drawn as wide as all of it
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel(f"busy [{unit}]")
    ax.set_title("Stages of each sync, n = 1 each (left: sender; right: last receiver; stages overlap)")


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


def timeline(scene: Scene) -> None:
    """A lane a rank: what led to each event in the colour of its stage, and its name where it happened."""
    ax, theme, frame = scene.figure.subplots(), scene.theme, scene.data.records
    path, cycle = shown(frame) or ("expand", 0)
    events = tables.events(frame, path, cycle)
    ranks = lanes(events)
    low, high = float(events["seconds"].min()), float(events["seconds"].max())
    scale, unit = time_unit(high - low)
    of_ranks = (events[events["rank"] == rank] for rank in ranks)
    moments = [list(zip(mine["seconds"] * scale, mine["event"], strict=True)) for mine in of_ranks]
    left, right = (edge * scale for edge in (low - 0.01 * (high - low), high))
    for _ in range(3):  # the last names need room, which makes all others narrower
        ends = [written[-1] for written in (labels(lane, LETTER * (right - left)) for lane in moments)]
        right = max(left + (x - left) / (1 - LETTER * wide(word)) for x, word in ends)
    for lane, mine in enumerate(moments):
        for index, (x, name) in enumerate(mine):
            if index:
                before = mine[index - 1][0]
                ax.barh(lane, x - before, 0.34, left=before, zorder=2, **look_of(ENDS.get(name), theme))
            ax.plot([x, x], [lane - 0.24, lane + 0.2], color=theme.ink, linewidth=1.0, zorder=3)
        for x, word in labels(mine, LETTER * (right - left)):
            ax.text(x, lane - 0.27, fold(word), fontsize=7.5, va="bottom", linespacing=1.0)
    ax.set_yticks(range(len(ranks)), [named(rank, scene.data.config) for rank in ranks])
    ax.set_ylim(len(ranks) - 0.6, -0.85)
    ax.set_xlim(left, right)
    grid_across(ax)
    ax.set_xlabel(f"time since the sender began [{unit}]")
    receivers = events["rank"].nunique() - (0 in ranks)
    some = f", {len(ranks) - 1} of {receivers} receivers" if receivers > LANES - 1 else ""
    word = {"expand": "Expansion", "refresh": "Refresh"}[path]
    ax.set_title(f"{word} of cycle {cycle}, event by event{some} (grey: preparing, waiting)")


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
