"""What the run would have been with other settings: a lab's forecast as a table that follows its controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.errors import KitError
from kit.view.panel import look
from kit.view.panel.look import Tab
from kit.view.panel.tabs import NO_RUN, Grid

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

    from kit.draw.plots import WhatIf
    from kit.results import Run
    from kit.view.panel.model import PanelModel


class WhatIfTab(Tab):
    """Reads the run when it is looked at; then each move of a control shows another forecast."""

    def __init__(self, model: PanelModel, declared: WhatIf) -> None:
        super().__init__(model)
        self._declared = declared
        self._read: tuple[Run, int] | None = None
        self._forecast: Callable[..., pd.DataFrame] | None = None
        self._setting = False
        self.controls: dict[str, Any] = {
            **{
                name: look.control(widgets.Dropdown, name, f"another {name}", width="22em", options=[*options])
                for name, options in declared.names.items()
            },
            **{
                name: look.control(widgets.IntSlider, name, f"another {name}", width="28em", min=low, max=high)
                for name, (low, high) in declared.numbers.items()
            },
        }
        self.grid = Grid(declared.title)
        self.widget = widgets.VBox([look.box(*self.controls.values()), self.said, self.grid.widget])
        model.observe(self._changed, ["run", "revision"])
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self.grid.show(None)

    def _changed(self, _: Any = None) -> None:
        if not self._visible or self._setting:
            return
        self._say("")
        try:
            table = self._table()
        except KitError as error:
            self._say(str(error), bad=True)
            table = None
        self.grid.show(table, name=self._declared.title)

    def _table(self) -> pd.DataFrame | None:
        run = self.model.run
        if run is None:
            self._say(NO_RUN)
            return None
        wanted = (run, self.model.revision)
        if self._read != wanted:
            another = self._read is None or self._read[0] is not run
            self._read, self._forecast = wanted, None
            if another:
                self._take_settings(run)
            self._forecast = self._declared.prepare(run)
        if self._forecast is None:  # this run could not be read
            return None
        return self._forecast(**{name: control.value for name, control in self.controls.items()})

    def _take_settings(self, run: Run) -> None:
        """The controls begin with the settings of the run."""
        self._setting = True
        for name, control in self.controls.items():
            value = run.config.get(name)
            options = self._declared.names.get(name)
            if value is not None and (options is None or value in options):
                control.value = value
        self._setting = False
