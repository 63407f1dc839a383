"""Calls in flight, tested without ranks: the observer is called often, and the first exit is read first."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import RankDied
from kit.world.calls import Pending, WorldCall
from kit.world.channel import AgentEnd, ChannelClosed
from kit.world.crew import Crew, Exit


class Onlooker:
    """A fake observer that ends the call at its first tick."""

    def started(self, phase: str, ranks: object) -> None: ...

    def output(self, rank: int, text: str) -> None: ...

    def tick(self, answered: object) -> None:
        raise KeyboardInterrupt

    def ended(self) -> None: ...


def test_who_looks_on_is_asked_though_there_is_always_something_to_hear() -> None:
    link, other = socket.socketpair()
    with link, other:
        other.send(b"never read")
        # A fake crew whose agent always has something to read.
        member: Any = SimpleNamespace(
            rank=0, call=None, work=SimpleNamespace(send_encoded=lambda _: None), asked=False, news=[]
        )
        member.watch = SimpleNamespace(send=lambda _: None)
        crew: Any = SimpleNamespace(members=[member], filenos=lambda: [link.fileno()], take=lambda *_: None)
        crew.is_lost = crew.has_no_agent = lambda _: False
        crew.read_log = lambda *_: b""
        member.log, member.since, member.phase = 0, 0.0, "idle"
        call = WorldCall(crew, [member], {"id": 1, "phase": "train"}, die=lambda *_: None)
        pending = Pending([call], threading.RLock(), Onlooker(), 60.0)
        with pytest.raises(KeyboardInterrupt):
            pending.result()


def test_a_rank_whose_machine_was_lost_before_the_call_is_gone_at_once() -> None:
    """Its own link may not know yet: what is sent into it waits for the kernel, for minutes."""
    crew = Crew.__new__(Crew)
    crew.agents = {0: SimpleNamespace()}  # type: ignore[dict-item]
    members: Any = [
        SimpleNamespace(rank=rank, node=rank, work=SimpleNamespace(send_encoded=lambda _: None)) for rank in range(2)
    ]
    call = WorldCall(crew, members, {"id": 1, "phase": "run"}, die=lambda *_: None)
    call.send()
    assert call.gone == {1}


class Said:
    """A fake channel of a rank that called sys.exit and ended: its answer, then end of file."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def fileno(self) -> int:
        return self.link.fileno()

    def arrived(self) -> list[dict[str, Any]]:
        if not self.link.recv(1):
            raise ChannelClosed("the other end closed the channel")
        return [{"id": 1, "error": "SystemExit: 5", "exiting": True, "exitcode": 5, "traceback": "its lines"}]


def test_of_ranks_that_exit_at_once_the_first_is_heard_before_it_is_judged() -> None:
    """A rank that calls sys.exit is ended by a signal. Rank 1 exited first, but rank 0's answer was read before rank 1's."""
    mine, its = socket.socketpair()
    with mine, its:
        its.send(b"x")
        its.shutdown(socket.SHUT_WR)
        members: Any = [
            SimpleNamespace(rank=rank, pid=rank, host="vm", work=Said(mine), asked=False, news=[], phase="release")
            for rank in range(2)
        ]
        crew: Any = SimpleNamespace(
            members=members,
            first_exit=lambda: Exit(1, -9, 0.0),
            torchrun_gone=lambda: None,
            torchrun_pid=None,
            why_lost=lambda _: "",
        )
        crew.hear = lambda member: Crew.hear(crew, member)
        ended: list[str] = []
        call = WorldCall(crew, members, {"id": 1, "phase": "release"}, die=lambda why, _: ended.append(why))
        for member in members:
            member.call = call
        call.answers[0], call.gone = {"exiting": True, "exitcode": 5}, {0}
        call.advance()
        assert isinstance(call.error, RankDied)
        assert "called sys.exit(5) in phase 'release'" in str(call.error)
        assert call.error.rank == 1
        assert len(ended) == 1


