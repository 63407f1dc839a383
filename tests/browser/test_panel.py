"""The panel in JupyterLab, used with mouse and keyboard as a person would."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import statistics
import time
from pathlib import Path

import nbformat
import pytest

import kit
from kit import machine
from kit.labs.discover import find
from kit.results import create_run
from tests.browser.test_notebooks import menu
from tests.holdings import wait_for, waits_for_a_world

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

# Code under test that works in the baseline, which makes two groups. At the third group rank 1 hangs or raises.
BROKEN = """
import time
import torch.distributed as dist

class Hangs:
    def __init__(self, ctx):
        self.ctx, self.made = ctx, 0

    def make(self, ranks):
        self.made += 1
        if self.made > 2 and self.ctx.rank == 1:
            self.wrong()
        return dist.new_group(ranks)

    def wrong(self):
        time.sleep(600)

    def destroy(self, group):
        dist.destroy_process_group(group)

class Raises(Hangs):
    def wrong(self):
        raise ValueError("rank one has <no> group")
"""


def notebook(server, name: str, *cells: str) -> str:
    """Write a notebook of these cells beside the others."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    folder = server.folder / "root" / "notebooks"
    nbformat.write(book, folder / f"{name}.ipynb")
    (folder / "broken_code.py").write_text(BROKEN)
    return f"{name}.ipynb"


def opened(page, server, name: str, *cells: str):
    """Open a new notebook, run all cells, and return the panel that it shows."""
    page.goto(server.page(notebook(server, name, *cells)))
    idle(page)
    menu(page, "Run", "Run All Cells")
    return shown(page)


def idle(page) -> None:
    """Wait until the kernel is idle."""
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)


def save(page) -> None:
    """Save the notebook, again as long as its panel sends changes: one that comes while the file is written is not in it."""

    def unchanged() -> bool:
        menu(page, "File", "Save Notebook")
        page.wait_for_timeout(1000)
        return page.locator(".jp-mod-dirty").count() == 0

    assert wait_for(unchanged, 60)


def shown(page):
    panel = page.locator(".kit-panel")
    panel.locator(".kit-notice").wait_for(timeout=60_000)
    return panel


def press(panel, name: str) -> None:
    panel.locator("button.jupyter-button:not(.kit-line)", has_text=name).first.click()


def message(panel, words: str, *, timeout_s: float = 60) -> None:
    panel.locator(".kit-notice", has_text=words).wait_for(timeout=1000 * timeout_s)


def tab(panel, name: str) -> None:
    panel.locator(".lm-TabBar-tabLabel", has_text=name).click()


def contents(panel):
    """The content of the selected tab."""
    return panel.locator(".widget-tab-contents > :not(.lm-mod-hidden)").first


def row(panel, check: str):
    return panel.locator(".kit-check", has_text=check)


def unfold(panel) -> None:
    """Unfold the settings, which are one line after a run. The page hides them a moment before it shows the other icon."""
    from playwright.sync_api import TimeoutError as NotShown

    fields = panel.locator(".kit-fields").first
    for _ in range(6):
        if panel.locator(".kit-line .fa-caret-right").count():
            panel.locator(".kit-line").click()
        with contextlib.suppress(NotShown):
            fields.wait_for(timeout=5_000)
            return
    fields.wait_for(timeout=1_000)


def choose(panel, label: str, choice: str) -> None:
    unfold(panel)
    panel.locator(".widget-dropdown", has_text=label).first.locator("select").select_option(choice)


def write(panel, label: str, words: str) -> None:
    unfold(panel)
    box = panel.locator(".widget-text", has_text=label).first.locator("input")
    box.fill(words)
    box.press("Enter")


def snap(page, artefacts, name: str, part=None) -> None:
    if part is not None:
        part.scroll_into_view_if_needed()
    page.screenshot(path=artefacts / f"panel-{name}.png")


def dark(page) -> None:
    menu(page, "Settings", "Theme", "JupyterLab Dark")
    page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached", timeout=30_000)
    page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=30_000)


