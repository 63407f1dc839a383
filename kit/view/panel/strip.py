"""Where a lab is: every phase and every rank in one grid, a bar with words, the last message, a failure, what ranks printed; its verdict.

States have a sign and a word besides their colour. The grid is one piece of HTML, built anew a few times a second; the
traceback is another, so that it stays unfolded while the grid moves. Only phases near the one under way are shown of a long plan.

The verdict comes worst first, each limit's slider beside it: moving one judges the stored records again. Checks that share a tolerance
share its slider. Rows keep their places while a limit is moved, so that none runs away from under the mouse; the next run sorts them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import ipywidgets as widgets

from kit.errors import KitError
from kit.results import VerdictRow
from kit.results.records import rank_name
from kit.results.units import amount, duration
from kit.results.verdict import MARKS, SIGNS, headline, tally, without_parts
from kit.view.panel import look
from kit.view.panel.look import Tab
from kit.view.panel.model import BUSY, Limit, PanelModel
from kit.view.progress import Failure, PhaseState, RunProgress, ranks_short

COLUMNS = 60  # a page lays out more only slowly
CELLS = 480  # what is sent a few times a second stays below 100 kB, with many ranks too
FEWEST = 8
LAST = 500  # lines that were printed; a page of many thousand lines is slow
ALL = "all ranks"
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

# What a failure's ranks did, or what became of the run, where the kind of failure does not say it.
ENDS = {"timeout": "did not answer in time", "error": "failed"}

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
        held = model.state in {*BUSY, "ready"}
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
        verdict = () if model.state in BUSY else model.verdict or ()
        if any(row.passed is not None for row in verdict):
            mark = MARKS[not any(row.passed is False for row in verdict)]
            answer = look.span(mark.kind, f"{mark.sign} {headline(verdict)}")
            done = model.state == "finished"
            line = f"<b>{answer}</b> {look.span('faint', word)}{said}" if done else f"{state}{said}; {answer}"
        else:
            line = state + said + ("" if model.run is None or model.state in BUSY else "; nothing is judged yet")
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


def bar_html(progress: RunProgress | None, phases: Sequence[PhaseState], state: str) -> str:
    if progress is None or not progress.total:
        return ""
    words = progress_words(progress, phases, state)
    share = 100 * min(1.0, progress.done / progress.total)
    return (
        f'<div class="kit-bar" role="progressbar" aria-label="phases done" aria-valuemin="0" aria-valuemax="{progress.total}" '
        f'aria-valuenow="{progress.done}" aria-valuetext="{look.text(words)}"><div style="width:{share:.1f}%"></div></div>'
        f'<p class="kit-faint">{look.text(words)}</p>'
    )


def progress_words(progress: RunProgress, phases: Sequence[PhaseState], state: str) -> str:
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


# -- the verdict, and the sliders of its limits --------------------------------------------------------------------------

ORDER = list(MARKS)
PLACES = 400
DECADE = 20  # places to a power of ten, which itself is one of them
FEW = 6  # rows of a check of many answers that are written out
FILE = "tolerances.json"


class LimitRow:
    """The checks of one tolerance, and the slider and the exact number that move it."""

    def __init__(self, model: PanelModel, limit: Limit) -> None:
        self.model, self.limit = model, limit
        self._taking = False
        self.html = widgets.HTML()
        self.slider: Any = None
        self.exact: Any = None
        parts: list[Any] = [self.html]
        if limit.better != "==":
            # The label is the keyword that moves the limit elsewhere too: run.verdict(drift_mib=50), kit run --tolerances.
            self.exact = widgets.FloatText(
                value=limit.default,
                step=None,
                description=limit.tolerance,
                tooltip=f"{limit.question} The limit, exactly",
                continuous_update=False,
                style={"description_width": "9em"},
                layout={"width": "212px"},
            )
            self.slider = widgets.IntSlider(readout=False, tooltip=self.exact.tooltip, layout={"width": "120px"})
            parts.append(look.box(self.exact, self.slider))
            self.slider.observe(self._moved, "value")
            self.exact.observe(self._moved, "value")
        self.widget = look.box(*parts, names=("kit-check",))
        self.aim(limit)

    def aim(self, limit: Limit) -> None:
        """Another run's limit: its default and the ends of its slider."""
        self.limit = limit
        counts = limit.unit == "1" and all(float(end).is_integer() for end in (limit.low, limit.high))
        self.scale = scale(limit.low, limit.high, whole=counts)
        if self.slider is not None:
            self._taking = True
            self.slider.max = len(self.scale) - 1
            self._taking = False

    def _moved(self, change: Any) -> None:
        if not self._taking and math.isfinite(change["new"]):
            value = self.scale[change["new"]] if change["owner"] is self.slider else change["new"]
            self.model.move(self.limit.tolerance, value)

    def show(self, rows: Sequence[VerdictRow]) -> None:
        moved = self.model.tolerances.get(self.limit.tolerance)
        value = self.limit.default if moved is None else moved
        self.html.value = check_html(self.limit, rows, moved=moved is not None)
        if self.slider is None:
            return
        self._taking = True
        try:
            if self.exact.value != value:
                self.exact.value = value
            self.slider.value = nearest(self.scale, value)
        finally:
            self._taking = False


