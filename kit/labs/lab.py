"""A lab that is stepped: phase by phase by hand, or all at once; both are the same code.

Making one checks the config and makes the run's folder; `start` starts the ranks, or takes those of a World that was given (whose
logs stay where they are). Each `step` runs one phase on every rank and
appends what was measured at once, so that a run that is killed keeps everything. `run` does the steps that are left and
judges. The first failure ends the run: its folder says so, and the error is raised on.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kit.errors import BadInput, KitError, RankError
from kit.labs import routed
from kit.labs.configure import as_json, configure, find_fault, refuse_device
from kit.labs.memory import CARD, cards
from kit.labs.stepped import Stepped
from kit.measure import provenance
from kit.results import Record, Run, create_run, runs_dir
from kit.results.artefacts import SNAPSHOTS
from kit.results.files import write_text
from kit.results.tolerances import checked_tolerances
from kit.world import World
from kit.world.several import Worlds

if TYPE_CHECKING:
    from pathlib import Path

    from kit.labs.definition import Definition, Step
    from kit.results.run import Plotter
    from kit.world.calls import Observer

RANKSIDE = "kit.labs.rankside"
BOUNDARY = "run"  # the phase of what is measured once, before the first phase and after the last


class PhaseRow(NamedTuple):
    """One phase of the plan. `status` is done, next, to do or failed."""

    cycle: int
    phase: str
    status: str


class Lab:
    """`lab.phases`, `lab.step()`, `lab.run()`, `lab.close()`; `lab.world` has the ranks, `lab.dir` is the run's folder."""

    def __init__(
        self,
        definition: Definition,
        config: Mapping[str, Any],
        *,
        fault: str | None = None,
        out: Path | None = None,
        tolerances: Mapping[str, float] | None = None,
        observe: Callable[[int], Observer] | None = None,
        plotter: Plotter | None = None,
        panel: Callable[[Lab], object] | None = None,
        world: World | None = None,
    ) -> None:
        """`observe` makes who looks on at so many calls; `plotter` and `panel` are of a room that labs do not know."""
        self.definition = definition
        self.name = definition.name
        self._plotter = plotter
        self._panel = panel
        self.fault = fault
        if world is not None:
            config = {"ranks": world.ranks, **config}
        self.given = dict(config)
        self.config = configure(definition, config, find_fault(definition, fault))
        self._sizes = definition.world_sizes(self.config)
        if isinstance(world, Worlds):
            raise BadInput("world= takes one World, not several; leave it out")
        if world is not None and len(self._sizes) > 1:
            raise BadInput(f"world= gives one World, and this config needs {len(self._sizes)}; leave it out")
        if world is not None and self.config.ranks != world.ranks:
            raise BadInput(f"ranks={self.config.ranks}, and the World that was given has {world.ranks}")
        if world is not None and routed.wanted(self.config):
            routed.refuse_unrouted(world)
        self._given = world
        self._checks = [check for check in definition.all_checks() if check.asked(as_json(self.config))]
        self.tolerances = checked_tolerances(tolerances or {}, [check.tolerance for check in self._checks])
        self._plan: Sequence[Step] = definition.plan(self.config)
        self._done = 0
        self._error = ""
        self._run: Run | None = None
        self.observe = observe
        self._observer: Observer | None = None
        self._about = provenance()
        self._writer = create_run(runs_dir(), self.name, as_json(self.config), self._about, out=out, fault=fault)
        self.dir = self._writer.dir
        self.world: World | Worlds

    # -- what a person does with it ---------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the ranks and the lab on them, if that is not done yet. `step` and `run` do it by themselves."""
        if self.started:
            return self
        if self._observer is None:
            self._watch(1)
        try:
            self.world = self._given or self._make()
            self._begin()
        except BaseException as error:
            self._failed(error)
            self.close()
            if isinstance(error, RankError) and error.refused:  # what only the ranks' own environment could tell
                raise BadInput(error.refused) from error
            raise
        return self

    @property
    def phases(self) -> list[PhaseRow]:
        """The plan, and how far it is."""
        marks = ["done"] * self._done + ["failed" if self._error else "next"] + ["to do"] * len(self._plan)
        return [PhaseRow(step.cycle, step.phase, mark) for step, mark in zip(self._plan, marks, strict=False)]

    def step(self) -> Stepped:
        """Run the next phase on every rank."""
        self._watch(1)
        return self._step()

    def run(self) -> Run:
        """Run the phases that are left, judge, and write the verdict. Once done, the same Run again."""
        if self._run is not None:
            return self._run
        self._check_going()
        self._watch(len(self._plan) - self._done + 2)
        self.start()
        while self._done < len(self._plan):
            self._step()
        try:
            answers = self.world.call(f"{RANKSIDE}:end")
            self._append_pss("pss", answers)
            self._append_routing(answers, routed.AFTER)
            run = Run(self.dir, checks=lambda _: self._checks, plotter=self._plotter)
            self._writer.write_verdict(run.verdict(**self.tolerances))
            self._writer.finish()
        except BaseException as error:
            self._failed(error)
            raise
        self._run = run
        return run

    @property
    def started(self) -> bool:
        """Whether its ranks were started, however they are now."""
        return "world" in vars(self)

    @property
    def error(self) -> str:
        """What ended it, in one line; empty where nothing did."""
        return self._error

    @property
    def judged(self) -> Run | None:
        """The run, once it has its verdict."""
        return self._run

    def panel(self) -> object:
        """A panel of this lab as it stands, to show in a notebook."""
        if self._panel is None:
            raise BadInput("this lab was made without a panel; make it with kit.lab, or take kit.panel")
        return self._panel(self)

    def close(self) -> None:
        """End the ranks, unless their World was given. A run that had not come to its verdict is marked as failed. May be called again."""
        if self._run is None and not self._error:
            self._failed(KitError(f"closed before its end: {self._done} of {len(self._plan)} phases were done"))
        if self.started and self._given is None:
            self.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "judged" if self._run else f"failed: {self._error}" if self._error else "under way"
        fault = f", fault {self.fault}" if self.fault else ""
        return f"<lab {self.name}{fault}: {self._done} of {len(self._plan)} phases done, {state}; {self.dir}>"

    # -- how --------------------------------------------------------------------------------------------------------

    def _watch(self, calls: int) -> None:
        """A new onlooker for so many calls: a step by hand is watched by itself, however long after the one before."""
        if self.observe is not None:
            self._observer = self.observe(calls)
            if self.started:
                self.world.observer = self._observer

    def _make(self) -> World | Worlds:
        settings: dict[str, Any] = {
            "device": self.config.device,
            "timeout_s": self.config.timeout_s,
            "python": self.config.python or None,
            "preload": self.definition.preload,
            "logs": self.dir / "logs",
            "observer": self._observer,
        }
        if env := routed.environment(self.config):
            settings["env"] = env
        return Worlds(self._sizes, **settings) if len(self._sizes) > 1 else World(self._sizes[0], **settings)

    def _step(self) -> Stepped:
        self._check_going()
        self.start()
        if self._done == len(self._plan):
            raise KitError("every phase is done; run() judges what was measured")
        cycle, phase = self._plan[self._done]
        try:
            answers = self.world.call(
                f"{RANKSIDE}:step", phase=phase, timeout_s=self.config.timeout_s, cycle=cycle, name=phase
            )
            records = self._append(cycle, phase, dict(enumerate(answers)))
        except BaseException as error:
            self._failed(error)
            raise
        self._done += 1
        return Stepped(cycle, phase, records, done=self._done, planned=len(self._plan))

    def _begin(self) -> None:
        fault = find_fault(self.definition, self.fault)
        if fault is not None:
            refuse_device(fault, self.world.device)
        config = type(self.config)
        answers = self.world.call(
            f"{RANKSIDE}:begin",
            phases=self.definition.phases,
            config_type=f"{config.__module__}:{config.__qualname__}",
            config=as_json(self.config),
            fault=self.fault,
            devices=[row["device"] for row in self.world.status()],
            world_sizes=self._sizes,
            meeting=f"kit-{secrets.token_hex(8)}",
            snapshots=str(self.dir / SNAPSHOTS) if self._snapshots else None,
        )
        about = {"ranks": self.world.ranks, "device": self.world.device, "why": self.world.status()[0]["why"]}
        if len(self._sizes) > 1:
            about["sizes"] = list(self._sizes)
        self._about |= {"rank0": answers[0]["provenance"], "world": about}
        self._writer.set_provenance(self._about)
        self._append_routing(answers, routed.BEFORE)
        self._append_once(CARD, cards(self.world.status()), "1")
        self._append_pss("pss_before", answers)

    @property
    def _snapshots(self) -> bool:
        return self.config.memory_snapshot and self.started and self.world.device.startswith("cuda")

    def _check_going(self) -> None:
        if self._error:
            raise KitError(f"this run has failed ({self._error}); make a new lab")
        if self._run is not None:
            raise KitError("this run is judged; make a new lab")

    def _append(self, cycle: int, phase: str, answers: Mapping[int, Any]) -> list[Record]:
        records = [
            Record(
                run=self._writer.id,
                lab=self.name,
                cycle=cycle,
                phase=phase,
                rank=rank,
                metric=metric,
                value=value,
                unit=unit,
                time=answer["ended"],
            )
            for rank, answer in answers.items()
            for metric, value, unit in answer["metrics"]
        ]
        self._writer.append(records)
        return records

    def _append_pss(self, metric: str, answers: Sequence[Any]) -> None:
        rows = {rank: answer["pss"] for rank, answer in enumerate(answers) if answer["pss"] is not None}
        self._append_once(metric, rows, "B")

    def _append_routing(self, answers: Sequence[Any], names: Sequence[str]) -> None:
        """What ranks say of a routing that was asked for: numbers among the records, and rank 0's own words where it comes from."""
        if routed.wanted(self.config):
            said = [answer["routing"] for answer in answers]
            self._writer.set_provenance({**self._about, "routing": said[0]})
            for metric, values in routed.numbers(said, names).items():
                self._append_once(metric, values, "1")

    def _append_once(self, metric: str, values: Mapping[int, float], unit: str) -> None:
        """A number of each rank that belongs to no phase."""
        ended = time.time()
        rows = {rank: {"metrics": [(metric, value, unit)], "ended": ended} for rank, value in values.items()}
        self._append(0, BOUNDARY, rows)

    def _failed(self, error: BaseException) -> None:
        """Keep what can be known of the failure. Whatever goes wrong here must not hide the error itself."""
        text = str(error)
        name = "stopped" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        said = f"{name}: {text}" if text else name
        self._error = said.partition("\n")[0]
        with contextlib.suppress(KitError):
            if isinstance(error, RankError) and self._done < len(self._plan):
                self._append_last(*self._plan[self._done])
        with contextlib.suppress(KitError):
            if self._snapshots:
                self.world.call(f"{RANKSIDE}:snapshot", ranks=self._idle(), timeout_s=60)
        with contextlib.suppress(KitError, OSError):
            write_text(self.dir / "logs" / "error.txt", said + "\n")
        with contextlib.suppress(KitError, OSError):
            self._writer.fail(self._error)

    def _append_last(self, cycle: int, phase: str) -> None:
        """The records of a phase that raised: the ranks still know them, unless one of them hangs."""
        idle = self._idle()
        answers = self.world.call(f"{RANKSIDE}:last", ranks=idle, timeout_s=5)
        known = {
            rank: answer
            for rank, answer in zip(idle, answers, strict=True)
            if answer and answer["cycle"] == cycle and answer["name"] == phase
        }
        self._append(cycle, phase, known)

    def _idle(self) -> list[int]:
        return [row["rank"] for row in self.world.status() if row["state"] == "idle"]
