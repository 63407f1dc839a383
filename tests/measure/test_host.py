"""Copies of host memory: every byte arrives for all thread counts and boundaries; pages are populated; no thread remains."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from kit.measure import host

MIB = 2**20


def places(tensor):
    return tensor.data_ptr(), tensor.nbytes


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("fresh", [True, False])
def test_every_byte_arrives(threads, fresh):
    # The largest is above 32 MiB: the C library maps it separately and frees it fully, so it does not disturb memory
    # tests here.
    sizes = [1, 511, 4096, 3 * MIB + 17, 8 * MIB, 37 * MIB + 5]
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    # A guard byte on either side shows that nothing beside a target is touched.
    targets = [torch.zeros(size + 2, dtype=torch.uint8) for size in sizes]
    moves = [host.Move(t.data_ptr() + 1, *places(s)) for s, t in zip(sources, targets, strict=True)]
    host.transfer(moves, fresh=fresh, threads=threads)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target[1:-1], source)
        assert target[0] == target[-1] == 0
    assert not [t for t in threading.enumerate() if t.name == "kit-copy"]


def test_nothing_to_move():
    host.transfer([], fresh=True, threads=2)


def test_populating_supplies_pages_and_keeps_what_is_in_them():
    size = 16 * MIB
    address = host.libc.mmap(None, size, 3, 0x22, -1, 0)
    assert address != host.MAP_FAILED
    view = (ctypes.c_ubyte * size).from_address(address)
    view[size // 2] = 7
    before = resident()
    host.populate(address, size)
    assert resident() - before >= size - 3 * MIB
    assert view[size // 2] == 7
    assert view[size - 1] == 0
    assert host.libc.munmap(address, size) == 0


def resident():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def test_large_pages_are_asked_for_where_targets_lie_close_together(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "huge_pages", lambda *given: asked.append(given))
    source, target = (torch.zeros(MIB, dtype=torch.uint8) for _ in range(2))
    near, far = target.data_ptr(), target.data_ptr() + MIB // 2
    moves = [host.Move(at, source.data_ptr(), size) for at, size in ((far, 4096), (near, 600), (near + 1024, 512))]
    host.transfer(moves, fresh=True, threads=1)
    assert [given for given in asked if given[1]] == [(near, 1536), (far, 4096)]


def test_a_rank_has_its_share_of_the_cores(monkeypatch):
    cores = set(range(8))
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: cores)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host.copy_threads() == 4
    for ranks, expected in (("2", 4), ("4", 2), ("8", 1), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert host.copy_threads() == expected
