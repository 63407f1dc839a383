"""The look of a panel: one style sheet in JupyterLab's colours, small pieces of HTML, and the strip of phases and ranks.

Every colour is a theme variable with a fallback, so light and dark pages both work. Nothing is fetched.

The strip shows a lab's progress: a grid of phases and ranks, a bar with text, the last message, a failure. States have a
sign and a word besides their colour. The grid is one piece of HTML, rebuilt a few times per second; the traceback is another
one, so it stays unfolded while the grid changes. Of a long plan, only phases near the current one are shown.
"""

from __future__ import annotations

import html
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import ipywidgets as widgets

from kit.draw import style
from kit.errors import KitError
from kit.results.records import rank_name
from kit.results.run import Run, run_name
from kit.results.units import duration
from kit.results.verdict import MARKS, Verdict, headline
from kit.view.model import BUSY, PanelModel
from kit.view.progress import EndedBy, PhaseState, RunProgress, placed, ranks_short

Result = TypeVar("Result")

GOOD, BAD, ACTIVE, FAINT = (style.CSS[kind] for kind in ("good", "bad", "busy", "open"))
LINE = "var(--jp-border-color2, #d0d7de)"

# The arrow of ipywidgets is black and invisible on a dark page; this grey is visible in both themes.
ARROW = (
    "url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M4 7l5 5 5-5' fill='none' stroke='%23888' stroke-width='2'/%3E%3C/svg%3E\")"
)
# A state has a sign and a word besides its colour.
MARK_SIGNS = {"waiting": "·", "running": "▶", "done": "✓", "failed": "✗", "absent": ""}

CSS = f"""
.kit-panel {{ color: var(--jp-ui-font-color1, inherit); max-width: 100%; }}
.kit-panel .widget-dropdown > select {{ background-image: {ARROW}; }}
.kit-panel .widget-html-content {{ line-height: 1.45; white-space: normal; }}
.kit-panel .widget-html {{ height: auto; min-width: 0; }}
.kit-panel .widget-inline-hbox {{ max-width: calc(100% - 4px); }}
.kit-panel h3 {{ margin: 0; font-size: 1.15em; }}
.kit-panel p {{ margin: 0; }}
.kit-panel .jupyter-widgets-disconnected::before, .kit-panel.jupyter-widgets-disconnected::before {{ display: none; }}
.kit-panel button.jupyter-widgets-disconnected {{ pointer-events: none; opacity: .5; }}
.kit-panel:not(.jupyter-widgets-disconnected) .kit-gone {{ display: none; }}
.kit-faint, .kit-open {{ color: {FAINT}; }}
.kit-bad {{ color: {BAD}; }}
.kit-good {{ color: {GOOD}; }}
.kit-busy {{ color: {ACTIVE}; }}
.kit-panel :focus-visible {{ outline: 2px solid {ACTIVE}; outline-offset: 1px; }}
.kit-fields {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(350px, 100%), 1fr)); gap: 2px 18px; }}
.kit-fields > * {{ width: auto; min-width: 0; }}
.kit-wrong {{ outline: 2px solid {BAD}; outline-offset: 1px; border-radius: 3px; }}
.kit-number {{ flex-flow: row nowrap; }}
.kit-wrap {{ display: flex; flex-flow: row wrap; gap: 4px 8px; align-items: center; }}
.kit-scroll {{ overflow-x: auto; max-width: 100%; }}
.kit-scroll.kit-follow {{ scroll-snap-type: x mandatory; }}
.kit-follow .kit-now {{ scroll-snap-align: center; }}
.kit-strip {{ border-collapse: separate; border-spacing: 2px; font-variant-numeric: tabular-nums; }}
.kit-strip th {{ font-weight: normal; color: {FAINT}; text-align: left; padding: 0 4px; white-space: nowrap; }}
.kit-strip th.kit-phase {{ writing-mode: vertical-rl; transform: rotate(180deg); padding: 4px 0; max-height: 11em; }}
.kit-strip th.kit-cycle {{ border-bottom: 1px solid {LINE}; text-align: center; vertical-align: bottom; white-space: normal; }}
.kit-strip th.kit-rank {{ position: sticky; left: 0; z-index: 1; background: var(--jp-layout-color0, Canvas); }}
.kit-strip td {{ min-width: 38px; height: 32px; padding: 0 2px; text-align: center; line-height: 1.1; border-radius: 3px;
  border: 1px solid {LINE}; }}
.kit-strip td small {{ display: block; font-size: .78em; color: {FAINT}; }}
.kit-strip td.kit-done {{ color: {GOOD}; border-color: {GOOD}; }}
.kit-strip td.kit-running {{ color: {ACTIVE}; border: 2px solid {ACTIVE}; font-weight: bold; }}
.kit-strip td.kit-failed {{ color: {BAD}; border: 2px solid {BAD}; font-weight: bold; }}
.kit-strip tr.kit-culprit th.kit-rank {{ color: {BAD}; font-weight: bold; }}
.kit-bar {{ height: 8px; border-radius: 4px; overflow: hidden; background: var(--jp-border-color3, #e4e7eb); }}
.kit-bar > div {{ height: 100%; background: {ACTIVE}; }}
.kit-failure {{ border-left: 4px solid currentColor; padding: 4px 10px; overflow-wrap: anywhere; }}
.kit-failure > div, .kit-failure > details {{ color: var(--jp-ui-font-color1, inherit); }}
.kit-panel .kit-line {{ width: 100%; text-align: left; overflow: hidden; text-overflow: ellipsis; background: none; }}
.kit-panel details > summary {{ cursor: pointer; color: {FAINT}; }}
.kit-panel details[open] > summary {{ margin-bottom: 4px; }}
.kit-panel pre {{ margin: 0; padding: 6px 8px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .92em;
  line-height: 1.35; color: inherit; background: var(--jp-layout-color2, transparent); border-radius: 3px; }}
.kit-log {{ display: flex; flex-direction: column-reverse; max-height: 26em; overflow-y: auto; }}
.kit-check {{ display: flex; flex-flow: row wrap; gap: 2px 14px; align-items: flex-start; padding: 5px 2px;
  border-bottom: 1px solid {LINE}; }}
.kit-check > .widget-html {{ flex: 1 1 300px; }}
.kit-check > .widget-box {{ flex: 0 1 auto; }}
.kit-panel .widget-tab > .widget-tab-contents, .kit-panel .jupyter-widget-TabPanel-tabContents {{ padding: 8px 6px; overflow: auto; }}
"""


