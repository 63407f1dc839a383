"""One look for every plot, light and dark. A plot has its own background, so the page behind it may be either.

Colours are Okabe and Ito's, which colour-blind people can tell apart; each also has a shape, a line or a word beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.errors import BadInput
from kit.results.verdict import BAD, GOOD, MARKS

SVG: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "kit"}
FONT = {"font.family": "DejaVu Sans", "font.size": 9.0, "text.parse_math": False, **SVG}
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
HATCHES = ("", "//", "..", "xx")


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
            "axes.titleweight": "bold",
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "hatch.color": self.paper,
        }


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
