"""Panels of a notebook's cell that is run again: their output is gone, and so nobody could stop their ranks any more."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kit.view.panel.controller import Controller


class Turn(NamedTuple):
    """One run of a cell, and the panels that it made."""

    message: str
    made: list[Controller]


TURNS: dict[str, Turn] = {}


def of_this_cell() -> list[Controller]:
    """The panels that this run of the cell made, for another to be put to them; those of an earlier run of it are closed."""
    cell, message = asked_by()
    if not cell:
        return []
    turn = TURNS.get(cell)
    if turn is None or turn.message != message:
        for old in turn.made if turn else ():
            old.close()
        turn = TURNS[cell] = Turn(message, [])
    return turn.made


def asked_by() -> tuple[str, str]:
    """The cell that is running and the request that runs it; empty where no notebook's front end tells."""
    if "ipykernel" not in sys.modules:
        return "", ""
    from IPython import get_ipython

    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    cell = (parent.get("metadata") or {}).get("cellId") or ""
    return str(cell), str((parent.get("header") or {}).get("msg_id", ""))
