"""One call to the ranks: send it, show what they print, gather the answers, and name who is to blame when they do not come.

Order of blame: a rank that died, before a rank that raised, before ranks that only tell that another one is gone; and of ranks that did
not answer in time, those that the others were waiting for.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kit.errors import RankDied, RankError, RankTimeout
from kit.world.channel import ChannelClosed, Message
from kit.world.crew import Crew
from kit.world.members import Member, ending, signal_name
from kit.world.silence import blame, looks, names, ranks_word
from kit.world.stacks import users_part

TICK_S = 0.05  # how often logs are read and the deadline looked at while ranks work
SHOWN_BYTES = 256 * 1024  # of one rank's output in one call; the rest is in its log
INTERRUPT_S = 3.0
ABANDONED_S = 0.5  # after a failure: how long ranks that only wait for the failed one are waited for
TRACEBACKS = 4


class Observer(Protocol):
    """Who looks on while ranks work. Called in the thread of the call."""

    def started(self, phase: str, ranks: Sequence[int]) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def tick(self, answered: Sequence[int]) -> None: ...
    def ended(self) -> None: ...


@dataclass
class Call:
    """A request on its way. `answers` and `gone` fill up until every rank is in one of them."""

    crew: Crew
    members: list[Member]
    request: Message
    observer: Observer
    timeout_s: float
    answers: dict[int, Message] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    failed_at: float | None = None
    partial: dict[int, bytes] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    ticked: float = 0.0

    @property
    def phase(self) -> str:
        return str(self.request["phase"])

    def pending(self) -> list[Member]:
        return [m for m in self.members if m.rank not in self.answers and m.rank not in self.gone]

    def run(self) -> list[Message]:
        """Answers in the order of the members, or the exception that says what happened."""
        self.observer.started(self.phase, [m.rank for m in self.members])
        try:
            self._send()
            self._wait(time.monotonic() + self.timeout_s)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            self._show(last=True)
            self.observer.ended()
        return [self.answers[m.rank] for m in self.members]

    def _send(self) -> None:
        for member in self.members:
            member.phase, member.busy, member.since = self.phase, self.request["id"], time.monotonic()
            try:
                member.work.send(self.request)
            except ChannelClosed:
                self.gone.add(member.rank)  # the end of its channel is seen below, or its silence is

    def _wait(self, deadline: float) -> None:
        suspicious: float | None = None
        while self.pending() or self.gone:
            if self.gone:
                self._died()
            self._take(min(TICK_S, max(0.0, deadline - time.monotonic())))
            if not self.pending() and not self.gone:
                break
            if time.monotonic() >= deadline:
                self._timed_out()
            failed = [r for r in self.order if "error" in self.answers[r]]
            if failed:
                suspicious = suspicious or time.monotonic()
                if time.monotonic() - suspicious > ABANDONED_S:
                    if self._all_wait():
                        break
                    suspicious = None
        self._raise_failures()

    def _take(self, seconds: float) -> None:
        """Wait for messages, at most so long; take them in."""
        links = {m.work.fileno(): m for m in self.pending()}
        agents = [agent.link.fileno() for agent in self.crew.agents.values()]
        ready, _, _ = select.select([*links, *agents], [], [], seconds)
        now = time.monotonic()
        if (
            not ready or now - self.ticked >= TICK_S
        ):  # agents and ranks that are always heard from must not keep it away
            self.ticked = now
            self._show()
            self.observer.tick(self.order)
        if any(fd in agents for fd in ready):
            self.crew.hear_agents()
            self.gone |= {exit_.rank for exit_ in self.crew.exits if exit_.rank not in self.answers}
            if self.crew.torchrun_pid is not None and 0 not in self.crew.agents:
                self.gone |= {m.rank for m in self.pending() if m.node == 0}
        for fd in ready:
            if fd in links:
                self._hear(links[fd])

    def _hear(self, member: Member) -> bool:
        """Whether there may be more."""
        try:
            messages = member.work.arrived()
        except ChannelClosed:
            self.gone.add(member.rank)
            return False
        for message in messages:
            if message["id"] == self.request["id"]:
                member.busy, member.phase = None, "idle"
                self.answers[member.rank] = message
                self.order.append(member.rank)
                if "error" in message and self.failed_at is None:
                    self.failed_at = time.monotonic()
                if message.get("exiting"):
                    self.gone.add(member.rank)
        return True

    # -- output -----------------------------------------------------------------------------------------------------

    def _show(self, *, last: bool = False) -> None:
        for member in self.members:
            answer = self.answers.get(member.rank)
            if answer is not None and answer["log"] <= member.log and not (last and self.partial.get(member.rank)):
                continue  # nothing new was printed
            self._show_one(member, last=last)

    def _show_one(self, member: Member, *, last: bool) -> None:
        rank = member.rank
        shown = self.shown.get(rank, 0)
        while shown < SHOWN_BYTES and (chunk := self.crew.read_log(member, member.log, 1 << 16)):
            member.log += len(chunk)
            shown += len(chunk)
            lines = (self.partial.get(rank, b"") + chunk).split(b"\n")
            self.partial[rank] = lines.pop()
            if lines:
                self.observer.output(rank, "\n".join(line.decode(errors="replace") for line in lines))
        self.shown[rank] = shown
        answer = self.answers.get(rank)
        if last and (rest := self.partial.pop(rank, b"")):
            self.observer.output(rank, rest.decode(errors="replace"))
        if last and answer is not None and answer["log"] > member.log:
            left = (answer["log"] - member.log) / 2**20
            member.log = answer["log"]
            self.observer.output(rank, f"... {left:.1f} MiB more in {self.crew.plan.logs / f'rank{rank}.log'}")
        if last and answer is not None and answer["lost"]:
            self.observer.output(
                rank, f"... {answer['lost']} bytes of output were lost: no space left for {self.crew.plan.logs}"
            )

    # -- failures ---------------------------------------------------------------------------------------------------

    def _died(self) -> None:
        """Name the first process that ended. Others follow it because torchrun ends them, or because it was torchrun."""
        first = self.crew.first_exit()
        how = self.crew.torchrun_gone()
        if how is not None and (first is None or "SIG" in how):
            ranks = names([m.rank for m in self.members])
            text = f"torchrun (pid {self.crew.torchrun_pid}) {how} in phase {self.phase!r}; its ranks {ranks} ended with it{AGAIN}"
            raise RankDied(text, rank=-1, phase=self.phase, signal=how.rpartition(" ")[2])
        rank = first.rank if first else min(self.gone)
        member = next(m for m in self.crew.members if m.rank == rank)
        if any(member is one for one in self.members):
            while rank not in self.answers and select.select([member.work], [], [], 0)[0] and self._hear(member):
                pass  # what it said before it ended: others' ends may have come first
        raise death(self.crew, member, first.status if first else None, self.phase, self.answers.get(rank))

    def _raise_failures(self) -> None:
        failed = [rank for rank in self.order if "error" in self.answers[rank]]
        if not failed:
            return
        causes = [r for r in failed if not self.answers[r]["victim"]] or failed
        texts: dict[str, list[int]] = {}
        for rank in causes:
            texts.setdefault(self.answers[rank]["traceback"], []).append(rank)
        parts = [f"{ranks_word(sorted(ranks))}:\n{text.rstrip()}" for text, ranks in list(texts.items())[:TRACEBACKS]]
        if len(texts) > TRACEBACKS:
            parts.append(f"... and {len(texts) - TRACEBACKS} other tracebacks, in the ranks' logs")
        if left := [m.rank for m in self.pending()]:
            parts.append(f"{ranks_word(left)} still in a collective, waiting for the failed one{AGAIN}")
        first = causes[0]
        same = tuple(sorted(texts[self.answers[first]["traceback"]]))
        head = f"{ranks_word(sorted(causes))} failed in phase {self.phase!r}: {self.answers[first]['error']}"
        raise RankError(
            "\n".join([head, *parts]),
            rank=same[0],
            phase=self.phase,
            traceback=self.answers[first]["traceback"],
            ranks=same,
            victim=self.answers[first]["victim"],
            at=self.failed_at,
            refused=self.answers[first]["refused"],
        )

    def _all_wait(self) -> bool:
        seen = looks(self.pending())
        return all(member.rank in seen and seen[member.rank].waiting for member in self.pending())

    def _timed_out(self) -> None:
        silent = self.pending()
        found = looks(self.crew.members)
        stacks = {m.rank: found[m.rank].stack if m.rank in found else self.crew.describe(m) for m in silent}
        culprits, why = blame([m.rank for m in silent], found, [m.rank for m in self.crew.members])
        phases = {m.rank: found[m.rank].phase if m.rank in found else m.phase for m in silent}
        lines = [f"no answer from {ranks_word([m.rank for m in silent])} within {self.timeout_s:g} s; {why}"]
        if self.order:
            lines.append(f"{ranks_word(sorted(self.order))} answered")
        for member in silent:
            mark = " (culprit)" if member.rank in culprits else " (waiting)"
            lines += [
                f"rank {member.rank}, pid {member.pid}, phase {phases[member.rank]!r}{mark}:",
                stacks[member.rank].rstrip(),
            ]
        lines.append(
            f"They are left as they are{AGAIN}; %ranks stacks looks again; a later answer makes the World usable"
        )
        raise RankTimeout(
            "\n".join(lines),
            phase=self.phase,
            ranks=tuple(m.rank for m in silent),
            culprits=culprits,
            stacks=stacks,
        )

    def _interrupt(self) -> None:
        """Ask ranks to stop; those that cannot (stopped, or inside a collective) end, so that the World is clearly dead or usable."""
        deadline = time.monotonic() + INTERRUPT_S
        for member in self.pending():
            interrupt(member)
        while self.pending() and not self.gone and time.monotonic() < deadline:
            self._take(TICK_S)
        if left := [m.rank for m in self.pending()]:
            raise Interrupted(left, self.phase)


class Interrupted(KeyboardInterrupt):
    """Interrupted, and some ranks could not stop."""

    def __init__(self, ranks: Iterable[int], phase: str) -> None:
        self.ranks = list(ranks)
        super().__init__(f"{ranks_word(self.ranks)} did not stop within {INTERRUPT_S:g} s in phase {phase!r}")


AGAIN = "; restart() starts fresh ranks"


def interrupt(member: Member) -> None:
    try:
        member.watch.send({"id": 0, "do": "interrupt"})
    except ChannelClosed:
        return  # it is gone, which the wait that follows sees


def death(crew: Crew, member: Member, status: int | None, phase: str, answer: Message | None) -> RankDied:
    """What there is to say about a rank's end."""
    if answer is not None and answer.get("exiting"):
        status = answer["exitcode"]
        how = f"called sys.exit({status})"
    elif status is None:
        how = "is gone, and nobody saw how"
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
