"""A rank without work: in a simulated run everything happens on the notebook's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.labs.rankside import Context


class Idle:
    """No phase is called on these ranks."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
