"""The settings of a lab as controls, made from its config's fields, and its faults as a menu.

A control tells the model what a person chose, and shows what the model has; what may not be is said by the model. A choice
that would be refused as the others stand is marked in its label, since a browser cannot grey out one option from here.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.view.panel import look
from kit.view.panel.scale import scale

if TYPE_CHECKING:
    from kit.labs.options import Field
    from kit.view.panel.model import PanelModel

# What people change first, in every lab that has it; the others are under "More".
FIRST = (
    *("backend", "size", "ranks", "tp", "pp", "ep", "replicas", "placement", "transport", "cycles", "steps", "mode"),
    *("chunks", "recipe", "level", "groups", "implementation"),
)
SMALL = 128  # a slider of so many places can be put on any of them with the mouse
WIDE = 4096  # beyond, a slider only guesses
OWN = "own code (module:attr)"
LABEL = {"description_width": "11.5em"}
LOCKED = {"starting", "running", "stopping"}  # the ranks have their config already
NO_FAULT = ""


class Control:
    """One field. `take` shows a value without telling it back."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        self.field = field
        self.help = " ".join(filter(None, [field.option.help, f"({field.allowed()})"]))
        self.label = f"{field.name} ({field.option.unit})" if field.option.unit else field.name
        self._change = change
        self._taking = False
        self.parts: tuple[Any, ...] = ()
        self.widget: Any = None

    def build(self, widget: Any, *parts: Any) -> None:
        self.widget, self.parts = widget, parts or (widget,)
        for part in self.parts:
            part.observe(self._moved, "value")

    def _moved(self, change: Any) -> None:
        if not self._taking:
            self._change(self.field.name, self.read(change["owner"]))

    def take(self, value: Any, refused: Mapping[Any, str], *, locked: bool, wrong: bool = False) -> None:
        self._taking = True
        try:
            self.show(value, refused)
            for part in self.parts:
                part.disabled = locked or self.fixed(value, refused)
            (self.widget.add_class if wrong else self.widget.remove_class)("kit-wrong")
        finally:
            self._taking = False

    def read(self, part: Any) -> Any:
        return part.value

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:  # noqa: ARG002 - only choices can be refused
        if self.parts[0].value != value:
            self.parts[0].value = value

    def fixed(self, value: Any, refused: Mapping[Any, str]) -> bool:  # noqa: ARG002 - as above
        return False

    def _made(self, kind: Any, **options: Any) -> Any:
        return kind(description=self.label, tooltip=self.help, style=LABEL, layout={"width": "auto"}, **options)


class Choice(Control):
    """A drop-down."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        super().__init__(field, change)
        self.choices: tuple[Any, ...] = field.choices
        self.build(self._made(widgets.Dropdown, options=[(str(choice), choice) for choice in self.choices]))

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        options = [(f"{choice} (no)" if choice in refused else str(choice), choice) for choice in self.choices]
        drop = self.parts[0]
        with drop.hold_sync():
            if tuple(options) != drop.options:
                drop.options = options
            if value in self.choices:
                drop.value = value
        drop.tooltip = " ".join([self.help, *(f"{choice}: {why}." for choice, why in refused.items())])


class Switch(Control):
    """A checkbox; greyed out where the other value would be refused."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        super().__init__(field, change)
        self.build(self._made(widgets.Checkbox, indent=True))

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        self.parts[0].value = bool(value)
        why = refused.get(not value)
        self.parts[0].tooltip = f"{self.help}: {why}" if why else self.help

    def fixed(self, value: Any, refused: Mapping[Any, str]) -> bool:
        return (not value) in refused and value not in refused


