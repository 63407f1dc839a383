"""Disk failures during a run: full, read-only, a torn line. Each gives one clear error, keeps what was measured and leaves nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kit.world import World
from tests.holdings import holdings, wait_for

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
LOCKS = '''
from pathlib import Path
from kit.labs.smoke.ranks.phases import Plain

class Locks(Plain):
    """Makes the run's folder read-only while the run goes on."""
    def destroy(self, group):
        super().destroy(group)
        Path({folder!r}).chmod(0o555)
'''


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Kit = Callable[..., Ended]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """Run `kit ...` in its own process; check that nothing of it remains and that a World starts afterwards."""

    def call(*words: object, before: Callable[[], None] | None = None, around: str = "exec {}") -> Ended:
        line = around.format(shlex.join([sys.executable, "-m", "kit", *map(str, words)]))
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "KIT_RUNS": str(tmp_path / "runs")}
        process = subprocess.Popen(
            ["sh", "-c", line],
            env={**env, "PYTHONDONTWRITEBYTECODE": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=before,  # noqa: PLW1509 - nobody else's threads run here
        )
        out, err = process.communicate(timeout=60)
        assert wait_for(lambda: processes_with(f"KIT_RUNS={tmp_path}".encode()) == [])
        assert holdings(process.pid)["folders"] == []
        return Ended(process.returncode, out, err)

    return call


def processes_with(setting: bytes) -> list[str]:
    """Processes with this setting, including those that we did not start directly."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and setting in (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


@pytest.fixture
def next_world(tmp_path: Path):
    yield
    with World(2, device="cpu", logs=tmp_path / "next") as after:
        assert after.eval("rank") == [0, 1]


def as_a_plain_user() -> None:
    """Drop the two capabilities that let root ignore file permissions."""
    if os.geteuid() == 0:
        for right in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, right, 0, 0, 0) == 0


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def mounts() -> bool:
    """Whether this machine lets us mount a small disk."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def kept(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_file_that_may_not_grow_while_recording(kit: Kit, tmp_path: Path, next_world: None) -> None:
    folder = tmp_path / "run"
    ended = kit("run", "smoke", "--set", "cycles=50", "--out", folder, before=small_files)
    assert ended.status == 3
    assert "records.jsonl: File too large; what was measured before is kept there" in ended.err
    assert len(kept(folder)) > 50
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    assert "(partial)" in kit("show", folder).out
    assert kit("export", folder, "--to", tmp_path / "kept.parquet").status == 0


@pytest.mark.slow
@pytest.mark.skipif(not mounts(), reason="this machine does not let us mount a small disk")
def test_a_disk_that_fills_while_recording(kit: Kit, tmp_path: Path, next_world: None) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    inside = f"mount -t tmpfs -o size=64k tmpfs {disk}; {{}}; status=$?; cp -r {disk}/run {copy}; exit $status"
    around = f"exec unshare --user --map-root-user --mount sh -c {shlex.quote(inside)}"
    ended = kit("run", "smoke", "--set", "cycles=50", "--out", disk / "run", around=around)
    assert ended.status == 3
    assert "records.jsonl: No space left on device; what was measured before is kept there" in ended.err
    assert len(kept(copy)) > 50
    assert json.loads((copy / "run.json").read_text())["status"] == "failed"
    assert "(partial)" in kit("show", copy).out
    assert kit("export", copy, "--to", tmp_path / "kept.csv").status == 0


def test_a_run_folder_that_is_read_only(kit: Kit, tmp_path: Path, next_world: None) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    for out in (folder, folder / "run"):
        ended = kit("run", "smoke", "--out", out, before=as_a_plain_user)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert "Permission denied" in ended.err
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_run_folder_that_becomes_read_only(kit: Kit, tmp_path: Path, next_world: None) -> None:
    folder = tmp_path / "run"
    (tmp_path / "mine.py").write_text(LOCKS.format(folder=str(folder)))
    words = ("run", "smoke", "--set", "cycles=2", "--set", "implementation=mine:Locks", "--out", folder)
    ended = kit(*words, before=as_a_plain_user)
    assert ended.status == 3
    assert f"cannot write {folder / 'verdict.json'}: Permission denied" in ended.err
    assert {row["cycle"] for row in kept(folder)} == {0, 1, 2}
    shown = kit("show", folder)
    assert "failed (partial)" in shown.out
    assert "pass  every_group_communicates" in shown.out
    folder.chmod(0o755)


@pytest.mark.slow
def test_a_torn_last_line(kit: Kit, tmp_path: Path, next_world: None) -> None:
    folder = tmp_path / "run"
    assert kit("run", "smoke", "--set", "cycles=1", "--out", folder).status == 0
    whole = len(kept(folder))
    records = folder / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-9])
    shown = kit("show", folder).out
    assert "finished (partial)" in shown
    assert f"note: records.jsonl: 1 unreadable line was dropped (line {whole})" in shown
    assert kit("export", folder, "--to", tmp_path / "kept.csv").status == 0
    assert len((tmp_path / "kept.csv").read_text().splitlines()) == whole  # heading, no torn line
    assert kit("trace", folder, "--to", tmp_path / "kept.json").status == 0
