"""How the ranks' Python is found, and whether the machine can carry the ranks."""

from __future__ import annotations

import functools
import os
import resource
import sys
from pathlib import Path

import pytest

from kit import machine
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
    ("path", "message"),
    [
        ("/bin/false", "is no Python"),
        ("/bin/ls", r"is no Python: it answers -V with \S*ls: .*"),
        ("/bin/echo", "is no Python: it answers -V with -V"),
    ],
)
def test_what_is_no_python_says_so_in_one_line(path: str, message: str) -> None:
    with pytest.raises(BadInput, match=f"^python= names {path}, which {message}; give a Python") as caught:
        asked.find_python(path)
    assert "import" not in str(caught.value)


def test_a_python_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A script replaces Python: it reports its version and fails at everything else."""
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
    monkeypatch.setattr(asked, "has_module", lambda name: name == "torch")
    both = script(tmp_path / "env" / "bin" / "python", "echo '[true, true, [3, 12]]'")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "env"))
    assert asked.find_python().path == str(both)
    assert [one.path for one in asked.search_pythons()][:2] == [sys.executable, str(both)]


def test_environments_of_the_box_are_found_where_people_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "HOMES", (str(tmp_path),))
    monkeypatch.setenv("PATH", "/nowhere")
    worker = "ray_venvs/nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
    places = (".venv", "main", "train/.venv", "miniconda3/envs/megatron", worker)
    script(tmp_path / "ray_venvs/VllmGenerationWorker/bin/python", "echo '[true, true, [3, 12]]'")  # not a trainer's
    both = [str(script(tmp_path / place / "bin/python", "echo '[true, true, [3, 12]]'")) for place in places]
    assert [one.path for one in asked.search_pythons() if one.megatron] == [sys.executable, *both]


def test_nothing_found_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "candidates", lambda: [(sys.executable, "this interpreter")])
    monkeypatch.setattr(asked, "has_module", lambda name: False)
    with pytest.raises(BadInput, match="has no torch"):
        asked.find_python()


def test_ranks_run_in_another_environment_without_the_kit(tmp_path: Path) -> None:
    """The environment links to all installed packages except the kit, pandas, pydantic, IPython and matplotlib."""
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


# -- what a machine can carry ------------------------------------------------------------------------------------------

GIB = 2**30


def test_memory_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: GIB)
    asked.check_ranks(3)
    with pytest.raises(
        BadInput, match=r"4 ranks need about 1\.2 GiB \(300 MiB each\) and 1\.0 GiB are free; at most 3 fit"
    ):
        asked.check_ranks(4)


def test_limits_of_the_own_group_count_and_its_page_cache_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A batch system's job, whose control group lies below the mount: 4 GiB allowed, 3.9 charged, 3 of them page cache."""
    group = tmp_path / "cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "cgroup/memory.max").write_text("max\n")
    (tmp_path / "cgroup/pids.max").write_text("max\n")
    files = {"memory.max": 4 * GIB, "memory.current": int(3.9 * GIB), "memory.stat": f"anon 1\ninactive_file {3 * GIB}"}
    for name, text in {**files, "pids.max": 100, "pids.current": 50}.items():
        (group / name).write_text(f"{text}\n")
    proc, meminfo = tmp_path / "proc", tmp_path / "meminfo"
    proc.mkdir()
    (proc / "mountinfo").write_text(f"30 23 0:28 / {group.parent} rw - cgroup2 cgroup2 rw\n")
    (proc / "cgroup").write_text("0::/job\n")
    meminfo.write_text(f"MemAvailable: {64 * GIB // 1024} kB\n")
    monkeypatch.setattr(machine, "free_memory", functools.partial(machine.free_memory, proc, meminfo))
    monkeypatch.setattr(machine, "cgroup_limit", functools.partial(machine.cgroup_limit, proc=proc))
    assert machine.free_memory() == pytest.approx(3.1 * GIB, rel=0.01)
    asked.check_ranks(2)
    with pytest.raises(
        BadInput, match=r"3 ranks need about 72 processes and threads .* 50 more \(50 of 100 are in use\)"
    ):
        asked.check_ranks(3)
    with pytest.raises(BadInput, match=r"11 ranks need about 3\.2 GiB .* 3\.1 GiB are free; at most 10 fit"):
        asked.check_ranks(11)


def test_the_users_own_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of all Worlds and of the user's other processes count as in use."""
    monkeypatch.setattr(os, "geteuid", os.getpid)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    with pytest.raises(
        BadInput, match=r"ranks need about .* this user \(ulimit -u\) may start -?\d+ more \(\d+ of \d+ are in use\)"
    ):
        asked.check_ranks(2)


def test_ranks_of_other_worlds_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "MOST_PER_CORE", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with World(1, device="cpu", logs=tmp_path):
        asked.check_ranks(1)
        with pytest.raises(BadInput, match=r"2 ranks beside 1 in other Worlds on this machine's 2 cores: at most 2"):
            asked.check_ranks(2)
    asked.check_ranks(2)
