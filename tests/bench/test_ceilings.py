"""Ceilings and turns: real copies on the CPU, and on a GPU if there is one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from kit.labs.bench_sync.ranks import ways as sync
from kit.measure.turns import order, turn_by_turn

MIB = 2**20


def test_the_host_has_one_ceiling():
    seen = sync.ceiling_copies(size=MIB, rounds=3, device="cpu")
    assert {name: len(taken) for name, taken in seen.items()} == {"memcpy": 3}
    assert all(taken > 0 for taken in seen["memcpy"])


def test_a_copy_is_a_copy(monkeypatch):
    copied = []
    monkeypatch.setattr(sync.host.libc, "memcpy", lambda target, source, size: copied.append((target, source, size)))
    sync.host_copy(MIB)()
    ((target, source, size),) = copied
    assert target != source
    assert size == MIB


def test_works_take_turns_and_the_first_is_not_counted():
    done = []
    works = {"a": lambda: done.append("a"), "b": lambda: done.append("b")}
    seen = turn_by_turn(list(works), 2, lambda name, _: works[name]() or 1.0)
    assert [sorted(turn) for turn in (done[:2], done[2:4], done[4:])] == [["a", "b"]] * 3
    assert [len(taken) for taken in seen.values()] == [2, 2]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_turns_are_dealt_evenly(count):
    orders = [order(count, turn) for turn in range(count)]
    for place in range(count):
        assert sorted(one[place] for one in orders) == list(range(count))
    following = Counter(pair for one in orders for pair in itertools.pairwise(one))
    assert following == dict.fromkeys(itertools.permutations(range(count), 2), 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_copies_within_itself_and_to_pinned_memory():
    works = sync.gpu_copies(torch.device("cuda", 0), MIB)
    assert {sync.WITHIN, sync.OUT, sync.BACK} <= set(works)
    seen = sync.ceiling_copies(size=256 * MIB, rounds=3, device="cuda:0")
    assert min(seen[sync.OUT]) > min(seen[sync.WITHIN])
