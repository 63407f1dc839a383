"""One World's share of a call: the request, the answers, and who is to blame when they do not come.

Order of blame: a rank that died, before a rank that raised, before ranks that only report that another one is gone; and of ranks that
did not answer in time, those that the others were waiting for, as a look at them from the side tells. `kit.world.pending` waits; this
module only takes in and decides.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kit.errors import Cancelled, KitError, RankDied, RankError, RankTimeout, ending, signal_name
from kit.world.channel import ChannelClosed, Malformed, Member, Message, readable
from kit.world.crew import Crew
from kit.world.execute import users_part

SHOWN_BYTES = 256 * 1024  # of one rank's output in one call; the rest is in its log
ABANDONED_S = 0.5  # after a failure: how long ranks that only wait for the failed one are waited for
LOOK_S = 1.0
NEWS_S = 0.5  # between two requests for what ranks report while they work
TRACEBACKS = 4
AGAIN = "; restart() starts fresh ranks"

Show = Callable[[int, str], None]


@dataclass(eq=False)
class Call:
    """A request on its way to ranks of one World. `answers` and `gone` fill up until every rank is in one of them."""

    crew: Crew
    members: list[Member]
    request: Message
    die: Callable[[str, KitError], None]  # ends the World
    answers: dict[int, Message] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    failed_at: float | None = None  # when the first failure was heard of
    partial: dict[int, bytes] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    settled: bool = False
    error: BaseException | None = None
    suspicious: float | None = None
    news_at: float = 0.0

    @property
    def phase(self) -> str:
        return str(self.request["phase"])

    def waiting(self) -> list[Member]:
        return [m for m in self.members if m.rank not in self.answers and m.rank not in self.gone]

    def send(self) -> None:
        now = self.news_at = time.monotonic()
        for member in self.members:
            member.phase, member.call, member.since = self.phase, self, now
            try:
                member.work.send(self.request)
            except ChannelClosed:
                self.gone.add(member.rank)  # the end of its channel is seen below, or its silence is

    def hear(self, member: Member, message: Message) -> None:
        """Take in an answer; one that comes late still frees its rank."""
        if "error" not in message:
            message["value"], message["log"], message["lost"]  # a KeyError refuses what is no answer
        member.call, member.phase = None, "idle"
        if self.settled:
            return
        self.answers[member.rank] = message
        self.order.append(member.rank)
        if "error" in message and self.failed_at is None:
            self.failed_at = time.monotonic()
        if message.get("exiting"):
            self.gone.add(member.rank)

    def lost(self, rank: int) -> None:
        """The channel of a rank has ended."""
        if rank not in self.answers:
            self.gone.add(rank)

    def ask_for_news(self, now: float) -> None:
        """Ask ranks that still work for what they have to report."""
        if now - self.news_at < NEWS_S:
            return
        self.news_at = now
        for member in self.waiting():
            if not member.asked:
                try:
                    member.watch.send({"id": 0, "do": "news"})
                    member.asked = True
                except ChannelClosed:
                    continue  # its end is heard of on the other link

    def advance(self) -> None:
        """Decide whether the call is over, and how."""
        if self.settled:
            return
        if self.gone:
            self._settle(self._death())
        elif not self.waiting():
            self._settle(self._failure())
        elif self.failed_at is not None:
            self.suspicious = self.suspicious or time.monotonic()
            if time.monotonic() - self.suspicious > ABANDONED_S:
                waiting, seen = self.waiting(), looks(self.waiting())
                if all(member.rank in seen and seen[member.rank].waiting for member in waiting):
                    self._settle(self._failure())
                self.suspicious = None

    def give_up(self, error: BaseException) -> None:
        """End the call with this error; ranks that have not answered stay busy."""
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        if self.settled:
            return
        self.settled, self.error = True, error
        if isinstance(error, RankDied):
            self.die(str(error).partition("\n")[0], error)

    # -- output -----------------------------------------------------------------------------------------------------

    def show(self, output: Show, *, last: bool = False) -> None:
        for member in self.members:
            answer = self.answers.get(member.rank)
            if answer is not None and answer["log"] <= member.log and not (last and self.partial.get(member.rank)):
                continue  # nothing new was printed
            self._show_one(member, output, last=last)

    def _show_one(self, member: Member, output: Show, *, last: bool) -> None:
        rank = member.rank
        shown = self.shown.get(rank, 0)
        while shown < SHOWN_BYTES and (chunk := self.crew.read_log(member, member.log, 1 << 16)):
            member.log += len(chunk)
            shown += len(chunk)
            lines = (self.partial.get(rank, b"") + chunk).split(b"\n")
            self.partial[rank] = lines.pop()
            if lines:
                output(rank, "\n".join(line.decode(errors="replace") for line in lines))
        self.shown[rank] = shown
        answer = self.answers.get(rank)
        if last and (rest := self.partial.pop(rank, b"")):
            output(rank, rest.decode(errors="replace"))
        if last and answer is not None and answer["log"] > member.log:
            left = (answer["log"] - member.log) / 2**20
            member.log = answer["log"]
            output(rank, f"... {left:.1f} MiB more in {self.crew.logs / f'rank{rank}.log'}")
        if last and answer is not None and answer["lost"]:
            output(rank, f"... {answer['lost']} bytes of output were lost: no space left in {self.crew.logs}")

    # -- failures ---------------------------------------------------------------------------------------------------

    def _death(self) -> RankDied:
        """Name the first process that ended. Others follow it because torchrun ends them, or because it was torchrun."""
        first = self.crew.first_exit()
        how = self.crew.torchrun_gone()
        if how is not None and (first is None or "SIG" in how):
            ranks = names([m.rank for m in self.members])
            text = f"torchrun (pid {self.crew.torchrun_pid}) {how} in phase {self.phase!r}; its ranks {ranks} ended with it{AGAIN}"
            return RankDied(text, rank=-1, phase=self.phase, signal=how.rpartition(" ")[2])
        rank = first.rank if first else min(self.gone)
        member = next(m for m in self.crew.members if m.rank == rank)
        mine = any(member is one for one in self.members)
        while mine and rank not in self.answers and member.work.fileno() in readable([member.work.fileno()], 0):
            if not self.crew.hear(member):
                break  # what it said before it ended: others' ends may have come first
        phase = self.phase if mine else member.phase
        return death(self.crew, member, first.status if first else None, phase, self.answers.get(rank))

    def _failure(self) -> RankError | Cancelled | None:
        failed = [rank for rank in self.order if "error" in self.answers[rank]]
        if not failed:
            return None
        causes = [r for r in failed if not self.answers[r]["victim"]] or failed
        texts: dict[str, list[int]] = {}
        for rank in causes:
            texts.setdefault(self.answers[rank]["traceback"], []).append(rank)
        parts = [f"{ranks_word(sorted(ranks))}:\n{text.rstrip()}" for text, ranks in list(texts.items())[:TRACEBACKS]]
        if len(texts) > TRACEBACKS:
            parts.append(f"... and {len(texts) - TRACEBACKS} other tracebacks, in the ranks' logs")
        if left := [m.rank for m in self.waiting()]:
            parts.append(f"{ranks_word(left)} still in a collective, waiting for the failed one{AGAIN}")
        first = causes[0]
        same = tuple(sorted(texts[self.answers[first]["traceback"]]))
        head = f"{ranks_word(sorted(causes))} failed in phase {self.phase!r}: {self.answers[first]['error']}"
        return RankError(
            "\n".join([head, *parts]),
            rank=same[0],
            phase=self.phase,
            traceback=self.answers[first]["traceback"],
            ranks=same,
            victim=self.answers[first]["victim"],
            at=self.failed_at,
            refused=self.answers[first]["refused"],
        )

    def timeout(self, seconds: float) -> RankTimeout:
        """Who did not answer in time, and who of them the others wait for."""
        silent = self.waiting()
        found = looks(self.crew.members)
        stacks = {m.rank: found[m.rank].stack if m.rank in found else self.crew.describe(m) for m in silent}
        culprits, why = blame([m.rank for m in silent], found, [m.rank for m in self.crew.members])
        phases = {m.rank: found[m.rank].phase if m.rank in found else m.phase for m in silent}
        lines = [f"no answer from {ranks_word([m.rank for m in silent])} within {seconds:g} s; {why}"]
        if self.order:
            lines.append(f"{ranks_word(sorted(self.order))} answered")
        for member in silent:
            mark = " (culprit)" if member.rank in culprits else " (waiting)"
            lines.append(f"rank {member.rank}, pid {member.pid}, phase {phases[member.rank]!r}{mark}:")
            lines.append(stacks[member.rank].rstrip())
        lines.append(
            f"The ranks keep running; the World is usable again once they answer; %ranks stacks looks again{AGAIN}"
        )
        return RankTimeout(
            "\n".join(lines), phase=self.phase, ranks=tuple(m.rank for m in silent), culprits=culprits, stacks=stacks
        )


def interrupt(call: Call) -> None:
    """Have ranks that still work at this call raise KeyboardInterrupt."""
    for member in call.waiting():
        try:
            member.watch.send({"id": 0, "do": "interrupt", "call": call.request["id"]})
        except ChannelClosed:
            continue  # it is gone, which the wait that follows sees


def death(crew: Crew, member: Member, status: int | None, phase: str, answer: Message | None) -> RankDied:
    """How a rank ended, with its last words."""
    if answer is not None and answer.get("exiting"):
        status = answer["exitcode"]
        how = f"called sys.exit({status})"
    elif status is None:
        how = "is gone; how it ended is not known"
    elif status < 0:
        how = f"was killed by {signal_name(-status)}"
    else:
        how = f"exited with status {status}"
    text = f"rank {member.rank} (pid {member.pid} on {member.host}) {how} in phase {phase!r}{AGAIN}"
    if status == -signal.SIGKILL:
        text += "\nIf nobody sent it, the kernel may have been out of memory: see dmesg, or memory.events of the cgroup"
    elif answer is None:
        log = crew.read_log(member, -20_000, 20_000).decode(errors="replace")
        _, fatal, dump = log.rpartition("Fatal Python error")
        tail = (f"{fatal}{dump.partition(chr(10))[0]}\n{users_part(dump)}" if fatal else log.strip()).splitlines()[-15:]
        text += "".join(f"\n  {line}" for line in ["the last lines of its log:", *tail]) if tail else ""
    elif answer.get("traceback"):
        text += f"\n{answer['traceback'].rstrip()}"
    return RankDied(text, rank=member.rank, phase=phase, **ending(status))


# -- looking at ranks from the side ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """What a rank's side thread says of its main thread. `progress` counts the collectives it entered, by group."""

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