class VerdictTab(Tab):
    """Observes the verdict and the tolerances. Its rows, nearly half of a panel's widgets, are made when it is first looked at."""

    def __init__(self, model: PanelModel, *, visible: bool = True) -> None:
        super().__init__(model)
        self._visible = self._made = visible
        self.rows: dict[str, LimitRow] = {}
        self.head = widgets.HTML()
        wide, named = {"description_width": "initial"}, "a named set of limits"
        sets = [("choose...", ""), *zip(model.presets, model.presets, strict=True)]
        self.preset = look.control(widgets.Dropdown, "tolerances", named, options=sets, style=wide)
        file = "a JSON file of tolerances, which kit run --tolerances takes too"
        self.path = look.control(widgets.Text, "file", file, value=FILE, style=wide)
        self.path.layout = widgets.Layout(width="auto", flex="1 1 160px", max_width="360px")
        written = "write the moved tolerances to the file"
        self.save = look.button("Save", "download", written, lambda: self._file(save=True))
        self.load = look.button("Load", "upload", "take the tolerances of the file", lambda: self._file(save=False))
        self.body = widgets.VBox()
        controls = look.box(self.preset, self.path, self.save, self.load)
        self.widget = widgets.VBox([self.head, controls, self.said, self.body])
        self.preset.observe(self._preset, "value")
        model.observe(self._show, ["verdict", "tolerances"])
        model.observe(self._order, ["run", "state"])
        self._order()

    def _changed(self, _: Any = None) -> None:
        if self._visible and not self._made:  # from then on hidden rows follow too, which is cheap
            self._made = True
            self._order()

    def _preset(self, change: Any) -> None:
        if change["new"]:
            self.model.take(self.model.presets[change["new"]])
            self._say(f"{len(self.model.tolerances)} limits differ from the lab's own")

    def _file(self, *, save: bool) -> None:
        path = self.path.value.strip() or FILE
        try:
            if save:
                self._say(f"saved {len(self.model.tolerances)} tolerances to {self.model.save_tolerances(path)}")
            else:
                self.model.load_tolerances(path)
                self._say(f"took {len(self.model.tolerances)} tolerances from {path}")
        except (KitError, OSError) as error:
            self._say(str(error), bad=True)

    def _order(self, _: Any = None) -> None:
        """The worst first. Limits and the ends of sliders hang on the run, and stay where they are while it does."""
        limits = self.model.limits if self._made else []
        for limit in limits:
            if limit.tolerance not in self.rows:  # of a check that is asked of some runs only
                self.rows[limit.tolerance] = LimitRow(self.model, limit)
            elif self.rows[limit.tolerance].limit != limit:
                self.rows[limit.tolerance].aim(limit)
        asked = [self.rows[limit.tolerance] for limit in limits]
        ordered = sorted(
            asked, key=lambda row: min((ORDER.index(one.passed) for one in self._answers(row.limit)), default=1)
        )
        children = tuple(row.widget for row in ordered)
        if self.body.children != children:
            self.body.children = children
        self._show()

    def _answers(self, limit: Limit) -> list[VerdictRow]:
        verdict = self.model.verdict or ()
        return [row for row in verdict if row.check.partition("/")[0] in limit.checks]

    def _show(self, change: Any = None) -> None:
        if change is not None and change["name"] == "verdict" and change["old"] is None:
            self._order()
            return
        self.head.value = head_html(self.model.verdict)
        for row in self.rows.values():
            row.show(self._answers(row.limit))
        if self.preset.value and self.model.tolerances != self.model.presets[self.preset.value]:
            self.preset.value = ""


