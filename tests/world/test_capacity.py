"""What a machine can carry, with the arithmetic."""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path

import pytest

from kit import machine
from kit.errors import BadInput
from kit.world import World, asked

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
    """A job of a batch system, whose group lies below the mount: 4 GiB allowed, 3.9 charged, 3 of them pages of files."""
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
    """Threads of all Worlds, and whatever else the user runs, are in use."""
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