def sheet(css: str = CSS) -> widgets.HTML:
    return widgets.HTML(f"<style>{css}</style>", layout={"display": "none"})


def classed(widget: Any, *names: str) -> Any:
    for name in names:
        widget.add_class(name)
    return widget


def flex_box(*children: Any, names: Sequence[str] = ("kit-wrap",)) -> widgets.Box:
    """A row that wraps if it is too narrow."""
    return classed(widgets.Box(list(children)), *names)


def labelled_control(kind: Any, word: str, tip: str, *, width: str = "auto", **options: Any) -> Any:
    """A control with a label; `tip` explains it."""
    return kind(description=word, tooltip=tip, layout={"width": width}, **options)


def button(word: str, icon: str, tip: str, act: Callable[[], object], **options: Any) -> widgets.Button:
    made = labelled_control(widgets.Button, word, tip, icon=icon, **options)
    made.on_click(lambda _: act())
    return made


def text(value: object) -> str:
    return html.escape(str(value), quote=True)


def span_html(kind: str, value: object) -> str:
    """Words in one of the sheet's colours: faint, bad, good or busy."""
    return f'<span class="kit-{kind}">{text(value)}</span>'


def folded_html(summary: str, inside: str) -> str:
    return f"<details><summary>{text(summary)}</summary><pre>{text(inside)}</pre></details>"


def status_html(words: str, *, bad: bool = False) -> str:
    """The result of a tab's action, or why it failed; announced by screen readers."""
    return f'<p role="status">{span_html("bad" if bad else "faint", words)}</p>' if words else ""


class Tab(ABC):
    """Draws only while it is visible, and catches up when it becomes visible."""

    _visible = False

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.notice = widgets.HTML()

    def _say(self, words: str, *, bad: bool = False) -> None:
        self.notice.value = status_html(words, bad=bad)

    def _attempt(self, act: Callable[[], Result]) -> Result | None:
        """What a user's action returns; None if it failed, and the notice says why."""
        try:
            return act()
        except (KitError, OSError) as error:
            self._say(str(error), bad=True)
            return None

    def _written(self, write: Callable[[], Path]) -> Path | None:
        path = self._attempt(write)
        if path is not None:
            self._say(f"written: {path}")
        return path

    @property
    def visible(self) -> bool:
        return self._visible

    @visible.setter
    def visible(self, seen: bool) -> None:
        self._visible = seen
        self._changed()

    @abstractmethod
    def _changed(self, _: Any = None) -> None:
        """Show the current state if the tab is visible."""


