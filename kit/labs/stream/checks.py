"""The checks of the lab `stream`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.results import Check

CHECKS: tuple[Check, ...] = ()
