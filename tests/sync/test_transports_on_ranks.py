"""Transports between real ranks: in one World, in two, and in processes of which one is killed. Nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kit.world import World

ROOT = Path(__file__).parents[2]
RANKS = "tests.sync.ranks.transports"
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def kinds(*often: str, slow: tuple[str, ...]) -> list[Any]:
    return [*often, *(pytest.param(kind, marks=pytest.mark.slow) for kind in slow)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(4, device="cpu", env=ENV, logs=tmp_path_factory.mktemp("logs")) as made:
        yield made


def sync(world: World, ranks: list[int], **about: Any) -> list[Any]:
    """Return the results of sender and receivers, in this order."""
    (address,) = world.call(f"{RANKS}:listen", ranks=[ranks[0]])
    message = world.call(f"{RANKS}:sync", address=address, part=ranks, **about)
    return [message[rank] for rank in ranks]


@pytest.mark.parametrize("kind", ["shm", "broadcast", "per-tensor", "rendezvous", "serialize"])
@pytest.mark.parametrize("ranks", [[0, 1], [2, 0, 3]], ids=str)
def test_every_byte_arrives_and_nothing_is_left(world: World, kind: str, ranks: list[int]) -> None:
    """The sync runs twice: a second group of the same ranks must not meet traces of the first."""
    for _ in range(2):
        sender, *receivers = sync(world, ranks, kind=kind)
        assert (sender["error"], sender["left"]) == (None, {})
        for receiver in receivers:
            assert (receiver["error"], receiver["left"], receiver["differ"]) == (None, {}, [])


@pytest.mark.parametrize("kind", kinds("shm", slow=("broadcast", "per-tensor", "rendezvous", "serialize")))
def test_a_receiver_that_stalls_is_named_in_time_and_nothing_is_left(world: World, kind: str) -> None:
    sender, victim, _ = message = sync(world, [0, 1, 2], kind=kind, stalls=2, deadline_s=2.0)
    name, words, peer = sender["error"]
    assert (name, peer) == ("PeerSilent", "receiver 2"), words
    if kind in {"broadcast", "per-tensor", "rendezvous"}:
        assert "over group kit-sync-" in words
        assert "(with receiver 1, receiver 2" in words
    assert sender["seconds"] < 10
    assert victim["error"] is None or victim["error"][0].startswith("Peer"), victim["error"]
    assert [each["left"] for each in message] == [{}] * 3
    assert sync(world, [0, 1, 2], kind=kind)[2]["differ"] == []  # the next sync works normally


def test_the_whole_world_is_refused(world: World) -> None:
    for rank in sync(world, [0, 1, 2, 3], kind="broadcast", deadline_s=2):
        assert rank["error"][:2] == [
            "BadInput",
            "broadcast needs at least one rank outside the sync group: 4 of 4 ranks are the whole World",
        ]
        assert rank["left"] == {}


@pytest.mark.parametrize("kind", kinds("rendezvous", slow=("shm", "serialize")))
def test_two_worlds(world: World, kind: str, tmp_path: Path) -> None:
    """The sender and one receiver are in one World, the other receiver is in another, whose ranks count from 4 on."""
    with World(1, device="cpu", env=ENV, logs=tmp_path) as other, ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            (address,) = world.call(f"{RANKS}:listen", ranks=[1])
            about = {"kind": kind, "address": address, "part": [1, 3, 4]}
            here = pool.submit(world.call, f"{RANKS}:sync", **about)
            there = pool.submit(other.call, f"{RANKS}:sync", offset=4, **about)
            message = [*here.result(), *there.result()]
            assert [each["left"] for each in message if each] == [{}] * 3
            assert [each.get("differ") for each in message] == [None, None, None, [], []]


@pytest.mark.parametrize("kind", kinds(slow=("broadcast", "shm", "rendezvous", "serialize")))
def test_a_receiver_that_is_killed_is_named(kind: str, tmp_path: Path) -> None:
    """Four processes without torchrun, which would end all when one is killed: ranks 0 to 2 take part, and rank 2 is killed half-way."""
    command = [sys.executable, "-m", RANKS]
    started = [
        subprocess.Popen([*command, str(rank), "4", str(tmp_path), kind], cwd=ROOT, env=os.environ | ENV)
        for rank in range(4)
    ]
    try:
        assert [process.wait(60) for process in started] == [0, 0, -9, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    good, sender = (json.loads((tmp_path / f"rank0-{attempt}.json").read_text()) for attempt in range(2))
    victim = json.loads((tmp_path / "rank1-1.json").read_text())
    assert good["error"] is None
    name, words, peer = sender["error"]
    assert (name, peer) == ("PeerGone", "receiver 2"), words
    assert victim["error"] is None or victim["error"][0] in {"PeerGone", "PeerFailed"}, victim["error"]
    for rank in (sender, victim):
        assert rank["seconds"] < 10  # the deadline is 20 s
        # The World's own connection to the dead rank is gone, so there may be fewer descriptors and sockets.
        assert all(count < 0 and what in {"fds", "sockets"} for what, count in rank["left"].items()), rank["left"]
