"""Groups that are suspended and resumed. NCCL's part is a stand-in: only a GPU has it, and it has not run on one here."""

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(launch):
    return launch("suspend", 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose NCCL may be able to")
def test_without_a_gpu_it_is_refused_in_one_sentence(ranks):
    for rank in ranks:
        assert rank["plain"] == "BadInput: mode=suspend is not available: it needs a GPU (NCCL)"


def test_what_can_be_suspended_is_and_the_rest_is_listed(ranks):
    for rank in ranks:
        seen = rank["there_and_back"]
        assert seen["counted"] == seen["suspended"] == seen["asleep"] > 10
        assert seen["gloo"] == seen["expected_gloo"] > 2
        assert seen["unused"] == 1
        mib = 2**20
        assert seen["first"]["before"] == {"suspend": 64 * mib, "persist": mib, "total": 65 * mib}
        assert seen["first"]["after"]["total"] == mib
        assert seen["initialised"]  # Megatron still has its groups


def test_a_collective_on_a_suspended_group_raises_by_name(ranks):
    for rank in ranks:
        assert rank["there_and_back"]["all_raise_by_name"]


def test_the_same_groups_come_back_in_the_same_order_on_all_ranks(ranks):
    for rank in ranks:
        seen = rank["there_and_back"]
        assert seen["same"]
        assert seen["exact"]
        assert seen["resumed"] == seen["suspended"]
        assert seen["again"] == 0
        out = [name for what, name in seen["order"] if what == "suspend"]
        assert out == [name for what, name in seen["order"] if what == "resume"]
    common = [{name for _, name in rank["there_and_back"]["order"]} for rank in ranks]
    shared = common[0] & common[1]
    first, second = ([pair for pair in rank["there_and_back"]["order"] if pair[1] in shared] for rank in ranks)
    assert first == second
    assert len(shared) > 3


def test_one_that_is_refused_is_named_and_the_rest_comes_back(ranks):
    for rank in ranks:
        seen = rank["refused"]
        assert "TENSOR_MODEL_PARALLEL_GROUP" in seen["error"]
        assert "its memory is shared with another communicator" in seen["error"]
        assert seen["resumed"] == seen["suspended"] > 5
        assert seen["exact"]


def test_one_that_does_not_resume_stays_out_of_reach(ranks):
    for rank in ranks:
        seen = rank["stuck"]
        assert "cannot resume" in seen["error"]
        assert "is released" in seen["use"]
        assert seen["resumed"] > 10
        assert seen["exact"]
