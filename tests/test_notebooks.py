"""Every notebook runs from top to bottom in a real kernel, as with `Run All Cells`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.labs.parts import OF_WALL_TIME

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def missing_names(source: str) -> list[str]:
    """Names that a cell imports from the kit but that do not exist."""
    plain = re.sub(r"(?m)^([ \t]*)[%!].*$", r"\1pass", source)
    found = []
    for node in ast.walk(ast.parse(plain)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "kit":
            module = importlib.import_module(str(node.module))
            found += [
                f"{node.module}.{name.name}"
                for name in node.names
                if not hasattr(module, name.name) and importlib.util.find_spec(f"{node.module}.{name.name}") is None
            ]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_is_there(path: Path) -> None:
    cells = [cell["source"] for cell in nbformat.read(path, as_version=4)["cells"] if cell["cell_type"] == "code"]
    assert [name for cell in cells for name in missing_names(cell)] == []


def test_a_missing_import_is_seen() -> None:
    assert missing_names("%load_ext kit\nfrom kit.results import Run, riddles") == ["kit.results.riddles"]


def execute(path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs; its runs go to `runs`."""
    monkeypatch.setenv("KIT_RUNS", str(runs))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    return client.execute()


def outputs(notebook: nbformat.NotebookNode, ident: str) -> list[nbformat.NotebookNode]:
    return next(cell["outputs"] for cell in notebook["cells"] if cell["id"] == ident)


def text(notebook: nbformat.NotebookNode, ident: str) -> str:
    """A cell's output as plain text."""
    return "\n".join(
        "\n".join(out["traceback"]) if out["output_type"] == "error" else out.get("text") or out["data"]["text/plain"]
        for out in outputs(notebook, ident)
    )


def panel(notebook: nbformat.NotebookNode, lab: str) -> None:
    """Check that the cell shows the panel and does nothing else: only the Start button starts ranks."""
    (out,) = outputs(notebook, "panel")
    assert "application/vnd.jupyter.widget-view+json" in out["data"]
    assert f'kit.panel("{lab}"' in next(cell for cell in notebook["cells"] if cell["id"] == "panel")["source"]


def fails(notebook: nbformat.NotebookNode, name: str) -> set[str]:
    """The failed checks of a printed verdict, except those of wall time."""
    shown = text(notebook, name)
    counted = re.search(r"(\d+) failed, [1-9]\d* passed", shown)
    assert counted, shown
    failed = set(re.findall(r"^FAIL +(\w+)", shown, re.MULTILINE))
    assert bool(failed) == (counted[1] != "0"), shown
    return failed - OF_WALL_TIME


def start(notebook: nbformat.NotebookNode, runs: Path) -> None:
    panel(notebook, "smoke")
    assert "torch" in text(notebook, "doctor")
    assert "[0-1] 3.0" in text(notebook, "all-reduce")
    assert "[0] 103.0" in text(notebook, "persist")
    error = text(notebook, "error")
    assert "RankTimeout" in error
    assert "time.sleep(600)" in error
    assert "kit/world" not in error
    assert fails(notebook, "run") == set()
    assert "image/png" in outputs(notebook, "plot")[-1]["data"]
    assert "FAIL  groups_return_to_baseline" in text(notebook, "fault")
    assert len(list(runs.glob("*/run.json"))) == 2
    assert len(list(runs.glob("*/table.csv"))) == 1


def offload_reload(notebook: nbformat.NotebookNode, runs: Path) -> None:
    panel(notebook, "offload")
    recorded(notebook)
    assert "train, cycle 1" in text(notebook, "build")
    assert "21 → 1" in text(notebook, "release")
    assert "1 → 21" in text(notebook, "reload")
    assert fails(notebook, "run") == set()
    assert "Is every tensor, and every number of the optimizer, bit-identical when a reload returns (SHA-256)?" in text(
        notebook, "checks"
    )
    assert "passed=False" in text(notebook, "tolerance")
    fault = text(notebook, "fault")
    assert "FAIL old_groups_dead" in fault
    assert "pass training_continues_bitwise" in fault
    for ident in ("plot", "modes-plot"):
        assert "image/png" in outputs(notebook, ident)[-1]["data"]
    assert "old_groups_dead - " in text(notebook, "own")
    assert len(list(runs.glob("offload-*/verdict.json"))) == 6  # one plain run, one fault, three modes, own code


