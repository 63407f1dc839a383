"""Weights that are views of the sender's memory, copy on write: what a replica writes is its own, and nobody packs into memory that it
has, however it lets go."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kit.measure.phase import shared_at
from kit.sync.adopting import Adopting, is_adopted, let_go
from kit.sync.buckets import Destination, Layout, as_it_is, lay_out, specs_of
from kit.sync.cache import Cache, Segment
from kit.sync.link import Listener
from kit.sync.receiver import Call
from tests.holdings import memory_files, wait_for
from tests.sync.ranks.service import KINDS, LAYOUT, Host, nothing_kept, receiver_of, tensors
from tests.sync.test_service import Scene, failing, trouble

LIMIT_S = 10.0


class Adopter(Host):
    """A host whose weights become views where they can."""

    def weights(self) -> Any:
        places = {name: [(self.tensors[name, 0], as_it_is)] for name in KINDS}
        return Adopting(places, [*self.tensors.values()])

    def sleep(self) -> None:
        let_go([*self.tensors.values()])
        super().sleep()

    def adopted(self) -> set[str]:
        return {name for (name, _), tensor in self.tensors.items() if is_adopted(tensor)}

    def homes(self) -> set[Any]:
        return {shared_at(tensor.data_ptr()) for tensor in self.tensors.values() if is_adopted(tensor)}


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Two receivers that adopt, `r1` and `r2`."""
    with nothing_kept(), Listener() as listener:
        made = Scene(listener)
        made.sender.transport = "shm"
        made.hosts = {"r1": Adopter(), "r2": Adopter()}
        made.receivers = {
            name: receiver_of(name, host, listener.address, adopts=True) for name, host in made.hosts.items()
        }
        yield made
        for host in made.hosts.values():
            let_go([*host.tensors.values()])
        made.sender.cache.close()


def test_every_version_is_adopted_whole_and_two_segments_are_enough(scene: Scene) -> None:
    hosts, seen = [*scene.hosts.values()], set()
    for version in range(1, 7):
        scene.works(version)
        assert [host.adopted() for host in hosts] == [{*KINDS}] * 2
        (home,) = hosts[0].homes() | hosts[1].homes()
        seen.add(home)
        assert scene.sender.cache.copies <= 2
    assert len(seen) == 2


def test_what_a_replica_writes_reaches_nobody(scene: Scene) -> None:
    scene.works(1)
    for tensor in scene.hosts["r1"].tensors.values():
        tensor.zero_()
    assert scene.hosts["r2"].has(1)
    scene.hosts["r2"].sleep()
    scene.works(1, "asleep", "r2", gather=None)  # from the sender's copy
    scene.works(2)


def test_a_replica_that_stays_behind_keeps_its_version(scene: Scene) -> None:
    """Its memory is given up, not packed into; when it moves on, two segments are enough again."""
    scene.works(1)
    for version in range(2, 5):
        scene.works(version, "serving", "r2")
        assert scene.hosts["r1"].has(1)
        assert scene.sender.cache.copies <= 2
    scene.works(5)
    assert len(memory_files()) <= 2 * 2  # each by its descriptor or a mapping


def test_a_sync_that_fails_puts_the_old_views_back(scene: Scene) -> None:
    scene.works(1)
    before = scene.hosts["r2"].homes()
    for step in ("apply", "finalize"):
        scene.receivers["r2"].calls = failing(step, trouble, after=True)
        scene.fails(2)
        assert scene.hosts["r2"].homes() == before
    scene.receivers["r2"].calls = failing("activate", trouble)  # version 2 is active, and r2 goes back alone
    scene.sync(2)
    assert scene.hosts["r1"].has(2)
    assert scene.hosts["r2"].has(1)
    assert scene.hosts["r2"].homes() == before
    scene.receivers["r2"].calls = Call
    scene.works(3)


def test_a_replica_that_sleeps_lets_go(scene: Scene) -> None:
    scene.works(1)
    segment = scene.sender.cache.segment(1)
    assert segment.adopted
    for host in scene.hosts.values():
        host.sleep()
    assert not segment.adopted
    scene.works(1, "asleep", gather=None)
    assert segment.adopted


def test_what_cannot_be_a_view_is_copied(scene: Scene) -> None:
    """Over another transport everything is."""
    scene.sender.transport = "serialize"
    scene.works(1)
    assert [host.adopted() for host in scene.hosts.values()] == [set()] * 2
    scene.sender.transport = "shm"
    scene.works(2)
    scene.sender.transport = "serialize"
    scene.works(3)  # into the private pages of version 2
    scene.sender.transport = "shm"
    scene.works(4)


