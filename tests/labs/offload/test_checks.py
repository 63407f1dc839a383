"""Memory checks on made-up records: what a GPU would show, and what a leak looks like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import pandas as pd
import pytest

from kit.labs.discover import find
from kit.labs.offload.lab import OffloadConfig
from kit.labs.offload.ranks.rehearsals import is_named
from kit.labs.offload.ranks.releaser import reported as reported_by
from kit.labs.offload.rules import piled_up
from kit.results import Row, VerdictRow, judge, to_frame
from kit.results.growth import gpu_of_rank
from kit.results.records import ZEROS
from kit.results.rules import NotMeasured
from tests.labs.parts import Answers
from tests.results.conftest import make_record

MIB = 2**20
CONFIG = asdict(OffloadConfig(ranks=1, tp=1, cycles=10, size="125m", dtype="float32"))
Fact = tuple[int, str, str, float]


def frame_of(rows: Iterable[Fact]) -> pd.DataFrame:
    return to_frame(
        [
            Row(run="r", lab="offload", cycle=c, phase=p, rank=0, metric=m, value=v, unit="1", time=0)
            for c, p, m, v in rows
        ]
    )


def answers(rows: Iterable[Fact], **config: object) -> Answers:
    return Answers(frame_of(rows), {**CONFIG, **config}, find("offload").load_rules())


def gpu(
    idle: float,
    *,
    taken: float = 1000.0,
    left: float = 100.0,
    moved: float = 0.0,
    damaged: float = 0.0,
    kernels: float = 0.0,
) -> list[Fact]:
    """A GPU with 500 MiB in use before the job, and a bystander. Communicators take `taken` MiB, of which `left` MiB stay; training loads
    `kernels` MiB of kernels."""
    rows: list[Fact] = [
        (0, "start", "driver_used", 500 * MIB),
        (0, "start", "reserved", 0),
        (0, "baseline", "driver_used", (500 + kernels) * MIB),
        (0, "baseline", "reserved", 0),
        (1, "fingerprint", "driver_used", (2500 + taken + kernels) * MIB),
        (1, "fingerprint", "reserved", 2000 * MIB),
        (1, "idle", "driver_used", idle * MIB),
        (1, "idle", "reserved", (idle - 500 - kernels - left) * MIB),
    ]
    for cycle, phase, more in ((0, "start", 0.0), (1, "idle", moved)):
        rows += [
            (cycle, phase, "bystander_driver", (600 + more) * MIB),
            (cycle, phase, "bystander_bytes", 64 * MIB),
            (cycle, phase, "bystander_damaged", damaged),
        ]
    return rows


def test_a_gpu_that_is_given_back() -> None:
    rows = answers(gpu(600))
    assert (rows["residual"].measured, rows["residual"].passed) == (100.0, True)
    assert (rows["comm_released"].measured, rows["comm_released"].passed) == (0.9, True)
    assert (rows["others_untouched"].measured, rows["others_untouched"].passed) == (0.0, True)


def test_a_gpu_that_is_not() -> None:
    rows = answers(gpu(1400, left=900, moved=-20))
    assert (rows["residual"].measured, rows["residual"].passed) == (900.0, False)
    assert rows["comm_released"].measured == pytest.approx(0.1)
    assert rows["comm_released"].passed is False
    assert (rows["others_untouched"].measured, rows["others_untouched"].passed) == (20.0, False)


def test_kernels_that_training_loaded_are_residual_but_no_communicators() -> None:
    rows = answers(gpu(900, kernels=300))
    assert (rows["residual"].measured, rows["residual"].passed) == (400.0, True)
    assert (rows["comm_released"].measured, rows["comm_released"].passed) == (0.9, True)


@pytest.mark.parametrize(("left", "share", "passed"), [(290.0, 0.71, True), (310.0, 0.69, False), (1000.0, 0.0, False)])
def test_seven_tenths_of_the_communicators_must_come_back(left: float, share: float, passed: bool) -> None:
    row = answers(gpu(500 + left, left=left))["comm_released"]
    assert (row.measured, row.passed) == (pytest.approx(share), passed)


@pytest.mark.parametrize(("level", "passed"), [(999.0, True), (1001.0, False)])
def test_500_mib_may_stay_on_the_gpu(level: float, passed: bool) -> None:
    row = answers(gpu(level))["residual"]
    assert (row.measured, row.passed) == (level - 500, passed)


@pytest.mark.parametrize(("grown", "passed"), [(8.0, True), (199.0, True), (201.0, False)])
def test_a_gpu_s_drift_is_the_driver_s_from_the_first_release_to_the_last(grown: float, passed: bool) -> None:
    """Neither the growth of host memory nor the memory taken at the start counts."""
    rows = [(0, "start", "driver_used", 500.0 * MIB)]
    rows += [(c, "idle", "driver_used", (900 + grown * (c - 1) / 4) * MIB) for c in range(1, 6)]
    rows += [(c, "idle", "anon_rss", 1000.0 * c * MIB) for c in range(1, 6)]
    row = answers(rows, cycles=5)["memory_drift"]
    assert (row.measured, row.passed) == (pytest.approx(grown), passed)
    levels = f"900 MiB after idle in cycle 1, {900 + grown:g} MiB after idle in cycle 5"
    assert row.why == f"driver_used: {levels} (+{grown:g} MiB; rank 0)"


def test_what_only_a_driver_knows_is_not_asked_of_a_host() -> None:
    rows = answers([*cycles(300, 0.1), *weighed(fell=99, peak=600)])
    for check in ("residual", "comm_released", "others_untouched"):
        assert (rows[check].passed, rows[check].why) == (None, "not measured: the ranks had no CUDA device")


def test_a_bystander_that_was_written_to_or_is_not_listed() -> None:
    row = answers(gpu(600, damaged=4))["others_untouched"]
    assert row.passed is False
    assert "4 bytes" in row.why
    for damaged, passed in ((0, None), (4, False)):
        facts = gpu(600, damaged=damaged)
        hidden = [(c, p, m, 0.0 if m == "bystander_driver" else v) for c, p, m, v in facts]
        row = answers(hidden)["others_untouched"]
        assert row.passed is passed
        assert ("does not list the bystander" in row.why) is (not damaged)


def test_what_stays_by_choice_is_no_residual() -> None:
    rows = answers(gpu(600), weights=False, groups=False)
    assert "groups, weights=false" in rows["residual"].why
    assert "groups=false" in rows["comm_released"].why


def cycles(level: float, per_cycle: float, control: float = 0.0) -> list[Fact]:
    mine = [(c, phase, "anon_rss", (level + per_cycle * c) * MIB) for c in range(1, 11) for phase in ("idle", "verify")]
    return mine + [(c, "control", "anon_rss", (level + control * c) * MIB) for c in range(1, 12)]


def test_growth_over_cycles() -> None:
    steady = answers(cycles(300, 0.1), size="tiny")
    assert steady["memory_slope"].passed
    assert steady["memory_drift"].measured == pytest.approx(0.9)
    leak = answers(cycles(300, 16), size="tiny")["memory_slope"]
    assert leak.measured == pytest.approx(16)
    assert leak.passed is False
    # A job whose memory also grows in the control runs is not leaking because of the release.
    assert answers(cycles(300, 16, control=16))["memory_slope"].measured == 0
    # On a GPU too, 1 % of a large job's state is no growth.
    large = answers((c, "idle", "driver_used", 12.0 * c * MIB) for c in range(1, 7))["memory_slope"]
    assert (large.passed, large.measured) == (True, 12)
    few = answers(cycles(300, 16), cycles=3)["memory_slope"]
    assert (few.passed, few.why) == (None, "not measured: needs at least 4 cycles")


def weighed(fell: float, peak: float) -> list[Fact]:
    return [
        (1, "fingerprint", "resident_bytes", 100 * MIB),
        (1, "idle", "left_bytes", 0),
        (1, "idle", "left_tensors", 0),
        (1, "fingerprint", "anon_rss", 500 * MIB),
        (1, "idle", "anon_rss", (500 - fell) * MIB),
        (1, "reload", "peak_rss", peak * MIB),
        (2, "train", "rss", 600 * MIB),
    ]


def test_bytes_must_leave_the_process_too() -> None:
    assert answers(weighed(fell=99, peak=600))["tensors_released"].passed
    kept = answers(weighed(fell=10, peak=600))["tensors_released"]
    assert kept.measured == pytest.approx(0.1)
    assert "1.000 by tensor storages, 0.100 by anon_rss" in kept.why


def test_the_way_back_against_the_training_after_it() -> None:
    assert answers(weighed(fell=99, peak=640))["reload_peak"].passed
    double = answers(weighed(fell=99, peak=720))["reload_peak"]
    assert (double.measured, double.passed) == (1.2, False)
    assert "rank 0, cycle 1" in double.why


def test_what_is_missing_is_not_judged() -> None:
    assert {row.passed for row in judge(to_frame([]), CONFIG, find("offload").load_rules())} == {None}
    partial = [(1, "fingerprint", "groups_watched", 20.0), (1, "verify", "stale_holders", 0.0)]
    row = answers(partial)["handles_alive"]
    assert (row.passed, "recorded 1 times, not 10" in row.why) == (None, True)


def two_ranks(*, fell: float, reported: Iterable[str] = ("driver_used",), job: float = 100) -> pd.DataFrame:
    """Two ranks on one GPU, each with a job of `job` MiB; both report the driver's number for the whole GPU."""
    rows: list[tuple[int, int, str, str, float]] = []
    for rank in range(2):
        rows += [(rank, 0, "run", "gpu", 0)]
        for cycle in (1, 2):
            rows += [
                (rank, cycle, "fingerprint", "resident_bytes", job * MIB),
                (rank, cycle, "idle", "left_bytes", 0),
            ]
            for phase, level in (
                ("start", 900.0),
                ("baseline", 900.0),
                ("fingerprint", 1300.0),
                ("idle", 1300.0 - fell),
            ):
                rows += [(rank, cycle, phase, "driver_used", level * MIB), (rank, cycle, phase, "reserved", 150 * MIB)]
                if "process_used" in reported:
                    part = {"start": 400.0, "baseline": 400.0, "fingerprint": 600.0, "idle": 600.0 - fell / 2}[phase]
                    rows += [(rank, cycle, phase, "process_used", part * MIB)]
    return to_frame(
        [
            Row(run="r", lab="offload", cycle=c, phase=p, rank=r, metric=m, value=v, unit="1", time=0)
            for r, c, p, m, v in rows
        ]
    )


