"""What a panel knows, for views to observe: settings, the plan and how far it is, the run, its verdict and the limits.

Plain data in traits that are replaced, never changed in place. No widget is needed: a script or a test drives it as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from traitlets import Any as AnyTrait
from traitlets import Dict, HasTraits, Instance, Int, Tuple, Unicode

from kit.errors import KitError
from kit.labs.definition import Definition, Field, fields, role_names, working
from kit.labs.discover import complaints, find_fault, settled, validate
from kit.results import Check, Run, Verdict, load_tolerances, newest_run, runs_dir, save_tolerances
from kit.results.run import Plotter
from kit.results.verdict import asked, checked_tolerances
from kit.view.progress import Failure, PhaseState, RunProgress, marks

COUNTS = 10.0  # a slider of counts goes at least so far
AS_IT_IS = "the lab's own"
CAN = {
    "idle": {"start", "step", "run"},
    "starting": {"stop"},
    "ready": {"step", "run", "stop", "restart"},
    "running": {"stop"},
    "stopping": set[str](),
    **{over: {"start", "step", "run", "restart"} for over in ("finished", "failed", "stopped")},
}
BUSY = {"starting", "running", "stopping"}
FRESH = {"start", "restart"}  # of these, and of step and run where no ranks live, new ranks come


class Limit(NamedTuple):
    """A tolerance, and the checks that share it. From `low` to `high` goes its slider: by powers of ten where low is above 0."""

    tolerance: str
    checks: tuple[str, ...]
    question: str
    default: float
    unit: str
    better: str
    low: float
    high: float


class PanelModel(HasTraits):
    """A lab's panel without widgets. A controller moves what lives; `set`, `move`, `show` and the like are for people."""

    values = Dict()
    fault = Unicode(None, allow_none=True)
    problems = Dict()
    refused = Dict()
    state = Unicode("idle")
    phases = Tuple()
    size = Int(0)
    roles: Any = Dict()  # of ranks, where they have names
    progress = Instance(RunProgress, args=())
    failure = Instance(Failure, allow_none=True)
    log = Tuple()
    said = Unicode("")
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
        self.fields: list[Field] = fields(definition.config)
        self.checks = definition.all_checks()
        self.presets: dict[str, dict[str, float]] = {AS_IT_IS: {}}
        self.presets |= {name: dict(some) for name, some in definition.load_presets().items()}
        self.plotter = plotter
        self._live: Path | None = None
        self._given: dict[str, Any] = plain(config or {})
        find_fault(definition, fault)
        unknown = set(self._given) - {field.name for field in self.fields}
        if unknown:
            validate(definition, self._given)  # names it, and the known ones
        self.fault = fault
        self.tolerances = checked_tolerances(tolerances or {}, [check.tolerance for check in self.checks])
        self._settle()
        if last := newest_run(runs_dir(), definition.name):
            try:  # a notebook that is opened again shows where its owner left off
                self.run = self.open(last)
                self.said = f"showing the last run, {described(self.run)}"
            except KitError as error:
                self.said = f"the last run cannot be shown: {error}"
        self.judge()

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def given(self) -> dict[str, Any]:
        """The settings that a person chose; the rest is the fault's or the lab's own."""
        return dict(self._given)

    def set(self, field: str, value: Any) -> None:
        """Give a setting a value; what it had by itself is no choice of the person's."""
        base = self._base()
        if field not in base:
            validate(self.definition, {field: value})  # says that it is unknown, and names the known ones
        (value,) = plain({field: value}).values()
        if value == base[field] and type(value) is type(base[field]):
            self._given.pop(field, None)
        else:
            self._given[field] = value
        self._settle()

    def set_fault(self, name: str | None) -> None:
        """Switch a known bug on, or off; the settings that expose it go below those that a person chose."""
        fault = find_fault(self.definition, name or None)
        self.fault = name or None
        self._settle()
        if fault is None:
            self.said = "no fault is switched on"
            return
        wanted = ", ".join(f"{key}={value}" for key, value in fault.set.items() if key in self._given)
        kept = f"; it needs {wanted}; your own values are kept" if wanted else ""
        self.said = f"fault {name}: {fault.breaks}{kept}"

    def reset(self) -> None:
        self._given = {}
        self.fault = None
        self._settle()
        self.said = "all settings are back to the lab's defaults"

    def refuse(self, sentence: str) -> None:
        """A start was refused, such as for code that cannot be loaded."""
        self.said = sentence
        self.failure = Failure("error", sentence, (), "", "")
        self._settle()

    # -- limits ---------------------------------------------------------------------------------------------------------

    def move(self, tolerance: str, value: float) -> None:
        """Move one limit; the run that is shown is judged again at once, from what was measured."""
        moved = {**self.tolerances, tolerance: value}
        if any(limit.tolerance == tolerance and limit.default == value for limit in self.limits):
            moved.pop(tolerance)
        self.take(moved)

    def take(self, tolerances: Mapping[str, float]) -> None:
        checked = checked_tolerances(tolerances, [check.tolerance for check in self.checks])
        with self.hold_trait_notifications():
            self.tolerances = checked
            self.judge()

    def save_tolerances(self, path: str | os.PathLike[str]) -> Path:
        """The moved limits as a JSON file that `kit run --tolerances` takes too."""
        target = Path(path).expanduser()
        save_tolerances(target, self.tolerances)
        return target

    def load_tolerances(self, path: str | os.PathLike[str]) -> None:
        self.take(load_tolerances(Path(path).expanduser()))

    # -- the run that is shown --------------------------------------------------------------------------------------------

    def show(self, run: Run | None) -> None:
        with self.hold_trait_notifications():
            self.run = run
            self.revision += 1
            self.judge()
        if run is not None:
            self.said = f"showing {described(run)}"

    def follow(self, folder: Path) -> None:
        self._live = folder
        self.show(self.open(folder))
        self.said = folder.name

    def finished(self, run: Run) -> None:
        """The run that ranks worked on came to its verdict; its records were read and judged in another thread."""
        self.show(run)
        self.said = run.dir.name

    def open(self, folder: Path) -> Run:
        return Run(folder, checks=lambda _: self.checks, plotter=self.plotter)

    def grown(self) -> None:
        self.revision += 1

    def judge(self) -> None:
        """Put the limits to what the run measured. While ranks work on it, it waits for them."""
        verdict = None
        run: Run | None = self.run
        if run is not None and not (run.dir == self._live and self.state in BUSY):
            try:
                verdict = run.verdict(**self.tolerances)
            except KitError as error:
                self.said = str(error)
            except Exception as error:  # noqa: BLE001 - a check may stumble over part of a run; the panel must stay
                self.said = f"{run.dir.name} cannot be judged: {type(error).__name__}: {error}"
        self.verdict = verdict
        config = settled(self.values) if run is None else {**self.values, **run.config}
        self.limits = limits_of(self.checks, config, verdict, self.tolerances)

    @property
    def can(self) -> frozenset[str]:
        """What makes sense now, of start, step, run, stop and restart."""
        now = CAN[self.state]
        if self.problems:
            now = now - (FRESH if self.state == "ready" else {*FRESH, "step", "run"})
        return frozenset(now)

    # -- how ---------------------------------------------------------------------------------------------------------------

    def _base(self) -> dict[str, Any]:
        """The values where a person chose none."""
        fault = find_fault(self.definition, self.fault)
        own = {f.name: None if f.default is dataclasses.MISSING else f.default for f in self.fields}
        return plain({**own, **(fault.set if fault else {})})

    def _settle(self) -> None:
        values = {**self._base(), **self._given}
        problems = self._complaints(values)
        refused: dict[str, dict[Any, str]] = {}
        for field in self.fields:
            for choice in choices(field):
                found = self._complaints({**values, field.name: choice}) if choice != values[field.name] else {}
                new = [sentence for sentence in found.values() if sentence not in problems.values()]
                if new:  # what the choice itself would bring
                    refused.setdefault(field.name, {})[choice] = new[0]
        with self.hold_trait_notifications():
            self.values = values
            self.problems = problems
            self.refused = refused
            if self.state == "idle":
                self._plan(values)

    def _complaints(self, values: Mapping[str, Any]) -> dict[str, str]:
        missing = {f.name for f in self.fields if f.default is dataclasses.MISSING and values[f.name] is None}
        given = {name: value for name, value in values.items() if name not in missing}
        return complaints(self.definition, given, find_fault(self.definition, self.fault))

    def _plan(self, values: Mapping[str, Any]) -> None:
        """What the ranks would do. It stays as it was while a setting is wrong."""
        if self.problems:
            return
        config = validate(self.definition, values)
        roles = self.definition.roles_of(config)
        self.size, self.roles = config.ranks, role_names(roles)
        steps = self.definition.plan(config)
        nothing: tuple[None, ...] = (None,) * config.ranks
        self.phases = tuple(
            PhaseState(
                step.cycle,
                step.phase,
                "to do" if index else "next",
                marks(config.ranks, working(step, roles), "waiting"),
                nothing,
            )
            for index, step in enumerate(steps)
        )
        self.progress = RunProgress(0, len(steps))


