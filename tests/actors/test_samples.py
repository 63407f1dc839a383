"""Replicas send whole samples straight to the trainer, and a missing sample is named."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit.actors.samples import Inbox, Key, Outbox, SampleRow
from kit.errors import KitError
from kit.sync.link import Listener, address_of


def row(group: int, sample: int = 0, attempt: int = 0, replica: str = "replica 0") -> SampleRow:
    return SampleRow(
        group=group,
        sample=sample,
        attempt=attempt,
        replica=replica,
        prompt=(1, 2),
        answer=(3, 4, 5),
        logprobs=(-0.1, -2.5e-8, -1 / 3),
        versions=(0, 0, 1),
        minimum=2,
        reward=0.1,
    )


@pytest.fixture
def ends() -> Iterator[tuple[Inbox, Outbox, Outbox]]:
    name = f"kit-test-{secrets.token_hex(8)}"
    inbox = Inbox(Listener(name=name), 5.0)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(Outbox, address_of(name), replica, 5.0) for replica in ("replica 0", "replica 1")]
        inbox.accept(["replica 0", "replica 1"])
        one, other = (each.result() for each in calls)
    yield inbox, one, other
    one.close()
    other.close()
    inbox.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("rows of")]


def test_samples_arrive_bit_for_bit_in_the_order_that_is_asked_for(ends: tuple[Inbox, Outbox, Outbox]) -> None:
    inbox, one, other = ends
    one.send(row(7))
    other.send(row(3, 1, replica="replica 1"))
    assert inbox.take([Key(3, 1), Key(7, 0)]) == [row(3, 1, replica="replica 1"), row(7)]


def test_a_sample_that_is_sent_again_replaces_the_first(ends: tuple[Inbox, Outbox, Outbox]) -> None:
    inbox, one, other = ends
    one.send(row(7))
    inbox.take([Key(7, 0)])
    other.send(row(7, attempt=1))
    other.send(row(8))
    inbox.take([Key(8, 0)])  # it arrives after the second attempt, on the same connection
    assert inbox.take([Key(7, 0)])[0].attempt == 1


def test_cleared_groups_are_gone_and_others_stay(ends: tuple[Inbox, Outbox, Outbox]) -> None:
    inbox, one, _ = ends
    for group in (1, 1, 2):
        one.send(row(group, sample=group))
    one.send(row(1, sample=5))
    inbox.take([Key(1, 1), Key(2, 2), Key(1, 5)])
    assert inbox.clear([1]) == 2
    assert inbox.stored == [Key(2, 2)]


def test_a_sample_that_never_comes_is_named(ends: tuple[Inbox, Outbox, Outbox]) -> None:
    inbox, one, _ = ends
    one.send(row(1))
    inbox.timeout_s = 0.2
    with pytest.raises(KitError, match=r"sample 3 of group 9 did not arrive within 0.2 s \(1 of 2 missing\)"):
        inbox.take([Key(1, 0), Key(9, 3)])


def test_what_is_no_sample_is_an_error_where_it_is_taken(ends: tuple[Inbox, Outbox, Outbox]) -> None:
    inbox, one, _ = ends
    one._link.send({"kind": "row", "group": 1})
    with pytest.raises(KitError, match="could not be read"):
        inbox.take([Key(1, 0)])
