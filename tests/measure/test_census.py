"""Open descriptors and similar resources are counted exactly."""

import os
import socket
import threading

import pytest
import torch.distributed as dist

from kit.measure import resource_counts


def test_descriptors_and_sockets_are_counted_exactly():
    before = resource_counts()
    left, right = socket.socketpair()
    reading, writing = os.pipe()
    now = resource_counts()
    assert (now.fds - before.fds, now.sockets - before.sockets) == (4, 2)
    left.close()
    right.close()
    os.close(reading)
    os.close(writing)
    assert (resource_counts().fds, resource_counts().sockets) == (before.fds, before.sockets)


def test_a_thread_is_counted_while_it_lives():
    leave = threading.Event()
    before = resource_counts().threads
    thread = threading.Thread(target=leave.wait)
    thread.start()
    assert resource_counts().threads == before + 1
    leave.set()
    thread.join()


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_groups_are_counted_until_destroyed(gloo):
    group = dist.new_group([0])
    assert resource_counts().groups == 2
    dist.destroy_process_group(group)
    assert resource_counts().groups == 1
