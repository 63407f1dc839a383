"""How the preflight's rules judge numbers that only a GPU gives. The numbers are made up; their meaning is taken from sources.

A test whose docstring begins with `assumed` relies on a source that it names and that no GPU has confirmed: the first real preflight
confirms it or shows the difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kit.labs.box.lab import PROBES, BoxConfig
from kit.labs.box.rules import RULES
from kit.results import Row, VerdictRow, judge, to_frame
from kit.results.frames import GPU

MIB, GIB = 2**20, 2**30
PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
Facts = dict[tuple[str, str], Any]  # by probe and metric: a value of every rank, or a row's fields of some


def rows(value: Any = None, text: str = "", *, ranks: tuple[int, ...] = (0, 1), **ids: Any) -> list[dict[str, Any]]:
    return [{"rank": rank, "value": value, "text": text, "ids": ids} for rank in ranks]


FIRST, NOTEBOOK = (0,), (-1,)
# A box with one GPU for two ranks, on which all is well.
WELL: Facts = {
    ("seats", "driver_used"): 2000 * MIB,  # as the kit measures with every phase
    ("seats", GPU): 0,
    ("seats", "elsewhere"): rows(0, "cuda:0"),
    ("seats", "kernel_error"): 0,
    ("seats", "dead_context"): 0,
    ("seats", "no_code"): rows(0, "sm_90: torch has code (built for sm_80 sm_90); NCCL has kernels"),
    ("seats", "watchdog"): rows(0, "TORCH_NCCL_ASYNC_ERROR_HANDLING is 0"),
    ("seats", "exclusive"): rows(0, "Default", ranks=FIRST),
    ("all_reduce", "unconnected"): 0,
    ("all_reduce", "all_reduce_wrong"): 0,
    ("all_reduce", "all_reduce_host_wrong"): 0,
    ("groups", "nccl_wrong"): 0,
    ("groups", "gloo_wrong"): 0,
    ("suspend", "suspend_wrong"): rows(0, "the sum is correct again"),
    ("suspend", "suspend_freed"): 128 * MIB,
    ("host_memory", "register_error"): rows(0, ranks=FIRST),
    ("host_memory", "wrong_bytes"): rows(0, ranks=FIRST),
    ("host_memory", "registered_to_device"): rows(50.0, ranks=FIRST),
    ("host_memory", "registered_to_host"): rows(48.0, ranks=FIRST),
    ("host_memory", "pinned_to_device"): rows(50.0, ranks=FIRST),
    ("host_memory", "pinned_to_host"): rows(50.0, ranks=FIRST),
    ("host_memory", "pageable_to_device"): rows(10.0, ranks=FIRST),
    ("host_memory", "pageable_to_host"): rows(5.0, ranks=FIRST),
    **{
        (probe, metric): rows(value, ranks=FIRST)
        for probe in ("resize", "resize_expandable")
        for metric, value in {"given_back": 1, "taken_again": 1, "views_changed": 0}.items()
    },
    ("driver_memory", "seen_reserved"): rows(256 * MIB, "cuda:0"),
    ("driver_memory", "seen_driver_used"): rows(2000 * MIB, "cuda:0"),
    ("driver_memory", "seen_process_used"): rows(900 * MIB, "cuda:0"),
    **{
        (probe, metric): rows(value, ranks=FIRST)
        for probe in ("ipc", "ipc_expandable")
        for metric, value in {"wrong_words": 0, "still_allocated": 0}.items()
    },
    ("absent_peer", "late_rank_missed"): rows(0, "named: 1; late: 1", ranks=NOTEBOOK),
    ("absent_peer", "group_wrong"): 0,
    ("absent_peer", "wait_seconds"): [
        *rows(3.0, "DistBackendError: timed out", ranks=(0,), way="start_collective"),
        *rows(3.1, "DistBackendError: wait timeout after 3000ms", ranks=(1,), way="join_alone"),
    ],
    ("absent_peer", "world_wrong"): 0,
    ("killed_rank", "death_missed"): rows(0, "rank 1 was killed by SIGKILL", ranks=NOTEBOOK),
    ("killed_rank", "names_left"): rows(0, ranks=NOTEBOOK),
    ("rebuild", "off_baseline"): [
        *rows(0, "fds without groups: 50, at first 50", counted="fds", state="without", turn=1),
        *rows(0, "threads with groups: 40, at first 40", counted="threads", state="with", turn=1),
    ],
    ("rebuild", "driver_off"): 8 * MIB,
    ("rebuild", "objects_alive"): 0,
    ("rebuild", "options_changed"): 0,
    ("rebuild", "bits_changed"): 0,
    **{(probe, "values_changed"): rows(0, "90 values compared") for probe in ("job_tp", "job_pp")},
    **{(probe, "not_finite"): 0 for probe in ("job_tp", "job_pp", "job_experts")},
}


def verdict(changed: Mapping[tuple[str, str], Any] | None = None, **config: Any) -> dict[str, VerdictRow]:
    """The verdict on that box, with other facts in place of some; None: not recorded."""
    records = [
        Row(run="r", lab="box", cycle=1, phase=probe, metric=metric, unit="1", time=0, **row)
        for (probe, metric), fact in {**WELL, **(changed or {})}.items()
        if fact is not None
        for row in (fact if isinstance(fact, list) else rows(fact))
    ]
    return {row.check: row for row in judge(to_frame(records), asdict(BoxConfig(**config)), RULES)}


def passed(changed: Mapping[tuple[str, str], Any], **config: Any) -> dict[str, bool | None]:
    """What differs from the box on which all is well."""
    return {check: row.passed for check, row in verdict(changed, **config).items() if row.passed is not True}


def test_where_all_is_well_every_rule_passes() -> None:
    assert passed({}) == {}


def test_a_rule_begins_with_the_name_of_its_probe() -> None:
    names = [probe.phase for probe in PROBES]
    assert all(any(rule.name.startswith(f"{name}_") for name in names) for rule in RULES[1:])
    assert {name for name in names if not any(rule.name.startswith(f"{name}_") for rule in RULES)} == set()


def test_the_page_of_what_is_unproven_names_rules_and_probes() -> None:
    lines = [line for line in PAGE.read_text().partition("| settled by |")[2].splitlines() if " | probe" in line]
    named = {name for line in lines for name in re.findall("`([^`]+)`", line.rpartition(" | ")[2].partition(";")[0])}
    assert len(lines) >= 14
    assert named - {rule.name for rule in RULES} - {probe.phase for probe in PROBES} == set()


@pytest.mark.parametrize(
    ("probe", "metric", "value", "rule"),
    [
        ("seats", "elsewhere", 1, "seats_device"),
        ("seats", "kernel_error", 999_000, "seats_kernel"),
        ("seats", "dead_context", 1, "seats_context"),
        ("seats", "no_code", 1, "seats_architecture"),
        # assumed: only mode 0 (NoHandling) does not rethrow (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, ErrorHandlingMode)
        ("seats", "watchdog", 1, "seats_watchdog"),
        ("seats", "exclusive", 1, "seats_compute_mode"),
        # assumed: with a device_id, init_process_group connects at once (eager_connect_single_device in `_new_process_group_helper`)
        ("all_reduce", "unconnected", 1, "all_reduce_connected"),
        ("all_reduce", "all_reduce_host_wrong", 1, "all_reduce_host"),
        ("groups", "nccl_wrong", 1, "groups_nccl"),
        ("suspend", "suspend_wrong", 1, "suspend_resumes"),
        ("suspend", "suspend_freed", 0, "suspend_frees"),
        ("host_memory", "wrong_bytes", 1, "host_memory_bytes"),
        ("host_memory", "registered_to_device", 33.0, "host_memory_to_device"),
        ("resize", "given_back", 0.5, "resize_gives_back"),
        ("resize_expandable", "taken_again", 0.5, "resize_expandable_takes_again"),
        ("resize", "views_changed", 1, "resize_views"),
        ("ipc", "still_allocated", MIB, "ipc_freed"),
        ("ipc", "wrong_words", 1, "ipc_bytes"),
        ("absent_peer", "late_rank_missed", 1, "absent_peer_named"),
        ("absent_peer", "world_wrong", 1, "absent_peer_survivors"),
        ("killed_rank", "death_missed", 1, "killed_rank_noticed"),
        ("killed_rank", "names_left", 1, "killed_rank_leaves_nothing"),
        ("rebuild", "driver_off", 65 * MIB, "rebuild_driver"),
        ("rebuild", "objects_alive", 2, "rebuild_objects"),
        ("rebuild", "options_changed", 1, "rebuild_options"),
        ("rebuild", "bits_changed", 1, "rebuild_bits"),
        ("job_pp", "values_changed", 1, "job_pp_bits"),
        ("job_experts", "not_finite", 1, "job_experts_finite"),
    ],
)
def test_a_finding_of_one_rank_fails_its_rule_alone_and_names_the_rank(
    probe: str, metric: str, value: float, rule: str
) -> None:
    fact = WELL[probe, metric]
    facts = fact if isinstance(fact, list) else rows(fact)
    changed = [*facts[:-1], {**facts[-1], "value": value, "text": "as this rank has it"}]
    judged = verdict({(probe, metric): changed})
    assert [name for name, row in judged.items() if row.passed is not True] == [rule]
    if "host_memory_to" not in rule:
        assert "as this rank has it" in judged[rule].why
        assert facts[-1]["rank"] < 0 or f"rank {facts[-1]['rank']}" in judged[rule].why


def test_a_wrong_sum_on_a_shared_gpu_fails_the_sharing_too() -> None:
    wrong: Facts = {("all_reduce", "all_reduce_wrong"): [*rows(0, ranks=(0,)), *rows(1, ranks=(1,))]}
    assert passed(wrong) == {"all_reduce_device": False, "all_reduce_shared_gpu": False}
    own_gpus: Facts = {("seats", GPU): [*rows(0, ranks=(0,)), *rows(1, ranks=(1,))]}
    assert passed({**wrong, **own_gpus}) == {"all_reduce_device": False, "all_reduce_shared_gpu": None}


def test_what_a_box_cannot_have_is_null_with_its_reason() -> None:
    """`assumed`: in a container without the host's pids NVML lists other pids (nvmlDeviceGetComputeRunningProcesses_v3, nvml.h)."""
    judged = verdict(
        {
            ("seats", "exclusive"): rows(None, "nvidia-smi did not answer within 3 s", ranks=FIRST),
            ("all_reduce", "unconnected"): rows(None, "only some versions of torch show NCCL's state"),
            ("suspend", "suspend_wrong"): None,
            ("suspend", "suspend_freed"): None,
            ("suspend", "suspend_refused"): rows(1, "NCCL 2.28.9 cannot suspend communicators"),
            ("driver_memory", "seen_process_used"): rows(None, "cuda:0"),
            ("job_experts", "not_finite"): None,
            ("job_experts", "megatron_missing"): rows(1, "ModuleNotFoundError: No module named 'megatron'"),
        }
    )
    reasons = {name: row.why for name, row in judged.items() if row.passed is not True}
    assert {name: row.passed for name, row in judged.items() if row.passed is not True} == dict.fromkeys(reasons)
    assert reasons == {
        "seats_compute_mode": "not measured: nvidia-smi did not answer within 3 s",
        "all_reduce_connected": "not measured: only some versions of torch show NCCL's state",
        "suspend_resumes": "not measured: NCCL 2.28.9 cannot suspend communicators",
        "suspend_frees": "not measured: NCCL 2.28.9 cannot suspend communicators",
        "driver_memory_listed": reasons["driver_memory_listed"],
        "job_experts_finite": "not measured: ModuleNotFoundError: No module named 'megatron'",
    }
    assert "a container's pid namespace" in reasons["driver_memory_listed"]


