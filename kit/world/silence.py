"""Looking at ranks from the side, and deciding which of the silent ones the others are waiting for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kit.world.channel import ChannelClosed, Malformed, readable
from kit.world.members import Member

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """What a rank's side thread says of its main thread. `progress` counts the collectives it entered, by group."""

    busy: bool
    phase: str
    stack: str
    waiting: bool
    progress: dict[str, int]


def looks(members: Sequence[Member]) -> dict[int, Look]:
    """Ask all at once; ranks that do not answer within a second are not in the result."""
    number = time.monotonic_ns()
    asked: dict[int, Member] = {}
    for member in members:
        try:
            member.watch.send({"id": number, "do": "look"})
            asked[member.watch.fileno()] = member
        except ChannelClosed:
            continue  # gone: no look
    found: dict[int, Look] = {}
    deadline = time.monotonic() + LOOK_S
    while asked and (left := deadline - time.monotonic()) > 0:
        for fd in readable(asked, left):
            member = asked[fd]
            try:
                messages = member.watch.arrived()
            except (ChannelClosed, Malformed):
                del asked[fd]
                continue
            for message in messages:
                if "news" in message:
                    member.asked, member.news = False, [*member.news, *message["news"]]
                elif message.pop("id") == number:
                    found[member.rank] = Look(**message)
                    del asked[fd]
    return found


def blame(silent: Sequence[int], found: dict[int, Look], everyone: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """The culprits among the silent ranks, and a sentence on why.

    A rank waits for others when its stack is inside a collective, or when it has entered more collectives of some group than another
    member of that group (which also sees waits that hide in C, such as a device synchronisation). Who is silent and does not wait is
    what the others wait for.
    """
    waiting = [r for r in silent if r in found and (found[r].waiting or ahead(r, found))]
    culprits = tuple(r for r in silent if r not in waiting)
    if waiting and culprits:
        return culprits, f"{ranks_word(waiting)} in a collective, waiting for {ranks_word(culprits)}"
    if culprits:
        return culprits, "none of them waits in a collective: busy, stopped or gone"
    absent = [r for r in everyone if r not in silent]
    if absent:
        return (), f"waiting in a collective that {ranks_word(absent)} did not enter"
    return (), "each waits in a collective, so they entered different ones: compare the stacks"


def names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def ranks_word(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {names(ranks)}"


def ahead(rank: int, found: dict[int, Look]) -> bool:
    mine = found[rank].progress
    return any(
        count > other.progress[group]
        for group, count in mine.items()
        for r, other in found.items()
        if r != rank and group in other.progress
    )