def judged(frame: pd.DataFrame, check: str) -> VerdictRow:
    return Answers(frame, {**CONFIG, "ranks": 2}, find("offload").load_rules())[check]


def test_ranks_on_one_gpu_do_not_each_claim_what_left_it() -> None:
    """The GPU gets back 1024 of the jobs' 2048 MiB: half, although that equals one rank's whole job. Less is not seen by the driver."""
    half = judged(two_ranks(fell=1024, job=1024), "tensors_released")
    assert half.measured == pytest.approx(0.5)
    assert "0.500 by driver_used of the GPU, shared by 2 ranks" in half.why
    assert judged(two_ranks(fell=2048, job=1024), "tensors_released").passed
    small = judged(two_ranks(fell=100, job=1023), "tensors_released")
    assert (small.measured, small.passed) == (1.0, True)
    assert "too small to see in driver_used" in small.why


def test_communicators_that_took_little_are_not_judged() -> None:
    row = judged(two_ranks(fell=300, job=100), "comm_released")
    assert row.passed
    rows = two_ranks(fell=10)
    little = rows["phase"].eq("fingerprint") & rows["metric"].eq("driver_used")
    rows.loc[little, "value"] = 931 * MIB
    assert judged(rows, "comm_released").why == "not measured: communicators took less than 32 MiB of driver memory"


