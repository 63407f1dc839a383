"""A real JupyterLab on loopback with the project's own settings, and a Chromium page."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCAL = {"127.0.0.1", "localhost"}
# Messages of JupyterLab and Chromium themselves, unrelated to the kit.
NOISE = ("favicon", "Could not set the focus", "ResizeObserver loop")


@pytest.fixture(scope="session")
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory) -> Path:
    """The folder for screenshots: KIT_ARTEFACTS, or a temporary folder of pytest."""
    named = os.environ.get("KIT_ARTEFACTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("artefacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Server:
    def __init__(self, url: str, token: str, folder: Path) -> None:
        self.url, self.token, self.folder = url, token, folder

    def page(self, notebook: str) -> str:
        # Each notebook has its own workspace; otherwise JupyterLab reopens another test's notebook in a hidden tab with
        # the same cells.
        return f"{self.url}lab/workspaces/{Path(notebook).stem}/tree/notebooks/{notebook}?token={self.token}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """JupyterLab on copies of the notebooks, so that its autosave does not touch the originals."""
    folder = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", folder / "root" / "notebooks")
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')  # off-screen outputs exist too
    token = secrets.token_hex(16)
    env = {
        **os.environ,
        "JUPYTER_CONFIG_PATH": str(ROOT / ".jupyter"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "KIT_RUNS": str(folder / "runs"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}"]
    options += [f"--ServerApp.root_dir={folder / 'root'}", *(["--allow-root"] if os.getuid() == 0 else [])]
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=env, stdout=file, stderr=file, cwd=folder
        )
    try:
        yield Server(address(process, folder / "runtime", log), token, folder)
    finally:
        process.terminate()  # also ends the kernels
        process.wait(30)


def address(process: subprocess.Popen, runtime: Path, log: Path) -> str:
    """Wait until the server listens, and return its URL."""
    path = runtime / f"jpserver-{process.pid}.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads(path.read_text())["url"]
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()}")


@pytest.fixture
def page(chromium, artefacts, request):
    """A page that records its errors in `page.errors` and requests that leave the machine in `page.strays`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with playwright.sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = play.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.errors, page.strays, sentence = [], [], []
        page.on("console", lambda message: note(page.errors, message.text) if message.type == "error" else None)
        page.on("console", lambda message: sentence.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: note(page.errors, str(error)))
        page.on("request", lambda request: stray(page.strays, request.url))
        page.on("websocket", lambda socket: stray(page.strays, socket.url))
        yield page
        page.screenshot(path=artefacts / f"{request.node.name}-end.png")
        # pytest shows this for a failed test: the page's messages, and the state of each cell
        print("console:", *sentence[-40:], sep="\n  ")
        cells = "cells => cells.map(cell => cell.innerText.slice(0, 300))"
        print("cells:", *map(repr, page.locator(".jp-CodeCell").evaluate_all(cells)), sep="\n  ")
        browser.close()


def note(errors: list[str], text: str) -> None:
    if not any(noise in text for noise in NOISE):
        errors.append(text)


def stray(strays: list[str], url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme in {"http", "https", "ws", "wss"} and parts.hostname not in LOCAL:
        strays.append(url)
