"""Finding the ranks' Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kit.errors import BadInput
from kit.world import World, asked


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.probe_python.cache_clear()
    for name in ("KIT_PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_this_interpreter_comes_first() -> None:
    found = asked.find_python()
    assert found.path == sys.executable
    assert found.verdict() == "has torch and megatron.core"


def test_a_wish_that_cannot_be_met_is_refused_and_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = script(tmp_path / "python", "echo '[false, false, [3, 12]]'")
    with pytest.raises(BadInput, match=r"python= names .* has no torch"):
        asked.find_python(str(bare))
    monkeypatch.setenv("KIT_PYTHON", str(bare))
    with pytest.raises(BadInput, match="KIT_PYTHON"):
        asked.find_python()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/bin/false", "is no Python"),
        ("/bin/ls", r"is no Python: to -V it says \S*ls: .*"),
        ("/bin/echo", "is no Python: to -V it says -V"),
    ],
)
def test_what_is_no_python_says_so_in_one_line(path: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"^python= names {path}, which {said}; give a Python") as caught:
        asked.find_python(path)
    assert "import" not in str(caught.value)


def test_a_python_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A script in the place of one: it knows its version, and no more."""
    broken = script(tmp_path / "python", '[ "$1" = -V ] && echo "Python 3.12.1" && exit\necho no encodings >&2; exit 1')
    with pytest.raises(BadInput, match="which does not run: no encodings; give"):
        asked.find_python(str(broken))


def test_an_old_python_says_so(tmp_path: Path) -> None:
    old = script(tmp_path / "python", "echo '[true, true, [3, 8]]'")
    with pytest.raises(BadInput, match=r"is Python 3\.8; 3\.11 or newer"):
        asked.find_python(str(old))


def test_the_first_with_both_is_taken_before_an_earlier_one_with_torch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "has", lambda name: name == "torch")
    both = script(tmp_path / "env" / "bin" / "python", "echo '[true, true, [3, 12]]'")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "env"))
    assert asked.find_python().path == str(both)
    assert [one.path for one in asked.search_pythons()][:2] == [sys.executable, str(both)]


def test_environments_of_the_box_are_found_where_people_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "HOMES", (str(tmp_path),))
    monkeypatch.setenv("PATH", "/nowhere")
    places = (".venv", "main", "train/.venv", "miniconda3/envs/megatron")
    both = [str(script(tmp_path / place / "bin/python", "echo '[true, true, [3, 12]]'")) for place in places]
    assert [one.path for one in asked.search_pythons() if one.megatron] == [sys.executable, *both]


def test_nothing_found_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "candidates", lambda: [(sys.executable, "this interpreter")])
    monkeypatch.setattr(asked, "has", lambda name: False)
    with pytest.raises(BadInput, match="has no torch"):
        asked.find_python()


def test_ranks_run_in_another_environment_without_the_kit(tmp_path: Path) -> None:
    """A bare environment that sees only torch, numpy and megatron.core: links to those packages and nothing else."""
    import venv

    venv.create(tmp_path / "training", with_pip=False, symlinks=True)
    python = tmp_path / "training" / "bin" / "python"
    site = next((tmp_path / "training" / "lib").glob("python*")) / "site-packages"
    here = Path(next(path for path in sys.path if path.endswith("site-packages") and (Path(path) / "torch").exists()))
    for entry in here.iterdir():
        if not entry.name.lower().startswith(
            ("kit", "lifecycle", "__editable__", "_lifecycle", "pandas", "pydantic", "ipython", "matplotlib")
        ):
            (site / entry.name).symlink_to(entry)
    with World(2, device="cpu", python=str(python), logs=tmp_path / "logs") as world:
        world.run("x = torch.ones(1); dist.all_reduce(x)\nimport importlib.util as u, sys")
        assert world.eval("[x.item(), sys.prefix]") == [[2.0, str(tmp_path / "training")]] * 2
        assert (
            world.eval("[u.find_spec(n) is not None for n in ('pandas', 'pydantic', 'IPython')]") == [[False] * 3] * 2
        )
        assert world.call("kit.measure:pss")[0] > 0
