"""Moving tensors: anonymous memory falls, every byte is restored, views stay views, and parts can be moved separately."""

import pytest

pytestmark = pytest.mark.slow

MIB = 2**20


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def seen(request, moved):
    return moved[request.param]


@pytest.fixture(scope="module")
def moved(launch):
    return launch("tensors", 1)[0]


def test_anonymous_memory_falls_by_what_was_moved_and_shared_memory_takes_it(seen):
    for cycle in seen["cycles"]:
        before, after = cycle["out"]["memory_before"], cycle["out"]["memory_after"]
        total = cycle["out"]["bytes"]["total"]
        assert total > 100 * MIB
        assert before["rss_anon"] - after["rss_anon"] >= 0.9 * total
        assert after["rss_shmem"] >= 0.9 * total
        assert cycle["back"]["memory_after"]["rss_anon"] - after["rss_anon"] == pytest.approx(total, rel=0.1)


def test_only_the_chosen_kinds_leave(seen):
    for cycle in seen["cycles"]:
        assert cycle["left"] == sorted({"weights", "grads", "optimizer"} - set(cycle["kinds"]))
        assert {kind for kind, size in cycle["out"]["bytes"].items() if size and kind != "total"} == set(cycle["kinds"])


def test_every_byte_comes_back_and_views_stay_views(seen):
    for cycle in seen["cycles"]:
        assert cycle["same"]
        assert cycle["aliases"]
        assert cycle["back"]["bytes"] == cycle["out"]["bytes"]


def test_the_arena_is_reused(seen):
    assert seen["fds"] == 0
    shared = [cycle["back"]["memory_after"]["rss_shmem"] for cycle in seen["cycles"]]
    assert shared[-1] < 1.1 * seen["cycles"][-1]["out"]["bytes"]["total"]


def test_what_cannot_be_is_reported_in_a_sentence(seen):
    assert all("already off the device" in cycle["twice"] for cycle in seen["cycles"])
    assert seen["idle_restore"] == 0
    assert "kind 'everything' is unknown" in seen["unknown"]
    assert "needs a GPU" in seen["native"]
