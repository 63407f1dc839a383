"""Follows a panel's ranks while they work, in the thread of the call: how far each phase and rank is, what was printed, time left."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.errors import KitError, RankDied, RankError, RankTimeout
from kit.labs.definition import working
from kit.labs.lab import PhaseRow
from kit.results import Run

if TYPE_CHECKING:
    from kit.labs.lab import Lab
    from kit.labs.stepped import Stepped
    from kit.results import Record


LOG_LINES = 2000


class PhaseState(NamedTuple):
    """One phase of the plan on every rank. `began` is time.monotonic() of its start while it runs."""

    cycle: int
    phase: str
    status: str  # to do, next, running, done, failed
    ranks: tuple[str, ...]  # waiting, running, done, failed; absent: no work for this rank
    seconds: tuple[float | None, ...]
    began: float | None = None


def marks(ranks: int, working: Collection[int], state: str) -> tuple[str, ...]:
    """A state for each rank that has work in a phase."""
    return tuple(state if rank in working else "absent" for rank in range(ranks))


class Failure(NamedTuple):
    """What ended a run. `ranks` are those that are to blame, `detail` a traceback or what ranks were doing."""

    kind: str  # raised, died, timeout, stopped, error
    message: str
    ranks: tuple[int, ...]
    phase: str
    detail: str


class Progress(NamedTuple):
    """Phases, and seconds; `left` is None where nothing is known of what is to come."""

    done: int = 0
    total: int = 0
    elapsed: float = 0.0
    left: float | None = None


class Watch:
    """An observer of one lab after another. `stop` is asked at every tick: once it is set, the call is interrupted."""

    def __init__(self, stop: threading.Event, flush: Callable[[], None], every_s: float) -> None:
        self._stop = stop
        self._flush = flush
        self._every_s = every_s
        self._log: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
        self._lab: Lab | None = None
        self._phases: list[PhaseState] = []
        self._index = 0
        self._goal = 0
        self._answered: list[int] = []
        self._stepping = False
        self._interrupted = False
        self._took: dict[str, list[float]] = defaultdict(list)  # seconds of this run by phase, as a person waits
        self._began: float | None = None
        self._elapsed = 0.0
        self._flushed = 0.0
        self.phase = ""
        self.stacks: dict[int, str] = {}
        self.grew = False

    # -- called by the controller ------------------------------------------------------------------------------------

    def take(self, lab: Lab) -> None:
        """Watch this lab from now on, as far as it is."""
        self._lab = lab
        ranks = lab.config.ranks
        known: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
        if lab.started:
            frame = Run(lab.dir).frame()
            rows = frame[frame["metric"] == "seconds"]
            for cycle, phase, rank, value in rows[["cycle", "phase", "rank", "value"]].to_numpy().tolist():
                known[cycle, phase][rank] = value
        self._phases = [
            PhaseState(
                row.cycle,
                row.phase,
                row.status,
                marks(ranks, working(step, lab.roles), "done" if row.status == "done" else "waiting"),
                tuple(known[row.cycle, row.phase].get(rank) for rank in range(ranks)),
            )
            for row, step in zip(lab.phases, lab.steps, strict=True)
        ]
        self._index = sum(state.status == "done" for state in self._phases)
        self._goal = self._index
        self._took.clear()
        self._log.clear()
        self._stepping = False
        self.phase = ""

    def begin(self, *, all_of_it: bool) -> None:
        """An order came."""
        self._began = time.monotonic()
        self._interrupted = False
        self.stacks = {}
        self.aim(all_of_it=all_of_it)

    def aim(self, *, all_of_it: bool) -> None:
        self._goal = len(self._phases) if all_of_it else min(self._index + 1, len(self._phases))

    def step(self) -> None:
        """The next call but those of the lab itself is the next phase."""
        self._stepping = True

    def stepped(self, stepped: Stepped, seconds: float) -> None:
        self._stepping = False
        self._took[stepped.phase].append(seconds)
        before = self._phases[self._index].ranks
        done = tuple("absent" if mark == "absent" else "done" for mark in before)
        seconds_by_rank = seconds_of(stepped.records, len(before))
        self._set(self._index, status="done", ranks=done, seconds=seconds_by_rank, began=None)
        self._index += 1
        if self._index < len(self._phases):
            self._set(self._index, status="next")
        self.grew = True
        self._tell()

    def failed(self, failure: Failure) -> None:
        """Who is to blame is marked; who only waited is not."""
        self._stepping = False
        if self._index < len(self._phases):
            state = self._phases[self._index]
            done = self._answered if failure.kind == "timeout" else ()  # else an answer may be that of a victim
            after = [mark if mark == "absent" else "waiting" for mark in state.ranks]
            for mark, ranks in (("done", done), ("failed", failure.ranks)):
                for rank in ranks:
                    after[rank] = mark
            self._set(self._index, status="failed", ranks=tuple(after), began=None)
        self.grew = True

    def rest(self) -> None:
        """Nothing is under way any more."""
        self._elapsed = self._since()
        self._began = None
        self._goal = self._index
        self.phase = ""

    def rows(self) -> list[PhaseRow]:
        """The plan and how far it is, as a lab lists it."""
        return [PhaseRow(state.cycle, state.phase, state.status) for state in self._phases]

    @property
    def left(self) -> int:
        """Phases that are still to do."""
        return len(self._phases) - self._index

    @property
    def done(self) -> str:
        return f"{self._index} of {len(self._phases)}"

    def words(self) -> str:
        if not self._index:
            return f"ranks are ready; next is {self._phases[0].phase}" if self._phases else "ranks are ready"
        done = self._phases[self._index - 1]
        following = f"next is {self._phases[self._index].phase}" if self.left else "all phases are done"
        return f"{done.phase} of cycle {done.cycle} is done ({self._index} of {len(self._phases)}); {following}"

    def seen(self) -> tuple[tuple[PhaseState, ...], Progress, tuple[tuple[int, str], ...]]:
        """All of it as of now."""
        progress = Progress(self._index, len(self._phases), self._since(), self._time_left())
        return tuple(self._phases), progress, tuple(self._log)

    # -- called by the World ------------------------------------------------------------------------------------------

    def started(self, phase: str, ranks: Sequence[int]) -> None:
        self._answered = []
        self.phase = phase
        if self._stepping and self._index < len(self._phases) and self._phases[self._index].phase == phase:
            running = marks(len(self._phases[self._index].ranks), ranks, "running")
            self._set(self._index, status="running", ranks=running, began=time.monotonic())
        self._tell()

    def output(self, rank: int, text: str) -> None:
        self._log.extend((rank, line) for line in text.split("\n"))
        self._tell()

    def tick(self, answered: Sequence[int]) -> None:
        # Ranks answer an interrupt too, which does not mean that they finished the phase.
        if list(answered) != self._answered and not self._interrupted:
            self._answered = list(answered)
            if self._index < len(self._phases) and self._phases[self._index].status == "running":
                before = self._phases[self._index].ranks
                after = tuple("done" if rank in self._answered else mark for rank, mark in enumerate(before))
                self._set(self._index, ranks=after)
        if self._stop.is_set() and not self._interrupted:
            self._interrupted = True  # ranks have a time of their own to stop in, with ticks of its own
            self._look()
            raise KeyboardInterrupt(f"by hand, in phase {self.phase!r}")
        self._tell()

    def recorded(self, count: int) -> None:  # noqa: ARG002 - that there are more is enough
        """Records reached the run's folder while their phase lasts."""
        self.grew = True

    def ended(self) -> None: ...

    # -- how -------------------------------------------------------------------------------------------------------------

    def _set(self, index: int, **changes: Any) -> None:
        self._phases[index] = self._phases[index]._replace(**changes)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._flushed >= self._every_s:
            self._flushed = now
            self._flush()

    def _look(self) -> None:
        """What ranks that have not answered are doing, before they are interrupted."""
        if self._lab is not None and self._lab.started:
            with contextlib.suppress(KitError, OSError):
                stacks = self._lab.world.stacks()
                self.stacks = {rank: stack for rank, stack in stacks.items() if rank not in self._answered}

    def _since(self) -> float:
        return self._elapsed if self._began is None else time.monotonic() - self._began

    def _time_left(self) -> float | None:
        """From what the same phases took before in this run; for phases that are new, from the others."""
        ahead = [state.phase for state in self._phases[self._index : self._goal]]
        if not ahead:
            return 0.0
        late = self._index > len(self._phases) / 2  # by then what is new is like what was before
        if not self._took or not (late or any(name in self._took for name in ahead)):
            return None
        usual = statistics.median(seconds for all_of_it in self._took.values() for seconds in all_of_it)
        each = [statistics.median(self._took[name]) if name in self._took else usual for name in ahead]
        state = self._phases[self._index]
        passed = 0.0 if state.began is None else time.monotonic() - state.began
        return max(0.0, each[0] - passed) + sum(each[1:])


