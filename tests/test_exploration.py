"""`kit explore`: right cores pass, each wrong one is found, made small and replayed; every planted bug of a core is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.exploration import AT_A_TIME, ExplorationError, power, replay, worlds_of
from kit.labs.definition import as_settings, made
from kit.labs.discover import find, find_fault
from kit.labs.share.worlds import ShareWorlds
from kit.labs.stream.lab import StreamConfig
from kit.labs.stream.worlds import StreamWorlds, ends_well
from kit.loop.explore import Worlds, play, world_of
from kit.results.rules import settle
from kit.stream.judge.history import LoopLedger
from kit.target import replaced
from tests.loop.right_cores import DESIGNS

WRONG = "tests.loop.wrong_cores"
SEEDS = 20


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))


@pytest.mark.parametrize(
    ("lab", "settings"),
    [
        ("share", {}),
        pytest.param("share", {"planner": "fifo"}, marks=pytest.mark.slow),
        pytest.param("share", {"planner": f"{WRONG}:first_come"}, marks=pytest.mark.slow),
        ("stream", {}),
        pytest.param("stream", {"sampler": "windowed"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_right_cores_pass(lab: str, settings: dict[str, str]) -> None:
    done = kit.explore(lab, seeds=SEEDS, **settings)
    assert done.passed, done
    assert len(done.outcomes) == SEEDS
    done.raise_for_failures()
    frame = done.frame()
    assert frame["seed"].tolist() == list(range(SEEDS))
    assert frame["events"].min() > 0
    if lab == "share":  # its pipelines have no samples: a pass says so
        assert {"routed_to_awake", "version_after_wake"} <= {*done.unmeasured}
        assert "one_owner" not in done.unmeasured
        assert f"not measured in any: {', '.join(done.unmeasured)}" in str(done)


@pytest.mark.drawn(3, of="wrong cores")
@pytest.mark.parametrize(
    ("lab", "settings", "rule"),
    [
        ("share", {"planner": f"{WRONG}:ignores_tp"}, "no_deadlock"),
        pytest.param("share", {"planner": f"{WRONG}:wakes_the_dead"}, "no_deadlock", marks=pytest.mark.slow),
        pytest.param("share", {"scheduler": f"{WRONG}:grants_twice"}, "no_request_lost", marks=pytest.mark.slow),
        ("share", {"scheduler": f"{WRONG}:forgets_requests"}, "no_request_lost"),
        pytest.param("share", {"scheduler": f"{WRONG}:never_rests"}, "raised", marks=pytest.mark.slow),
        ("stream", {"implementation": f"{WRONG}:drops_the_last"}, "every_group_once"),
        pytest.param(
            "stream", {"implementation": f"{WRONG}:RecomputesNothing"}, "notes_backed", marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: next(iter(value.values())).partition(":")[2] if isinstance(value, dict) else None,
)
def test_a_wrong_core_is_found_made_small_and_replayed(lab: str, settings: dict[str, str], rule: str) -> None:
    done = kit.explore(lab, seeds=SEEDS, wall_s=2.0, **settings)
    failure = done.failure
    assert failure is not None, done
    assert rule in failure.findings, failure.findings
    assert failure.sizes.get("pipelines", 1) <= 3
    assert failure.rule in str(done)
    assert failure.line in str(done)
    with pytest.raises(ExplorationError, match=failure.rule):
        done.raise_for_failures()
    again = replay(lab, json.dumps(failure.world), **settings)
    assert again.rule == failure.rule
    assert again.events == failure.events
    run = kit.load(failure.dir)
    assert run.lab == lab
    if rule != "raised":
        failed = [row.check for row in run.verdict() if row.passed is False]
        assert rule in failed


def test_a_desk_without_admission_lets_a_trainer_go_first_at_once() -> None:
    """Also while the next pipeline is still being set up: an awaited time of 0 s is none."""
    loops: dict[str, dict[str, Any]] = {
        "a": {"infer": [1], "train": [1], "steps": [[28], [129]], "initialisation_ms": 0, "training_ms": 50},
        "b": {"infer": [0], "train": [0], "steps": [[100]], "initialisation_ms": 300, "training_ms": 100},
    }
    same = {
        "tp": 1,
        "start_ms": 0,
        "logprobs_ms": 0,
        "reports": True,
        "estimates": False,
        "validates": False,
        "waits": False,
    }
    desk = {"devices": 2, "sleep_ms": 50, "wake_ms": 1, "admission": False, "broken": [], "happens": [], "frail": []}
    world = {**desk, "pipelines": [{**same, **loop} for loop in loops.values()]}
    assert replay("share", world).findings == {}


def test_only_groups_that_replicas_lost_excuse_an_end_below_the_floor() -> None:
    """What a core notes about its groups does not."""

    def ends(*failed: dict[str, Any]) -> bool:
        capacity = {"event": "capacity", "groups_per_step": 2, "on_failed": "shrink", "floor": 2}
        ended = {"event": "ended", "why": "error", "error": "too few groups"}
        rows = [capacity, *({"event": "failed", **ids} for ids in failed), ended]
        ledger = LoopLedger([{"time": 0.0, **row} for row in rows])
        return settle(ends_well(ledger)).value == 0

    assert not ends({"group": 1}, {"group": 2})
    assert not ends({"group": 1, "sample": 0})
    assert ends({"group": 1, "sample": 0, "core": "a"}, {"group": 1})


def test_an_exploration_is_ended_while_its_failure_is_made_small() -> None:
    told: list[tuple[int, ...]] = []

    def end_at_the_same_counts(*counts: int) -> None:
        if counts in told:  # no further world is done
            raise InterruptedError
        told.append(counts)

    with pytest.raises(InterruptedError):
        kit.explore("stream", seeds=SEEDS, implementation=f"{WRONG}:drops_the_last", tell=end_at_the_same_counts)


@pytest.mark.slow
def test_a_core_that_never_returns_and_one_that_ends_its_process_are_named() -> None:
    done = kit.explore("share", seeds=4, wall_s=0.3, planner=f"{WRONG}:never_returns", every=True)
    assert {rule for outcome in done.outcomes for rule in outcome.findings} == {"never_returned"}
    done = kit.explore("share", seeds=2, jobs=1, scheduler=f"{WRONG}:exits", every=True)
    assert [[*outcome.findings] for outcome in done.outcomes] == [["never_returned"]] * 2
    assert done.failure is None  # no process survives the world, so only its seed is known
    assert "the first is seed 0" in str(done)


LIMITED_IMPORT = """
import math
from kit.labs.stream.drive import controller
from kit.loop import limit

