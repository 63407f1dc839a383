"""Runs a notebook without a browser: `kit notebook 01 -p cycles 5` runs it in a fresh kernel and saves it with its outputs.

Parameters work as in papermill: one cell is tagged `parameters`, and given values go into a cell `injected-parameters` right after it.
papermill can run the same notebooks; here names and types are checked before a kernel starts.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat.v4 import new_code_cell
from pydantic import TypeAdapter, ValidationError

from kit.errors import BadInput, KitError, hint
from kit.labs.discover import value_of
from kit.results import runs_dir
from kit.results.records import make_folder, output_file, user_path, write_text
from kit.results.run import unique
from kit.target import shipped

SUFFIXES = (".ipynb", ".html")
KINDS = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "tuple": list, "dict": dict}
GIVEN = "injected-parameters"
WIDGET = "application/vnd.jupyter.widget-view+json"
# nbconvert's page without external resources: require.js, MathJax, mermaid, the widget manager.
PAGE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline'">
{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""


class Parameter(NamedTuple):
    name: str
    kind: Any
    spelled: str


def run_notebook(
    name: str, given: Mapping[str, str], to: Path | None = None, *, tell: Callable[[str], object] | None = None
) -> Path:
    """Run a notebook from top to bottom and write it to `to` (.ipynb or .html). If a cell fails, the outputs so far are kept.

    `given` are texts. `tell` is called with the number and heading of each cell when it starts, and its time when done.
    """
    path = find_notebook(name)
    notebook = read_notebook(path)
    values = checked_parameters(path, notebook, given)
    target = output_place(path, to)
    if values:
        inject(notebook, values)
    try:
        execute(notebook, path, target, tell)
    finally:
        save(notebook, target, path.stem)
    return target


def find_notebook(name: str) -> Path:
    """A notebook by its path, its name, or the start of its name ("01")."""
    path = user_path(name)
    if path.suffix == ".ipynb" or len(path.parts) > 1:
        if not path.is_file():
            raise BadInput(f"there is no notebook {path}")
        return path
    named = {notebook.stem: notebook for notebook in sorted(shipped("notebooks").glob("*.ipynb"))}
    fitting = [name] if name in named else [stem for stem in named if name and stem.startswith(name)]
    if len(fitting) != 1:
        raise BadInput(f"{name!r} does not name one notebook; {hint(name, list(named))}, or a path")
    return named[fitting[0]]


def copy_all(to: Path) -> Path:
    """Copy the notebooks, and all that they and the pages link to, to a folder."""
    target = user_path(to).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"cannot copy the notebooks to {target}: it is not an empty folder")
    try:
        for name in ("notebooks", "docs", "data/reference"):
            shutil.copytree(
                shipped(name), target / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            )
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
            shutil.copy(shipped(name), target)
    except OSError as error:
        raise BadInput(f"cannot copy the notebooks to {target}: {error}") from error
    return target


def read_notebook(path: Path) -> nbformat.NotebookNode:
    try:
        notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, KeyError, UnicodeDecodeError, OSError) as error:
        raise BadInput(f"{path} cannot be read as a notebook: {str(error).partition(chr(10))[0]}") from None
    return notebook


def output_place(path: Path, to: Path | None) -> Path:
    """Where to write the notebook with its outputs; by default a new name next to the runs."""
    if to is None:
        folder = runs_dir() / "notebooks"
        make_folder(folder)
        return folder / f"{path.stem}-{unique()}.ipynb"
    target = user_path(to).absolute()
    if target.suffix not in SUFFIXES:
        raise BadInput(f"the output must end in {' or '.join(SUFFIXES)}, not {target.name!r}")
    output_file(target)
    if target == path.resolve():
        raise BadInput(f"cannot write {target}: it is the notebook itself; choose another file")
    return target


# -- parameters -----------------------------------------------------------------------------------------------------


def tagged_cells(notebook: nbformat.NotebookNode, tag: str) -> list[int]:
    return [index for index, cell in enumerate(notebook.cells) if tag in cell.metadata.get("tags", [])]


def notebook_parameters(notebook: nbformat.NotebookNode) -> list[Parameter]:
    """The assignments of the cell tagged `parameters`. A type comes from an annotation (`int | None`), else from the default."""
    cells_run = []
    for index in tagged_cells(notebook, "parameters")[:1]:
        for node in ast.parse(notebook.cells[index].source).body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=hint, value=ast.expr()):
                    spelled = ast.unparse(hint)
                    kind = eval(spelled, {"__builtins__": {}}, KINDS)  # noqa: S307 - the notebook's own code, which runs next
                    cells_run.append(Parameter(name, kind, spelled))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    kind = Any  # for a computed default, and for None, which does not show the type
                    with contextlib.suppress(ValueError):
                        kind = KINDS.get(type(ast.literal_eval(value)).__name__, Any)
                    cells_run.append(Parameter(name, kind, getattr(kind, "__name__", "anything")))
    return cells_run


def checked_parameters(path: Path, notebook: nbformat.NotebookNode, given: Mapping[str, str]) -> dict[str, Any]:
    """The given values: JSON, else text, converted to the notebook's type."""
    known = {parameter.name: parameter for parameter in notebook_parameters(notebook)}
    values = {}
    for name, text in given.items():
        if name not in known:
            raise BadInput(f"{path.name} has no parameter {name!r}; {hint(name, list(known))}")
        value: Any = text
        if known[name].kind is not str:
            value = value_of(text)
        try:
            TypeAdapter(known[name].kind).validate_python(value, strict=True)
        except ValidationError:
            raise BadInput(f"{name} must be {known[name].spelled}, not {text!r}") from None
        values[name] = value
    return values


