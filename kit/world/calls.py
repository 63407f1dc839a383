"""Calls in flight: `submit` gives a Pending, `wait` waits for several, of any number of Worlds. No threads.

One loop takes in whatever the ranks of all Worlds concerned send and shows what they print. Nothing moves while nobody waits:
`done`, `result`, `wait` and `cancel` run the loop, in the thread that calls them.

in flight -> settled     every rank answered, one raised, one died, or it was cancelled
in flight -> overdue     its deadline passed: `result` raises RankTimeout, and takes a late answer when it is called again

Order of blame: a rank that died, before a rank that raised, before ranks that only report that another one is gone; and of ranks that
did not answer in time, those that the others were waiting for, as a look at them from the side shows.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kit.errors import BadInput, Cancelled, KitError, RankDied, RankError, RankTimeout, ending, how_ended
from kit.world.channel import ChannelClosed, Malformed, Message, TooLargeError, WorldMember, encoded, readable_message
from kit.world.crew import Crew
from kit.world.leftovers import users_part

TICK_S = 0.05  # how often logs are read and the observer is asked, while ranks work
# How long interrupted ranks have to stop. A World with one that cannot is ended, so that none is half usable.
INTERRUPT_S = 3.0
# How often they are interrupted. A signal that comes just before a rank enters a system call is noticed only when that call ends.
INTERRUPT_AGAIN_S = 0.25
LOST_S = 0.5  # instead, if their machine is silent
GRACE_S = 3.0  # after a failure in one of several Worlds: how long the others are waited for
SHOWN_BYTES = 256 * 1024  # of one rank's output in one call; the rest is in its log
ABANDONED_S = 0.5  # after a failure: how long ranks that only wait for the failed one are waited for
LOOK_S = 1.0  # a rank that is stopped or starved does not hold up the report about the others
NEWS_S = 0.5  # between two requests for what ranks report while they work
TRACEBACKS = 4  # different ones in one error: the first usually explains it, and the logs have all
AGAIN = "; restart() starts fresh ranks"
USABLE_AGAIN = "The ranks keep running; the World is usable again once they answer; %ranks stacks looks again"


def without_advice(text: str) -> str:
    """An error of a World where nobody has that World: on the command line, and in the files of a run."""
    return text.replace(f"\n{USABLE_AGAIN}{AGAIN}", "").replace(AGAIN, "")


@dataclass(eq=False)
class WorldCall:
    """A request on its way to ranks of one World. `answers`, in their order, and `gone` fill up until every rank is in one of them."""

    crew: Crew
    members: list[WorldMember]
    request: Message
    die: Callable[[str, KitError], None]  # ends the World
    answers: dict[int, Message] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    failed_at: float | None = None  # when the first failure was heard of
    partial: defaultdict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))  # of a line, by rank
    shown: Counter[int] = field(default_factory=Counter)
    settled: bool = False
    error: BaseException | None = None
    look_at: float = math.inf  # after a failure: when to look whether the others only wait for the failed one
    news_at: float = 0.0

    def __post_init__(self) -> None:
        self.phase = str(self.request["phase"])
        try:
            self._payload = encoded(self.request)
        except TooLargeError as error:
            raise BadInput(f"{error}; pass large arguments in a file or in shared memory") from None

    def waiting(self) -> list[WorldMember]:
        return [m for m in self.members if m.rank not in self.answers and m.rank not in self.gone]

    def patience(self) -> float:
        """How long to wait for ranks that are interrupted. A silent machine may only be slow."""
        if self.gone or not self.waiting():
            return 0.0
        return LOST_S if all(self.crew.is_lost(member) for member in self.waiting()) else INTERRUPT_S

    def send(self) -> None:
        now = self.news_at = time.monotonic()
        for member in self.members:
            member.phase, member.call, member.since = self.phase, self, now
            try:
                member.work.send_encoded(self._payload)
            except ChannelClosed:
                self.gone.add(member.rank)  # the end of its channel is seen below, or its silence is
        self.gone |= {member.rank for member in self.members if self.crew.has_no_agent(member)}

    def hear(self, member: WorldMember, message: Message) -> None:
        """Take in an answer; one that comes late still frees its rank."""
        if "error" not in message:
            message["value"], message["log"], message["lost"]  # a KeyError refuses what is no answer
        member.call, member.phase = None, "idle"
        if self.settled:
            return
        self.answers[member.rank] = message
        if "error" in message and self.failed_at is None:
            self.failed_at = time.monotonic()
            self.look_at = self.failed_at + ABANDONED_S
        if message.get("exiting"):
            self.gone.add(member.rank)

    def ask_for_news(self, now: float) -> None:
        if now - self.news_at < NEWS_S:
            return
        self.news_at = now
        for member in self.waiting():
            if not member.asked:
                with contextlib.suppress(ChannelClosed):  # its end is seen on the other link
                    member.watch.send({"id": 0, "do": "news"})
                    member.asked = now

    def advance(self) -> None:
        if self.settled:
            return
        if self.gone:
            self.settle(self._death())
        elif not self.waiting():
            self.settle(self.failure())
        elif time.monotonic() > self.look_at:
            looks = look_at_members(self.crew.members)
            if all(is_abandoned(member.rank, looks) for member in self.waiting()):
                self.settle(self.failure())
            self.look_at = time.monotonic() + ABANDONED_S

    def settle(self, error: BaseException | None) -> None:
        """End the call; ranks that have not answered stay busy."""
        if self.settled:
            return
        self.settled, self.error = True, error
        if isinstance(error, RankDied):
            self.die(str(error).partition("\n")[0], error)

    # -- output -----------------------------------------------------------------------------------------------------

    def show(self, output: Callable[[int, str], None], *, last: bool = False) -> None:
        for member in self.members:
            rank, answer = member.rank, self.answers.get(member.rank, {"log": math.inf})
            while (
                answer["log"] > member.log
                and self.shown[rank] < SHOWN_BYTES
                and (chunk := self.crew.read_log(member, member.log, 1 << 16))
            ):
                member.log += len(chunk)
                self.shown[rank] += len(chunk)
                lines, end, self.partial[rank] = (self.partial[rank] + chunk).rpartition(b"\n")
                if end:
                    output(rank, lines.decode(errors="replace"))
            if last:
                self._show_rest(member, output)

    def _show_rest(self, member: WorldMember, output: Callable[[int, str], None]) -> None:
        rank, answer = member.rank, self.answers.get(member.rank, {"log": 0, "lost": 0})
        if tail := self.partial.pop(rank, b""):
            output(rank, tail.decode(errors="replace"))
        if answer["log"] > member.log:
            left = (answer["log"] - member.log) / 2**20
            member.log = answer["log"]
            output(rank, f"... {left:.1f} MiB more in {self.crew.logs / f'rank{rank}.log'}")
        if answer["lost"]:
            output(rank, f"... {answer['lost']} bytes of output were lost: no space left in {self.crew.logs}")

    # -- failures ---------------------------------------------------------------------------------------------------

    def _death(self) -> RankDied:
        """Name the first process that ended. Others follow it because torchrun ends them, or because it was torchrun."""
        first = self.crew.first_exit()
        why_gone = self.crew.torchrun_gone()
        if why_gone is not None and (first is None or "SIG" in why_gone):
            ranks = ", ".join(str(m.rank) for m in self.members)
            text = f"torchrun (pid {self.crew.torchrun_pid}) {why_gone} in phase {self.phase!r}; its ranks {ranks} ended with it{AGAIN}"
            return RankDied(text, rank=-1, phase=self.phase, signal=why_gone.rpartition(" ")[2])
        rank = first.rank if first else min(self.gone)
        member = next(m for m in self.crew.members if m.rank == rank)
        is_member = any(member is candidate for candidate in self.members)
        while (
            is_member
            and rank not in self.answers
            and member.work.fileno() in readable_message([member.work.fileno()], 0)
        ):
            if not self.crew.hear(member):
                break  # what it answered before it ended: others' ends may have come first
        phase, answer, status = (
            self.phase if is_member else member.phase,
            self.answers.get(rank),
            first.status if first else None,
        )
        if answer is not None and answer.get("exiting"):
            status = answer["exitcode"]
            why_gone = f"called sys.exit({status})"
        elif status is None:
            lost = member.node not in self.crew.agents
            why_gone = (
                f"is gone with the agent of machine {member.node}" if lost else "is gone; how it ended is not known"
            )
        else:
            why_gone = how_ended(status)
        text = f"rank {member.rank} (pid {member.pid} on {member.host}) {why_gone}{self.crew.why_lost(member)} in phase {phase!r}{AGAIN}"
        if status == -signal.SIGKILL:
            unknown = (
                "If nobody sent it, the kernel may have been out of memory: see dmesg, or memory.events of the cgroup"
            )
            text += f"\n{self.crew.out_of_memory(member.node) or unknown}"
        elif answer is None:
            log = self.crew.read_log(member, -20_000, 20_000).decode(errors="replace")
            before, fatal, dump = log.rpartition("Fatal Python error")
            kind, _, frames = dump.partition("Extension modules:")[0].partition("\n")
            _, ended, thrown = before.rpartition("terminate called")  # by C++
            last = f"{ended}{thrown}{fatal}{kind}\n{users_part(frames)}" if fatal else log.strip()
            if tail := last.splitlines()[-15:]:
                text += "".join(f"\n  {line}" for line in ["the last lines of its log:", *tail])
        elif answer.get("traceback"):
            text += f"\n{answer['traceback'].rstrip()}"
        return RankDied(text, rank=member.rank, phase=phase, **ending(status))

    def failure(self) -> RankError | None:
        return failure_of(self.answers, [m.rank for m in self.waiting()], self.phase, self.failed_at)

    def timeout(self, seconds: float) -> RankTimeout:
        silent = self.waiting()
        ranks = tuple(member.rank for member in silent)
        looks_by_rank = look_at_members(self.crew.members)
        seen = {m.rank: looks_by_rank[m.rank].stack for m in silent if m.rank in looks_by_rank}
        described = self.crew.describe([m for m in silent if m.rank not in seen])
        stacks = {rank: seen.get(rank) or described.get(rank, "") for rank in ranks}
        culprits, why = blame(ranks, looks_by_rank, [m.rank for m in self.crew.members])
        lines = [f"no answer from {ranks_word(ranks)} within {seconds:g} s; {why}"]
        if self.answers:
            lines.append(f"{ranks_word(sorted(self.answers))} answered")
        for member in silent:
            rank, phase = member.rank, looks_by_rank.get(member.rank, member).phase
            mark = "culprit" if rank in culprits else "waiting"
            lines += [f"rank {rank}, pid {member.pid}, phase {phase!r} ({mark}):", stacks[rank].rstrip()]
        text = "\n".join([*lines, f"{USABLE_AGAIN}{AGAIN}"])
        return RankTimeout(text, phase=self.phase, ranks=ranks, culprits=culprits, stacks=stacks)


def failure_of(
    answers: Mapping[int, Message], waiting: Sequence[int], phase: str, failed_at: float | None
) -> RankError | None:
    """The error of the ranks that raised; None if none did. `waiting`: those that have not answered."""
    failed = [rank for rank, answer in answers.items() if "error" in answer]
    causes = [r for r in failed if not answers[r]["victim"]] or failed
    if not causes:
        return None
    texts: dict[str, list[int]] = {}
    for rank in causes:
        texts.setdefault(answers[rank]["traceback"], []).append(rank)
    parts = [f"{ranks_word(sorted(ranks))}:\n{text.rstrip()}" for text, ranks in list(texts.items())[:TRACEBACKS]]
    if len(texts) > TRACEBACKS:
        parts.append(f"... and {len(texts) - TRACEBACKS} other tracebacks, in the ranks' logs")
    if waiting:
        parts.append(f"{ranks_word(waiting)} still in a collective, waiting for the failed one{AGAIN}")
    first = answers[causes[0]]
    same = tuple(sorted(texts[first["traceback"]]))
    head = f"{ranks_word(sorted(causes))} failed in phase {phase!r}: {first['error']}"
    about = {name: first[name] for name in ("traceback", "victim", "refused")}
    text = "\n".join([head, *parts])
    return RankError(text, rank=same[0], phase=phase, ranks=same, at=failed_at, **about)


# -- looking at ranks from the side ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankLook:
    """What a rank's side thread sees of its main thread.

    `awaits` is what its stack waits for: "ranks", a "device" or "". `progress` counts the collectives it entered, by group; `sent` and
    `received` count the transfers it posted, by "group/peer".
    """

    phase: str
    stack: str
    awaits: str
    progress: dict[str, int]
    sent: dict[str, int]
    received: dict[str, int]


def look_at_members(members: Sequence[WorldMember]) -> dict[int, RankLook]:
    """Ask all at once; ranks that do not answer within a second are not in the result."""
    number = time.monotonic_ns()
    asked: dict[int, WorldMember] = {}
    for member in members:
        with contextlib.suppress(ChannelClosed):  # gone: no look
            member.watch.send({"id": number, "do": "look"})
            asked[member.watch.fileno()] = member
    looks_by_rank: dict[int, RankLook] = {}
    deadline = time.monotonic() + LOOK_S
    while asked and (left := deadline - time.monotonic()) > 0:
        for fd in readable_message(asked, left):
            try:
                for message in asked[fd].hear_watch():
                    if message.pop("id") == number:
                        looks_by_rank[asked.pop(fd).rank] = RankLook(**message)
            except (ChannelClosed, Malformed):
                del asked[fd]
    return looks_by_rank


def ahead_in_collectives(rank: int, looks: dict[int, RankLook]) -> bool:
    """Has it entered more collectives of some group than another member of that group?"""
    progress_of_others = [look.progress for peer, look in looks.items() if peer != rank]
    return any(
        count > counts.get(group, count)
        for group, count in looks[rank].progress.items()
        for counts in progress_of_others
    )


def ahead_in_transfers(rank: int, looks: dict[int, RankLook]) -> bool:
    """Has it posted more sends to, or receives from, another rank than that one has posted for it?"""
    for mine, theirs in (("sent", "received"), ("received", "sent")):
        for key, count in getattr(looks[rank], mine).items():
            group, _, peer = key.rpartition("/")
            if (look := looks.get(int(peer))) and count > getattr(look, theirs).get(f"{group}/{rank}", 0):
                return True
    return False


def is_abandoned(rank: int, looks: dict[int, RankLook]) -> bool:
    """Does its stack show that it waits for other ranks, or for a device that waits for them?"""
    if rank not in looks:
        return False
    ahead = ahead_in_collectives(rank, looks) or ahead_in_transfers(rank, looks)
    return looks[rank].awaits == "ranks" or (looks[rank].awaits == "device" and ahead)


def blame(silent: Sequence[int], looks: dict[int, RankLook], everyone: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """The culprits among the silent ranks, and a sentence on why.

    A rank waits for others if its stack shows it, or if it has entered more collectives of some group than another member of that group
    (which also detects waits that hide in C). A rank that waits for a device, or that is ahead of another in its transfers, may wait for
    others; both together are certain, as receives are posted early and a device can be busy itself. The others wait for a silent rank
    without any of these signs, or else for those that only may wait.
    """
    seen = [r for r in silent if r in looks]
    ahead = [r for r in seen if ahead_in_transfers(r, looks)]
    waiting = [r for r in seen if is_abandoned(r, looks) or ahead_in_collectives(r, looks)]
    unclear = [r for r in seen if r not in waiting and (r in ahead or looks[r].awaits == "device")]
    absent = [r for r in everyone if r not in silent]
    place = "a collective or a transfer" if ahead else "a collective"
    if culprits := tuple(r for r in silent if r not in [*waiting, *unclear]):
        if left := sorted([*waiting, *unclear]):
            return culprits, f"{ranks_word(left)} in {place}, waiting for {ranks_word(culprits)}"
        return culprits, "none of them waits in a collective: busy, stopped or gone"
    if unclear and waiting:
        why = f"{ranks_word(waiting)} in {place}, waiting for {ranks_word(unclear)}: busy, or waiting for a device"
        return tuple(unclear), why
    if unclear and (absent or len(everyone) == 1):
        return tuple(unclear), "none of them waits for another rank: busy, or waiting for a device"
    if absent:
        return (), f"waiting in {place} that {ranks_word(left_behind(absent, seen, looks))} did not enter"
    return (), f"each waits in {place}, so they entered different ones: compare the stacks"


def left_behind(absent: Sequence[int], waiting: Sequence[int], looks: dict[int, RankLook]) -> Sequence[int]:
    """Those of the absent ranks that a waiting rank is ahead of, and those that no look shows; all where it is ahead of none, as then
    its group is not known."""

    def is_behind(rank: int) -> bool:
        pairs = [(one, {one: looks[one], rank: looks[rank]}) for one in waiting]
        return any(ahead_in_collectives(*pair) or ahead_in_transfers(*pair) for pair in pairs)

    behind = [rank for rank in absent if rank in looks and is_behind(rank)]
    return [rank for rank in absent if rank in behind or rank not in looks] if behind else absent


def ranks_word(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# -- waiting for calls ---------------------------------------------------------------------------------------------------


class WorldObserver(Protocol):
    """Called while ranks work, in the thread that waits; what it raises ends the wait."""

    def started(self, phase: str, ranks: Sequence[int]) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def tick(self, answered: Sequence[int]) -> None: ...
    def ended(self) -> None: ...


class Pending:
    """A call in flight on some ranks: `done()`, `result(timeout_s)`, `cancel()`, `ranks`, `phase`."""

    def __init__(
        self,
        calls: Sequence[WorldCall],
        lock: threading.RLock,
        observer: WorldObserver,
        timeout_s: float,
        on_news: Callable[[int, list[Any]], None] | None = None,
    ) -> None:
        self.calls = calls
        self.lock = lock
        self.observer = observer
        self.phase = calls[0].phase
        self.ranks = [member.rank for call in calls for member in call.members]
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._on_news = on_news
        self._cancelled = False
        self._observed = True
        self.settled = False
        self._ticked = time.monotonic()
        observer.started(self.phase, self.ranks)
        for call in calls:
            call.send()

    def done(self) -> bool:
        """Whether `result()` would return or raise at once."""
        drive([self], until=0.0)
        return self.over()

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Return one value per rank, or raise. `timeout_s`: how long to wait from now on."""
        until = self.deadline if timeout_s is None else time.monotonic() + timeout_s
        drive([self], until=until, overdue=timeout_s is not None)
        with self.lock:
            if self._cancelled:
                raise Cancelled(f"the call of phase {self.phase!r} on {ranks_word(self.ranks)} was cancelled")
            if not self.settled:
                waited = self.timeout_s if timeout_s is None else timeout_s
                self._end_observing()  # no bar stays beside ranks that hang
                raise timeouts([call.timeout(waited) for call in self.calls if not call.settled], waited)
            if error := call_failure(self.calls):
                raise error
        return [call.answers[member.rank]["value"] for call in self.calls for member in call.members]

    def cancel(self) -> bool:
        """Interrupt the ranks like Ctrl-C and wait until they stop. Returns False if the call had already ended.

        Ranks that do not stop within 3 s are ended, and their World with them.
        """
        return bool(cancel_all([self]))

    def over(self) -> bool:
        return self.settled or time.monotonic() >= self.deadline

    def advance(self, *, tick: bool) -> None:
        if self.settled:
            return
        now = time.monotonic()
        with self.lock:
            self._hand_on_news()
            for call in self.calls:
                call.advance()
            failed = [call for call in self.calls if call.settled and call.error is not None]
            late = failed and now > min(call.failed_at or now for call in failed) + GRACE_S
            for call in self.calls:
                if late and not call.settled:
                    call.settle(GivenUp())
            over = all(call.settled for call in self.calls)
            if self._on_news is not None and not over:
                for call in self.calls:
                    call.ask_for_news(now)
        if tick or now - self._ticked >= TICK_S:  # ranks that are always heard from must not keep it away
            self._ticked = now
            for call in self.calls:
                call.show(self.observer.output)
            self.observer.tick([rank for call in self.calls for rank in call.answers])
        if over:
            self._end()

    def _end(self) -> None:
        self.settled = True
        try:
            for call in self.calls:
                call.show(self.observer.output, last=True)
        finally:
            self._end_observing()

    def _end_observing(self) -> None:
        """Once: the observer may have other calls under way."""
        if self._observed:
            self._observed = False
            self.observer.ended()

    def _hand_on_news(self) -> None:
        for call, member in [(pending, member) for pending in self.calls for member in pending.members]:
            rows, member.news = member.news, []
            if rows and self._on_news is not None:
                try:
                    values = [json.loads(row) for row in rows]
                except (TypeError, ValueError) as error:
                    call.crew.refuse(member, error)
                else:
                    self._on_news(member.rank, values)


