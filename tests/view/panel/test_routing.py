"""A check that is asked of some runs only: its limit is in the panel where the settings ask for it."""

from __future__ import annotations

from kit.labs.discover import find
from kit.view.panel.model import PanelModel
from kit.view.panel.strip import VerdictTab


def names(model: PanelModel) -> set[str]:
    return {limit.tolerance for limit in model.limits}


def test_the_limit_comes_and_goes_with_the_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    model = PanelModel(find("smoke"))
    tab = VerdictTab(model)
    assert "routed_part" not in names(model)
    shown = len(tab.body.children)
    model.set("routing", "torchcomms")
    model.judge()
    tab._order()
    assert "routed_part" in names(model)
    assert len(tab.body.children) == shown + 1
    model.set("routing", "torch")
    model.judge()
    tab._order()
    assert len(tab.body.children) == shown
