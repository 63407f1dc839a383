"""Which records say how much memory there is: the driver's on CUDA, the kernel's on the CPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

GPU = "gpu"  # recorded once a run: the number of the GPU that a rank works on


class Source(NamedTuple):
    """A metric, its name in words, and for ranks that share a GPU the GPU that a rank's number is about."""

    metric: str
    told: str
    gpu_of: Mapping[int, int]

    @property
    def whose(self) -> str:
        return "GPU" if self.gpu_of else "rank"

    @property
    def sharers(self) -> Mapping[int, int]:
        """How many ranks share each GPU, where the number is of the GPU."""
        return Counter(self.gpu_of.values())


def gpu_numbers(frame: pd.DataFrame) -> dict[int, int]:
    """The GPU that each rank works on, where the run recorded it."""
    rows = frame[(frame["metric"] == GPU) & (frame["value"].abs() < math.inf)]
    return dict(zip(rows["rank"].astype(int), rows["value"].astype(int), strict=True))


def sharing(frame: pd.DataFrame) -> int:
    """The most ranks that share a GPU; 1 where each has its own, or none."""
    return max(Counter(gpu_numbers(frame).values()).values(), default=1)


def source(frame: pd.DataFrame) -> Source:
    """The driver on CUDA, the kernel on the CPU. For a shared GPU the driver's number per process, if it always gave one."""
    used = (frame["metric"] == "driver_used").sum()
    if not used:
        return Source("anon_rss", "anon_rss", {})
    gpu_of, sharers = gpu_numbers(frame), sharing(frame)
    if sharers == 1:
        return Source("driver_used", "driver_used", {})
    if (frame["metric"] == "process_used").sum() == used:
        return Source("process_used", "process_used", {})
    return Source("driver_used", f"driver_used of the GPU, shared by {sharers} ranks", gpu_of)