def test_memory_is_by_process_or_else_the_gpu_divided_by_its_ranks() -> None:
    listed = verdict()["driver_memory_residual/rank 1"]
    assert (listed.measured, listed.why.partition(";")[0]) == (644.0, "NVML, this process")
    hidden = verdict(
        {
            ("driver_memory", "seen_process_used"): rows(None, "cuda:0", ranks=(0, 1, 2)),
            ("driver_memory", "seen_reserved"): [*rows(256 * MIB, "cuda:0"), *rows(256 * MIB, "cuda:1", ranks=(2,))],
            ("driver_memory", "seen_driver_used"): [
                *rows(2000 * MIB, "cuda:0"),
                *rows(800 * MIB, "cuda:1", ranks=(2,)),
            ],
        }
    )
    parts = [hidden[f"driver_memory_residual/rank {rank}"] for rank in range(3)]
    assert [part.measured for part in parts] == [744.0, 744.0, 544.0]
    assert parts[0].why.startswith("whole GPU / 2 ranks")
    nothing: Facts = {("driver_memory", "seen_process_used"): rows(256 * MIB, "cuda:0")}
    assert passed(nothing)["driver_memory_residual"] is False


def test_memory_that_is_not_registered_names_the_error_and_the_limit() -> None:
    """`assumed`: cudaErrorNotSupported is 801 (driver_types.h); the call returns the number (torch/csrc/cuda/shared/cudart.cpp)."""
    changed: Facts = {
        ("host_memory", "register_error"): rows(
            801, "cudaError 801: operation not supported; memlock 64 KiB", ranks=FIRST
        ),
        ("host_memory", "registered_to_device"): None,
        ("host_memory", "registered_to_host"): None,
        ("host_memory", "wrong_bytes"): None,
    }
    judged = verdict(changed)
    assert judged["host_memory_registers"].passed is False
    assert judged["host_memory_registers"].why.startswith("cudaError 801: operation not supported; memlock 64 KiB")
    assert judged["host_memory_to_device"].passed is None
    assert "not registered" in judged["host_memory_to_device"].why