class GivenUp(KitError):  # noqa: N818 - it stays inside this module
    """A World's share of a call is given up because another World failed; its ranks stay busy."""


def wait(pendings: Iterable[Pending], *, first: bool = True, timeout_s: float | None = None) -> list[Pending]:
    """Wait for the first to finish (`first=False`: for all), at most `timeout_s`; return those that have finished."""
    asked = list(pendings)
    if not all(isinstance(pending, Pending) for pending in asked):
        raise BadInput("kit.wait takes what submit() returned, in a list")
    drive(asked, until=math.inf if timeout_s is None else time.monotonic() + timeout_s, first=first)
    return [pending for pending in asked if pending.over()]


def refuse_silence(pending: Pending, seconds: float) -> None:
    """Raise if a rank's process has not answered the question for news for so long, as a stopped one does not."""
    since = min((member.asked for call in pending.calls for member in call.waiting() if member.asked), default=math.inf)
    if time.monotonic() - since > seconds:
        raise timeouts([call.timeout(seconds) for call in pending.calls if not call.settled], seconds)


def drive(pendings: Sequence[Pending], *, until: float, first: bool = False, overdue: bool = False) -> None:
    """Take in what ranks send until all (or the first) are over, or until a time. `overdue`: also past their own deadlines."""
    turned = False
    try:
        while True:
            now = time.monotonic()
            left = [pending for pending in pendings if not (pending.settled if overdue else pending.over())]
            enough = not left or (first and len(left) < len(pendings))
            if turned and (enough or now >= until):
                return
            ends = until if overdue else min([until, *(pending.deadline for pending in left)])
            take_turn(pendings, 0.0 if enough else min(TICK_S, max(0.0, ends - now)))
            turned = True
    except KeyboardInterrupt:
        stop_calls(pendings)
        raise


