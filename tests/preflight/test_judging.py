"""How probes judge numbers that only a GPU gives. The numbers are made up; their meaning is taken from sources.

A test whose docstring begins with `assumed` relies on a source that it names and that no GPU has confirmed: the first real preflight
confirms it or shows the difference.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kit.errors import KitError, RankDied, RankTimeout
from kit.preflight import probes
from kit.preflight.run import Findings, Report

MIB = 2**20
PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
SEAT = {"device": "cuda:0", "why": "1 CUDA device for 2 ranks, shared by ranks that call themselves hosts of their own"}
PLACE: dict[str, Any] = {
    "device": "cuda:0",
    "torch": "2.11.0+cu130",
    "nccl": "2.28.9",
    "env": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_HOSTID": "box-kit-0"},
    "poisoned": False,
    "sum": 999_000.0,
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "built_for": ["sm_80", "sm_90", "sm_100", "compute_120"],
}
TALK = {"seconds": 1e-4, "right": True}
COPIES = {
    "memlock": 65536,
    "populate": 0.3,
    "register": 0.2,
    "status": 0,
    "right": True,
    "h2d": 0.02,
    "d2h": 0.021,
    "unregister": 0,
    "pinned_h2d": 0.02,
    "pinned_d2h": 0.02,
    "pageable_h2d": 0.1,
    "pageable_d2h": 0.2,
}
LEVEL = {"groups": 1, "fds": 50, "sockets": 9, "threads": 20, "driver": 1000 * MIB}
WITH = {**LEVEL, "groups": 11, "threads": 40, "driver": 1900 * MIB}
BEGUN = {"without": LEVEL, "with": WITH, "options": {"timeout_s": 601.0}}
REBUILT: dict[str, Any] = {
    "without": {**LEVEL, "driver": 1008 * MIB},
    "with": WITH,
    "seconds": {"destroy": 0.02, "reload": 0.2, "use": 0.1},
    "same_bits": True,
    "changed_options": [],
    "alive": 0,
}
VIEW = {
    "pid": 7,
    "device": "cuda:0",
    "allocated": 256 * MIB,
    "reserved": 256 * MIB,
    "peak_allocated": 256 * MIB,
    "driver_used": 2000 * MIB,
    "process_used": 900 * MIB,
}
JOB = {"job": 0.5, "step": 0.02, "finite": True, "loss": 5.5, "tensors": 90, "apart": []}
STATS = {"suspend": 64 * MIB, "suspended": 0, "persist": MIB, "total": 65 * MIB}
SUSPENDED = {
    "stats": [STATS, {**STATS, "suspended": 1}],
    "suspend": 0.1,
    "resume": 0.1,
    "right": True,
    "freed": 128 * MIB,
}
ANSWERS: dict[str, list[Any]] = {
    "place": [PLACE, PLACE],
    "ready_at_once": [True, True],
    "all_reduces": [{"device": TALK, "host": TALK}] * 2,
    "make_groups": [{"make": 0.3, "use": 0.01, "destroy": 0.02, "right": True}] * 2,
    "begin": [BEGUN, BEGUN],
    "cycle": [REBUILT, REBUILT],
    "prepare": [True, True],
    "wait_in_vain": [
        {"way": "collective", "seconds": 3.0, "error": "DistBackendError: timed out"},
        {
            "way": "join",
            "seconds": 3.1,
            "error": "DistBackendError: store->get('0') got error: wait timeout after 3000ms",
        },
    ],
    "survive": [{"give_up": 0.1, "host": True, "device": True}] * 2,
    "registered": [COPIES],
    "resized": [{"left": 2 * 2**30, "came": 2 * 2**30, "same": True, "out": 0.01, "back": 0.01}],
    "driver_view": [VIEW, VIEW],
    "offer": [{"handle": "abcd"}],
    "take": [{"same": True}],
    "written": [True],
    "close": [0],
    "twice": [{"layout": 2.0, "float32": JOB, "bfloat16": JOB}] * 2,
    "experts": [{"loss": 5.5, "finite": True}] * 2,
    "suspended": [SUSPENDED, SUSPENDED],
}


class Box:
    """A World on a GPU with scripted answers."""

    answers: dict[str, list[Any]]

    def __init__(self, ranks: int, **_: Any) -> None:
        self.pids = [0] * ranks
        self.killed = False

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None: ...

    def status(self) -> list[dict[str, Any]]:
        return [SEAT] * len(self.pids)

    def run(self, code: str) -> None: ...

    def call(self, target: str, *, args: Any = None, ranks: Any = None, timeout_s: Any = None, **_: Any) -> list[Any]:
        name = target.rpartition(":")[2]
        if name == "come_late":
            raise RankTimeout("rank 1 is late", phase=name, ranks=(0, 1), culprits=(1,), stacks={})
        if self.killed:
            raise RankDied("rank 1 is gone", rank=1, phase=name, signal="SIGKILL")
        return self.answers[name]


@pytest.fixture
def box(monkeypatch):
    """Run a probe on a box with one GPU and scripted answers; return its rows by name, and its times."""
    worlds: list[Box] = []

    def made(*args: Any, **kwargs: Any) -> Box:
        worlds.append(Box(*args, **kwargs))
        return worlds[-1]

    def kill(pid: int, number: int) -> None:
        worlds[-1].killed = True

    def probe(name: str, settings: dict[str, Any] | None = None, **answers: list[Any]) -> Findings:
        Box.answers = ANSWERS | answers
        out = io.StringIO()
        getattr(probes, name)(Report(out), "cuda", {"env": {}, "megatron": True, **(settings or {})})
        findings = Findings()
        for line in out.getvalue().splitlines():
            findings.hear(line)
        return findings

    monkeypatch.setattr(probes, "World", made)
    monkeypatch.setattr(probes.os, "kill", kill)
    monkeypatch.setattr(probes, "compute_mode", lambda shared: ("compute mode", True, f"shared: {shared}"))
    monkeypatch.setattr(probes, "shm_names", set)
    return probe


def results(findings: Findings) -> dict[str, str]:
    return {row.what: row.result for row in findings.rows}


def why(findings: Findings, what: str) -> str:
    return next(row.why for row in findings.rows if row.what == what)


ALL = (
    "seats",
    "all_reduces",
    "groups",
    "rebuild",
    "absent_peer",
    "host_memory",
    "resize",
    "driver_memory",
    "ipc",
    "jobs",
)


@pytest.mark.parametrize("name", ALL)
def test_on_a_box_where_all_is_well_every_row_passes(box, name):
    findings = box(name)
    assert set(results(findings).values()) == {"pass"}
    assert json.dumps(findings.times)


def test_the_page_of_what_is_unproven_names_rows_that_probes_have(box):
    rows = {row.what.partition(", cycle")[0] for probe in ALL for row in box(probe).rows}
    lines = [line for line in PAGE.read_text().partition("| settled by |")[2].splitlines() if " | probe" in line]
    named = {name for line in lines for name in re.findall("`([^`]+)`", line.rpartition(" | ")[2].partition(";")[0])}
    assert len(lines) >= 14
    assert len(named) >= 14
    assert named - rows == set()


def test_seats_on_the_host_or_with_a_dead_context_fail(box):
    assert results(box("seats", place=[PLACE, {**PLACE, "device": "cpu"}]))["seats"] == "fail"
    assert results(box("seats", place=[PLACE, {**PLACE, "poisoned": True}]))["context after the fork"] == "fail"
    assert results(box("seats", place=[PLACE, {**PLACE, "sum": 0.0}]))["kernel"] == "fail"


def test_a_gpu_that_torch_has_no_code_for_is_reported(box):
    blackwell = {**PLACE, "capability": (10, 0), "built_for": ["sm_80", "sm_90"]}
    findings = box("seats", place=[blackwell, PLACE])
    assert results(findings)["architecture"] == "fail"
    assert why(findings, "architecture").endswith("is sm_100; torch is built for sm_80 sm_90")


@pytest.mark.parametrize(
    ("rows", "shared", "result"),
    [([["Default"]], True, True), ([["Exclusive_Process"]], True, False), ([["Exclusive_Process"]], False, True)],
)
def test_ranks_share_a_gpu_only_in_its_default_mode(rows, shared, result, monkeypatch):
    """`assumed`: the names of the modes are nvidia-smi's (`nvidia-smi --help-query-gpu`, compute_mode)."""
    monkeypatch.setattr(probes.machine, "query_gpus", lambda *_, **__: (rows, None))
    assert probes.compute_mode(shared)[1] is result


