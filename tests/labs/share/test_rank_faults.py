"""Each bug of a rank fails the check that it is listed under."""

from __future__ import annotations

from pathlib import Path

import pytest

import kit
from kit.labs.definition import Fault
from kit.labs.share.faults import OF_ADAPTERS, OF_RANKS
from tests.labs.simulated import failed


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.timeout(240)  # two of the faults need 174 MiB of weights on six ranks
@pytest.mark.parametrize("fault", [*OF_RANKS, *OF_ADAPTERS], ids=lambda fault: fault.name)
def test_a_rank_with_a_bug_fails_its_check(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    assert fault.caught_by in failed(kit.run("share", fault=fault.name).verdict())