def take_turn(pendings: Sequence[Pending], seconds: float) -> None:
    """Wait at most this long for something to arrive, and take it in."""
    crews = list({id(call.crew): (pending.lock, call.crew) for pending in pendings for call in pending.calls}.values())
    ready = readable_message([fd for _, crew in crews for fd in crew.filenos()], seconds)
    for lock, crew in crews if ready else ():
        with lock:
            crew.take(ready)
    for pending in pendings:
        pending.advance(tick=not ready)


def interrupt_ranks(calls: Sequence[WorldCall]) -> None:
    for call in calls:
        for member in call.waiting():
            with contextlib.suppress(ChannelClosed):  # it is gone, which whoever waits for it sees
                member.watch.send({"id": 0, "do": "interrupt", "call": call.request["id"]})


def stop_calls(pendings: Sequence[Pending]) -> None:
    """Interrupt the ranks of these calls. Those that cannot stop end, so that each World is clearly dead or usable."""
    open_ = [call for pending in pendings if not pending.settled for call in pending.calls if not call.settled]
    began = time.monotonic()
    interrupted = -math.inf
    while (waited := time.monotonic() - began) < max((call.patience() for call in open_), default=0.0):
        if waited - interrupted >= INTERRUPT_AGAIN_S:
            interrupted = waited
            interrupt_ranks(open_)
        crews = {id(call.crew): call.crew for call in open_}.values()
        if readable_message([fd for crew in crews for fd in crew.filenos()], TICK_S):
            for pending in pendings:
                with pending.lock:
                    for call in pending.calls:
                        call.crew.take()
    stuck: list[int] = []
    for call in open_:
        if left := [member.rank for member in call.waiting()]:
            stuck += left
            why = (
                f"it was interrupted and {ranks_word(left)} did not stop within {waited:.2g} s in phase {call.phase!r}"
            )
            call.die(why, KitError(f"this World is dead: {why}; restart() starts fresh ranks"))
    for pending in pendings:
        with pending.lock:
            for call in pending.calls:
                call.advance()
                call.settle(Cancelled(f"the call of phase {pending.phase!r} was interrupted"))
        if not pending.settled:
            pending._end()
    # The prompt is back; print why the ranks are not. A thread has no prompt: its owner reports in its own way.
    if stuck and threading.current_thread() is threading.main_thread():
        print(f"World ended: {ranks_word(stuck)} did not stop within {waited:.2g} s; restart() starts fresh ranks")


