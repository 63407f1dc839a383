"""The settings of a lab as controls, made from its config's fields, and its faults as a menu.

A control passes a person's choice to the model and shows the model's value; the model says what is not allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from kit.view.panel import look
from kit.view.panel.controls import LABEL, control

if TYPE_CHECKING:
    from kit.view.panel.model import PanelModel

LOCKED = {"starting", "running", "stopping"}  # the ranks have their config already
NO_FAULT = ""


class Parameters:
    """All controls of a lab, its fault menu, and what is wrong with them in words."""

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.controls = {field.name: control(field, model.set) for field in model.fields}
        first = model.definition.first or tuple(self.controls)
        more = [name for name in self.controls if name not in first]
        self.fault = widgets.Dropdown(
            options=[
                ("none: the code as it is", NO_FAULT),
                *((fault.name, fault.name) for fault in model.definition.faults),
            ],
            description="fault",
            tooltip="a known bug to switch on, to see which check catches it",
            style=LABEL,
            layout={"width": "auto"},
        )
        self.reset = widgets.Button(
            description="Defaults",
            icon="undo",
            tooltip="all settings back to the lab's defaults, no fault",
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
    return f"<details><summary>{count} excluded by other settings</summary><ul>{lines}</ul></details>"


def _said(choice: Any) -> str:
    return json.dumps(choice) if isinstance(choice, bool) or choice is None else str(choice)
