"""The panel of a lab: its settings, buttons, progress, and tabs for its results.

Parts only observe the model; user actions go to the model or the controller and return at once, so the kernel stays responsive.
Controls are made from the config's fields: a control passes a choice to the model and shows the model's value. A choice that other
settings exclude is marked in its label, because single options of a drop-down cannot be disabled.
"""

from __future__ import annotations

import json
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets as widgets

from kit.labs.definition import Definition, Field
from kit.labs.discover import describe_folder
from kit.labs.lab import Lab
from kit.results import runs_dir
from kit.results.run import Plotter, run_name, runs_of_lab
from kit.results.runtable import in_line
from kit.view import look, named
from kit.view.exploring import ExploreTab
from kit.view.model import BUSY, OVER, PanelController, PanelModel
from kit.view.runs import RunsTab
from kit.view.tabs import LogsTab, PlotsTab, TablesTab, VerdictTab, WhatIfTab

OFFERED = 25  # earlier runs in the menu
# Buttons in order of use: action, label, icon, tooltip.
BUTTONS = {
    "start": ("Start", "power-off", "start the ranks and the lab on them"),
    "step": ("Step", "step-forward", "run the next phase on every rank"),
    "run": ("Run all", "forward", "run the remaining phases, then judge"),
    "stop": ("Stop", "stop", "end the ranks, even if one hangs; measurements are kept"),
    "restart": ("Restart", "refresh", "end the ranks and start again with the current settings"),
}
TABS = {
    "Plots": PlotsTab,
    "Verdict": VerdictTab,
    "Tables": TablesTab,
    "Logs": LogsTab,
    "Runs": RunsTab,
}


class Buttons:
    def __init__(self, model: PanelModel, controller: PanelController) -> None:
        self.model = model
        acts = (controller.start, controller.step, controller.run_all, controller.stop, controller.restart)
        self.of = {
            name: look.button(word, icon, tip, act)
            for (name, (word, icon, tip)), act in zip(BUTTONS.items(), acts, strict=True)
        }
        for button in self.of.values():
            button.layout.min_width = "88px"
        self.of["run"].button_style = "primary"
        self.widget = look.flex_box(*self.of.values())
        model.observe(self._show, ["state", "problems", "phases"])
        self._show()

    def _show(self, _: Any = None) -> None:
        can = self.model.can
        for name, button in self.of.items():
            button.disabled = name not in can


class ShownRun:
    """The lab's earlier runs as a menu, the newest finished one first. While ranks live, their own run is shown."""

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        tip = "an earlier run to show; the Runs tab has all of them"
        self.widget = look.labelled_control(widgets.Dropdown, "show run", tip, style={"description_width": "initial"})
        self.widget.layout.max_width = "100%"
        self._offering = False
        model.observe(self._offer, ["run", "state"])
        self.widget.observe(self._pick, "value")
        self._offer()

    def _offer(self, _: Any = None) -> None:
        model = self.model
        if model.state != "idle" and model.state not in OVER:
            self.widget.layout.display = "none"  # it would name another run than the one that is shown
            return
        lines = [earlier_run(path) for path in islice(runs_of_lab(runs_dir(), model.definition.name), OFFERED)]
        lines.sort(key=lambda line: not line.finished)
        shown = None if model.run is None else str(model.run.dir)
        if shown is not None and shown not in [line.folder for line in lines]:
            lines.append(earlier_run(model.run.dir))
        options = [*([("choose...", None)] if shown is None else []), *((line.words, line.folder) for line in lines)]
        self._offering = True
        if options != list(self.widget.options):
            self.widget.options = options
        self.widget.value = shown
        self._offering = False
        self.widget.layout.display = None if lines else "none"

    def _pick(self, change: Any) -> None:
        if not self._offering and change["new"] is not None:
            self.model.pick(Path(change["new"]))


class EarlierRun(NamedTuple):
    """A run in a menu."""

    words: str
    folder: str
    finished: bool


