"""`kit new`: for every kind the right code passes every check of its lab, and the named check finds the bug of the other."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kit.errors import BadInput
from kit.labs.discover import find, from_text, rules_of, validate
from kit.starters import STARTERS, example_code, new_names, write_starter


@pytest.mark.parametrize("test", ["test_right_code_passes", "test_the_bug_is_found"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "sampler" else [pytest.mark.slow, pytest.mark.drawn(4, of="starters")])
        for kind in STARTERS
    ],
)
def test_the_written_test_passes(kind: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest calls it in that folder, but in this process."""
    written = write_starter(kind, f"mine_{kind}_{test[-6:]}", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    runpy.run_path(str(written.files[1]))[test]()


@pytest.mark.parametrize("kind", STARTERS)
def test_the_file_has_what_it_needs_and_nothing_else(kind: str, tmp_path: Path) -> None:
    starter = STARTERS[kind]
    written = write_starter(kind, "my_code", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path)], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    tree = ast.parse(written.files[0].read_text())
    names = new_names(starter, "my_code")
    assert {*names} <= {getattr(node, "name", "") for node in tree.body}
    assert starter.wrong not in written.files[0].read_text()
    assert starter.fails in {rule.name for rule in rules_of(starter.lab)}
    assert written.command in (ast.get_docstring(tree) or "")
    words = [word.partition("=") for word in written.command.split("--set ")[2:]]
    assert from_text(find(starter.lab), {key: value.strip() for key, _, value in words}) == {**starter.settings}
    validate(find(starter.lab), starter.settings)


def test_only_names_that_the_two_need_are_kept() -> None:
    code = example_code(STARTERS["releaser"], {"HostCopies": "Mine", "HostCopiesThatLeaveGradients": "Other"})
    assert "subprocess" not in code
    assert "class Other(Mine):" in code
    assert "HostCopies" not in code


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("relaeser", "mine", "there is no kind 'relaeser'; did you mean 'releaser'?"),
        ("releaser", "My-Code", "NAME is the name of a Python module, such as my_releaser, not 'My-Code'"),
        ("releaser", "class", "NAME is the name of a Python module, such as my_releaser, not 'class'"),
        ("releaser", "json", "a module 'json' exists already"),
        ("releaser", "taken", "test_taken.py exists already"),
    ],
)
def test_what_cannot_be_written_is_refused(kind: str, name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "test_taken.py").touch()
    with pytest.raises(BadInput) as refused:
        write_starter(kind, name, tmp_path)
    assert why in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["test_taken.py"]
