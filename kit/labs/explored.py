"""The rule of the phase `explored`: own code in random worlds. The driver of the phase records what it judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.labs.definition import EXPLORED
from kit.results import Measured, select
from kit.results.records import NOTEBOOK

if TYPE_CHECKING:
    import pandas as pd

FAILED_WORLDS = "failed_worlds"  # the metric; its text says what failed


def no_world_fails(frame: pd.DataFrame, _: Mapping[str, Any]) -> Measured:
    """Does the own code pass in every random world?

    Worlds have the layout of this run and random times, lengths and failures; each is judged by the rules of the lab.
    """
    # What own code records under this name says nothing.
    counted = select(frame, phase=EXPLORED.phase, rank=NOTEBOOK, metric=FAILED_WORLDS).iloc[-1]
    return Measured(float(counted["value"]), str(counted["text"]))
