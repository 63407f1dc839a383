"""A few mutants, drawn by the commit's day from those that docs/mutants.md lists as caught, are caught."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests import lanes
from tests.mutants import table
from tests.mutants.catalogue import CATALOGUE, SETUPS
from tests.mutants.mutant import ROOT
from tests.mutants.run import Runner, line

A_LAB = 1  # mutants per lab


@pytest.mark.slow
@pytest.mark.drawn(1, of="labs")
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("lab", ["offload", "split", "sync"])
def test_mutants_that_were_caught_still_are(
    lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    seen_in = {
        id_: SETUPS[setup] for id_, setup in table.caught(ROOT / "docs" / "mutants.md").items() if setup in SETUPS
    }
    known = [mutant for mutant in CATALOGUE if SETUPS[mutant.config].lab == lab and mutant.id in seen_in]
    if not known:
        pytest.skip(f"docs/mutants.md has no mutant of today's catalogue that lab {lab} catches: run `make mutants`")
    day = lanes.day_of_commit()
    chosen = sorted(known, key=lambda mutant: hashlib.sha256(f"{day} {mutant.id}".encode()).digest())[:A_LAB]
    runner = Runner(tmp_path)
    try:
        results = [(mutant, runner.judge(mutant, seen_in[mutant.id])) for mutant in chosen]
    finally:
        runner.drop()
    with capsys.disabled():
        print("", *(line(*each) for each in results), sep="\n")
    assert [line(*each) for each in results if each[1].state != "caught"] == []