def head_html(verdict: Any) -> str:
    if verdict is None or not len(verdict):
        return '<p class="kit-faint">Not judged yet: run the lab to its end.</p>'
    mark = MARKS[not any(row.passed is False for row in verdict)]
    return f"<div role='status' aria-live='polite'>{look.span(mark.kind, f'{mark.sign} {tally(verdict)}')}</div>"


def check_html(limit: Limit, rows: Sequence[VerdictRow], *, moved: bool) -> str:
    """A check's answer; of one with many answers the failed ones too, the worst few."""
    heads = without_parts(rows)
    held = f"limit {SIGNS[limit.better]} {amount(limit.default, limit.unit)}"
    parts = [look.span("faint", f"{name}: not judged yet, {held}") for name in limit.checks if not rows]
    for row in heads:
        below = [one for one in rows if one.check.startswith(f"{row.check}/")]
        failed = [one for one in below if one.passed is False]
        parts.append(row_html(limit, row, moved=moved))
        parts += [f"&emsp;{row_html(limit, one, moved=False, brief=True)}" for one in failed[:FEW]]
        if below:
            left = len(failed) - FEW
            parts.append(look.span("faint", f"{len(below)} answers" + (f", {left} more fail" if left > 0 else "")))
    asked = look.span("faint", limit.question)
    return "".join(f"<div>{part}</div>" for part in [*parts, asked])


def row_html(limit: Limit, row: VerdictRow, *, moved: bool, brief: bool = False) -> str:
    mark = MARKS[row.passed]
    measured = "" if row.measured is None else amount(row.measured, row.unit)
    held = f"{measured} {SIGNS[limit.better]} {amount(row.limit, row.unit)}" if measured else ""
    if row.passed is False:
        held = f"{measured}, limit {SIGNS[limit.better]} {amount(row.limit, row.unit)}"
    lab = look.span("busy", f" (lab: {amount(limit.default, limit.unit)})") if moved else ""
    name = row.check.partition("/")[2] if brief else row.check
    why = look.span("faint", row.why) if row.why else ""
    return f'<b class="kit-{mark.kind}">{mark}</b> <b>{look.text(name)}</b> {look.text(held)}{lab} {why}'


# -- sliders ------------------------------------------------------------------------------------------------------------
# A browser rounds a slider's number to its steps and sends it back at once, as if a person had moved it: a limit of 1e-06 would
# come back as 9.83e-07. So a slider has whole numbers only, places on a scale; the exact number is in the field beside it.


def scale(low: float, high: float, *, whole: bool = False) -> list[float]:
    """The number at each place: powers where the range spans them, each number where they are few and whole, else even steps."""
    if whole and high - low <= PLACES:
        return [low + place for place in range(round(high - low) + 1)]
    if low > 0 and high / low >= 100:
        steps = math.floor(DECADE * math.log10(high / low) + 1e-9)
        inner = [float(f"{low * 10 ** (place / DECADE):.3g}") for place in range(1, steps)]
    else:
        inner = [float(f"{low + (high - low) * place / PLACES:.4g}") for place in range(1, PLACES)]
    return sorted({low, *inner, high})


def nearest(numbers: Sequence[float], value: float) -> int:
    """The place of the number that is nearest; a value beyond the ends is shown at the end."""
    inside = min(max(value, numbers[0]), numbers[-1])
    return min(range(len(numbers)), key=lambda place: abs(numbers[place] - inside))
