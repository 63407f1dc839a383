"""Batched sends and receives: torch coalesces a batch only over plain groups, and over NCCL a batch in pieces can hang forever."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
def test_a_batch_goes_over_the_group_inside(launch: Any) -> None:
    for number, rank in enumerate(launch("batches", 2)):
        other = 4.0 * (2 - number)
        assert rank["sums"] == [other, other]
        assert rank["uninstalled"] == other
        assert set(rank["given"]) == {"ProcessGroup"}
        assert rank["empty"].startswith("IndexError")  # torch's own error
        assert "GroupReleased" in rank["released"]
        assert "PIPELINE" in rank["released"]
