"""The pictures of a stream run: versions by replica, where the time went, lag of trained tokens, ends of groups, and the recomputation.

Colour is the weight version in the first picture, and a part of the time or an end of a group in the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.draw.plots import Pictures, Plot, Table
from kit.labs.stream import tables, tokens
from kit.labs.stream.pictures.drift import drift, has_drift
from kit.labs.stream.pictures.groups import groups
from kit.labs.stream.pictures.lanes import height, versions
from kit.labs.stream.pictures.times import bound, bounded, times
from kit.labs.stream.pictures.what_if import WHAT_IF
from kit.results import NotMeasured
from kit.results.units import ROW, counted
from kit.stream.meter import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

    from kit.draw.plots import RunData, Scene
    from kit.draw.style import Theme


def measured(table: Callable[..., pd.DataFrame]) -> Callable[[RunData], bool]:
    """Whether a table of the loop that is drawn has rows."""

    def has(data: RunData) -> bool:
        phase = tables.shown(data.records)
        try:
            return phase is not None and len(table(data.records, phase)) > 0
        except NotMeasured:
            return False

    return has


def ready(data: RunData) -> bool:
    """Whether a loop with a ledger has a complete sample."""
    return bool(data.order) and tables.shown(data.records) is not None


def recomputed(scene: Scene) -> None:
    """What the phase verify found, in a sentence."""
    ax, theme = scene.figure.subplots(), scene.theme
    sentence, colour = verified(scene.data.records, theme)
    ax.set_axis_off()
    ax.text(0, 0.5, sentence, transform=ax.transAxes, va="center", color=colour, fontsize=9.5)


def verified(frame: pd.DataFrame, theme: Theme) -> tuple[str, str]:
    rows = frame[frame["phase"] == "verify"]
    found = {str(name): float(value) for name, value in zip(rows["metric"], rows["value"], strict=True)}
    if "wrong_stamps" not in found:
        return "Recomputation: the run ended before it.", theme.faint
    tokens, decidable, wrong = (int(found[name]) for name in ("tokens", "decidable", "wrong_stamps"))
    share = found["samples_over_syncs"] / found["samples"] if found["samples"] else 0.0
    sentence = (
        f"Recomputation: {tokens:,} tokens under the weights of every version; {decidable:,} of them are decidable, "
        f"{wrong:,} have a wrong version. {share:.0%} of the samples span a sync."
    )
    return sentence, theme.bad if wrong else theme.good


def words(data: RunData) -> list[str]:
    """The trainer and its replicas, the sampler with its window, and what happens at a sync."""
    config = data.config
    sizes = [f"{name} {config[name]}" for name in ("tp", "pp") if config[name] > 1]
    served = counted(config["replicas"], "replica") + (f" of {config['infer_tp']}" if config["infer_tp"] > 1 else "")
    return [
        ", ".join([config["size"], *sizes]), served, f"{config['sampler']}, window {config['window']}",
        f"at a sync: {config['at_sync']}", counted(config["steps"], "step"),
    ]  # fmt: skip


SECONDS = dict.fromkeys(("total", *PARTS), "s")
PICTURES = Pictures(
    plots={
        "versions": Plot("Versions over time, by replica", ready, lambda data, _: height(data), versions),
        "steps": Plot("Where the time went", measured(tables.steps), lambda *_: 3.3, times),
        "bound": Plot("Measured against bound", bounded, lambda *_: 2.4, bound),
        "groups": Plot("Lag of tokens, ends of groups", measured(tables.ends), lambda *_: 3.1, groups),
        "drift": Plot("Drift by lag and position", has_drift, lambda *_: 2.7, drift),
        "recomputed": Plot("Recomputation", ready, lambda *_: 0.35, recomputed),
    },
    what_if=WHAT_IF,
    overview=(("versions",), ("steps",), ("bound",), ("groups",), ("drift",), ("recomputed",), ("verdict",)),
    words=words,
    ready=ready,
    tables={
        "steps": Table("Every step", lambda run: tables.steps(run.frame()), units={**SECONDS, "replicas_idle": "s"}),
        "replicas": Table("Every replica", lambda run: tables.replicas(run.frame()), units={"generating": "s"}),
        "loops": Table("Loop by loop", lambda run: tables.loops(run.frame()), units=SECONDS),
        "bound": Table(
            "Measured against bound", lambda run: tables.bound(run.frame()), units={"measured": ROW, "bound": ROW}
        ),
        "drift": Table("Drift by lag and position", lambda run: tokens.drift(run.frame(), run.dir), "mismatch"),
        "lags": Table("Lag of trained tokens", lambda run: tables.lags(run.frame()), "lag"),
        "ends": Table("How groups ended", lambda run: tables.ends(run.frame())),
    },
)
