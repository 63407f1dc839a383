"""Where a lab is: every phase and every rank in one grid, a bar with words, the last message, a failure, and what ranks printed.

States have a sign and a word besides their colour. The grid is one piece of HTML, built anew a few times a second; the
traceback is another, so that it stays unfolded while the grid moves. Only phases near the one under way are shown of a long plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import ipywidgets as widgets

from kit.results.records import rank_name
from kit.results.units import duration
from kit.results.verdict import MARKS, headline
from kit.view.panel import look
from kit.view.panel.look import Tab
from kit.view.panel.model import PanelModel
from kit.view.panel.watch import Failure, PhaseState, Progress
from kit.view.progress import ranks_short

COLUMNS = 60  # a page lays out more only slowly
CELLS = 480  # what is sent a few times a second stays below 100 kB, with many ranks too
FEWEST = 8
LAST = 500  # lines that were printed; a page of many thousand lines is slow
ALL = "all ranks"
UNDER_WAY = {"starting", "running", "stopping"}
# A state of the panel, in words and with a sign.
STATES = {
    "idle": ("·", "faint", "not started"),
    "starting": ("▶", "busy", "starting ranks"),
    "ready": ("✓", "good", "ranks are ready"),
    "running": ("▶", "busy", "running"),
    "stopping": ("▶", "busy", "stopping"),
    "finished": ("✓", "good", "finished"),
    "stopped": ("■", "faint", "stopped"),
    "failed": ("✗", "bad", "failed"),
}

# What a failure's ranks did; without ranks, what became of the run.
ENDS = {
    "raised": "raised",
    "died": "died",
    "timeout": "did not answer in time",
    "stopped": "stopped",
    "error": "failed",
}

# What is folded under a failure.
FOLDS = {"raised": "traceback", "timeout": "what the ranks were doing", "stopped": "what the ranks were doing"}


class Strip:
    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.said = look.classed(widgets.HTML(), "kit-said")
        self.bar = widgets.HTML()
        self.grid = widgets.HTML()
        self.failure = widgets.HTML()
        self.scroll = look.classed(widgets.Box([self.grid]), "kit-scroll")
        self.widget = widgets.VBox([self.said, self.bar, self.scroll, self.failure])
        model.observe(self._draw, ["phases", "state", "progress"])
        model.observe(self._tell, ["said", "state", "verdict"])
        model.observe(self._fail, "failure")
        self._draw()
        self._tell()
        self._fail()

    def _draw(self, _: Any = None) -> None:
        model = self.model
        self.bar.value = bar_html(model.progress, model.phases, model.state)
        # The phase under way, with some of what was done before it.
        wide = columns(model.size)
        first = min(max(0, current(model.phases) - wide // 2), max(0, len(model.phases) - wide))
        # Held in place only while it moves, so that a reader of finished phases can scroll.
        held = model.state in {*UNDER_WAY, "ready"}
        (self.scroll.add_class if held else self.scroll.remove_class)("kit-follow")
        grid = grid_html(model.phases[first : first + wide], model.size, model.failure, model.roles)
        # After the end the verdict and the picture matter; where ranks broke, so does what each of them did.
        over = model.state == "finished" and bool(grid)
        self.grid.value = f"<details><summary>every phase on every rank</summary>{grid}</details>" if over else grid

    def _tell(self, _: Any = None) -> None:
        model = self.model
        sign, kind, word = STATES.get(model.state, ("·", "faint", model.state))
        state = f'<b class="kit-{kind}">{sign} {look.text(word)}</b>'
        said = "" if not model.said else f" {look.text(model.said.removeprefix(word).strip(': '))}"
        verdict = () if model.state in UNDER_WAY else model.verdict or ()
        if any(row.passed is not None for row in verdict):
            mark = MARKS[not any(row.passed is False for row in verdict)]
            answer = look.span(mark.kind, f"{mark.sign} {headline(verdict)}")
            line = (
                f"<b>{answer}</b> {look.span('faint', word)}{said}"
                if model.state == "finished"
                else f"{state}{said}; {answer}"
            )
        else:
            line = state + said + ("" if model.run is None or model.state in UNDER_WAY else "; nothing is judged yet")
        self.said.value = f'<div role="status" aria-live="polite">{line}</div>'

    def _fail(self, _: Any = None) -> None:
        self.failure.value = failure_html(self.model.failure)
        self._draw()


def columns(ranks: int) -> int:
    return min(COLUMNS, max(FEWEST, CELLS // max(1, ranks)))


def current(phases: Sequence[PhaseState]) -> int:
    """The place of the phase under way, else of the next one, else of the last."""
    for wanted in ("running", "failed", "next"):
        for index, phase in enumerate(phases):
            if phase.status == wanted:
                return index
    return max(0, len(phases) - 1) if phases and phases[0].status == "done" else 0


def grid_html(
    phases: Sequence[PhaseState], size: int, failure: Failure | None, roles: Mapping[int, str] | None = None
) -> str:
    """A row for each rank, a column for each phase; cycles above. Times are what was measured, or since when it runs."""
    if not phases:
        return ""
    now, here = time.monotonic(), current(phases)
    cycles = [(cycle, len(list(some))) for cycle, some in groupby(phases, key=lambda phase: phase.cycle)]
    above = "".join(
        f'<th class="kit-cycle" scope="colgroup" colspan="{wide}">{f"cycle {cycle}" if cycle else ""}</th>'
        for cycle, wide in cycles
    )
    heads = "".join(
        f'<th class="kit-phase{" kit-now" if index == here else ""}" scope="col">{look.text(phase.phase)}</th>'
        for index, phase in enumerate(phases)
    )
    culprits = set(failure.ranks) if failure else set()
    rows = []
    for rank in range(size):
        cells = "".join(_cell(phase, rank, now) for phase in phases)
        mark = ("✗ ", ' class="kit-culprit"') if rank in culprits else ("", "")
        rows.append(
            f'<tr{mark[1]}><th class="kit-rank" scope="row">{mark[0]}{look.text(rank_name(rank, roles or {}))}</th>{cells}</tr>'
        )
    return (
        '<table class="kit-strip" aria-label="phases and ranks">'
        f'<thead><tr><th class="kit-rank"></th>{above}</tr><tr><th class="kit-rank"></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(phase: PhaseState, rank: int, now: float) -> str:
    state = phase.ranks[rank] if rank < len(phase.ranks) else "waiting"
    seconds = phase.seconds[rank] if rank < len(phase.seconds) else None
    if seconds is None and state == "running" and phase.began is not None:
        seconds = max(0.0, now - phase.began)
    took = "" if seconds is None else duration(seconds)
    word = "no work in this phase" if state == "absent" else state
    title = look.text(f"{phase.phase}, cycle {phase.cycle}, rank {rank}: {' '.join(filter(None, [word, took]))}")
    small = f"<small>{took}</small>" if took else ""
    return f'<td class="kit-{state}" title="{title}">{look.SIGNS.get(state, "·")}{small}</td>'


def bar_html(progress: Progress | None, phases: Sequence[PhaseState], state: str) -> str:
    if progress is None or not progress.total:
        return ""
    words = progress_words(progress, phases, state)
    share = 100 * min(1.0, progress.done / progress.total)
    return (
        f'<div class="kit-bar" role="progressbar" aria-label="phases done" aria-valuemin="0" aria-valuemax="{progress.total}" '
        f'aria-valuenow="{progress.done}" aria-valuetext="{look.text(words)}"><div style="width:{share:.1f}%"></div></div>'
        f'<p class="kit-faint">{look.text(words)}</p>'
    )


def progress_words(progress: Progress, phases: Sequence[PhaseState], state: str) -> str:
    """phase 7 of 22 (train, cycle 2), 12 s, about 20 s left."""
    words = [f"{progress.done} of {progress.total} phases done"]
    if state == "running" and phases:
        phase = phases[current(phases)]
        name = f"{phase.phase}, cycle {phase.cycle}" if phase.cycle else phase.phase
        words = [f"phase {min(progress.done + 1, progress.total)} of {progress.total} ({name})"]
    if progress.elapsed > 0:
        words.append(duration(progress.elapsed))
    if state == "running" and progress.left is not None:
        words.append(f"about {duration(progress.left)} left")
    return ", ".join(words)


def failure_html(failure: Failure | None) -> str:
    """What went wrong and the ranks at fault, in red; its traceback or the ranks' stacks folded beneath. To be stopped is no failure."""
    if failure is None:
        return ""
    who = f"{'rank' if len(failure.ranks) == 1 else 'ranks'} {ranks_short(failure.ranks)}" if failure.ranks else ""
    words = " ".join(filter(None, [who, ENDS.get(failure.kind, failure.kind)]))
    where = f" in phase {failure.phase}" if failure.phase else ""
    more = look.folded(FOLDS.get(failure.kind, "more"), failure.detail) if failure.detail else ""
    if failure.kind == "stopped":  # the line above says so
        return f'<div class="kit-failure">{more}</div>' if more else ""
    head = failure.message.partition("\n")[0]
    return (
        f'<div class="kit-failure kit-bad" role="alert"><b>✗ {look.text(words + where)}</b>'
        f"<div>{look.text(head)}</div>{more}</div>"
    )


