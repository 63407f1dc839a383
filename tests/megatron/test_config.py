"""A config's arithmetic before anything is built, and one-sentence errors for impossible configs."""

import pytest

from kit.errors import BadInput
from kit.megatron.config import ModelConfig, check, model_bytes


def test_qwen_has_its_real_number_of_parameters():
    weighed = model_bytes(ModelConfig(size="qwen2.5-0.5b"), ranks=1)
    assert weighed["parameters"] == 494_032_768
    assert weighed["total"] == 494_032_768 * 16


def test_bfloat16_keeps_a_float32_master_copy():
    weighed = model_bytes(ModelConfig(size="125m", dtype="bfloat16"), ranks=1)
    assert weighed["params"] == 2 * weighed["parameters"]
    assert weighed["optimizer"] == 12 * weighed["parameters"]


def test_the_distributed_optimizer_divides_the_state_by_the_data_ranks():
    whole = model_bytes(ModelConfig(size="125m"), ranks=4)
    shared = model_bytes(ModelConfig(size="125m", distributed_optimizer=True), ranks=4)
    assert shared["optimizer"] == whole["optimizer"] // 4
    assert shared["params"] == whole["params"]


@pytest.mark.parametrize(
    ("settings", "ranks", "sentence"),
    [
        ({"size": "7b"}, 1, "size '7b' is unknown: choose one of tiny, small, 125m, qwen2.5-0.5b"),
        ({"dtype": "int8"}, 1, "dtype 'int8' is unknown"),
        ({"tp": 0}, 1, "tp=0 is not allowed: it must be at least 1"),
        ({"tp": 4}, 4, "tp=4 does not divide 2 key-value heads"),
        ({"tp": 2}, 3, "tp\\*pp=2 does not divide ranks=3; use a multiple of 2, or set tp=1$"),
        ({"pp": 3}, 3, "pp=3 does not divide 4 layers"),
        ({"ep": 2, "experts": 3}, 2, "ep=2 does not divide 3 experts"),
        ({"tp": 2, "experts": 4}, 2, "experts=4 with tp=2 is not supported"),
        ({"etp": 2, "experts": 4}, 2, "etp=2 with ep=1 is not supported"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings, ranks, sentence):
    with pytest.raises(BadInput, match=sentence):
        check(ModelConfig(**settings), ranks)
