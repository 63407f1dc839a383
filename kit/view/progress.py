"""Observers of working ranks: their output marked by rank, a progress bar after two seconds, and the data for a panel.

A bar names the phase, the ranks that have answered and those that have not. In a terminal it is the last line, rewritten in
place; in Jupyter it is one updated display. Elsewhere there is no bar, because a log keeps every line.
Everything runs in the thread of the call without a timer, so a bar moves only while the call waits for ranks.
"""

from __future__ import annotations

import contextlib
import html
import shutil
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from kit.errors import KitError, RankDied, RankError, RankTimeout
from kit.labs.definition import working
from kit.labs.lab import Lab, Stepped
from kit.results import Run
from kit.results.records import STEP_LINE

AFTER_S = 2.0  # shorter work needs no bar
EVERY_S = 0.25  # more frequent redraws only cost time
WIDTH = 20


def ranks_short(ranks: Sequence[int]) -> str:
    """0-3, 5: consecutive ranks as a range."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)


class Line:
    """Where a bar is drawn; nowhere by default. `clear` makes room for other output, `leave` ends the bar."""

    def draw(self, fraction: float, text: str) -> None: ...
    def clear(self) -> None: ...
    def leave(self) -> None:
        self.clear()


class Terminal(Line):
    """The last line of a terminal, on stderr, because stdout has the ranks' lines and may be a pipe."""

    def draw(self, fraction: float, text: str) -> None:
        full = round(fraction * WIDTH)
        line = f"{'█' * full}{'░' * (WIDTH - full)} {text}"
        sys.stderr.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


