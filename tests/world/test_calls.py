"""One call to the ranks, as far as it can be seen without any: who looks on is asked often, and may end the call."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from kit.world.calls import Call


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
