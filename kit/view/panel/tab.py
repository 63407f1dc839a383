"""A tab that costs nothing while nobody looks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Tab(ABC):
    """Draws only while it is looked at, and catches up when it is."""

    _visible = False

    @property
    def visible(self) -> bool:
        return self._visible

    @visible.setter
    def visible(self, seen: bool) -> None:
        self._visible = seen
        self._changed()

    @abstractmethod
    def _changed(self, _: Any = None) -> None:
        """Show what is there now, if anybody looks."""
