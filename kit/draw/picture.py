"""A picture: what a notebook shows by itself, a file keeps, and a page takes as SVG in its own colours."""

from __future__ import annotations

import base64
import html
import io
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from kit.draw.chart import ChartScene, Plot
from kit.draw.style import DARK, LIGHT, SVG, Theme
from kit.errors import BadInput
from kit.results import Verdict

FORMATS = (".png", ".svg", ".pdf")
WIDTH = 11.0  # inches
DARK_PAGE = 'body[data-jp-theme-light="false"] .kit-picture, body.vscode-dark .kit-picture'
COLOURED = re.compile(r"#[0-9a-f]{6}\b")


class Picture(Figure):
    """A figure that a notebook shows by itself, whatever its matplotlib settings."""

    def __init__(self, height: float = 1.2, *, width: float = WIDTH) -> None:
        super().__init__(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def _repr_html_(self) -> str | None:
        """In the colours of the notebook's page. The dark theme is never the default, so such a picture stays dark."""
        if to_hex(self.get_facecolor()) != LIGHT.paper:
            return None
        untrusted = '<p class="kit-untrusted">The picture is shown once the notebook is trusted.</p>'
        return f"<style>{SHEET}</style>{inline(self, self.get_suptitle() or 'Picture')}{untrusted}"

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        if path.suffix not in FORMATS:
            raise BadInput(f"a picture is saved as {', '.join(FORMATS)}, not {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = {"Date": None} if path.suffix == ".svg" else None  # the same run makes the same file
        with mpl.rc_context(SVG):
            self.settle()
            self.savefig(path, dpi=110, metadata=stamp)
        return path

    def settle(self) -> None:
        """Lay out once and round: the solver's last digits differ from time to time, and names in the file with them."""
        engine = self.get_layout_engine()
        if engine is not None and self.axes:
            engine.execute(self)
        self.set_layout_engine("none")
        parts = list(self.subfigs)
        while parts:
            part = parts.pop()
            place = part.bbox_relative
            place.p0, place.p1 = np.round(place.p0, 5), np.round(place.p1, 5)
            parts += part.subfigs
        for axes in self.axes:
            x, y, width, height = axes.get_position(original=True).bounds
            axes.set_position((round(x, 5), round(y, 5), round(width, 5), round(height, 5)))

    def lay_out_as(self, like: Picture) -> None:
        """Put the axes where the other picture has them, if it has the same size and parts."""
        pairs = list(zip(self.axes, like.axes, strict=False))
        if len(self.axes) != len(like.axes) or tuple(self.get_size_inches()) != tuple(like.get_size_inches()):
            return
        self.set_layout_engine("none")
        for axes, other in pairs:
            axes.set_position(other.get_position(original=True))


def paint(
    rows: Sequence[Sequence[Plot]], heading: str, theme: Theme, data: Any = None, verdict: Verdict | None = None
) -> Picture:
    """Rows of plots in one picture. Each plot has its own part, so that long names in one do not narrow the others."""
    verdict = Verdict() if verdict is None else verdict
    with mpl.rc_context(theme.rc()):
        heights = [max(plot.height(data, verdict) for plot in row) for row in rows]
        picture = Picture(sum(heights) + 0.35 + 0.2 * heading.count("\n"))
        for figures, row in zip(split_figure(picture, len(rows), height_ratios=heights), rows, strict=True):
            for figure, plot in zip(split_figure(figures, 1, len(row)), row, strict=True):
                plot.paint(ChartScene(data, verdict, theme, figure))
        is_one = len(rows) == len(rows[0]) == 1
        picture.suptitle(heading, x=0.01, ha="left", fontsize=9 if is_one else 11.5, color=theme.ink)
    return picture


def split_figure(figure: Any, rows: int, columns: int = 1, **options: Any) -> list[Any]:
    return [figure] if rows * columns == 1 else list(figure.subfigures(rows, columns, **options))


def message(words: str, theme: Theme) -> Picture:
    with mpl.rc_context(theme.rc()):
        picture = Picture(width=8)
        picture.text(0.5, 0.5, words, ha="center", va="center", color=theme.faint)
    return picture


# -- in a page ---------------------------------------------------------------------------------------------------------


PLACES = {colour: f"--kit-{index}" for index, colour in enumerate(LIGHT.colours())}


def variables(look: Theme) -> str:
    """The theme's colours as the variables of a page."""
    return "".join(f"{name}:{colour};" for name, colour in zip(PLACES.values(), look.colours(), strict=True))


# A page that is not trusted loses this sheet, and with it what hides the words under a picture.
SHEET = (
    f".kit-picture {{{variables(LIGHT)}}}\n{DARK_PAGE} {{{variables(DARK)}}}\n.kit-untrusted {{ display:none; }}\n"
    ".kit-picture svg { display:block; width:100%; height:auto; stroke-linejoin:round; stroke-linecap:butt; }"
)


def inline(picture: Picture, label: str) -> str:
    """A picture that was drawn in the light theme, as SVG in the colours of a page with `SHEET`. The label is for screen readers."""
    text = coloured_svg(picture, secrets.token_hex(4))  # names in two pictures of one page must differ
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", head)
    named = f'{head} role="img" aria-label="{html.escape(label, quote=True)}">'
    width = round(picture.get_size_inches()[0] * 96)
    return f'<div class="kit-picture" style="max-width:{width}px">{named}{rest}</div>'


def image_uri(picture: Picture) -> str:
    """A picture that was drawn in the light theme, as an image that follows the theme of the browser."""
    picture.settle()
    text = coloured_svg(picture, "kit")
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{{variables(DARK)}}} }}"
    shape = "stroke-linejoin:round; stroke-linecap:butt;"
    sheet = f"<style>svg {{{variables(LIGHT)} {shape}}} {dark}</style>"
    head, rest = text.split(">", 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(f'{head}>{sheet}{rest}'.encode()).decode()}"


def coloured_svg(picture: Picture, salt: str) -> str:
    """The drawing, with variables as colours."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": salt}):
        canvas: Any = FigureCanvasSVG(picture)
        canvas.print_svg(buffer, metadata=nothing)  # `savefig` would draw a second time
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib's own sheet would style every drawing of the page.
    text = re.sub(r"<style.*?</style>", "", text, count=1, flags=re.DOTALL)
    return COLOURED.sub(lambda found: f"var({PLACES[found[0]]})" if found[0] in PLACES else found[0], text)
