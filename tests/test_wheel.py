"""The wheel is complete: installed outside the checkout it runs a lab and a notebook, and contains the docs and data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from kit import cli

ROOT = Path(__file__).resolve().parents[1]
TAKEN = ("notebooks", "docs", "data")


def tracked(*places: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


def run(*command: object, cwd: Path, **env: str) -> str:
    # Python's and pip's environment variables would point to the checkout.
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KIT_", "PIP_"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**plain, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_every_file_of_notebooks_docs_and_data_is_named_for_the_wheel() -> None:
    """Otherwise a new folder could be left out unnoticed."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    found = {str(path.relative_to(ROOT)) for names in listed.values() for name in names for path in ROOT.glob(name)}
    shown = [name for name in tracked(*TAKEN) if not name.startswith(("docs/pictures/", "docs/api.py"))]
    assert [name for name in shown if name not in found] == []
    for folder, names in listed.items():
        assert {name.rpartition("/")[0] for name in names} == {folder.removeprefix("share/lifecycle-kit").strip("/")}


def test_notebooks_are_copied_with_what_they_point_at(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["notebook", "--copy", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine/notebooks/00_start.ipynb").is_file()
    assert (tmp_path / "mine/docs/recorder.md").is_file()
    pages = [page for page in (tmp_path / "mine").rglob("*") if page.suffix in {".md", ".ipynb"}]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text())]
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []
    assert cli.main(["notebook", "--copy", str(tmp_path / "mine")]) == 2
    assert "is not an empty folder" in capfd.readouterr().err
    for words in ([], ["00", "--copy", str(tmp_path / "x")]):
        assert cli.main(["notebook", *words]) == 2
        assert "name a notebook to run" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    source, env = tmp_path / "source", tmp_path / "env"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "wheel", source, "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name.partition("share/lifecycle-kit/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"notebooks/00_start.ipynb", "docs/recorder.md", "data/reference/README.md", "docs/images/smoke.png"} <= held
    venv.create(env, with_pip=False, symlinks=True)
    site = next(env.glob("lib/python*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages") and Path(path, "torch").exists())
    (site / "others.pth").write_text(
        f"{here}\n"
    )  # the kit's dependencies, but not the kit itself: it is only a .pth link here, which is not followed
    run(*pip, "--python", env / "bin/python", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    runs = {"KIT_RUNS": str(tmp_path / "runs"), "MPLBACKEND": "agg"}
    where = "import kit.target as v; print(v.__file__, v.shipped('data'), sep='\\n')"
    assert [line.startswith(str(env)) for line in run(env / "bin/python", "-c", where, cwd=tmp_path).split()] == [
        True
    ] * 2
    ask = "from kit.results.comparison import recorded; print(recorded('bench-sync')[0].head)"
    assert "recorded on cpu-2core" in run(env / "bin/python", "-c", ask, cwd=tmp_path)
    message = run(env / "bin/kit", "run", "smoke", "--set", "cycles=2", "--set", "device=cpu", cwd=tmp_path, **runs)
    assert "0 failed" in message
    page = tmp_path / "00.ipynb"  # an HTML page would need templates that are in the other environment
    run(env / "bin/kit", "notebook", "00", "-p", "cycles", "2", "--to", page, cwd=tmp_path, **runs)
    assert "groups_return_to_baseline" in page.read_text()
    run(env / "bin/kit", "notebook", "--copy", tmp_path / "mine", cwd=tmp_path, **runs)
    assert (tmp_path / "mine/notebooks/00_start.ipynb").is_file()
