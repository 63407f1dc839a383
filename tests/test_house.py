"""The house's import rules: who may import whom, what ranks may need, and what must stay unloaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "kit"
ROOMS = sorted(path.name for path in KIT.iterdir() if path.is_dir() and path.name != "__pycache__")
FACE = "face"  # kit/__init__.py and the modules beside it
MAY_IMPORT = {
    "world": set(),
    "measure": set(),
    "results": set(),
    "train": {"measure"},
    "sync": {"measure"},
    "megatron": {"measure", "train"},
    "labs": {"world", "results", "measure", "megatron", "train", "sync"},
    "view": {"labs", "results", FACE},
    "bench": {*ROOMS, FACE},
    FACE: set(ROOMS) - {"bench"},
}
EVERYBODYS = {"errors", "nccl", "routing"}  # modules beside the rooms
ONLY_IN = {
    "megatron": {"megatron"},
    "xxhash": {"sync"},
    "matplotlib": {"view"},
    "ipywidgets": {"view"},
    "IPython": {"view"},
}
# In labs everything may run on a rank but these.
LABS_NOTEBOOK = {
    "configure.py",
    "discover.py",
    "lab.py",
    "stepped.py",
    "checks.py",
    "counts.py",
    "memory.py",
    "parity.py",
    "routed.py",
    "tables.py",
}
RANK_ROOMS = {"measure", "megatron", "train", "sync"}
# A config's `fits` weighs it against the machine; plain arithmetic of the standard library, harmless where a rank loads it along.
BOTH_SIDES = "kit.world.capacity."
RANK_FILES = {
    KIT / "nccl.py",
    KIT / "routing.py",
    *(KIT / "world" / f"{name}.py" for name in ("__init__", "agent", "agentside", "channel", "device", "entry")),
    *(KIT / "world" / f"{name}.py" for name in ("execute", "processes", "rankside", "routing", "stacks", "stream")),
}
# xxhash is used by ranks that happen to have it; test_hashes holds that all else works without it.
RANK_PACKAGES = {"torch", "numpy", "megatron", "kit", "xxhash"} | set(sys.stdlib_module_names)
HEAVY = {"torch", "numpy", "pandas", "pydantic", "matplotlib", "IPython", "ipywidgets", "megatron", "pyarrow", "jinja2"}
FILES = sorted(KIT.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(KIT).parts
    return parts[0] if len(parts) > 1 else FACE


def on_ranks(path: Path) -> bool:
    return path in RANK_FILES or room(path) in RANK_ROOMS or (room(path) == "labs" and path.name not in LABS_NOTEBOOK)


def imports(path: Path) -> set[str]:
    """Dotted names of what a file imports, inside functions too; what only the type checker sees is left out."""
    return set(_imports(ast.parse(path.read_text())))


def _imports(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from _imports(other)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child)


def rooms_of(names: set[str]) -> set[str]:
    """The rooms that names lie in. kit.errors and kit.nccl are everybody's."""
    seconds = {name.split(".")[1] if "." in name else FACE for name in names if name.split(".")[0] == "kit"}
    return {second if second in ROOMS else FACE for second in seconds if second not in EVERYBODYS}


def test_the_rules_cover_every_room() -> None:
    assert set(ROOMS) == set(MAY_IMPORT) - {FACE}
    assert all(path.exists() for path in RANK_FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(KIT)))
def test_imports(path: Path) -> None:
    names = imports(path)
    here = room(path)
    assert rooms_of(names) - {here} <= MAY_IMPORT[here]
    for package, homes in ONLY_IN.items():
        assert here in homes or package not in {name.split(".")[0] for name in names}, f"{package} is for {homes} only"
    packages = {name.split(".")[0] for name in names}
    if on_ranks(path):
        assert packages <= RANK_PACKAGES, "ranks have the standard library, torch, numpy and megatron.core only"
        assert rooms_of({name for name in names if not name.startswith(BOTH_SIDES)}) <= {here, *RANK_ROOMS}
    elif here in {"results", "view", FACE, "labs"}:
        assert "torch" not in packages, "the notebook's side never loads torch"
    if here == "labs" and on_ranks(path):
        wrong = {f"kit.labs.{name.removesuffix('.py')}" for name in LABS_NOTEBOOK}
        assert not any(name.startswith(tuple(wrong)) for name in names), "the notebook's modules are not for ranks"


def test_the_rules_see_what_breaks_them(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from kit import view\n    import matplotlib.pyplot as p\n    from kit.errors import BadInput\n"
    )
    names = imports(file)
    assert names == {"typing.TYPE_CHECKING", "kit.view", "matplotlib.pyplot", "kit.errors.BadInput"}
    assert rooms_of(names) == {"view"}


def loaded_by(code: str) -> set[str]:
    """Top-level packages and modules of the kit in a fresh interpreter after it ran some code."""
    script = f"import sys\n{code}\nprint()\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.splitlines()[-1].split())


HELP = "from kit.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
LISTS = "from kit.cli import main\nmain(['labs'])\nmain(['faults', '--json'])"


@pytest.mark.parametrize("code", ["import kit", "import kit; kit.World, kit.lab, kit.load, kit.panel", HELP, LISTS])
def test_the_face_is_light(code: str) -> None:
    assert not {name.split(".")[0] for name in loaded_by(code)} & HEAVY


def test_import_kit_loads_no_room() -> None:
    assert {name for name in loaded_by("import kit") if name.startswith("kit")} == {"kit"}


DRIVEN = (
    "from kit.labs.discover import find\nfrom kit.view.panel.model import PanelModel\n"
    "from kit.view.panel.controller import Controller\n"
    "model = PanelModel(find('smoke'))\nmodel.set('cycles', 2)\nmodel.move('drift_mib', 1)\nController(model).close()"
)


def test_a_panels_model_and_controller_need_no_widgets() -> None:
    seen = {name.split(".")[0] for name in loaded_by(DRIVEN)}
    assert "traitlets" in seen
    assert not seen & {"torch", "matplotlib", "IPython", "ipywidgets", "ipykernel"}


def test_ranks_load_only_what_ranks_have() -> None:
    seen = loaded_by("import kit.labs.rankside, kit.labs.smoke.phases, kit.world.agentside, kit.world.rankside")
    assert not seen & {"pandas", "pydantic", "matplotlib", "IPython", "ipywidgets"}
    assert not {
        name for name in seen if name.startswith(("kit.results", "kit.view", "kit.labs.lab", "kit.world.world"))
    }