class Notebook(Line):
    """One display in the output of the cell. Its last text stays, because a display cannot be removed."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, fraction: float, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text, "text/html": bar_html(fraction, text)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)

    def leave(self) -> None:
        """The next bar is a new display, in the output of its cell."""
        self._handle = None


def bar_html(fraction: float, text: str) -> str:
    words = html.escape(text, quote=True)
    bar = f'<progress value="{fraction:.3f}" max="1" aria-label="{words}"></progress>' if fraction < 1 else ""
    return f'<div class="kit-progress" style="display:flex;gap:.8em;align-items:center">{bar}<span>{words}</span></div>'


def progress_line() -> Line:
    if "ipykernel" in sys.modules:
        from IPython import get_ipython

        if getattr(get_ipython(), "kernel", None) is not None:
            return Notebook()
    return Terminal() if sys.stderr.isatty() else Line()


class Progress:
    """An observer of a World's calls. The bar is full after `total` calls; with 1 it shows the share of ranks that answered.

    The next call after these begins another bar.
    """

    def __init__(self, *, total: int = 1, line: Line | None = None, after_s: float = AFTER_S) -> None:
        self._line = line or progress_line()
        self._total = max(1, total)
        self._after_s = after_s
        self._began = self._drew = 0.0
        self._calls = self._under_way = 0
        self._phase = ""
        self._ranks: list[int] = []
        self._answered: list[int] = []
        self._recorded = 0
        self._about = ""  # how far the work of a phase is

    def started(self, phase: str, ranks: Sequence[int]) -> None:
        if not self._under_way and self._calls in {0, self._total}:
            self._began, self._drew, self._calls = time.monotonic(), 0.0, 0
        self._under_way += 1
        self._phase, self._ranks, self._answered, self._recorded, self._about = phase, list(ranks), [], 0, ""
        self._draw()

    def output(self, rank: int, text: str) -> None:
        lines = [line for line in text.split("\n") if not line.startswith(STEP_LINE)]
        if lines:
            self._line.clear()
            sys.stdout.write("".join(f"[{rank}] {line}\n" for line in lines))
            sys.stdout.flush()

    def tick(self, answered: Sequence[int]) -> None:
        if self._under_way:  # else ranks are being started
            self._answered = list(answered)
            self._draw()

    def recorded(self, count: int) -> None:
        self._recorded = count

    def about(self, text: str) -> None:
        self._about = text

    def ended(self) -> None:
        """The wait for a call is over."""
        self._under_way -= 1
        self._calls = min(self._calls + 1, self._total)
        if self._drew:
            self._answered, self._ranks = [], []
            self._draw(now=True)
        if self._under_way or self._calls < self._total:
            self._line.clear()
        else:
            self._line.leave()

    def _draw(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        elapsed = clock - self._began
        if elapsed < self._after_s or (clock - self._drew < EVERY_S and not now):
            return
        self._drew = clock
        share = len(self._answered) / len(self._ranks) if self._ranks else 0.0
        fraction = min(1.0, (self._calls + share) / self._total)
        self._line.draw(fraction, " · ".join(filter(None, self._words(elapsed))))

    def _words(self, elapsed: float) -> list[str]:
        silent = [rank for rank in self._ranks if rank not in self._answered]
        call = min(self._calls + bool(self._ranks), self._total)
        return [
            self._phase,
            f"{call} of {self._total}" if self._total > 1 else "",
            self._about,
            f"answered: {ranks_short(self._answered)}" if self._answered else "",
            f"waiting for: {ranks_short(silent)}" if silent and not self._about else "",
            f"{self._recorded} records so far" if self._recorded else "",
            f"{elapsed:.0f} s",
        ]


# -- what a panel follows, in the thread of the call: how far each phase and rank is, what was printed, time left ------

LOG_LINES = 2000


class PhaseState(NamedTuple):
    """One phase of the plan on every rank. `began` is time.monotonic() of its start while it runs."""

    place: str  # of `Step`
    phase: str
    status: str  # to do, next, running, done, failed
    ranks: tuple[str, ...]  # waiting, running, done, failed; absent: no work for this rank
    seconds: tuple[float | None, ...]
    began: float | None = None


def marks(ranks: int, working: Collection[int], state: str) -> tuple[str, ...]:
    return tuple(state if rank in working else "absent" for rank in range(ranks))


def placed(state: PhaseState) -> str:
    """A phase and where in the run it is: "train, cycle 2"."""
    return f"{state.phase}, {state.place}" if state.place else state.phase


class EndedBy(NamedTuple):
    """The failure that ended a run. `ranks` caused it; `detail` is a traceback or what the ranks were doing."""

    kind: str  # raised, died, timeout, stopped, error, refused
    message: str
    ranks: tuple[int, ...]
    phase: str
    detail: str


class RunProgress(NamedTuple):
    """Phases and seconds; `left` is None if the remaining time is unknown."""

    done: int = 0
    total: int = 0
    elapsed: float = 0.0
    left: float | None = None


class CallWatch:
    """An observer of successive labs. `stop` is checked at every tick; once it is set, the call is interrupted."""

    def __init__(self, stop: threading.Event, flush: Callable[[], None], every_s: float) -> None:
        self._stop = stop
        self._flush = flush
        self._every_s = every_s
        self._log: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
        self._lab: Lab | None = None
        self._phases: list[PhaseState] = []
        self.done = 0
        self._all = False
        self._answered: list[int] = []
        self._interrupted = False
        self._took: dict[str, list[float]] = defaultdict(list)  # wall-clock seconds of this run by phase
        self._began: float | None = None
        self._elapsed = 0.0
        self._flushed = 0.0
        self.phase = ""
        self.stacks: dict[int, str] = {}
        self.grew = False

    # -- called by the controller ------------------------------------------------------------------------------------

    def take(self, lab: Lab) -> None:
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
                step.place,
                row.phase,
                row.status,
                marks(ranks, working(step, lab.roles), "done" if row.status == "done" else "waiting"),
                tuple(known[row.cycle, row.phase].get(rank) for rank in range(ranks)),
            )
            for row, step in zip(lab.phases, lab.steps, strict=True)
        ]
        self.done = sum(state.status == "done" for state in self._phases)
        self._took.clear()
        self._log.clear()
        self.phase = ""

    def forget(self) -> None:
        """The lab did not start: nothing is known of its phases."""
        self._lab, self._phases, self.done = None, [], 0
        self._log.clear()

    def begin(self, *, all_of_it: bool) -> None:
        self._began = time.monotonic()
        self._interrupted = False
        self._all = all_of_it
        self.stacks = {}

    def stepped(self, stepped: Stepped, seconds: float) -> None:
        self._took[stepped.phase].append(seconds)
        before = self._phases[self.done].ranks
        done = tuple("absent" if mark == "absent" else "done" for mark in before)
        known = {row.rank: row.value for row in stepped.rows if row.metric == "seconds"}
        seconds_by_rank = tuple(known.get(rank) for rank in range(len(before)))
        self._set(status="done", ranks=done, seconds=seconds_by_rank, began=None)
        self.done += 1
        if self.left:
            self._set(status="next")
        self.grew = True
        self._tell()

    def failed(self, failure: EndedBy) -> None:
        """Mark the ranks that caused the failure, not those that only waited."""
        if self.left:
            state = self._phases[self.done]
            # Else an answer may come from a rank that only waited.
            done = self._answered if failure.kind == "timeout" else ()
            after = [mark if mark == "absent" else "waiting" for mark in state.ranks]
            for mark, ranks in (("done", done), ("failed", failure.ranks)):
                for rank in ranks:
                    after[rank] = mark
            self._set(status="failed", ranks=tuple(after), began=None)
        self.grew = True

    def rest(self) -> None:
        self._elapsed = self._since()
        self._began = None
        self.phase = ""

    @property
    def left(self) -> int:
        return len(self._phases) - self.done

    def words(self) -> str:
        following = f"next is {self._phases[self.done].phase}" if self.left else "all phases are done"
        if not self.done:
            return f"ranks are ready; {following}"
        done = self._phases[self.done - 1]
        return f"{placed(done)} is done ({self.done} of {len(self._phases)}); {following}"

    def seen(self) -> tuple[tuple[PhaseState, ...], RunProgress, tuple[tuple[int, str], ...]]:
        progress = RunProgress(self.done, len(self._phases), self._since(), self._time_left())
        return tuple(self._phases), progress, tuple(self._log)

    # -- called by the World ------------------------------------------------------------------------------------------

    def started(self, phase: str, ranks: Sequence[int]) -> None:
        self._answered = []
        self.phase = phase
        if self.left and self._phases[self.done].phase == phase:
            running = marks(len(self._phases[self.done].ranks), ranks, "running")
            self._set(status="running", ranks=running, began=time.monotonic())
        self._tell()

    def output(self, rank: int, text: str) -> None:
        self._log.extend((rank, line) for line in text.split("\n"))
        self._tell()

    def tick(self, answered: Sequence[int]) -> None:
        # Ranks also answer an interrupt, without having finished the phase.
        if list(answered) != self._answered and not self._interrupted:
            self._answered = list(answered)
            if self.left and self._phases[self.done].status == "running":
                before = self._phases[self.done].ranks
                after = tuple("done" if rank in self._answered else mark for rank, mark in enumerate(before))
                self._set(ranks=after)
        if self._stop.is_set() and not self._interrupted:
            self._interrupted = True  # ranks get extra time to stop, with further ticks
            if self._lab is not None and self._lab.started:  # record what silent ranks are doing
                with contextlib.suppress(KitError, OSError):
                    stacks = self._lab.world.stacks()
                    self.stacks = {rank: stack for rank, stack in stacks.items() if rank not in self._answered}
            raise KeyboardInterrupt(f"by hand, in phase {self.phase!r}")
        self._tell()

    def recorded(self, count: int) -> None:  # noqa: ARG002 - only the fact matters, not the count
        """Records have reached the run's folder during their phase."""
        self.grew = True

    def ended(self) -> None: ...

    # -- how -------------------------------------------------------------------------------------------------------------

    def _set(self, **changes: Any) -> None:
        self._phases[self.done] = self._phases[self.done]._replace(**changes)

    def _tell(self) -> None:
        moment = time.monotonic()
        if moment - self._flushed >= self._every_s:
            self._flushed = moment
            self._flush()

    def _since(self) -> float:
        return self._elapsed if self._began is None else time.monotonic() - self._began

    def _time_left(self) -> float | None:
        """Estimate the remaining time from what the same phases took earlier in this run; for new phases, from all others."""
        ahead = [state.phase for state in self._phases[self.done :]][: None if self._all else 1]
        if not ahead or self._began is None:
            return 0.0
        late = self.done > len(self._phases) / 2  # by then new phases resemble earlier ones
        if not self._took or not (late or any(name in self._took for name in ahead)):
            return None
        usual = statistics.median(seconds for all_of_it in self._took.values() for seconds in all_of_it)
        expected = [statistics.median(self._took[name]) if name in self._took else usual for name in ahead]
        state = self._phases[self.done]
        passed = 0.0 if state.began is None else time.monotonic() - state.began
        return max(0.0, expected[0] - passed) + sum(expected[1:])


