"""The panel of a lab: its settings, its buttons, where it is, and tabs for what it measured.

Parts only observe the model; what a person does goes to the model or the controller and returns at once, so the kernel stays free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from kit.labs.definition import Definition
from kit.labs.lab import Lab
from kit.results.run import Plotter
from kit.view import named
from kit.view.panel import look
from kit.view.panel.controller import Controller
from kit.view.panel.model import PanelModel
from kit.view.panel.parameters import Parameters
from kit.view.panel.strip import LogsTab, Strip
from kit.view.panel.tabs import CompareTab, ExportTab, PlotsTab, RecordsTab
from kit.view.panel.verdict import VerdictTab
from kit.view.panel.what_if import WhatIfTab

# What a button does, its icon and what it says of itself; the order is the order of work.
BUTTONS = {
    "start": ("Start", "power-off", "start the ranks and the lab on them"),
    "step": ("Step", "step-forward", "run the next phase on every rank"),
    "run": ("Run all", "forward", "run the remaining phases, then judge"),
    "stop": ("Stop", "stop", "end the ranks, even if one hangs; what was measured stays"),
    "restart": ("Restart", "refresh", "end the ranks and start again with the current settings"),
}
TABS = {
    "Plots": PlotsTab,
    "Verdict": VerdictTab,
    "Records": RecordsTab,
    "Logs": LogsTab,
    "Compare": CompareTab,
    "Export": ExportTab,
}


class Buttons:
    def __init__(self, model: PanelModel, controller: Controller) -> None:
        self.model = model
        acts = (controller.start, controller.step, controller.run_all, controller.stop, controller.restart)
        self.of = {
            name: look.button(word, icon, tip, act)
            for (name, (word, icon, tip)), act in zip(BUTTONS.items(), acts, strict=True)
        }
        for button in self.of.values():
            button.layout.min_width = "88px"
        self.of["run"].button_style = "primary"
        self.widget = look.box(*self.of.values())
        model.observe(self._show, ["state", "problems", "phases"])
        self._show()

    def _show(self, _: Any = None) -> None:
        can = self.model.can
        for name, button in self.of.items():
            button.disabled = name not in can


class Panel:
    """Shown as the last line of a cell, or by `panel.widget`. `close` ends its ranks."""

    def __init__(self, model: PanelModel, controller: Controller) -> None:
        self.model, self.controller = model, controller
        definition = model.definition
        head = widgets.HTML(
            f"<h3>{look.text(definition.name)}</h3><p class='kit-faint'>{look.text(definition.summary)}</p>"
            "<p class='kit-gone'><b>The kernel of this panel has ended; this is how it last looked. Run the cell to use it.</b></p>"
        )
        self.parameters = Parameters(model)
        self.buttons = Buttons(model, controller)
        self.strip = Strip(model)
        verdict = VerdictTab(model, visible=False)  # the first to hear of a change: the picture takes its time
        self.tabs: dict[str, Any] = {
            title: verdict if kind is VerdictTab else kind(model) for title, kind in TABS.items()
        }
        if (declared := named.what_if(definition.name)) is not None:
            self.tabs[declared.title] = WhatIfTab(model, declared)
        self.tab = widgets.Tab([tab.widget for tab in self.tabs.values()], titles=tuple(self.tabs), selected_index=0)
        self.tab.observe(lambda _: self._look(), "selected_index")
        parts = [look.sheet(), head, self.parameters.widget, self.buttons.widget, self.strip.widget, self.tab]
        self.widget = look.classed(widgets.VBox(parts), "kit-panel")
        self._look()

    def _look(self) -> None:
        """Only the tab that is looked at draws."""
        for index, tab in enumerate(self.tabs.values()):
            tab.visible = index == self.tab.selected_index

    def close(self) -> None:
        """End the ranks. The widgets stay and show what was."""
        self.controller.close()

    def __repr__(self) -> str:
        return f"<panel of lab {self.model.definition.name}: {self.model.state}>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def make(
    definition: Definition,
    config: Mapping[str, Any],
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    plotter: Plotter | None = None,
) -> Panel:
    """A panel of a lab; its ranks start with Start. Panels from an earlier run of the same cell are closed."""
    before = of_this_cell()
    model = PanelModel(definition, config, fault=fault, plotter=plotter)
    controller = Controller(model, out=out)
    before.append(controller)
    return Panel(model, controller)


def adopt(lab: Lab, *, plotter: Plotter | None = None) -> Panel:
    model = PanelModel(lab.definition, lab.given, fault=lab.fault, tolerances=lab.tolerances, plotter=plotter)
    return Panel(model, Controller(model, lab=lab))


# A cell that runs again removes its output, and with it the Stop button of the panel that was in it.
# Of each cell the request that ran it last, and the controllers of the panels that it made.
MADE: dict[str, tuple[str, list[Controller]]] = {}


def of_this_cell() -> list[Controller]:
    """The panels that this run of the cell has made. Those of an earlier run of the same cell are closed."""
    cell, request = asked_by()
    if not cell:
        return []
    before, made = MADE.get(cell, ("", []))
    if before != request:
        for old in made:
            old.close()
        made = []
        MADE[cell] = request, made
    return made


def asked_by() -> tuple[str, str]:
    """The cell that is running and the request that runs it; empty outside a notebook."""
    if "ipykernel" not in sys.modules:
        return "", ""
    from IPython import get_ipython

    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    cell = (parent.get("metadata") or {}).get("cellId") or ""
    return str(cell), str((parent.get("header") or {}).get("msg_id", ""))