def test_without_an_answer_the_compute_mode_is_not_measurable(monkeypatch):
    monkeypatch.setattr(probes.machine, "query_gpus", lambda *_, **__: ([], "nvidia-smi did not answer within 3 s"))
    assert probes.compute_mode(shared=True) == ("compute mode", None, "nvidia-smi did not answer within 3 s")


def test_a_watchdog_that_would_end_the_survivor_is_reported(box):
    """`assumed`: only mode 0 (NoHandling) does not rethrow (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, ErrorHandlingMode)."""
    findings = box("seats", place=[{**PLACE, "env": {}}, PLACE])
    assert results(findings)["NCCL settings"] == "fail"
    assert "0, not set" in why(findings, "NCCL settings")


def test_world_that_waits_for_its_first_collective_is_reported(box):
    """`assumed`: with a device_id, init_process_group connects at once (eager_connect_single_device in `_new_process_group_helper`)."""
    assert results(box("all_reduces", ready_at_once=[True, False]))["WORLD ready before its first collective"] == "fail"
    hidden = results(box("all_reduces", ready_at_once=[None, None]))
    assert hidden["WORLD ready before its first collective"] == "not measurable"


def test_a_wrong_sum_on_a_shared_gpu_fails_the_sharing(box):
    wrong = {"device": {**TALK, "right": False}, "host": TALK}
    found = results(box("all_reduces", all_reduces=[{"device": TALK, "host": TALK}, wrong]))
    assert (found["two ranks on one GPU"], found["all-reduce on cuda"]) == ("fail", "fail")
    assert found["all-reduce on the host"] == "pass"


