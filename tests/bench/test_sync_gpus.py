"""Syncs beside ceilings: on real ranks over the CPU's transports; what a GPU would add is made up here and says so."""

from __future__ import annotations

import pytest

from kit.bench.session import Book, Session
from kit.bench.sync import gpus
from kit.results import Record, Run, create_run

GPU = {gpus.HOST: [0.05], gpus.WITHIN: [0.001], gpus.OUT: [0.005], gpus.BACK: [0.004]}
PEER = f"{gpus.PEER} 1"


@pytest.mark.slow
def test_versions_of_a_lab_stand_beside_the_ceiling_of_the_same_ranks(tmp_path, nothing_left):
    rows = gpus.by_transport(Session("cpu", tmp_path, Book("sync")), "shm", model="tiny", cycles=2)
    sync, plain = rows
    assert (sync.n, plain.n) == (2, gpus.ROUNDS)
    assert sync.median > sync.ceiling > 0
    assert "of memcpy at" in sync.note
    assert (plain.who, plain.what) == ("plain copy", "shm: 256 MiB, memcpy")


@pytest.fixture
def run(tmp_path):
    """Two versions of 2 x 256 MiB, made up: the first in 9 s, the second in half a second."""
    writer = create_run(tmp_path, "sync", {"size": "tiny"}, {})
    for cycle, taken in ((1, 9.0), (2, 0.5)):
        rows = [("bytes", 2 * gpus.BLOCK, {}), ("event", 1.0, {"event": "ready", "order": 0})]
        rows += [("event", 1.0 + taken, {"event": "apply", "order": 1})]
        about = {
            "run": writer.id,
            "lab": "sync",
            "cycle": cycle,
            "phase": "refresh",
            "rank": 0,
            "unit": "",
            "time": 1.0,
        }
        writer.append([Record(**about, metric=name, value=value, ids=ids) for name, value, ids in rows])
    writer.finish()
    return Run(writer.dir)


def test_the_first_version_is_not_told_and_the_slower_copy_is_the_ceiling(run):
    sync, *plain = gpus.told(run, "shm", GPU, same=True)
    assert (sync.n, sync.median) == (1, 0.5)
    assert sync.ceiling == pytest.approx(2 * 0.005)
    assert sync.note.endswith(f"0.02 of {gpus.OUT} at 53.69 GB/s")
    assert [row.what.rpartition(", ")[2] for row in plain] == list(GPU)


@pytest.mark.parametrize(
    ("name", "same", "copies"),
    [
        ("ipc", True, [gpus.WITHIN]),
        ("broadcast", True, [gpus.WITHIN]),
        ("broadcast", False, [PEER]),
        ("shm", False, [gpus.OUT, gpus.BACK]),
    ],
)
def test_each_transport_has_the_ceiling_of_its_way(name, same, copies):
    assert gpus.ceiling_of(name, {**GPU, PEER: [0.002]}, same=same) == copies


def test_gpus_that_do_not_reach_each_other_go_through_the_host():
    assert gpus.ceiling_of("broadcast", GPU, same=False) == [gpus.OUT, gpus.BACK]


def test_without_a_gpu_a_row_gives_the_reason(tmp_path):
    (row,) = gpus.rows(Session("cpu", tmp_path, Book("sync")), "ipc", model="tiny", cycles=1)
    assert (row.what, row.median) == ("on GPUs: ipc", None)
    assert row.note == "not measured: the CPU was asked for, or this machine has no GPU driver"