NAMELESS = """panel => [...panel.querySelectorAll("input, select, textarea, button")]
    .filter(part => !part.labels?.[0]?.innerText.trim() && !part.getAttribute("aria-label") && !part.title && !part.innerText.trim())
    .map(part => part.parentElement.outerHTML)"""


def clean(page) -> None:
    assert page.errors == []
    assert page.strays == []


MARKS: set[str] = set()  # of ranks that were seen while the kernel that started them lived


def ranks_of(server) -> list[int]:
    """Return the running processes of Worlds that this server's kernels started.

    A rank that was forked from a waiting agent lacks their environment, so it is known by its mark.
    """
    marks = {int(entry.name): mark for entry in Path("/proc").iterdir() if (mark := machine.marked(entry.name))}
    for mark in set(marks.values()):
        with contextlib.suppress(OSError):
            if (
                f"KIT_RUNS={server.folder / 'runs'}".encode()
                in Path(f"/proc/{mark.split(':')[1]}/environ").read_bytes()
            ):
                MARKS.add(mark)
    return [pid for pid, mark in marks.items() if mark in MARKS and not waits_for_a_world(pid)]


def test_a_lab_is_stepped_a_fault_is_seen_and_a_limit_flips_the_verdict(page, server, artefacts):
    panel = opened(page, server, "smoke", 'import kit\npanel = kit.panel("smoke", cycles=2)\npanel')
    snap(page, artefacts, "fresh", panel)
    assert panel.evaluate(NAMELESS) == []
    panel.locator("button", has_text="Defaults").focus()
    for _ in range(4):  # the buttons can be reached with the keyboard alone
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText").strip() == "Start":
            break
    page.keyboard.press("Enter")
    message(panel, "ranks are ready")
    press(panel, "Step")
    panel.locator(".kit-strip td.kit-done").nth(1).wait_for(timeout=30_000)
    assert panel.locator(".kit-strip td.kit-done").count() == 2
    press(panel, "Run all")
    message(panel, "finished")
    assert panel.locator(".kit-strip td.kit-done").count() == 2 * len(
        find("smoke").plan(find("smoke").config(cycles=2))
    )
    tab(panel, "Verdict")
    panel.locator("[role=status]", has_text="0 failed,").last.wait_for(timeout=10_000)
    snap(page, artefacts, "verdict", row(panel, "memory_drift"))

    choose(panel, "fault", "leaked-group")
    panel.locator(".kit-bad", has_text="leaked-group").wait_for(timeout=10_000)
    press(panel, "Run all")
    leak = row(panel, "groups_return_to_baseline")
    leak.locator(".kit-bad", has_text="FAIL").wait_for(timeout=60_000)
    message(panel, "checks fail: groups_return_to_baseline")
    panel.locator(".kit-line", has_text="size 1024, fault leaked-group").wait_for(timeout=10_000)
    snap(page, artefacts, "fault", leak)
    handle = leak.locator(".noUi-handle")
    handle.focus()
    for _ in range(10):
        handle.press("ArrowRight")
    leak.locator(".kit-good", has_text="pass").wait_for(timeout=10_000)
    assert "(lab: 0)" in leak.inner_text()
    snap(page, artefacts, "flipped", leak)

    tab(panel, "Tables")
    press(panel, "Export")
    done = panel.locator("p[role=status]", has_text="written: ")
    done.wait_for(timeout=30_000)
    written = Path(re.search(r"written: (\S+\.csv)", done.inner_text())[1])
    runs = sorted((server.folder / "runs").glob("smoke-*"))
    assert written.parent == runs[-1]
    with written.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = kit.load(runs[-1]).frame()
    values = [float(line["value"] or "nan") for line in rows]  # a record may have text instead of a value
    assert values == pytest.approx(kept["value"].tolist(), rel=0, abs=0, nan_ok=True)
    with page.expect_download() as download:
        panel.locator("a[download]").click()
    assert Path(download.value.path()).read_bytes() == written.read_bytes()
    snap(page, artefacts, "export", done)
    for name, part in (("Tables", "table"), ("Runs", ".kit-runs tbody tr"), ("Logs", "p, pre"), ("Plots", "svg, img")):
        tab(panel, name)
        contents(panel).locator(part).first.wait_for(timeout=30_000)
        idle(page)
        snap(page, artefacts, name.lower(), contents(panel))
    clean(page)


