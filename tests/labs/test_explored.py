"""The phase `explored`: own code in random worlds with the layout of its run; and that nothing else counts as own code's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.labs.definition import EXPLORED, as_settings, made
from kit.labs.explored import FAILED_WORLDS, no_world_fails
from kit.labs.share import lab as share
from kit.labs.share.ledgers import judged_phases
from kit.labs.share.worlds import ShareWorlds, layouts
from kit.labs.stream import lab as stream
from kit.labs.stream.rules import lockstep_is_the_kits, with_own_code
from kit.labs.stream.worlds import LOOP_SIZES, MANNERS, StreamWorlds
from kit.loop.explore import Worlds, play, world_of
from kit.results.run import to_frame
from tests.labs.parts import failed, passed, why
from tests.labs.share.conftest import simulated as simulated_share
from tests.labs.stream.conftest import simulated as simulated_stream
from tests.results.conftest import make_record

WRONG, DESIGNS = "tests.loop.wrong_cores", "tests.loop.right_cores"
SMALL = {"steps": 1, "groups": 2, "group": 2}


@pytest.mark.parametrize(
    ("simulated", "own", "rule"),
    [
        (simulated_share, {"scheduler": f"{WRONG}:forgets_requests", **SMALL}, "no_request_lost"),
        pytest.param(simulated_share, {"planner": f"{DESIGNS}:most_work_first", **SMALL}, "", marks=pytest.mark.slow),
        pytest.param(
            simulated_share, {"pipeline": "tests.labs.share.test_own:Right", **SMALL}, "", marks=pytest.mark.slow
        ),
        (simulated_stream, {"sampler": "tests.stream.test_foreign:InOrder", "places": 8, **SMALL}, ""),
        pytest.param(
            simulated_stream,
            {"implementation": f"{WRONG}:drops_the_last", **SMALL},
            "every_group_once",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_own_code_runs_in_random_worlds_and_their_failures_are_its(
    simulated: Callable[..., Any], own: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    verdict, _ = simulated(**own, worlds=6, folder=tmp_path)
    assert passed(verdict, "no_world_fails") is not bool(rule)
    text = why(verdict, "no_world_fails")
    if rule:
        assert f"of 6 worlds failed ({rule}" in text
        assert f"--set {next(iter(own))}={own[next(iter(own))]} --replay '{{" in text
        assert rule in failed(kit.load(tmp_path / "explored").verdict())
    else:
        assert "no rule failed in 6 worlds" in text
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("lab", "settings", "explores"),
    [
        (share, {}, False),
        (share, {"planner": "fifo"}, False),
        (share, {"planner": "mine:P"}, True),
        (share, {"scheduler": "mine:D", "simulated": True}, True),
        (share, {"pipeline": "mine:P", "worlds": 0}, False),
        (stream, {}, False),
        (stream, {"trainer": "mine:T"}, False),  # no core: it runs on ranks
        (stream, {"sampler": "mine:S"}, True),
        (stream, {"implementation": "mine:C", "simulated": True}, True),
        (stream, {"implementation": "mine:C", "phases": "stream"}, False),
    ],
)
def test_only_own_cores_are_explored(lab: Any, settings: dict[str, Any], *, explores: bool) -> None:
    config = made(lab.LAB.config, settings)
    assert (EXPLORED in lab.LAB.plan(config)) is explores
    asked = next(rule for rule in lab.LAB.load_rules() if rule.name == "no_world_fails")
    assert asked.asked(as_settings(config)) is explores


@pytest.mark.parametrize(("lab", "name"), [(share, "planner"), (stream, "implementation")])
def test_code_of_a_notebook_is_not_explored_and_the_rule_says_why(lab: Any, name: str) -> None:
    """Worlds run in other processes, whose `__main__` is another one."""
    config = made(lab.LAB.config, {name: "__main__:Mine"})
    assert EXPLORED not in lab.LAB.plan(config)
    asked = next(rule for rule in lab.LAB.load_rules() if rule.name == "no_world_fails")
    reason = f"{name}=__main__:Mine is code of this notebook; write it to a module"
    assert asked.asked(as_settings(config))
    assert reason in str(asked.unanswerable(as_settings(config)))
    with pytest.raises(BadInput, match=f"^{reason}: worlds run in other processes"):
        kit.explore(lab.LAB.name, **{name: "__main__:Mine"})


def test_what_own_code_records_of_worlds_counts_for_nothing() -> None:
    rows = [
        make_record(phase="explored", rank=-1, metric=FAILED_WORLDS, value=20, unit="1", text="20 of 20 worlds failed"),
        make_record(phase="explored", rank=0, metric=FAILED_WORLDS, value=0, unit="1", text="no rule failed"),
        make_record(phase="stream", rank=-1, metric=FAILED_WORLDS, value=0, unit="1", text="no rule failed"),
    ]
    assert no_world_fails(to_frame(rows), {}).value == 20


def test_what_does_not_run_the_own_code_does_not_count() -> None:
    phases = [step.phase for step in share.LAB.plan(made(share.ShareConfig, {"pipeline": "mine:P", "simulated": True}))]
    assert "scripted" not in phases  # its pipelines are scripts
    frame = to_frame([])
    assert {*judged_phases(frame, {})} >= {"scripted", "static"}
    assert judged_phases(frame, {"planner": "mine:P"}) == ("shared", "scripted", "rehearse")
    loops = ("lockstep", "stream", "resume_lockstep")
    sampler = {"sampler": "mine:S", "implementation": stream.KIT_CORE}
    assert with_own_code(sampler, loops) == ["stream"]
    assert "neither loop uses sampler=mine:S" in lockstep_is_the_kits(sampler)
    for others in ({}, {**sampler, "implementation": "mine:C"}, {**sampler, "trainer": "mine:T"}):
        assert with_own_code(others, loops) == [*loops]


def worlds_like(lab: Any, **settings: Any) -> Worlds:
    kind: Any = ShareWorlds if lab is share else StreamWorlds
    worlds: Worlds = kind(like=as_settings(made(lab.LAB.config, {"simulated": True, **settings})))
    return worlds


def test_worlds_have_the_layout_of_the_run_and_keep_it_when_they_are_made_small() -> None:
    worlds = worlds_like(share, scenario="F", pipelines=3, **{"b.infer": (2, 3)})
    drawn = [world_of(worlds, seed) for seed in range(8)]
    layout = (4, [[2, [0, 1, 2, 3], [0, 1]], [2, [2, 3], [2, 3]], [2, [0, 1, 2, 3], [0, 1]]])
    assert [layouts(world) for world in drawn] == [layout] * 8
    assert len({str(world) for world in drawn}) == 8
    smaller = [*islice(worlds.smaller(drawn[0]), 30)]
    assert [layouts(world) for world in smaller] == [layout] * len(smaller)
    assert smaller
    large = worlds_like(share, devices=128)
    assert len({layouts(world_of(large, seed))[0] for seed in range(8)}) > 1


def test_worlds_have_the_loop_of_the_run_and_keep_it_when_they_are_made_small() -> None:
    loop = {
        "sampler": "windowed",
        "window": 2,
        "places": 13,
        "slots": 5,
        "replicas": 3,
        "min_groups": 3,
        "floor": 2,
        "steps": 2,
    }
    worlds = worlds_like(stream, ranks=1, batch=8, at_sync="drain", phases="stream", **loop)
    drawn = [world_of(worlds, seed) for seed in range(12)]
    wanted = {**loop, "groups": 4, "group": 4, "updates": 2, "at_sync": "drain", "filter": False, "on_failed": "stop"}
    del wanted["steps"]
    for world in [*drawn, *islice(worlds.smaller(drawn[0]), 30)]:
        assert {name: world[name] for name in (*MANNERS, *LOOP_SIZES)} == wanted
        assert world["steps"] <= 2
        assert not world["resume"]  # this run has no phase with a resume
        assert "generate" not in world["fails"]  # a failed sample stops it
    large = worlds_like(stream, ranks=1, groups=64, group=16, sampler="capacity", places=512)
    sizes = [world_of(large, seed) for seed in range(8)]
    assert {world["sampler"] for world in sizes} == {"capacity"}
    assert max(world["groups"] for world in sizes) < 64


@pytest.mark.parametrize(
    ("lab", "settings"),
    [
        (share, {"scenario": "A"}),
        (share, {"pipelines": 3, "b.infer_tp": 2}),
        (stream, {"ranks": 1}),
        (stream, {"ranks": 1, "sampler": "windowed", "places": 16, "on_failed": "shrink", "floor": 2, "steps": 1}),
        (stream, {"ranks": 1, "sampler": "capacity", "places": 32, "at_sync": "abort", "batch": 8, "replicas": 5}),
    ],
)
def test_the_kits_own_cores_pass_in_worlds_of_a_run(lab: Any, settings: dict[str, Any]) -> None:
    worlds = worlds_like(lab, **settings)
    for seed in range(4):
        assert play(worlds, world_of(worlds, seed)).findings == {}
