"""Worlds of 1 and 2 ranks driven as one: continuous rank numbers, and what happens to the other Worlds when one fails."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import machine
from kit.errors import BadInput, KitError, RankDied, RankError, RankTimeout
from kit.world.asked import CREWS
from kit.world.world import Worlds
from tests.holdings import wait_for

pytestmark = pytest.mark.timeout(180)

ACROSS = "tests.world.ranks.across"


class Seen:
    """An observer that records its calls and their threads, and may react to what ranks print."""

    def __init__(self, act: Callable[[int, str], None] = lambda *_: None) -> None:
        self.lines: list[tuple[int, str]] = []
        self.reported: list[Any] = []
        self.threads: set[str] = set()
        self._act = act

    def started(self, phase: str, ranks: object) -> None:
        self.reported.append((phase, ranks))

    def output(self, rank: int, text: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.lines += [(rank, line) for line in text.split("\n")]
        self._act(rank, text)

    def tick(self, answered: object) -> None:
        self.threads.add(threading.current_thread().name)

    def ended(self) -> None:
        self.reported.append("ended")


class KillsTheFirst(Seen):
    """Kills the rank of the first World, or its torchrun, as soon as that World has started and the second has not."""

    def __init__(self, logs: Path, *, agent: bool) -> None:
        super().__init__()
        self.logs, self.agent = logs, agent

    def tick(self, answered: object) -> None:
        crews = [crew for crew in CREWS if crew.plan.logs == self.logs]
        first = next(crew for crew in crews if crew.plan.part.first == 0)
        if not first.members or len(crews) < 2:
            return
        os.kill(first.torchrun_pid if self.agent else first.members[0].pid, signal.SIGKILL)
        wait_for(lambda: first.hear_agents() or first.exits or not first.agents)


@pytest.mark.parametrize("agent", [False, True])
def test_a_death_while_another_world_starts_ends_the_start(tmp_path: Path, nothing_left: None, agent: bool) -> None:
    sentence = (
        "^torchrun was killed by SIGKILL while other Worlds" if agent else "^rank 0 was killed by SIGKILL while other"
    )
    with pytest.raises(KitError, match=sentence) as info:
        Worlds((1, 1), device="cpu", logs=tmp_path, observer=KillsTheFirst(tmp_path, agent=agent))
    assert isinstance(info.value, RankDied) != agent


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """For tests that leave the Worlds usable."""
    with Worlds((1, 2), device="cpu", logs=tmp_path_factory.mktemp("logs")) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path, nothing_left: None) -> Iterator[Worlds]:
    """For tests that break the Worlds; they are restarted afterwards."""
    with Worlds((1, 2), device="cpu", logs=tmp_path) as made:
        yield made
        made.restart()
        assert made.call(f"{ACROSS}:meet", name=fresh()) == [0, 1, 2]


class Interrupts(Seen):
    """Interrupt this process once the given number of ranks have printed that they are asleep."""

    def __init__(self, ranks: int) -> None:
        super().__init__(lambda *_: os.kill(os.getpid(), signal.SIGINT) if len(self.lines) == ranks else None)


def fresh() -> str:
    return f"kit-test-{secrets.token_hex(4)}"


def test_answers_come_in_order_from_worlds_that_run_at_the_same_time(worlds: Worlds) -> None:
    assert worlds.call(f"{ACROSS}:meet", name=fresh()) == [0, 1, 2]
    assert worlds.call(f"{ACROSS}:numbers") == [[0, 0, 1], [1, 0, 2], [2, 1, 2]]
    assert worlds.call(f"{ACROSS}:numbers", ranks=[2, 0]) == [[0, 0, 1], [2, 1, 2]]
    assert worlds.call("os:getpid") == worlds.pids
    assert [row["rank"] for row in worlds.status()] == [0, 1, 2]
    assert sorted(worlds.stacks()) == [0, 1, 2]
    assert (worlds.ranks, worlds.sizes, worlds.device, worlds.state) == (3, (1, 2), "cpu", "idle")
    assert "Worlds of 1 and 2 ranks, idle" in repr(worlds)


def test_what_ranks_print_is_shown_and_logged_under_their_numbers(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    monkeypatch.setattr(worlds, "observer", seen)
    worlds.call(f"{ACROSS}:say", phase="greet")
    assert sorted(seen.lines) == [(n, f"here is {n}") for n in range(3)]
    assert seen.reported == [("greet", [0, 1, 2]), "ended"]
    assert seen.threads == {threading.current_thread().name}
    for n in range(3):
        assert (worlds.worlds[0].logs / f"rank{n}.log").read_text().splitlines()[-1] == f"here is {n}"


@pytest.mark.parametrize("ranks", [[3], [], ["0"], 1])
def test_ranks_that_do_not_exist_are_refused(worlds: Worlds, ranks: Any) -> None:
    with pytest.raises(BadInput, match="some of 0 to 2"):
        worlds.call(f"{ACROSS}:say", ranks=ranks)


def test_what_cannot_be_called_is_refused(worlds: Worlds) -> None:
    with pytest.raises(BadInput, match="package"):
        worlds.call("say")
    with pytest.raises(BadInput, match="JSON"):
        worlds.call(f"{ACROSS}:say", a=object())
    with pytest.raises(BadInput, match="timeout_s"):
        worlds.call(f"{ACROSS}:say", timeout_s=0)


@pytest.mark.parametrize("numbers", [[0], [1], [2], [1, 2]])
def test_an_error_names_the_rank_counted_through(worlds: Worlds, numbers: list[int]) -> None:
    with pytest.raises(RankError, match="is told to raise") as info:
        worlds.call(f"{ACROSS}:fail", phase="act", numbers=numbers)
    word = "ranks" if len(numbers) > 1 else "rank"
    assert str(info.value).startswith(f"{word} {', '.join(map(str, numbers))} failed in phase 'act': ValueError: ")
    assert info.value.rank in numbers
    assert worlds.state == "idle"


def test_what_else_went_wrong_is_a_note(worlds: Worlds) -> None:
    with pytest.raises(RankError) as info:
        worlds.call(f"{ACROSS}:fail", numbers=[0, 2])
    (note,) = info.value.__notes__
    assert (
        note
        == f"after it: rank {2 - info.value.rank} failed in phase 'fail': ValueError: {2 - info.value.rank} is told to raise"
    )


def test_who_raised_is_blamed_before_who_noticed_it_first(own: Worlds, tmp_path: Path) -> None:
    """Rank 0 loses its peer, which raises only after that was seen, while rank 1 waits for the peer in a collective."""
    gate = tmp_path / "gate"
    own.observer = Seen(lambda _, text: gate.touch() if "gone" in text else None)
    with pytest.raises(RankError, match="ValueError: the cause") as info:
        own.call(f"{ACROSS}:wait_for_rank_2", name=fresh(), does="raise", gate=str(gate))
    assert (info.value.rank, info.value.victim) == (2, False)
    assert "PeerGone" in info.value.__notes__[0]


@pytest.mark.slow
def test_the_others_get_a_short_time_after_a_failure(own: Worlds) -> None:
    with pytest.raises(RankError) as info:
        own.call(f"{ACROSS}:fail_while_others_sleep", timeout_s=500)
    assert info.value.rank == 0
    assert info.value.__notes__ == ["ranks 1, 2 did not answer within 3 s of it and keep running"]
    assert [row["state"] for row in own.status()] == ["idle", "busy", "busy"]
    assert own.state == "busy"
    assert own.call(f"{ACROSS}:numbers", ranks=[0]) == [[0, 0, 1]]
    with pytest.raises(KitError, match="ranks 1, 2 still in phase 'fail_while_others_sleep'"):
        own.call(f"{ACROSS}:numbers")
    assert own.status()[0]["state"] == "idle"  # this rank was not called either


def test_a_rank_that_is_killed_ends_all_worlds(own: Worlds) -> None:
    members = [(m.pid, m.started) for world in own.worlds for m in world._crew.members]
    with pytest.raises(RankDied) as info:
        own.call(f"{ACROSS}:wait_for_rank_2", name=fresh(), does="kill", timeout_s=500)
    assert (info.value.rank, info.value.signal, info.value.phase) == (2, "SIGKILL", "wait_for_rank_2")
    assert f"rank 2 (pid {members[2][0]}" in str(info.value)
    assert own.state == "dead"
    assert wait_for(lambda: not any(machine.alive(*one) for one in members))
    with pytest.raises(KitError, match=r"dead: rank 2 .* SIGKILL"):
        own.call(f"{ACROSS}:numbers", ranks=[0])


@pytest.mark.slow
def test_a_rank_that_hangs_is_the_culprit_of_those_in_the_other_world(own: Worlds) -> None:
    with pytest.raises(RankTimeout) as info:
        own.call(f"{ACROSS}:wait_for_rank_2", name=fresh(), does="hang", timeout_s=3)
    error = info.value
    assert (error.ranks, error.culprits, sorted(error.stacks)) == ((0, 1, 2), (2,), [0, 1, 2])
    assert str(error).startswith("no answer from ranks 0, 1, 2 within 3 s; ranks 0, 1 waiting for rank 2\n")
    assert "time.sleep(FOR_EVER)" in error.stacks[2]
    assert own.state == "busy"


def test_an_interrupt_reaches_the_ranks_of_all_worlds(own: Worlds) -> None:
    pids = own.pids
    own.observer = Interrupts(3)
    with pytest.raises(KeyboardInterrupt):
        own.call(f"{ACROSS}:sleep", timeout_s=500)
    own.observer = Seen()
    assert own.call(f"{ACROSS}:meet", name=fresh()) == [0, 1, 2]
    assert own.pids == pids


@pytest.mark.slow
def test_an_interrupt_that_a_rank_does_not_take_ends_all_worlds(
    own: Worlds, capsys: pytest.CaptureFixture[str]
) -> None:
    own.observer = Interrupts(3)
    with pytest.raises(KeyboardInterrupt):
        own.call(f"{ACROSS}:stuck", timeout_s=500)
    own.observer = Seen()
    assert "rank 1 did not stop" in capsys.readouterr().out
    assert own.state == "dead"
    with pytest.raises(KitError, match="dead: it was interrupted"):
        own.call(f"{ACROSS}:numbers")


def test_an_onlooker_that_fails_leaves_no_thread_behind(own: Worlds) -> None:
    def fails(rank: int, text: str) -> None:
        raise RuntimeError(f"cannot show {text} of {rank}")

    own.observer = Seen(fails)
    with pytest.raises(RuntimeError, match="cannot show asleep"):
        own.call(f"{ACROSS}:sleep", timeout_s=500)
    own.observer = Seen()
    assert not [thread for thread in threading.enumerate() if thread.name == "kit-world-call"]


def test_a_rank_of_the_second_world_that_cannot_start(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_RANK", "0")  # as in a rank that starts its own World; must not reach that World's ranks
    text = "import os\nif os.environ.get('KIT_RANK') not in {'0', '1'}: raise ValueError('not here')\n"
    (tmp_path / "refuses.py").write_text(text)
    with pytest.raises(RankError, match="rank 2 could not start: ValueError: not here") as info:
        Worlds((1, 2), device="cpu", logs=tmp_path, env={"PYTHONPATH": str(tmp_path)}, preload=["refuses"])
    assert (info.value.rank, info.value.phase) == (2, "start")


def test_close_leaves_nothing_and_may_come_twice(nothing_left: None) -> None:
    made = Worlds((1, 1), device="cpu")
    logs = [world.logs for world in made.worlds]
    made.close()
    made.close()
    assert made.state == "closed"
    assert not any(folder.exists() for folder in logs)
    with pytest.raises(KitError, match="closed"):
        made.call(f"{ACROSS}:numbers")


@pytest.mark.parametrize("sizes", [[], [0, 1], [1, 2.5], [1, 100_000]])
def test_sizes_that_cannot_be(sizes: Any, nothing_left: None) -> None:
    with pytest.raises(BadInput):
        Worlds(sizes)
