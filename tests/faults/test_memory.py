"""Ranks in a control group with a limit on memory: a rank that the kernel kills for it is named, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import machine

GREEDY = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))  # from here on, in the group with the limit
from kit.errors import RankDied
from kit.world import World
with World(2, device="cpu", logs=sys.argv[2]) as world:
    try:
        world.run("kept = []\\nwhile rank == 1: kept.append(torch.ones(2**24))")
    except RankDied as error:
        print(error.rank, error.signal, str(error).splitlines()[-1])
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """The file of processes of a group that may use 2 GiB."""
    version, folders = machine._folders("memory", Path("/proc/self"))
    group = (folders[-1] if folders else Path("/nowhere")) / f"kit-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(2 * 2**30))
    except OSError as error:
        pytest.skip(f"this container cannot make control groups of memory: {error.strerror}")
    yield group / "cgroup.procs"
    group.rmdir()


@pytest.mark.slow
def test_a_rank_that_the_kernel_killed_for_memory(limited: Path, tmp_path: Path, nothing_left: None) -> None:
    command = [sys.executable, "-c", GREEDY, str(limited), str(tmp_path)]
    env = {**os.environ, "KIT_WAITING_AGENT": "off"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=env)
    group = "this control group, which may use 2.00 GiB"
    words = f"Out of memory: the kernel has killed a process of {group}; use fewer ranks or a smaller size"
    assert done.stdout.strip() == f"1 SIGKILL {words}"


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        (2, "memory.events", "low 0\nmax 7\noom 2\noom_kill 3\n"),
        (1, "memory.oom_control", "oom_kill_disable 0\noom_kill 3\n"),
    ],
)
def test_kills_are_counted_by_the_control_group(
    version: int, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_folders", lambda *_: (version, [tmp_path]))
    assert machine.oom_kills() is None
    (tmp_path / name).write_text(text)
    assert machine.oom_kills() == 3
