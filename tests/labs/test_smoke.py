"""The smoke lab: right code passes, and each fault fails the check it names, in user code too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import kit
from kit.labs.discover import find
from kit.labs.smoke.ranks.phases import Smoke
from kit.results import Row, judge, to_frame
from tests.labs.parts import failing_parts

CHECKS = {
    "groups_return_to_baseline",
    "groups_are_distinct",
    "every_group_communicates",
    "fds_return",
    "threads_return",
}
CHECKS |= {"memory_drift", "memory_slope", "names_restored", "nothing_piles_up"}
TOO_SHORT = dict.fromkeys(("memory_slope", "nothing_piles_up"))  # two cycles are too few
OWN = '''
import torch.distributed as dist

class World:
    """Hands out WORLD for every group."""
    def __init__(self, ctx): ...
    def make(self, ranks):
        return dist.group.WORLD
    def destroy(self, group): ...

class Kept:
    """Destroys every group and keeps what it made of one: torch's tables forget it, its threads live on."""
    def __init__(self, ctx):
        self.kept = []
    def make(self, ranks):
        return dist.new_group(list(ranks))
    def destroy(self, group):
        dist.destroy_process_group(group)
        self.kept.append(group)

class Patched(World):
    def make(self, ranks):
        plain = dist.barrier
        dist.barrier = lambda *args, **kwargs: plain(*args, **kwargs)
        return dist.new_group(list(ranks))
    def destroy(self, group):
        dist.destroy_process_group(group)

class Own:
    """Counts what it is asked for, and forgets the last group of all."""
    def __init__(self, ctx):
        self.made, self.left = 0, ctx.config.cycles * ctx.config.groups + ctx.config.groups
    def make(self, ranks):
        self.made += 1
        return dist.new_group(list(ranks), group_desc=f"own {self.made}")
    def destroy(self, group):
        self.left -= 1
        if self.left:
            dist.destroy_process_group(group)