def test_communicators_of_ranks_on_one_gpu_are_what_is_beyond_both_allocators() -> None:
    row = judged(two_ranks(fell=300), "comm_released")
    assert (row.measured, row.passed) == (0.75, True)
    assert row.why == "of 400 MiB per GPU, from driver_used of the GPU, shared by 2 ranks"


def test_a_process_s_own_bytes_are_taken_where_a_gpu_is_shared_and_they_were_always_reported() -> None:
    row = judged(two_ranks(fell=300, reported=("driver_used", "process_used")), "residual")
    assert (row.measured, row.why.partition(" while")[0]) == (50.0, "process_used")
    frame = two_ranks(fell=300, reported=("driver_used", "process_used"))
    once = frame[(frame["metric"] != "process_used") | (frame["phase"] != "idle")]
    row = judged(once, "residual")
    whole = "driver_used of the GPU, shared by 2 ranks while released, above a CUDA context and one matmul (GPU 0)"
    assert (row.measured, row.why) == (50.0, f"{whole}: 100 MiB divided by its 2 ranks")


@pytest.mark.parametrize(("left", "passed"), [(999, True), (1001, False)])
def test_each_of_the_ranks_that_share_a_gpu_may_leave_500_mib_there(left: float, passed: bool) -> None:
    row = judged(two_ranks(fell=400 - left), "residual")
    assert (row.measured, row.passed) == (left / 2, passed)


