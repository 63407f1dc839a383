"""Every notebook runs from top to bottom in a real kernel, as `Run All Cells` does."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """The notebook with its outputs; its runs go to `runs`."""
    monkeypatch.setenv("KIT_RUNS", str(runs))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    return client.execute()


def outputs(notebook: nbformat.NotebookNode, ident: str) -> list[nbformat.NotebookNode]:
    return next(cell["outputs"] for cell in notebook["cells"] if cell["id"] == ident)


def text(notebook: nbformat.NotebookNode, ident: str) -> str:
    """What a cell shows, as plain text."""
    return "\n".join(
        "\n".join(out["traceback"]) if out["output_type"] == "error" else out.get("text") or out["data"]["text/plain"]
        for out in outputs(notebook, ident)
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    notebook = execute(path, tmp_path, monkeypatch)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    for cell in cells:
        failed = [out for out in cell["outputs"] if out["output_type"] == "error"]
        assert bool(failed) == ("raises-exception" in cell["metadata"].get("tags", [])), cell["source"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_start_shows_what_it_promises(tmp_path, monkeypatch):
    notebook = execute(ROOT / "notebooks" / "00_start.ipynb", tmp_path, monkeypatch)
    assert "torch" in text(notebook, "doctor")
    assert "[0-1] 3.0" in text(notebook, "all-reduce")
    assert "[0] 103.0" in text(notebook, "persist")
    error = text(notebook, "error")
    assert "RankTimeout" in error
    assert "time.sleep(600)" in error
    assert "kit/world" not in error
    assert "0 failed" in text(notebook, "run")
    assert "image/png" in outputs(notebook, "plot")[-1]["data"]
    assert "FAIL  groups_return_to_baseline" in text(notebook, "fault")
    runs = [path.parent.name for path in tmp_path.glob("*/run.json")]
    assert len(runs) == 2
    assert len(list(tmp_path.glob("*/table.csv"))) == 1
