"""One whole run on ranks: every phase, every check, and how the command ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.cli import main
from kit.labs.stream import drive
from kit.labs.stream.rules import LOOPS, RESUMED, death_named_in_time, ledger, recomputed_as_sampled
from kit.loop.messages import Command, Event
from kit.results.rules import Missing, NotMeasured
from kit.stream import sides
from kit.stream.live import LiveRanks
from kit.stream.ports import replica_role
from kit.stream.settings import opening
from tests.labs.parts import logged_steps
from tests.labs.simulated import failed
from tests.test_trackers import read_board

# Checks that so short a run may leave unanswered, on a machine of any speed.
TOO_SHORT = {
    "controller_answers",
    "nothing_piles_up",
    "trains_before_straggler",
    "kv_policy_kept",
    "no_torn_generation",
    "requests_spread",
}


def dawdling(*given: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Let time pass between the first row of a ledger and the loop, as on a busy machine."""
    for row in opening(*given):
        yield row
        time.sleep(0.05)


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boards")


@pytest.fixture(scope="module")
def run(places: None, boards: Path) -> Iterator[kit.Run]:
    log = f"tensorboard:{boards}" if find_spec("tensorboard") else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "opening", dawdling)
        yield kit.run(
            "stream", log=log, steps=3, groups=2, group=2, layers=1, lr=3e-3, slots=4, answer=[8, 16], decode=2
        )


def test_every_check_has_an_answer_and_none_fails(run: kit.Run) -> None:
    verdict = run.verdict()
    assert failed(verdict) == set()
    assert {row.check for row in verdict if row.passed is None} <= TOO_SHORT


def test_tensorboard_has_every_update_of_every_loop_once(run: kit.Run, boards: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    board, frame = read_board(boards / run.id), run.frame()
    for phase in ("lockstep", "stream"):
        for name in ("train/global_loss", "train/grad_norm", "train/lr", "train/gen_kl_error", "rollout/reward"):
            assert [x for x, _ in board[f"{phase}/{name}"]] == [1, 2, 3], name
        for name in ("logprobs", "advantage", "training", "clear", "sync", "exposed_generation", "tokens_per_second"):
            assert [x for x, _ in board[f"{phase}/timing/{name}"]] == [1, 2, 3], name
        losses = frame[(frame["phase"] == phase) & (frame["metric"] == "global_loss")]["value"]
        assert [value for _, value in board[f"{phase}/train/global_loss"]] == pytest.approx([*losses], rel=1e-6)
    assert [x for x, _ in board["resume/train/lr"]] == [1, 2, 3]  # before and after the stop
    assert [x for x, _ in board["verify/seconds"]] == [3]  # by cycle


def test_the_trainers_log_has_a_line_for_each_step(run: kit.Run) -> None:
    steps = [step for step, _, _ in logged_steps(run.dir / "logs", 0)]
    assert steps[:6] == [1, 2, 3, 1, 2, 3]  # of the plain loop, then of the next loop


def test_every_loop_has_a_ledger_with_an_end(run: kit.Run) -> None:
    for phase in (*LOOPS, *RESUMED, "rehearse"):
        rows = ledger(run.frame(), phase)
        assert rows is not None
        assert rows.ended is not None
        assert rows.ended["why"] == "done"


@pytest.mark.parametrize(
    ("metric", "first"), [("recomputed", "sample"), ("recomputed_by", "weights"), ("served", "weights")]
)
def test_what_was_not_recomputed_as_it_was_sampled_is_named(run: kit.Run, metric: str, first: str) -> None:
    frame = run.frame().copy()
    wanted = (frame["metric"] == metric) & frame["phase"].isin(["stream", "verify"])
    frame.loc[frame.index[wanted][-1], "text"] = "another digest"
    assert (found := recomputed_as_sampled(frame, {})).value == 1
    assert f"; first: {first} {{" in found.why


def test_a_trained_sample_that_is_not_recomputed_is_named(run: kit.Run) -> None:
    frame = run.frame()
    found = recomputed_as_sampled(frame.drop(frame.index[frame["metric"] == "recomputed"][0]), {})
    assert found.value == 1
    assert "(left out)" in found.why


def test_a_replica_that_was_never_killed_is_not_missed(run: kit.Run) -> None:
    """With few steps the last replica may decode nothing with version 1. A kill that nobody named does count."""
    frame = run.frame()
    assert death_named_in_time(frame, {}).value > 0
    unnamed = frame[frame["metric"] != "named_seconds"]
    with pytest.raises(Missing, match="'named_seconds'"):
        death_named_in_time(unnamed, {})
    with pytest.raises(NotMeasured, match="so it was not killed; use more steps"):
        death_named_in_time(unnamed[unnamed["metric"] != "killed"], {})


class Early(drive.Losing):
    """The replica is killed before it joins a sync that has been ordered: the trainer waits for its call."""

    def take(self) -> list[Event]:
        arrived = LiveRanks.take(self)
        if any(event.name == "died" for event in arrived):
            self.drive.record("named_seconds", time.time() - self.killed_at, "s")
        return arrived

    def _sync(self, command: Command) -> None:
        (rank,) = self.drive.roles[replica_role(self.drive.config.replicas - 1)]
        if command.version and not self.killed_at:
            self.drive.lost |= {rank}
            self.killed_at = time.time()
            os.kill(self.drive.world.pids[rank], signal.SIGKILL)
        super()._sync(command)


@pytest.mark.slow
def test_a_replica_that_dies_before_it_takes_part_in_a_sync_does_not_end_the_loop(
    places: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "Losing", Early)
    run = kit.run("stream", steps=3, groups=2, group=2, layers=1, lr=3e-3, slots=4, answer=[8, 16], decode=2)
    assert failed(run.verdict()) == set()
    rows = ledger(run.frame(), "rehearse")
    assert rows is not None
    (error,) = (row for row in rows.by_event["error"] if row.get("of") == "sync")
    assert "SIGKILL" in str(error["why"])
    assert [row["version"] for row in rows.by_event["synced"]] == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_command_says_how_a_simulated_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    simulated = ["run", "stream", "--set", "simulated=true", "--set", "ranks=1", "--json"]
    assert main(simulated) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]
    assert main([*simulated, "--fault", "lost-group"]) == 1
    assert main([*simulated, "--fault", "gate-never-opens"]) == 3
    assert main(["run", "stream", "--set", "places=1", "--json"]) == 2