def suspended(kept: float) -> list[Fact]:
    """A GPU with 1000 MiB of communicators, of which 400 MiB stay while suspended; NCCL reports that it keeps `kept` MiB."""
    return [*gpu(900, left=400), (1, "release", "comm_persist_after", kept * MIB)]


@pytest.mark.parametrize(("kept", "share", "passed"), [(400.0, 1.0, True), (200.0, 0.75, True), (0.0, 0.6, False)])
def test_what_nccl_cannot_suspend_is_reported_and_no_failure(kept: float, share: float, passed: bool) -> None:
    """`assumed`: NCCL reports its NVLS buffers as `persist`, as read in src/transport/nvls.cc of 2.29.7."""
    rows = answers(suspended(kept), mode="suspend")
    assert (rows["comm_released"].measured, rows["comm_released"].passed) == (pytest.approx(share), passed)
    assert rows["residual"].measured == 400 - kept
    for check in ("comm_released", "residual"):
        assert (f"NCCL keeps up to {kept:.0f} MiB per rank, which it cannot suspend" in rows[check].why) == bool(kept)


def test_megatron_may_call_itself_initialised_while_its_groups_are_suspended() -> None:
    rows = [(cycle, "fingerprint", "groups_watched", 20.0) for cycle in range(1, 11)]
    rows += [(cycle, "idle", "initialised", 1.0) for cycle in range(1, 11)]
    assert answers(rows, mode="exact")["model_parallel_uninitialised"].passed is False
    row = answers(rows, mode="suspend")["model_parallel_uninitialised"]
    assert (row.passed, "mode=suspend" in row.why) == (None, True)


def test_a_gpu_of_its_own_is_a_rank_s() -> None:
    frame = two_ranks(fell=300, reported=("driver_used", "process_used"))
    frame.loc[frame["metric"] == "gpu", "value"] = frame["rank"]
    assert judged(frame, "residual").why.startswith("driver_used while released")


def test_which_ranks_share_a_gpu() -> None:
    seats = [("a", "cuda:0"), ("a", "cuda:1"), ("a", "cuda:0"), ("b", "cuda:0")]
    rows = [{"rank": rank, "host": host, "device": device} for rank, (host, device) in enumerate(seats)]
    assert gpu_of_rank(rows) == {0: 0, 1: 1, 2: 0, 3: 2}
    assert gpu_of_rank([{"rank": 0, "host": "a", "device": "cpu"}]) == {}


@pytest.mark.parametrize("metric", ["fds", "threads"])
@pytest.mark.parametrize(
    ("more", "left"),
    [
        ((0, 0, 0, 0), 0),
        ((0, 1, 0, 0), 0),  # one cycle has one more socket, which goes with the groups
        ((0, 0, 0, 1), 0),
        ((0, 1, 1, 0), 1),
        ((0, 1, 2, 3), 2),
        ((-1, -1, -1, -1), -1),
        ((1,), 1),
    ],
)
def test_what_leaks_stays(metric: str, more: tuple[int, ...], left: int) -> None:
    rows = [(0, "build", metric, 40.0), *((cycle, "verify", metric, 40.0 + n) for cycle, n in enumerate(more, 1))]
    row = answers(rows, cycles=len(more))[f"{metric}_return"]
    assert (row.measured, row.passed) == (left, left <= 0)
    assert ("no increase after verify over build" in row.why) == (left <= 0)


