"""Which rank is blamed for silence, based on the reports of the ranks' side threads."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any

import pytest

from kit.world.calls import RankLook, blame
from kit.world.leftovers import users_part
from kit.world.rankside import awaited


def look(
    awaits: str = "", *, sent: dict[str, int] | None = None, received: dict[str, int] | None = None, **progress: int
) -> RankLook:
    return RankLook(phase="run", stack="", awaits=awaits, progress=progress, sent=sent or {}, received=received or {})


def stage(
    awaits: str, *, before: int | None = None, after: int | None = None, forward: int = 3, backward: int = 2
) -> RankLook:
    """A stage of a pipeline between two others: it has posted as many transfers of activations and gradients."""
    sent = {f"pp/{peer}": count for peer, count in ((after, forward), (before, backward)) if peer is not None}
    received = {f"pp/{peer}": count for peer, count in ((before, forward), (after, backward)) if peer is not None}
    return look(awaits, sent=sent, received=received)


@pytest.mark.parametrize(
    ("silent", "found", "culprits"),
    [
        pytest.param([0, 1], {0: look("ranks"), 1: look()}, (1,), id="one waits, the other is busy"),
        pytest.param([0, 1], {0: look("ranks")}, (1,), id="one waits, the other does not even look"),
        pytest.param([0, 1], {0: look(w=5), 1: look(w=4)}, (1,), id="the wait hides in C; the counts tell"),
        pytest.param([0, 1, 2], {0: look(a=2), 1: look(a=1, b=2), 2: look(b=1)}, (2,), id="a chain"),
        pytest.param([0, 1], {0: look(w=4), 1: look(w=4)}, (0, 1), id="both busy, nobody waits"),
        pytest.param([0], {0: look("ranks", w=2), 1: look(w=1)}, (), id="the missing one has answered"),
        pytest.param([0, 1], {0: look("ranks"), 1: look("ranks")}, (), id="different collectives"),
        pytest.param([0, 1], {0: look("device"), 1: look()}, (1,), id="a synchronisation waits for a busy rank"),
        pytest.param([0, 1], {0: look("ranks"), 1: look("device")}, (1,), id="it waits for its own device"),
        pytest.param([0, 1], {0: look("device", w=5), 1: look("device", w=4)}, (1,), id="the counts tell which device"),
        pytest.param([0, 1], {0: look("device", w=4), 1: look("device", w=4)}, (), id="either device may be stuck"),
        pytest.param([0], {0: look("device", w=4), 1: look(w=4)}, (0,), id="the other has answered"),
        pytest.param([0], {0: look("device", received={"w/1": 1}), 1: look()}, (), id="the other never sent"),
        pytest.param([0], {0: look("device")}, (0,), id="it is alone"),
        pytest.param(
            [0, 1, 2],
            {
                0: stage("device", after=1, backward=3),
                1: stage("device", before=0, after=2, forward=4, backward=2),
                2: stage("device", before=1, forward=4, backward=1),
            },
            (2,),
            id="a pipeline whose last stage has a stuck device",
        ),
        pytest.param(
            [0, 1],
            {0: stage("device", after=1, forward=3, backward=3), 1: stage("", before=0, forward=4, backward=2)},
            (1,),
            id="a receive posted early does not absolve a busy rank",
        ),
    ],
)
def test_blame(silent: list[int], found: dict[int, RankLook], culprits: tuple[int, ...]) -> None:
    assert blame(silent, found, sorted({*silent, *found}))[0] == culprits


MEMBERS, OTHERS = look(w=3, pair=0), look(w=3)


@pytest.mark.parametrize(
    ("found", "absent"),
    [
        pytest.param({0: look("ranks", w=3, pair=1), 1: OTHERS, 2: OTHERS, 3: MEMBERS}, "rank 3", id="a group of two"),
        pytest.param({0: look("ranks", w=4), 1: OTHERS, 2: OTHERS, 3: OTHERS}, "ranks 1, 2, 3", id="a group of all"),
        pytest.param({0: look("ranks", w=3, pair=1), 1: OTHERS, 3: MEMBERS}, "ranks 2, 3", id="one was not seen"),
        pytest.param({0: look("ranks"), 1: look(), 2: look(), 3: look()}, "ranks 1, 2, 3", id="a group without counts"),
        pytest.param(
            {0: look("ranks", received={"pair/3": 1}), 1: look(), 2: look(), 3: look()}, "rank 3", id="a transfer"
        ),
    ],
)
def test_only_members_of_the_group_are_said_to_be_missing(found: dict[int, RankLook], absent: str) -> None:
    culprits, why = blame([0], found, range(4))
    assert not culprits
    assert why.endswith(f" that {absent} did not enter")


class Handle:
    """An object with a work handle's methods; each returns its caller's frame."""

    def wait(self) -> FrameType:
        return sys._getframe(1)

    def compute(self) -> FrameType:
        return sys._getframe(1)


def test_a_call_of_wait_is_seen_in_the_callers_line() -> None:
    work, rows = Handle(), [Handle()]
    assert seen_from(lambda: work.wait()) == "ranks"  # noqa: PLW0108 - this source line is what is read
    assert seen_from(lambda: rows[0].wait()) == "ranks"  # noqa: PLW0108
    assert seen_from(lambda: work.compute()) == ""  # noqa: PLW0108


@pytest.mark.parametrize(
    ("line", "awaits"),
    [
        ("torch.cuda.synchronize()", "device"),
        ("stream.synchronize()", "device"),
        ("loss.item()", "device"),
        ("loss.sum().cpu()", "device"),
        ("loss.tolist()", "device"),
        ("float(loss)", "device"),
        ("loss.backward()", ""),
        ("synchronize_later(loss)", ""),
    ],
)
def test_a_line_that_waits_for_a_device(line: str, awaits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"<{line}>"
    monkeypatch.setitem(linecache.cache, name, (len(line), None, [line], name))
    answers: list[str] = []

    class Anything:
        def __getattr__(self, _: str) -> Any:
            return self

        def __call__(self, *_: object) -> Any:
            answers.append(awaited(sys._getframe(1)))
            return self

    names = {"torch": Anything(), "stream": Anything(), "loss": Anything(), "float": Anything()}
    eval(compile(line, name, "eval"), {**names, "synchronize_later": Anything()})
    assert answers[-1] == awaits


def seen_from(call: object) -> str:
    """What `awaited` says of the caller's frame *during* the call."""
    answers: list[str] = []

    def look_on(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in {"wait", "compute"}:
            answers.append(awaited(frame.f_back))

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