def earlier_run(path: Path) -> EarlierRun:
    row = describe_folder(path)
    fault = f"fault {row['fault']}" if row["fault"] else ""
    finished = row["status"] == "finished"
    judged = row["answer"] != "not judged"
    answer = f"checks {row['answer']}" if judged else row["answer"]  # a run can fail although its checks pass
    words = [row["label"], run_name(path), "" if finished else row["status"], answer, fault, in_line(row["set"])]
    return EarlierRun(" · ".join(filter(None, words)), str(path), finished)


class Panel:
    """Shown as the last line of a cell, or by `panel.widget`. `close` ends its ranks."""

    def __init__(self, model: PanelModel, controller: PanelController) -> None:
        self.model, self.controller = model, controller
        definition = model.definition
        head = widgets.HTML(
            f"<h3>{look.text(definition.name)}</h3><p class='kit-faint'>{look.text(definition.summary)}</p>"
            "<p class='kit-gone'><b>The kernel of this panel has ended; this is its last state. Run the cell to use it.</b></p>"
        )
        self.parameters = Parameters(model)
        self.buttons = Buttons(model, controller)
        self.strip = look.Strip(model)
        verdict = VerdictTab(model, visible=False)  # first observer, because drawing the picture is slow
        self.tabs: dict[str, Any] = {
            title: verdict if kind is VerdictTab else kind(model) for title, kind in TABS.items()
        }
        if (declared := named.lab_forecast(definition.name)) is not None:
            self.tabs[declared.title] = WhatIfTab(model, declared)
        if definition.worlds:
            self.tabs["Explore"] = ExploreTab(model)
        self.tab = widgets.Tab([tab.widget for tab in self.tabs.values()], titles=tuple(self.tabs), selected_index=0)
        self.tab.observe(lambda _: self._look(), "selected_index")
        self.shown_run = ShownRun(model)
        parts = [look.sheet(), head, self.parameters.widget, self.buttons.widget, self.strip.widget]
        parts += [self.shown_run.widget, self.tab]
        self.widget = look.classed(widgets.VBox(parts), "kit-panel")
        self._look()

    def _look(self) -> None:
        """Only the visible tab draws."""
        for index, tab in enumerate(self.tabs.values()):
            tab.visible = index == self.tab.selected_index

    def close(self) -> None:
        """End the ranks and an exploration. The widgets stay and show the last state."""
        if (exploring := self.tabs.get("Explore")) is not None:
            exploring.ends.set()
        self.controller.close()

    def __repr__(self) -> str:
        return f"<panel of lab {self.model.definition.name}: {self.model.state}>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def make_panel(
    definition: Definition,
    config: Mapping[str, Any],
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    plotter: Plotter | None = None,
) -> Panel:
    """A panel of a lab; its ranks start with Start. Panels from an earlier run of the same cell are closed."""
    before = of_this_cell()
    model = PanelModel(definition, config, fault=fault, plotter=plotter)
    controller = PanelController(model, out=out)
    before.append(controller)
    return Panel(model, controller)


def adopt_lab(lab: Lab, *, plotter: Plotter | None = None) -> Panel:
    model = PanelModel(lab.definition, lab.given, fault=lab.fault, tolerances=lab.tolerances, plotter=plotter)
    return Panel(model, PanelController(model, lab=lab))


# When a cell runs again, its output disappears, and with it the Stop button of its panel.
# By cell: its last execution request and the controllers of the panels that it made.
MADE: dict[str, tuple[str, list[PanelController]]] = {}


def of_this_cell() -> list[PanelController]:
    """The panels made by this run of the cell. Panels from an earlier run of the cell are closed."""
    cell, request = asked_by()
    if not cell:
        return []
    before, made = MADE.get(cell, ("", []))
    if before != request:
        for old in made:
            old.close()
        made = []
        MADE[cell] = request, made
    return made


def asked_by() -> tuple[str, str]:
    """The running cell and its execution request; empty outside a notebook."""
    if "ipykernel" not in sys.modules:
        return "", ""
    from IPython import get_ipython

    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    cell = (parent.get("metadata") or {}).get("cellId") or ""
    return str(cell), str((parent.get("header") or {}).get("msg_id", ""))


