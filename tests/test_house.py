"""The import rules of the rooms: who may import whom, what ranks may need, and what must stay unloaded."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from kit.labs.definition import fields
from kit.labs.discover import discover

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "kit"
ROOMS = sorted(path.name for path in KIT.iterdir() if path.is_dir() and path.name != "__pycache__")
FACE = "face"  # kit/__init__.py and the modules beside it
MAY_IMPORT = {
    "world": set(),
    "measure": {"results"},
    "results": set(),
    "train": {"measure"},
    "sync": {"measure"},
    "megatron": {"measure", "train"},
    "actors": {"measure", "megatron", "sync", "train"},
    "engines": {"measure", "megatron", "sync", "train"},
    "loop": {"results"},
    "stream": {"loop", "results"},
    "share": {"loop", "results"},
    "labs": {
        "world",
        "results",
        "measure",
        "megatron",
        "actors",
        "engines",
        "train",
        "sync",
        "draw",
        "loop",
        "stream",
        "share",
    },
    "draw": {"results"},
    "view": {"labs", "draw", "results", FACE},
    "bench": {*ROOMS, FACE},  # labs that measure the kit itself, each with its rank side under `ranks`
    FACE: set(ROOMS),
}
EVERYBODYS = {"errors", "machine", "nccl", "routing", "target", "tls"}  # modules beside the rooms
ONLY_IN = {
    "megatron": {"megatron"},
    "xxhash": {"sync"},
    "transformers": {"engines"},
    "vllm": {"engines"},
    "matplotlib": {"draw"},
    "ipywidgets": {"view"},
    "IPython": {"view"},
}
# Modules that ranks import by name; in a lab's own folder these are all under `ranks`.
LABS_ON_RANKS = {KIT / "labs" / "rankside.py", KIT / "labs" / "bystander.py"}
RANK_ROOMS = {"measure", "megatron", "actors", "engines", "train", "sync"}
# A config's `fits` compares it with the machine: plain standard-library arithmetic, harmless where ranks load it.
# Ranks also use the schema and the writer of records.
BOTH_SIDES = (
    "kit.stream.ports.",
    "kit.stream.settings.",
    "kit.world.asked.",
    "kit.world.channel",
    "kit.results.records.",
)
RANK_FILES = {
    *(KIT / f"{name}.py" for name in EVERYBODYS - {"errors"}),
    *(KIT / "results" / f"{name}.py" for name in ("__init__", "records")),
    *(KIT / "world" / f"{name}.py" for name in ("__init__", "agent", "agentside", "channel", "device")),
    *(KIT / "world" / f"{name}.py" for name in ("leftovers", "rankside", "rayside", "warmside")),
}
# Ranks may lack these: test_hashes, test_checkpoint and test_engines test that case.
AT_HAND = {"xxhash", "safetensors", "transformers", "vllm"}
RANK_PACKAGES = {"torch", "numpy", "megatron", "kit"} | AT_HAND | set(sys.stdlib_module_names)
HEAVY = {"torch", "numpy", "pandas", "pydantic", "matplotlib", "IPython", "ipywidgets", "megatron", "pyarrow", "jinja2"}
LABS = {path.parent.name for path in (KIT / "labs").glob("*/__init__.py")}
FILES = sorted(KIT.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(KIT).parts
    if parts[0] == "labs" and (parts[1].startswith("bench_") or parts[1] == "bench.py"):
        return "bench"
    return parts[0] if len(parts) > 1 else FACE


def is_charts(path: Path) -> bool:
    """Whether a path is the module of a lab's charts."""
    return room(path) == "labs" and path.stem == "charts"


def on_ranks(path: Path) -> bool:
    return path in RANK_FILES or room(path) in RANK_ROOMS or path in labs_on_ranks()


@functools.cache
def labs_on_ranks() -> frozenset[Path]:
    """Files of labs that ranks load: those under a lab's `ranks`, and every file of labs that these import."""
    files = modules([path for path in FILES if room(path) == "labs"])
    todo = [name for name, path in files.items() if path in LABS_ON_RANKS or "ranks" in path.relative_to(KIT).parts]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            wanted = {name, *imports(files[name])}
            todo += [part for each in wanted for part in packages_of(each) if part in files]
    return frozenset(files[name] for name in found)


def packages_of(name: str) -> list[str]:
    """A dotted name and every package above it, which are loaded before it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def modules(paths: Iterable[Path]) -> dict[str, Path]:
    """Map module names to files."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@functools.cache
def imports(path: Path, *, typing: bool = False) -> set[str]:
    """Dotted names that a file imports, also inside functions. Imports for the type checker only count with `typing`."""
    return set(_imports(ast.parse(path.read_text()), typing=typing))