def test_a_replica_that_is_killed_holds_nothing() -> None:
    with nothing_kept():
        segment = Segment(4096)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                adopted = Segment.adopt(os.dup(segment.fd))
                weight = adopted.tensor[:8]
                adopted.close()
                os.write(write, b"1" if len(weight) else b"0")
                signal.pause()
            os._exit(1)
        try:
            assert os.read(read, 1) == b"1"
            assert segment.adopted
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            os.close(write)
        assert not segment.adopted
        segment.close()


def test_memory_that_is_adopted_is_not_packed_into() -> None:
    with nothing_kept():
        cache = Cache(LAYOUT, timeout_s=LIMIT_S)
        cache.build(1, tensors(1))
        cache.activate(1)
        adopted = Segment.adopt(os.dup(cache.segment(1).fd))
        was = adopted.tensor.clone()
        for version in range(2, 6):
            cache.build(version, tensors(version))
            cache.activate(version)
            assert cache.copies <= 2
        assert torch.equal(adopted.tensor, was)
        adopted.close()
        cache.close()
        assert wait_for(lambda: not memory_files())


# -- which weights can be views --------------------------------------------------------------------------------------------

ROWS = 8


def full(names: str, rows: int = ROWS) -> dict[tuple[str, int], torch.Tensor]:
    return {(name, 0): torch.full((rows, 64), float(number)) for number, name in enumerate(names)}


def adopted_from(layout: Layout, sent: Any, weight: torch.Tensor, places: dict[str, list[Destination]]) -> bool:
    """Apply a version; the weight must be right, whether it is a view or a copy."""
    cache = Cache(layout, timeout_s=LIMIT_S)
    cache.build(1, sent)
    segment = Segment.adopt(os.dup(cache.segment(1).fd))
    weights = Adopting(places, [weight]).adopt(layout)
    for index, (start, size) in enumerate(zip(cache.starts, layout.sizes, strict=True)):
        weights.apply(index, segment.tensor[start : start + size])
    segment.close()
    found = is_adopted(weight)
    for name, several in places.items():
        for into, take in several:
            now = weight.as_strided(into.shape, into.stride(), into.storage_offset())
            assert torch.equal(now, take(sent[name, 0]))
    let_go([weight])
    cache.close()
    return found


HALVES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda full: full[: ROWS // 2],
    lambda full: full[ROWS // 2 :],
)


@pytest.mark.parametrize("bucket", [2**20, 4096, 1024])
def test_a_weight_is_a_view_where_its_bytes_lie_as_in_the_memory(bucket: int) -> None:
    """4096 bytes: each bucket ends with a tensor's rows. 1024: it leaves a gap to the next page."""
    sent = full("ab", rows=16)
    layout = lay_out(specs_of(sent), bucket, oversize="split")
    joined = torch.zeros(32, 64)
    places: dict[str, list[Destination]] = {"a": [(joined[:16], as_it_is)], "b": [(joined[16:], as_it_is)]}
    assert adopted_from(layout, sent, joined, places) == (bucket != 1024)
    turned = torch.zeros(32, 64)
    places = {"a": [(turned[16:], as_it_is)], "b": [(turned[:16], as_it_is)]}
    assert not adopted_from(layout, sent, turned, places)


def test_shards_are_views_by_rows_and_copies_by_columns_or_interleaved() -> None:
    sent = full("ab")
    layout = lay_out(specs_of(sent), 2**20)
    rows = torch.zeros(ROWS // 2, 64)
    assert adopted_from(layout, sent, rows, {"a": [(rows, HALVES[1])], "b": []})
    columns = torch.zeros(ROWS, 32)
    assert not adopted_from(layout, sent, columns, {"a": [(columns, lambda full: full[:, :32])], "b": []})
    groups = torch.zeros(2 * ROWS, 64)
    by_group = groups.view(2, 2, ROWS // 2, 64)
    interleaved: dict[str, list[Destination]] = {
        name: [(by_group[:, number], lambda full: full.view(2, ROWS // 2, 64))] for number, name in enumerate("ab")
    }
    assert not adopted_from(layout, sent, groups, interleaved)
    half = torch.zeros(2 * ROWS, 64)  # the other half is filled by nobody
    assert not adopted_from(layout, sent, half, {"a": [(half[:ROWS], as_it_is)], "b": []})