def cancel_all(pendings: Sequence[Pending]) -> list[Pending]:
    """Cancel those that have not ended, all at once; returns them."""
    drive(pendings, until=0.0)
    left = [pending for pending in pendings if not pending.settled]
    for pending in left:
        pending._cancelled = True
    stop_calls(left)
    return left


def call_failure(calls: Sequence[WorldCall]) -> BaseException | None:
    """The error to raise: of the worst kind the one that came first. What else went wrong is a note on it."""
    failed = sorted(
        (call for call in calls if call.error is not None),
        key=lambda one: (order_of_blame(one.error), math.inf if one.failed_at is None else one.failed_at),
    )
    errors = list({id(call.error): call.error for call in failed if call.error is not None}.values())
    if not errors:
        return None
    for call in failed[1:]:
        if isinstance(call.error, GivenUp):
            note = f"{ranks_word([m.rank for m in call.waiting()])} did not answer within {GRACE_S:g} s of it and keep running"
        elif call.error is errors[0]:
            continue
        else:
            note = f"after it: {str(call.error).partition(chr(10))[0]}"
        if note not in getattr(errors[0], "__notes__", ()):
            errors[0].add_note(note)
    return errors[0]


def order_of_blame(error: BaseException | None) -> int:
    """As in one World: ranks that died, that raised, that only report another's end, that are silent."""
    if isinstance(error, RankError):
        return 2 if error.victim else 1
    return 4 if isinstance(error, GivenUp) else 0 if isinstance(error, RankDied) else 1


def timeouts(errors: Sequence[RankTimeout], seconds: float) -> RankTimeout:
    """One of several Worlds' timeouts. Ranks of one World that only wait may wait for a culprit in another."""
    if len(errors) == 1:
        return errors[0]
    ranks = sorted(rank for error in errors for rank in error.ranks)
    culprits = tuple(sorted(rank for error in errors for rank in error.culprits))
    waiting = [rank for rank in ranks if rank not in culprits]
    if waiting and culprits:
        why = f"{ranks_word(waiting)} waiting for {ranks_word(culprits)}"
    elif culprits:
        why = "none of them waits for others: busy, stopped or gone"
    else:
        why = "each waits for others, so they wait for different things: compare the stacks"
    bodies = [str(error).partition("\n")[2] for error in errors]
    return RankTimeout(
        "\n".join([f"no answer from {ranks_word(ranks)} within {seconds:g} s; {why}", *bodies]),
        phase=errors[0].phase,
        ranks=tuple(ranks),
        culprits=culprits,
        stacks={rank: stack for error in errors for rank, stack in error.stacks.items()},
    )