class Number(Control):
    """A whole or broken number: a slider where its range is small, a slider by powers with a field where it is wide, else a field."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        super().__init__(field, change)
        low, high = field.option.low, field.option.high
        whole = int in _plain(field.kind)
        self.rough: Any = None
        if whole and low is not None and high is not None and high - low < SMALL:
            self.build(self._made(widgets.IntSlider, min=int(low), max=int(high), continuous_update=False))
            return
        least, most = (-(2**53), 2**53) if whole else (-1e300, 1e300)
        ends = {"min": least if low is None else low, "max": most if high is None else high}
        if not whole:
            self.build(self._made(widgets.BoundedFloatText, step=None, **ends))
            return
        exact = self._made(widgets.BoundedIntText, **{name: int(end) for name, end in ends.items()})
        if low is None or high is None or high > WIDE:
            self.build(exact)
            return
        self.scale = scale(max(1, low), high)
        self.rough = widgets.IntSlider(max=self.scale.steps, readout=False, tooltip=self.help)
        self.rough.layout = widgets.Layout(flex="1 1 60px", width="60px", min_width="40px", margin="2px 2px 2px 10px")
        exact.layout = widgets.Layout(flex="1 1 auto", width="240px")
        row = widgets.HBox([exact, self.rough], layout={"width": "auto"})
        self.build(look.classed(row, "kit-number"), exact, self.rough)

    def read(self, part: Any) -> Any:
        return round(self.scale.value(part.value)) if part is self.rough else part.value

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            super().show(value, refused)
            if self.rough is not None:
                self.rough.value = self.scale.place(value)


class Open(Control):
    """A number that may be left open (null): a tick opens it to a number of one's own."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        super().__init__(field, change)
        whole = int in _plain(field.kind)
        low, high = field.option.low, field.option.high
        self._start = low if low is not None else 1
        kind = widgets.BoundedIntText if whole else widgets.BoundedFloatText
        end = 2**53 if whole else 1e300
        bounds: dict[str, Any] = {"min": low if low is not None else -end, "max": high if high is not None else end}
        exact = self._made(kind, value=self._start, **bounds)
        exact.layout = widgets.Layout(flex="1 1 auto", width="200px")
        left = widgets.Checkbox(
            description="left open", indent=False, tooltip=f"{self.help}; ticked: null", layout={"width": "auto"}
        )
        self.build(look.classed(widgets.HBox([exact, left], layout={"width": "auto"}), "kit-number"), exact, left)

    def read(self, part: Any) -> Any:
        exact, left = self.parts
        if part is left:
            return None if left.value else exact.value
        return exact.value

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:  # noqa: ARG002 - as above
        exact, left = self.parts
        left.value = value is None
        if isinstance(value, int | float):
            exact.value = value

    def take(self, value: Any, refused: Mapping[Any, str], *, locked: bool, wrong: bool = False) -> None:
        super().take(value, refused, locked=locked, wrong=wrong)
        self.parts[0].disabled = locked or value is None


class Words(Control):
    """Text; code is `module:attr`."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        super().__init__(field, change)
        hint = "module:attr" if field.option.target else ""
        self.build(self._made(widgets.Text, continuous_update=False, placeholder=hint))

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        super().show("" if value is None else str(value), refused)

    def read(self, part: Any) -> Any:
        written = part.value.strip()
        return None if not written and self.field.optional else written


class Several(Words):
    """A list, written with commas. What is no list goes to the model as it is, which says what is allowed."""

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        super().show(value if isinstance(value, str) else ", ".join(map(str, value or ())), refused)

    def read(self, part: Any) -> Any:
        try:
            return json.loads(f"[{part.value.strip().strip('[]()')}]")
        except ValueError:
            return part.value


class Named(Control):
    """One of the lab's own words, or code."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        super().__init__(field, change)
        drop = self._made(widgets.Dropdown, options=[*field.option.names, OWN])
        own = widgets.Text(placeholder="module:attr", continuous_update=False, tooltip=f"{field.name}: your own code")
        own.layout = widgets.Layout(flex="1 1 100px", width="auto", min_width="60px")
        drop.layout = widgets.Layout(flex="1 1 auto", width="auto")
        self.build(look.classed(widgets.HBox([drop, own], layout={"width": "auto"}), "kit-number"), drop, own)

    def read(self, part: Any) -> Any:  # noqa: ARG002 - the drop-down tells which of the two counts
        drop, own = self.parts
        if drop.value == OWN:
            own.layout.display = None
            return own.value.strip()
        return drop.value

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:  # noqa: ARG002 - as above
        drop, own = self.parts
        drop.value = value if value in self.field.option.names else OWN
        if drop.value == OWN:
            own.value = str(value)
        own.layout.display = None if drop.value == OWN else "none"