@pytest.mark.parametrize(("gpus_of", "message"), [((0, 0), True), ((0, 1), False), ((), False)])
def test_times_among_ranks_that_share_a_gpu_are_no_product_numbers(gpus_of: tuple[int, ...], message: bool) -> None:
    rows = [(rank, 0, "run", "gpu", float(number)) for rank, number in enumerate(gpus_of)]
    for rank in range(2):
        rows += [(rank, c, phase, "seconds", 0.5) for c in (1, 2, 3, 4) for phase in ("release", "reload")]
    frame = to_frame(
        [
            Row(run="r", lab="offload", cycle=c, phase=p, rank=r, metric=m, value=v, unit="1", time=0)
            for r, c, p, m, v in rows
        ]
    )
    row = Answers(frame, {**CONFIG, "ranks": 2, "cycles": 4}, find("offload").load_rules())["time_steady"]
    assert row.passed
    assert row.why.endswith("; shared GPU, not a product number") == message


@pytest.mark.parametrize(
    ("seconds", "passed"),
    [
        ((0.5, 0.1, 2.0, 2.0), False),
        ((0.1, 0.1, 0.1, 2.0), True),  # one slow cycle is blamed on the machine
        ((0.82, 0.07, 0.37, 0.35), True),  # only the first cycle took longer
        ((0.01, 0.01, 0.10, 0.10), True),  # too short to judge
        ((0.5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6), False),  # each cycle takes longer; the last takes 6 times the second
        ((0.5, 0.1, 0.2, 1.3, 0.4, 0.5, 0.6), False),  # the same on a busy machine
        ((0.5, 0.1, 0.2, 0.3, 0.25, 0.4, 0.2), True),
        ((0.5, 0.10, 0.11, 0.12, 0.13, 0.14, 0.15), True),
        ((0.5, 0.1, 0.3, 0.6), False),  # four cycles: each takes longer, the last 5 times the second
        ((0.5, 0.2, 0.3, 0.4), True),  # each takes longer, but not 3 times as long
        ((0.5, 0.1, 0.1, 2.0), True),  # one slow cycle
        ((0.5, 0.1, 0.6, 0.5, 0.9), True),  # not each takes longer
        ((0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 2.0), True),
    ],
)
def test_times_that_stay_longer(seconds: tuple[float, ...], passed: bool) -> None:
    rows = [(c, p, "seconds", s) for c, s in enumerate(seconds, 1) for p in ("release", "reload")]
    row = answers(rows, cycles=len(seconds))["time_steady"]
    assert row.measured is not None
    assert row.passed is passed


@pytest.mark.parametrize(
    ("seconds", "control", "passed"),
    [
        ((0.9, 0.25, 0.37, 0.50, 0.62, 0.75), (0.9, 0.10, 0.11, 0.10), False),  # 0.12 s more in each cycle
        (
            (0.9, 0.25, 0.37, 0.50, 0.62, 0.75),
            (0.9, 0.10, 0.40, 0.10),
            True,
        ),  # a busy machine: the control varies as much
        ((0.9, 0.25, 0.37, 0.36, 0.62, 0.75), (0.9, 0.10, 0.11, 0.10), True),  # not in every cycle
        ((0.9, 0.05, 0.10, 0.14, 0.20, 0.25), (0.9, 0.10, 0.11, 0.10), True),  # below 0.1 s per cycle
        ((0.9, 2.00, 2.20, 2.40, 2.60, 2.80), (0.9, 0.10, 0.11, 0.10), True),  # less than twice as long in all
        ((0.9, 0.25, 0.27, 0.50, 0.60, 0.75), (0.9, 0.10, 0.11, 0.10), False),  # one step is small, the slope is not
    ],
)
def test_times_that_rise_in_each_cycle(seconds: tuple[float, ...], control: tuple[float, ...], passed: bool) -> None:
    rows = [(c, p, "seconds", s) for c, s in enumerate(seconds, 1) for p in ("release", "reload")]
    rows += [(c, "control", "seconds", s) for c, s in enumerate(control, 1)]
    row = answers(rows, cycles=len(seconds))["times_do_not_rise"]
    assert row.passed is passed
    assert "ms in cycles 2 to 6, " in row.why


