"""One call to the ranks, as far as it can be seen without any: who looks on is asked often, and may end the call."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from kit.errors import RankDied
from kit.world.calls import Call
from kit.world.channel import ChannelClosed
from kit.world.crew import Exit


class Onlooker:
    """A fake observer that ends the call when it is asked."""

    def tick(self, answered: object) -> None:
        raise KeyboardInterrupt


def test_who_looks_on_is_asked_though_there_is_always_something_to_hear() -> None:
    link, other = socket.socketpair()
    with link, other:
        other.send(b"never read")
        # A fake of a crew whose agent is heard from at any time.
        crew: Any = SimpleNamespace(
            agents={0: SimpleNamespace(link=link)}, hear_agents=lambda: None, exits=[], torchrun_pid=None
        )
        call = Call(crew, [], {"id": 1, "phase": "train"}, Onlooker(), 60.0)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            call._take(60.0)


class Said:
    """A fake of the channel of a rank that called sys.exit and has ended: its answer, and then nothing."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def fileno(self) -> int:
        return self.link.fileno()

    def arrived(self) -> list[dict[str, Any]]:
        if not self.link.recv(1):
            raise ChannelClosed("the other end closed the channel")
        return [{"id": 1, "error": "SystemExit: 5", "exiting": True, "exitcode": 5, "traceback": "its lines"}]


def test_of_ranks_that_exit_at_once_the_first_is_heard_before_it_is_judged() -> None:
    """A rank that says sys.exit ends itself by a signal. Rank 1 did so first, and rank 0's word came in before its."""
    mine, its = socket.socketpair()
    with mine, its:
        its.send(b"x")
        its.shutdown(socket.SHUT_WR)
        members: Any = [SimpleNamespace(rank=rank, pid=rank, host="vm", work=Said(mine)) for rank in range(2)]
        crew: Any = SimpleNamespace(
            members=members, first_exit=lambda: Exit(1, -9, 0.0), torchrun_gone=lambda: None, torchrun_pid=None
        )
        call = Call(crew, members, {"id": 1, "phase": "release"}, Onlooker(), 60.0)  # type: ignore[arg-type]
        call.answers[0], call.gone = {"exiting": True, "exitcode": 5}, {0}
        with pytest.raises(RankDied, match=r"rank 1 .* called sys\.exit\(5\) in phase 'release'"):
            call._died()