def bare_run(server, *, stopped: bool, second: int) -> str:
    """Write a run of the smoke lab without a measurement; return its name."""
    writer = create_run(server.folder / "runs", "smoke", {"ranks": 2, "cycles": 1}, {})
    writer.finish("stopped: of this test" if stopped else None, stopped=stopped)
    os.utime(writer.dir / "run.json", (second, second))
    return writer.dir.name


def test_one_run_and_one_state_are_shown_at_a_time(page, server, artefacts):
    page.set_viewport_size({"width": 1366, "height": 768})
    empty, stopped = (
        bare_run(server, stopped=False, second=4_000_000_000),
        bare_run(server, stopped=True, second=4_000_000_001),
    )
    slow = 'world = kit.World(ranks=2)\nworld.run("import time; time.sleep(2.5)")'
    panel = opened(page, server, "face", 'import kit\npanel = kit.panel("smoke", cycles=1)\npanel', slow)
    menu_of_runs = panel.locator(".widget-dropdown", has_text="show run").locator("select")
    first, *others = [" ".join(line.split()) for line in menu_of_runs.locator("option").all_inner_texts()]
    assert empty in first  # the newest finished one, not the newest
    assert f"{stopped} · stopped" in [line.partition(" · not judged")[0] for line in others]
    message(panel, f"nothing was measured · {empty} · finished")
    assert panel.locator(".kit-notice .kit-good").count() == 0
    snap(page, artefacts, "face-empty", panel)

    bar = page.locator(".kit-progress", has_text="run")
    bar.wait_for(timeout=60_000)
    bar.filter(has_not_text="waiting").wait_for(
        timeout=60_000
    )  # the page may show the end of the cell before its output
    assert bar.locator("progress").count() == 0

    unfold(panel)
    cycles, start = (
        panel.locator(".widget-text", has_text="cycles").first,
        panel.locator("button", has_text="Start").first,
    )
    for wrong in ("2.5", "99999999"):
        cycles.locator("input").fill(wrong)
        panel.locator(".kit-wrong", has_text="cycles").wait_for(timeout=30_000)
        panel.locator("[role=alert]", has_text=f"not {wrong}").wait_for(timeout=30_000)
        assert cycles.locator("input").input_value() == wrong
        assert start.is_disabled()
    snap(page, artefacts, "face-wrong", panel)
    cycles.locator("input").fill("1")
    panel.locator(".kit-wrong").wait_for(state="detached", timeout=30_000)
    press(panel, "Run all")
    message(panel, "could not be measured · smoke-")
    made = panel.locator(".kit-notice").inner_text()
    snap(page, artefacts, "face-finished", panel)

    write(panel, "implementation", "nowhere:Nothing")
    press(panel, "Start")
    panel.locator(".kit-failure", has_text="not started").wait_for(timeout=30_000)
    assert panel.locator(".kit-notice").inner_text().splitlines() == ["· not started", made]
    assert (panel.locator("td.kit-done").count(), panel.locator(".kit-bar").count()) == (0, 0)
    snap(page, artefacts, "face-refused", panel)

    unfold(panel)
    press(panel, "Defaults")
    remark = panel.locator("[role=status]", has_text="all settings reset")
    remark.wait_for(timeout=30_000)
    panel.locator(".kit-failure").wait_for(state="detached", timeout=30_000)  # a message of its own
    choose(panel, "fault", "leaked-group")
    remark.wait_for(state="detached", timeout=30_000)
    panel.locator(".kit-line").click()
    panel.locator(".kit-line", has_text="Next run: ").filter(has_text="fault leaked-group").wait_for(timeout=30_000)
    assert panel.locator(".kit-notice").inner_text().splitlines() == ["· not started", made]
    snap(page, artefacts, "face-next", panel)

    lines = menu_of_runs.locator("option").all_inner_texts()
    menu_of_runs.select_option(index=next(at for at, line in enumerate(lines) if stopped in line))
    message(panel, f"nothing is judged yet · {stopped} · stopped")
    snap(page, artefacts, "face-stopped", panel)
    clean(page)


