"""`kit check DIR --lab share` judges a ledger of leases that another system wrote; several runs of a phase are several ledgers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kit.cli import main
from kit.labs.discover import find_fault
from kit.labs.share.lab import LAB
from kit.labs.share.ledgers import phase_runs
from kit.labs.share.scenarios import SCENARIOS
from kit.measure import Recorder
from kit.results import Row
from kit.target import replaced
from tests.share.chaos import rows_of
from tests.share.pair import shared
from tests.share.test_shared import BOTH, foreign


def check(
    folder: Path, rows: Iterable[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    """Write rows as another system would and judge them; return the exit status, and the verdict by check."""
    recorder = Recorder(folder)
    for row in rows:
        recorder.event(row["event"], **{name: one for name, one in row.items() if name not in ("event", "time")})
    recorder.close()
    status = main(["check", str(folder), "--lab", "share", "--json"])
    found = json.loads(capsys.readouterr().out)["verdict"]
    return status, {row["check"]: row for row in found}


def test_a_right_ledger_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, verdict = check(tmp_path / "run", foreign(rows_of(shared(BOTH).rows)), capsys)
    assert status == 0
    passed = {name for name, row in verdict.items() if row["passed"]}
    assert {"one_owner", "plan_as_specified", "no_request_lost", "version_after_wake", "no_deadlock"} <= passed
    assert verdict["same_numbers"]["passed"] is None
    assert "another system's ledger" in verdict["same_numbers"]["why"]


@pytest.mark.parametrize("name", ["lost-device", "double-allocation", "half-replica"])
def test_a_wrong_ledger_fails(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = find_fault(LAB, name)
    assert fault is not None
    with replaced(fault.patch):
        rows = foreign(rows_of(SCENARIOS[fault.scene["scenario"]].run().rows))
    status, verdict = check(tmp_path / "run", rows, capsys)
    assert status == 1
    assert verdict[fault.caught_by]["passed"] is False


def test_what_a_small_ledger_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ledger has only leases: who holds which device."""
    rows = [
        {"event": "limits", "pipeline": "desk", "devices": 1},
        {"event": "clusters", "pipeline": "a", "trainer": "0"},
        {"event": "clusters", "pipeline": "b", "trainer": "0"},
        {"event": "granted", "pipeline": "a", "kind": "training", "devices": "0"},
        {"event": "granted", "pipeline": "b", "kind": "training", "devices": "0"},
    ]
    status, verdict = check(tmp_path / "run", rows, capsys)
    assert status == 1
    assert "device 0 belongs to trainer of a" in verdict["one_owner"]["why"]
    assert verdict["plan_valid"]["why"] == "not measured: the ledger has no `plan` event"


def test_runs_of_a_phase_are_distinguished() -> None:
    capacity, limits, plan = (Row(metric=name, time=0.0) for name in ("capacity", "limits", "plan"))
    begins, desk_begins = (Row(metric="begins", time=0.0, ids={"core": name}) for name in ("a", "desk"))
    one, other = [capacity, begins, desk_begins, plan], [begins, plan, plan]
    assert [*phase_runs([*one, *one, *other])] == [one, one, other]
    assert [*phase_runs([limits, plan])] == [[limits, plan]]
