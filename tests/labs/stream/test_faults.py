"""Each fault fails its check, which passes in the same config without the fault. Other checks that the bug fails are listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import kit
from kit.errors import KitError
from kit.labs.definition import Fault, as_settings, made
from kit.labs.stream.faults import OF_RANKS, OF_THE_CONTROLLER
from kit.labs.stream.lab import LAB
from kit.results import Verdict, list_runs, runs_dir
from kit.results.run import to_frame
from tests.labs.parts import Answers, failed, on_an_engine, passed, why
from tests.labs.simulated import run
from tests.labs.stream.conftest import simulated
from tests.results.conftest import make_record

# With wrong stamps or another temperature, the recomputed distributions are not those that tokens were drawn from.
OF_TOKENS = {"stamps_true", "behaviour_logprob", "kv_policy_kept", "no_torn_generation", "draws_independent"}
# Other checks that a bug fails, besides the one it is listed under.
ALSO = {
    "off-by-one-window": {"capacity_kept", "resume_equals"},
    "gate-checked-early": {"order_fair", "resume_equals"},
    "drops-oldest": {"order_fair", "resume_equals", "tokens_conserved", "metrics_true"},
    "slot-leak": {"metrics_true"},
    "drops-stragglers": {
        "one_step_per_batch",
        "metrics_true",
    },  # the desk hears of a smaller step before a group is lost
    "discard-and-requeue": {"eviction_justified"},
    "lost-group": {"tokens_conserved", "capacity_kept", "resume_equals"},
    "starts-beyond-the-end": {"resume_equals"},
    "reports-done": {"resume_equals"},
    "partial-group": {"tokens_conserved", "metrics_true"},
    "double-bump": {
        "resume_equals",
        "ends_cleanly",
        "eviction_justified",
        "no_sample_too_old",
        "publish_before_use",
        "capacity_kept",
        "order_fair",
        "metrics_true",
    },
    "bump-on-abort": {"notes_backed", "one_step_per_batch", "publish_before_use"},
    "bumps-unfinished": {"abort_on_failure", "one_clear_per_finish", "one_step_per_batch", "version_monotone"},
    "no-abort": {"notes_backed", "one_step_per_batch", "ends_cleanly"},
    "cleared-before-finish": {"every_group_once"},
    "waits-at-the-end": {"no_deadlock"},
    "clear-fails-after-finish": {"version_monotone"},
    # With keys and values of another version, the log-probabilities of later tokens match no version, or another one.
    "stamp-after-reply": {*OF_TOKENS, "no_stale_prefix", "stamps_per_token", "metrics_true"},
    "stamp-at-publish": {
        *OF_TOKENS,
        "resume_equals",
        "no_stale_prefix",
        "no_sample_too_old",
        "stamps_per_token",
        "publish_before_use",
    },
    "one-stamp-per-group": {*OF_TOKENS, "no_stale_prefix", "no_sample_too_old", "metrics_true"},
    "rng-reset": {"draws_independent"},
    "temperature-mismatch": OF_TOKENS,
    "prefix-cache-survives": OF_TOKENS,
    "keeps-kv-silently": OF_TOKENS,
    "engine-untempered": OF_TOKENS,
    "engine-keeps-kv": OF_TOKENS,
    "torn-read": {*OF_TOKENS, "equals_plain", "resume_equals"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_THE_CONTROLLER, ids=lambda fault: fault.name)
def test_a_rule_with_a_bug_fails_its_check_and_hardly_another(fault: Fault) -> None:
    verdict, error = simulated(fault.name, **fault.set)
    assert (
        {fault.caught_by} <= failed(verdict, timed=fault.caught_by) <= {fault.caught_by} | ALSO.get(fault.name, set())
    )
    assert bool(error) == (fault.exit == 3)


@pytest.mark.slow
def test_without_the_bug_its_check_passes() -> None:
    """The scene is the same; faults with equal configs share one run without a fault."""
    made: dict[str, Verdict] = {}
    for fault in OF_THE_CONTROLLER:
        key = repr((fault.set, fault.scene))
        harmless = dataclasses.replace(fault, patch={})
        verdict = made[key] = made.get(key) or run(LAB, harmless, **fault.set)[0]
        assert (fault.name, failed(verdict)) == (fault.name, set())
        assert passed(verdict, fault.caught_by) is True


def test_what_fails_first_is_named() -> None:
    verdict, error = simulated("gate-never-opens")
    assert error == "no further event can arrive; not ended: a"
    assert why(verdict, "no_deadlock") == (
        "no end: stream; stream waits: no command is unanswered; the version is 2 of 5; 0 groups in the buffer, 0 complete"
    )
    assert "the loop did not end" in why(verdict, "logger_is_harmless")
    assert passed(verdict, "logger_is_harmless") is None


RAISED = ("logger_failed", {"why": "OSError: disk full"})
BEGINS = ("begin", {"step": 2})


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ([RAISED, BEGINS, ("ended", {})], True),
        ([RAISED, BEGINS, ("ended", {"error": "the logger's machine is lost"})], True),  # another failure
        ([RAISED, BEGINS, RAISED, ("ended", {"error": "step 2: disk full"})], False),
        ([RAISED, ("error", {"why": "no memory"}), ("ended", {"error": "no memory"})], None),
        ([RAISED, ("ended", {"error": "cannot go on"})], False),  # nothing else went wrong
        ([RAISED, BEGINS, RAISED, ("ended", {"error": "cannot go on"})], False),
        ([RAISED, ("exhausted", {}), ("ended", {"error": "too few groups"})], None),
        ([("logger_failed", {"why": "ValueError: "}), BEGINS, ("ended", {})], True),
        ([RAISED, BEGINS, ("ended", {}), RAISED], True),
        ([("ended", {"error": "the logger is slow"})], None),
    ],
)
def test_an_end_is_the_loggers_if_it_raised_what_the_loop_says_or_nothing_else_went_wrong(
    rows: list[tuple[str, dict[str, object]]], answer: bool | None
) -> None:
    frame = to_frame(
        [
            make_record(lab="stream", phase="stream", rank=-1, metric=name, value=None, unit="", ids=ids)
            for name, ids in rows
        ]
    )
    config = as_settings(made(LAB.config, {"simulated": True, "ranks": 1}))
    assert Answers(frame, config, LAB.load_rules())["logger_is_harmless"].passed is answer


JUDGED = [fault for fault in OF_RANKS if fault.exit == 1]
ON_RANKS = [pytest.param(fault, marks=on_an_engine(fault.set), id=fault.name) for fault in JUDGED]
CONFIGS = {repr(fault.set): fault for fault in JUDGED}  # faults with equal configs share one run without a fault


@pytest.mark.slow
@pytest.mark.drawn(2, of="faults")
@pytest.mark.parametrize("fault", ON_RANKS)
def test_a_rank_with_a_bug_fails_its_check_and_hardly_another(on_ranks: Callable[..., kit.Run], fault: Fault) -> None:
    broke = failed(on_ranks(fault.name, **fault.set).verdict(), timed=fault.caught_by)
    assert {fault.caught_by} <= broke <= {fault.caught_by} | ALSO.get(fault.name, set())


@pytest.mark.slow
@pytest.mark.drawn(1, of="without faults")
@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=on_an_engine(fault.set), id=fault.name) for fault in CONFIGS.values()],
)
def test_without_the_bug_ranks_pass(on_ranks: Callable[..., kit.Run], fault: Fault) -> None:
    verdict = on_ranks(**fault.set).verdict()
    assert failed(verdict) == set()
    assert all(passed(verdict, other.caught_by) for other in JUDGED if other.set == fault.set)


@pytest.mark.slow
@pytest.mark.drawn(1, of="faults in bfloat16")
@pytest.mark.parametrize("fault", ON_RANKS)
def test_rounding_in_bfloat16_hides_no_bug(on_ranks: Callable[..., kit.Run], fault: Fault) -> None:
    settings = {**fault.set, "dtype": "bfloat16"}
    right = on_ranks(**settings).verdict()
    assert failed(right) == set()
    assert passed(right, fault.caught_by) is True
    assert fault.caught_by in failed(on_ranks(fault.name, **settings).verdict(), timed=fault.caught_by)


@pytest.mark.slow
@pytest.mark.drawn(1, of="replicas that stop")
@pytest.mark.parametrize("fault", [fault for fault in OF_RANKS if fault.exit == 3], ids=lambda fault: fault.name)
def test_a_replica_that_stops_is_named(places: None, fault: Fault) -> None:
    with pytest.raises(KitError, match=r"rank 1|replica 0"):
        kit.run("stream", fault=fault.name)
    folder = list_runs(runs_dir())[0]
    verdict = kit.load(folder).verdict()
    assert failed(verdict) - {"equals_plain"} == {fault.caught_by}  # the broken loop computed less than the plain one
    assert "lockstep: " in why(verdict, fault.caught_by)
