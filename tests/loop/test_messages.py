"""Events, commands and the immutable map."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest

from kit.loop.messages import Command, Event, Map


def test_ids_are_read_by_name_and_compared_whatever_their_order() -> None:
    event = Event("completed", "a", sample=3, group=17)
    assert (event.group, event["sample"], event.get("why", "none")) == (17, 3, "none")
    assert event == Event("completed", "a", group=17, sample=3)
    assert hash(event) == hash(Event("completed", "a", group=17, sample=3))
    assert event != Event("completed", "b", group=17, sample=3)
    with pytest.raises(AttributeError, match="completed has no id 'why'; it has group, sample"):
        event.why  # noqa: B018
    with pytest.raises(FrozenInstanceError):
        event.name = "failed"  # type: ignore[misc]


def test_a_command_has_an_address_and_is_no_event() -> None:
    command = Command("begin", "trainer", "a", step=3)
    assert (command.to, command.step) == ("trainer", 3)
    assert command != Command("begin", "other", "a", step=3)
    assert command != Event("begin", "a", step=3)


@pytest.mark.parametrize("message", [Event("tokens", "a", group=1), Command("begin", "trainer", step=3)])
def test_messages_are_copied_and_sent_whole(message: Event | Command) -> None:
    assert copy.deepcopy(message) == message == pickle.loads(pickle.dumps(message))


def test_a_map_does_not_change() -> None:
    one = Map({1: "a"})
    two = one.put(2, "b")
    assert (one, two, two.without(1)) == ({1: "a"}, {1: "a", 2: "b"}, {2: "b"})
    assert hash(Map({2: "b", 1: "a"})) == hash(two)
    assert Map().plus("x").plus("x", 2) == {"x": 3}
    for change in (lambda: one.update({3: "c"}), lambda: one.pop(1), lambda: one.__setitem__(1, "c"), one.clear):
        with pytest.raises(TypeError, match="immutable"):
            change()