'''


def outcome(run: kit.Run) -> dict[str, bool | None]:
    return {row.check: row.passed for row in run.verdict()}


def test_passes(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", ranks=3, groups=3)
    assert outcome(run) == dict.fromkeys(CHECKS, True)
    frame = run.frame()
    counted = frame[(frame["metric"] == "groups") & (frame["rank"] == 2)].set_index(["cycle", "phase"])["value"]
    assert [counted[2, phase] for phase in ("make", "talk", "destroy", "count")] == [4, 4, 1, 1]
    digests = frame[frame["metric"] == "digest"]
    assert {len(bytes.fromhex(text)) for text in digests["text"]} == {32}
    assert digests["text"].nunique() == 1  # the sums are the same in every cycle and on every rank
    assert failing_parts(run) == []


def test_a_leaked_group(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", fault="leaked-group")
    row = next(row for row in run.verdict() if row.check == "groups_return_to_baseline")
    assert (row.measured, row.passed) == (4.0, False)
    assert "groups: 1 after baseline, 5 after count (+4; rank " in row.why
    assert outcome(run)["every_group_communicates"] is True
    assert run.verdict(groups_return_to_baseline=4, fds_return=1000, threads_return=1000, nothing_piles_up=1000).passed


@pytest.mark.slow
def test_a_wrong_sum(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", fault="wrong-sum", cycles=2)
    assert outcome(run) == {**dict.fromkeys(CHECKS, True), **TOO_SHORT, "every_group_communicates": False}
    row = next(row for row in run.verdict() if row.check == "every_group_communicates")
    assert (row.measured, row.why) == (1.0, "wrong_values: 1 after talk (rank 0, cycle 2)")


@pytest.mark.slow
def test_ones_own_code_is_judged(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    (tmp_path / "own_groups.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    run = kit.run("smoke", implementation="own_groups:Own", cycles=2)
    row = next(row for row in run.verdict() if row.check == "groups_return_to_baseline")
    assert (row.measured, row.passed) == (1.0, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("World", {"groups_are_distinct"}),
        ("Kept", {"groups_return_to_baseline", "fds_return", "threads_return", "nothing_piles_up"}),
        ("Patched", {"names_restored"}),
    ],
)
@pytest.mark.usefixtures("runs", "nothing_left")
def test_what_no_table_of_torch_shows(
    name: str, fails: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_groups.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    run = kit.run("smoke", implementation=f"own_groups:{name}", cycles=3)
    assert {check for check, passed in outcome(run).items() if passed is False} == fails


@pytest.mark.slow
def test_one_rank_and_one_cycle(runs: Path, nothing_left: None) -> None:
    run = kit.run("smoke", ranks=1, cycles=1, groups=1, size=1)
    assert outcome(run) == {**dict.fromkeys(CHECKS, True), **TOO_SHORT, "memory_drift": None}


def rows(phase: str, metric: str, values: list[float], cycle: int = 1) -> list[Row]:
    return [
        Row(run="r", lab="smoke", cycle=cycle, phase=phase, rank=rank, metric=metric, value=value, unit="1", time=0)
        for rank, value in enumerate(values)
    ]


def test_what_is_missing_is_not_judged() -> None:
    config = {"ranks": 2, "cycles": 2, "groups": 2}
    checks = find("smoke").load_rules()
    nothing = judge(to_frame([]), config, checks)
    assert {row.passed for row in nothing} == {None}
    short = rows("talk", "wrong_values", [0, 0]) + rows("talk", "talked_groups", [2, 2])
    lonely = rows("baseline", "fds", [5], 0) + rows("count", "fds", [5, 5])
    verdict = {row.check: row for row in judge(to_frame(short + lonely), config, checks)}
    assert "wrong_values was recorded 2 times, not 4" in verdict["every_group_communicates"].why
    assert "were not recorded on every rank" in verdict["fds_return"].why
    silent = rows("talk", "wrong_values", [0, 0]) + rows("talk", "talked_groups", [2, 1])
    one = {row.check: row for row in judge(to_frame(silent), {**config, "cycles": 1}, checks)}
    assert one["every_group_communicates"].passed is False
    assert "could not be judged: a rank used fewer than 2 groups" in one["every_group_communicates"].why


@pytest.mark.slow
def test_a_bug_is_that_of_its_own_lab_even_after_one_that_broke_off(runs: Path, nothing_left: None) -> None:
    """The ranks of a given World live on with what an earlier lab left in them."""
    with kit.World(ranks=2) as world:
        for fault, returned in (("leaked-group", False), (None, True)):
            broken_off = kit.lab("smoke", fault="leaked-group", cycles=3, world=world)
            broken_off.step()
            broken_off.close()
            run = kit.run("smoke", fault=fault, cycles=3, world=world)
            assert outcome(run)["groups_return_to_baseline"] is returned


@pytest.mark.parametrize(
    ("kinds", "broken", "wrong"), [(("cpu", "cuda"), "cpu", 4), (("cuda",), "cpu", 0), (("cpu", "cuda"), "", 0)]
)
def test_both_backends_of_a_group_talk(
    kinds: tuple[str, ...], broken: str, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of `cpu:gloo,cuda:nccl` sums on the host too."""

    class OnDevice(torch.Tensor):
        """A tensor whose copy on the host is seen to be one."""

        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return self.as_subclass(torch.Tensor).clone()

    def add(message: torch.Tensor, group: object) -> None:
        side = "cuda" if isinstance(message, OnDevice) else "cpu"
        message.mul_(1 if side == broken else 3)

    lab = Smoke.__new__(Smoke)
    config = SimpleNamespace(size=4)
    lab.ctx = SimpleNamespace(rank=0, world_size=2, device=torch.device("cuda"), config=config)  # type: ignore[assignment]
    monkeypatch.setattr(Smoke, "places", lambda *_: torch.arange(1, 5).as_subclass(OnDevice))
    monkeypatch.setattr(dist, "all_reduce", add)
    group = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
    assert lab.wrong_values(0, group, lab.message(0)) == wrong
