"""Segments are shared with other processes by descriptor only, keep their size, and count until descriptor and mapping are gone."""

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kit.errors import BadInput
from kit.machine import descriptors
from kit.sync.cache import Segment
from tests.holdings import memory_files

MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_left():
    before = len(memory_files()), descriptors()
    yield
    assert (len(memory_files()), descriptors()) == before


def forked(work):
    """Run `work` in a child process; return a function that waits for it and returns whether it succeeded."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_another_process_attaches_by_descriptor_and_both_see_what_is_written():
    here, there = socket.socketpair()
    before = len(memory_files())

    def other():
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
        with closing(Segment.attach(fds[0])) as segment:
            assert segment.size == 3 * MIB + 5
            assert segment.tensor[-1] == 7
            segment.tensor[0] = 9
            assert len(memory_files()) == before + 1
        assert len(memory_files()) == before

    with here, there:
        went_well = forked(other)  # before the segment exists: nothing is inherited
        with closing(Segment(3 * MIB + 5)) as segment:
            assert segment.tensor.dtype == torch.uint8
            assert not segment.tensor.any()
            segment.tensor[-1] = 7
            assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:kit-segment")
            socket.send_fds(here, [b"x"], [segment.fd])
            assert went_well()
            assert segment.tensor[0] == 9
            assert not list(Path("/dev/shm").glob("*kit-segment*"))


def test_closing_gives_memory_and_descriptor_back_and_twice_is_once():
    before = len(memory_files())
    segment = Segment(MIB)
    assert len(memory_files()) == before + 1
    segment.close()
    segment.close()
    assert segment.fd == -1
    assert len(memory_files()) == before
    with pytest.raises(BadInput, match="closed"):
        _ = segment.tensor
    segment.populate()


def test_a_view_that_is_still_held_keeps_bytes_and_is_counted():
    before = len(memory_files())
    segment = Segment(MIB)
    segment.tensor.fill_(3)
    view = segment.tensor[4096:8192].view(torch.int64)
    segment.close()
    assert len(memory_files()) == before + 1
    assert view[0] == 0x0303030303030303
    del view
    assert len(memory_files()) == before


def test_a_descriptor_that_was_forgotten_is_counted():
    before = len(memory_files())
    fd = os.memfd_create("somebody")
    assert len(memory_files()) == before + 1
    os.close(fd)
    assert len(memory_files()) == before


def test_nobody_can_cut_it_short():
    with closing(Segment(8192)) as segment:
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)


def test_populating_supplies_the_pages_and_keeps_what_is_in_them():
    with closing(Segment(16 * MIB)) as segment:
        segment.tensor[MIB] = 5
        assert os.fstat(segment.fd).st_blocks * 512 < 8 * MIB
        segment.populate()
        assert os.fstat(segment.fd).st_blocks * 512 == 16 * MIB
        assert segment.tensor[MIB] == 5


def test_what_cannot_be():
    with pytest.raises(BadInput, match="0 bytes is too small"):
        Segment(0)
    reading, writing = os.pipe()
    with pytest.raises(BadInput, match="no bytes to map"):
        Segment.attach(reading)
    with pytest.raises(OSError, match="bytes of shared memory failed"):
        Segment(2**62)
    os.close(reading)
    os.close(writing)
