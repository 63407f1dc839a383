"""Whoever initialises state keeps it: state is restored on success and on failure, and the first error is the one that surfaces."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(launch):
    return launch("ownership", 2)


@pytest.mark.parametrize("case", ["own-success", "own-failure", "caller-success", "caller-failure"])
def test_the_state_is_as_found(ranks, case):
    for rank in ranks:
        assert rank[case]["difference"] == {}
        before, after = rank[case]["census"]
        assert after["groups"] == before["groups"]
        assert after["sockets"] <= before["sockets"] + (1 if case.startswith("own") else 0)
        assert after["threads"] <= before["threads"]


@pytest.mark.parametrize("case", ["own-success", "own-failure"])
def test_the_next_groups_are_named_as_in_a_new_process(ranks, case):
    assert [rank[case]["named"] for rank in ranks] == [0, 0]


def test_the_original_error_surfaces_and_is_logged_first(ranks):
    for rank in ranks:
        for case in ("own-failure", "caller-failure"):
            assert rank[case]["error"] == "ZeroDivisionError: the reason"
        assert rank["log"] == ["leaving after ZeroDivisionError: the reason"] * 2


def test_the_callers_groups_stay_usable(ranks):
    for rank in ranks:
        assert rank["world_is_the_callers"]
        assert rank["usable"] == ["", ""]


def test_a_callers_job_that_was_released_inside_trains_on(ranks):
    for rank in ranks:
        assert rank["job"]["same"]
        assert rank["job"]["destroyed"] > 15
        assert rank["job"]["steps"] == 2


def test_a_random_tracker_made_inside_is_not_kept():
    from megatron.core.tensor_parallel import random

    from kit.megatron.ownership import as_found

    before = random._CUDA_RNG_STATE_TRACKER
    with as_found():
        random._CUDA_RNG_STATE_TRACKER = object()
    assert random._CUDA_RNG_STATE_TRACKER is before
