"""The repository's own promises: stripped notebooks, one list of dependencies, all of them pinned, no machine's paths."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kit.world import agentside
from tests import lanes

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PYTHONS = ("3.11", "3.12", "3.13")


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [Requirement(line) for line in lines]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def tracked_text() -> list[Path]:
    """Text files that git tracks, or would track if they were added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:8192]]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stripped_and_takes_parameters(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code if cell["outputs"]] == []
    assert [cell["execution_count"] for cell in code if cell["execution_count"] is not None] == []
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_within_its_range(python: str) -> None:
    pinned: dict[str, str] = {}
    for pin in constraints():
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert canonicalize_name(pin.name) not in pinned, f"{pin.name} is pinned twice for Python {python}"
            pinned[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    for need in requirements():
        assert need.specifier.contains(pinned[canonicalize_name(need.name)]), f"{need} against its pin"


def test_constraints_name_versions_only() -> None:
    for pin in constraints():
        assert pin.url is None
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), f"{pin}: one public version, no build, no range"


def test_conda_users_get_the_same_lists() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, from_pip = environment["dependencies"]
    assert python.startswith("python>=3.11")
    assert pip == "pip"
    assert from_pip == {"pip": ["-c constraints.txt", "-e .[dev,hf]"]}


def test_the_two_commands_are_reported_and_run_by_ci() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make lab" in readme
    assert "make test" in readme
    steps = (ROOT / ".ci" / "run").read_text().splitlines()
    (tests,) = [index for index, step in enumerate(steps) if "make test test-all" in step.split("#")[0]]
    assert steps.index("make lint") < tests
    assert steps[tests].startswith('HOME="$fresh" ')  # as on a machine where nothing has run yet


def test_an_environment_that_a_link_leads_to_is_left_alone(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt", ".ci/env.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "pyvenv.cfg").touch()
    (tmp_path / ".venv").symlink_to("theirs")
    done = subprocess.run([sys.executable, tmp_path / ".ci" / "env.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is a link to" in done.stderr
    assert (tmp_path / "theirs" / "pyvenv.cfg").exists()


def test_the_lanes_name_files_that_exist() -> None:
    named = (*lanes.FILES, *lanes.BESIDE)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_commands_that_start_ranks_are_known() -> None:
    assert lanes.starts_ranks(["python", agentside.AGENT, "--node", "0"])
    assert lanes.starts_ranks(["python", "-m", "torch.distributed.run", "script.py"])
    assert not lanes.starts_ranks(["python", agentside.AGENT, "--wait", "7"])
    assert not lanes.starts_ranks(["python", "-c", "is this code there?", agentside.AGENT])


def test_readme_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} points at {target}"


def test_no_file_names_a_machine() -> None:
    homes = re.compile(r"/(?:work|home|root|Users|opt/wheels)/(?!alice\b|x\b)[\w.]")  # alice and x are placeholders
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in tracked_text()
        if file != Path(__file__).resolve()
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if homes.search(line)
    ]
    assert found == []