def test_ranks_work_and_the_kernel_answers(page, server, artefacts):
    """Run four ranks of the offload lab in a mode that is not the default, and run another cell again and again meanwhile."""
    cells = ('import kit\npanel = kit.panel("offload", ranks=4, tp=2, cycles=2)\npanel', "1+1", "panel.model.state")
    panel = opened(page, server, "offload", *cells)
    choose(panel, "mode", "manual")
    panel.locator(".widget-checkbox", has_text="include_world")
    press(panel, "Run all")
    panel.locator(".kit-strip td.kit-running").first.wait_for(timeout=60_000)
    sums, states = page.locator(".jp-CodeCell").nth(1), page.locator(".jp-CodeCell").nth(2)
    answered, took = [], []
    while len(took) < 15:
        took.append(again(page, sums))
        assert sums.locator(".jp-OutputArea-output").inner_text() == "2"
        again(page, states)
        answered.append(states.locator(".jp-OutputArea-output").inner_text())
    snap(page, artefacts, "running", panel)
    print(
        f"1+1 while four ranks ran: median {statistics.median(took):.0f} ms, {min(took):.0f} to {max(took):.0f}, n={len(took)}; {answered}"
    )
    assert "'running'" in answered
    message(panel, "finished", timeout_s=150)
    tab(panel, "Verdict")
    row(panel, "groups_return_to_baseline").locator(".kit-bad", has_text="FAIL").wait_for(timeout=10_000)
    assert panel.locator(".kit-check", has_text="(lab:").count() == 0  # the browser does not change limits
    snap(page, artefacts, "mode", panel)
    dark(page)
    snap(page, artefacts, "dark", panel)
    snap(page, artefacts, "dark-verdict", row(panel, "memory_drift"))
    page.set_viewport_size({"width": 600, "height": 1000})
    page.locator('.jp-SideBar .lm-TabBar-tab[title^="File Browser"]').click()  # folds the side bar
    snap(page, artefacts, "narrow", panel)
    wide = panel.evaluate("panel => panel.scrollWidth - panel.clientWidth")
    assert wide <= 0
    snap(page, artefacts, "narrow-strip", panel.locator(".kit-strip"))
    snap(page, artefacts, "narrow-verdict", row(panel, "memory_drift"))
    clean(page)


def again(page, cell) -> float:
    """Run a cell again; return the milliseconds from the key press to the new execution number."""
    before = cell.locator(".jp-InputPrompt").inner_text()
    cell.locator(".jp-InputArea-editor").click()
    began = time.monotonic()
    page.keyboard.press("Control+Enter")
    cell.locator(".jp-InputPrompt").filter(has_text=re.compile(r"\[\d+\]")).filter(has_not_text=before).wait_for(
        timeout=20_000
    )
    return 1000 * (time.monotonic() - began)


