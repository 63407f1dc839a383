"""What another system may leave out of its ledger, or do in its own way: such ledgers pass, and a wrong neighbour of each still fails."""

from __future__ import annotations

from typing import Any

import pytest

from kit.results.rules import Measured, Missing, NotMeasured
from kit.stream.history import LoopLedger
from tests.stream.ledgers import RULES_BY_NAME, finding

Rows = list[dict[str, Any]]


def row(event: str, **ids: Any) -> dict[str, Any]:
    return {"event": event, **ids}


def ledger(*rows: dict[str, Any]) -> LoopLedger:
    return LoopLedger([{"time": 10.0 + number, **one} for number, one in enumerate(rows)])


def violations(*rows: dict[str, Any]) -> dict[str, str]:
    """The checks that fail, each with its first violation."""
    found: dict[str, str] = {}
    for name in RULES_BY_NAME:
        try:
            one = finding(name, ledger(*rows))
        except NotMeasured:
            continue
        if one.value:
            found[name] = one.why
    return found


def tokens(count: int = 4, *, first: int = 0, group: int = 0, version: int = 0, replica: int = 0) -> dict[str, Any]:
    return row("tokens", group=group, sample=0, replica=replica, version=version, first=first, count=count)


def completed(group: int = 0, *, version: int = 0, replica: int = 0, length: int = 4, **more: Any) -> dict[str, Any]:
    return row("completed", group=group, sample=0, replica=replica, version=version, length=length, **more)


def sent(group: int = 0, *, replica: int = 0, **more: Any) -> dict[str, Any]:
    return row("sent", group=group, sample=0, replica=replica, **more)


def sample(group: int, *, version: int = 0, replica: int = 0, count: int = 4) -> Rows:
    about: dict[str, Any] = {"group": group, "version": version, "replica": replica}
    return [sent(group, replica=replica), tokens(count, **about), completed(**about, length=count)]


# -- requests that begin again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [["cancelled"], ["failed"], ["started"], ["cancelled", "started"], []])
def test_a_sample_may_begin_again_without_sent(shown: list[str]) -> None:
    between = [row(event, group=0, sample=0) for event in shown]

    def rows(*, length: int) -> Rows:
        again = [tokens(version=1), completed(version=1, length=length), row("trained", group=0, version=1)]
        end = [row("cleared", group=0, step=0), row("ended", why="done")]
        start = [row("capacity", window=0, group=1), tokens(), row("bumped", version=1)]
        return [*start, *between, *again, *end]

    assert violations(*rows(length=4)) == {}
    assert {"stamps_per_token", "tokens_conserved"} <= violations(*rows(length=8)).keys()


def test_late_tokens_of_an_earlier_request_belong_to_it() -> None:
    late = [sent(attempt=0), tokens(), row("failed", group=0, sample=0), sent(attempt=1), tokens(first=4)]
    assert violations(*late, tokens(), completed()) == {}
    twice = violations(*late, tokens(), tokens(), completed(length=4))
    assert twice["stamps_per_token"].startswith("group 0 sample 0: token 0 is stamped twice")
