"""What is asked of a table of records: rows by their ids, a job's own numbers, and how much memory there is."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kit.results.records import OPTIONAL, label

if TYPE_CHECKING:
    import pandas as pd


def with_ids(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The rows that have all of these ids, each id as a column: `with_ids(frame, "bucket", "tensor")`."""
    if taken := [name for name in names if name in frame.columns]:
        raise ValueError(f"the table has a column {taken[0]!r} already")
    every: dict[str, dict[str, str | int]] = {text: json.loads(text) for text in frame["ids"].unique() if text}
    known = {text: ids for text, ids in every.items() if all(name in ids for name in names)}
    rows = frame[frame["ids"].isin(list(known))]
    return rows.assign(**{name: [known[text][name] for text in rows["ids"]] for name in names})


def labels(frame: pd.DataFrame) -> list[str]:
    """What each row measured, in words: its metric with its ids."""
    known = {text: json.loads(text) if text else {} for text in frame["ids"].unique()}
    return [label(metric, known[text]) for metric, text in zip(frame["metric"], frame["ids"], strict=True)]


def without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """The table without those of the columns text, ids and start that no row has."""
    empty = [name for name in OPTIONAL if name in frame and (frame[name].isna() | (frame[name] == "")).all()]
    return frame.drop(columns=empty)


# What phases measure by themselves; the rest of a job's numbers are its own.
OF_PHASES = {
    *(
        "seconds",
        "overhead_seconds",
        "observers_seconds",
        "failed",
        "lost_records",
        "groups",
        "fds",
        "sockets",
        "threads",
    ),
    *("rss", "anon_rss", "shared_rss", "peak_rss", "file_rss", "shm_rss", "allocated", "reserved", "peak_allocated"),
    *(
        "driver_used",
        "process_used",
        "pinned_bytes",
        "memfds",
        "shared_maps",
        "shared_bytes",
        "shm_files",
        "temp_files",
    ),
    "children",
}


def own_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """The numbers that a job recorded itself, such as losses."""
    own = ~frame["metric"].str.removesuffix("_before").isin(OF_PHASES) & (frame["value"].abs() < math.inf)
    return frame[own & (frame["rank"] >= 0)]


def summary_of(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each own number over all ranks: how many there are, the first, the last and the ends."""
    groups = own_numbers(frame).groupby(["phase", "metric", "unit"], sort=False)["value"]
    return groups.agg(["count", "first", "last", "min", "max"]).reset_index().rename(columns={"count": "n"})


# -- which records say how much memory there is: the driver's on CUDA, the kernel's on the CPU --------------------------------------

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