def test_ipc_that_is_refused_fails_but_for_expandable_segments_which_need_a_permission() -> None:
    """`assumed`: expandable segments use pidfd_getfd, which needs ptrace permission (c10/cuda/CUDACachingAllocator.cpp; pidfd_getfd(2))."""
    refused = rows(1, "RuntimeError: pidfd_getfd: Operation not permitted; ptrace_scope 1", ranks=FIRST)
    changed: Facts = {}
    for probe in ("ipc", "ipc_expandable"):
        changed |= {(probe, "refused"): refused, (probe, "wrong_words"): None, (probe, "still_allocated"): None}
    judged = verdict(changed)
    assert passed(changed) == {
        "ipc_bytes": False,
        "ipc_freed": None,
        "ipc_expandable_bytes": None,
        "ipc_expandable_freed": None,
    }
    assert judged["ipc_bytes"].why == judged["ipc_expandable_bytes"].why.removeprefix("not measured: ")


@pytest.mark.parametrize(("seconds", "error"), [(60.0, "DistBackendError: timed out"), (3.0, ""), (0.1, "refused")])
def test_an_absent_peer_that_is_noticed_late_or_never_or_at_once_fails(seconds: float, error: str) -> None:
    waits = WELL["absent_peer", "wait_seconds"]
    judged = verdict({("absent_peer", "wait_seconds"): [{**waits[0], "value": seconds, "text": error}, waits[1]]})
    assert judged["absent_peer_deadline"].passed is False
    assert judged["absent_peer_deadline"].why.startswith("start_collective: ")
    assert judged["absent_peer_deadline"].measured == 1


