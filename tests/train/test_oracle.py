"""The oracle itself: it shares no code with what it checks, and detects the errors that it is meant to detect."""

import ast
from pathlib import Path

import pytest
import torch

from kit.labs.split.ranks import oracle as module
from kit.labs.split.ranks.oracle import float64_step
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood


def batch_of(token_mask, sample_mask):
    mask = torch.tensor(token_mask, dtype=torch.float64)
    names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs")
    values = {name: torch.full_like(mask, -1.0) for name in names}
    return {"token_mask": mask, "sample_mask": torch.tensor(sample_mask, dtype=torch.float64), **values}


def test_it_imports_nothing_of_what_it_checks():
    tree = ast.parse(Path(module.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.split(".")[0] == "kit"}


def test_it_wants_float64():
    batch = batch_of([[0, 1]], [1])
    with pytest.raises(TypeError, match="in float64, not"):
        float64_step(NegativeLogLikelihood(), torch.zeros(1, 1), batch)


def test_shift_mask_and_level_on_paper():
    """Row 0 has tokens 1 and 3; row 1 counts but has none; row 2 does not count."""
    batch = batch_of([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]], [1, 1, 0])
    logprobs = -torch.tensor([[1.0, 10, 3], [100, 100, 100], [1000, 1000, 1000]], dtype=torch.float64)
    logprobs.requires_grad_()
    loss, table = float64_step(NegativeLogLikelihood(), logprobs, batch)
    assert loss.item() == table["loss"] == 2.0
    assert (table["num_valid_samples"], table["num_unmasked_tokens"]) == (2.0, 2.0)
    loss.backward()
    assert logprobs.grad.tolist() == [[-0.5, 0.0, -0.5], [0.0] * 3, [0.0] * 3]
    assert float64_step(NegativeLogLikelihood(level="sequences"), logprobs, batch)[0].item() == 1.0


@pytest.mark.parametrize(
    "loss", [ClippedPolicyGradient(), NegativeLogLikelihood(level="sequences")], ids=["clipped", "likelihood"]
)
def test_a_step_without_a_valid_token(loss):
    batch = batch_of([[1, 0, 0]] * 2, [1, 1])
    logprobs = torch.full((2, 2), -torch.inf, dtype=torch.float64, requires_grad=True)
    value, table = float64_step(loss, logprobs, batch)
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(logprobs.grad, torch.zeros(2, 2, dtype=torch.float64))
    assert table["num_valid_samples"] == 2.0
    extremes = {name: number for name, number in table.items() if name.endswith(("_min", "_max"))}
    assert set(extremes.values()) <= {-1.0}
    assert set(table) == set(loss.normalizers())
