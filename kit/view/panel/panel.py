"""The panel of a lab: its settings, its buttons, where it is, and tabs for what it measured.

Parts only observe the model; what a person does goes to the model or the controller and returns at once, so the kernel stays free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.view.panel import look
from kit.view.panel.compare_tab import CompareTab
from kit.view.panel.export_tab import ExportTab
from kit.view.panel.logs import LogsTab
from kit.view.panel.parameters import Parameters
from kit.view.panel.plots_tab import PlotsTab
from kit.view.panel.records_tab import RecordsTab
from kit.view.panel.strip import Strip
from kit.view.panel.verdict import VerdictTab

if TYPE_CHECKING:
    from kit.view.panel.controller import Controller
    from kit.view.panel.model import PanelModel

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
    """Start, Step, Run all, Stop, Restart: pressable where they make sense."""

    def __init__(self, model: PanelModel, controller: Controller) -> None:
        self.model = model
        acts: dict[str, Callable[[], None]] = {
            "start": controller.start,
            "step": controller.step,
            "run": controller.run_all,
            "stop": controller.stop,
            "restart": controller.restart,
        }
        self.of: dict[str, Any] = {}
        for name, (word, icon, tip) in BUTTONS.items():
            button = widgets.Button(
                description=word, icon=icon, tooltip=tip, layout={"width": "auto", "min_width": "88px"}
            )
            button.on_click(lambda _, act=acts[name]: act())
            self.of[name] = button
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
        )
        self.parameters = Parameters(model)
        self.buttons = Buttons(model, controller)
        self.strip = Strip(model)
        verdict = VerdictTab(model, visible=False)  # the first to hear of a change: the picture takes its time
        self.tabs: dict[str, Any] = {
            title: verdict if kind is VerdictTab else kind(model) for title, kind in TABS.items()
        }
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
