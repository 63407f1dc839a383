"""The table of a step: one row per measurement, with its ids."""

from __future__ import annotations

from typing import Any

from kit.labs.lab import Stepped
from kit.results import Row


def made(rank: int, metric: str, value: float | None, unit: str = "1", **more: Any) -> Row:
    about: dict[str, Any] = {"run": "r", "lab": "l", "cycle": 1, "phase": "p", "time": 0.0}
    return Row(**about, rank=rank, metric=metric, value=value, unit=unit, **more)


def test_rows_of_one_metric_are_distinguished_by_their_ids_and_texts_are_shown() -> None:
    rows = [made(rank, "rss_before", 2**20, "B") for rank in (0, 1)]
    rows += [made(rank, "rss", (1 + rank) * 2**20, "B") for rank in (0, 1)]
    rows += [
        made(0, "stage_seconds", seconds, "s", ids={"stage": stage})
        for stage, seconds in {"pack": 2, "send": 3}.items()
    ]
    rows += [made(1, "digest", None, text="ab12"), made(1, "loss", None)]
    assert Stepped(1, "p", rows, done=1, planned=2).table() == [
        ["", "rank 0", "rank 1"],
        ["rss", "1.0 MiB", "1.0 MiB → 2.0 MiB"],
        ["stage_seconds stage=pack", "2 s", "-"],
        ["stage_seconds stage=send", "3 s", "-"],
        ["digest", "-", "ab12"],
        ["loss", "-", "-"],
    ]
