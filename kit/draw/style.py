"""One look for every plot, light and dark. A plot has its own background, so the page behind it may be either.

Colours are Okabe and Ito's, which colour-blind people can tell apart; each also has a shape, a line or a word beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from kit.errors import BadInput
from kit.results.verdict import BAD, GOOD, MARKS

SVG: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "kit"}
FONT = {"font.family": "DejaVu Sans", "font.size": 9.0, "text.parse_math": False, **SVG}
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
HATCHES = ("", "//", "..", "xx")
COLOURS = 6  # in a theme's series
OPEN = -1  # a line style that follows from the place among others


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    paper: str
    ink: str
    faint: str
    grid: str
    shade: str
    good: str
    bad: str
    series: Sequence[str]

    def colour(self, index: int) -> str:
        return self.series[index % len(self.series)]

    def of(self, colour: int | str | None) -> str:
        """A colour by its number in the series or by its name."""
        return str(getattr(self, colour)) if isinstance(colour, str) else self.colour(colour or 0)

    def colours(self) -> list[str]:
        return [self.paper, self.ink, self.faint, self.grid, self.shade, self.good, self.bad, *self.series]

    def hatch(self, index: int) -> str:
        """Distinguishes series of the same colour when there are more series than colours."""
        return HATCHES[index // len(self.series) % len(HATCHES)]

    def answer(self, passed: bool | None) -> str:
        return {True: self.good, False: self.bad, None: self.faint}[passed]

    def rc(self) -> dict[Any, Any]:
        paper = ("figure.facecolor", "savefig.facecolor", "axes.facecolor")
        ink = ("axes.labelcolor", "axes.titlecolor", "legend.labelcolor", "text.color", "xtick.color", "ytick.color")
        off = ("axes.spines.top", "axes.spines.right", "axes.formatter.useoffset", "legend.frameon")
        return {
            **FONT,
            **dict.fromkeys(paper, self.paper),
            **dict.fromkeys(ink, self.ink),
            **dict.fromkeys(off, False),
            **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 8.5),
            "axes.edgecolor": self.faint,
            "axes.titlelocation": "left",
            "axes.titlesize": 10.0,
            "axes.titley": 1.0,  # else matplotlib measures every tick to place it
            "axes.titleweight": "bold",
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "hatch.color": self.paper,
        }


@dataclass(frozen=True, slots=True)
class Look:
    """How a part of a chart looks.

    `word` is its name in the legend; empty: the part's own. `colour` is a number in the theme's series or the name of one of the theme's
    colours; without one it is the part's place among the others, as are hatch and marker.
    """

    colour: int | str | None = None
    word: str = ""
    hatch: str = ""
    alpha: float = 1.0
    _: KW_ONLY
    marker: str | None = None  # "": a line without points
    line: int | None = OPEN  # number of a line style; None: points without a line
    size: float = 5.0  # of a marker
    hollow: bool = False
    outline: bool = False
    shape: Literal["box", "tick", "cross", "words"] = "box"  # in lanes; ticks and crosses are moments
    inside: bool = False  # words are written into the box, not above it
    listed: bool = True  # in the legend

    def face(self, theme: Theme) -> dict[str, Any]:
        """As a bar, an area or a box."""
        edge = (theme.faint, 0.6) if self.outline else (theme.paper, 0.0)
        look = {"facecolor": theme.of(self.colour), "hatch": self.hatch, "alpha": self.alpha}
        return {**look, "edgecolor": edge[0], "linewidth": edge[1]}

    def stroke(self, theme: Theme) -> dict[str, Any]:
        """As a line, a row of points, or both."""
        colour = theme.of(self.colour)
        line = "" if self.line is None else LINES[self.line % len(LINES)]
        look = {
            "color": colour,
            "marker": self.marker or "",
            "linestyle": line,
            "alpha": self.alpha,
            "markersize": self.size,
        }
        return {**look, "markerfacecolor": "none" if self.hollow else colour}


def looks_of(names: Iterable[str], looks: Mapping[str, Look]) -> dict[str, Look]:
    """The look of each part, complete: what a spec leaves open follows from the part's place among them."""
    complete = {}
    colours = itertools.count()  # of those that the spec leaves open
    for place, name in enumerate(dict.fromkeys(names)):
        look = looks.get(name, Look())
        marker = MARKERS[place % len(MARKERS)] if look.marker is None else look.marker
        line = 0 if look.line == OPEN else look.line
        if look.colour is None:
            colour = next(colours)
            hatch = look.hatch or HATCHES[colour // COLOURS % len(HATCHES)]
            look, line = replace(look, colour=colour, hatch=hatch), colour if look.line == OPEN else line
        complete[name] = replace(look, word=look.word or name, marker=marker, line=line)
    return complete


LIGHT = Theme(
    paper="#ffffff",
    ink="#1f2328",
    faint="#6e7781",
    grid="#e4e7eb",
    shade="#f4f6f8",
    good=GOOD,
    bad=BAD,
    series=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"),
)
DARK = Theme(
    paper="#161b22",
    ink="#e6edf3",
    faint="#8d96a0",
    grid="#2b323b",
    shade="#1d242d",
    good="#3fbf8f",
    bad="#ff8a4c",
    series=("#56b4e9", "#e69f00", "#2fc79b", "#cc79a7", "#f0e442", "#ff7f3f"),
)
# The same in a page.
CSS = {mark.kind: mark.css for mark in MARKS.values()} | {"busy": f"var(--jp-brand-color1, {LIGHT.series[0]})"}
THEMES = {"light": LIGHT, "dark": DARK}


def theme(name: str) -> Theme:
    if name not in THEMES:
        raise BadInput(f"theme must be one of {', '.join(THEMES)}, not {name!r}")
    return THEMES[name]
