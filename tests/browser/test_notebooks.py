"""The notebooks in JupyterLab, driven with the mouse as a person would."""

from __future__ import annotations

import pytest

from kit.draw.picture import PLACES
from kit.draw.style import DARK, LIGHT
from tests.labs.parts import OF_WALL_TIME

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def menu(page, *names: str) -> None:
    """Click through JupyterLab's menus."""
    page.locator(f'.lm-MenuBar-itemLabel:text-is("{names[0]}")').click()
    for name in names[1:-1]:
        page.locator(f'.lm-Menu-itemLabel:text-is("{name}")').hover()
    page.locator(f'.lm-Menu-itemLabel:text-is("{names[-1]}")').click()


def cell_with(page, text: str):
    return page.locator(".jp-CodeCell", has=page.locator(".jp-InputArea", has_text=text)).first


def panel_waits(page, artefacts, name: str) -> None:
    """The notebook shows its panel, and no rank has started: only the Start button starts ranks."""
    panel = page.locator(".kit-panel")
    panel.locator(".kit-strip").wait_for(timeout=60_000)
    panel.scroll_into_view_if_needed()
    page.screenshot(path=artefacts / f"{name}-panel.png")
    assert panel.locator(".kit-strip td.kit-done, .kit-strip td.kit-running").count() == 0


def nothing_fails(cell, within_ms: int) -> None:
    """The cell shows a verdict without a failed check, but for those of wall time: this machine may be busy."""
    output = cell.locator(".jp-OutputArea", has_text="failed,")
    output.wait_for(timeout=within_ms)
    failing = output.locator("tr", has_text="✗ FAIL").locator("td:nth-child(2)").all_inner_texts()
    assert {check.partition("/")[0] for check in failing} <= OF_WALL_TIME


def test_run_all_shows_verdict_and_picture(page, server, artefacts):
    page.goto(server.page("00_start.ipynb"))
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    page.screenshot(path=artefacts / "start-open.png")

    menu(page, "Run", "Run All Cells")
    panel_waits(page, artefacts, "start")
    judged = cell_with(page, "run.verdict()")
    nothing_fails(judged, within_ms=120_000)
    picture = cell_with(page, "run.plot()").locator(".jp-OutputArea .kit-picture")
    picture.wait_for(timeout=60_000)
    assert picture.locator("svg").bounding_box()["width"] >= 700
    broken = cell_with(page, 'fault="leaked-group"')
    broken.locator(".jp-OutputArea", has_text="groups_return_to_baseline").wait_for(timeout=60_000)
    assert "✗ FAIL" in broken.inner_text()

    error = cell_with(page, "time.sleep(600)").locator(".jp-OutputArea")
    assert "RankTimeout" in error.inner_text()
    assert "kit/world" not in error.inner_text()
    marks = cell_with(page, "I bring").locator(".jp-OutputArea")
    assert "[0] I bring 1" in marks.inner_text()
    assert "[0-1] 3.0" in marks.inner_text()

    for name, cell in (("error", error), ("verdict", judged), ("picture", picture), ("fault", broken)):
        cell.scroll_into_view_if_needed()
        page.screenshot(path=artefacts / f"start-{name}.png")
    menu(page, "Settings", "Theme", "JupyterLab Dark")
    page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached", timeout=30_000)
    page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=30_000)
    paper = picture.evaluate(f"picture => getComputedStyle(picture).getPropertyValue('{PLACES[LIGHT.paper]}')")
    assert paper == DARK.paper
    for name, cell in (("picture", picture), ("output", marks)):
        cell.scroll_into_view_if_needed()
        page.screenshot(path=artefacts / f"start-{name}-dark.png")

    assert page.errors == []
    assert page.strays == []
    assert len(list((server.folder / "runs").glob("smoke-*/verdict.json"))) == 2


@pytest.mark.drawn(1, of="notebooks")
def test_offload_is_shown(page, server, artefacts):
    page.goto(server.page("01_offload_reload.ipynb"))
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    menu(page, "Run", "Run All Cells")
    panel_waits(page, artefacts, "offload")
    judged = cell_with(page, "run.verdict()")
    nothing_fails(judged, within_ms=180_000)
    modes = cell_with(page, "plot_modes(compared)").locator(".jp-OutputArea .kit-picture")
    modes.wait_for(timeout=400_000)
    run = cell_with(page, "run.plot()").locator(".jp-OutputArea .kit-picture")
    for name, picture in (("run", run), ("modes", modes)):
        assert picture.locator("svg").bounding_box()["width"] >= 700
        picture.scroll_into_view_if_needed()
        page.screenshot(path=artefacts / f"offload-{name}.png")
    mine = cell_with(page, "implementation=").locator(".jp-OutputArea", has_text="old_groups_dead")
    mine.wait_for(timeout=400_000)
    assert page.errors == []
    assert page.strays == []