@pytest.mark.parametrize(("what", "more"), [("fds", 1), ("threads", -1), ("driver", 17 * MIB)])
@pytest.mark.parametrize("state", ["without", "with"])
def test_what_a_cycle_leaves_is_named_with_its_rank(box, what, more, state):
    off = {**REBUILT, state: {**REBUILT[state], what: BEGUN[state][what] + more}}
    findings = box("rebuild", cycle=[REBUILT, off])
    name = "driver memory off the baseline" if what == "driver" else f"{what} off the baseline"
    failed = {row for row, result in results(findings).items() if result == "fail"}
    assert failed == {f"{name}, cycle 1", f"{name}, cycle 2"}
    assert f"rank 1, {state} groups" in why(findings, f"{name}, cycle 1")


def test_options_bits_and_objects_that_differ_fail(box):
    changed = {**REBUILT, "changed_options": ["group 1: max_ctas 4 -> 32"], "same_bits": False, "alive": 2}
    findings = box("rebuild", cycle=[REBUILT, changed])
    failed = {row for row, result in results(findings).items() if result == "fail"}
    names = ("options", "bits", "group objects alive after a destroy")
    assert failed == {f"{name}, cycle {number}" for name in names for number in (1, 2)}
    assert why(findings, "options, cycle 1") == "rank 1, group 1: max_ctas 4 -> 32"


@pytest.mark.parametrize(("seconds", "error"), [(60.0, "DistBackendError: timed out"), (3.0, ""), (0.1, "refused")])
def test_an_absent_peer_that_is_noticed_late_or_never_or_at_once_fails(box, seconds, error):
    one, other = ANSWERS["wait_in_vain"]
    findings = box("absent_peer", wait_in_vain=[{**one, "seconds": seconds, "error": error}, other])
    assert results(findings)["collective without its peer"] == "fail"
    assert results(findings)["join without its peer"] == "pass"


def test_a_survivor_whose_world_is_dead_fails(box):
    gone = {"give_up": 0.1, "host": True, "device": False}
    assert results(box("absent_peer", survive=[gone, gone]))["survivors use WORLD again"] == "fail"


def test_memory_that_is_not_registered_names_the_error_and_the_limit(box):
    """`assumed`: cudaErrorNotSupported is 801 (driver_types.h); the call returns the number (torch/csrc/cuda/shared/cudart.cpp)."""
    refused = {**COPIES, "status": 801, "reason": "operation not supported"}
    for name in ("h2d", "d2h", "right", "unregister"):
        refused.pop(name)
    findings = box("host_memory", registered=[refused])
    assert results(findings)["cudaHostRegister"] == "fail"
    assert why(findings, "cudaHostRegister") == "cudaError 801: operation not supported; memlock 64 KiB"
    assert results(findings)["host to device"] == "not measurable"


