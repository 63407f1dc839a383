"""The ranks of a pipeline have an actor and a lease; every call that the ports make is one of their methods."""

from __future__ import annotations

import ast
import inspect

from kit.labs.share import ports
from kit.labs.share.ranks.roles import LeasedReplica, LeasedTrainer
from kit.stream import live
from kit.stream.judge.backed import TO

BOTH = {"prepare", "reset", "vacate", "sync", "end"}


def calls_of(module: object) -> set[str]:
    """The texts that a module gives to `_call` as the name of a method."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]  # type: ignore[arg-type]
    to_ranks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "_call"]
    return {call.args[1].value for call in to_ranks if isinstance(call.args[1], ast.Constant)}


def test_every_command_to_the_trainer_is_a_call_of_its_ranks() -> None:
    commands = {name for name, port in TO.items() if port == "trainer"}
    assert commands
    assert [name for name in sorted(commands | BOTH) if not callable(getattr(LeasedTrainer, name, None))] == []


def test_every_call_of_the_ports_is_one_of_a_replica() -> None:
    calls = calls_of(live) | calls_of(ports) | {"shrink", "expand"}
    assert calls == {"decode", "sync", "vacate", "shrink", "expand"}
    assert [name for name in sorted(calls | BOTH) if not callable(getattr(LeasedReplica, name, None))] == []
