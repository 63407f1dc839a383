"""The plots of the run, one at a time, in the notebook's own theme; a limit that moves is drawn again, and nothing else."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.draw.plots import OVERVIEW, SHEET, inline
from kit.errors import KitError
from kit.view import named
from kit.view.panel import look
from kit.view.panel.look import Tab

if TYPE_CHECKING:
    from pathlib import Path

    from kit.draw.plots import Album, Picture
    from kit.results import Run
    from kit.view.panel.model import PanelModel

THEMES = {"as the notebook": "auto", "light": "light", "dark": "dark"}
NOTHING = "There is no run yet: press Start, then Step or Run all."


@dataclass(slots=True)
class Part:
    """A plot on the page: the drawing, the moved limits that are in it, and the theme in which it was sent."""

    html: Any = field(default_factory=lambda: widgets.HTML(layout={"width": "100%"}))
    picture: Picture | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    theme: str = ""


class PlotsTab(Tab):
    """Draws when it is looked at: on new records, another plot, another theme, and on a limit that is in the drawing."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__(model)
        self._offering = False
        self._album: Album | None = None
        self._read: tuple[Run | None, int] | None = None  # of which records the sight is
        self._took = self._last = 0.0  # how long the last drawing took, and when that was
        self._parts: dict[str, Part] = {}
        self._chosen: str | None = None  # by a person; else it is the first that the run has something for
        self._salt = secrets.token_hex(4)
        self.choice = look.control(widgets.Dropdown, "Plot", "which plot to draw", width="26em")
        self.theme = look.control(widgets.Dropdown, "Colours", "light or dark", width="20em", options=THEMES)
        keep = "write this plot into the run's folder as ."
        self.png = look.button("Save PNG", "picture-o", f"{keep}png", lambda: self.save("png"))
        self.svg = look.button("Save SVG", "picture-o", f"{keep}svg", lambda: self.save("svg"))
        self.pictures = widgets.VBox(layout={"width": "100%", "min_height": "120px"})
        controls = look.box(self.choice, self.theme, self.png, self.svg)
        self.widget = widgets.VBox([look.sheet(SHEET), controls, self.said, self.pictures])
        model.observe(self._changed, ["run", "revision", "tolerances", "state"])
        self.choice.observe(self._choose, "value")
        self.theme.observe(self._changed, "value")
        self._changed()

    def _choose(self, change: Any) -> None:
        if not self._offering:
            self._chosen = change["new"]
            self._changed()

    def _changed(self, _: Any = None) -> None:
        if not self._visible or self._offering:
            return
        try:
            self._show()
        except KitError as error:
            self._say(str(error), bad=True)
        except Exception as error:  # noqa: BLE001 - a drawing may stumble over part of a run; the panel must stay
            self._say(f"{self.choice.value} cannot be drawn of this run: {type(error).__name__}: {error}", bad=True)

    def _show(self) -> None:
        began = time.monotonic()
        run = self.model.run
        records = (run, self.model.revision)
        if self._read != records:
            if self._too_soon():
                return
            self._album = None if run is None else named.album(run)
            self._read, self._parts = records, {name: Part(part.html) for name, part in self._parts.items()}
            self._offer()
        for button in (self.png, self.svg, self.choice, self.theme):
            button.disabled = self._album is None
        if self._album is None:
            self._put([widgets.HTML(f"<p>{look.span('faint', NOTHING)}</p>")])
            return
        every = [name for _, name in self.choice.options if name != OVERVIEW]
        self._draw(self._album, every if self.choice.value == OVERVIEW and every else [self.choice.value])
        self._took = time.monotonic() - began
        self._last = time.monotonic()

    def _too_soon(self) -> bool:
        """While ranks work, drawing takes a tenth of the kernel's time at most; when they rest, it catches up."""
        same = self._read is not None and self._read[0] is self.model.run
        return same and self.model.state == "running" and time.monotonic() - self._last < 10 * self._took

    def _draw(self, album: Album, names: Sequence[str]) -> None:
        """One below the other; what is on the page already, and as it must be, stays."""
        self._say("")
        checks = {limit.tolerance: limit.checks for limit in self.model.limits}
        for name in names:
            part = self._parts.setdefault(name, Part())
            moved = {
                key: value for key, value in self.model.tolerances.items() if album.moves_with(name, checks, {key})
            }
            if part.picture is None or part.limits != moved:
                part.picture, part.limits = album.draw(name, tolerances=moved, like=part.picture), moved
            elif part.theme == self.theme.value:
                continue
            part.theme = self.theme.value
            label = f"{album.title(name)} of {album.data.run.id}"
            part.html.value = inline(part.picture, label, theme_name=part.theme, salt=self._salt + name)
        self._put(self._parts[name].html for name in names)

    def _put(self, pictures: Iterable[Any]) -> None:
        shown = tuple(pictures)
        if self.pictures.children != shown:
            self.pictures.children = shown

    def _offer(self) -> None:
        """The plots that the run has something for; the one that a person chose stays, if it can."""
        names = [] if self._album is None else [*self._album.plots, OVERVIEW]  # the slowest comes last
        options = [] if self._album is None else [(self._album.title(name), name) for name in names]
        if list(self.choice.options) == options:
            return
        self._offering = True
        self.choice.options = options
        self.choice.value = self._chosen if self._chosen in names else next(iter(names), None)
        self._offering = False

    def save(self, kind: str) -> Path | None:
        """Write the plot that is chosen into the run's folder, in the theme that is chosen; the page's own is saved as light."""
        if self._album is None or self.choice.value is None:
            return None
        dark = self.theme.value == "dark"
        name = f"{self.choice.value}{'-dark' if dark else ''}.{kind}"
        try:
            theme_name = "dark" if dark else "light"
            picture = self._album.draw(self.choice.value, theme_name=theme_name, tolerances=self.model.tolerances)
            path = picture.save(self._album.data.run.dir / name)
        except (KitError, OSError) as error:
            self._say(f"{name} could not be written: {error}", bad=True)
            return None
        self._say(f"written: {path}")
        return path