def test_registered_memory_slower_than_pinned_fails(box):
    findings = box("host_memory", registered=[{**COPIES, "h2d": 0.03}])
    assert (results(findings)["host to device"], results(findings)["device to host"]) == ("fail", "pass")
    assert "required: 0.8 of pinned" in why(findings, "host to device")
    wrong = box("host_memory", registered=[{**COPIES, "right": False}])
    assert results(wrong)["host to device"] == "fail"
    assert "the bytes are wrong" in why(wrong, "host to device")


def test_a_buffer_that_gives_back_too_little_fails(box):
    answer = {**ANSWERS["resized"][0], "left": 2**30}
    assert results(box("resize", resized=[answer]))["given back"] == "fail"


def test_memory_is_by_process_where_the_driver_tells_it():
    rows = probes.driver_rows([VIEW, VIEW])
    assert [row[3:] for row in rows] == [(), (644.0, "MiB"), (644.0, "MiB")]
    assert rows[1][2].startswith("NVML, this process")


def test_else_it_is_the_whole_gpu_divided_by_its_ranks_and_the_fallback_is_named():
    """`assumed`: in a container without the host's pids NVML lists other pids (nvmlDeviceGetComputeRunningProcesses_v3, nvml.h)."""
    hidden = {**VIEW, "process_used": None}
    rows = probes.driver_rows([hidden, hidden, {**hidden, "device": "cuda:1", "driver_used": 800 * MIB}])
    assert rows[0][1] is None
    assert "fallback" in rows[0][2]
    assert [row[3] for row in rows[1:]] == [744.0, 744.0, 544.0]
    assert rows[1][2].startswith("whole GPU / 2 ranks")


def test_ipc_that_is_refused_fails_but_for_expandable_segments_which_need_a_permission(box):
    """`assumed`: expandable segments use pidfd_getfd, which needs ptrace permission (c10/cuda/CUDACachingAllocator.cpp; pidfd_getfd(2))."""
    refused: dict[str, Any] = {"take": [{"error": "RuntimeError: pidfd_getfd: Operation not permitted"}]}
    plain, expandable = box("ipc", **refused), box("ipc", {"env": {"PYTORCH_CUDA_ALLOC_CONF": "x"}}, **refused)
    assert results(plain)["memory of rank 0 in rank 1"] == "fail"
    assert results(expandable)["memory of rank 0 in rank 1"] == "not measurable"
    assert "Operation not permitted; " in why(expandable, "memory of rank 0 in rank 1")


def test_a_name_that_stays_in_shared_memory_fails(box, monkeypatch):
    seen = iter([set(), {"torch_7_1"}])
    monkeypatch.setattr(probes, "shm_names", lambda: next(seen))
    assert results(box("ipc"))["shared memory afterwards"] == "fail"


def test_jobs_that_differ_name_the_tensor_and_the_rank(box):
    apart = {**JOB, "apart": ["params/chunk0.embedding"]}
    one = {"layout": 2.0, "float32": JOB, "bfloat16": JOB}
    findings = box("jobs", twice=[one, {**one, "bfloat16": apart}])
    assert results(findings)["tp2 bfloat16, step"] == "fail"
    assert why(findings, "tp2 bfloat16, step") == "rank 1 differs in params/chunk0.embedding"
    assert results(findings)["tp2 float32, step"] == "pass"


def test_suspend_is_refused_with_its_reason_or_fails_with_nccls():
    """`assumed`: the backend has suspend, resume and memory_stats (torch 2.12 and later, ProcessGroupNCCL.hpp; NCCL 2.29.7, nccl.h)."""
    (row,) = probes.suspend_rows([{"refused": "NCCL 2.28.9 cannot suspend communicators"}] * 2)
    assert row == ("suspend", None, "NCCL 2.28.9 cannot suspend communicators")
    (row,) = probes.suspend_rows([{"stats": [STATS], "error": "ncclInvalidUsage"}, SUSPENDED])
    assert row[1:] == (False, "ncclInvalidUsage")
    freed, _, resumed = probes.suspend_rows([{**SUSPENDED, "freed": 0}, {**SUSPENDED, "right": False, "freed": 0}])
    assert (freed[1], resumed[1]) == (False, False)


def test_an_answer_that_never_comes_ends_the_probe(box):
    class Stuck(Box):
        def run(self, code: str) -> None:
            raise KitError("still in phase 'come_late'")

    with pytest.raises(KitError, match="still in phase"):
        probes.idle_again(Stuck(2), 0.1)
