"""A sampler of somebody else's, with NeMo-RL's protocol, in the lab's own runs."""

from __future__ import annotations

import pytest

import kit
from tests.labs.stream.conftest import simulated
from tests.stream.test_foreign import Windowed

OWN = f"{Windowed.__module__}:{Windowed.__qualname__}"


def test_an_own_sampler_passes_the_ledgers_checks() -> None:
    verdict, error = simulated(sampler=OWN, places=16)
    assert error == ""
    assert [row.check for row in verdict if row.passed is False] == []
    assert {row.check for row in verdict if row.passed} >= {"every_group_once", "no_sample_too_old", "permits_return"}


def test_what_is_no_sampler_is_refused_before_ranks_start() -> None:
    with pytest.raises(kit.BadInput, match="the sampler json:loads has no admit, select"):
        kit.lab("stream", sampler="json:loads")
