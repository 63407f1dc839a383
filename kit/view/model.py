"""The state of a panel, observed by views: settings, the plan and its progress, the run, its verdict and the limits; and the
controller of the lab.

The model is plain data in traits that are replaced, never changed in place. It works without widgets, from a script or a test.

The controller drives the lab in one thread that lives as long as the panel, because ranks end with the thread that started them.
The buttons' methods return at once. Events of the ranks reach the model in the kernel's thread, at most a few times per second,
so views need no locks and the kernel stays responsive.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from traitlets import Any as AnyTrait
from traitlets import Dict, HasTraits, Instance, Int, Tuple, Unicode

from kit.errors import BadInput, KitError
from kit.labs.definition import (
    Definition,
    Field,
    LabConfig,
    as_settings,
    fields,
    holder,
    known_fields,
    nested_fields,
    roles_by_rank,
    working,
)
from kit.labs.discover import ConfigReading, current_names, find_fault, read_config, validate
from kit.labs.lab import Lab
from kit.results import Rule, Run, Verdict, load_tolerances, newest_run, runs_dir, save_tolerances
from kit.results.records import flat, user_path
from kit.results.rules import applicable
from kit.results.run import Plotter, run_name, save_settings
from kit.results.verdict import checked_tolerances
from kit.view.progress import CallWatch, EndedBy, PhaseState, RunProgress, failure_of, marks

COUNTS = 10.0  # least upper end of a slider of counts
AS_IT_IS = "the lab's own"
BUSY = {"starting", "running", "stopping"}
OVER = {"finished", "failed", "stopped"}
CAN = {
    "idle": {"start", "step", "run"},
    "starting": {"stop"},
    "ready": {"step", "run", "stop", "restart"},
    "running": {"stop"},
    "stopping": set[str](),
    **{over: {"start", "step", "run", "restart"} for over in OVER},
}
FRESH = {"start", "restart"}  # these start new ranks, as do step and run if none are alive


class PanelLimit(NamedTuple):
    """A rule's limit. Its slider goes from `low` to `high`, logarithmically if low is above 0."""

    rule: str
    question: str
    default: float
    unit: str
    better: str
    low: float
    high: float


