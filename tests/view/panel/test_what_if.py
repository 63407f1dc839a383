"""The tab of a lab's forecasts, driven without a browser: its controls, its table, and runs that cannot be forecast."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest

from kit.bench.view import made_up
from kit.draw.plots import WhatIf
from kit.errors import BadInput
from kit.labs.discover import find
from kit.results import NotMeasured, Run
from kit.view.panel.model import PanelModel
from kit.view.panel.panel import make
from kit.view.panel.tabs import WhatIfTab


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    made_up(tmp_path, 300)
    model = PanelModel(find("offload"))
    assert model.run is not None
    return model


class Forecasts:
    """What a lab declares; it counts how often a run is read."""

    def __init__(self, first: str, cycles: int) -> None:
        self.reads = 0
        self.lacking = ""
        numbers = {"cycles": (0, max(9, cycles))}
        self.declared = WhatIf(title="What if", names={"mode": (first, "odd")}, numbers=numbers, prepare=self.prepare)

    def prepare(self, _: Run) -> Any:
        self.reads += 1
        if self.lacking:
            raise NotMeasured(self.lacking)
        return self.table

    def table(self, mode: str, cycles: int) -> pd.DataFrame:
        if mode == "odd" and not cycles % 2:
            raise BadInput(f"cycles={cycles} is even")
        return pd.DataFrame([{"loop": mode, "cycles": cycles}])


@pytest.fixture
def forecasts(model):
    return Forecasts(model.run.config["mode"], model.run.config["cycles"])


def shown(tab):
    return None if tab.grid.frame is None else tab.grid.frame.to_dict("records")


def said(tab):
    return re.sub("<.*?>", "", tab.said.value)


def test_controls_begin_with_the_runs_settings_and_the_table_follows_them(model, forecasts):
    tab = WhatIfTab(model, forecasts.declared)
    assert shown(tab) is None
    assert forecasts.reads == 0  # nobody looks at it
    tab.visible = True
    config = model.run.config
    assert shown(tab) == [{"loop": config["mode"], "cycles": config["cycles"]}]
    tab.controls["cycles"].value = 7
    assert shown(tab) == [{"loop": config["mode"], "cycles": 7}]
    assert forecasts.reads == 1
    model.revision += 1  # new records: read again, the controls stay
    assert shown(tab) == [{"loop": config["mode"], "cycles": 7}]
    assert forecasts.reads == 2


def test_what_cannot_be_forecast_is_said(model, forecasts):
    tab = WhatIfTab(model, forecasts.declared)
    tab.visible = True
    tab.controls["cycles"].value = 4
    tab.controls["mode"].value = "odd"
    assert (shown(tab), said(tab)) == (None, "cycles=4 is even")
    tab.controls["cycles"].value = 5
    assert (shown(tab), said(tab)) == ([{"loop": "odd", "cycles": 5}], "")
    forecasts.lacking = "the run ended before"
    model.revision += 1
    assert (shown(tab), said(tab)) == (None, "the run ended before")


def test_only_a_lab_that_declares_it_has_the_tab(model):
    for lab, has in (("stream", True), ("smoke", False)):
        panel = make(find(lab), {})
        assert ("What if" in panel.tab.titles) == has
        panel.close()