if getattr(limit._ends, "at", math.inf) < math.inf:
    raise RuntimeError("imported within the limit of a world")
"""


def test_own_code_is_loaded_before_the_limit_of_a_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imports_much.py").write_text(LIMITED_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    assert kit.explore("stream", 1, jobs=1, implementation="imports_much:controller").passed


def test_own_code_that_a_worker_cannot_load_is_found_by_its_first_world() -> None:
    order = {"worlds": find("stream").worlds, "like": None, "settings": {"implementation": "no_such_module:core"}}
    worlds = worlds_of(order)
    assert (
        "ModuleNotFoundError: No module named 'no_such_module'" in play(worlds, world_of(worlds, 0)).findings["raised"]
    )


FAILS_ONCE = """
from kit.labs.stream.drive import controller

made = []

def once(*given):
    made.append(given)
    if len(made) == 1:
        raise RuntimeError("not yet")
    return controller(*given)

def hangs_once(*given):
    made.append(given)
    while len(made) == 1:
        pass
    return controller(*given)
"""


@pytest.mark.parametrize(
    ("core", "words"),
    [
        ("once", r"raised: .*not yet.*; a second run of this world did not fail; replay: kit explore stream"),
        ("hangs_once", r"never_returned: the world did not end .*; a second run of this world returned; replay: kit "),
    ],
)
def test_a_world_that_fails_only_once_says_so(
    core: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    monkeypatch.syspath_prepend(tmp_path)
    done = kit.explore("stream", 1, jobs=1, wall_s=0.5, implementation=f"fails_once:{core}")
    assert re.search(f"1 of 1 worlds failed .*; seed 0: {words}", done.one_line()), done.one_line()
    assert "a second run of this world" in done.sentence()


@pytest.mark.slow
def test_the_command_prints_a_line_that_replays_the_failure(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kit", "explore", "share", "--set", f"planner={WRONG}:wakes_the_dead", "--json"]
    found = subprocess.run([*words, "--seeds", str(SEEDS)], capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stderr
    answer = json.loads(found.stdout)
    line = answer["failure"]["line"]
    again = subprocess.run(
        f"{sys.executable} -m {line}", shell=True, capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    assert again.returncode == 1, again.stderr
    assert answer["failure"]["why"] in again.stdout
    assert [*tmp_path.glob("share-*")]


def test_a_desk_that_waits_for_a_replica_that_died_asleep_is_seen() -> None:
    worlds = ShareWorlds()
    layout = {"tp": 1, "infer": [0, 1], "train": [0, 1]}
    pipeline = {
        **dict.fromkeys(("start_ms", "initialisation_ms", "logprobs_ms"), 0),
        **dict.fromkeys(("estimates", "validates", "waits"), False),
        **layout,
        "steps": [[100]],
        "training_ms": 100,
        "reports": True,
    }
    world = {"devices": 2, "sleep_ms": 10, "wake_ms": 10, "admission": False, "pipelines": [pipeline]}
    world |= {"broken": [], "happens": [], "frail": [[0, 1]]}
    played = play(worlds, world)
    assert played.findings == {}
    assert {row["replica"] for row in played.rows if row.event == "died"} == {1}
    fault = find_fault(find("share"), "waits-for-the-dead")
    assert fault is not None
    with replaced(fault.patch):
        findings = play(worlds, world).findings
    assert "replica 1 of a did not answer a shrink" in findings["no_deadlock"]


@pytest.mark.parametrize(
    ("worlds", "seed", "rule"),
    [
        (ShareWorlds(scheduler=f"{WRONG}:joins_twice"), 0, "no_request_lost"),
        (ShareWorlds(scheduler=f"{WRONG}:never_admits_late"), 2, "no_deadlock"),
        (ShareWorlds(planner=f"{WRONG}:plans_for_three"), 4, "no_starvation"),
        (StreamWorlds(implementation=f"{WRONG}:logs_nothing"), 0, "metrics_true"),
        (StreamWorlds(implementation=f"{WRONG}:IgnoresFloor"), 32, "one_step_per_batch"),
        (StreamWorlds(implementation=f"{WRONG}:NeverShrinks"), 33, "no_deadlock"),
        (StreamWorlds(implementation=f"{WRONG}:ReplacesAlways"), 32, "eviction_justified"),
        (StreamWorlds(), 32, ""),
        (StreamWorlds(sampler=f"{WRONG}:LeavesTheLast"), 0, "no_deadlock"),
        (StreamWorlds(implementation="tests.loop.right_cores:WholeSteps"), 3, ""),
        (ShareWorlds(scheduler="tests.labs.share.test_own:own_desk"), 1, ""),
    ],
    ids=lambda value: next(iter(value.settings.values()), "").partition(":")[2] if hasattr(value, "settings") else None,
)
def test_a_single_world_tells_right_from_wrong(worlds: Worlds, seed: int, rule: str) -> None:
    findings = play(worlds, world_of(worlds, seed)).findings
    assert rule in findings if rule else findings == {}


def test_the_end_of_the_data_is_no_reason_to_give_up_a_step_with_all_its_groups() -> None:
    worlds = StreamWorlds()
    world = {**world_of(worlds, 5), "prompt_ms": 0}
    assert play(worlds, world).findings == {}
    with replaced({"kit.stream.core:is_stuck": f"{WRONG}:is_stuck_while_it_scores"}):
        findings = play(worlds, world).findings
    assert "the data ended with 6 of 6 groups" in findings["no_deadlock"]


@pytest.mark.parametrize("like", [None, {"simulated": True}], ids=["any", "default"])
def test_a_prompt_at_hand_when_a_loop_stops_is_not_lost(like: dict[str, Any] | None) -> None:
    """Of the first 100 worlds, which every run plays, several stop with one."""
    config = like and as_settings(made(StreamConfig, like))
    right, wrong = StreamWorlds(config), StreamWorlds(config, implementation=f"{WRONG}:ForgetsThePrompt")
    findings = []
    for seed in range(100):
        world = world_of(right, seed)
        if world.get("has_prompt"):
            assert play(right, world).findings == {}
            findings += [play(wrong, world_of(wrong, seed)).findings]
    lost = [found["resume_equals"] for found in findings if found]
    assert len(lost) > 2
    assert all("is in neither run" in why for why in lost)


def test_the_first_worlds_are_played_however_long_they_take() -> None:
    """Without any time, a worker gets the order that holds the seeds that must be played, and no other."""
    explored = kit.explore("stream", 60, every=True, jobs=1, limit_s=0.0, least=1, sampler="windowed")
    assert len(explored.outcomes) == AT_A_TIME
    assert kit.explore("stream", 60, every=True, jobs=1, limit_s=0.0, sampler="windowed").outcomes == []


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(BadInput, match="lab 'smoke' has no random worlds; explore share or stream"):
        kit.explore("smoke")
    with pytest.raises(BadInput, match="devices is drawn for each world; explore share takes only scheduler, planner"):
        kit.explore("share", devices=3)
    with pytest.raises(BadInput, match=r"a\.steps is drawn for each world"):
        kit.explore("share", **{"a.steps": 3})
    with pytest.raises(
        BadInput, match="explore stream has no setting 'mingroups'; allowed are: implementation, sampler"
    ):
        kit.explore("stream", mingroups=4)
    with pytest.raises(BadInput, match="explore stream has no setting 'samplr'; did you mean 'sampler'"):
        kit.explore("stream", samplr="windowed")
    with pytest.raises(BadInput, match="seeds=0 must be at least 1"):
        kit.explore("share", seeds=0)
    with pytest.raises(BadInput, match="--replay takes a world as JSON"):
        replay("share", "[")
    with pytest.raises(BadInput, match="this is no world of lab 'share': KeyError: 'pipelines'"):
        replay("share", "{}")


@pytest.mark.slow
@pytest.mark.parametrize("style", DESIGNS)
def test_right_designs_in_other_styles_pass(style: str) -> None:
    lab, settings = DESIGNS[style]
    kit.explore(lab, seeds=SEEDS, **settings).raise_for_failures()


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [ShareWorlds(), StreamWorlds()], ids=["share", "stream"])
def test_smaller_worlds_can_be_run(worlds: Worlds) -> None:
    """Every step of a shrink is a world of its own that right code passes."""
    for seed in range(3):
        for candidate in islice(worlds.smaller(world_of(worlds, seed)), 30):
            assert json.loads(json.dumps(candidate)) == candidate
            assert play(worlds, candidate).findings == {}, candidate


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lab", ["share", "stream"])
def test_known_bugs_of_cores_are_found(lab: str) -> None:
    rows = [*power(lab, seeds=1000)]
    possible = [row for row in rows if not row.beyond]
    assert len(possible) > 20
    assert len(rows) - len(possible) <= len(rows) // 4
    missed = [row.fault for row in possible if row.seed is None]
    assert len(missed) <= len(possible) // 20, missed
