"""Release everything, reload and train on: the result equals uninterrupted training bit for bit, and memory was really released."""

import json
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TWO = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {},
    "dp2-distributed": {"distributed_optimizer": True, "overlap_grad_reduce": True},
    "ep2": {"ep": 2, "experts": 4},
    "tp2-abort": {"tp": 2, "mode": "abort"},
    "dp2-abort-world": {"mode": "abort", "include_world": True},
    "tp2-bf16-world": {"tp": 2, "dtype": "bfloat16", "include_world": True},
}
FOUR = {
    "tp2pp2": {"tp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp"},
    "ep2": {"ep": 2, "experts": 4, "distributed_optimizer": True},
    "pp4": {"pp": 4, "microbatches": 4},
    "tp2-world": {"tp": 2, "include_world": True},
}
CASES = [(2, name) for name in TWO] + [(4, name) for name in FOUR]


@pytest.fixture(scope="module")
def runs(launch) -> dict[int, list[Any]]:
    return {}


@pytest.fixture
def ranks(request, runs, launch) -> list[Any]:
    count, name = request.param
    if count not in runs:
        runs[count] = launch("training", count, json.dumps(TWO if count == 2 else FOUR))
    return [rank[name] for rank in runs[count]]


every_case = pytest.mark.parametrize(
    "ranks",
    [pytest.param(case, id=f"{case[0]}ranks-{case[1]}", marks=[pytest.mark.slow] * (case[0] > 2)) for case in CASES],
    indirect=True,
)


@every_case
def test_training_continues_bit_for_bit(ranks):
    for rank in ranks:
        assert rank["steps"] == rank["control"]["steps"]
        assert rank["hashes"] == rank["control"]["hashes"]
        assert all(step["grad_norm"] > 0 for step in rank["steps"])
        assert len({step["loss"] for step in rank["steps"]}) == len(rank["steps"])


@every_case
def test_groups_go_in_reverse_order_of_creation(ranks):
    """Over NCCL destroying is collective. Groups were split off WORLD, so WORLD is destroyed last."""
    for rank in ranks:
        world = rank["stats"]["snapshot"]["world"]
        assert rank["order"] == [*reversed(rank["names"]), *([world["name"]] if world else [])]


@every_case
def test_tensors_come_back_as_they_were(ranks):
    for rank in ranks:
        assert rank["before"] == rank["after"]
        assert rank["before"] != rank["hashes"]


@every_case
def test_released_means_nothing_is_held(ranks):
    for rank in ranks:
        stats, base, released = rank["stats"], rank["base"], rank["released"]
        world = bool(stats["snapshot"]["world"])
        assert stats["alive"] == []
        assert (stats["left"], stats["destroyed"]) == (0, len(rank["names"]) + world)
        assert released["groups"] == (0 if world else base["groups"] == 1)
        assert released["sockets"] <= base["sockets"] - world < rank["training"]["sockets"]
        assert released["threads"] <= base["threads"] - world < rank["training"]["threads"]
        assert rank["globals_left"] == {}
        for source in ("threads", "sockets", "fds", "groups"):
            assert rank["back"][source] <= rank["training"][source], source


@every_case
def test_a_stale_handle_raises_with_the_groups_name(ranks):
    for rank in ranks:
        assert len(rank["stale"]) >= 15
        for name, error in rank["stale"].items():
            assert name in error
            assert "reload the groups" in error
        assert rank["stale_attribute"].startswith("GroupReleased")


@every_case
def test_every_holder_and_every_group_works_after_a_reload(ranks):
    for rank in ranks:
        assert rank["described_same"]
        assert rank["holders_same"]
        assert rank["dead_holders"] == []
        assert rank["holders"] > 60
        assert len(rank["talk"]) == len(rank["names"])
        assert all(each["exact"] for each in rank["talk"])


@every_case
def test_destroy_and_reload_twice_do_nothing_the_second_time(ranks):
    for rank in ranks:
        assert rank["again"]["initialised"] is False
        assert rank["again"]["snapshot"] == {}
        assert rank["reloaded"]["reloaded"] > 0
        assert rank["reload_again"]["reloaded"] == 0


@every_case
def test_the_arithmetic_agrees_with_what_was_moved(ranks):
    for rank in ranks:
        moved, expected = rank["out"]["bytes"], rank["model_bytes"]
        assert moved["total"] == pytest.approx(expected["total"], rel=0.02)
        assert set(rank["out"]["addresses"].values()) == {0}
        assert 0 not in rank["in"]["addresses"].values()
        assert rank["guard"].startswith("KitError: weights, grads, optimizer are off the device")