SIGTERM_OF_0 = {"exit": 0, "pid": 10, "status": -15, "at": 1.0}
EXIT_OF_1 = {"exit": 1, "pid": 11, "status": 1, "at": 0.9}
ACCOUNT = {"ended": 0, "error": "ChildFailedError", "statuses": {"1": 1}}


@pytest.mark.parametrize(
    ("reports", "heard", "end"),
    [
        pytest.param([SIGTERM_OF_0, EXIT_OF_1, ACCOUNT], 2, (1, 1), id="the cause is reported late"),
        pytest.param(
            [SIGTERM_OF_0, ACCOUNT, EXIT_OF_1], 3, (1, 1), id="the cause is reported after torchrun's account"
        ),
        pytest.param([EXIT_OF_1, SIGTERM_OF_0, ACCOUNT], 1, (1, 1), id="nothing is waited for once the cause is known"),
        pytest.param(
            [SIGTERM_OF_0, {**ACCOUNT, "statuses": {"0": -15}}], 2, (0, -15), id="somebody sent SIGTERM to a rank"
        ),
    ],
)
def test_a_rank_that_torchrun_ended_is_not_the_first_while_others_may_be_reported(
    monkeypatch: pytest.MonkeyPatch, reports: list[dict[str, Any]], heard: int, end: tuple[int, int]
) -> None:
    agent = AgentEnd(0, None)  # type: ignore[arg-type]
    crew = Crew.__new__(Crew)
    crew.agents, crew.silent, crew.exits, crew.generation = {0: agent}, set(), [], 0
    crew.plan = SimpleNamespace(machines=[0])  # type: ignore[assignment]
    crew.members = [SimpleNamespace(rank=rank, pid=10 + rank) for rank in range(2)]  # type: ignore[misc]
    left = list(reports)

    def hear(done: Any, _seconds: float) -> bool:
        while left and not done():
            crew._note(agent, left.pop(0))
        return done()

    monkeypatch.setattr(crew, "_hear_until", hear)
    first = crew.first_exit()
    assert first is not None
    assert (first.rank, first.status) == end
    assert len(reports) - len(left) == heard


class LostMachine:
    """A link to an agent that never answers."""

    def __init__(self, sent: list[Any]) -> None:
        self.sent = sent

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message["with"]["rank"])


def test_lost_machines_are_asked_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    crew = Crew.__new__(Crew)
    crew.agents = {node: AgentEnd(node, LostMachine(sent)) for node in range(1, 6)}  # type: ignore[arg-type]
    crew.silent = set()
    waits: list[list[int]] = []
    monkeypatch.setattr(crew, "_hear_until", lambda done, seconds: waits.append(sorted(sent)) or done())
    ranks = [SimpleNamespace(rank=rank, node=1 + rank // 2) for rank in range(10)]
    texts = crew.describe(ranks)  # type: ignore[arg-type]
    assert texts == dict.fromkeys(range(10), "no stack: its machine's agent does not answer")
    assert waits == [list(range(10))]  # one wait, after every rank was asked for
    crew.describe(ranks)  # type: ignore[arg-type]
    assert len(waits) == 1  # a silent agent is not asked again


def test_an_agent_that_answers_slowly_is_heard_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its ranks may take a moment to describe."""
    sent: list[Any] = []
    crew = Crew.__new__(Crew)
    agent = AgentEnd(1, LostMachine(sent))  # type: ignore[arg-type]
    monkeypatch.setattr(agent.link, "send", sent.append)
    crew.agents, crew.silent = {1: agent}, set()

    def hear_one(done: Any, seconds: float) -> bool:
        message = sent.pop(0)
        agent.answers[message["id"]] = f"stack {message['with']['rank']}"
        return bool(done())

    monkeypatch.setattr(crew, "_hear_until", hear_one)
    texts = crew.describe([SimpleNamespace(rank=rank, node=1) for rank in range(3)])  # type: ignore[list-item]
    assert texts == {0: "stack 0", 1: "stack 1", 2: "stack 2"}
    assert crew.silent == set()
