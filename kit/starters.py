"""`kit new KIND NAME`: a working implementation, the same with a bug, and their test, made from one of docs/examples."""

from __future__ import annotations

import ast
import importlib.util
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kit.errors import BadInput, hint
from kit.labs.discover import setting_text
from kit.target import shipped

BUG = "_with_a_bug"


class Starter(NamedTuple):
    """Where a kind of code comes from: an example, its bug, the check that finds the bug, and a short run that shows both."""

    lab: str
    setting: str
    example: str
    right: str
    wrong: str
    fails: str
    settings: Mapping[str, Any]


STARTERS = {
    "releaser": Starter(
        "offload",
        "implementation",
        "host_copies",
        "HostCopies",
        "HostCopiesThatLeaveGradients",
        "tensors_released",
        {"groups": False, "cycles": 2, "steps": 1, "layers": 2},
    ),
    "trainer": Starter(
        "split",
        "implementation",
        "step_trainer",
        "Adapter",
        "AdapterThatReducesTwice",
        "one_reduction",
        {"steps": 2, "layers": 2, "microbatches": 4, "chunks": [1, 2, 0]},
    ),
    "transport": Starter(
        "sync",
        "transport",
        "file_transport",
        "Files",
        "FilesThatStayAfterAFailure",
        "failure_is_clean",
        {"ranks": 3, "replicas": 2, "tp": 1, "layers": 2, "cycles": 2, "sweep": False},
    ),
    "receiver": Starter(
        "sync",
        "receiver",
        "own_receiver",
        "ByName",
        "ByNameWithQueriesFirst",
        "bit_exact",
        {"ranks": 3, "replicas": 2, "tp": 1, "layers": 2, "cycles": 2, "sweep": False},
    ),
    "synchroniser": Starter(
        "sync",
        "implementation",
        "broadcast_sync",
        "Broadcasts",
        "BroadcastsWithAStaleTensor",
        "bit_exact",
        {"ranks": 3, "replicas": 2, "tp": 1, "layers": 2, "cycles": 2},
    ),
    "sampler": Starter(
        "stream",
        "sampler",
        "own_sampler",
        "InOrder",
        "InOrderFromZero",
        "resume_equals",
        {"simulated": True, "worlds": 0, "places": 16, "steps": 6},
    ),
    "controller": Starter(
        "stream",
        "implementation",
        "own_controller",
        "WholeBatches",
        "WholeBatchesThatDoNotWait",
        "publish_before_use",
        {"simulated": True, "worlds": 0, "min_groups": 4},
    ),
    "planner": Starter(
        "share",
        "planner",
        "own_planner",
        "takes_turns",
        "keeps_half",
        "devices_used",
        {"simulated": True, "worlds": 0, "devices": 4, "infer": [0, 1, 2, 3]},
    ),
}

TEST = '''"""Run `pytest test_{name}.py` in this folder: right code passes every check, and {fails} finds the bug of the other."""

from typing import Any

import kit

SETTINGS: dict[str, Any] = {settings}


def failed_checks(target: str) -> set[str]:
    verdict = kit.run("{lab}", {setting}=target, **SETTINGS).verdict()
    assert any(row.passed for row in verdict)
    return {{row.check.partition("/")[0] for row in verdict if row.passed is False}}


def test_right_code_passes() -> None:
    assert failed_checks("{name}:{right}") == set()


def test_the_bug_is_found() -> None:
    assert "{fails}" in failed_checks("{name}:{wrong}")
'''


class Written(NamedTuple):
    files: tuple[Path, ...]
    command: str


def write_starter(kind: str, name: str, folder: Path) -> Written:
    """Write `NAME.py` and `test_NAME.py` into the folder; the command that runs the code under test."""
    if kind not in STARTERS:
        raise BadInput(f"there is no kind {kind!r}; {hint(kind, STARTERS)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise BadInput(f"NAME is the name of a Python module, such as my_{kind}, not {name!r}")
    if importlib.util.find_spec(name) is not None:
        raise BadInput(f"a module {name!r} exists already; choose another name")
    starter, files = STARTERS[kind], (folder / f"{name}.py", folder / f"test_{name}.py")
    if taken := [str(path) for path in files if path.exists()]:
        raise BadInput(f"{taken[0]} exists already; choose another name or folder")
    right, wrong = new_names(starter, name)
    pairs = {name: setting_text(value) for name, value in starter.settings.items()}
    words = [f"--set {key}={value.strip('[]').replace(' ', '')}" for key, value in pairs.items()]
    command = " ".join([f"kit run {starter.lab} --set {starter.setting}={name}:{right}", *words])
    folder.mkdir(parents=True, exist_ok=True)
    about = f'"""A {kind}, and the same with a bug.\n{command}"""\n'
    files[0].write_text(about + example_code(starter, {starter.right: right, starter.wrong: wrong}))
    settings = "{\n" + "".join(f'    "{key}": {value!r},\n' for key, value in starter.settings.items()) + "}"
    files[1].write_text(
        TEST.format(**{**starter._asdict(), "name": name, "right": right, "wrong": wrong, "settings": settings})
    )
    return Written(files, command)


def new_names(starter: Starter, name: str) -> tuple[str, str]:
    """The names of the two in the new file, in the case of the example's."""
    if starter.right.islower():
        return name, name + BUG
    return tuple("".join(word.capitalize() for word in text.split("_")) for text in (name, name + BUG))  # type: ignore[return-value]


def example_code(starter: Starter, names: Mapping[str, str]) -> str:
    """The example without its docstring, its other bugs, and what only those need."""
    text = (shipped("docs") / "examples" / f"{starter.example}.py").read_text()
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    kept = names_needed(tree, {starter.right, starter.wrong})
    for node in reversed(tree.body):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] in kept]
            lines[first - 1 : node.end_lineno] = [f"{ast.unparse(node)}\n"] if node.names else []
        elif not {*names_bound(node)} & kept:
            lines[first - 1 : node.end_lineno] = []
    code = re.sub(r"\n{4,}", "\n\n\n", "".join(lines)).strip("\n").replace("bug each", "bug")
    for old, new in sorted(names.items(), key=lambda pair: -len(pair[0])):
        code = re.sub(rf"\b{old}\b", new, code)
    return f"\n{code}\n"


def names_bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    for target in getattr(node, "targets", [getattr(node, "target", None)]):
        if isinstance(target, ast.Name):
            yield target.id


def names_needed(tree: ast.Module, wanted: set[str]) -> set[str]:
    """These names and all that their definitions use, directly or not."""
    uses = {
        name: {used.id for used in ast.walk(node) if isinstance(used, ast.Name)}
        for node in tree.body
        for name in names_bound(node)
    }
    kept, todo = set[str](), [*wanted]
    while todo:
        name = todo.pop()
        if name not in kept:
            kept.add(name)
            todo += uses.get(name, set())
    return kept