def inject(notebook: nbformat.NotebookNode, values: Mapping[str, Any]) -> None:
    """Insert a cell after the parameters, replacing one from an earlier run."""
    cell = new_code_cell("\n".join(["# Parameters", *(f"{name} = {value!r}" for name, value in values.items())]))
    cell.metadata["tags"] = [GIVEN]
    for index in reversed(tagged_cells(notebook, GIVEN)):
        del notebook.cells[index]
    notebook.cells.insert(tagged_cells(notebook, "parameters")[0] + 1, cell)


# -- running and keeping --------------------------------------------------------------------------------------------


class Kernel(AsyncKernelManager):
    """A kernel of this interpreter, regardless of installed kernels."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "kernel_spec_manager": KernelSpecManager(kernel_dirs=[])})


def execute(
    notebook: nbformat.NotebookNode, path: Path, target: Path, tell: Callable[[str], object] | None = None
) -> None:
    """Run all cells, keeping the notebook after each one. A failing cell ends the run, unless it is tagged `raises-exception`."""
    cells = [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for _, cell in cells:
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        kernel_manager_class=Kernel,
        extra_arguments=["--log-level=40"],  # errors only, because the kernel shares this process's stderr
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.log.setLevel(logging.CRITICAL)  # errors are raised below, once
    # Cell by cell instead of `execute`, which catches an interrupt and then fails on the kernel that it ended.
    with client.setup_kernel():
        for number, (index, cell) in enumerate(cells, start=1):
            began, place = time.monotonic(), f"code cell {number} of {len(cells)} ({cell_heading(cell)})"
            if tell:
                tell(f"{number} of {len(cells)}: {cell_heading(cell)} ... ")
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                why = f"failed in {place}: {error.ename}: {error.evalue}".partition("\n")[0]
                raise KitError(f"{path.name} {why}; outputs so far: {target}") from None
            except DeadKernelError:
                raise KitError(f"{path.name}: the kernel died in {place}; outputs so far: {target}") from None
            except KeyboardInterrupt:
                client.shutdown_kernel = "immediate"
                raise
            finally:
                if tell:
                    tell(f"{time.monotonic() - began:.1f} s\n")
                if target.suffix == ".ipynb":
                    save(notebook, target, path.stem)


def cell_heading(cell: nbformat.NotebookNode) -> str:
    """The cell's first line of code."""
    lines = [line for line in cell.source.splitlines() if line.strip() and not line.startswith("#")]
    return str(lines[0][:70]) if lines else "(empty)"


def save(notebook: nbformat.NotebookNode, target: Path, title: str) -> None:
    text = nbformat.writes(notebook) + "\n" if target.suffix == ".ipynb" else to_html(notebook, title)
    write_text(target, text)


def to_html(notebook: nbformat.NotebookNode, title: str) -> str:
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(extra_loaders=[DictLoader({"kit.html.j2": PAGE})], template_file="kit.html.j2")
    exporter.embed_images = True
    body, _ = exporter.from_notebook_node(without_widgets(notebook), {"metadata": {"name": title}})
    return str(body)


def without_widgets(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Replace a widget, which needs a kernel, with the cell's other output or a sentence."""
    copy: nbformat.NotebookNode = nbformat.from_dict(notebook)
    copy.metadata.pop("widgets", None)
    for cell in copy.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.pop(WIDGET, None) is not None and not {"text/html", "text/markdown", "image/png"} & set(data):
                data["text/html"] = "<p><em>JupyterLab shows controls here.</em></p>"
    return copy


def on_terminal(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