# -- the settings, and the faults as a menu ------------------------------------------------------------------------------

NO_FAULT = ""
SETTINGS_FILE = "settings.yaml"
OWN = "own code (module:attr)"
LABEL = {"description_width": "11.5em"}


class Parameters:
    """All controls of a lab, its fault menu, and error messages."""

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.controls = {field.name: setting_control(field, model.set) for field in model.fields}
        first = model.definition.first or tuple(self.controls)
        folded_names = [name for name in self.controls if name not in first and "." not in name]
        faults = [fault.name for fault in model.definition.faults]
        self.fault = look.labelled_control(
            widgets.Dropdown,
            "fault",
            "a known bug to switch on, to see which check detects it",
            options=[("none: the code as it is", NO_FAULT), *zip(faults, faults, strict=True)],
            style=LABEL,
        )
        self.reset = look.button("Defaults", "undo", "all settings back to the lab's defaults, no fault", model.reset)
        file = "a YAML file with the settings that differ from the defaults, for kit run --config"
        self.path = look.labelled_control(
            widgets.Text, "settings file", file, value=SETTINGS_FILE, style={"description_width": "initial"}
        )
        self.save = look.button("Save settings", "download", "write the settings to the file", self._save)
        self.about, self.problems, self.refused, self.remark = (widgets.HTML() for _ in range(4))
        self.more = widgets.Accordion([self._grid(folded_names)], titles=(f"More settings ({len(folded_names)})",))
        self.groups = widgets.Accordion()  # of nested configs
        grids = [self._grid(first, self.fault), self.about, *([self.more] if folded_names else []), self.groups]
        self.form = widgets.VBox([*grids, look.flex_box(self.reset, self.path, self.save, self.refused)])
        self.line = look.classed(look.button("", "", "show or hide the settings", self._turn), "kit-line")
        self.widget = widgets.VBox([self.line, self.form, self.problems, self.remark])
        self.fault.observe(lambda change: model.set_fault(change["new"] or None), "value")
        model.observe(self._show, ["values", "fault", "refused", "problems", "state", "remark"])
        model.observe(self._fold, ["run"])
        model.observe(self._unfold, ["problems"])
        self._fold()
        self._regroup()
        self._show()

    def _regroup(self) -> None:
        """A part of the form for each nested config that there is."""
        titles = tuple(f"Settings of {name}" for name in self.model.groups)
        if titles == tuple(self.groups.titles):
            return
        for field in self.model.fields:
            if field.name not in self.controls:
                self.controls[field.name] = setting_control(field, self.model.set)
        self.groups.children = [self._grid([field.name for field in group]) for group in self.model.groups.values()]
        self.groups.titles = titles

    @property
    def open(self) -> bool:
        return bool(self.form.layout.display != "none")

    def _turn(self) -> None:
        self.form.layout.display = "none" if self.open else None
        self._show()

    def _save(self) -> None:
        self.model.save_settings(self.path.value.strip() or SETTINGS_FILE)

    def _fold(self, _: Any = None) -> None:
        """Once there is a run, its verdict and picture come first; errors must stay visible."""
        if self.open is not (self.model.run is None or bool(self.model.problems)):
            self._turn()

    def _unfold(self, _: Any = None) -> None:
        """Errors open the settings. Whoever corrects one is still setting something, so they stay open."""
        if self.model.problems and not self.open:
            self._turn()

    def _grid(self, names: Sequence[str], *others: Any) -> widgets.Box:
        return look.flex_box(*(self.controls[name].widget for name in names), *others, names=("kit-fields",))

    def _show(self, _: Any = None) -> None:
        model = self.model
        self._regroup()
        locked = model.state in BUSY  # the ranks already have their config
        self.line.icon = "caret-down" if self.open else "caret-right"
        of = "Settings" if locked else "Next run"  # a run that is shown may have had others
        self.line.description = "Settings" if self.open else f"{of}: {settings_line(model)}"
        for name, control in self.controls.items():
            if name in model.values:
                control.take(
                    model.values[name], model.refused.get(name, {}), locked=locked, wrong=name in model.problems
                )
        self.fault.value = model.fault or NO_FAULT
        self.fault.disabled = self.reset.disabled = locked
        self.about.value = fault_html(model)
        problems = "".join(
            f'<p class="kit-bad">✗ {look.text(why)}</p>' for why in dict.fromkeys(model.problems.values())
        )
        self.problems.value = f'<div role="alert">{problems}</div>' if problems else ""
        chose = model.given or model.fault  # on untouched defaults nothing is excluded by what a person chose
        self.refused.value = refused_html(model.refused) if chose else ""
        self.remark.value = look.status_html(model.remark)