# -- the strip ---------------------------------------------------------------------------------------------------------

COLUMNS = 60  # more columns make page layout slow
CELLS = 480  # keeps each update below 100 kB, with many ranks too
FEWEST = 8
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

# What the ranks did or how the run ended, for failure kinds that do not show it.
ENDS = {"timeout": "did not answer in time", "error": "failed", "refused": "not started"}

# The title of the details under a failure.
FOLDS = {"raised": "traceback", "timeout": "what the ranks were doing", "stopped": "what the ranks were doing"}


class Strip:
    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.notice = classed(widgets.HTML(), "kit-notice")
        self.bar = widgets.HTML()
        self.grid = widgets.HTML()
        self.failure = widgets.HTML()
        self.scroll = classed(widgets.Box([self.grid]), "kit-scroll")
        self.widget = widgets.VBox([self.notice, self.bar, self.failure, self.scroll])
        model.observe(self._draw, ["phases", "state", "progress", "run"])
        model.observe(self._tell, ["notice", "state", "verdict", "run", "trouble"])
        model.observe(self._fail, "failure")
        self._draw()
        self._tell()
        self._fail()

    def _draw(self, _: Any = None) -> None:
        model = self.model
        self.bar.value = progress_bar_html(model.progress, model.phases, model.state)
        # The current phase, with some of the phases before it.
        wide = phase_columns(model.size)
        first = min(max(0, current_phase(model.phases) - wide // 2), max(0, len(model.phases) - wide))
        # Scrolling is fixed only while phases run, so a reader can scroll finished ones.
        held = model.state in {*BUSY, "ready"}
        (self.scroll.add_class if held else self.scroll.remove_class)("kit-follow")
        grid = grid_html(model.phases[first : first + wide], model.size, model.failure, model.roles)
        # Beside a verdict, its run and its picture matter; if ranks broke, the state of each one matters too.
        of = {"finished": "every phase on every rank", "idle": "every phase of the next run"}.get(model.state)
        if of and grid and model.run is not None:
            grid = f"<details><summary>{of}</summary>{grid}</details>"
        self.grid.value = grid

    def _tell(self, _: Any = None) -> None:
        """What the ranks do or how they ended, then which run is shown, with its verdict."""
        model = self.model
        sign, kind, word = STATES.get(model.state, ("·", "faint", model.state))
        notice = "" if not model.notice else f" {text(model.notice.removeprefix(word).strip(': '))}"
        state = f'<b class="kit-{kind}">{sign} {text(word)}</b>{notice}'
        lines = [state] if notice or model.state != "finished" else []  # the line of the run says that it finished
        if model.run is not None and (model.live or model.state not in BUSY):
            lines.append(run_line_html(model.run, None if model.state in BUSY else model.verdict))
        lines += [span_html("bad", model.trouble)] if model.trouble else []
        held = "".join(f"<div>{line}</div>" for line in lines)
        self.notice.value = f'<div role="status" aria-live="polite">{held}</div>'

    def _fail(self, _: Any = None) -> None:
        self.failure.value = failure_html(self.model.failure)
        self._draw()


def run_line_html(run: Run, verdict: Verdict | None) -> str:
    """The verdict beside the run that it is about: "✓ all 9 checks pass · smoke-20261121-101500-ab12 · finished · fault leaked-group"."""
    about = [text(run_name(run.dir)), text(run.status), *([text(f"fault {run.fault}")] if run.fault else [])]
    if verdict is None or not any(row.passed is not None for row in verdict):
        over = verdict is not None and run.status == "finished"
        answer = "nothing was measured" if over else "nothing is judged yet"
    else:
        mark = MARKS[verdict.answer]
        so_far = " so far" if verdict.ended else ""
        answer = f"<b>{span_html(mark.kind, f'{mark.sign} {headline(verdict)}{so_far}')}</b>"
    return " · ".join([answer, *about])


def phase_columns(ranks: int) -> int:
    return min(COLUMNS, max(FEWEST, CELLS // max(1, ranks)))


def current_phase(phases: Sequence[PhaseState]) -> int:
    """The index of the current phase, else of the next one, else of the last one."""
    for wanted in ("running", "failed", "next"):
        for index, phase in enumerate(phases):
            if phase.status == wanted:
                return index
    return max(0, len(phases) - 1) if phases and phases[0].status == "done" else 0


def grid_html(
    phases: Sequence[PhaseState], size: int, failure: EndedBy | None, roles: Mapping[int, str] | None = None
) -> str:
    """One row per rank, one column per phase, what each cycle is above. Times are measured, or elapsed for a running phase."""
    if not phases:
        return ""
    moment, at = time.monotonic(), current_phase(phases)
    places = [(place, len(list(steps))) for place, steps in groupby(phases, key=lambda phase: phase.place)]
    above = "".join(
        f'<th class="kit-cycle" scope="colgroup" colspan="{wide}">{text(place)}</th>' for place, wide in places
    )
    heads = "".join(
        f'<th class="kit-phase{" kit-now" if index == at else ""}" scope="col">{text(phase.phase)}</th>'
        for index, phase in enumerate(phases)
    )
    culprits = set(failure.ranks) if failure else set()
    rows = []
    for rank in range(size):
        cells = "".join(phase_cell(phase, rank, moment) for phase in phases)
        mark = ("✗ ", ' class="kit-culprit"') if rank in culprits else ("", "")
        rows.append(
            f'<tr{mark[1]}><th class="kit-rank" scope="row">{mark[0]}{text(rank_name(rank, roles or {}))}</th>{cells}</tr>'
        )
    return (
        '<table class="kit-strip" aria-label="phases and ranks">'
        f'<thead><tr><th class="kit-rank"></th>{above}</tr><tr><th class="kit-rank"></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def phase_cell(phase: PhaseState, rank: int, now: float) -> str:
    state = phase.ranks[rank] if rank < len(phase.ranks) else "waiting"
    seconds = phase.seconds[rank] if rank < len(phase.seconds) else None
    if seconds is None and state == "running" and phase.began is not None:
        seconds = max(0.0, now - phase.began)
    took = "" if seconds is None else duration(seconds)
    word = "no work in this phase" if state == "absent" else state
    title = text(f"{placed(phase)}, rank {rank}: {' '.join(filter(None, [word, took]))}")
    small = f"<small>{took}</small>" if took else ""
    return f'<td class="kit-{state}" title="{title}">{MARK_SIGNS.get(state, "·")}{small}</td>'


def progress_bar_html(progress: RunProgress | None, phases: Sequence[PhaseState], state: str) -> str:
    if progress is None or not progress.total or state == "idle":
        return ""
    words = progress_words(progress, phases, state)
    share = 100 * min(1.0, progress.done / progress.total)
    return (
        f'<div class="kit-bar" role="progressbar" aria-label="phases done" aria-valuemin="0" aria-valuemax="{progress.total}" '
        f'aria-valuenow="{progress.done}" aria-valuetext="{text(words)}"><div style="width:{share:.1f}%"></div></div>'
        f'<p class="kit-faint">{text(words)}</p>'
    )


def progress_words(progress: RunProgress, phases: Sequence[PhaseState], state: str) -> str:
    """phase 7 of 22 (train, cycle 2), 12 s, about 20 s left."""
    words = [f"{progress.done} of {progress.total} phases done"]
    if state == "running" and phases:
        phase = phases[current_phase(phases)]
        words = [f"phase {min(progress.done + 1, progress.total)} of {progress.total} ({placed(phase)})"]
    if progress.elapsed > 0:
        words.append(duration(progress.elapsed))
    if state == "running" and progress.left is not None:
        words.append(f"about {duration(progress.left)} left")
    return ", ".join(words)


def failure_html(failure: EndedBy | None) -> str:
    """The failure and the ranks at fault, in red, with the traceback or the ranks' stacks folded below. Stopping is not a failure."""
    if failure is None:
        return ""
    who = f"{'rank' if len(failure.ranks) == 1 else 'ranks'} {ranks_short(failure.ranks)}" if failure.ranks else ""
    words = " ".join(filter(None, [who, ENDS.get(failure.kind, failure.kind)]))
    place = f" in phase {failure.phase}" if failure.phase else ""
    details = folded_html(FOLDS.get(failure.kind, "more"), failure.detail) if failure.detail else ""
    if failure.kind == "stopped":  # the line above shows it
        return f'<div class="kit-failure">{details}</div>' if details else ""
    head = failure.message.partition("\n")[0]
    return (
        f'<div class="kit-failure kit-bad" role="alert"><b>✗ {text(words + place)}</b>'
        f"<div>{text(head)}</div>{details}</div>"
    )
