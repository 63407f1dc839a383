"""Pictures of the panel in JupyterLab, light and dark, for the README: `python -m docs.pictures.gallery --only panel`.

They show a real run, and need playwright (a dev dependency) and Chromium, like the browser tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.errors import BadInput, KitError

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CELL = 'import kit\n\npanel = kit.panel("offload", mode="manual", size="125m", layers=1, seq=16, steps=1, microbatches=1)\npanel'
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
PLOT = "Memory by source"
WIDTH = 1180
TALL = 3000  # height of the window: the whole panel is visible without scrolling


def panel_pictures(out: Path) -> list[Path]:
    """Run the lab with the panel's button, and take a screenshot of the result."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise BadInput("a picture of the panel needs playwright: make env, or pip install playwright") from None
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        raise BadInput(
            f"a picture of the panel needs one of {', '.join(BROWSERS)}; on Debian: apt-get install chromium"
        )
    out.mkdir(parents=True, exist_ok=True)
    made = []
    with (
        tempfile.TemporaryDirectory(prefix="kit-panel-") as folder,
        server(Path(folder)) as url,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH + 400, "height": TALL})
        page.goto(url)
        panel = judged(page)
        for name, theme in THEMES.items():
            made.append(out / f"panel{'' if name == 'light' else f'-{name}'}.png")
            dressed(page, panel, theme).screenshot(path=made[-1])
        browser.close()
    return made


def judged(page: Any) -> Any:
    """Run the lab with the panel's button; return the panel after the run has ended."""
    idle(page)
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    panel = page.locator(".kit-panel")
    panel.locator(".kit-strip").wait_for(timeout=60_000)
    panel.evaluate(f"element => element.style.width = '{WIDTH}px'")
    panel.locator("button.jupyter-button", has_text="Run all").first.click()
    end = panel.locator(".kit-notice", has_text=re.compile("finished|failed"))
    end.wait_for(timeout=300_000)
    if "finished" not in end.inner_text():
        raise KitError(f"the run of the picture broke: {end.inner_text()}")
    return panel


def dressed(page: Any, panel: Any, theme: str) -> Any:
    """Switch JupyterLab to a theme; return the panel with its plot redrawn."""
    for level, name in (("MenuBar", "Settings"), ("Menu", "Theme"), ("Menu", theme)):
        page.locator(f'.lm-{level}-itemLabel:text-is("{name}")').click()
    page.locator(f'body[data-jp-theme-name="{theme}"]').wait_for(state="attached", timeout=30_000)
    page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=30_000)
    plots = panel.locator(".widget-dropdown", has_text="Plot").locator("select").first
    for name in ("Verdict", PLOT):  # selecting the plot again redraws it
        plots.select_option(name)
        panel.locator(f'[role="img"][aria-label^="{name}"]').first.wait_for(timeout=60_000)
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)  # buttons have a transition
    return panel


def idle(page: Any) -> None:
    page.locator(".jp-StatusBar-TextItem", has_text="Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Start JupyterLab on loopback with a single notebook; yield the URL of that notebook."""
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
    (folder / "root").mkdir()
    nbformat.write(notebook, folder / "root" / "panel.ipynb")
    settle(folder, "notebook-extension", "tracker", {"windowingMode": "none"})
    homes = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTERLAB_SETTINGS_DIR": "settings"}
    homes |= {"JUPYTERLAB_WORKSPACES_DIR": "workspaces", "KIT_RUNS": "runs"}
    env = os.environ | {name: str(folder / home) for name, home in homes.items()}
    env |= {"JUPYTER_CONFIG_PATH": str(ROOT / ".jupyter"), "PYTHONPATH": str(ROOT)}
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder / 'root'}"]
    command += ["--allow-root"] if os.getuid() == 0 else []
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
    try:
        yield f"{address(process, folder)}lab/tree/panel.ipynb?token={token}"
    finally:
        process.terminate()  # also ends its kernels, which end their ranks
        process.wait(30)


def settle(folder: Path, extension: str, name: str, settings: dict[str, str]) -> None:
    """Write settings of JupyterLab, which it reads when a page is opened."""
    home = folder / "settings" / "@jupyterlab" / extension
    home.mkdir(parents=True, exist_ok=True)
    (home / f"{name}.jupyterlab-settings").write_text(json.dumps(settings))


def address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait until the server listens, and return its URL."""
    info = folder / "runtime" / f"jpserver-{process.pid}.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return str(json.loads(info.read_text())["url"])
        time.sleep(0.1)
    raise KitError(f"JupyterLab did not start: {(folder / 'server.log').read_text()[-500:]}")