def test_times_of_few_cycles_are_not_said_to_rise() -> None:
    """A short run is not asked, and one that broke after a few cycles has no answer."""
    seconds = (0.9, 0.25, 0.50, 1.00)
    rows = [(c, p, "seconds", s) for c, s in enumerate(seconds, 1) for p in ("release", "reload", "control")]
    assert "times_do_not_rise" not in answers(rows, cycles=4)
    assert answers(rows, cycles=8)["times_do_not_rise"].passed is None


@pytest.mark.parametrize(
    ("idle", "control", "passed"),
    [
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), True),
        ((1.0, 2.0, 2.0), (2.0, 2.0, 2.0), False),  # a copy made by the first reload and kept
        ((1.0, 1.0, 2.0), (2.0, 2.0, 2.0), False),
        ((1.0, 2.0, 3.0), (2.0, 3.0, 4.0), True),  # the job itself keeps more
        ((1.0, 1.01, 1.01), (2.0, 2.0, 2.0), True),  # its own small records
    ],
)
def test_a_copy_that_is_kept(idle: tuple[float, ...], control: tuple[float, ...], passed: bool) -> None:
    rows = [(c, "idle", "tensor_bytes", size * MIB) for c, size in enumerate(idle, 1)]
    rows += [(c, "control", "tensor_bytes", size * MIB) for c, size in enumerate(control, 1)]
    row = answers(rows, cycles=3, size="tiny")["no_copy_kept"]
    assert row.passed is passed
    assert passed or "1.000 MiB while released in the first cycle, 2.000 MiB in cycle" in row.why


COPIED = [
    (0, "build", "made_bytes", 0.0),
    (1, "fingerprint", "beside_bytes", 1.0),
    (1, "fingerprint", "resident_bytes", 4.0),
    (1, "idle", "beside_bytes", 5.0),
    (1, "idle", "tensor_bytes", 0.0),
    (2, "idle", "tensor_bytes", 0.0),
]


def judged_copies(**changed: float) -> VerdictRow:
    """The answer to `COPIED` with other numbers, in MiB: `made`, `idle`, or `grown` in the second cycle."""
    places = {"made": 0, "idle": 3, "grown": 5}
    rows = [(*row[:3], row[3] * MIB) for row in COPIED]
    for name, size in changed.items():
        rows[places[name]] = (*rows[places[name]][:3], size * MIB)
    return answers(rows, cycles=2, size="tiny")["no_copy_kept"]


@pytest.mark.parametrize(
    ("sizes", "passed"),
    [
        ({}, True),  # what was on the device is on the host
        ({"idle": 1.0}, True),  # nothing was kept: gradients that may be dropped
        ({"idle": 6.9}, True),  # a buffer on the way
        ({"made": 4.0, "idle": 1.0}, True),  # the place for the copy was there before
        ({"idle": 9.0}, False),
        ({"made": 4.0}, False),
    ],
)
def test_copies_while_released(sizes: dict[str, float], passed: bool) -> None:
    row = judged_copies(**sizes)
    assert row.passed is passed
    assert passed or row.why.startswith("2.00 copies of 4.000 MiB exist while released")


def test_the_larger_of_a_second_copy_and_growth_is_said() -> None:
    assert [judged_copies(idle=9.0, grown=size).measured for size in (1.0, 8.0)] == [4.0, 8.0]


@pytest.mark.parametrize(
    ("path", "words", "named"),
    [
        ("chunks.0.decoder.weight.main_param", "no memory for decoder.weight.main_param", True),
        ("chunks.0.decoder.weight.main_param", "no memory for decoder.weight", False),
        ("optimizer.param_groups.0.params.11", "rank 1: optimizer0.param11 could not be brought back", True),
        ("optimizer.param_groups.0.params.11", "rank 1: param_groups[0]['params'][11]: no memory", True),
        ("optimizer.param_groups.0.params.11", "params:\n 11 could not be brought back", True),
        ("optimizer.param_groups.0.params.11", "rank 11: a parameter could not be brought back", False),
        ("optimizer.param_groups.0.params.1", "a parameter could not be brought back on rank 1", False),
        ("optimizer.param_groups.0.params.1", "optimizer0.param11 could not be brought back", False),
    ],
)
def test_words_that_name_a_tensor(path: str, words: str, named: bool) -> None:
    assert is_named(path, words) is named