def control(field: Field, change: Callable[[str, Any], None]) -> Control:
    """The control that fits a field's kind."""
    plain = _plain(field.kind)
    if field.choices:
        return Choice(field, change)
    if field.option.names:
        return Named(field, change)
    if plain == (bool,):
        return Switch(field, change)
    if set(plain) <= {int, float} and plain:
        return Open(field, change) if field.optional else Number(field, change)
    if any(typing.get_origin(kind) in {tuple, list} for kind in plain):
        return Several(field, change)
    return Words(field, change)


class Parameters:
    """All controls of a lab, its fault menu, and what is wrong with them in words."""

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.controls = {field.name: control(field, model.set) for field in model.fields}
        first = [name for name in FIRST if name in self.controls and not isinstance(self.controls[name], Switch)]
        more = [name for name in self.controls if name not in first]
        self.fault = widgets.Dropdown(
            options=[
                ("none: the code as it is", NO_FAULT),
                *((fault.name, fault.name) for fault in model.definition.faults),
            ],
            description="fault",
            tooltip="a known bug that is switched on, to see the check that catches it",
            style=LABEL,
            layout={"width": "auto"},
        )
        self.reset = widgets.Button(
            description="Defaults",
            icon="undo",
            tooltip="every setting as the lab has it, and no fault",
            layout={"width": "auto"},
        )
        self.about = widgets.HTML()
        self.problems = widgets.HTML()
        self.refused = widgets.HTML()
        self.more = widgets.Accordion([self._grid(more)], titles=(f"More settings ({len(more)})",))
        last = look.box(self.reset, self.refused)
        grids = [self._grid(first, self.fault), self.about, *([self.more] if more else [])]
        self.widget = widgets.VBox([*grids, last, self.problems])
        self.fault.observe(self._break, "value")
        self.reset.on_click(lambda _: model.reset())
        model.observe(self._show, ["values", "fault", "refused", "problems", "state"])
        self._show()

    def _grid(self, names: Sequence[str], *others: Any) -> widgets.Box:
        return look.box(*(self.controls[name].widget for name in names), *others, names=("kit-fields",))

    def _break(self, change: Any) -> None:
        self.model.set_fault(change["new"] or None)

    def _show(self, _: Any = None) -> None:
        model = self.model
        locked = model.state in LOCKED
        for name, one in self.controls.items():
            if name in model.values:
                one.take(model.values[name], model.refused.get(name, {}), locked=locked, wrong=name in model.problems)
        self.fault.value = model.fault or NO_FAULT
        self.fault.disabled = self.reset.disabled = locked
        self.about.value = fault_html(model)
        self.problems.value = problems_html(model.problems)
        self.refused.value = refused_html(model.refused)


def fault_html(model: PanelModel) -> str:
    """What the chosen fault breaks, which check should catch it, and what it sets."""
    fault = next((fault for fault in model.definition.faults if fault.name == model.fault), None)
    if fault is None:
        return ""
    ends = " The run itself must break." if fault.exit == 3 else ""
    settings = ", ".join(f"{name}={_said(value)}" for name, value in fault.set.items())
    sets = f" Sets {settings}." if settings else ""
    return (
        f'<p><b class="kit-bad">✗ {look.text(fault.name)}:</b> {look.text(fault.breaks)}. '
        f"Check <b>{look.text(fault.check)}</b> should catch it.{ends}{look.text(sets)}</p>"
    )


def problems_html(problems: Mapping[str, str]) -> str:
    """Why it cannot start, a line each."""
    lines = "".join(f'<p class="kit-bad">✗ {look.text(said)}</p>' for said in dict.fromkeys(problems.values()))
    return f'<div role="alert">{lines}</div>' if lines else ""


def refused_html(refused: Mapping[str, Mapping[Any, str]]) -> str:
    """The choices marked (no), folded, each with its reason."""
    rows = [(name, choice, why) for name, choices in refused.items() for choice, why in choices.items()]
    if not rows:
        return ""
    lines = "".join(f"<li>{look.text(f'{name}={_said(choice)}')}: {look.text(why)}</li>" for name, choice, why in rows)
    count = "1 choice is" if len(rows) == 1 else f"{len(rows)} choices are"
    return f"<details><summary>{count} not possible as the others stand</summary><ul>{lines}</ul></details>"


def _said(choice: Any) -> str:
    return json.dumps(choice) if isinstance(choice, bool) or choice is None else str(choice)


def _plain(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, but for None."""
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        return tuple(one for one in typing.get_args(kind) if one is not type(None))
    return (kind,)
