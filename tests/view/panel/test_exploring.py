"""The panel's tab that explores: the shrunk failure becomes the run that is shown, in every tab."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.exploration import Exploration, Failure
from kit.labs.discover import find
from kit.view.exploring import ExploreTab
from kit.view.panel import make_panel


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))


def explored(tab: ExploreTab) -> str:
    tab.go.click()
    thread = tab.thread
    if thread is not None:  # it may already be over
        thread.join(120)
    assert tab.thread is None
    assert (tab.go.disabled, tab.end.disabled) == (False, True)
    return tab.notice.value


@pytest.mark.slow
def test_the_first_failure_is_shown_in_the_labs_own_charts() -> None:
    panel = make_panel(find("share"), {"scheduler": "tests.loop.wrong_cores:forgets_requests", "simulated": True})
    tab = panel.tabs["Explore"]
    tab.seeds.value = 6
    words = explored(tab)
    assert "fails no_request_lost; made small" in words
    assert "--replay" in words
    assert panel.model.run is not None
    assert panel.model.run.dir.parent.exists()
    assert [row.check for row in panel.model.verdict if row.passed is False]
    panel.tab.selected_index = list(panel.tabs).index("Plots")
    assert "devices" in [name for _, name in panel.tabs["Plots"].choice.options]
    panel.close()


def test_an_exploration_that_fails_or_is_ended_says_so_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = make_panel(find("stream"), {"implementation": "no_such_module:Core", "simulated": True})
    tab = panel.tabs["Explore"]
    assert "no_such_module" in explored(tab)
    panel.model.set("implementation", None)
    monkeypatch.setattr(tab.ends, "is_set", lambda: True)
    assert ">ended<" in explored(tab)
    assert panel.model.run is None
    panel.close()


def test_closing_the_panel_ends_the_exploration_and_a_live_run_stays_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = make_panel(find("stream"), {"simulated": True})
    tab = panel.tabs["Explore"]
    failure = Failure(world={}, rule="r", why="w", findings={}, sizes={}, events=0, line="", dir=Path("failed"))
    failed = Exploration(lab="stream", settings={}, failure=failure)
    panel.model.state = "ready"
    monkeypatch.setattr(panel.model, "open", pytest.fail)
    tab._show(failed)
    assert panel.model.run is None
    panel.close()
    assert tab.ends.is_set()


def test_a_lab_without_worlds_has_no_such_tab() -> None:
    assert "Explore" not in make_panel(find("smoke"), {}).tabs
