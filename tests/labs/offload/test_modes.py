"""Verdicts of each mode on made-up records: a right run passes, what a mode cannot have is null, errors fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from kit.labs.discover import find
from kit.labs.offload.lab import OffloadConfig
from kit.results import Row, VerdictRow, judge, to_frame

MIB = 2**20
CYCLES = 4
ON_A_GPU = {"residual", "comm_released", "others_untouched"}
LEVELS = {"groups": 21, "fds": 110, "sockets": 32, "threads": 64, "children": 0, "memfds": 1, "shared_maps": 3}
LEVELS |= {
    "shm_files": 0,
    "temp_files": 0,
    "anon_rss": 600 * MIB,
    "rss": 900 * MIB,
    "peak_rss": 910 * MIB,
    "seconds": 0.05,
    "tensor_bytes": 100 * MIB,
}
BARE = {"groups": 1, "fds": 14, "sockets": 3, "threads": 4, "memfds": 0, "shared_maps": 2, "anon_rss": 200 * MIB}
Rows = list[Row]


def config_of(mode: str, **given: Any) -> dict[str, Any]:
    # The mode is set last: mode=suspend is refused without a GPU, before any rank starts.
    config = asdict(OffloadConfig(ranks=1, tp=1, cycles=CYCLES, size="125m", dtype="float32", **given))
    return {**config, "mode": mode}


def right(config: dict[str, Any]) -> Rows:
    """Return the records of a run without any fault."""
    rows: Rows = []

    def add(cycle: int, phase: str, text: str = "", ids: dict[str, str] | None = None, **values: float) -> None:
        about: dict[str, Any] = {"text": text, "ids": ids or {}}
        rows.extend(one(cycle, phase, metric, value, **about) for metric, value in values.items())

    asleep = config["mode"] == "suspend"
    for phase in ("start", "baseline"):
        add(0, phase, **{**LEVELS, **BARE})
    for cycle in range(1, CYCLES + 2):
        add(cycle, "control", **LEVELS)
    add(0, "second_control", controls_differ=0)
    add(0, "build", **LEVELS)
    for cycle in range(1, CYCLES + 1):
        add(cycle, "train", **LEVELS)
        add(cycle, "fingerprint", **LEVELS, groups_watched=20, resident_bytes=400 * MIB)
        add(cycle, "release", **LEVELS)
        held = LEVELS if asleep else {**LEVELS, **BARE}
        add(
            cycle,
            "idle",
            **{**held, "anon_rss": 200 * MIB},
            left_bytes=0,
            left_tensors=0,
            initialised=int(asleep),
            old_groups_alive=20 * asleep,
        )
        add(cycle, "idle", stale_usable=0, world_left=int(not config["include_world"]))
        add(cycle, "reload", **LEVELS)
        add(cycle, "talk", **LEVELS, wrong_groups=0)
        add(cycle, "verify", **LEVELS, membership_changed=0, options_changed=0, stale_holders=0, generators_moved=0)
        add(cycle, "verify", tensors_hashed=150, tensors_changed=0, broken=0)
    add(CYCLES + 1, "train", **LEVELS)
    add(0, "compare", **LEVELS, steps_compared=10, steps_differ=0, tensors_differ=0)
    if config["weights"]:
        clean = dict.fromkeys(("silent", "unnamed", "kept"), 0.0)
        add(0, "rehearse_restore", restore_refused=1, **{f"restore_{name}": value for name, value in clean.items()})
        add(0, "rehearse_restore", retry_raised=0, retry_differs=0)
        add(0, "rehearse_restore", ids={"scene": "restore-fails", "kind": "groups"}, rehearsal_left=0)
    add(0, "rehearse_restore", **LEVELS)
    if config["mode"] in ("exact", "abort"):
        add(0, "rehearse_failure", failure_hidden=0)
        add(0, "rehearse_failure", ids={"scene": "destroy-fails", "kind": "groups"}, rehearsal_left=0)
    add(0, "rehearse_failure", **LEVELS)
    add(0, "end", **{**LEVELS, **BARE}, names_replaced=0)
    add(0, "ownership", not_as_found=0)
    return rows


def judged(rows: Rows, config: dict[str, Any]) -> dict[str, VerdictRow]:
    checks = [check for check in find("offload").all_rules() if check.asked(config)]
    return {row.check: row for row in judge(to_frame(rows), config, checks)}


def one(cycle: int, phase: str, metric: str, value: float, **more: Any) -> Row:
    about: dict[str, Any] = {"run": "r", "lab": "offload", "rank": 0, "unit": "1", "time": 0}
    return Row(cycle=cycle, phase=phase, metric=metric, value=value, **about, **more)


def outcome(rows: Rows, config: dict[str, Any], passed: bool | None) -> set[str]:
    return {name for name, row in judged(rows, config).items() if row.passed is passed}


def changed(rows: Rows, phase: str, metric: str, value: float, cycle: int | None = None) -> Rows:
    """Return the records with one number changed, in every cycle or in one."""
    import dataclasses

    here = [row for row in rows if (row.phase, row.metric) == (phase, metric) and cycle in (None, row.cycle)]
    assert here, (phase, metric)
    return [dataclasses.replace(row, value=value) if row in here else row for row in rows]


@pytest.mark.drawn(3, of="modes")
@pytest.mark.parametrize(
    ("mode", "given", "null"),
    [
        ("exact", {}, {"world_released"}),
        ("exact", {"include_world": True}, set()),
        ("abort", {}, {"world_released"}),
        ("manual", {}, {"world_released", "destroy_failure_raises"}),
        ("official", {}, {"world_released", "destroy_failure_raises"}),
        (
            "suspend",
            {},
            {
                "world_released",
                "destroy_failure_raises",
                "groups_return_to_baseline",
                "model_parallel_uninitialised",
                "old_groups_dead",
            },
        ),
        (
            "exact",
            {"groups": False},
            {
                "world_released",
                "destroy_failure_raises",
                "groups_return_to_baseline",
                "model_parallel_uninitialised",
                "old_groups_dead",
                "stale_handle_raises",
            },
        ),
        (
            "exact",
            {"weights": False, "grads": False, "optimizer": False},
            {"world_released", "tensors_released", "no_tensor_left", "reload_peak", "restore_failure_is_clean"},
        ),
        ("exact", {"hashes": False}, {"world_released", "tensors_restored"}),
    ],
)  # fmt: skip
def test_a_right_run_of_each_mode_passes(mode: str, given: dict[str, Any], null: set[str]) -> None:
    config = config_of(mode, **given)
    rows = right(config)
    assert outcome(rows, config, False) == set()
    assert outcome(rows, config, None) == ON_A_GPU | null
    if mode == "suspend":
        assert judged(rows, config)["stale_handle_raises"].passed is True


WRONG = [
    ("idle", "groups", 2, None, "groups_return_to_baseline"),
    ("verify", "groups", 22, None, "groups_return_to_baseline"),
    ("idle", "initialised", 1, 2, "model_parallel_uninitialised"),
    ("talk", "wrong_groups", 1, 2, "every_group_communicates"),
    ("verify", "membership_changed", 1, 2, "membership_unchanged"),
    ("verify", "options_changed", 1, 2, "options_unchanged"),
    ("verify", "stale_holders", 1, 2, "handles_alive"),
    ("idle", "stale_usable", 1, 2, "stale_handle_raises"),
    ("idle", "old_groups_alive", 1, 2, "old_groups_dead"),
    ("idle", "sockets", 4, 2, "old_groups_dead"),
    ("idle", "threads", 5, 2, "old_groups_dead"),
    ("idle", "left_bytes", 100 * MIB, 2, "tensors_released"),
    ("idle", "left_tensors", 1, 2, "no_tensor_left"),
    ("verify", "tensors_changed", 1, 2, "tensors_restored"),
    ("verify", "tensors_hashed", 0, 2, "tensors_restored"),
    ("verify", "generators_moved", 1, 2, "random_unchanged"),
    ("compare", "steps_differ", 1, None, "training_continues_bitwise"),
    ("compare", "tensors_differ", 1, None, "training_continues_bitwise"),
    ("compare", "steps_compared", 0, None, "training_continues_bitwise"),
    ("verify", "broken", 1, 2, "training_continues_bitwise"),
    ("reload", "peak_rss", 1400 * MIB, 2, "reload_peak"),
    ("verify", "fds", 111, None, "fds_return"),
    ("verify", "threads", 65, None, "threads_return"),
    ("end", "fds", 15, None, "nothing_left"),
    ("end", "shm_files", 1, None, "nothing_left"),
    ("end", "names_replaced", 1, None, "names_restored"),
    ("ownership", "not_as_found", 1, None, "state_as_found"),
    ("rehearse_failure", "failure_hidden", 1, None, "destroy_failure_raises"),
    ("rehearse_failure", "rehearsal_left", 1, None, "rehearsals_leave_nothing"),
    ("rehearse_restore", "restore_silent", 1, None, "restore_failure_is_clean"),
    ("rehearse_restore", "restore_unnamed", 1, None, "restore_failure_is_clean"),
    ("rehearse_restore", "restore_kept", 8, None, "restore_failure_is_clean"),
    ("rehearse_restore", "restore_refused", 0, None, "restore_failure_is_clean"),
    ("rehearse_restore", "retry_raised", 1, None, "restore_failure_is_clean"),
    ("rehearse_restore", "retry_differs", 1, None, "restore_failure_is_clean"),
    ("idle", "tensor_bytes", 150 * MIB, 2, "no_copy_kept"),
]


@pytest.mark.drawn(8, of="wrong numbers")
@pytest.mark.parametrize(("phase", "metric", "value", "cycle", "check"), WRONG)
def test_one_wrong_number_fails_its_check(phase: str, metric: str, value: float, cycle: int | None, check: str) -> None:
    config = config_of("exact")
    assert outcome(changed(right(config), phase, metric, value, cycle), config, False) == {check}


@pytest.mark.parametrize("phase", ["release", "reload"])
def test_the_last_two_cycles_take_longer(phase: str) -> None:
    config = config_of("exact")
    once = changed(right(config), phase, "seconds", 0.3, CYCLES)
    assert outcome(once, config, False) == set()
    assert outcome(changed(once, phase, "seconds", 0.3, CYCLES - 1), config, False) == {"time_steady"}


def test_a_world_that_stays_fails_where_it_was_to_go() -> None:
    config = config_of("exact", include_world=True)
    rows = changed(right(config), "idle", "world_left", 1, 3)
    assert outcome(rows, config, False) == {"world_released"}
    assert judged(rows, config)["world_released"].why == "world_left: 1 after idle (rank 0, cycle 3)"


def test_training_that_ended_fails_and_says_why() -> None:
    config = config_of("official")
    row = judged(changed(right(config), "verify", "broken", 1, 2), config)["training_continues_bitwise"]
    assert (row.passed, row.measured) == (False, None)
    assert row.why.startswith("could not be judged: training stopped in cycle 2")


def test_a_job_of_the_kits_without_groups_is_not_excused() -> None:
    config = config_of("exact")
    rows = changed(right(config), "fingerprint", "groups_watched", 0)
    row = judged(rows, config)["handles_alive"]
    assert (row.passed, "no group was found" in row.why) == (False, True)
    assert judged(rows, {**config, "model": "mine:Plain"})["handles_alive"].passed is None


@pytest.mark.parametrize(("model", "passed"), [("kit.labs.offload.ranks.job:build", None), ("mine:Job", False)])
def test_controls_that_differ_are_the_setups_or_somebodys_own_fault(model: str, passed: bool | None) -> None:
    config = {**config_of("exact"), "model": model}
    rows = changed(right(config), "second_control", "controls_differ", 3)
    row = judged(rows, config)["training_continues_bitwise"]
    assert (row.passed, row.measured) == (passed, None)


@pytest.mark.parametrize(
    ("metric", "steps", "slope"),
    [
        ("anon_rss", (0, 2, 4, 6, 8), 2.0),
        ("anon_rss", (0, 9, 9, 9, 9), 0.0),  # allocated once
        ("anon_rss", (0, 0, 30, 0, 0), 0.0),  # one outlier
        ("shm_rss", (0, 3, 6, 9, 12), 3.0),
        ("file_rss", (0, 3, 6, 9, 12), 3.0),
        ("tensor_bytes", (0, 3, 6, 9, 12), 3.0),
    ],
)
def test_growth_of_any_kind_of_memory(metric: str, steps: tuple[int, ...], slope: float) -> None:
    row = growing(metric, steps, [0] * len(steps))
    assert row.measured == pytest.approx(slope)
    assert row.passed is (slope <= 1)
    if slope:
        assert row.why.startswith(
            f"{metric}: 0 MiB/cycle after control, {slope:g} MiB/cycle after idle (+{slope:g} MiB"
        )


def test_growth_that_a_control_has_too_is_no_growth() -> None:
    assert growing("anon_rss", (0, 5, 10, 15, 20), (0, 5, 10, 15, 20)).measured == 0


def growing(metric: str, steps: Sequence[float], control: Sequence[float]) -> VerdictRow:
    """Judge `memory_slope` for a metric at these levels, in MiB, while released and after each control."""
    config = {**config_of("exact"), "model": "mine:Job", "cycles": len(steps)}  # model size unknown: 1 MiB is allowed
    rows = [row for row in right(config) if row.metric != metric]
    for phase, levels in (("idle", steps), ("control", control)):
        rows += [one(cycle, phase, metric, level * MIB) for cycle, level in enumerate(levels, 1)]
    return judged(rows, config)["memory_slope"]


def test_a_large_job_may_move_by_a_hundredth() -> None:
    limits = {size: judged([], {**config_of("exact"), "size": size})["memory_slope"].limit for size in ("tiny", "125m")}
    assert limits["tiny"] == 1.0
    assert 15 < limits["125m"] < 25


@pytest.mark.drawn(2, of="piles")
@pytest.mark.parametrize(
    "metric", ["groups", "fds", "sockets", "threads", "children", "memfds", "shared_maps", "shm_files", "temp_files"]
)
def test_what_piles_up(metric: str) -> None:
    config = config_of("exact", groups=False)
    rows = right(config)
    for cycle in range(2, CYCLES + 2):
        phase = "verify" if cycle <= CYCLES else "train"
        rows = changed(rows, phase, metric, LEVELS[metric] + cycle, cycle)
    row = judged(rows, config)["nothing_piles_up"]
    assert (row.measured, row.passed) == (CYCLES - 2, False)
    levels = f"{metric}: {LEVELS[metric] + 2} after cycle 2, {LEVELS[metric] + CYCLES} after cycles 4 and 5"
    assert row.why == f"{levels} (+{CYCLES - 2}; rank 0, cycle 5)"
    seen_once = changed(right(config), "train", metric, LEVELS[metric] + 1, CYCLES + 1)
    assert judged(seen_once, config)["nothing_piles_up"].passed  # it may disappear with the groups
    kept = right(config)
    for cycle in range(2, CYCLES + 2):
        kept = changed(kept, "verify" if cycle <= CYCLES else "train", metric, LEVELS[metric] + 1, cycle)
    assert judged(kept, config)["nothing_piles_up"].passed  # for example a second copy that is made once


def test_what_piles_up_is_not_looked_for_in_two_cycles() -> None:
    config = {**config_of("exact"), "cycles": 1}
    rows = [row for row in right(config) if row.cycle <= 2]
    assert judged(rows, config)["nothing_piles_up"].why == "not measured: needs at least 3 cycles"


def test_a_state_that_was_not_found_whole_is_not_judged() -> None:
    config = config_of("exact")
    rows = right(config)
    for metric, value in (("state_bytes", 50.0), ("state_arithmetic", 100.0)):
        rows.append(one(1, "fingerprint", metric, value, ids={"kind": "grads"}))
    assert outcome(rows, config, False) == {"tensors_released", "tensors_restored"}
    assert "only 50 of 100 bytes" in judged(rows, config)["tensors_restored"].why
