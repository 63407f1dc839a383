"""A lab's panel: an observable model, a controller that drives the lab, and widgets that only observe. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from kit.labs.definition import Definition
    from kit.labs.lab import Lab
    from kit.results.run import Plotter
    from kit.view.panel.panel import Panel


def make(
    definition: Definition,
    config: Mapping[str, Any],
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    plotter: Plotter | None = None,
) -> Panel:
    """A panel of a lab that is not there yet; its ranks start with Start. Those that its cell made before are closed."""
    from kit.view.panel.cells import of_this_cell
    from kit.view.panel.controller import Controller
    from kit.view.panel.model import PanelModel
    from kit.view.panel.panel import Panel

    before = of_this_cell()
    model = PanelModel(definition, config, fault=fault, plotter=plotter)
    controller = Controller(model, out=out)
    before.append(controller)
    return Panel(model, controller)


def adopt(lab: Lab, *, plotter: Plotter | None = None) -> Panel:
    """A panel of a lab as it stands."""
    from kit.view.panel.controller import Controller
    from kit.view.panel.model import PanelModel
    from kit.view.panel.panel import Panel

    model = PanelModel(lab.definition, lab.given, fault=lab.fault, tolerances=lab.tolerances, plotter=plotter)
    return Panel(model, Controller(model, lab=lab))
