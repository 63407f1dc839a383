"""A Hugging Face model as replica goes through the same phases and checks, with a limit from the noise that the run measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kit
from kit.labs.sync.faults import VLLM
from tests.labs.parts import failed, vllm_python, why


@pytest.mark.slow
def test_a_hugging_face_model_serves_and_sleeps(sync: Callable[..., kit.Run]) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    run = sync(serve="transformers")
    verdict = run.verdict()
    assert failed(verdict) == set()
    asked = {"bit_exact", "logits_equal", "every_parameter_written", "failure_is_clean", "sleepers_release"}
    assert asked <= {row.check for row in verdict if row.passed}
    row = next(row for row in verdict if row.check == "logits_equal")
    assert 0 < row.measured <= row.limit < 1e-5  # the limit of a run without measured noise
    assert "noise at rest" in why(verdict, "logits_equal")


IN_VLLM = {**VLLM, "layers": 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not vllm_python(), reason="needs vLLM: make env-vllm, and KIT_VLLM_PYTHON")
def test_vllm_serves_and_its_old_layer_is_named(sync: Callable[..., kit.Run]) -> None:
    verdict = sync(**IN_VLLM).verdict()
    assert failed(verdict) == set()
    asked = {"bit_exact", "logits_equal", "no_torn_reads", "failure_is_clean", "segments_return_to_baseline"}
    assert asked <= {row.check for row in verdict if row.passed}
    stale = sync(fault="prepacked-stale", **IN_VLLM).verdict()
    assert {"bit_exact", "logits_equal"} <= failed(stale)
    row = next(row for row in stale if row.check == "bit_exact")
    assert row.measured == 1  # the head, which has the embedding's name; every other layer is new
    assert "model.embed_tokens.weight" in row.why


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not vllm_python(), reason="needs vLLM: make env-vllm, and KIT_VLLM_PYTHON")
@pytest.mark.parametrize(
    ("fault", "check", "named"),
    [
        ("tied-name-skipped", "bit_exact", "model.embed_tokens.weight"),
        ("buffer-not-sent", "every_parameter_written", "rotary_emb.cos_sin_cache"),
        ("finalize-twice", "version_order", "derive came instead of finalize"),
    ],
)
def test_faults_of_engines_are_seen_in_vllm(sync: Callable[..., kit.Run], fault: str, check: str, named: str) -> None:
    verdict = sync(fault=fault, **IN_VLLM).verdict()
    assert check in failed(verdict)
    assert named in why(verdict, check)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not vllm_python(), reason="needs vLLM: make env-vllm, and KIT_VLLM_PYTHON")
@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"refresh": "paused"}, {"size": "125m", "timeout_s": 400.0}],  # all failures are one phase
)
def test_vllm_is_right_in_bfloat16_and_where_it_pauses_and_as_llama(
    sync: Callable[..., kit.Run], settings: dict[str, Any]
) -> None:
    verdict = sync(**{**IN_VLLM, **settings}).verdict()
    assert failed(verdict) == set()
    row = next(row for row in verdict if row.check == "logits_equal")
    assert 0 < row.measured <= row.limit
    assert "noise at rest" in row.why


ASLEEP = {**IN_VLLM, "placement": "overlap", "ranks": 3, "replicas": 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not vllm_python(), reason="needs vLLM: make env-vllm, and KIT_VLLM_PYTHON")
def test_vllm_wakes_with_new_weights_and_says_that_its_sleep_frees_none(sync: Callable[..., kit.Run]) -> None:
    verdict = sync(**ASLEEP).verdict()
    assert failed(verdict) == set()
    row = next(row for row in verdict if row.check == "sleepers_release")
    assert row.passed is None
    assert "vLLM frees no weights on a CPU: 16 keep their memory; a sleeping engine refused every forward" in row.why
    assert "sleepers_release" in failed(sync(fault="served-asleep", **ASLEEP).verdict())
    assert "bit_exact" in failed(sync(fault="wrong-half", **ASLEEP).verdict())


@pytest.mark.slow
def test_a_prewarmed_replica_wakes_and_sleeps_once_before_the_first_version(sync: Callable[..., kit.Run]) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    run = sync(serve="transformers", prewarm=True)
    verdict = run.verdict()
    assert failed(verdict) == set()
    assert {"bit_exact", "every_parameter_written", "sleepers_release"} <= {row.check for row in verdict if row.passed}
    frame = run.frame()
    sleeps = frame[(frame["phase"] == "base") & (frame["metric"] == "asleep_tensors")]
    assert sleeps.groupby("rank").size().to_dict() == {2: 2, 3: 2}
