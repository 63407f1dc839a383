"""`kit notebook`: names, parameters as in papermill, what is kept, and how it ends. These tests use a tiny notebook."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kit.errors import BadInput, KitError
from kit.view import notebooks

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = """\
ranks = 2  # a comment
share = 0.5
size: str = "tiny"
layers: int | None = 1
cuts = [1, 2]
quick = True
own = None
"""
BODY = """\
import sys
print("seen", ranks, share, size, layers, cuts, quick, own)
assert ranks != 13, "thirteen ranks\\nand more"
"""


@pytest.fixture
def tiny(tmp_path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "tiny.ipynb"
    cells = [
        new_markdown_cell("# A story"),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        new_code_cell(BODY, id="body"),
        new_code_cell("import os\nprint('in', os.path.basename(os.getcwd()), 'on', sys.executable)", id="where"),
        new_code_cell("1 / 0", id="wanted", metadata={"tags": ["raises-exception"]}),
    ]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def shown(path: Path, ident: str) -> str:
    cell = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.id == ident)
    return "".join(out.get("text", out.get("ename", "")) for out in cell.outputs)


def test_it_runs_with_what_is_given(tiny, tmp_path):
    given = {
        "ranks": "4",
        "share": "1",
        "size": "125",
        "layers": "null",
        "cuts": "[1, 0]",
        "quick": "false",
        "own": "a:b",
    }
    reported: list[str] = []
    made = notebooks.run_notebook(str(tiny), given, tmp_path / "out.ipynb", tell=reported.append)
    assert shown(made, "body") == "seen 4 1 125 None [1, 0] False a:b\n"
    assert shown(made, "where") == f"in home on {sys.executable}\n"
    assert shown(made, "wanted") == "ZeroDivisionError"
    cells = nbformat.read(made, as_version=4).cells
    assert [cell.metadata.get("tags") for cell in cells[1:3]] == [["parameters"], ["injected-parameters"]]
    assert cells[2].source.startswith("# Parameters\nranks = 4\n")
    assert reported[0] == "1 of 5: ranks = 2  # a comment ... "
    assert re.fullmatch(r"\d+\.\d s\n", reported[1])
    again = notebooks.run_notebook(str(made), {"ranks": "5"}, tmp_path / "again.ipynb")  # replaces the first injection
    assert shown(again, "body").startswith("seen 5 0.5 tiny")
    assert len(nbformat.read(again, as_version=4).cells) == len(cells)


def test_a_page_holds_everything(tiny, tmp_path):
    notebook = nbformat.read(tiny, as_version=4)
    widget = new_output("display_data", data={notebooks.WIDGET: {"model_id": "x"}, "text/plain": "VBox()"})
    notebook.cells[2].outputs = [widget, new_output("stream", text="<script src='https://x.example/a.js'>")]
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
    page = notebooks.to_html(notebook, "tiny")
    assert "<title>tiny</title>" in page
    assert "A story" in page
    assert "JupyterLab shows controls here" in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    assert "default-src 'none'" in page
    assert notebooks.WIDGET in notebook.cells[2].outputs[0].data  # the notebook object is unchanged
    assert not notebooks.without_widgets(notebook).cells[2].outputs[0].data.get(notebooks.WIDGET)


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_what_ran_is_kept(tiny, tmp_path):
    for name in ("out.ipynb", "out.html"):
        with pytest.raises(KitError) as failed:
            notebooks.run_notebook(str(tiny), {"ranks": "13"}, tmp_path / name)
        assert not isinstance(failed.value, BadInput)
        where = "tiny.ipynb failed in code cell 3 of 5 (import sys): AssertionError: thirteen ranks"
        assert str(failed.value) == f"{where}; outputs so far: {tmp_path / name}"
        assert "seen 13" in (tmp_path / name).read_text()


def test_a_kernel_that_dies_is_reported(tiny, tmp_path):
    notebook = nbformat.read(tiny, as_version=4)
    notebook.cells.insert(2, new_code_cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))
    nbformat.write(notebook, tiny)
    with pytest.raises(KitError, match=r"tiny.ipynb: the kernel died in code cell 2 of 5 \(import os, signal\)"):
        notebooks.run_notebook(str(tiny), {}, tmp_path / "out.ipynb")
    assert (tmp_path / "out.ipynb").is_file()


@pytest.mark.slow
def test_an_interrupt_ends_the_kernel_and_keeps_what_ran(tiny, tmp_path):
    notebook = nbformat.read(tiny, as_version=4)
    text = "import os, time\nfrom pathlib import Path\nPath('pid').write_text(str(os.getpid()))\nprint('here', flush=True)\ntime.sleep(100)"
    notebook.cells.insert(2, new_code_cell(text, id="sleeps"))
    nbformat.write(notebook, tiny)
    os.mkfifo(tiny.parent / "pid")  # reading it blocks until the cell writes
    command = [sys.executable, "-m", "kit", "notebook", str(tiny), "--to", str(tmp_path / "out.ipynb")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    kernel = int((tiny.parent / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "kit: interrupted\n")
    assert not Path(f"/proc/{kernel}").exists()
    assert "sleeps" in (tmp_path / "out.ipynb").read_text()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rank": "2"}, "tiny.ipynb has no parameter 'rank'; did you mean 'ranks'? allowed are: cuts, layers, own, quick, ranks,"),
        ({"ranks": "two"}, "ranks must be int, not 'two'"),
        ({"ranks": "true"}, "ranks must be int, not 'true'"),
        ({"ranks": "null"}, "ranks must be int, not 'null'"),
        ({"layers": "1.5"}, "layers must be int | None, not '1.5'"),
        ({"share": "half"}, "share must be float, not 'half'"),
        ({"cuts": "1"}, "cuts must be list, not '1'"),
        ({"quick": "1"}, "quick must be bool, not '1'"),
    ],
)  # fmt: skip
def test_parameters_are_checked_before_a_kernel_starts(tiny, tmp_path, given, sentence):
    with pytest.raises(BadInput) as refused:
        notebooks.run_notebook(str(tiny), given, tmp_path / "out.ipynb")
    assert str(refused.value).startswith(sentence)
    assert not (tmp_path / "out.ipynb").exists()


def test_a_notebook_without_parameters_takes_none(tiny, tmp_path):
    notebook = nbformat.read(tiny, as_version=4)
    del notebook.cells[1]
    with pytest.raises(BadInput, match="has no parameter 'ranks'; allowed are: none"):
        notebooks.checked_parameters(tiny, notebook, {"ranks": "2"})


def test_the_kits_notebooks_are_found_by_how_they_begin():
    assert (
        notebooks.find_notebook("01")
        == notebooks.find_notebook("01_offload_reload")
        == ROOT / "notebooks" / "01_offload_reload.ipynb"
    )
    with pytest.raises(BadInput, match=r"'0' does not name one notebook; .*01_offload_reload, .*, or a path"):
        notebooks.find_notebook("0")
    with pytest.raises(BadInput, match=r"there is no notebook nowhere/x\.ipynb"):
        notebooks.find_notebook("nowhere/x.ipynb")


def test_every_parameter_of_the_kits_notebooks_is_understood():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        found = notebooks.notebook_parameters(notebooks.read_notebook(path))
        assert found, path
        assert "device" in [parameter.name for parameter in found] or "explore" in path.stem  # worlds need no device
        assert all(parameter.kind is not Any for parameter in found), path
    known = {
        parameter.name: parameter
        for parameter in notebooks.notebook_parameters(notebooks.read_notebook(notebooks.find_notebook("01")))
    }
    assert known["layers"].kind == (int | None)  # None selects the layers of the size


def test_places_that_cannot_be(tiny, tmp_path, monkeypatch):
    for to, sentence in (
        (tmp_path / "out.pdf", "must end in .ipynb or .html, not 'out.pdf'"),
        (Path("/dev/null/nowhere/out.html"), "cannot make the folder /dev/null/nowhere"),
        (tiny, "it is the notebook itself"),
    ):
        with pytest.raises(BadInput, match=sentence):
            notebooks.run_notebook(str(tiny), {}, to)
    (tmp_path / "torn.ipynb").write_text("{")
    with pytest.raises(BadInput, match=r"torn\.ipynb cannot be read as a notebook"):
        notebooks.run_notebook(str(tmp_path / "torn.ipynb"), {})
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    place = notebooks.output_place(tiny, None)
    assert place.parent == tmp_path / "runs" / "notebooks"
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}\.ipynb", place.name)


def test_an_installation_without_notebooks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "shipped", lambda name: tmp_path / name)
    with pytest.raises(BadInput, match="'01' does not name one notebook; allowed are: none, or a path"):
        notebooks.find_notebook("01")