def settings_line(model: PanelModel) -> str:
    """The settings that matter, in one line: "size tiny, ranks 2, tp 2, cycles 3"."""
    changes = []
    for field in model.fields:
        value = model.values.get(field.name)
        usual = value in (None, 1, "", False) or field.option.target
        if field.name in model.given or (field.name in model.definition.first and not usual):
            changes.append(f"{field.name} {_words(value)}")
    return ", ".join([*changes, *([f"fault {model.fault}"] if model.fault else [])]) or "the lab's own"


def fault_html(model: PanelModel) -> str:
    """What the chosen fault breaks, which check should detect it, and what it sets."""
    fault = next((fault for fault in model.definition.faults if fault.name == model.fault), None)
    if fault is None:
        return ""
    ends = " The run must fail with an error." if fault.exit == 3 else ""
    settings = ", ".join(f"{name}={_words(value)}" for name, value in fault.set.items())
    sets = f" Sets {settings}." if settings else ""
    return (
        f'<p><b class="kit-bad">✗ {look.text(fault.name)}:</b> {look.text(fault.breaks)}. '
        f"The check <b>{look.text(fault.caught_by)}</b> should detect it.{ends}{look.text(sets)}</p>"
    )


def refused_html(refused: Mapping[str, Mapping[Any, str]]) -> str:
    """The choices marked (no), with their reasons folded."""
    rows = [(name, choice, why) for name, choices in refused.items() for choice, why in choices.items()]
    if not rows:
        return ""
    lines = "".join(f"<li>{look.text(f'{name}={_words(choice)}')}: {look.text(why)}</li>" for name, choice, why in rows)
    named = ", ".join(f"{name}={_words(choice)}" for name, choice, _ in rows)
    return f"<details><summary>Not possible here: {look.text(named)}</summary><ul>{lines}</ul></details>"


def _words(choice: Any) -> str:
    return json.dumps(choice) if isinstance(choice, bool) or choice is None else str(choice)


# -- a control for each kind of field ------------------------------------------------------------------------------------


class Control:
    """One field, by default text. `take` shows a value without reporting it as a choice; code is `module:attr`."""

    def __init__(self, field: Field, change: Callable[[str, Any], None]) -> None:
        self.field = field
        self.help = " ".join(filter(None, [field.option.help, f"({field.allowed()})"]))
        self.label = f"{field.name} ({field.option.unit})" if field.option.unit else field.name
        self._change = change
        self._taking = False
        self.parts: list[Any] = self.build()
        self.widget: Any = self.parts[0]
        if len(self.parts) > 1:
            self.widget = look.classed(widgets.HBox(self.parts, layout={"width": "auto"}), "kit-number")
        for part in self.parts:
            part.observe(self._moved, "value")

    def build(self) -> list[Any]:
        hint = "module:attr" if self.field.option.target else ""
        return [self._made(widgets.Text, continuous_update=False, placeholder=hint)]

    def _made(self, kind: Any, **options: Any) -> Any:
        return look.labelled_control(kind, self.label, self.help, style=LABEL, **options)

    def _moved(self, change: Any) -> None:
        if not self._taking:
            self._change(self.field.name, self.read(change["owner"]))

    def take(self, value: Any, refused: Mapping[Any, str], *, locked: bool, wrong: bool = False) -> None:
        self._taking = True
        try:
            self.fixed: list[Any] = []  # parts that the other settings currently fix
            self.show(value, refused)
            for part in self.parts:
                part.disabled = locked or part in self.fixed
            (self.widget.add_class if wrong else self.widget.remove_class)("kit-wrong")
        finally:
            self._taking = False

    def read(self, part: Any) -> Any:
        written = part.value.strip()
        return None if not written and self.field.optional else written

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:  # noqa: ARG002 - only choices can be refused
        written = "" if value is None else str(value)
        if self.parts[0].value != written:
            self.parts[0].value = written


