"""Versions are built, activated and freed by the rule, with at most two copies; impossible calls are refused before anything changes."""

import threading

import pytest
import torch

from kit import machine
from kit.errors import BadInput, KitError
from kit.sync import cache as module
from kit.sync.buckets import Bound, Mismatch, bucket_views, lay_out, specs_of
from kit.sync.cache import Cache, CacheBusy
from tests.holdings import memory_files

LIMIT = 20.0
GIB = 2**30


@pytest.fixture(autouse=True)
def nothing_left():
    before = len(memory_files())
    yield
    assert len(memory_files()) == before


def model(version):
    """Six tensors, two per bucket, filled with the version number."""
    return {(f"w{n}", 0): torch.full((512,), version, dtype=torch.uint8) for n in range(6)}


LAYOUT = lay_out(specs_of(model(0)), 1024)


@pytest.fixture
def make():
    made = []

    def of(**config):
        made.append(Cache(LAYOUT, **{"timeout_s": LIMIT} | config))
        return made[-1]

    yield of
    for cache in made:
        cache.close()


def held(cache, version):
    """The value that fills each tensor of a version."""
    values = []
    for index in range(len(LAYOUT.buckets)):
        for view in bucket_views(LAYOUT, index, cache.bucket(version, index)):
            assert len(view.tensor.unique()) == 1
            values.append(int(view.tensor[0]))
    return values


def test_versions_come_and_go_by_the_rule(make):
    cache, before = make(), len(memory_files())
    assert (cache.latest, cache.active, cache.copies, cache.nbytes) == (-1, -1, 0, 0)
    cache.build(1, model(1))
    assert (cache.latest, cache.active, cache.copies) == (1, -1, 1)
    cache.activate(1)
    for version in range(2, 6):
        cache.build(version, model(version))
        assert (cache.latest, cache.active, cache.copies) == (version, version - 1, 2)
        assert held(cache, version) == [version] * 6
        assert held(cache, version - 1) == [version - 1] * 6
        cache.activate(version)
        assert (cache.latest, cache.active, cache.copies) == (version, version, min(version, 2))
        assert len(memory_files()) - before == cache.blocks
        with pytest.raises(BadInput, match=rf"no copy of version {version - 1}: the cache has \[{version}\]"):
            cache.segment(version - 1)
    assert cache.nbytes == cache.copies * 3 * 4096
    cache.close()
    assert len(memory_files()) == before


def test_a_latest_that_nobody_activated_is_given_up_for_the_next(make):
    cache = make()
    cache.build(1, model(1))
    cache.activate(1)
    cache.build(2, model(2))
    cache.build(5, model(5))
    assert (cache.latest, cache.active, cache.copies) == (5, 1, 2)
    assert held(cache, 1) == [1] * 6
    assert held(cache, 5) == [5] * 6
    with pytest.raises(BadInput, match="no copy of version 2"):
        cache.segment(2)


def test_a_version_twice_or_backwards_and_one_that_is_not_there(make):
    cache = make()
    for version in (-1, -2):
        with pytest.raises(BadInput, match=f"version {version} cannot be built: version -1 exists"):
            cache.build(version, model(0))
    cache.activate(-1)
    cache.build(3, model(3))
    for version in (3, 2):
        with pytest.raises(BadInput, match=f"version {version} cannot be built: version 3 exists"):
            cache.build(version, model(0))
    with pytest.raises(BadInput, match="version 2 cannot be activated: the latest is 3 and -1 is active"):
        cache.activate(2)
    assert (cache.latest, cache.active) == (3, -1)
    assert held(cache, 3) == [3] * 6


@pytest.fixture
def packs(monkeypatch):
    """The list of buckets that are packed."""
    seen, real = [], Bound.pack
    monkeypatch.setattr(
        Bound, "pack", lambda bound, index, *rest, **how: (seen.append(index), real(bound, index, *rest, **how))
    )
    return seen


@pytest.mark.parametrize("reached", [False, True])
def test_a_build_that_fails_leaves_the_active_version(make, packs, reached):
    """With `reached`, a version that was built in between is lost with it."""
    cache = make()
    cache.build(1, model(1))
    cache.activate(1)
    if reached:
        cache.build(2, model(2))
    broken = model(3)
    del broken["w5", 0]
    with pytest.raises(Mismatch, match=r"bucket 2: w5 \(shard 0\) is missing"):
        cache.build(3, broken)
    assert (cache.latest, cache.active, cache.copies) == (1, 1, 1)
    assert held(cache, 1) == [1] * 6
    packs.clear()
    cache.build(3, model(3))
    assert packs == [0, 1, 2]
    assert held(cache, 3) == [3] * 6


def test_buckets_are_reported_when_they_are_there_and_a_listener_may_fail(make):
    cache, reported = make(), []
    cache.build(1, model(1), packed=reported.append)
    assert reported == [0, 1, 2]

    def fail(index):
        if index:
            raise OSError("the receiver is gone")

    with pytest.raises(OSError, match="gone"):
        cache.build(2, model(2), packed=fail)
    assert (cache.latest, cache.copies) == (-1, 0)


