"""How a panel looks: one style sheet in JupyterLab's own colours, and the small pieces of HTML that its parts share.

Every colour is a variable of the theme with a fallback for another page, so that light and dark both fit. Nothing is fetched.
"""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from kit.draw import style
from kit.view.panel.model import PanelModel

GOOD, BAD, BUSY, FAINT = (style.CSS[kind] for kind in ("good", "bad", "busy", "open"))
LINE = "var(--jp-border-color2, #d0d7de)"

# ipywidgets' own arrow is black, which a dark page hides. Drawn here in a grey that both themes show.
ARROW = (
    "url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M4 7l5 5 5-5' fill='none' stroke='%23888' stroke-width='2'/%3E%3C/svg%3E\")"
)
# A state has a sign and a word besides its colour.
SIGNS = {"waiting": "·", "running": "▶", "done": "✓", "failed": "✗", "absent": ""}

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
.kit-busy {{ color: {BUSY}; }}
.kit-panel :focus-visible {{ outline: 2px solid {BUSY}; outline-offset: 1px; }}
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
.kit-strip th.kit-cycle {{ border-bottom: 1px solid {LINE}; text-align: center; }}
.kit-strip th.kit-rank {{ position: sticky; left: 0; z-index: 1; background: var(--jp-layout-color0, Canvas); }}
.kit-strip td {{ min-width: 38px; height: 32px; padding: 0 2px; text-align: center; line-height: 1.1; border-radius: 3px;
  border: 1px solid {LINE}; }}
.kit-strip td small {{ display: block; font-size: .78em; color: {FAINT}; }}
.kit-strip td.kit-done {{ color: {GOOD}; border-color: {GOOD}; }}
.kit-strip td.kit-running {{ color: {BUSY}; border: 2px solid {BUSY}; font-weight: bold; }}
.kit-strip td.kit-failed {{ color: {BAD}; border: 2px solid {BAD}; font-weight: bold; }}
.kit-strip tr.kit-culprit th.kit-rank {{ color: {BAD}; font-weight: bold; }}
.kit-bar {{ height: 8px; border-radius: 4px; overflow: hidden; background: var(--jp-border-color3, #e4e7eb); }}
.kit-bar > div {{ height: 100%; background: {BUSY}; }}
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


def box(*children: Any, names: Sequence[str] = ("kit-wrap",)) -> widgets.Box:
    """Things in a row that wraps where it is narrow."""
    return classed(widgets.Box(list(children)), *names)


def control(kind: Any, word: str, tip: str, *, width: str = "auto", **options: Any) -> Any:
    """A control with a word before or on it; `tip` says what it is for."""
    return kind(description=word, tooltip=tip, layout={"width": width}, **options)


def button(word: str, icon: str, tip: str, act: Callable[[], object], **options: Any) -> widgets.Button:
    made = control(widgets.Button, word, tip, icon=icon, **options)
    made.on_click(lambda _: act())
    return made


def text(value: object) -> str:
    return html.escape(str(value), quote=True)


def span(kind: str, value: object) -> str:
    """Words in one of the sheet's colours: faint, bad, good or busy."""
    return f'<span class="kit-{kind}">{text(value)}</span>'


def folded(summary: str, inside: str) -> str:
    return f"<details><summary>{text(summary)}</summary><pre>{text(inside)}</pre></details>"


def status(words: str, *, bad: bool = False) -> str:
    """What a tab did, or why it could not; a screen reader reads it aloud."""
    return f'<p role="status">{span("bad" if bad else "faint", words)}</p>' if words else ""


class Tab(ABC):
    """Draws only while it is looked at, and catches up when it is."""

    _visible = False

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.said = widgets.HTML()

    def _say(self, words: str, *, bad: bool = False) -> None:
        self.said.value = status(words, bad=bad)

    @property
    def visible(self) -> bool:
        return self._visible

    @visible.setter
    def visible(self, seen: bool) -> None:
        self._visible = seen
        self._changed()

    @abstractmethod
    def _changed(self, _: Any = None) -> None:
        """Show the present state, if the tab is visible."""
