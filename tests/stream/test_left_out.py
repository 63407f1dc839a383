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


# -- syncs --------------------------------------------------------------------------------------------------------------------

CORE = {"core": "a"}  # only the kit's cores have this id


def served(group: int, version: int, replica: int = 0) -> Rows:
    return [sent(group, replica=replica), tokens(group=group, version=version, replica=replica)]


def published(version: int, replica: int = 0) -> dict[str, Any]:
    return row("published", version=version, replica=replica)


def step_to(version: int, *rows: dict[str, Any]) -> Rows:
    return [row("bumped", version=version), row("hold", version=version), row("sync_begin", version=version), *rows]


def test_a_sync_needs_no_end_unless_the_ledger_has_ends() -> None:
    rows = [published(0), *served(0, 0), *step_to(1, row("resume", version=1), published(1)), *served(1, 1)]
    assert violations(*rows) == {}
    late = violations(*rows, row("synced", version=1))
    assert "dispatch continues before the end of the sync that began" in late["publish_before_use"]


@pytest.mark.parametrize(("why", "more", "passes"), [
    ("done", {}, True), ("exhausted", {}, True), ("error", {}, False), ("done", CORE, False),
])  # fmt: skip
def test_the_last_hold_needs_no_resume_if_nothing_is_left(why: str, more: dict[str, Any], passes: bool) -> None:
    start = [row("hold", version=0), published(0), row("resume", version=0)]
    rows = [*start, *served(0, 0), *step_to(1, {**published(1), **more}, row("synced", version=1))]
    found = violations(*rows, row("ended", why=why)).get("publish_before_use", "")
    assert (not found) == passes
    assert passes or "never continued" in found or "dispatch has been held" in found


def test_a_sample_that_moved_has_tokens_of_a_version_that_its_replica_never_had() -> None:
    start = [published(0), *served(0, 0), row("bumped", version=1), row("joined", replica=1), published(1), published(1, 1)]
    moved = [*start, sent(replica=1), tokens(first=4, version=1, replica=1)]
    assert violations(*moved, completed(replica=1, length=8)) == {}
    assert "publish_before_use" in violations(*moved, completed(replica=1, length=8, newest=0))
    stayed = [*start, sent(1, replica=1), completed(1, replica=1)]
    assert "version 0 is used before it was published on replica 1" in violations(*stayed)["publish_before_use"]
