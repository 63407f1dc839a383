"""The known bugs of the lab `box` on the notebook side: what a fault puts in place of the right code."""

from __future__ import annotations

from typing import Any


def names_nobody(*_: Any) -> tuple[tuple[int, ...], str]:
    return (), "nobody knows which rank is late"