# -- small questions about settings and limits ---------------------------------------------------------------------------


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has them: tuples are lists. What JSON has no word for stays, for the check to refuse by name."""
    try:
        return dict(json.loads(json.dumps(dict(values))))
    except (TypeError, ValueError):
        return dict(values)


def choices(field: Field) -> Sequence[Any]:
    """The values among which a drop-down or a checkbox of the field lets a person choose."""
    if field.choices:
        return field.choices
    if field.kind is bool:
        return (True, False)
    return (None,) if field.optional else ()


def described(run: Run) -> str:
    fault = f", fault {run.fault}" if run.fault else ""
    return f"{run.dir.name} ({run.status}{fault})"


def limits_of(
    checks: Sequence[Check], config: Mapping[str, Any], verdict: Verdict | None, moved: Mapping[str, float]
) -> tuple[Limit, ...]:
    """The limits in the order of the checks. What was measured lies within the slider, so that every verdict can be flipped."""
    measured = {row.check.partition("/")[0]: row.measured for row in verdict or ()}
    found: dict[str, Limit] = {}
    checks = asked(checks, config)
    for check in checks:
        name = check.tolerance
        if name in found:
            continue
        names = tuple(other.name for other in checks if other.tolerance == name)
        default = check.limit_for(config)
        reach = [default, moved.get(name, default), *(measured.get(one) or 0.0 for one in names)]
        ends = span(default, max((abs(value) for value in reach if math.isfinite(value)), default=0.0), check.unit)
        found[name] = Limit(name, names, check.question, default, check.unit, check.better, *ends)
    return tuple(found.values())


def span(default: float, reach: float, unit: str) -> tuple[float, float]:
    """The ends of a slider that holds the default and all that is in reach, at round numbers."""
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