@pytest.mark.parametrize("more", [1, -1])
def test_what_a_rebuild_leaves_or_takes_is_named_with_its_rank(more: int) -> None:
    off = rows(more, "threads with groups: 41, at first 40", ranks=(1,), counted="threads", state="with", turn=2)
    judged = verdict({("rebuild", "off_baseline"): [*WELL["rebuild", "off_baseline"], *off]})
    assert judged["rebuild_counts"].passed is False
    assert judged["rebuild_counts/fds"].passed is True
    assert judged["rebuild_counts/threads"].why == "threads with groups: 41, at first 40 (rank 1, turn 2)"


def test_a_probe_that_broke_is_named_and_what_it_measured_before_cannot_pass() -> None:
    words = "no answer from rank 1 within 60 s; rank 0 in a collective, waiting for rank 1"
    broke: Facts = {("job_tp", "broke"): rows(1, words, ranks=NOTEBOOK), ("job_tp", "not_finite"): None}
    judged = verdict(broke)
    assert passed(broke) == {"every_probe_ends": False, "job_tp_bits": None, "job_tp_finite": None}
    assert judged["every_probe_ends"].why == f"job_tp: {words}"
    assert judged["job_tp_bits"].why.startswith("not measured: job_tp broke")
    assert passed({**broke, ("job_tp", "values_changed"): 1})["job_tp_bits"] is False


def test_a_probe_that_was_left_out_is_null_and_one_that_recorded_nothing_is_not_excused_by_the_cpu() -> None:
    judged = verdict({}, probes="seats")
    assert judged["seats_device"].passed is True
    assert judged["groups_nccl"].why == "not measured: probes=seats leaves this probe out"
    silent = verdict({("groups", "nccl_wrong"): None})["groups_nccl"]
    assert silent.passed is None
    assert "CPU" not in silent.why


def test_no_number_is_given_for_what_is_not_finite() -> None:
    judged = verdict({("host_memory", "registered_to_device"): rows(float("nan"), ranks=FIRST)})
    assert judged["host_memory_to_device"].passed is False
    assert verdict({("seats", "kernel_error"): float("nan")})["seats_kernel"].passed is False


def test_a_probe_that_ended_without_its_record_fails_also_where_there_is_no_gpu() -> None:
    """What only a GPU has is null there; what every machine has is not."""
    gone = {fact: None for fact in WELL if fact != ("groups", "seconds")}
    answers = verdict({**gone, ("groups", "seconds"): 0.1})
    assert answers["groups_nccl"].passed is None
    assert answers["groups_gloo"].passed is False
    assert "groups ended without a record of gloo_wrong" in answers["groups_gloo"].why
