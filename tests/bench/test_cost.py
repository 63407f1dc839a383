"""The arithmetic of limits: a machine's pace, what parts do, and the plan that comes of both."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kit.bench import limits, world
from kit.bench import pace as room
from kit.bench.pace import ASSUMED, FILE, Pace, find, from_doctor, read
from kit.bench.reference import (
    ASSUMED_BOX,
    GPU_MINUTES,
    Part,
    able,
    bench,
    differences,
    lab,
    offload,
    on_cpu,
    on_gpus,
    plan_text,
)
from kit.bench.session import LEAST_S, SLACK, Book, Cost, Session, total
from kit.cli import benches
from kit.preflight import times
from kit.results.files import read_json, write_json

PACE = Pace(
    device="cpu",
    process_s=2.0,
    world_s=3.0,
    megatron_s=5.0,
    job_s=1.0,
    step_s=0.5,
    group_s=0.01,
    copy_s=0.25,
    source="made up",
    host="here",
)
RECORDED = Path(__file__).resolve().parents[2] / "data" / "reference" / "cpu-2core"
# What the primitives take on that machine when nothing else runs. A World and megatron are from its bench-world.
TWO_CORES = replace(
    PACE, process_s=2.2, world_s=1.72, megatron_s=4.28, job_s=0.6, step_s=0.1, group_s=0.0096, copy_s=0.2
)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.platform, "node", lambda: "here")


def test_seconds_are_counts_times_primitives() -> None:
    cost = Cost(process=1, megatron=2, step=10, group=100, idle=7)
    assert cost.seconds(PACE) == pytest.approx(2 + 2 * 5 + 10 * 0.5 + 100 * 0.01 + 7)
    assert cost.told(PACE) == "1 process + 2 megatron + 10 step + 100 group + 7 idle"
    assert (cost * 2 + Cost(copy=4)).seconds(PACE) == pytest.approx(2 * 25 + 1)
    assert total([Cost(world=1), Cost(world=2)]) == Cost(world=3)


def test_limits_follow_the_machine() -> None:
    cost = Cost(job=100)
    assert cost.limit(PACE) == pytest.approx(SLACK * 100)
    assert cost.limit(replace(PACE, job_s=3.0)) == pytest.approx(SLACK * 300)
    assert Cost(job=1).limit(PACE) == LEAST_S


@pytest.mark.parametrize("name", [name for name in benches() if name != "view"])
@pytest.mark.parametrize("quick", [True, False])
def test_a_bench_has_its_cost(name: str, quick: bool) -> None:
    module = import_module(f"kit.bench.{name}")
    sizes = module.QUICK if quick else module.Sizes()
    parts = module.parts(sizes, "cpu")
    assert total([part.cost for part in parts.values()]).seconds(PACE) > 0


def test_a_reference_counts_the_parts_that_it_names() -> None:
    module = import_module("kit.bench.split")
    costs = {name: part.cost for name, part in module.parts(module.QUICK, "cuda").items()}
    some = bench("split", "steps.megatron", "memory", called="some", quick=True, device="cuda")
    wanted = total([costs["steps.megatron"], costs["memory.megatron"], costs["memory.fsdp2"]]) + Cost(process=1)
    assert some.cost == wanted
    assert some.name == "bench-split.some"
    assert some.command[:5] == ("bench", "split", "--quick", "--device", "cuda")
    assert some.command[5:] == ("--part", "steps.megatron", "--part", "memory")


@pytest.mark.parametrize("name", [name for name in benches() if name not in {"view", "limits"}])
def test_a_quick_bench_takes_a_minute_or_two_by_arithmetic(name: str) -> None:
    assert bench(name, quick=True).cost.seconds(TWO_CORES) <= 120


def test_one_gpu_is_through_in_time_and_the_most_telling_comes_first() -> None:
    """By assumed times, where NCCL cannot suspend, as on a box with torch 2.11."""
    parts, missing = able(on_gpus(), ASSUMED_BOX)
    assert missing == {"lab-offload-suspend": "NCCL 2.28.9 cannot suspend communicators"}
    before = Cost(process=2, world=2, job=1).seconds(ASSUMED)  # doctor, and the pace
    assert before + sum(part.cost.seconds(ASSUMED) for part in parts) < 60 * GPU_MINUTES
    order = [part.name for part in parts]
    wanted = ["lab-offload-exact", "bench-release.own", "lab-split-bfloat16", "bench-sync.gpus-shm", "lab-smoke"]
    assert sorted(wanted, key=order.index) == wanted
    assert able(on_gpus(), {"ranks": {"suspend_why": None}}) == (list(on_gpus()), {})


def test_what_claims_a_gpu_asks_for_it() -> None:
    for part in on_gpus():
        asked = part.settings.get("device") or ("cuda" if part.command >= ("--device", "cuda") else None)
        asked = asked or ("cuda" if "cuda" in part.command else None)
        assert asked == "cuda" or part.command[1] == "world", part  # that bench is of ranks on the CPU


def test_the_prediction_for_two_cores_is_near_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was recorded bench by bench, on an idle machine: the predictions for a bench's parts are added up. Peers are those of then."""
    measured_by = " ".join(row["who"] for row in read_json(RECORDED / "bench-world.json")["rows"] if row["n"])
    monkeypatch.setattr(world, "installed", lambda library: library.needs.removeprefix("torch") in measured_by or None)
    by_bench: dict[str, float] = {}
    for part in on_cpu():
        name = part.name.partition(".")[0]
        by_bench[name] = by_bench.get(name, 0.0) + part.cost.seconds(TWO_CORES)
    told = {}
    for name, predicted in by_bench.items():
        measured = read_json(RECORDED / f"{name}.json")["seconds"]
        if measured > 3:
            told[name] = measured / predicted
    assert len(told) > 10
    assert {name: ratio for name, ratio in told.items() if not 1 / 1.5 < ratio < 1.5} == {}


