"""A picture as SVG inside of a page: drawn once, in the colours of the page's theme, which may change while it is shown."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG

from kit.view.style import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from kit.view.plots import Picture

FOLLOW = 'body[data-jp-theme-light="false"] .kit-picture.kit-auto, body.vscode-dark .kit-picture.kit-auto'
COLOURED = re.compile(r"#[0-9a-f]{6}\b")


def colours(look: Theme) -> list[str]:
    return [look.paper, look.ink, look.faint, look.grid, look.shade, look.good, look.bad, *look.series]


PLACES = {colour: f"--kit-{index}" for index, colour in enumerate(colours(LIGHT))}


def declared(look: Theme) -> str:
    return "".join(f"{name}:{colour};" for name, colour in zip(PLACES.values(), colours(look), strict=True))


SHEET = (
    f".kit-picture {{{declared(LIGHT)}}}\n{FOLLOW}, .kit-picture.kit-dark {{{declared(DARK)}}}\n"
    ".kit-picture svg { display:block; width:100%; height:auto; stroke-linejoin:round; stroke-linecap:butt; }"
)


def inline(picture: Picture, label: str, *, theme_name: str = "auto", salt: str = "kit") -> str:
    """The picture, which must have been drawn in the light theme, for a page that has `SHEET`.

    `theme_name` is auto, light or dark. `label` is what is read aloud. `salt` keeps apart the names in pictures of one page.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": salt}):
        canvas: Any = FigureCanvasSVG(picture)
        canvas.print_svg(buffer, metadata=nothing)  # `savefig` would draw once more, to no end here
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib's own sheet would style every drawing of the page.
    text = re.sub(r"<style.*?</style>", "", text, count=1, flags=re.DOTALL)
    text = COLOURED.sub(lambda found: f"var({PLACES[found[0]]})" if found[0] in PLACES else found[0], text)
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", head)
    named = f'{head} role="img" aria-label="{html.escape(label, quote=True)}">'
    width = round(picture.get_size_inches()[0] * 96)
    return f'<div class="kit-picture kit-{theme_name}" style="max-width:{width}px">{named}{rest}</div>'