def weight_sync(notebook: nbformat.NotebookNode, runs: Path) -> None:
    panel(notebook, "sync")
    recorded(notebook)
    assert fails(notebook, "verdict") == set()
    stages = outputs(notebook, "stages")[-1]["data"]["text/html"]
    assert {"gather", "apply", "wall", "refresh", "expand"} <= set(re.findall(r"\w+", stages))
    rates = outputs(notebook, "transports")[-1]["data"]["text/html"]
    assert {"shm", "broadcast", "serialize"} <= set(re.findall(r"\w+", rates))
    looks = dict(re.findall(r"(\w+) .*(same|DIFFER)", text(notebook, "blind")))
    assert looks == {"sum": "same", "least": "same", "largest": "same", "sha256": "DIFFER"}
    assert "receiver-stalls" in outputs(notebook, "faults")[-1]["data"]["text/html"]
    assert "FAIL  bit_exact" in text(notebook, "fault-verdict")
    assert "pass  version_order" in text(notebook, "fault-verdict")
    found = re.findall(r"^ +(\d) +(\d) +(\d+) +(\d+)$", text(notebook, "own-verdict"), flags=re.MULTILINE)
    assert {(rank, differ != "0") for _, rank, _, differ in found} == {("2", False), ("3", False), ("4", True)}
    assert "FAIL  bit_exact" in text(notebook, "own-verdict")
    assert "pass  no_torn_reads" in text(notebook, "own-verdict")
    assert "pass bit_exact" in text(notebook, "tolerance")
    assert "FAIL logits_equal" in text(notebook, "tolerance")
    for ident in ("run", "fault"):
        assert "image/png" in outputs(notebook, ident)[-1]["data"]
    assert len(list(runs.glob("sync-*/verdict.json"))) == 3
    assert len(list(runs.glob("sync-*/syncs.csv"))) == len(list(runs.glob("sync-*/table.parquet"))) == 1


def split_training(notebook: nbformat.NotebookNode, runs: Path) -> None:
    panel(notebook, "split")
    recorded(notebook)
    assert fails(notebook, "verdict") == set()
    table = outputs(notebook, "metrics")[-1]["data"]["text/html"]
    assert {"probs_ratio", "num_valid_samples", "one_scalar_error"} <= set(re.findall(r"\w+", table))
    right, wrong = (float(number) for number in re.findall(r": (\d+\.\d+)", text(notebook, "scalar")))
    assert abs(right - 1) < 0.1
    assert wrong > 2
    # The tensors with the largest errors; which they are depends on the rounding of this batch.
    worst = re.findall(r">(model\.[\w.]+\.(?:weight|bias))<", outputs(notebook, "tensors")[-1]["data"]["text/html"])
    assert len(worst) > 1
    for ident in ("tolerance", "own"):
        assert "FAIL grad_parity" in text(notebook, ident)
        assert "pass chunk_invariance" in text(notebook, ident)
    assert "pass loss_parity" in text(notebook, "own")
    assert "metric_parity" not in text(notebook, "own")
    assert "double-reduce" in outputs(notebook, "faults")[-1]["data"]["text/html"]
    assert "FAIL  chunk_invariance" in text(notebook, "fault-verdict")
    assert "pass  loss_parity" in text(notebook, "fault-verdict")
    for ident in ("run", "fault"):
        assert "image/png" in outputs(notebook, ident)[-1]["data"]
    assert len(list(runs.glob("split-*/verdict.json"))) == 3
    assert len(list(runs.glob("split-*/metrics.csv"))) == len(list(runs.glob("split-*/table.parquet"))) == 1