def test_a_gpu_box_lists_what_differs_from_what_was_assumed() -> None:
    measured = replace(ASSUMED, step_s=0.3, source="measured by kit doctor --deep")
    head, *lines = differences(measured).splitlines()
    assert head == "measured here, against what was assumed:"
    assert [line.split()[0] for line in lines] == ["process", "world", "megatron", "job", "step", "group", "copy"]
    assert lines[4].split() == ["step", "0.3", "s,", "assumed", "0.15", "s:", "2.00", "times"]
    assert differences(ASSUMED) == differences(PACE) == ""


def test_a_plan_has_a_line_for_each_part_and_their_sum() -> None:
    parts = [lab("smoke", cost=Cost(process=1, world=1)), offload("exact", 1, gib=0, weight=1, hashing=(0, 0))]
    lines = plan_text(parts, PACE, 8).splitlines()
    assert lines[0].startswith("seconds (made up): process 2, world 3, megatron 5")
    assert lines[1].endswith("no part starts that would not end within 8 min")
    assert lines[2].split(maxsplit=1) == ["lab-smoke", "5.0 s, limit    20 s = 1 process + 1 world"]
    whole = 5 + 2 + 5 + 3 + 6 * 0.5 + 25 * 0.01
    assert lines[-1].split()[:4] == ["in", "all", f"{whole:.1f}", "s,"]


def test_what_parts_took_is_held_against_what_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and their times are made up: each is predicted to take 10 s."""
    ended = {"long": 20.0, "short": 5.0, "late": 99.0}

    def takes(_: Path, part: Part, limit_s: float, predicted_s: float) -> dict[str, Any]:
        assert (limit_s, predicted_s) == (SLACK * 10, 10)
        late = part.name == "late"
        return {
            "seconds": ended[part.name],
            "timed_out": late,
            "exit": 0,
            "state": "timed out",
            "complaint": "too late",
        }

    monkeypatch.setattr(limits, "perform", takes)
    monkeypatch.setattr(room, "measure", lambda _: PACE)
    sizes = limits.Sizes(parts=tuple(Part(name=name, command=("bench", name), cost=Cost(job=10)) for name in ended))
    session = Session("cpu", tmp_path, Book("limits"))
    long, short, late = (one for part in limits.parts(sizes, "cpu").values() for one in part.work(session))
    assert (long.median, short.median, late.median) == (2.0, 2.0, None)
    assert (long.limit, long.met, long.ids["seconds"]) == (1.5, False, 20.0)
    assert late.note == "not measured: timed out: too late"


# -- where a pace comes from ---------------------------------------------------------------------------------------------------


def test_a_pace_is_kept_with_the_reference_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring is made up: it would start ranks."""
    measured = []
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(room, "measure", lambda device: measured.append(device) or PACE)
    assert find(tmp_path, "cpu") == find(tmp_path, "cpu") == PACE
    assert measured == ["cpu"]
    assert read_json(tmp_path / FILE) == asdict(PACE)


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"device": "cuda"}, {"step_s": None, "more": 1}])
def test_a_pace_of_another_machine_is_not_taken(change: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / FILE, {**asdict(PACE), **change})
    assert read(tmp_path / FILE, "cpu") is None
    write_json(tmp_path / FILE, asdict(PACE))
    assert read(tmp_path / FILE, "cpu") == PACE


DOCTORS = times.Times(
    device="cuda",
    host="here",
    world=3.0,
    world_megatron=6.0,
    all_reduce=0.5,
    layout=2.0,
    job=1.5,
    step=0.25,
    group=0.25,
    host_to_device=0.05,
    device_to_host=0.0625,
)


def test_what_doctor_measured_is_taken_where_it_is_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "process_seconds", lambda: 1.0)
    assert from_doctor(times.load(tmp_path), "cuda") is None
    times.save(DOCTORS, tmp_path)
    pace = from_doctor(times.load(tmp_path), "cuda")
    assert pace is not None
    assert (pace.world_s, pace.megatron_s, pace.job_s, pace.step_s) == (3.5, 6.5, 3.75, 0.25)
    assert (pace.group_s, pace.copy_s, pace.process_s) == (0.25, 0.1125, 1.0)
    assert pace.source == "measured by kit doctor --deep"
    assert from_doctor(DOCTORS, "cpu") is None
    assert from_doctor(replace(DOCTORS, host="there"), "cuda") is None


@pytest.mark.parametrize(
    "missing",
    ["world", "world_megatron", "all_reduce", "layout", "job", "step", "group", "host_to_device", "device_to_host"],
)
def test_what_doctor_did_not_measure_is_measured_anew(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "process_seconds", lambda: 1.0)
    assert from_doctor(replace(DOCTORS, **{missing: None}), "cuda") is None


@pytest.mark.slow
def test_a_pace_is_measured_on_real_ranks(nothing_left: None) -> None:
    pace = room.measure("cpu")
    assert all(value > 0 for name, value in asdict(pace).items() if name.endswith("_s"))
    assert pace.megatron_s > pace.world_s
    assert (pace.device, pace.host) == ("cpu", "here")
