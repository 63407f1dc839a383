"""What all benches share: samples become rows, a part that breaks is a row with the reason, and what was measured is never lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import BadInput, KitError
from kit.labs import bench as room
from kit.labs.bench import Bench, Samples, ratios, run_part
from kit.labs.definition import BenchConfig, driven_parts
from kit.nccl import SHARED_GPU
from kit.results.rules import judge
from kit.results.samples import OTHERS, median_rule, others_text, sample_rows
from tests.bench.recorded import Kept, frame_of

RULE = median_rule("fast", "Is it fast?", 2.0)


def test_a_row_is_the_spread_of_its_samples_and_its_rule_judges_the_median() -> None:
    frame = frame_of(
        [
            Samples(what="it", values=[3.0, 1.0], metric="fast", unit="x", ceiling=0.5),
            ratios("fast", "it", [4.0], [2.0]),
        ]
    )
    (row,) = sample_rows(frame, [RULE], {})
    assert [row[name] for name in ("median", "low", "high", "n", "limit", "ceiling", "met")] == [
        2.0,
        1.0,
        3.0,
        3,
        2.0,
        0.5,
        True,
    ]
    verdict = judge(frame, {}, [RULE])
    assert [(answer.check, answer.measured, answer.passed) for answer in verdict] == [
        ("fast", 2.0, True),
        ("fast/it", 2.0, True),
    ]


def test_one_wrong_count_among_many_right_ones_is_not_met() -> None:
    rule = median_rule("differ", "Are they equal?", 0.0, "1", worst=True)
    frame = frame_of([Samples(what="it", values=[0.0, 0.0, 1.0], metric="differ", unit="1")])
    (row,) = sample_rows(frame, [rule], {})
    assert (row["median"], row["met"]) == (0.0, False)
    assert judge(frame, {}, [rule])[0].passed is False


def test_ratios_are_taken_turn_by_turn() -> None:
    assert list(ratios("fast", "it", [2.0, 30.0], [1.0, 10.0]).values) == [2.0, 3.0]


def test_what_was_not_measured_is_null_and_says_why() -> None:
    frame = frame_of([Samples(what="it", metric="fast", unit="x", note="not installed")])
    (row,) = sample_rows(frame, [RULE], {})
    assert (row["median"], row["n"], row["met"], row["note"]) == (None, 0, None, "not installed")
    assert {answer.passed for answer in judge(frame, {}, [RULE])} == {None}


def test_a_part_that_breaks_is_a_row_with_the_reason(tmp_path: Path) -> None:
    def breaks(_: Bench) -> Iterator[Samples]:
        yield Samples(what="before", values=[1.0])
        raise KitError("rank 1 died\nand more")

    drive: Any = Kept(tmp_path)
    run_part(drive, breaks)
    rows = sample_rows(drive.frame(), [], {})
    assert [(row["what"], row["median"], row["note"]) for row in rows] == [
        ("before", 1.0, ""),
        ("part", None, "not measured: rank 1 died"),
    ]


def test_samples_are_recorded_before_the_next_one_is_measured(tmp_path: Path) -> None:
    drive: Any = Kept(tmp_path)
    counts = []

    def part(_: Bench) -> Iterator[Samples]:
        for number in range(3):
            counts.append(len(drive.rows))
            yield Samples(what=f"row {number}", values=[1.0])

    run_part(drive, part)
    assert counts == [0, 1, 2]


def test_a_result_says_what_other_processes_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks are made up: 8 s of processor time in all, 2 s of them the bench's, in 4 s."""
    used, clock = iter([(0.0, 0.0), (8.0, 2.0)]), iter([0.0, 4.0])
    monkeypatch.setattr(room, "busy_seconds", lambda: next(used))
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    drive: Any = Kept(tmp_path)
    run_part(drive, lambda _: [])
    (row,) = drive.rows
    assert (row.metric, row.value, row.unit) == (OTHERS, 1.5, "cores")
    assert "used 1.5 of 2 cores" in others_text({"part": "steps", "used": 1.5, "cores": 2})
    assert not others_text({"part": "steps", "used": 0.1, "cores": 2})


def test_parts_are_chosen_by_name_or_by_what_they_have_in_common() -> None:
    parts = ("steps.a", "steps.b", "stepson", "grid.2")

    def chosen(words: str) -> list[str]:
        return [step.phase for step in driven_parts(BenchConfig(parts=words), parts, "m:f")]

    assert chosen("") == list(parts)
    assert chosen("steps") == ["steps.a", "steps.b"]
    assert chosen("grid.2,steps.b") == ["steps.b", "grid.2"]
    with pytest.raises(
        BadInput, match=r"there is no part 'step' in this bench; its parts are: steps\.a, steps\.b, stepson"
    ):
        chosen("steps,step")


def test_where_there_is_a_driver_a_bench_insists_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is an empty file. No rank starts: a fake World records its options."""
    monkeypatch.setattr("kit.machine.GPU_DRIVERS", (tmp_path / "driver",))
    asked: dict[str, Any] = {}

    class Made:
        def __init__(self, ranks: int, **options: Any) -> None:
            asked.update(options)

        def status(self) -> list[dict[str, Any]]:
            return [{"device": "cuda:0", "why": "1 CUDA device for 2 ranks"}] * 2

        def call(self, *_: object, **__: object) -> list[Any]:
            return [{}]

    def device_of(device: str) -> str:
        drive: Any = Kept(tmp_path, device=device)
        return Bench(drive).device

    assert device_of("auto") == "cpu"
    (tmp_path / "driver").touch()
    assert [device_of(device) for device in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(room, "World", Made)
    drive: Any = Kept(tmp_path, device="auto")
    bench = Bench(drive)
    bench.world(2)
    assert asked["device"] == "cuda"
    bench.keep(Samples(what="time", values=[1.0], note="so and so"))
    assert [row.text for row in drive.rows] == ["1 CUDA device for 2 ranks", f"so and so; {SHARED_GPU}"]
    assert not math.isnan(drive.rows[1].value)