class Choice(Control):
    def build(self) -> list[Any]:
        return [self._made(widgets.Dropdown, options=[(str(choice), choice) for choice in self.field.choices])]

    def read(self, part: Any) -> Any:
        return part.value

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        choices = self.field.choices
        options = tuple((f"{choice} (no)" if choice in refused else str(choice), choice) for choice in choices)
        drop = self.parts[0]
        with drop.hold_sync():
            if options != drop.options:
                drop.options = options
            drop.value = value if value in choices else None  # None: nothing chosen yet
        drop.tooltip = " ".join([self.help, *(f"{choice}: {why}." for choice, why in refused.items())])


class Switch(Control):
    """A checkbox, disabled if the other value would be refused."""

    def build(self) -> list[Any]:
        return [self._made(widgets.Checkbox, indent=True)]

    def read(self, part: Any) -> Any:
        return part.value

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        tick, why = self.parts[0], refused.get(not value)
        tick.value = bool(value)
        tick.tooltip = f"{self.help}: {why}" if why else self.help
        if why and value not in refused:
            self.fixed = [tick]


class Number(Control):
    """A number as text, checked on every key: boxes for numbers change what they refuse, 2.5 to 25 and 9999 to 1000. Empty is null."""

    def build(self) -> list[Any]:
        return [self._made(widgets.Text, placeholder="not set" if self.field.optional else "")]

    def read(self, part: Any) -> Any:
        written = super().read(part)
        return number_of(written) if isinstance(written, str) else written

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        if self.read(self.parts[0]) != value:  # else it is written as the person writes it, such as 1e-3
            super().show(value, refused)


def number_of(written: str) -> int | float | str:
    """What is written, if it is no number."""
    for kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            continue
    return written


class Several(Control):
    """A comma-separated list. Other text goes to the model unchanged, which reports what is allowed."""

    def show(self, value: Any, refused: Mapping[Any, str]) -> None:
        super().show(value if isinstance(value, str) else ", ".join(map(str, value or ())), refused)

    def read(self, part: Any) -> Any:
        try:
            return json.loads(f"[{part.value.strip().strip('[]()')}]")
        except ValueError:
            return part.value


class Named(Control):
    def build(self) -> list[Any]:
        drop = self._made(widgets.Dropdown, options=[*self.field.option.names, OWN])
        tip = f"{self.field.name}: your own code"
        own = widgets.Text(placeholder="module:attr", continuous_update=False, tooltip=tip)
        own.layout = widgets.Layout(flex="1 1 100px", width="auto", min_width="60px")
        drop.layout = widgets.Layout(flex="1 1 auto", width="auto")
        return [drop, own]

    def read(self, part: Any) -> Any:  # noqa: ARG002 - the drop-down decides which of the two counts
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


def setting_control(field: Field, change: Callable[[str, Any], None]) -> Control:
    plain = tuple(kind for kind in field.kinds if kind is not type(None))
    kind: type[Control] = Control
    if field.choices:
        kind = Choice
    elif field.option.names:
        kind = Named
    elif plain == (bool,):
        kind = Switch
    elif plain and set(plain) <= {int, float}:
        kind = Number
    elif any(typing.get_origin(kind) in {tuple, list} for kind in plain):
        kind = Several
    return kind(field, change)