def test_bound_weights_are_packed_and_those_of_another_layout_refused(make):
    cache = make()
    cache.build(1, Bound(LAYOUT, model(1)))
    assert held(cache, 1) == [1] * 6
    other = lay_out(specs_of(model(0)), 2048)
    with pytest.raises(BadInput, match="bound to another layout than the cache's"):
        cache.build(2, Bound(other, model(2)))
    assert (cache.latest, held(cache, 1)) == (1, [1] * 6)


@pytest.mark.parametrize("built", [False, True])
def test_a_version_that_is_discarded_was_not(make, packs, built):
    cache = make()
    cache.build(1, model(1))
    cache.activate(1)
    cache.discard(1)  # the active version stays
    assert held(cache, 1) == [1] * 6
    if built:
        cache.build(2, model(2))
    cache.discard(2)
    assert (cache.latest, cache.active) == (1, 1)
    packs.clear()
    cache.build(2, model(2))
    assert packs == [0, 1, 2]
    assert held(cache, 2) == [2] * 6


def test_a_version_has_its_segment_while_it_is_built(make):
    cache, seen = make(), []
    cache.build(1, model(1), packed=lambda index: seen.append(cache.bucket(1, index).clone()))
    assert [int(one[0]) for one in seen] == [1, 1, 1]

    def fail(index):
        cache.segment(2)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        cache.build(2, model(2), packed=fail)
    with pytest.raises(BadInput, match="no copy of version 2"):
        cache.segment(2)


def test_weights_that_were_offloaded_are_named(make):
    cache, tensors = make(), model(1)
    cache.build(1, tensors)
    tensors["w3", 0].untyped_storage().resize_(0)
    with pytest.raises(BadInput, match="the storage of w3 is empty: the weights were offloaded"):
        cache.build(2, tensors)
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(0)
    with pytest.raises(BadInput, match="the storage of w0, w1, w2, w3, w4 and 1 more is empty"):
        cache.build(2, tensors)
    assert (cache.latest, held(cache, 1)) == (1, [1] * 6)


def test_two_copies_must_fit_into_their_share(monkeypatch):
    layout = lay_out(specs_of({("w", 0): torch.empty(3 * GIB, dtype=torch.uint8, device="meta")}), 3 * GIB)
    monkeypatch.setattr(module, "free_memory", lambda: 7 * GIB)
    with pytest.raises(BadInput) as caught:
        Cache(layout)
    assert str(caught.value) == (
        "two copies of 3 GiB do not fit: they need 6 GiB; 6 GiB exceeds 5.6 GiB, which is 80% of the 7 GiB of free memory"
    )
    monkeypatch.setattr(module, "free_memory", lambda: 8 * GIB)
    Cache(layout).close()


def test_what_is_held_already_is_not_wanted_again(make, monkeypatch):
    free = [2 * 3 * 4096 / 0.8]
    monkeypatch.setattr(module, "free_memory", lambda: free[0])
    cache = make()
    cache.build(1, model(1))
    cache.activate(1)
    free[0] = 3 * 4096 / 0.8 - 1
    with pytest.raises(BadInput, match="GiB of it allocated already"):
        cache.build(2, model(2))
    assert (cache.latest, held(cache, 1)) == (1, [1] * 6)
    free[0] += 1
    cache.build(2, model(2))


def test_the_cgroups_limit_counts():
    assert module.free_memory is machine.free_memory


def on_thread(work):
    raised = []

    def run():
        try:
            work()
        except (KitError, OSError) as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="other", daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("act", [lambda c: c.build(2, model(2)), lambda c: c.activate(1), lambda c: c.close()])
def test_others_wait_for_the_lock_and_are_refused_after_their_deadline(make, act):
    cache = make()
    cache.build(1, model(1))
    with cache.held("the transport of version 1"):
        cache.timeout_s = 0.01
        thread, raised = on_thread(lambda: act(cache))
        thread.join(LIMIT)
        assert str(raised[0]).endswith(
            "waited 0.01 s for the bucket cache, which is held for the transport of version 1 (MainThread)"
        )
        assert isinstance(raised[0], CacheBusy)
        assert (cache.latest, cache.active, cache.copies) == (1, -1, 1)
        cache.timeout_s = LIMIT
        thread, raised = on_thread(lambda: act(cache))
        assert held(cache, 1) == [1] * 6  # the other thread waits, whatever it is about to do
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert not raised
    assert (cache.latest, cache.active, cache.copies) != (1, -1, 1)


def test_the_holder_itself_goes_straight_in(make):
    cache = make(timeout_s=0.01)
    with cache.held("a sync"):
        cache.build(1, model(1))
        cache.activate(1)
        with pytest.raises(ZeroDivisionError), cache.held("the teardown"):
            _ = 1 / 0
    thread, raised = on_thread(lambda: cache.build(2, model(2)))
    thread.join(LIMIT)
    assert not raised


def test_closed_is_closed(make):
    cache = make()
    cache.build(1, model(1))
    cache.close()
    cache.close()
    for act in (lambda: cache.build(2, model(2)), lambda: cache.activate(1)):
        with pytest.raises(BadInput, match="the bucket cache is closed"):
            act()
    with pytest.raises(BadInput, match="no copy of version 1: the cache has none"):
        cache.bucket(1, 0)
