"""The panel's tabs in JupyterLab, on made-up runs: a picture's theme, headings, a copy, a comparison, a download."""

from __future__ import annotations

import pytest

from kit.labs.bench_view.made_up import made_up
from tests.browser.test_panel import choose, clean, contents, dark, idle, opened, press, snap, tab, write

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

PAPER = "getComputedStyle(document.querySelector('.kit-picture svg path')).fill"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 27, 34)"


def test_pictures_tables_comparison_and_files(page, server, artefacts):
    runs = [made_up(server.folder / "runs", size) for size in (3000, 6000)]
    page.set_viewport_size({"width": 1280, "height": 1500})
    panel = opened(page, server, "tabs", 'import kit\npanel = kit.panel("offload")\npanel')
    contents(panel).locator(".kit-picture svg").wait_for()
    choose(panel, "Plot", "Groups, files, threads")
    panel.locator('svg[aria-label^="Groups, files, threads of offload-"]').wait_for()
    assert page.evaluate(PAPER) == LIGHT
    snap(page, artefacts, "tabs-plots", contents(panel))

    tab(panel, "Tables")
    write(panel, "Filter", 'phase == "reload" and metric == "seconds"')
    grid = contents(panel).locator(".kit-grid")
    contents(panel).locator("[role=status]", has_text="rows").filter(has_text=" of ").wait_for()
    choose(panel, "Sort by", "rank")
    contents(panel).get_by_role("checkbox", name="largest first").check()
    grid.locator("tbody tr:first-child td:nth-child(3)", has_text="3").wait_for()
    contents(panel).locator("text=Copy as Markdown").click()
    copied = contents(panel).locator("textarea")
    page.wait_for_function("copied => copied.value", arg=copied.element_handle())
    text = copied.input_value()
    assert text.startswith("|   cycle | phase   |")
    assert text.count("reload") == grid.locator("tbody tr").count()
    snap(page, artefacts, "tabs-tables", grid)

    tab(panel, "Runs")
    rows = contents(panel).locator(".kit-runs tbody tr")
    rows.first.wait_for()
    assert rows.count() == 2
    for at in (0, 1):
        rows.nth(at).click()
    page.locator(".kit-runs tbody tr.selected").nth(1).wait_for()
    snap(page, artefacts, "tabs-runs", contents(panel))
    press(contents(panel), "Compare")
    panel.locator('svg[aria-label^="Largest changes from offload-"]').wait_for()
    contents(panel).locator("text=Settings that differ: cycles").wait_for()
    snap(page, artefacts, "tabs-compare", contents(panel))
    contents(panel).locator("text=Columns").first.click()
    contents(panel).locator(".widget-select-multiple select").select_option(["cycles", "reload/seconds"])
    head = contents(panel).locator("thead th", has_text="reload/seconds [s]").first
    head.wait_for()
    contents(panel).locator("text=Columns").first.click()
    head.locator("button").last.click()
    page.locator(".dtcc-list, .dtcc-dropdown").first.wait_for()
    snap(page, artefacts, "tabs-runs-filter", contents(panel))
    page.keyboard.press("Escape")
    contents(panel).locator(".widget-dropdown", has_text="over").locator("select").select_option("cycles")
    contents(panel).locator("button", has_text="Plot").click()
    panel.locator('svg[aria-label$=" over cycles"]').wait_for()
    snap(page, artefacts, "tabs-runs-plot", contents(panel))

    tab(panel, "Tables")
    choose(panel, "Format", "CSV, provenance beside it")
    press(contents(panel), "Export")
    with page.expect_download() as waiting:
        contents(panel).locator("a[download]").click()
    taken = waiting.value
    written = runs[1] / f"{runs[1].name}.csv"
    assert taken.suggested_filename == written.name
    assert taken.path().read_bytes() == written.read_bytes()
    snap(page, artefacts, "tabs-export", contents(panel))

    dark(page)
    tab(panel, "Plots")
    panel.locator('svg[aria-label^="Groups, files, threads of offload-"]').wait_for()
    assert page.evaluate(PAPER) == DARK  # the same drawing in the page's colours
    choose(panel, "Plot", "Overview")
    panel.locator('svg[aria-label^="Verdict of offload-"]').wait_for()
    assert contents(panel).locator(".kit-picture svg").count() == 6
    snap(page, artefacts, "tabs-plots-dark", contents(panel))
    tab(panel, "Runs")
    idle(page)
    snap(page, artefacts, "tabs-runs-dark", contents(panel))
    page.set_viewport_size({"width": 480, "height": 900})
    tab(panel, "Tables")
    snap(page, artefacts, "tabs-tables-narrow", contents(panel))
    clean(page)
