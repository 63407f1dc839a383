"""The verdict, worst first, with each limit's slider beside it: moving one judges the stored records again, and the row flips.

Checks that share a tolerance share its slider. Rows keep their places while a limit is moved, so that none runs away from
under the mouse; they are put in order again with the next run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from kit.errors import KitError
from kit.results import VerdictRow
from kit.results.units import amount
from kit.results.verdict import MARKS, SIGNS, tally, without_parts
from kit.view.panel import look
from kit.view.panel.look import Tab
from kit.view.panel.model import Limit, PanelModel

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