def test_a_reload_that_fails() -> None:
    right = {"seconds": 1.0, "restore_refused": 1.0, "restore_silent": 0.0, "restore_kept": 0.0, "retry_differs": 0.0}

    def judged(**changed: float) -> VerdictRow:
        facts = {**right, **changed}.items()
        return answers([(0, "rehearse_restore", metric, value) for metric, value in facts])["restore_failure_is_clean"]

    assert judged().passed
    for metric, words in (("restore_silent", "no error: 1"), ("restore_kept", "bytes of tensors not freed again: 64")):
        row = judged(**{metric: 64.0 if metric == "restore_kept" else 1.0})
        assert (row.passed, row.measured) == (False, 1.0)
        assert row.why.startswith(words)
    nothing_refused = judged(restore_refused=0.0)
    assert (nothing_refused.passed, nothing_refused.measured) == (False, None)
    ended = answers([(1, "idle", "rss", 1.0)])
    for check in ("restore_failure_is_clean", "rehearsals_leave_nothing"):
        assert ended[check].passed is None
        assert "the run ended before" in ended[check].why


def test_what_piles_up_in_a_control_alone_says_nothing() -> None:
    controls: list[Fact] = [(cycle, "control", "threads", 8.0) for cycle in range(1, 6)]
    with pytest.raises(NotMeasured):
        piled_up(frame_of(controls), {})
    released: list[Fact] = [(cycle, "verify", "threads", 8.0 + cycle) for cycle in range(1, 5)]
    assert piled_up(frame_of([*controls, *released]), {}).value == 1


def test_what_communicators_hold_is_summed_before_and_after_they_are_suspended() -> None:
    one, other = ({"suspend": 4 * each, "persist": each, "total": 5 * each} for each in (1, 10))
    left = {"suspend": 0, "persist": 1, "total": 1}
    suspended = [{"before": one, "after": left}, {"before": other, "after": left}]
    kept = {"suspended": suspended, "skipped": [["data", "over gloo"]]}
    assert {metric: value for metric, value, _ in reported_by({"groups": {"snapshot": {"suspended": kept}}})} == {
        "comm_suspend_before": 44,
        "comm_persist_before": 11,
        "comm_total_before": 55,
        "comm_suspend_after": 0,
        "comm_persist_after": 2,
        "comm_total_after": 2,
        "groups_skipped": 1,
    }


def restored(*differing: tuple[str, str], **config: object) -> VerdictRow:
    """The answer to tensors that differ after a reload, each with its kind and what is said of it."""
    of_verify = {"lab": "offload", "cycle": 1, "phase": "verify", "unit": "1"}
    counts = {"tensors_hashed": 9.0, "tensors_changed": float(len(differing))}
    rows = [make_record(**of_verify, metric=name, value=count) for name, count in counts.items()]
    for number, (kind, what) in enumerate(differing):
        ids = {"tensor": str(number), "kind": kind}
        rows.append(make_record(**of_verify, metric="tensor_differs", value=0.05, text=what, ids=ids))
    settings = {**CONFIG, "cycles": 1, **config}
    return Answers(to_frame(rows), settings, find("offload").load_rules())["tensors_restored"]


@pytest.mark.parametrize(
    ("differing", "meant", "told"),
    [
        ([("grads", ZEROS), ("grads", ZEROS)], False, True),
        ([("grads", ZEROS), ("weights", "other numbers")], False, True),
        ([("grads", ZEROS), ("weights", ZEROS)], False, False),
        ([("grads", "other numbers")], False, False),
        ([("grads", ZEROS)], True, False),
    ],
)
def test_the_setting_for_dropped_gradients_is_named_where_only_gradients_are_zeros(
    differing: list[tuple[str, str]], meant: bool, told: bool
) -> None:
    row = restored(*differing, dropped_grads=meant)
    assert row.passed is False
    assert ("dropped_grads=true states that gradients are meant" in row.why) is told
