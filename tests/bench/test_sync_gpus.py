"""Syncs compared with ceilings, from made-up runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kit.labs.bench_sync import parts as sync
from kit.results import Row, Run, create_run

GPU = {sync.HOST: [0.05], sync.WITHIN: [0.001], sync.OUT: [0.005], sync.BACK: [0.004]}
PEER = f"{sync.PEER} 1"


@pytest.fixture
def run(tmp_path):
    """A made-up run of two versions of 2 x 256 MiB: the first takes 9 s, the second half a second."""
    writer = create_run(tmp_path, "sync", {"size": "tiny"}, {})
    for cycle, taken in ((1, 9.0), (2, 0.5)):
        rows = [("bytes", 2 * sync.BLOCK, {}), ("event", 1.0, {"event": "ready", "order": 0})]
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
        writer.append([Row(**about, metric=name, value=value, ids=ids) for name, value, ids in rows])
    writer.finish()
    return Run(writer.dir)


def test_the_first_version_is_not_reported_and_the_slower_copy_is_the_ceiling(run):
    beside, *plain = sync.beside_copies(run, "shm", GPU, same=True)
    assert list(beside.values) == [0.5]
    assert beside.ceiling == pytest.approx(2 * 0.005)
    assert beside.note.endswith(f"0.02 of {sync.OUT} at 53.69 GB/s")
    assert [row.what.rpartition(", ")[2] for row in plain] == list(GPU)


@pytest.mark.parametrize(
    ("name", "same", "copies"),
    [
        ("ipc", True, [sync.WITHIN]),
        ("broadcast", True, [sync.WITHIN]),
        ("broadcast", False, [PEER]),
        ("shm", False, [sync.OUT, sync.BACK]),
    ],
)
def test_each_transport_has_the_ceiling_of_its_way(name, same, copies):
    assert sync.ceiling_of(name, {**GPU, PEER: [0.002]}, same=same) == copies


def test_gpus_that_do_not_reach_each_other_go_through_the_host():
    assert sync.ceiling_of("broadcast", GPU, same=False) == [sync.OUT, sync.BACK]


def test_without_a_gpu_a_row_gives_the_reason():
    (samples,) = sync.gpu_transport(SimpleNamespace(device="cpu"), "ipc")
    assert (samples.what, len(samples.values)) == ("on GPUs: ipc", 0)
    assert samples.note == "not measured: the CPU was requested, or this machine has no GPU driver"