def streaming(notebook: nbformat.NotebookNode, runs: Path) -> None:
    panel(notebook, "stream")
    assert fails(notebook, "verdict") == set()
    steps = outputs(notebook, "steps")[-1]["data"]["text/html"]
    assert {"exposed_generation", "version", "tokens"} <= set(re.findall(r"\w+", steps))
    assert "tokens per second" in outputs(notebook, "replicas")[-1]["data"]["text/html"]
    life = re.findall(r" s  (\w+)", text(notebook, "ledger"))
    assert life[-3:] == ["selected", "trained", "cleared"]
    assert life.count("sent") == life.count("completed") == 4
    total = {
        window: float(seconds)
        for window, seconds in re.findall(r"window (\d): +([\d.]+) s", text(notebook, "simulate"))
    }
    assert total["1"] < 0.7 * total["0"]
    assert "image/png" in outputs(notebook, "run")[-1]["data"]
    assert len(list(runs.glob("stream-*/steps.csv"))) == len(list(runs.glob("stream-*/table.parquet"))) == 1


def time_sharing(notebook: nbformat.NotebookNode, runs: Path) -> None:
    panel(notebook, "share")
    assert fails(notebook, "verdict") == set()
    assert "same_numbers" in text(notebook, "verdict")
    assert "alone_a" in text(notebook, "same")
    for ident, column in (("switches", "weights"), ("leases", "unused"), ("waits", "longest wait")):
        assert column in outputs(notebook, ident)[-1]["data"]["text/html"]
    states = re.findall(r"(waking|awake|sleeping|held)", text(notebook, "ledger"))
    assert {"waking", "awake", "sleeping", "held"} == {*states}
    ends = {
        name: (float(a), float(b))
        for name, a, b in re.findall(
            r"([\w-]+) +a ends after +([\d.]+) s, b after +([\d.]+) s", text(notebook, "simulate")
        )
    }
    assert max(ends["gap-ratio"]) < max(ends["static"])
    assert "image/png" in outputs(notebook, "run")[-1]["data"]
    assert len(list(runs.glob("share-*/switches.csv"))) == len(list(runs.glob("share-*/table.parquet"))) == 1


def exploring(notebook: nbformat.NotebookNode, runs: Path) -> None:
    assert "FAIL  no_deadlock" in (shown := text(notebook, "planner")), shown
    assert "made small in" in text(notebook, "explore")
    assert "which is not active" in text(notebook, "why")
    assert "image/png" in outputs(notebook, "picture")[-1]["data"]
    assert "200 worlds" in (shown := text(notebook, "mend"))
    assert "no rule failed" in shown
    assert len(list(runs.glob("share-*/verdict.json"))) == 2  # of the lab, and of the smallest world


def recorded(notebook: nbformat.NotebookNode) -> None:
    """Check that the notebook shows other machines' numbers under their names."""
    assert re.search(r"recorded on [\w-]+, not here: ", outputs(notebook, "recorded")[-1]["data"]["text/html"])


PROMISES = {
    "00_start": start,
    "01_offload_reload": offload_reload,
    "02_weight_sync": weight_sync,
    "03_split_training": split_training,
    "04_streaming": streaming,
    "05_time_sharing": time_sharing,
    "06_explore": exploring,
}


@pytest.mark.slow
@pytest.mark.drawn(2, of="notebooks")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom_and_shows_what_it_promises(path, tmp_path, monkeypatch):
    notebook = execute(path, tmp_path, monkeypatch)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    for cell in cells:
        failed = [out for out in cell["outputs"] if out["output_type"] == "error"]
        assert bool(failed) == ("raises-exception" in cell["metadata"].get("tags", [])), cell["source"]
    PROMISES[path.stem](notebook, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_runs_one_with_other_parameters(tmp_path, monkeypatch):
    """`kit notebook 01 -p cycles 2` sets the parameter in every run that the notebook makes with its parameters."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    command = [
        sys.executable,
        "-m",
        "kit",
        "notebook",
        "01",
        "-p",
        "cycles",
        "2",
        "--to",
        str(tmp_path / "offload.html"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'offload.html'}\n"), done.stderr
    cycles = [json.loads(path.read_text())["config"]["cycles"] for path in tmp_path.glob("runs/offload-*/run.json")]
    assert sorted(cycles) == [1, 1, 2, 2, 2, 2]  # the runs with a fault and with own code need only one
    page = (tmp_path / "offload.html").read_text()
    assert "injected-parameters" in page
    assert "<script" not in page
    assert page.count('<div class="kit-picture"') >= 2
    assert "JupyterLab shows controls here" in page
