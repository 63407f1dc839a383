"""Which rank is blamed for silence, based on the reports of the ranks' side threads."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import pytest

from kit.world.calls import RankLook, blame
from kit.world.channel import Exit
from kit.world.leftovers import users_part
from kit.world.rankside import in_collective


def look(*, waiting: bool = False, **progress: int) -> RankLook:
    return RankLook(phase="run", stack="", waiting=waiting, progress=progress)


@pytest.mark.parametrize(
    ("silent", "found", "culprits"),
    [
        pytest.param([0, 1], {0: look(waiting=True), 1: look()}, (1,), id="one waits, the other is busy"),
        pytest.param([0, 1], {0: look(waiting=True)}, (1,), id="one waits, the other does not even look"),
        pytest.param([0, 1], {0: look(w=5), 1: look(w=4)}, (1,), id="the wait hides in C; the counts tell"),
        pytest.param([0, 1, 2], {0: look(a=2), 1: look(a=1, b=2), 2: look(b=1)}, (2,), id="a chain"),
        pytest.param([0, 1], {0: look(w=4), 1: look(w=4)}, (0, 1), id="both busy, nobody waits"),
        pytest.param([0], {0: look(waiting=True, w=2), 1: look(w=1)}, (), id="the missing one has answered"),
        pytest.param([0, 1], {0: look(waiting=True), 1: look(waiting=True)}, (), id="different collectives"),
    ],
)
def test_blame(silent: list[int], found: dict[int, RankLook], culprits: tuple[int, ...]) -> None:
    assert blame(silent, found, sorted({*silent, *found}))[0] == culprits


def test_the_first_end_is_not_that_of_a_rank_which_torchrun_ended() -> None:
    ends = [Exit(0, -signal.SIGTERM, 1.0), Exit(1, None, 1.1), Exit(2, -signal.SIGKILL, 1.2)]
    assert min(ends, key=lambda one: (one.victim, one.at)).rank == 1


class Handle:
    """An object with a work handle's methods; each returns its caller's frame."""

    def wait(self) -> FrameType:
        return sys._getframe(1)

    def compute(self) -> FrameType:
        return sys._getframe(1)


def test_a_call_of_wait_is_seen_in_the_callers_line() -> None:
    work, rows = Handle(), [Handle()]
    assert seen_from(lambda: work.wait())  # noqa: PLW0108 - this source line is what is read
    assert seen_from(lambda: rows[0].wait())  # noqa: PLW0108
    assert not seen_from(lambda: work.compute())  # noqa: PLW0108


def seen_from(call: object) -> bool:
    """Whether `in_collective` recognises the caller's frame as waiting *during* the call."""
    answers: list[bool] = []

    def look_on(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in {"wait", "compute"}:
            answers.append(in_collective(frame.f_back))

    sys.setprofile(look_on)
    try:
        call()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    return answers[0]


def test_the_users_part_of_a_dump() -> None:
    dump = (
        'Thread 0x1 (most recent call first):\n  File "/x/kit/world/channel.py", line 1 in recv\n\n'
        'Thread 0x3 (most recent call first):\n  File "/x/kit/world/rankside.py", line 155 in current_call\n\n'
        'Current thread 0x2 (most recent call first):\n  File "<ranks 1>", line 2 in <module>\n'
        '  File "/x/kit/world/rankside.py", line 45 in run_cell\n  File "/x/kit/world/rankside.py", line 100 in serve\n'
    )
    assert users_part(dump) == 'Current thread 0x2 (most recent call first):\n  File "<ranks 1>", line 2 in <module>'