def seconds_of(records: Sequence[Record], ranks: int) -> tuple[float | None, ...]:
    """How long a phase took on each rank, as the ranks measured it."""
    known = {record.rank: record.value for record in records if record.metric == "seconds"}
    return tuple(known.get(rank) for rank in range(ranks))


def failure_of(error: BaseException, stacks: dict[int, str], phase: str, done: str) -> Failure:
    """An error as a panel shows it. Ranks that only waited for others are not among the blamed."""
    message, _, rest = str(error).partition("\n")
    notes = "\n".join(getattr(error, "__notes__", ()))
    if isinstance(error, RankError):
        ranks = () if error.victim else error.ranks
        return Failure("raised", message, ranks, error.phase, joined(error.traceback, notes))
    if isinstance(error, RankDied):
        dead = (error.rank,) if error.rank >= 0 else ()
        return Failure("died", message, dead, error.phase, joined(rest, notes))
    if isinstance(error, RankTimeout):
        return Failure("timeout", message, error.culprits, error.phase, joined(by_rank(error.stacks), notes))
    if isinstance(error, KeyboardInterrupt):
        # Who did not heed the interrupt is in the detail only: ranks that waited for the one that hung cannot heed it either.
        where = f" in phase {phase!r}" if phase else ""
        return Failure("stopped", f"stopped{where}: {done}", (), phase, joined(by_rank(stacks), message))
    if isinstance(error, KitError):
        return Failure("error", message, (), phase, joined(rest, notes))
    trace = "".join(traceback.format_exception(error))
    return Failure("error", f"{type(error).__name__}: {message}", (), phase, trace)


def by_rank(stacks: dict[int, str]) -> str:
    return "\n".join(f"rank {rank}:\n{stack.rstrip()}" for rank, stack in sorted(stacks.items()))


def joined(*parts: str) -> str:
    return "\n".join(part.rstrip() for part in parts if part)
