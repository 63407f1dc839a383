"""A right run passes in every layout and by every way; what cannot be measured says why; records hold what they say."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest

import kit
from kit.labs.discover import find
from tests.labs.sync.conftest import failed, unanswered, why

Sync = Callable[..., kit.Run]
APART = {"ranks": 4, "replicas": 2, "placement": "apart"}
EQUAL = {"ranks": 6, "replicas": 2, "infer_tp": 2}


def of(run: kit.Run, phase: str, metric: str) -> pd.DataFrame:
    frame = run.frame()
    return frame[(frame["phase"] == phase) & (frame["metric"] == metric)]


def test_every_check_passes_or_says_why_not(sync: Sync) -> None:
    verdict = sync(sweep=True, sweep_mib=2).verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) == {"others_untouched"}
    assert [row.check for row in verdict] == [check.name for check in find("sync").load_checks()]
    assert "none differs; SHA-256 of 26 tensors on 6 occasions; on the way 26 of 26" in why(verdict, "bit_exact")
    assert "layouts differ" in why(verdict, "logits_equal")


def test_replicas_serve_while_weights_arrive(sync: Sync) -> None:
    run = sync(sweep=True, sweep_mib=2)
    assert (of(run, "refresh", "served")["value"] >= 2).all()
    assert (of(run, "refresh", "versions_differ")["value"] == 1).all()
    assert set(of(run, "refresh", "served")["rank"]) == {4}  # the others share devices with the trainer, and sleep
    assert set(of(run, "expand", "version")["rank"]) == {0, 2, 3}


def test_a_run_has_more_than_one_bucket(sync: Sync) -> None:
    run = sync(sweep=True, sweep_mib=2)
    buckets = of(run, "refresh", "buckets")["value"]
    assert (buckets >= 8).all()
    assert (of(run, "refresh", "bytes")["value"] == of(run, "expand", "bytes")["value"].max()).all()


def test_every_way_of_the_comparison_has_a_rate(sync: Sync) -> None:
    frame = sync(sweep=True, sweep_mib=2).frame()
    rates = {metric for metric in frame["metric"] if metric.startswith("rate/")}
    assert {metric.split("/")[1] for metric in rates} == {"memcpy", "shm", "broadcast", "serialize", "per-tensor"}
    assert len(rates) == 1 + 3 * 4 + 1


@pytest.mark.slow
def test_equal_layouts_give_the_same_bits(sync: Sync) -> None:
    verdict = sync(**EQUAL).verdict()
    assert failed(verdict) == set()
    assert "8 of 8 are the same bits" in why(verdict, "logits_equal")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"transport": "broadcast"},
        {"transport": "serialize", "verify_share": 0.3},
        {"transport": "per-tensor", "dtype": "bfloat16"},
        {"pp": 2, "tp": 1, "bucket_mib": 0.03},
        {"verify": "sha256", "oversize": "refuse"},
        {"ranks": 5, "tp": 1, "replicas": 2, "placement": "apart", "verify": "none"},  # three data ranks
    ],
    ids=lambda config: "-".join(f"{k}={v}" for k, v in config.items()),
)
def test_other_ways(sync: Sync, config: dict[str, object]) -> None:
    verdict = sync(**config).verdict()
    assert failed(verdict) == set()
    assert unanswered(verdict) <= {"others_untouched", "sweep_arrived"}


@pytest.mark.slow
def test_what_was_compared_on_the_way_is_said(sync: Sync) -> None:
    said = why(sync(transport="serialize", verify_share=0.3).verdict(), "bit_exact")
    part = int(said.split("on the way ")[1].split(" of ")[0])
    assert 0 < part < 26


@pytest.mark.slow
@pytest.mark.parametrize("refresh", ["staged", "paused"])
def test_apart_nobody_sleeps(sync: Sync, refresh: str) -> None:
    run = sync(**APART, refresh=refresh)
    verdict = run.verdict()
    assert failed(verdict) == set()
    assert ("no_torn_reads" in unanswered(verdict)) == (refresh == "paused")
    assert set(of(run, "refresh", "version")["rank"]) == {0, 2, 3}
    assert "expand" not in set(run.frame()["phase"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "rendezvous"])
def test_two_worlds(sync: Sync, transport: str) -> None:
    run = sync(worlds="two", transport=transport, sweep=True, sweep_mib=2)
    verdict = run.verdict()
    assert failed(verdict) == set()
    used = {metric for metric in run.frame()["metric"] if metric.startswith("transport/")}
    assert used == {"transport/shm" if transport == "auto" else "transport/rendezvous"}
