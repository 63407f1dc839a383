"""How fast transports are on synthetic bytes: by bucket size, and side by side, each at the size that suits it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kit.draw.axes import grid_across
from kit.draw.style import LINES, MARKERS
from kit.labs.sync import tables
from kit.results import units

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from kit.draw.style import Theme

GB, MIB = 1e9, 2**20
COLUMNS = 4  # of a legend


def curves(ax: Axes, frame: pd.DataFrame, theme: Theme) -> None:
    """GB/s against the bucket size, end to end into a receiver's tensors; one large memcpy is the ceiling."""
    table = tables.transports(frame)
    low, high = ends(frame)
    for index, (name, rows) in enumerate(table.groupby("transport")):
        keys = [(str(name), int(size)) for size in rows["bucket_bytes"]]
        if all(key in low for key in keys):
            ax.vlines(
                rows["bucket_bytes"] / MIB,
                [low[key] / GB for key in keys],
                [high[key] / GB for key in keys],
                color=theme.colour(index),
                linewidth=5,
                alpha=0.3,
            )
        ax.plot(
            rows["bucket_bytes"] / MIB,
            rows["rate"] / GB,
            marker=MARKERS[index % len(MARKERS)],
            linestyle=LINES[index % len(LINES)],
            color=theme.colour(index),
            linewidth=1.6,
            markersize=5.5,
            label=str(name),
        )
    ceiling = tables.memcpy(frame) / GB
    if math.isfinite(ceiling):
        ax.axhline(ceiling, color=theme.ink, linewidth=1.3, linestyle=LINES[2], zorder=1)
        ax.annotate(f"one memcpy, {ceiling:.3g}", (1, ceiling), (0, 3), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", fontsize=8.5)  # fmt: skip
    highest = max(float(table["rate"].max()) / GB, ceiling if math.isfinite(ceiling) else 0)
    sizes = sorted(table["bucket_bytes"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / MIB / 1.4, sizes[-1] / MIB * 1.4)
    ax.set_xticks([size / MIB for size in sizes], [f"{size / MIB:g}" for size in sizes])
    ax.minorticks_off()
    ax.set_ylim(0, (1.15 + 0.13 * math.ceil(table["transport"].nunique() / COLUMNS)) * highest)  # room for the legend
    ax.set_xlabel(f"bucket size [MiB]{samples(frame)}")
    ax.set_ylabel("GB/s")
    swept = frame[(frame["phase"] == "sweep") & (frame["metric"] == "sweep_bytes")]["value"]
    of = f", {float(swept.iloc[0]) / MIB:.4g} MiB to one receiver" if len(swept) else ""
    ax.set_title(f"Transports by bucket size{of}")
    ax.legend(ncols=COLUMNS, loc="upper left", columnspacing=1.1, handlelength=2.2)


def ends(frame: pd.DataFrame) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """The least and the greatest rate of each transport and size, where the run recorded them."""

    def by_way(metric: str) -> dict[tuple[str, int], float]:
        rows = tables.swept(frame, metric, "transport", "bucket_size")
        ways = zip(rows["transport"], rows["bucket_size"].astype(int), strict=True)
        return dict(zip(ways, rows["value"], strict=True))

    return by_way("rate_low"), by_way("rate_high")


def samples(frame: pd.DataFrame) -> str:
    """Of how many a point is the median; older runs do not tell."""
    numbers = tables.swept(frame, "rate_samples")["value"]
    return (
        f" ({units.samples({int(number) for number in numbers})}, median and range)" if len(numbers) else " (medians)"
    )


def side_by_side(ax: Axes, frame: pd.DataFrame, chosen: set[str], theme: Theme) -> None:
    """Each transport at its best bucket size; those that this run's syncs used are marked."""
    order = {str(name): index for index, name in enumerate(sorted(tables.transports(frame)["transport"].unique()))}
    found = tables.best(frame)
    for place, row in enumerate(found.to_dict("records")):
        ax.barh(place, row["rate"] / GB, 0.62, color=theme.colour(order[row["transport"]]), zorder=2)
        share = f", {row['of_memcpy']:.0%}" if math.isfinite(row["of_memcpy"]) else ""
        used = ", used here" if row["transport"] in chosen else ""
        words = f" {row['rate'] / GB:.3g} GB/s{share}, {row['bucket_bytes'] / MIB:g} MiB{used}"
        ax.text(row["rate"] / GB, place, words, va="center", fontsize=8.5)
    ax.set_yticks(range(len(found)), found["transport"])
    ax.set_ylim(len(found) - 0.4, -0.6)
    ax.set_xlim(0, 2.3 * float(found["rate"].max()) / GB)
    grid_across(ax)
    ax.set_xlabel("GB/s")
    ax.set_title("Medians at their best (share of memcpy, bucket)")