class PanelModel(HasTraits):
    """A lab's panel without widgets. A controller updates the live state; `set`, `move`, `show` and others are for users.

    `notice` is about the ranks, `remark` about the last change of a setting or a button, `trouble` about the run that is shown. None
    of them outlives what it is about.
    """

    values = Dict()
    fault = Unicode(None, allow_none=True)
    problems = Dict()
    refused = Dict()
    state = Unicode("idle")
    phases = Tuple()
    size = Int(0)
    roles: Any = Dict()  # by rank, if they have names
    progress = Instance(RunProgress, args=())
    failure = Instance(EndedBy, allow_none=True)
    log = Tuple()
    notice = Unicode("")
    remark = Unicode("")
    trouble = Unicode("")
    run = AnyTrait(None)
    revision = Int(0)
    limits = Tuple()
    tolerances = Dict()
    verdict = AnyTrait(None)

    def __init__(
        self,
        definition: Definition,
        config: Mapping[str, Any] | None = None,
        *,
        fault: str | None = None,
        tolerances: Mapping[str, float] | None = None,
        plotter: Plotter | None = None,
    ) -> None:
        super().__init__()
        self.definition = definition
        self.fields: list[Field] = fields(definition.config)  # with those of nested configs, once their names are known
        self.groups: dict[str, list[Field]] = {}  # the settings of each nested config, by its name
        self.rules = definition.all_rules()
        self.presets: dict[str, dict[str, float]] = {AS_IT_IS: {}}
        self.presets |= {name: dict(preset) for name, preset in definition.load_presets().items()}
        self.plotter = plotter
        self._live: Path | None = None
        self._config: LabConfig | None = None  # of the last settings that were all allowed
        self._given: dict[str, Any] = flat(plain_value(config or {}))
        find_fault(definition, fault)
        if self._given.keys() - known_fields(definition.config).keys():
            self._given = current_names(definition, self._given)  # an old name only warns
        self.fault = fault
        self.tolerances = checked_tolerances(tolerances or {}, [rule.name for rule in self.rules])
        self._settle()
        if last := newest_run(runs_dir(), definition.name):
            try:  # a reopened notebook shows its last run
                self.run = self.open(last)
            except KitError as error:
                self.trouble = f"the last run cannot be shown: {error}"
        self.judge()

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def given(self) -> dict[str, Any]:
        """The settings chosen by the user; the others come from the fault or the lab."""
        return dict(self._given)

    def set(self, field: str, value: Any) -> None:
        """Set a value. A value equal to the default does not count as chosen by the user."""
        base = self._base()
        if field not in base:  # a setting for all nested configs, or an unknown one
            if field in known_fields(self.definition.config):
                for name in self.groups:
                    self.set(f"{name}.{field}", value)
                return
            validate(self.definition, {field: value})  # the error names the known settings
        (value,) = plain_value({field: value}).values()
        if value == base[field] and type(value) is type(base[field]):
            self._given.pop(field, None)
        else:
            self._given[field] = value
        self._settings_changed()

    def set_fault(self, name: str | None) -> None:
        """Switch a known bug on or off; values chosen by the user override the settings that expose it."""
        fault = find_fault(self.definition, name or None)
        self.fault = name or None
        needs = [f"{key}={value}" for key, value in (fault.set if fault else {}).items() if key in self._given]
        kept = f"fault {name} needs {', '.join(needs)}; your own values are kept"
        self._settings_changed(kept if needs else "")

    def reset(self) -> None:
        self._given = {}
        self.fault = None
        self._settings_changed("all settings reset to the lab's defaults")

    def _settings_changed(self, remark: str = "") -> None:
        self.remark = remark
        if self.state == "idle":
            self.failure = None  # a start with other settings was refused
        self._settle()

    def begin(self) -> None:
        """Another run begins: nothing of the one before is its own."""
        self._live = None
        with self.hold_trait_notifications():
            self.failure, self.notice, self.remark, self.state = None, "", "", "starting"
            self._plan_again()

    def refuse(self, sentence: str) -> None:
        """A start was refused, for example because code cannot be loaded."""
        self.failure = EndedBy("refused", sentence, (), "", "")
        self._settle()

    # -- limits ---------------------------------------------------------------------------------------------------------

    def move(self, rule: str, value: float) -> None:
        """Move one limit; the shown run is judged again at once from its records."""
        moved = {**self.tolerances, rule: value}
        if any(limit.rule == rule and limit.default == value for limit in self.limits):
            moved.pop(rule)
        self.take(moved)

    def take(self, tolerances: Mapping[str, float]) -> None:
        checked = checked_tolerances(tolerances, [rule.name for rule in self.rules])
        with self.hold_trait_notifications():
            self.tolerances = checked
            self.judge()

    def save_tolerances(self, path: str | os.PathLike[str]) -> Path:
        """Save the moved limits as a JSON file, which `kit run --tolerances` also reads."""
        target = user_path(path)
        save_tolerances(target, self.tolerances)
        return target

    def load_tolerances(self, path: str | os.PathLike[str]) -> None:
        self.take(load_tolerances(user_path(path)))

    def save_settings(self, path: str | os.PathLike[str]) -> None:
        """Write the chosen settings as YAML for `kit run --config`; the remark has the command, or why there is no file."""
        try:
            if self.problems:
                raise BadInput("settings that are refused are not saved")
            target = user_path(path)
            fault = f" --fault {self.fault}" if self.fault else ""
            command = f"kit run {self.definition.name} --config {target}{fault}"
            save_settings(plain_value(self._given), target, command)
            self.remark = f"saved; run them with: {command}"
        except KitError as error:
            self.remark = str(error)

    # -- the run that is shown --------------------------------------------------------------------------------------------

    def show(self, run: Run | None) -> None:
        """Show a run. With one from before, the panel is as one without ranks: the last run's end is not the shown run's."""
        with self.hold_trait_notifications():
            self.run, self.remark, self.trouble = run, "", ""
            self.revision += 1
            if self.state in OVER and (run is None or run.dir != self._live):
                self.state, self.failure, self.notice = "idle", None, ""
                self._plan_again()
            self.judge()

    def pick(self, folder: Path) -> None:
        """Show an earlier run from disk."""
        try:
            self.show(self.open(folder))
        except KitError as error:
            self.trouble = f"{run_name(folder)} cannot be shown: {error}"

    def follow(self, folder: Path) -> None:
        self._live = folder
        self.show(self.open(folder))

    def follow_failed(self, folder: Path) -> None:
        """Follow a run that ended before its ranks started."""
        if self._live != folder:
            self.follow(folder)

    def finished(self, run: Run) -> None:
        """The run has its verdict; its records were read and judged in another thread."""
        self._live = run.dir
        self.show(run)
        self.notice = "; ".join(run.notes)

    @property
    def live(self) -> bool:
        """The shown run is the one that this panel's ranks work on, or worked on last."""
        return self.run is not None and self.run.dir == self._live

    def open(self, folder: Path) -> Run:
        return Run(folder, rules=lambda _: self.rules, plotter=self.plotter)

    def grown(self) -> None:
        self.revision += 1

    def judge(self) -> None:
        """Judge the run's measurements with the limits, once the ranks no longer work on it."""
        verdict = None
        run: Run | None = self.run
        if run is not None and not (self.live and self.state in BUSY):
            try:
                verdict = run.verdict(**self.tolerances)
                self.trouble = ""
            except KitError as error:
                self.trouble = str(error)
            except Exception as error:  # noqa: BLE001 - a check may fail on a partial run; the panel must survive
                self.trouble = f"{run_name(run.dir)} cannot be judged: {type(error).__name__}: {error}"
        self.verdict = verdict
        settings = self.values if self._config is None else as_settings(self._config)
        config = settings if run is None else {**settings, **run.config}
        self.limits = limits_of(self.rules, config, verdict, self.tolerances)

    @property
    def can(self) -> frozenset[str]:
        """The actions possible now: start, step, run, stop, restart."""
        allowed = CAN[self.state]
        if self.problems:
            allowed = allowed - (FRESH if self.state == "ready" else {*FRESH, "step", "run"})
        return frozenset(allowed)

    # -- how ---------------------------------------------------------------------------------------------------------------

    def _base(self) -> dict[str, Any]:
        """The values that apply without a choice by the user."""
        fault = find_fault(self.definition, self.fault)
        own = {f.name: None if f.default is dataclasses.MISSING else f.default for f in self.fields}
        return plain_value({**own, **self._spread(fault.set if fault else {})})

    def _spread(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A setting for all nested configs is one of each."""
        every = {field.name for field in nested_fields(self.definition.config)}
        shared = {setting: value for setting, value in settings.items() if setting in every}
        spread = {f"{name}.{setting}": value for name in self.groups for setting, value in shared.items()}
        return {**spread, **{name: value for name, value in settings.items() if name not in every}}

    def _group(self) -> None:
        """Find the nested configs that there are; settings of others are dropped."""
        held = holder(self.definition.config)
        if held is None:
            return
        outer = [field.name for field in fields(self.definition.config)]
        fault = find_fault(self.definition, self.fault)
        layers = [{k: v for k, v in layer.items() if k in outer} for layer in (fault.set if fault else {}, self._given)]
        try:
            config = validate(self.definition, *layers)
        except BadInput:
            if self.groups:  # those from before, until the settings are valid again
                return
            config = validate(self.definition)
        self.groups = {name: nested_fields(self.definition.config, name) for name in getattr(config, held.name)}
        self.fields = [*fields(self.definition.config), *(field for group in self.groups.values() for field in group)]
        known = {field.name for field in self.fields}
        self._given = {name: value for name, value in self._spread(self._given).items() if name in known}

    def _settle(self) -> None:
        self._group()
        base = self._base()
        values = {**base, **self._given}
        config, problems = self._read(values)
        self._config = config or self._config  # limits may depend on it, also while a value is being typed
        # Code that cannot be loaded is tried once, not again for each choice.
        unloadable = [field.name for field in self.fields if field.option.here and field.name in problems]
        others = {**values, **{name: base[name] for name in unloadable}}
        usual = self._read(others).problems if unloadable else problems
        refused: dict[str, dict[Any, str]] = {}
        for field in self.fields:
            for choice in choices(field):
                if choice == values[field.name]:
                    continue
                complaints = self._read({**others, field.name: choice}).problems
                new = [sentence for sentence in complaints.values() if sentence not in usual.values()]
                if new:  # the fault's own settings
                    refused.setdefault(field.name, {})[choice] = new[0]
        with self.hold_trait_notifications():
            self.values = values
            self.problems = problems
            self.refused = refused
            if self.state == "idle" and config is not None and not problems:
                self._plan(config)

    def _read(self, values: Mapping[str, Any]) -> ConfigReading:
        missing = {f.name for f in self.fields if f.default is dataclasses.MISSING and values[f.name] is None}
        kept = {name: value for name, value in values.items() if name not in missing}
        return read_config(self.definition, kept, find_fault(self.definition, self.fault))

    def _plan_again(self) -> None:
        if self._config is not None:
            self._plan(self._config)

    def _plan(self, config: LabConfig) -> None:
        """The plan of the ranks. It does not change while a setting is invalid."""
        roles = self.definition.roles_of(config)
        self.size, self.roles = config.ranks, roles_by_rank(roles)
        steps = self.definition.plan(config)
        nothing: tuple[None, ...] = (None,) * config.ranks
        self.phases = tuple(
            PhaseState(
                step.place,
                step.phase,
                "to do" if index else "next",
                marks(config.ranks, working(step, roles), "waiting"),
                nothing,
            )
            for index, step in enumerate(steps)
        )
        self.progress = RunProgress(0, len(steps))


# -- small questions about settings and limits ---------------------------------------------------------------------------


def plain_value(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON: tuples become lists. Other values are kept, so validation refuses them by name."""
    try:
        return dict(json.loads(json.dumps(dict(values))))
    except (TypeError, ValueError):
        return dict(values)


def choices(field: Field) -> Sequence[Any]:
    """The choices of the field's drop-down or checkbox."""
    if field.choices:
        return field.choices
    if field.kind is bool:
        return (True, False)
    return (None,) if field.optional else ()


def limits_of(
    rules: Sequence[Rule], config: Mapping[str, Any], verdict: Verdict | None, moved: Mapping[str, float]
) -> tuple[PanelLimit, ...]:
    """The limits in the order of the rules. Sliders cover the measured values, so every verdict can be flipped."""
    measured = {row.check.partition("/")[0]: row.measured for row in verdict or ()}
    limits = []
    for rule in applicable(rules, config):
        default = rule.limit_for(config)
        values = default, moved.get(rule.name, default), measured.get(rule.name) or 0.0
        reach = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        ends = slider_span(default, reach, rule.unit)
        limits.append(PanelLimit(rule.name, rule.question, default, rule.unit, rule.better, *ends))
    return tuple(limits)


def slider_span(default: float, reach: float, unit: str) -> tuple[float, float]:
    """Round ends of a slider that covers the default and all given values."""
    if unit == "1":
        return 0.0, max(COUNTS, rounded_up(2 * reach))
    if unit == "ratio" and 0 < default < 0.1:
        return 10.0 ** (math.floor(math.log10(default)) - 3), max(1.0, rounded_up(10 * reach))
    if unit == "ratio":
        return 0.0, rounded_up(max(reach, 1e-3) * (10 if default == 0 else 1.2))
    return 0.0, rounded_up(max(4 * default, 2 * reach, 1.0))


def rounded_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-12))


