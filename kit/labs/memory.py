"""Checks that weigh and that several labs ask: memory over cycles, and whether a process beside the job kept its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.results import Measured, NotMeasured, select

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MIB = 2**20


def levels(frame: pd.DataFrame, phase: str) -> tuple[pd.DataFrame, str]:
    """Memory after each cycle's phase: driver memory on CUDA, anonymous memory on the CPU; a column a rank."""
    source = "driver_used" if (frame["metric"] == "driver_used").any() else "anon_rss"
    rows = select(frame, phase=phase, metric=source)
    return rows.pivot_table(index="cycle", columns="rank", values="value"), source


def growth(phase: str, when: str) -> Measure:
    """How much more memory there was after the last cycle's phase than after the first's, where that is most; `when` is said of it."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        table, source = levels(frame, phase)
        if len(table) < 2:
            raise NotMeasured("a drift needs two cycles or more")
        grown = (table.iloc[-1] - table.iloc[0]) / MIB
        return Measured(
            float(grown.max()),
            f"{source} {when}, cycle {table.index[-1]} against cycle {table.index[0]}, rank {grown.idxmax()}",
        )

    return measure


def others_untouched(first: str) -> Measure:
    """How far the memory of a process beside the job moved from where it was in the first phase in which it was asked."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
        rows = frame[frame["metric"] == "bystander_driver"]
        source = "the driver"
        if not rows["value"].all():
            rows, source = (
                frame[frame["metric"] == "bystander_bytes"],
                "its own allocator (the driver does not list it)",
            )
        if rows.empty:
            raise NotMeasured("there was no bystander on the card")
        start = rows[rows["phase"] == first].set_index("rank")["value"]
        moved = (rows["value"] - rows["rank"].map(start)).abs()
        damaged = select(frame, metric="bystander_damaged")["value"].max()
        if damaged:
            return Measured(
                float(start.max()) / MIB, f"{damaged:g} bytes of a bystander's memory were changed: all of it counts"
            )
        return Measured(float(moved.max()) / MIB, f"asked {len(rows)} times over all ranks, by {source}")

    return measure


def on_cuda(ask: Measure) -> Measure:
    """A question to the driver, which only a card's has an answer to."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if not (frame["metric"] == "driver_used").any():
            raise NotMeasured("the ranks had no CUDA device")
        return ask(frame, config)

    return measure
