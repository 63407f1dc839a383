"""Both ends check the same tensors, others with each version; differences are named by bucket and tensor; no thread is left."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from kit.errors import BadInput
from kit.sync import hashes
from kit.sync.buckets import Bound, Layout, Mismatch, lay_out, live, specs_of
from kit.sync.hashes import Digests
from kit.sync.receiver import wrong_bytes
from tests.sync.ranks.service import KINDS, LAYOUT, Tensors, tensors


@pytest.fixture(params=[1, 2], ids=["at once", "on a thread"], autouse=True)
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The cores of this rank: with a second one digests have a thread."""
    monkeypatch.setattr(hashes, "copy_threads", lambda: request.param)
    return int(request.param)


def packed(layout: Layout, source: Tensors) -> list[torch.Tensor]:
    made = [torch.zeros(size, dtype=torch.uint8) for size in layout.sizes]
    for index, buffer in enumerate(made):
        Bound(layout, source).pack(index, buffer)
    return made


def ends(version: int, share: float, algorithm: str = "xxh3") -> tuple[Digests, Digests]:
    return Digests(LAYOUT, version, algorithm=algorithm, share=share), Digests(
        LAYOUT, version, algorithm=algorithm, share=share
    )


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.01])
def test_live_tensors_and_what_arrived_have_the_same_digests(share: float, algorithm: str) -> None:
    """bf16, fp8 and split tensors are included; the table is what goes over a link."""
    counts = set()
    for version in range(1, 30):
        source = tensors(version)
        sender, receiver = ends(version, share, algorithm)
        for index, buffer in enumerate(packed(LAYOUT, source)):
            sender.add(index, live(LAYOUT, index, source))
            receiver.add_packed(index, buffer)
        assert receiver.differences(LAYOUT, sender.table()) == []
        assert sender.count == receiver.count
        counts.add(sender.count)
        sender.close()
        receiver.close()
    assert counts == {len(KINDS)} if share == 1 else len(counts) > 1 or counts == {0, 1}
    assert max(counts) >= 1  # even a small share covers some tensor over the versions


def test_over_many_versions_a_share_covers_every_tensor_about_equally_often() -> None:
    source = {(f"layer {number}", 0): torch.full((8,), float(number)) for number in range(40)}
    layout = lay_out(specs_of(source), 2048)
    looked_at: Counter[str] = Counter()
    versions, share = 100, 0.2
    for version in range(versions):
        digests = Digests(layout, version, algorithm="xxh3", share=share)
        for index in range(len(layout.buckets)):
            digests.add(index, live(layout, index, source))
        looked_at.update(name for _, name in digests.differences(layout, {}))
        digests.close()
    assert len(looked_at) == len(source)
    assert all(share / 3 < count / versions < 3 * share for count in looked_at.values())


def test_one_changed_bit_is_found_wherever_it_is_looked_for() -> None:
    """The bit changes in each piece in turn, also in each piece of a tensor that spans several buckets."""
    source = tensors(1)
    for index, bucket in enumerate(LAYOUT.buckets):
        for piece in bucket:
            buffers = packed(LAYOUT, source)
            buffers[index][piece.offset + piece.size - 1] ^= 1
            sender, receiver = ends(1, 1.0)
            for number, buffer in enumerate(buffers):
                sender.add(number, live(LAYOUT, number, source))
                receiver.add_packed(number, buffer)
            assert receiver.differences(LAYOUT, sender.table()) == [(index, LAYOUT.specs[piece.spec].name)]
            sender.close()
            receiver.close()


def test_the_first_bucket_is_named_with_its_own_tensors() -> None:
    assert wrong_bytes([(2, "a"), (2, "b")]) == "bucket 2 differs from what was sent: a, b"
    bucket, same = (int("300") for _ in range(2))  # Python keeps no numbers that large
    assert wrong_bytes([(bucket, "a"), (same, "b")]) == "bucket 300 differs from what was sent: a, b"
    assert wrong_bytes([(0, "a"), (1, "a")]) == "bucket 0 differs from what was sent: a; so does bucket 1"
    many = [(0, "a"), (0, "b"), (0, "c"), (0, "d"), (1, "e"), (2, "f"), (3, "g"), (4, "h")]
    assert wrong_bytes(many) == "bucket 0 differs from what was sent: a, b, c and 1 more; so do buckets 1, 2, 3, ..."


def test_a_table_that_is_short_or_empty_differs() -> None:
    source = tensors(1)
    sender, receiver = ends(1, 1.0)
    for index in range(len(LAYOUT.buckets)):
        receiver.add(index, live(LAYOUT, index, source))
    every = [(index, LAYOUT.specs[piece.spec].name) for index, row in enumerate(LAYOUT.buckets) for piece in row]
    assert receiver.differences(LAYOUT, sender.table()) == every
    short = receiver.table()
    short["0"] = short["0"][:-1]
    assert receiver.differences(LAYOUT, short) == [every[len(LAYOUT.buckets[0]) - 1]]
    sender.close()
    receiver.close()


def test_nothing_is_looked_at_where_nothing_is_wanted() -> None:
    mine, theirs = ends(1, 1.0, "none")
    mine.add(0, live(LAYOUT, 0, tensors(1)))
    assert (mine.table(), mine.count) == ({}, 0)
    assert mine.differences(LAYOUT, theirs.table()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kit-digests")]


def test_a_share_of_a_core_hashes_at_once(cores: int) -> None:
    """Bytes that change after the call count only where a thread reads them later, which `wait` ends."""
    buffer, *_ = packed(LAYOUT, tensors(1))
    digests, other = ends(1, 1.0)
    digests.add_packed(0, buffer)
    digests.wait(0)
    other.add_packed(0, buffer)
    other.wait(0)
    assert digests.table() == other.table()
    assert any(thread.name.startswith("kit-digests") for thread in threading.enumerate()) == (cores > 1)
    digests.close()
    other.close()


def test_its_thread_ends_with_it_also_where_hashing_raises() -> None:
    source = tensors(1)
    digests, _ = ends(1, 1.0)
    source["small", 0].untyped_storage().resize_(0)
    digests.add(0, live(LAYOUT, 0, source))
    with pytest.raises(BadInput, match="without bytes"):
        digests.table()
    digests.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kit-digests")]


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(BadInput, match=r"verify=md5 is not available on this rank: use none, xxh3, sha256"):
        Digests(LAYOUT, 1, algorithm="md5")
    gone = {key: tensor for key, tensor in tensors(1).items() if key[0] != "small"}
    with pytest.raises(Mismatch, match=r"bucket 0: small \(shard 0\) is missing"):
        live(LAYOUT, 0, gone)