# -- what drives the lab ---------------------------------------------------------------------------------------------

EVERY_S = 0.2  # seconds between two updates of elapsed times
POLL_S = 0.02
CLOSE_S = 10.0

LOGGER = logging.getLogger(__name__)


class PanelController:
    """`start`, `step`, `run_all`, `stop`, `restart`, `close`, as a panel's buttons. `wait` is for scripts."""

    def __init__(self, model: PanelModel, *, lab: Lab | None = None, out: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self._mail = Mail()
        self._out = None if out is None else Path(out)
        self._given = lab  # a lab with ranks not started here
        self._lab: Lab | None = None
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._busy = 0
        self._over = True  # there is no lab, or it has ended and the model knows
        self._stopping = threading.Event()
        self._closed = False
        self._watch = CallWatch(self._stopping, self._flush, EVERY_S)
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"kit-panel-{model.definition.name}")
        if lab is not None:
            self._adopt(lab)

    # -- what the buttons do --------------------------------------------------------------------------------------------

    def _order(self, name: str) -> None:
        if self._allowed(name):
            self._stopping.clear()
            if self.model.state == "ready" and name in {"step", "run"}:
                self.model.notice, self.model.state = "", "running"
            else:
                self.model.begin()
            self._send(name)

    start = partialmethod(_order, "start")
    step = partialmethod(_order, "step")
    run_all = partialmethod(_order, "run")
    restart = partialmethod(_order, "restart")

    def stop(self) -> None:
        """End the ranks, even if they hang. Measurements are kept."""
        if self._allowed("stop"):
            self._stopping.set()
            self.model.state = "stopping"
            self.model.notice = "stopping: ranks that do not stop are ended"
            self._send("stop")  # for idle ranks; a call in flight is ended by its next tick

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        if self._thread.is_alive():
            self._orders.put("close")
            self._thread.join(CLOSE_S)
        elif self._lab is not None:
            self._lab.close()
        self._mail.deliver()

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing is in progress. The model is then up to date, also within a notebook cell."""
        deadline = time.monotonic() + timeout_s
        while self._busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the panel is still {self.model.state} after {timeout_s:g} s")
            self._mail.deliver()
            time.sleep(POLL_S)
        self._mail.deliver()

    # -- in the caller's thread ---------------------------------------------------------------------------------------------

    def _allowed(self, name: str) -> bool:
        model = self.model
        if name in model.can and not self._closed:
            return True
        problem = next(iter(model.problems.values()), "")
        why = "the panel is closed" if self._closed else problem or f"the lab is {model.state}"
        model.remark = f"{name} is not possible now: {why}"
        return False

    def _send(self, name: str) -> None:
        with self._mail.lock:
            self._busy += 1
        if not self._thread.is_alive():
            self._thread.start()
        self._orders.put(name)

    def _adopt(self, lab: Lab) -> None:
        self._lab = lab
        ended = end_of(lab)
        state = ended or ("ready" if lab.started else "idle")
        self._watch.take(lab)
        self._over = bool(ended)
        self.model.state = state
        if lab.started:
            self._mail.send(lambda: self.model.follow(lab.dir))
        self._flush()
        self._mail.deliver()
        lab.followers.append(self._moved)

    def _moved(self) -> None:
        """Follow a step that another cell made; in a step of this panel there is nothing to follow."""
        lab = self._lab
        if self._busy or self._over or self._closed or lab is None:
            return
        if self.model.state == "idle":
            self.model.state = "ready"
            self.model.follow(lab.dir)
        self._caught_up(lab)
        self._watch.grew = True
        self._flush()
        self._mail.deliver()

    # -- in the controller's thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            name = self._orders.get()
            if name == "close":
                break
            try:
                self._do(name)
            except BadInput as error:
                self._watch.forget()
                self._end("idle", self.model.refuse, str(error))
            except BaseException as error:  # noqa: BLE001 - any exception ends this run and is shown; the panel survives
                self._failed(error)
            self._flush()
            self._mail.send(self._rested)
        if self._lab is not None:
            self._lab.close()

    def _rested(self) -> None:
        self._busy -= 1

    def _do(self, name: str) -> None:
        if not self._over and self._lab is not None and self._caught_up(self._lab):
            return
        if name == "stop":
            if not self._over:
                raise KeyboardInterrupt
            return
        self._watch.begin(all_of_it=name == "run")
        lab = self._lab
        if lab is None or self._over or name in {"start", "restart"} or not lab.started:
            lab = self._make()
        before, lab.observe = lab.observe, lambda _: self._watch
        try:
            self._go(lab, name)
        finally:
            lab.observe = before  # manual steps keep their own observer

    def _go(self, lab: Lab, name: str) -> None:
        if not lab.started:
            lab.start()
            self._mail.send(lambda: self.model.follow(lab.dir))
        for _ in range({"step": 1, "run": self._watch.left}.get(name, 0)):
            self._check_stop()
            self._mail.send(self._running)
            began = time.monotonic()
            self._watch.stepped(lab.step(), time.monotonic() - began)
        self._check_stop()
        if self._watch.left:
            self._end("ready", self._say, self._watch.words())
            return
        self._mail.send(self._running)
        run = lab.run()
        if lab is not self._given:
            lab.close()
        self._end("finished", self.model.finished, run)

    def _caught_up(self, lab: Lab) -> bool:
        """Take over manual steps since the panel's last order; true if the lab has ended."""
        if lab.done != self._watch.done or lab.error:  # manual steps
            self._watch.take(lab)
        if lab.judged is not None:
            self._end("finished", self.model.finished, lab.judged)
        elif lab.error:
            self._end(end_of(lab), self._say, lab.error)
        return self._over

    def _make(self) -> Lab:
        """A new lab with the current settings; an adopted lab that already has ranks is kept unchanged."""
        model, old = self.model, self._lab
        if old is not None:
            same = (old.given, old.fault) == (model.given, model.fault)
            if same and not old.started and not old.error:
                return old
            self._lab = None
            old.close()
        made = self._lab = Lab(
            model.definition,
            model.given,
            fault=model.fault,
            out=self._folder(),
            tolerances=model.tolerances,
            plotter=model.plotter,
        )
        self._watch.take(made)
        self._over = False
        self._flush()
        return made

    def _folder(self) -> Path | None:
        """The requested folder; later runs of the panel go next to it."""
        if self._out is None:
            return None
        beside = (self._out.with_name(f"{self._out.name}-{number}") for number in itertools.count(2))
        return next(folder for folder in itertools.chain([self._out], beside) if not (folder / "run.json").exists())

    def _failed(self, error: BaseException) -> None:
        watch = self._watch
        done = f"{watch.done} of {watch.done + watch.left} phases were done; their measurements are kept"
        failure = failure_of(error, watch.stacks, watch.phase, done)
        if (lab := self._lab) is not None:
            lab.close()
            self._mail.send(lambda: self.model.follow_failed(lab.dir))
        watch.failed(failure)
        self._mail.send(lambda: setattr(self.model, "failure", failure))
        self._end("stopped" if failure.kind == "stopped" else "failed", self._say, failure.message)

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _say(self, text: str) -> None:
        self.model.notice = text

    def _running(self) -> None:
        if self.model.state != "stopping":
            self.model.state = "running"

    def _end(self, state: str, then: Callable[..., None], *what: Any) -> None:
        def change() -> None:
            with self.model.hold_trait_notifications():
                self.model.state = state
                then(*what)
                self.model.judge()

        self._over = state != "ready"
        self._watch.rest()
        self._flush()
        self._mail.send(change)

    def _flush(self) -> None:
        phases, progress, log = self._watch.seen()
        roles = {} if self._lab is None else roles_by_rank(self._lab.roles)
        grew, self._watch.grew = self._watch.grew, False

        def change() -> None:
            with self.model.hold_trait_notifications():
                self.model.log = log
                if phases:
                    self.model.size, self.model.roles = len(phases[0].ranks), roles
                    self.model.phases, self.model.progress = phases, progress
                if grew:
                    self.model.grown()

        self._mail.send(change)


def end_of(lab: Lab) -> str:
    """How a manually driven lab ended; empty if it has not."""
    if lab.judged is not None:
        return "finished"
    return "" if not lab.error else "stopped" if lab.error.startswith("stopped") else "failed"


class Mail:
    """Applies changes of the model, in order, in the kernel's thread. `deliver` applies them now."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # the kernel's; without one, changes apply at once
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self._changes: deque[Callable[[], None]] = deque()
        self.lock = threading.RLock()

    def send(self, change: Callable[[], None]) -> None:
        self._changes.append(change)
        if self._loop is None:
            self.deliver()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        with self.lock:
            while self._changes:
                try:
                    self._changes.popleft()()
                except Exception:  # a failing view must not block other views or the ranks
                    LOGGER.exception("a view of the panel failed")