# -- what ranks printed --------------------------------------------------------------------------------------------------


class LogsTab(Tab):
    def __init__(self, model: PanelModel) -> None:
        super().__init__(model)
        narrow = {"description_width": "initial"}
        self.rank = look.control(
            widgets.Dropdown, "lines of", "which ranks' lines to show", options=[ALL], style=narrow
        )
        self.lines = widgets.HTML()
        self.widget = widgets.VBox([look.box(self.rank), self.lines])
        self.rank.observe(self._changed, "value")
        model.observe(self._changed, ["log", "failure"])
        model.observe(self._ranks, ["size", "roles"])
        self._ranks()

    def _ranks(self, _: Any = None) -> None:
        before = self.rank.value
        self.rank.options = [ALL, *(rank_name(rank, self.model.roles) for rank in range(self.model.size))]
        if before in self.rank.options:
            self.rank.value = before

    def _changed(self, _: Any = None) -> None:
        if self._visible:
            rank = None if self.rank.value == ALL else int(self.rank.value.split()[1])
            self.lines.value = log_html(self.model.log, self.model.failure, rank=rank)


def log_html(log: Sequence[tuple[int, str]], failure: Failure | None, *, rank: int | None) -> str:
    """The newest lines at the bottom, which is where the box stands when it is drawn."""
    wanted = [(of, line) for of, line in log if rank is None or of == rank]
    shown = wanted[-LAST:]
    rows = [f"{look.span('faint', f'[{of}]')} {look.text(line)}" for of, line in shown]
    if failure is not None and (rank is None or rank in failure.ranks or not failure.ranks):
        rows.append(look.span("bad", f"✗ {failure.kind}: {failure.message}"))
    if not rows:
        return '<p class="kit-faint">Nothing has been printed yet.</p>'
    count = f"{len(shown)} of {len(wanted)} lines" if len(shown) < len(wanted) else f"{len(wanted)} lines"
    count = count if wanted else "nothing was printed"
    body = "\n".join(rows)
    lines = f'<pre tabindex="0" role="log" aria-label="lines of ranks">{body}</pre>'
    return f'<p class="kit-faint">{count}</p><div class="kit-log">{lines}</div>'
