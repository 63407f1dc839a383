"""A fault's check sees that bug: in the same config without the fault it passes. What else each bug breaks is known."""

from __future__ import annotations

import pytest

from kit.labs.definition import Fault
from kit.labs.stream import FAULTS, OF_THE_CONTROLLER, broken
from kit.results import Verdict
from tests.labs.stream.conftest import failed, passed, simulated, why

# What else a bug breaks, apart from the check that it is listed under.
ALSO = {
    "off-by-one-window": {"capacity_kept"},
    "gate-checked-early": {"order_fair"},
    "drops-oldest": {"order_fair", "tokens_conserved", "metrics_true"},
    "slot-leak": {"metrics_true"},
    "lost-group": {"tokens_conserved", "capacity_kept"},
    "partial-group": {"tokens_conserved", "metrics_true"},
    "double-bump": {"no_sample_too_old", "publish_before_use", "capacity_kept", "metrics_true"},
    "bump-on-abort": {"one_step_per_batch", "publish_before_use"},
    "no-abort": {"one_step_per_batch", "ends_cleanly"},
    "cleared-before-finish": {"every_group_once"},
    "clear-fails-after-finish": {"version_monotone"},
    "waits-at-the-end": {"no_deadlock"},
}


@pytest.mark.parametrize("fault", OF_THE_CONTROLLER, ids=lambda fault: fault.name)
def test_a_rule_with_a_bug_fails_its_check_and_hardly_another(fault: Fault) -> None:
    verdict, error = simulated(fault.name, **fault.set)
    assert {fault.check} <= failed(verdict) <= {fault.check} | ALSO.get(fault.name, set())
    assert bool(error) == (fault.exit == 3)


def test_without_the_bug_its_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same conditions; faults of one config share the run without them."""
    monkeypatch.setattr(broken, "SWAPS", {})
    made: dict[str, Verdict] = {}
    for fault in OF_THE_CONTROLLER:
        key = repr((fault.set, broken.CONDITIONS.get(fault.name)))
        verdict = made[key] = made.get(key) or simulated(fault.name, **fault.set)[0]
        assert (fault.name, failed(verdict), passed(verdict, fault.check)) == (fault.name, set(), True)


def test_every_rule_with_a_bug_is_listed_and_its_name_free() -> None:
    assert {fault.name for fault in OF_THE_CONTROLLER} == set(broken.SWAPS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_what_fails_first_is_named() -> None:
    verdict, error = simulated("gate-never-opens")
    assert error == "no event can arrive any more; not ended: a"
    assert why(verdict, "no_deadlock") == "no end: stream"
