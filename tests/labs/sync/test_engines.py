"""A Hugging Face model as replica goes through the same phases and checks, with a limit from the noise that the run measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kit
from tests.labs.parts import failed, why


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
