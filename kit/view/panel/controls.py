"""Controls for the fields of a config: each shows a value and reports a person's change. The kind follows from the field.

A choice that would be refused as the others stand is marked in its label, since a browser cannot grey out one option from here.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.view.panel import look

if TYPE_CHECKING:
    from kit.labs.options import Field

OWN = "own code (module:attr)"
LABEL = {"description_width": "11.5em"}


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
            drop.value = value if value in self.choices else None  # nothing is chosen yet
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
    """A number; one that may be null has a tick for that."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        super().__init__(field, change)
        kind: Any = int if int in _plain(field.kind) else float
        end, low, high = kind(2**53), field.option.low, field.option.high
        bounds = {"min": -end if low is None else kind(low), "max": end if high is None else kind(high)}
        box = widgets.BoundedIntText if kind is int else widgets.BoundedFloatText
        exact = self._made(box, value=1 if low is None else kind(low), step=1 if kind is int else None, **bounds)
        if not field.optional:
            self.build(exact)
            return
        exact.layout = widgets.Layout(flex="1 1 auto", width="200px")
        null = widgets.Checkbox(
            description="not set", indent=False, tooltip=f"{self.help}; ticked: null", layout={"width": "auto"}
        )
        self.build(look.classed(widgets.HBox([exact, null], layout={"width": "auto"}), "kit-number"), exact, null)

    def read(self, part: Any) -> Any:
        exact, *null = self.parts
        return None if part in null and part.value else exact.value

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:  # noqa: ARG002 - as above
        exact, *null = self.parts
        for tick in null:
            tick.value = value is None
        if isinstance(value, int | float) and not isinstance(value, bool):
            exact.value = value

    def take(self, value: Any, refused: Mapping[Any, str], *, locked: bool, wrong: bool = False) -> None:
        super().take(value, refused, locked=locked, wrong=wrong)
        if self.field.optional:
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
            own.value = str(value or "")
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
        return Number(field, change)
    if any(typing.get_origin(kind) in {tuple, list} for kind in plain):
        return Several(field, change)
    return Words(field, change)


def _plain(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, but for None."""
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        return tuple(one for one in typing.get_args(kind) if one is not type(None))
    return (kind,)
