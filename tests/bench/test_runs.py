"""Every bench at small size, on real ranks: every row is there, and what is compared has a control in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kit
from kit.labs.discover import find, tagged
from kit.results.samples import reported_rows, rows_text

QWEN: dict[str, Any] = {"model": "tiny", "small": 9, "large": 1, "shapes": "model,small", "rounds": 2, "slow_rounds": 1}
SIZES: dict[str, dict[str, Any]] = {
    "offload": {"models": "tiny", "trials": 1, "cycles": 2},
    "release": {"groups": (0, 30), "more_ranks": (), "trials": 1, "cycles": 2},
    "routing": {"quick": True},
    "share": {
        "parts": "together,adapters,scheduler",
        "steps": 2,
        "rounds": 3,
        "plans": 1,
        "serving": "tiny",
        "served": 1,
    },
    "split": {
        "size": "tiny",
        "length": 24,
        "rounds": 2,
        "peak_steps": 1,
        "loss_rows": 2,
        "loss_length": 64,
        "loss_rounds": 2,
    },
    "stream": {"parts": "learns,paced", "learning_steps": 5, "seeds": 1, "paced_steps": 2},
    "sync": {
        **QWEN,
        "buckets_mib": (1,),
        "hash_mib": 1,
        "growth_mb": (1, 2),
        "receivers": (1, 2),
        "receivers_mb": 1,
        "terms_mib": (1, 2, 4),
        "stall_mib": 8,
        "delta_model": "tiny",
    },
    "view": {"records": 3500, "many": 5000, "moves": 2, "opens": 2, "panels": 1, "runs": 50},
    "world": {
        **dict.fromkeys(
            ("starts", "megatron", "deaths", "kernels", "helps", "restarts", "phases", "flights", "hosts", "rays"), 1
        ),
        "steps": 3,
    },
}
# Of each rule that has rows here, how many.
JUDGED = {
    "offload": {"out_over_memcpy": 1, "back_over_populate": 1, "left_resident": 1},
    "release": {"exact_over_common": 2},
    "routing": {"numbers_differ": 1},
    "share": {
        "outcomes_differ": 1,
        "two_owners": 1,
        "adapters_over_base": 1,
        **dict.fromkeys(("bundle_moved", "plan_from_nothing", "large_plan"), 2),
    },
    "split": {"whole_over_plain": 2, "five_over_plain": 2, "peak_over_plain": 4, "metrics_over_bare": 12},
    "stream": {"possible_over_gain": 1, "exposed_over_plain": 1, "error_over_gain": 1},
    "sync": {
        **dict.fromkeys(
            (
                *("shm_over_memcpy", "small_shm_over_memcpy", "shm_over_copies", "expand_over_memcpy"),
                *("verified", "verified_beside", "small_verified"),
                *("staged_pause", "adopted_over_copied", "cached_once"),
            ),
            1,
        ),
        **dict.fromkeys(("two_over_one", "shm_over_group", "delta_over_needed", "automatic_over_fixed"), 2),
        "terms_predict": 7,  # a transport each
    },
    "view": {"run_opened": 2, "verdict_moved": 1, "runs_listed": 2, "plot_moved": 4, "moved_over_first": 4},
    "world": {
        **dict.fromkeys(
            (
                *("started", "started_with_megatron", "start_over_import", "stepped", "meter_share", "death_told"),
                *("restarted", "at_once_over_in_turn", "vanished", "helped"),
            ),
            1,
        ),
        "both_sides_left": 1,
        "second_over_first": 2,
        **dict.fromkeys(("started_on_two", "stepped_on_two", "start_over_ray", "loop_on_ray"), 1),
        **dict.fromkeys(("cut_named", "far_side_left"), 2),  # with two and with eight ranks
    },
}
# Why a row may have no number on this machine.
SILENT = (
    "not installed",
    "needs a GPU",
    "no GPU driver",
    "mode=suspend",
    "no locks of other processes",
    "torchcomms",
    "KIT_VLLM_PYTHON",
    "a second core each from",
    "network namespaces",
)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", sorted(SIZES))
def test_a_small_run_has_every_row(name: str, tmp_path: Path) -> None:
    lab = find(f"bench-{name}")
    run = kit.run(lab.name, out=tmp_path / "run", device="cpu", **SIZES[name])
    data = reported_rows(run, lab.all_rules())
    assert (data["bench"], data["ended"]) == (name, "finished")
    assert data["provenance"]["python"]
    assert list(data["parts"]) == [step.phase for step in lab.plan(lab.config(device="cpu", **SIZES[name]))]
    assert [others["part"] for others in data["others"]] == list(data["parts"])
    silent = [row["note"] for row in data["rows"] if row["median"] is None]
    assert all(any(words in note for words in SILENT) for note in silent), silent
    assert all(row["low"] <= row["median"] <= row["high"] for row in data["rows"] if row["median"] is not None)
    limited = [row["what"] for row in data["rows"] if row["limit"] is not None]
    assert len(limited) == sum(JUDGED[name].values())
    answers = {row.check.partition("/")[0] for row in run.verdict() if "/" in row.check}
    assert answers == set(JUDGED[name])
    assert rows_text(data)
    again = kit.load(run.dir)
    assert again.verdict() == run.verdict()


def test_every_bench_has_a_small_run() -> None:
    assert {f"bench-{name}" for name in SIZES} == set(tagged("bench")) == {f"bench-{name}" for name in JUDGED}