def _imports(node: ast.AST, *, typing: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if (
            not typing
            and isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            for other in child.orelse:
                yield from _imports(other, typing=typing)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child, typing=typing)


def arrows(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each module, the files that it imports; a name in a package counts as its module if it is one."""
    return {
        module: {
            found
            for name in imports(path, typing=True)
            if (found := name if name in files else name.rpartition(".")[0]) in files and found != module
        }
        for module, path in files.items()
    }


def circle(found: Mapping[str, set[str]]) -> list[str]:
    """One import circle between files in its order; empty if there is none."""
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def rooms_of(names: set[str]) -> set[str]:
    """The rooms of the given names; modules that every room may use belong to none."""
    seconds = {name.split(".")[1] if "." in name else FACE for name in names if name.split(".")[0] == "kit"}
    return {second if second in ROOMS else FACE for second in seconds if second not in EVERYBODYS}


def test_the_rules_cover_every_room() -> None:
    assert set(ROOMS) == set(MAY_IMPORT) - {FACE, "bench"}
    assert all(path.exists() for path in RANK_FILES)


def broken_rules(path: Path) -> Iterator[str]:
    """Yield a sentence for each forbidden import of a file."""
    names = imports(path)
    here = room(path)
    if beyond := rooms_of(names) - {here} - MAY_IMPORT[here]:
        yield f"{here} may not import {sorted(beyond)}"
    packages = {name.split(".")[0] for name in names}
    for package, homes in ONLY_IN.items():
        if package in packages and here not in homes:
            yield f"{package} is for {homes} only"
    if on_ranks(path):
        if more := packages - RANK_PACKAGES:
            yield f"ranks have the standard library, torch, numpy and megatron.core only, not {sorted(more)}"
        if more := rooms_of({name for name in names if not name.startswith(BOTH_SIDES)}) - {here, *RANK_ROOMS}:
            yield f"ranks do not load {sorted(more)}"
    elif here in {"results", "draw", "view", FACE, "labs"} and "torch" in packages:
        yield "the notebook's side never loads torch"
    if here == "labs" and not is_charts(path) and "draw" in rooms_of(names):
        yield "of a lab only its charts draw"
    named = {name.split(".")[2] for name in names if name.startswith("kit.labs.")} & LABS
    if here in {"draw", "view"} and named:
        yield f"no lab is named here, and {sorted(named)} is"
    if here == "labs":
        own = path.relative_to(KIT).parts[1]
        of_others = {name for name in names for lab in LABS - {own} if name.startswith(f"kit.labs.{lab}.")}
        if inside := {name for name in of_others if name.split(".")[3] != "lab"}:
            yield f"a lab may hold another's config; anything else that two labs need lies below them, not {sorted(inside)}"


def test_imports() -> None:
    assert [f"{path.relative_to(ROOT)}: {why}" for path in FILES for why in broken_rules(path)] == []


def test_what_ranks_load_of_a_lab_lies_under_ranks() -> None:
    for name, lab in discover().labs.items():
        if not lab.phases:  # a lab without ranks; its drivers name what the ranks of their Worlds call
            continue
        targets = [
            lab.phases,
            *(each.default for each in fields(lab.config) if each.option.target and not each.option.here),
        ]
        own = [target for target in targets if target.startswith(f"kit.labs.{name}.")]
        assert own
        assert all(target.startswith(f"kit.labs.{name}.ranks.") for target in own), own
    notebook = {f"kit.labs.{name}" for name in ("lab", "discover", "smoke.rules", "split.rules")}
    assert not notebook & modules(labs_on_ranks()).keys()
    assert {"kit.labs.split.lab", "kit.labs.definition"} <= modules(labs_on_ranks()).keys()


def test_a_rank_file_that_loads_the_notebooks_side_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke, plain = KIT / "labs" / "smoke", imports

    def changed(path: Path, *, typing: bool = False) -> set[str]:
        more = {"kit.labs.smoke.rules.RULES"} if path == smoke / "ranks" / "phases.py" else set()
        return plain(path, typing=typing) | more

    assert list(broken_rules(smoke / "rules.py")) == []
    monkeypatch.setattr(sys.modules[__name__], "imports", changed)
    labs_on_ranks.cache_clear()
    try:
        assert list(broken_rules(smoke / "rules.py")) != []
    finally:
        labs_on_ranks.cache_clear()


def test_a_lab_that_uses_the_inside_of_another_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    drive, plain = KIT / "labs" / "share" / "drive.py", imports

    def changed(path: Path, *, typing: bool = False) -> set[str]:
        wrong = {"kit.labs.stream.drive.started"} if path == drive else set()
        return plain(path, typing=typing) | wrong

    assert list(broken_rules(drive)) == []
    monkeypatch.setattr(sys.modules[__name__], "imports", changed)
    assert any("kit.labs.stream.drive.started" in sentence for sentence in broken_rules(drive))


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(arrows(modules(FILES))) == []


ONLY_IN_MACHINE = ("/proc", "/sys/", "nvidia-smi")


def test_one_module_reads_proc_and_asks_the_gpu_driver() -> None:
    for path in FILES:
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found = [text for text in texts if isinstance(text, str) and text.startswith(ONLY_IN_MACHINE)]
        assert path.name == "machine.py" or not found, f"{path.relative_to(KIT)}: {found}"


def test_the_rules_see_what_breaks_them(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from kit import view\n    import matplotlib.pyplot as p\n    from kit.errors import BadInput\n"
    )
    names = imports(file)
    assert names == {"typing.TYPE_CHECKING", "kit.view", "matplotlib.pyplot", "kit.errors.BadInput"}
    assert rooms_of(names) == {"view"}
    other = tmp_path / "other.py"
    other.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bad import f\n")
    assert circle(arrows({"bad": file, "other": other})) == []
    file.write_text("def f():\n    import other\n")
    imports.cache_clear()
    assert set(circle(arrows({"bad": file, "other": other}))) == {"bad", "other"}


def loaded_by(code: str) -> set[str]:
    """Run code in a fresh interpreter; return the names of all modules loaded afterwards."""
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
    "from kit.labs.discover import find\nfrom kit.view.model import PanelModel\n"
    "from kit.view.model import PanelController\n"
    "model = PanelModel(find('smoke'))\nmodel.set('cycles', 2)\nmodel.move('memory_drift', 1)\nPanelController(model).close()"
)


def test_a_panels_model_and_controller_need_no_widgets() -> None:
    seen = {name.split(".")[0] for name in loaded_by(DRIVEN)}
    assert "traitlets" in seen
    assert not seen & {"torch", "matplotlib", "IPython", "ipywidgets", "ipykernel"}


KERNEL = (
    "import os\nos.environ['KIT_WAITING_AGENT'] = 'off'\nimport kit\nfrom kit.labs.discover import discover\n"
    "from kit.view import magics, notebooks, report\nfor name, lab in discover().labs.items():\n"
    "    lab.all_rules(), lab.load_presets(), kit.panel(name)"
)


@pytest.mark.slow
def test_a_kernel_with_a_panel_of_every_lab_loads_no_torch() -> None:
    """So it can never start CUDA, whatever torch its environment has."""
    seen = {name.split(".")[0] for name in loaded_by(KERNEL)}
    assert "ipywidgets" in seen
    assert "torch" not in seen


def test_ranks_load_only_what_ranks_have() -> None:
    seen = loaded_by(
        "import kit.labs.rankside, kit.labs.smoke.ranks.phases, kit.world.agentside, kit.world.rankside\n"
        "import kit.labs.box.ranks.probes"
    )
    assert not seen & {"pandas", "pydantic", "matplotlib", "IPython", "ipywidgets"}
    assert not {name for name in seen if name.startswith(("kit.view", "kit.labs.lab", "kit.world.world"))}
    assert {name for name in seen if name.startswith("kit.results.")} == {"kit.results.records"}


def test_records_need_the_standard_library_only() -> None:
    seen = loaded_by("import kit.results.records")
    assert {name for name in seen if name.startswith("kit")} == {
        "kit",
        "kit.errors",
        "kit.results",
        "kit.results.records",
    }
    assert not {name.split(".")[0] for name in seen} & HEAVY


@pytest.mark.parametrize("judge", ["kit.stream.judge", "kit.share.judge"])
def test_a_judge_uses_nothing_of_what_it_judges(judge: str) -> None:
    own = {name: path for name, path in modules(FILES).items() if name.startswith(judge)}
    assert len(own) > 5
    for name, path in own.items():
        used = {each for each in imports(path, typing=True) if each.startswith("kit.")}
        assert not {each for each in used if not each.startswith((judge, "kit.results.", "kit.errors"))}, name


def test_loops_and_controllers_need_the_standard_library_only() -> None:
    rooms = [path for path in FILES if room(path) in {"loop", "stream", "share"}]
    for name in modules(path for path in rooms if "judge" not in path.parts):
        assert not {each.split(".")[0] for each in imports(modules(FILES)[name], typing=True)} & HEAVY, name
    seen = loaded_by("import kit.loop.runner, kit.stream.simulated, kit.stream.ports, kit.share.simulated")
    assert {name for name in seen if name.startswith("kit.results.")} == {"kit.results.records"}
    assert not {name.split(".")[0] for name in seen} & HEAVY