def test_a_rank_that_hangs_is_stopped_and_one_that_raises_is_named(page, server, artefacts):
    others = ranks_of(server)  # of the notebooks of other tests
    panel = opened(
        page,
        server,
        "broken",
        'import kit\npanel = kit.panel("smoke", cycles=1, implementation="broken_code:Hangs")\npanel',
    )
    press(panel, "Run all")
    panel.locator('.kit-strip td.kit-running[title^="make"]').nth(1).wait_for(timeout=60_000)
    snap(page, artefacts, "hangs", panel)
    press(panel, "Stop")
    message(panel, "stopped")
    assert wait_for(lambda: {*ranks_of(server)} <= {*others}, 20)
    assert panel.locator('td.kit-done[title^="baseline"]').count() == 2  # phases that had finished stay marked as done
    assert panel.locator('td.kit-done[title^="make"]').count() == 0  # a stopped phase is not marked as done
    snap(page, artefacts, "stopped", panel)

    write(panel, "implementation", "broken_code:Raises")
    press(panel, "Run all")
    failure = panel.locator(".kit-failure", has_text="rank 1 raised in phase make")
    failure.wait_for(timeout=60_000)
    assert "rank one has <no> group" in failure.inner_text()
    assert panel.locator("tr.kit-culprit").inner_text().startswith("✗ rank 1")
    trace = failure.locator("pre")
    assert not trace.is_visible()
    failure.locator("summary").click()
    assert "broken_code.py" in trace.inner_text()
    snap(page, artefacts, "raised", failure)
    tab(panel, "Logs")
    panel.locator("pre[role=log]", has_text="rank one has <no> group").wait_for(timeout=10_000)
    snap(page, artefacts, "logs", panel.locator("pre[role=log]"))

    write(panel, "implementation", "nowhere:Nothing")
    press(panel, "Run all")
    panel.locator(".kit-failure", has_text="cannot be loaded").wait_for(timeout=30_000)
    snap(page, artefacts, "refused", panel)
    clean(page)


def test_a_restarted_kernel_leaves_no_ranks_and_the_last_run_is_shown_again(page, server, artefacts):
    others = ranks_of(server)
    panel = opened(page, server, "again", 'import kit\npanel = kit.panel("smoke", cycles=2)\npanel')
    press(panel, "Start")
    message(panel, "ranks are ready")
    press(panel, "Step")
    panel.locator(".kit-strip td.kit-done").nth(1).wait_for(timeout=30_000)
    assert {*ranks_of(server)} - {*others}
    menu(page, "Kernel", "Restart Kernel and Clear Outputs of All Cells…")
    page.locator(".jp-Dialog-button", has_text="Restart").last.click()
    panel.wait_for(state="detached", timeout=60_000)
    assert wait_for(lambda: {*ranks_of(server)} <= {*others}, 20)
    idle(page)
    menu(page, "Run", "Run All Cells")
    panel = shown(page)
    message(panel, "not started")  # the last finished run of the lab is shown, or else the one that was interrupted
    message(panel, " · smoke-")
    snap(page, artefacts, "again", panel)

    save(page)
    page.reload()  # the kernel keeps running, and the reloaded page shows the same panel
    panel = shown(page)
    press(panel, "Step")
    panel.locator(".kit-strip td.kit-done").nth(1).wait_for(timeout=60_000)
    press(panel, "Stop")
    message(panel, "stopped")
    clean(page)


def test_a_notebook_that_is_opened_without_its_kernel_shows_the_last_picture_and_verdict(page, server, artefacts):
    panel = opened(page, server, "later", 'import kit\npanel = kit.panel("smoke", cycles=1)\npanel')
    assert not panel.locator(".kit-gone").is_visible()
    press(panel, "Run all")
    message(panel, "checks pass")
    contents(panel).locator("svg, img").first.wait_for(timeout=30_000)
    save(page)
    page.goto("about:blank")
    for kernel in page.request.get(f"{server.url}api/kernels?token={server.token}").json():
        page.request.delete(f"{server.url}api/kernels/{kernel['id']}?token={server.token}")
    page.goto(server.page("later.ipynb"))
    panel = page.locator(".kit-panel")
    panel.wait_for(timeout=60_000)
    message(panel, "checks pass")
    contents(panel).locator("svg, img").first.wait_for(timeout=30_000)
    assert panel.locator(".kit-gone").is_visible()
    snap(page, artefacts, "later", panel)
    clean(page)
