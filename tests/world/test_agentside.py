"""The agent learns how a rank ended even if torchrun collects the process's status first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kit.world.agentside import Node
from kit.world.crew import Crew


class Sent:
    """Stand-in for the agent's link to the notebook."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)


def test_a_status_that_torchrun_took_first_is_reported(monkeypatch: Any) -> None:
    """The other thread always wins: the agent's call finds that the child no longer exists."""
    node = Node.__new__(Node)
    node.link = Sent()  # type: ignore[assignment]
    node.order = {"ray": None}
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    joined = threading.Thread(target=child.join)

    def nothing(*_: object) -> None:
        joined.start()
        os.kill(child.pid or 0, signal.SIGKILL)
        raise ChildProcessError

    monkeypatch.setattr(os, "waitid", nothing)
    node.watch(3, child.pid or 0)
    joined.join(10)
    (message,) = node.link.messages  # type: ignore[attr-defined]
    assert (message["exit"], message["status"]) == (3, -signal.SIGKILL)


@pytest.mark.parametrize("account_first", [True, False])
def test_a_status_that_only_torchrun_knows_is_taken_whenever_it_comes(account_first: bool) -> None:
    crew = Crew.__new__(Crew)
    crew.generation, crew.exits, crew.silent = 2, [], set()
    crew.members = [SimpleNamespace(rank=3, pid=17)]  # type: ignore[list-item]
    agent: Any = SimpleNamespace(
        node=0, ended=1, error="", statuses={3: 9}, answers={}
    )  # statuses of the previous ranks
    messages = [{"exit": 3, "pid": 17, "status": None, "at": 0.0}, {"ended": 2, "error": "", "statuses": {"3": -9}}]
    for message in messages[:: -1 if account_first else 1]:
        crew._note(agent, message)
    assert [(one.rank, one.status) for one in crew.exits] == [(3, -signal.SIGKILL)]


SKIPPED = """
import subprocess
from kit import machine
from kit.machine import alive, start_time
from kit.world import leftovers

child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
gone = subprocess.Popen(["true"])
gone.wait()
started, listed = start_time(child.pid), machine.children
machine.children = lambda: next(looks, None) or listed()
looks = iter([listed(), [gone.pid]])
assert leftovers.end_children()
assert not alive(child.pid, started)
"""


def test_a_child_that_the_kernels_list_skips_is_ended_too() -> None:
    """A child that is reaped while the kernel builds its list can make it skip the next one: a list with a vanished child proves
    nothing."""
    done = subprocess.run([sys.executable, "-c", SKIPPED], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
