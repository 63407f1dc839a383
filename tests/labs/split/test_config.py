"""Impossible settings are refused in one sentence, before any rank starts; the plan has every way to cut, after its plain step."""

from __future__ import annotations

import pytest

import kit
from kit.errors import BadInput
from kit.labs import definition
from kit.labs.split.lab import SplitConfig, cases, plan
from kit.labs.split.lab import fits as split_fits

GIB = 2**30
EXPERTS = {"experts": 4, "reduce": "mean"}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"chunks": []}, "chunks is empty: give at least one number of chunks"),
        ({"chunks": [1, 11]}, "chunks=11 is not between 1 and the 10 microbatches of a step; use 1 to 10, or 0"),
        ({"chunks": [-1]}, "chunks=-1 is not between 1 and the 10 microbatches"),
        ({"chunks": "x"}, r"chunks must be a list of whole numbers, such as \[1, 2\], not 'x'"),
        ({"chunks": [2, 2]}, r"chunks=\[2, 2\] repeats a number"),
        ({"tp": 3}, "tp=3 does not divide 4 heads"),
        ({"tp": 2, "ranks": 3}, "tp\\*pp=2 does not divide ranks=3"),
        ({"pp": 3, "ranks": 3}, "pp=3 does not divide 4 layers"),
        ({"cp": 2}, "cp=2 needs backend=fsdp2: Megatron's local attention does not work on a part of a sequence"),
        ({"cp": 2, "backend": "fsdp2", "ranks": 3}, r"cp=2 does not divide ranks=3; use a multiple of 2, or set cp=1"),
        ({"cp": 0}, "cp must be a whole number from 1 to 64, not 0"),
        ({"cp": 2, "backend": "fsdp2", "masks": "empty-rank"}, "needs at least 2 data-parallel ranks"),
        ({"ep": 2}, "ep=2 needs a model with experts: set experts to a multiple of 2"),
        ({"ep": 2, **EXPERTS, "experts": 3}, "ep=2 does not divide 3 experts"),
        ({"router_bias": True}, "router_bias=true needs a model with 3 or more experts"),
        ({"experts": 4}, "experts need reduce=mean"),
        ({**EXPERTS, "tp": 2}, "Megatron asks for tp=1"),
        (
            {"backend": "fsdp2", "tp": 2},
            "backend=fsdp2 supports data and context parallelism only: leave out tp, pp and experts",
        ),
        ({"backend": "fsdp2", "pp": 2}, "leave out tp, pp and experts"),
        ({"backend": "fsdp2", **EXPERTS}, "leave out tp, pp and experts"),
        ({"batching": "packed"}, "batching=packed needs backend=fsdp2"),
        ({"batching": "dynamic"}, "batching=dynamic needs backend=fsdp2"),
        (
            {"backend": "fsdp2", "batching": "packed", "token_budget": 31},
            "token_budget=31 is less than a row of length=32",
        ),
        ({"recipe": "gspo"}, "recipe=gspo needs level=sequences, not 'both'"),
        ({"recipe": "gspo", "level": "tokens"}, "recipe=gspo needs level=sequences, not 'tokens'"),
        ({"masks": "empty-rank", "tp": 2}, "masks=empty-rank needs at least 2 data-parallel ranks"),
        ({"masks": "empty-rank", "ranks": 1}, "masks=empty-rank needs at least 2 data-parallel ranks"),
        ({"kl_kind": "k4"}, "kl_kind must be one of recipe, k1, k2, k3, not 'k4'"),
        ({"dual_clip": 0.5}, "dual_clip must be a number of at least 1 or null, not 0.5"),
        ({"dual_clip": 1}, "dual_clip=1.* is not allowed: it must be a finite number above 1"),
        ({"ratio": "none", "dual_clip": 3}, "ratio='none' excludes cispo, on_policy and dual_clip"),
        ({"recipe": "cispo", "dual_clip": 3}, "cispo=True and dual_clip exclude each other"),
        ({"truncation": "tis", "band_high": 2}, "truncation='tis' needs importance='tokens' or 'sequences'"),
        (
            {"recipe": "nll", "kl": 0.1, "clip_low": 0.1},
            "recipe=nll .negative log-likelihood. does not have clip_low, kl",
        ),
        ({"recipe": "dapo", "kl_input_clamp": 20}, "kl_input_clamp and kl_output_clamp need kl above 0"),
        ({"loss": "json:loads", "kl": 0.1}, "loss=json:loads replaces the recipe and its options: leave out kl"),
        (
            {"loss": "json:loads", "recipe": "dapo"},
            "loss=json:loads replaces the recipe and its options: leave out recipe",
        ),
        ({"loss": "nowhere"}, "loss must be 'module:attr', not 'nowhere'"),
        (
            {"loss": "nowhere:loss"},
            "loss=nowhere:loss cannot be loaded by the ranks' Python .* No module named 'nowhere'",
        ),
        ({"model": "json:nothing"}, "model=json:nothing cannot be loaded by the ranks' Python"),
        ({"model": "json:loads", "layers": 2}, "model=json:loads needs backend=megatron, without experts and layers"),
        (
            {"model": "json:loads", "backend": "fsdp2"},
            "model=json:loads needs backend=megatron, without experts and layers",
        ),
        ({"length": 23}, "length must be a whole number from 24 to 32768, not 23"),
        ({"steps": 0}, "steps must be a whole number from 1 to 1000, not 0"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16, not 'float16'"),
        ({"recipe": "ppo"}, "recipe must be one of grpo"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_one_sentence(config: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        kit.lab("split", **config)
    assert "\n" not in str(caught.value)


def test_a_job_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "free_memory", lambda: 16 * GIB)
    monkeypatch.setattr(definition, "free_gpu_bytes", list)
    split_fits(SplitConfig(size="125m", layers=2, steps=1))
    with pytest.raises(BadInput, match="for the gradients of 9 steps"):
        kit.lab("split", size="qwen2.5-0.5b", steps=9)


def test_ranks_that_share_columns_are_one_data_rank() -> None:
    config = SplitConfig(backend="fsdp2", ranks=6, cp=3, masks="empty-rank")
    assert (config.data_ranks, config.batch) == (2, 2 * config.microbatches * config.micro_batch)


def test_each_level_has_its_plain_step_before_its_cuts() -> None:
    config = SplitConfig(chunks=(2, 0))
    assert [(case.cycle, case.level, case.chunks, case.first) for case in cases(config)] == [
        (1, "tokens", 2, True),
        (2, "tokens", 0, False),
        (3, "sequences", 2, True),
        (4, "sequences", 0, False),
    ]
    level = ["sync", "oracle", "split", "compare", "split", "compare"]
    assert [step.phase for step in plan(config)] == ["prepare", *level, *level, "rehearse", "end"]
    assert [step.cycle for step in plan(config)] == [0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 0, 0]
    both = [step.phase for step in plan(SplitConfig(chunks=(1,), level="tokens", backend="fsdp2"))]
    assert both == ["prepare", "sync", "oracle", "other_backend", "split", "compare", "rehearse", "end"]
