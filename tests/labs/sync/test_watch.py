"""The lab's own observers: a forward that is attempted waits or gives logits, writers that do not wait are counted, all bytes are
hashed."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit import machine
from kit.engines.contents import sha256
from kit.labs.sync.lab import SyncConfig
from kit.labs.sync.ranks.trainer import SyncTrainer, bytes_in_pages
from kit.labs.sync.ranks.watch import (
    WAITS,
    Forward,
    Forwards,
    SeenTransport,
    SyncWatch,
    judge_forwards,
    known_logits,
    logits_of,
)
from kit.measure.phase import shared_memory
from kit.sync.buckets import lay_out, specs_of
from kit.sync.cache import Segment, starts
from kit.sync.serving import Serving
from tests.holdings import wait_for

LONG = 10.0


class Scene:
    """A serving replica with one weight."""

    def __init__(self) -> None:
        self.weight = torch.zeros(4)
        self.receiver: Any = SimpleNamespace(version=1, routed=True)
        self.forwards = Forwards(self.logits, [torch.zeros(1)], lambda: self.receiver, LONG)
        self.serving = Serving(self.forwards, timeout_s=LONG)
        self.watch = SyncWatch(lambda: self.receiver.version, lambda: self.receiver.routed, self.forwards, self.serving)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight + tokens


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    made.serving.start()
    yield made
    made.serving.stop()


def test_an_attempt_gives_logits_or_waits(scene: Scene) -> None:
    assert scene.forwards.attempt(LONG) == logits_of(0, torch.zeros(4))
    with scene.forwards.writer(scene.serving.writing(), serves=True):
        assert scene.forwards.attempt() == WAITS
        scene.weight = torch.ones(4)
    assert scene.forwards.attempt(LONG) == logits_of(0, torch.ones(4))
    assert scene.forwards.overlaps == 0


def test_a_writer_that_does_not_wait_for_a_forward_is_counted(scene: Scene) -> None:
    with scene.forwards.writer(contextlib.nullcontext(), serves=True):
        assert scene.forwards.overlaps == 1
        assert scene.forwards.attempt(LONG) == logits_of(0, torch.zeros(4))  # nothing keeps it from running


def test_nobody_serves_and_an_attempt_waits() -> None:
    assert Scene().forwards.attempt() == WAITS


@pytest.mark.slow
def test_a_forward_that_raises_is_not_inside_any_more(scene: Scene) -> None:
    def broken(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such token")

    scene.forwards.forward = broken
    assert scene.forwards.attempt() == WAITS or scene.forwards.attempt() == WAITS
    with pytest.raises(Exception, match="no such token"):
        scene.serving.stop()


def test_points_hold_version_route_and_the_forward(scene: Scene) -> None:
    scene.watch.known[1] = known_logits([torch.zeros(4)])
    scene.watch.point("verify")
    scene.receiver.version, scene.receiver.routed, scene.weight = 2, False, torch.ones(4)
    scene.forwards.attempt(LONG)
    scene.watch.point("write", 3)
    records: list[Any] = []
    scene.watch.record(SimpleNamespace(record=lambda *given, **ids: records.append((given, ids))))  # type: ignore[arg-type]
    (first, one), (_, two) = records
    assert first[0] == "point"
    assert (one["point"], one["version"], one["routed"], one["forward"]) == ("verify", 1, 1, "version 1")
    assert (two["point"], two["bucket"], two["version"], two["routed"], two["forward"]) == (
        "write",
        3,
        2,
        0,
        "no version",
    )


@pytest.mark.parametrize(
    ("made", "torn", "mislabelled"),
    [
        ("o1 o1 n2 n2", 0, 0),
        ("o1 x1 n2", 1, 0),
        ("o1 n2 o2", 1, 1),
        ("o1 n1 n2", 0, 1),
        ("o1 o2", 0, 1),
        ("o1 n2 s2", 1, 1),
        ("o1 N2 n2 O2", 1, 1),
        ("O1 n2 X2", 1, 0),
        ("b1 o1 n2 b2", 0, 0),
        ("b2 n2 b2 o2", 1, 1),
        ("o1 b2 O1 n2", 0, 0),
    ],
)
def test_forwards_are_judged_by_logits_and_by_label(made: str, torn: int, mislabelled: int) -> None:
    """Each version has logits for prompts; `b` is a prompt for which two versions have the same."""
    forwards = Scene().forwards
    forwards.made = {n: Forward(one[0], (int(one[1]), int(one[1])), True) for n, one in enumerate(made.split())}
    known = {0: frozenset("sS"), 1: frozenset("oOb"), 2: frozenset("nNb")}
    found = judge_forwards(forwards, known, known[1], known[2])
    assert (found.served, found.torn, found.mislabelled) == (len(made.split()), torn, mislabelled)


def test_weights_that_are_written_without_a_version_are_not_torn_by_that() -> None:
    forwards = Scene().forwards
    forwards.made = {n: Forward(logits, (1, 1), True) for n, logits in enumerate("oon")}
    assert judge_forwards(forwards, {1: frozenset("n")}, frozenset("o"), frozenset("n")).torn == 0
    forwards.made[1] = Forward("x", (1, 1), True)
    assert judge_forwards(forwards, {1: frozenset("n")}, frozenset("o"), frozenset("n")).torn == 1


def test_nobody_is_routed_to_a_forward_that_does_not_count() -> None:
    forwards = Scene().forwards
    forwards.made = {0: Forward("rubbish", (1, 1), False)}
    assert judge_forwards(forwards, {1: frozenset("o"), 2: frozenset("n")}, frozenset("o"), frozenset("n")) == (0, 0, 0)


def test_prompts_take_turns_and_an_answer_belongs_to_its_prompt(scene: Scene) -> None:
    scene.forwards.prompts = [torch.zeros(1), torch.ones(1)]
    seen: set[str] = set()
    assert wait_for(lambda: bool(seen.add(scene.forwards.attempt(LONG)) or len(seen) == 2))
    assert known_logits(scene.forwards.at_rest()) == {logits_of(0, torch.zeros(4)), logits_of(1, torch.ones(4))}
    assert seen == known_logits(scene.forwards.at_rest())
    assert logits_of(1, torch.zeros(4)) not in known_logits(scene.forwards.at_rest())


@pytest.mark.parametrize("is_asleep", [False, True])
def test_the_thread_of_a_forward_at_rest_is_gone_afterwards(is_asleep: bool) -> None:
    """Also for the system, which counts threads: a thread that was joined may still be there, one time in four."""
    forwards, ran_on = Scene().forwards, []

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        ran_on.append(threading.get_native_id())
        if is_asleep:
            raise ValueError("the engine sleeps")
        return tokens

    forwards.forward = forward
    for _ in range(100):
        with pytest.raises(ValueError, match="sleeps") if is_asleep else contextlib.nullcontext():
            forwards.at_rest()
        assert not machine.has_thread(ran_on[-1])


@pytest.mark.parametrize(
    ("served", "count"), [("abc", 0), ("ab", 1), ("abcc", 1), ("abb", 1), ("bac", 2), ("", 3), ("bc", 3)]
)
def test_every_request_gets_one_answer_its_own(served: str, count: int) -> None:
    forwards = Scene().forwards
    forwards.made = {n: Forward("", (1, 1), True, answer) for n, answer in enumerate("abc")}
    assert forwards.wrong_answers(served) == count


def test_every_byte_the_shape_and_the_dtype_are_hashed() -> None:
    one = torch.arange(6, dtype=torch.int32)
    other = one.clone()
    other[5] += 1
    seen = [one, other, one.flip(0), one.view(2, 3), one.view(torch.float32), one.to(torch.int64)]
    assert len({sha256(each) for each in seen}) == len(seen)
    assert sha256(one.view(2, 3).t().contiguous().t()) == sha256(one.view(2, 3))
    assert sha256(torch.zeros(())) == sha256(torch.zeros(()))
    storage = one.untyped_storage()
    storage.resize_(0)  # this would raise if numpy had seen the storage's bytes


class Sends:
    """A transport that sends nothing."""

    def send(self, index: int, buffer: torch.Tensor) -> None: ...


def test_copies_of_versions_are_known_by_what_is_sent_from_them() -> None:
    """The cache is not asked; another segment of the same kind, from which nothing is sent, does not count as a copy."""
    with closing(Segment(8192)) as copy, closing(Segment(8192)):
        before = shared_memory()
        watch = SyncWatch(lambda: 0)
        transport = SeenTransport(Sends(), watch)
        transport.send(0, copy.tensor[4096:])
        transport.send(1, torch.zeros(8, dtype=torch.uint8))
        (home,) = watch.homes
        assert home[1] == os.fstat(copy.fd).st_ino
        assert home in before


@pytest.mark.parametrize(("refresh", "allowed"), [("staged", 2), ("paused", 1)])
def test_the_sender_keeps_copies_of_versions_and_nothing_else(refresh: str, allowed: int) -> None:
    """The cache's own count is not used. A name that was held in a sync and still exists counts as left behind."""
    config = SyncConfig(refresh=refresh, placement="apart", ranks=4, replicas=2)  # type: ignore[arg-type]
    side = SyncTrainer.__new__(SyncTrainer)  # counting needs no ranks
    side.config, side.watch, side.named = config, SyncWatch(lambda: 0), set()
    before = side.held()
    segments = [Segment(4096) for _ in range(4)]
    for segment in segments[:3]:
        SeenTransport(Sends(), side.watch).send(0, segment.tensor)
    assert len(side.held() - before) == 4 - allowed
    for segment in segments[allowed:]:
        segment.close()
    assert side.held() == before
    named = Path(f"/dev/shm/kit-{secrets.token_hex(4)}")
    side.named = {str(named)}
    assert side.held() == before
    named.touch()
    assert side.held() - before == side.named
    named.unlink()
    for segment in segments[:allowed]:
        segment.close()


@pytest.mark.parametrize("size", [512, 1024, 40960])
def test_pages_that_buckets_leave_unfilled_are_no_copy(size: int) -> None:
    """The kit's memory for a version is one copy, however small its buckets are."""
    made = lay_out(specs_of({(str(number), 0): torch.zeros(128) for number in range(80)}), size)
    assert bytes_in_pages(made.sizes) == starts(made.sizes)[1]


def test_attempts_come_from_any_thread(scene: Scene) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(scene.forwards.attempt(LONG))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert found == [logits_of(0, torch.zeros(4))] * 3