@pytest.mark.drawn(1, of="notebooks")
def test_a_weight_sync_is_shown(page, server, artefacts):
    page.goto(server.page("02_weight_sync.ipynb"))
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    menu(page, "Run", "Run All Cells")
    panel_waits(page, artefacts, "sync")
    judged = cell_with(page, "run.verdict()")
    nothing_fails(judged, within_ms=180_000)
    mine = cell_with(page, "mine.verdict()").locator(".jp-OutputArea", has_text="bit_exact")
    mine.wait_for(timeout=400_000)
    assert "✗ FAIL" in mine.inner_text()
    shown = {
        "run": cell_with(page, "run.plot()").locator(".jp-OutputArea .kit-picture"),
        "fault": cell_with(page, "broken.plot()").locator(".jp-OutputArea .kit-picture"),
        "stages": cell_with(page, "rules.syncs(").locator(".jp-OutputArea table"),
        "transports": cell_with(page, "rules.transports(").locator(".jp-OutputArea table"),
        "faults": cell_with(page, 'find("sync").faults').locator(".jp-OutputArea table"),
        "own": mine,
    }
    for name in ("run", "fault"):
        assert shown[name].locator("svg").bounding_box()["width"] >= 700
    for name, rows in (("stages", 10), ("transports", 4), ("faults", 12)):
        assert shown[name].locator("tbody tr").count() >= rows
    for name, part in shown.items():
        part.scroll_into_view_if_needed()
        page.screenshot(path=artefacts / f"sync-{name}.png")
    assert page.errors == []
    assert page.strays == []


@pytest.mark.drawn(1, of="notebooks")
def test_a_split_step_is_shown(page, server, artefacts):
    page.goto(server.page("03_split_training.ipynb"))
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    menu(page, "Run", "Run All Cells")
    panel_waits(page, artefacts, "split")
    judged = cell_with(page, "run.verdict()")
    nothing_fails(judged, within_ms=180_000)
    mine = cell_with(page, "implementation=").locator(".jp-OutputArea", has_text="FAIL grad_parity")
    mine.wait_for(timeout=400_000)
    shown = {
        "run": cell_with(page, "run.plot()").locator(".jp-OutputArea .kit-picture"),
        "fault": cell_with(page, "broken.plot()").locator(".jp-OutputArea .kit-picture"),
        "metrics": cell_with(page, "rules.metrics(").locator(".jp-OutputArea table"),
        "tensors": cell_with(page, "rules.tensors(").locator(".jp-OutputArea table"),
        "faults": cell_with(page, 'find("split").faults').locator(".jp-OutputArea table"),
        "own": mine,
    }
    for name in ("run", "fault"):
        assert shown[name].locator("svg").bounding_box()["width"] >= 700
    for name in ("metrics", "tensors", "faults"):
        assert shown[name].locator("tbody tr").count() >= 8
    for name, part in shown.items():
        part.scroll_into_view_if_needed()
        page.screenshot(path=artefacts / f"split-{name}.png")
    assert page.errors == []
    assert page.strays == []


@pytest.mark.drawn(1, of="notebooks")
def test_a_stream_is_shown(page, server, artefacts):
    page.goto(server.page("04_streaming.ipynb"))
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    menu(page, "Run", "Run All Cells")
    panel_waits(page, artefacts, "stream")
    judged = cell_with(page, "run.verdict()")
    nothing_fails(judged, within_ms=180_000)
    simulated = cell_with(page, "simulate(").locator(".jp-OutputArea", has_text="window 2")
    simulated.wait_for(timeout=60_000)
    shown = {
        "run": cell_with(page, "run.plot()").locator(".jp-OutputArea .kit-picture"),
        "steps": cell_with(page, "tables.steps(").locator(".jp-OutputArea table"),
        "replicas": cell_with(page, "tables.replicas(").locator(".jp-OutputArea table"),
        "simulated": simulated,
    }
    assert shown["run"].locator("svg").bounding_box()["width"] >= 700
    for name, rows in (("steps", 4), ("replicas", 2)):
        assert shown[name].locator("tbody tr").count() == rows
    for name, part in shown.items():
        part.scroll_into_view_if_needed()
        page.screenshot(path=artefacts / f"stream-{name}.png")
    assert page.errors == []
    assert page.strays == []
