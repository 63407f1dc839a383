"""Failing reloads of own code, rehearsed without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kit.labs.offload.ranks.rehearsals import restore_fails
from kit.measure.observers.tensors import TensorState
from kit.results import VerdictRow
from tests.labs.offload import moved
from tests.labs.offload.test_checks import answers


def rehearsed(kind: type[Any]) -> VerdictRow:
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    ctx: Any = SimpleNamespace(chunks=[net], rank=0, world_size=1, device=torch.device("cpu"))
    findings = restore_fails(ctx, kind(ctx), lambda: TensorState(chunks=ctx.chunks))
    rows = [(0, "rehearse_restore", finding.metric, finding.value) for finding in findings]
    rows.append((0, "rehearse_restore", "seconds", 1.0))
    return answers(rows, implementation=f"moved:{kind.__name__}")["restore_failure_is_clean"]


def test_a_reload_that_makes_new_tensors_can_fail_in_the_middle() -> None:
    right = rehearsed(moved.Remade)
    assert (right.passed, right.measured) == (True, 0)
    wrong = rehearsed(moved.KeepsPart)
    assert (wrong.passed, wrong.why) == (False, "bytes of tensors not freed again: 2176 (rank 0)")


def test_what_is_missing_in_the_error_is_counted() -> None:
    row = rehearsed(moved.NamesNoTensor)
    assert (row.passed, row.why) == (False, "names missing in the error: 1 (rank 0)")


def test_a_reload_whose_memory_cannot_be_refused_is_not_judged() -> None:
    row = rehearsed(moved.Unseen)
    assert (row.passed, row.measured) == (None, None)