def failure_of(error: BaseException, stacks: dict[int, str], phase: str, done: str) -> EndedBy:
    """An error as a panel shows it. Ranks that only waited for others are not blamed."""
    message, _, details = str(error).partition("\n")
    phase_name = getattr(error, "phase", phase)
    kind, ranks = "error", tuple[int, ...]()
    if isinstance(error, RankError):
        kind, ranks, details = "raised", () if error.victim else error.ranks, error.traceback
    elif isinstance(error, RankDied):
        kind, ranks = "died", (error.rank,) if error.rank >= 0 else ()
    elif isinstance(error, RankTimeout):
        kind, ranks, details = "timeout", error.culprits, stacks_by_rank(error.stacks)
    elif isinstance(error, KeyboardInterrupt):
        # Ranks that ignored the interrupt appear only in the detail, because ranks that waited for a hanging one cannot react either.
        kind, details = "stopped", joined_words(stacks_by_rank(stacks), message)
        message = f"stopped{f' in phase {phase!r}' if phase else ''}: {done}"
    elif not isinstance(error, KitError):
        message, details = f"{type(error).__name__}: {message}", "".join(traceback.format_exception(error))
    return EndedBy(kind, message, ranks, phase_name, joined_words(details, *getattr(error, "__notes__", ())))


def stacks_by_rank(stacks: dict[int, str]) -> str:
    return "\n".join(f"rank {rank}:\n{stack.rstrip()}" for rank, stack in sorted(stacks.items()))


def joined_words(*parts: str) -> str:
    return "\n".join(part.rstrip() for part in parts if part)


@contextlib.contextmanager
def told_on_terminal(things: str) -> Iterator[Callable[[int, int, int], None]]:
    """A bar for work that counts: what it yields is called with how many are done, of how many, and how many failed."""
    line, began, drew = progress_line(), time.monotonic(), 0.0

    def tell(done: int, total: int, failed: int) -> None:
        nonlocal drew
        now = time.monotonic()
        if now - began > AFTER_S and (now - drew > EVERY_S or done == total):
            drew = now
            line.draw(
                done / total,
                f"{done} of {total} {things}, {done / (now - began):.0f}/s{f', {failed} failed' if failed else ''}",
            )

    try:
        yield tell
    finally:
        line.clear()
