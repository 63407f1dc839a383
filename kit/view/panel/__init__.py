"""A lab's panel: an observable model, a controller that drives the lab, and widgets that only observe. Light to import."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from kit.labs.definition import Definition
    from kit.labs.lab import Lab
    from kit.results.run import Plotter
    from kit.view.panel.controller import Controller
    from kit.view.panel.panel import Panel


def make(
    definition: Definition,
    config: Mapping[str, Any],
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    plotter: Plotter | None = None,
) -> Panel:
    """A panel of a lab; its ranks start with Start. Panels from an earlier run of the same cell are closed."""
    from kit.view.panel.controller import Controller
    from kit.view.panel.model import PanelModel
    from kit.view.panel.panel import Panel

    before = of_this_cell()
    model = PanelModel(definition, config, fault=fault, plotter=plotter)
    controller = Controller(model, out=out)
    before.append(controller)
    return Panel(model, controller)


def adopt(lab: Lab, *, plotter: Plotter | None = None) -> Panel:
    """A panel of a lab that exists already."""
    from kit.view.panel.controller import Controller
    from kit.view.panel.model import PanelModel
    from kit.view.panel.panel import Panel

    model = PanelModel(lab.definition, lab.given, fault=lab.fault, tolerances=lab.tolerances, plotter=plotter)
    return Panel(model, Controller(model, lab=lab))


# A cell that runs again removes its output, and with it the Stop button of the panel that was in it.


class Turn(NamedTuple):
    """One run of a cell, and the controllers of the panels that it made."""

    message: str
    made: list[Controller]


TURNS: dict[str, Turn] = {}


def of_this_cell() -> list[Controller]:
    """The panels that this run of the cell has made. Those of an earlier run of the same cell are closed."""
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
    """The cell that is running and the request that runs it; empty outside a notebook."""
    if "ipykernel" not in sys.modules:
        return "", ""
    from IPython import get_ipython

    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    cell = (parent.get("metadata") or {}).get("cellId") or ""
    return str(cell), str((parent.get("header") or {}).get("msg_id", ""))
