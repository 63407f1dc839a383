"""What a run of the lab would have been with another sampler or window: its own durations, fed to the simulated system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from kit.draw.plots import WhatIf
from kit.labs.stream import tables
from kit.results import NotMeasured
from kit.stream.forecast import forecast, pace
from kit.stream.samplers import SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kit.loop.ledger import Row
    from kit.results import Run

WIDEST = 8  # versions


def prepare(run: Run) -> Callable[..., pd.DataFrame]:
    """Reads the ledger of the loop that is drawn, once."""
    frame = run.frame()
    phase = tables.shown(frame)
    if phase is None:
        raise NotMeasured("no loop of this run has a complete sample yet")
    rows = tables.ledger(frame, phase)
    done = line(rows)

    def table(**changes: Any) -> pd.DataFrame:
        words = ", ".join(f"{name} {value}" for name, value in changes.items())
        possible = forecast(rows, **changes).rows
        return pd.DataFrame([{"loop": f"measured: {phase}", **done}, {"loop": f"forecast: {words}", **line(possible)}])

    return table


def line(rows: Sequence[Row]) -> dict[str, float]:
    """A loop in a line of the table. Times are in seconds."""
    reached, lags = pace(rows), tables.lags_of(rows)
    tokens = int(lags["tokens"].sum())
    ended = next((row.ids for row in rows if row.name == "ended"), {})
    return {
        "seconds": rows[-1].time - rows[0].time,
        "steps per second": reached["steps_per_second"],
        "exposed generation": reached["exposed_generation"],
        "mean lag": float((lags["lag"] * lags["tokens"]).sum() / tokens) if tokens else 0.0,
        "largest lag": int(lags["lag"].max()) if len(lags) else 0,
        "tokens trained": tokens,
        "tokens wasted": int(ended.get("wasted", 0)),
    }


WHAT_IF = WhatIf(
    title="What if",
    names={"sampler": (*SAMPLERS,)},
    numbers={"window": (0, WIDEST)},
    prepare=prepare,
)
