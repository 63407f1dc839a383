"""Memory checks that several labs share: growth over cycles, and the memory of a process beside the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.nccl import SHARED_GPU
from kit.results import Measured, Missing, NotMeasured, select
from kit.results.sources import sharing, source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pandas as pd

    from kit.results.sources import Source

    Measure = Callable[[pd.DataFrame, Mapping[str, Any]], Measured]

MIB = 2**20


def gpus(ranks: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """The GPU of each rank, numbered over the run, from the status of its World; empty on the CPU."""
    seats = {row["rank"]: (row["host"], row["device"]) for row in ranks if row["device"].startswith("cuda")}
    numbers = {seat: number for number, seat in enumerate(dict.fromkeys(seats.values()))}
    return {rank: numbers[seat] for rank, seat in seats.items()}


def label(frame: pd.DataFrame) -> str:
    """A note for times of communication: empty unless ranks share a GPU."""
    return f"; {SHARED_GPU}" if sharing(frame) > 1 else ""


def by_owner(
    frame: pd.DataFrame, source: Source, phase: str, metric: str | None = None, *, add: bool = False
) -> pd.Series[float]:
    """A metric (default: that of the source) after each cycle's phase, per rank, or per GPU if ranks share one.

    Numbers of a whole GPU, which each of its ranks reports, count once; with `add`, numbers of single ranks are summed.
    """
    rows = select(frame, phase=phase, metric=metric or source.metric)
    owner = rows["rank"].map(lambda rank: source.gpu_of.get(rank, rank)).rename(source.whose)
    groups = rows.groupby([owner, "cycle"])["value"]
    return groups.sum() if add else groups.max()


def levels(frame: pd.DataFrame, phase: str) -> tuple[pd.DataFrame, Source]:
    """Memory after each cycle's phase: driver memory on CUDA, anonymous memory on the CPU; a column per rank or shared GPU."""
    origin = source(frame)
    return by_owner(frame, origin, phase).unstack(origin.whose), origin


def one_cycle(config: Mapping[str, Any]) -> str:
    """Why a config cannot have a drift."""
    return "" if config["cycles"] > 1 else "a drift needs at least 2 cycles"


def growth(phase: str, when: str) -> Measure:
    """The growth of memory from the first to the last cycle's phase, where it is largest; `when` describes the phase."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - checks are called alike
        table, origin = levels(frame, phase)
        if len(table) < 2:
            raise Missing(f"memory was recorded in {len(table)} cycle; a drift needs 2")
        grown = (table.iloc[-1] - table.iloc[0]) / MIB
        return Measured(
            float(grown.max()),
            f"{origin.told} {when}, cycle {table.index[-1]} vs cycle {table.index[0]} ({origin.whose} {grown.idxmax()})",
        )

    return measure


def others_untouched(first: str) -> Measure:
    """The largest change in the memory of a process beside the job, against the first phase in which it was measured."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:  # noqa: ARG001 - as above
        rows = frame[frame["metric"] == "bystander_driver"]
        source = "the driver"
        if not rows["value"].all():
            rows, source = (
                frame[frame["metric"] == "bystander_bytes"],
                "its own allocator (the driver does not list it)",
            )
        if rows.empty:
            raise NotMeasured("no bystander process ran on the GPU")
        start = rows[rows["phase"] == first].set_index("rank")["value"]
        moved = (rows["value"] - rows["rank"].map(start)).abs()
        damaged = select(frame, metric="bystander_damaged")["value"].max()
        if damaged:
            return Measured(
                float(start.max()) / MIB, f"{damaged:g} bytes of a bystander process's memory were overwritten"
            )
        return Measured(float(moved.max()) / MIB, f"{len(rows)} readings over all ranks, from {source}")

    return measure


def on_cuda(ask: Measure) -> Measure:
    """A check that is measured only with a GPU driver."""

    def measure(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
        if not (frame["metric"] == "driver_used").any():
            raise NotMeasured("the ranks had no CUDA device")
        return ask(frame, config)

    return measure
