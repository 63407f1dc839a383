"""A right run passes in every layout and over every transport; what cannot be measured says why; its records are consistent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import kit
from kit.labs.discover import find
from kit.labs.sync.lab import SyncConfig
from kit.labs.sync.rules import attempts, points, required_order
from kit.results import Measured, judge, with_ids
from tests.labs.parts import failed, failing_parts, logged_steps, rows_of_metric, unanswered, why

Sync = Callable[..., kit.Run]
APART = {"ranks": 4, "replicas": 2, "placement": "apart"}
EQUAL = {"ranks": 6, "replicas": 2, "infer_tp": 2}
OF_OTHER_SETTINGS = {"trainer_untouched", "routing_effective", "delta_bytes", "weights_adopted"}
EXCUSE = "the layouts differ, so sums round differently"


def test_every_check_passes_or_says_why_not(sync: Sync) -> None:
    verdict = sync(sweep=True, sweep_mib=2).verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) == {"others_untouched"}
    asked = [check.name for check in find("sync").all_rules() if check.name not in OF_OTHER_SETTINGS]
    assert [row.check for row in verdict] == asked
    assert "; SHA-256 of 26 tensors, 29 comparisons; in transit 26 of 26" in why(verdict, "bit_exact")
    assert EXCUSE in why(verdict, "logits_equal")
    assert "training changed 16 or more tensors per cycle" in why(verdict, "trained_changed")
    assert "7 syncs to replicas without weights" in why(verdict, "every_parameter_written")
    early = "activate, alone, both, calls that must be refused, emptied, expansion, gone, late, middle, missing, mute, packed"
    later = "publish, refill, refresh, silent, stalled, transport, unfit, unlike, unsent, wrong-bytes"
    assert f"{early}, {later}" in why(verdict, "failure_is_clean")
    assert "0 of 78 tensors on all receivers differ" in why(verdict, "base_equal")
    assert "all 13 combinations of transport and bucket size" in why(verdict, "sweep_arrived")


def test_the_excuse_of_a_pass_is_not_the_reason_of_a_failure(sync: Sync) -> None:
    """Different layouts excuse only small differences."""
    frame = sync(sweep=True, sweep_mib=2).frame()
    checks = {check.name: check for check in find("sync").load_rules()}
    config = {**dataclasses.asdict(SyncConfig(layers=2, cycles=2)), "dtype": "float32"}
    far = frame.assign(value=frame["value"].where(frame["metric"] != "logits_error", 1.35))
    for given, excused in ((frame, True), (far, False)):
        found = checks["logits_equal"].measure(given, config)
        assert isinstance(found, Measured)
        assert EXCUSE not in found.why
        assert found.if_passed == EXCUSE
        row = next(row for row in judge(given, config, [checks["logits_equal"]]))
        assert (EXCUSE in row.why, row.passed) == (excused, excused)


def test_forwards_are_attempted_at_every_point(sync: Sync) -> None:
    run = sync(sweep=True, sweep_mib=2)
    table, missing = attempts(run.frame(), run.config)
    assert missing == []
    first = table[(table["cycle"] == 1) & (table["rank"] == 4)]
    buckets = int(rows_of_metric(run, "refresh", "buckets")["value"].max())
    assert list(zip(first["point"], first["bucket"], strict=True)) == required_order("refresh", buckets)
    forwards = dict(zip(first["point"], first["forward"], strict=True))
    assert forwards["begin"] == "version -1"
    assert forwards["end"] == "version 1"
    assert {forwards[name] for name in ("gate", "write", "apply", "finalize", "publish")} == {"waits"}


@pytest.mark.slow
def test_a_run_that_breaks_is_not_blamed_for_what_it_did_not_get_to(sync: Sync) -> None:
    assert failing_parts(sync(sweep=True, sweep_mib=2)) == []


def test_replicas_serve_while_weights_arrive(sync: Sync) -> None:
    run = sync(sweep=True, sweep_mib=2)
    assert (rows_of_metric(run, "refresh", "served")["value"] >= 2).all()
    assert (rows_of_metric(run, "refresh", "versions_differ")["value"] == 1).all()
    assert set(rows_of_metric(run, "refresh", "served")["rank"]) == {
        4
    }  # the others share devices with the trainer, so they sleep
    assert set(rows_of_metric(run, "expand", "version")["rank"]) == {0, 2, 3}


def test_a_run_has_more_than_one_bucket(sync: Sync) -> None:
    run = sync(sweep=True, sweep_mib=2)
    buckets = rows_of_metric(run, "refresh", "buckets")["value"]
    assert (buckets >= 8).all()
    assert (
        rows_of_metric(run, "refresh", "bytes")["value"] == rows_of_metric(run, "expand", "bytes")["value"].max()
    ).all()


def test_every_way_of_the_comparison_has_a_rate(sync: Sync) -> None:
    rates = with_ids(rows_of_metric(sync(sweep=True, sweep_mib=2), "sweep", "rate"), "transport")
    assert set(rates["transport"]) == {"memcpy", "shm", "broadcast", "serialize", "per-tensor"}
    assert len(rates) == rates["ids"].nunique() == 1 + 3 * 4 + 1


@pytest.mark.slow
def test_equal_layouts_give_the_same_bits(sync: Sync) -> None:
    verdict = sync(**EQUAL).verdict()
    assert failed(verdict) == set()
    assert "16 of 16 logits are identical bit for bit" in why(verdict, "logits_equal")


# Without a sweep; with replicas on devices of their own, nothing sleeps and nothing is offloaded.
NOT_ASKED = {"others_untouched", "sweep_arrived", "sleepers_release", "trainer_restored", "weights_once"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"transport": "broadcast"},
        {"transport": "serialize", "verify_share": 0.5},
        {"transport": "per-tensor", "dtype": "bfloat16"},
        {"pp": 2, "tp": 1, "bucket_mib": 0.03},
        {"verify": "sha256", "oversize": "refuse"},
        {"ranks": 5, "tp": 1, "replicas": 2, "placement": "apart", "verify": "none"},  # three data-parallel ranks
    ],
    ids=lambda config: "-".join(f"{k}={v}" for k, v in config.items()),
)
def test_other_ways(sync: Sync, config: dict[str, object]) -> None:
    verdict = sync(**config).verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) <= NOT_ASKED


@pytest.mark.slow
def test_what_was_compared_on_the_way_is_reported(sync: Sync) -> None:
    message = why(sync(transport="serialize", verify_share=0.3).verdict(), "bit_exact")
    part = int(message.split("in transit ")[1].split(" of ")[0])
    assert 0 < part < 26


@pytest.mark.slow
@pytest.mark.parametrize("refresh", ["staged", "paused"])
def test_apart_nobody_sleeps(sync: Sync, refresh: str) -> None:
    run = sync(**APART, refresh=refresh)
    verdict = run.verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) == NOT_ASKED
    if refresh == "paused":  # nothing is routed to a paused replica: requests to it wait
        stopped = points(run.frame())
        stopped = stopped[(stopped["path"] == "stream") & ~stopped["point"].isin(["begin", "activate", "end"])]
        assert set(stopped[stopped["rank"] >= 2]["routed"]) == {0}
        assert set(stopped[stopped["rank"] >= 2]["forward"]) == {"waits"}
    assert set(rows_of_metric(run, "refresh", "version")["rank"]) == {0, 2, 3}
    assert "expand" not in set(run.frame()["phase"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "rendezvous"])
def test_two_worlds(sync: Sync, transport: str) -> None:
    run = sync(worlds="two", transport=transport, sweep=True, sweep_mib=2)
    verdict = run.verdict()
    assert failed(verdict) == set()
    steps = [[step for step, *_ in logged_steps(run.dir / "logs", rank)] for rank in range(run.config["ranks"])]
    assert steps == [[1, 2]] * 2 + [[]] * 3  # the trainer's ranks train, the replicas' ranks do not
    frame = run.frame()
    used = with_ids(frame[frame["metric"] == "transport_receivers"], "transport")
    assert set(used["transport"]) == {"shm" if transport == "auto" else "rendezvous"}
