"""Ledgers among a run's records: the events of a phase, in order. For labs that drive cores."""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kit.results.records import NOTEBOOK

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

Found = TypeVar("Found")


class PerFrame(Generic[Found]):
    """What was read of the frame that was asked about last, by phase: every check asks for the same ledgers."""

    def __init__(self, read: Callable[[pd.DataFrame, str], Found]) -> None:
        self.read = read
        self.frame: Callable[[], pd.DataFrame | None] = lambda: None
        self.found: dict[str, Found] = {}

    def of(self, frame: pd.DataFrame, phase: str) -> Found:
        if self.frame() is not frame:
            self.frame, self.found = weakref.ref(frame), {}
        if phase not in self.found:
            self.found[phase] = self.read(frame, phase)
        return self.found[phase]


def events(frame: pd.DataFrame, phase: str, *, lab: str, main: str) -> pd.DataFrame:
    """What a lab's cores and ports did in a phase, in order. If the run is not of this lab, all its events are of the phase `main`."""
    found = frame[frame["value"].isna() & (frame["unit"] == "")]
    if (frame["lab"] == lab).any():
        return found[(found["phase"] == phase) & (found["rank"] == NOTEBOOK)]
    return found[found["rank"] >= 0 if phase == main else found["rank"] < NOTEBOOK].sort_values("time", kind="stable")


def rows_of(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as a judge takes them: `event`, `time` and ids."""
    return [
        {"event": name, "time": when, **(json.loads(ids) if ids else {})}
        for name, when, ids in zip(found["metric"], found["time"], found["ids"], strict=True)
    ]
