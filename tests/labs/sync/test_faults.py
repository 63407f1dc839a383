"""Each fault fails its check, which passes in the same config without the fault. Other checks that the bug fails are listed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pandas as pd
import pytest

import kit
from kit.labs.definition import Fault
from kit.labs.sync.faults import FAULTS
from kit.labs.sync.rules import healing
from kit.results import list_runs, runs_dir
from tests.labs.parts import failed, on_an_engine, unanswered, why

Sync = Callable[..., kit.Run]
CONFIGS = {repr(fault.set): fault for fault in FAULTS}  # faults with equal configs share one run without a fault
HERE = {fault.name: fault for fault in FAULTS if fault.exit == 1}
# Other checks that a bug fails, besides the one it is listed under.
ALSO = {
    "permuted-rows": {"logits_equal"},
    "stale-bucket": {"logits_equal", "trained_changed"},
    "repeats-a-bucket": {"logits_equal"},
    "compares-beginnings": {"logits_equal", "no_second_copy"},  # it keeps what it compares
    "unfilled-bucket": {"logits_equal", "trained_changed", "no_torn_reads"},
    "overwritten-bucket": {"bit_exact", "logits_equal"},
    "restored-old-version": {"logits_equal", "names_right"},  # the trainer's ranks have unlike copies of a norm
    "cache-after-offload": {
        "logits_equal",
        "no_torn_reads",
        "trained_changed",
    },  # all versions are zeros, so they look the same
    "activate-before-publish": {"failure_is_clean", "bit_exact", "no_torn_reads"},  # the old version is lost
    "publish-before-apply": {"failure_is_clean", "bit_exact"},  # the new version cannot be taken back
    "dropped-bucket": {
        "logits_equal",
        "no_torn_reads",
        "version_order",
        "trained_changed",
        "every_parameter_written",
    },  # nothing is written at one point
    "swapped-shards": {"logits_equal"},
    # All versions give the same logits, and the base is a second copy.
    "frozen-base": {"logits_equal", "names_right", "no_torn_reads", "weights_once"},
    "leaks-on-failure": {"segments_return_to_baseline"},
    "transposed-tensor": {"bit_exact"},
    "queries-first": {"logits_equal"},
    "parameter-not-sent": {"bit_exact", "logits_equal", "trained_changed", "failure_is_clean"},  # NaN where it woke
    "scales-not-sent": {"bit_exact", "trained_changed", "failure_is_clean"},
    "old-tensor": {"bit_exact", "logits_equal", "trained_changed"},
    "misaligned-offset": {"logits_equal"},
    "leaked-group": {"failure_is_clean"},
    "leaked-segment": {"failure_is_clean", "no_second_copy"},  # what is mapped is held as a tensor
    "torn-read": {"version_order", "failure_is_clean"},  # the gate is never taken, also where a sync fails
    "early-gate": {"version_order", "failure_is_clean"},
    "keeps-every-segment": {"failure_is_clean", "segments_return_to_baseline"},
    "adopted-shared": {"no_torn_reads"},  # such a mapping has no lock, and is packed over
    "half-adopted": {
        "logits_equal",
        "trained_changed",
        "every_parameter_written",
        "no_torn_reads",
        "segments_return_to_baseline",
        "failure_is_clean",
    },
    "reads-ahead": {"version_order", "failure_is_clean"},
    "resumed-trainer": {"logits_equal"},
    "answered-twice": {"failure_is_clean"},
    "tied-name-skipped-by-a-stage": {"logits_equal", "names_right"},
    "swapped-experts": {"logits_equal"},
    "activates-alone": {"version_order", "no_torn_reads"},
    "keeps-new-weights": {"bit_exact", "no_torn_reads", "version_order"},
    # Changes to a wrong copy leave old weights under the new label, and some versions are empty.
    "snapshot-before-ack": {
        "trained_changed",
        "every_parameter_written",
        "no_torn_reads",
        "version_order",
        "failure_is_clean",
    },
    "anchor-from-changed-only": {"failure_is_clean"},  # what was lost is sent again by chance
    "version-without-bytes": {
        "logits_equal",
        "trained_changed",
        "every_parameter_written",
        "no_torn_reads",
        "version_order",
        "failure_is_clean",
    },
    # What was kept is put back by the same wrong load.
    "wrong-half": {"logits_equal", "no_torn_reads", "failure_is_clean"},
    "tied-name-skipped": {"logits_equal", "trained_changed", "no_torn_reads", "failure_is_clean"},
    "buffer-not-sent": {"logits_equal"},
    "prepacked-stale": {"logits_equal", "trained_changed", "failure_is_clean", "no_torn_reads"},
}


@pytest.mark.slow
@pytest.mark.drawn(2, of="faults")
@pytest.mark.parametrize("name", [pytest.param(name, marks=on_an_engine(HERE[name].set)) for name in HERE])
def test_a_fault_fails_its_check_and_hardly_another(sync: Sync, name: str) -> None:
    broken = failed(sync(fault=name, **HERE[name].set).verdict())
    assert {HERE[name].caught_by} <= broken <= {HERE[name].caught_by} | ALSO.get(name, set())


@pytest.mark.slow
@pytest.mark.drawn(2, of="other ways")
@pytest.mark.parametrize("name", ["stale-bucket", "permuted-rows", "repeats-a-bucket"])
def test_wrong_bytes_are_named_by_tensor_and_bucket(sync: Sync, name: str) -> None:
    reason = why(sync(fault=name, **HERE[name].set).verdict(), "bit_exact")
    assert re.search(r"tensors_differ: \d+ after verify \(rank \d, cycle \d\): [\w.]+ \(buckets? \d", reason)
    assert ("bytes of the version before in bucket 0;" in reason) == (name == "stale-bucket")
    assert ("bytes of the bucket before in bucket 1;" in reason) == (name == "repeats-a-bucket")
    assert "the replicas that differ do so up to the last cycle" in reason


def test_a_replica_that_heals_is_told_from_one_that_stays_wrong() -> None:
    rows = [(rank, cycle, float(rank == 1 and cycle == 1)) for rank in (1, 2) for cycle in (1, 2, 3)]
    frame = pd.DataFrame(rows, columns=["rank", "cycle", "value"])
    assert healing(frame) == "later syncs brought the right bytes: rank 1 from cycle 2 on"
    assert healing(frame.assign(value=1.0)) == "the replicas that differ do so up to the last cycle"
    assert healing(frame.assign(value=0.0)) == ""


@pytest.mark.slow
@pytest.mark.drawn(2, of="other ways")
@pytest.mark.parametrize("placement", ["overlap", "apart"])
def test_a_mapping_that_is_kept_shows_where_replicas_pause(sync: Sync, placement: str) -> None:
    """placement=apart sends versions through a ring, placement=overlap from the cache."""
    paused = {**HERE["leaked-segment"].set, "refresh": "paused", "placement": placement}
    assert "segments_return_to_baseline" in failed(sync(fault="leaked-segment", **paused).verdict())
    assert failed(sync(**paused).verdict()) == set()


@pytest.mark.slow
@pytest.mark.drawn(2, of="other ways")
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=on_an_engine(fault.set), id=fault.name) for fault in CONFIGS.values()]
)
def test_without_the_fault_its_check_passes(sync: Sync, fault: Fault) -> None:
    verdict = sync(**fault.set).verdict()
    assert failed(verdict) == set()
    assert not unanswered(verdict) & {other.caught_by for other in FAULTS if other.set == fault.set}


@pytest.mark.slow
@pytest.mark.drawn(2, of="other ways")
@pytest.mark.parametrize("name", ["permuted-rows", "stale-bucket", "cache-after-offload", "misaligned-offset"])
def test_what_is_compared_on_the_way_sees_what_happens_on_the_way(name: str) -> None:
    """With digests on, a run either breaks and names the tensor, or the bug acts after the comparison, as rows permuted in the weights
    do."""
    if name in {"permuted-rows", "misaligned-offset", "cache-after-offload"}:
        run = kit.run("sync", fault=name, **{**HERE[name].set, "verify": "auto"})
        assert HERE[name].caught_by in failed(run.verdict())
        return
    with pytest.raises(kit.RankError, match="differs from what was sent: "):
        kit.run("sync", fault=name, **{**HERE[name].set, "verify": "auto"})


@pytest.mark.slow
def test_who_does_not_answer_is_named() -> None:
    with pytest.raises(kit.RankError, match=r"rank 4 did not answer within 10 s.*version -1 stays active") as stalled:
        kit.run("sync", fault="receiver-stalls", layers=2)
    assert stalled.value.phase == "refresh"
    assert "not on rank 4, refresh, cycle 1" in blamed()["receivers_answer"]
    with pytest.raises(kit.RankDied, match="SIGKILL") as died:
        kit.run("sync", fault="receiver-dies", layers=2)
    assert (died.value.rank, died.value.phase) == (4, "refresh")
    assert "not on rank 4, refresh, cycle 1" in blamed()["receivers_answer"]


@pytest.mark.slow
@pytest.mark.drawn(2, of="other ways")
@pytest.mark.parametrize("name", ["finish-never-called", "update-left-open"])
def test_an_engine_refuses_the_update_after_one_that_is_open(name: str) -> None:
    """The run breaks, and what was measured until then fails the check."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    with pytest.raises(kit.RankError, match="start_weight_update: an update is open"):
        kit.run("sync", fault=name, layers=2, deadline_s=10)
    assert fault.caught_by in failed(kit.load(list_runs(runs_dir())[0]).verdict())


def blamed() -> dict[str, str]:
    """Return the one check that failed in the newest run, `receivers_answer`, and why."""
    folder = list_runs(runs_dir())[0]
    found = {row.check: row.why for row in kit.load(folder).verdict().failed}
    assert set(found) == {"receivers_answer"}
    return found
