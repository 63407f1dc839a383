"""Runs a lab step by step or all at once (with the same code); also the API for driven steps, and the table of a step.

The constructor checks the config and makes the run's folder. `start` starts the ranks or uses those of a given World, which keeps its logs.
Each `step` runs one phase on every rank and appends its records at once, so a killed run keeps everything. `run` does the remaining steps
and judges. The first failure ends the run; it is written to the folder and raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from kit import routing
from kit.errors import BadInput, KitError, RankDied, RankError
from kit.labs.definition import (
    EXPLORED,
    Definition,
    LabConfig,
    Role,
    Step,
    as_settings,
    made,
    roles_by_rank,
    working,
    world_machines,
    world_sizes,
)
from kit.labs.discover import configure, find_fault, refuse_device, runs_on_gpus
from kit.labs.hosted import ControllerActor, LentRanks, cancel_lent, description, wait_for_lent
from kit.measure.recorder import provenance
from kit.results import Row, Run, create_run, runs_dir
from kit.results.curves import Curves
from kit.results.frames import GPU
from kit.results.growth import gpu_of_rank
from kit.results.records import NOTEBOOK, Recording, label, rank_name, write_text
from kit.results.rules import applicable
from kit.results.run import SNAPSHOTS, Plotter
from kit.results.units import amount, columns, table_html
from kit.results.verdict import Verdict, checked_tolerances
from kit.target import load, load_callable, replaced
from kit.tls import make_certificate
from kit.world import World
from kit.world.calls import Pending, WorldObserver, cancel_all, wait, without_advice
from kit.world.channel import publish
from kit.world.launch import RAY
from kit.world.world import Printer, Worlds

RANKSIDE = "kit.labs.rankside"
Write = Callable[[int, list[dict[str, Any]]], None]
OWN_S = 120.0
BROKE = "broke"  # the metric of a phase that broke and did not end the run; its text says how
BOUNDARY = "run"  # the phase of measurements before the first phase and after the last
# The parts of a rank's routing report that become records: at the start, and for the groups at the end.
ROUTING_BEFORE = ("requested", "importable", "effective", "reason")
ROUTING_AFTER = ("groups", "groups_effective", "options_lost")


class PhaseRow(NamedTuple):
    """One phase of the plan. `status` is done, next, to do or failed."""

    cycle: int
    phase: str
    status: str


class Follower(Protocol):
    """Gets the rows of a run as they are recorded. It must not raise."""

    def see(self, rows: Sequence[Row]) -> None: ...
    def close(self) -> None: ...


class Quiet(Printer):
    """An observer of one call of a driven step: it shows output and may stop the step, but does not change the step's progress."""

    def __init__(self, observer: WorldObserver) -> None:
        self._observer = observer

    def output(self, rank: int, text: str) -> None:
        self._observer.output(rank, text)

    def tick(self, answered: Sequence[int]) -> None:  # noqa: ARG002 - answers of one call do not show the step's progress
        self._observer.tick(())

    def about(self, text: str) -> None:
        if show := getattr(self._observer, "about", None):  # optional for observers
            show(text)


@dataclasses.dataclass(kw_only=True, eq=False)
class Drive(Recording):
    """A driver's interface: `submit` a method to a role, `wait`, `record`. The driver returns when the step is done."""

    world: World | Worlds
    config: Any
    scene: Mapping[str, Any]  # what a fault needs to show; else empty
    cycle: int
    phase: str
    roles: Mapping[str, tuple[int, ...]]
    folder: Path  # the run's, with everything that was recorded so far
    write: Write
    quiet: Quiet
    tell: Callable[[Mapping[str, Any]], None]  # adds to the run's provenance
    restart: Callable[[], None]
    # Ranks that the step ended on purpose; no later call goes to them.
    lost: set[int] = dataclasses.field(default_factory=set)
    flying: list[Pending] = dataclasses.field(default_factory=list)

    def submit(
        self,
        method: str,
        *,
        args: Mapping[str, Any] | None = None,
        role: str | None = None,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Pending:
        """Have the ranks of a role, or these ranks, run `method(**args)` of their phases object."""
        if (role is None) == (ranks is None):
            raise BadInput("submit needs exactly one of role= and ranks=")
        if role is not None and role not in self.roles:
            raise BadInput(f"there is no role {role!r} in this step; its roles are {', '.join(map(repr, self.roles))}")
        pending = self.world.submit(
            f"{RANKSIDE}:act",
            args={"method": method, "args": dict(args or {})},
            ranks=self.roles[role] if role is not None else ranks,
            timeout_s=self.config.timeout_s if timeout_s is None else timeout_s,
            phase=self.phase,
            observer=self.quiet,
            on_news=self.write,
        )
        self.flying = [earlier for earlier in self.flying if not earlier.settled] + [pending]
        return pending

    wait = staticmethod(wait)
    cancel_all = staticmethod(cancel_all)

    def _send(self, row: Row) -> None:
        self.append([row])

    def append(self, rows: Sequence[Row]) -> None:
        self.write(NOTEBOOK, [row.facts() for row in rows])

    def renew(self) -> None:
        """Fresh ranks in place of all that the lab has, on which it begins again; calls in flight are given up."""
        self.restart()
        self.flying.clear()

    def cancel(self) -> list[Pending]:
        left = [one for one in self.flying if not one.settled]
        self.cancel_all(left)
        return left

    def finish(self) -> None:
        """A driver that returns before its calls are over has a bug."""
        if calls := ", ".join(f"{pending.phase} on ranks {pending.ranks}" for pending in self.cancel()):
            raise KitError(
                f"the driver of {self.phase!r} returned while calls were in flight ({calls}); wait for them first"
            )


class HostedDrive(Drive):
    """A driver's interface in the controller's actor."""

    wait = staticmethod(wait_for_lent)  # type: ignore[assignment]
    cancel_all = staticmethod(cancel_lent)  # type: ignore[assignment]


def host_driver(
    *,
    lent: Mapping[str, Sequence[Any]],
    device: str,
    driver: str,
    patches: Mapping[str, str],
    config_type: str,
    config: Mapping[str, Any],
    folder: str,
    roles: Mapping[str, Sequence[int]],
    **about: Any,
) -> dict[str, Any]:
    """Run a driven step in the controller's actor, on the ranks that were lent to it."""

    def write(rank: int, rows: list[dict[str, Any]]) -> None:
        publish({"rank": rank, "rows": rows})

    def refuse(*_: object) -> None:
        raise KitError(f"the driver {driver} needs engine=torchrun, because it does more with ranks than call them")

    world: Any = LentRanks(lent, device)
    drive = HostedDrive(
        world=world,
        config=made(load(config_type), config),
        folder=Path(folder),
        roles={name: tuple(ranks) for name, ranks in roles.items()},
        write=write,
        quiet=Quiet(Printer()),
        tell=refuse,
        restart=refuse,
        **about,
    )
    error = None
    try:
        with replaced(patches):
            load_callable(driver)(drive)
            drive.finish()
    except KitError as failure:
        error = description(failure)
    finally:
        drive.cancel()
        world.give_back()
    return {"error": error, "lost": sorted(drive.lost)}


class NoRanks(Worlds):
    """The Worlds of a lab without ranks: its drivers start those that they need."""

    def __init__(self, observer: WorldObserver | None) -> None:
        self.names, self.worlds, self.isolate = (), [], False
        self._observer = observer or Printer()

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def state(self) -> str:
        return "idle"


# Recorded, but not shown here.
HIDDEN = (
    *("overhead_seconds", "observers_seconds", "shared_rss", "peak_rss", "file_rss", "shm_rss", "pinned_bytes"),
    *("memfds", "shared_maps", "shared_bytes", "shm_files", "temp_files", "children"),
)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Stepped:
    """One phase that every rank has run. `rows` are what was appended."""

    cycle: int
    phase: str
    rows: Sequence[Row]
    done: int
    planned: int
    place: str = ""  # of `Step`

    def table(self) -> list[list[str]]:
        """The heading, then a line per metric; for a changed level also its value before the phase."""
        roles = {row.rank: row.role for row in self.rows}
        ranks = sorted(roles)
        values = {(label(row.metric, row.ids), row.rank): row for row in self.rows}
        found = [m for m in dict.fromkeys(m for m, _ in values) if not m.endswith("_before") and m not in HIDDEN]
        names = sorted(found, key=lambda m: m != "seconds")  # the time comes first

        def cell(name: str, rank: int) -> str:
            now, before = (values.get((name + when, rank)) for when in ("", "_before"))
            if now is None or now.value is None:
                return (now and now.text) or "-"
            text = amount(now.value, now.unit)
            if before is None or before.value is None or amount(before.value, now.unit) == text:
                return text
            return f"{amount(before.value, now.unit)} → {text}"

        body = [[name, *(cell(name, rank) for rank in ranks)] for name in names]
        return [["", *(rank_name(rank, roles) for rank in ranks)], *body]

    def __repr__(self) -> str:
        return f"{self._head()}\n{columns(self.table())}"

    def _repr_html_(self) -> str:
        head, *body = [[html.escape(cell) for cell in row] for row in self.table()]
        return table_html(head, body, caption=html.escape(self._head()))

    def _head(self) -> str:
        where = f", {self.place}" if self.place else ""
        return f"{self.phase}{where} (phase {self.done} of {self.planned})"


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
        observe: Callable[[int], WorldObserver] | None = None,
        plotter: Plotter | None = None,
        panel: Callable[[Lab], object] | None = None,
        world: World | Worlds | None = None,
        follow: Callable[[str, Mapping[str, Any], Sequence[Curves]], Follower] | None = None,
    ) -> None:
        """`observe` makes an observer for a number of calls; the other callables come from a package that labs do not import."""
        self.definition = definition
        self.name = definition.name
        self._plotter = plotter
        self._panel = panel
        self.fault = fault
        if world is not None:
            config = {"ranks": world.ranks, **config}
        self.given = dict(config)
        self._first = world.worlds[0] if isinstance(world, Worlds) else world  # of those that were given
        self.bug = find_fault(definition, fault)
        self._take(configure(definition, config, self.bug, world=self._first))
        if world is not None:
            check_given(world, self.config, self._sizes, isolate=definition.isolate)
        self._given = world
        self.tolerances = checked_tolerances(tolerances or {}, [rule.name for rule in self._rules])
        self.done = 0  # phases
        self._lost: set[int] = set()  # ranks killed on purpose
        self.broken: dict[str, KitError] = {}  # how phases broke that did not end the run
        self.error = ""  # the failure that ended it, in one line
        self.judged: Run | None = None  # the run, once it has its verdict
        self.observe = observe
        self.followers: list[Callable[[], None]] = []  # panels, called when a phase or the run has ended
        self._observer: WorldObserver | None = None
        self._about = provenance()
        self._writer = create_run(runs_dir(), self.name, self._settings, self._about, out=out, fault=fault)
        self.dir = self._writer.dir
        self.world: World | Worlds
        self._controller: ControllerActor | None = None
        self._follower: Follower | None = None
        if follow is not None:
            try:
                self._follower = follow(self._writer.id, self._settings, definition.curves_of_run())
            except BaseException as error:
                self._failed(error)
                raise

    # -- the public part ----------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the ranks and the lab on them, if that is not done yet. `step` and `run` call it."""
        if self.started:
            return self
        if self._observer is None:
            self._watch(0)
        try:
            self.world = self._given or self._make()
            if self.config.engine == RAY and self.definition.hosted:
                logs, observer = self.dir / "logs", self._observer
                self._controller = ControllerActor(
                    self.config.ranks, python=self.world.python, logs=logs, observer=observer
                )
            self._begin()
        except BaseException as error:
            self._failed(error)
            self.close()
            if isinstance(error, RankError) and error.refused:  # only the ranks' environment could detect it
                raise BadInput(error.refused) from error
            raise
        return self

    @property
    def phases(self) -> list[PhaseRow]:
        marks = ["done"] * self.done + ["failed" if self.error else "next"] + ["to do"] * len(self.steps)
        return [PhaseRow(step.cycle, step.phase, mark) for step, mark in zip(self.steps, marks, strict=False)]

    def step(self) -> Stepped:
        """Run the next phase on every rank that has work in it."""
        self._watch(1)
        return self._step()

    def run(self) -> Run:
        """Run the remaining phases, judge, and write the verdict. Later calls return the same Run."""
        if self.judged is not None:
            return self.judged
        self._check_going()
        self._watch(len(self.steps) - self.done, ends=True)
        self.start()
        while self.done < len(self.steps):
            self._step()
        try:
            if left := self._left(range(self.config.ranks)):
                reports = self.world.call(f"{RANKSIDE}:end", ranks=left, timeout_s=self._own_limit)
                answers = dict(zip(left, reports, strict=True))
                self._append_answers("pss", answers, ROUTING_AFTER)
            self._refuse_broken()
            run = Run(self.dir, rules=lambda _: self._rules, plotter=self._plotter, complete=True)
            self._writer.write_verdict(run.verdict(**self.tolerances))
            self._writer.finish()
        except BaseException as error:
            self._failed(error)
            raise_as_break(error)
            raise
        self.judged = run
        self._end_following()
        self._tell_panels()
        return run

    def verdict(self) -> Verdict:
        """The lab's rules, put to the records so far."""
        return Run(self.dir, rules=lambda _: self._rules).verdict(**self.tolerances)

    @property
    def started(self) -> bool:
        return "world" in vars(self)

    def panel(self) -> object:
        """A panel of this lab in its current state, for a notebook."""
        if self._panel is None:
            raise BadInput("this lab was made without a panel; make it with kit.lab or kit.panel")
        return self._panel(self)

    def close(self) -> None:
        """End the ranks, unless their World was given. A run without a verdict is marked as failed. May be called repeatedly."""
        if self.judged is None and not self.error:
            self._failed(KitError(f"closed early: {self.done} of {len(self.steps)} phases were done"))
        if self._controller is not None:
            self._controller.close()
        if self.started and self._given is None:
            self.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "judged" if self.judged else f"failed: {self.error}" if self.error else "in progress"
        fault = f", fault {self.fault}" if self.fault else ""
        return f"<lab {self.name}{fault}: {self.done} of {len(self.steps)} phases done, {state}; {self.dir}>"

    # -- how --------------------------------------------------------------------------------------------------------

    def _take(self, config: LabConfig) -> None:
        """Keep a config and everything that follows from it."""
        self.config = config
        self.roles = self.definition.roles_of(config)
        self._sizes = world_sizes(self.roles)
        self._settings = as_settings(config)
        self._rules = applicable(self.definition.all_rules(), self._settings)
        self.steps: Sequence[Step] = self.definition.plan(config)
        known = {role.name for role in self.roles}
        if wrong := [(step.phase, name) for step in self.steps for name in step.roles if name not in known]:
            raise ValueError("step {!r} names the role {!r}, which this lab lacks".format(*wrong[0]))

    def _settle_device(self) -> None:
        """Make the config again if the ranks' device is not the one that the presence of a GPU driver promised: its dtype, and whether the
        job fits, follow from the device."""
        device = self.world.device
        if device != ("cuda" if runs_on_gpus(self.config.device) else "cpu"):
            self._take(configure(self.definition, {**self.given, "device": device}, self.bug, world=self._first))
            self._writer.set_config(self._settings)

    def _watch(self, steps: int, *, ends: bool = False) -> None:
        """A new observer for these steps, and for the calls before the first one and after the last; each manual step gets its own."""
        if self.observe is not None:
            around = (not self.started) + ends if self.config.ranks else 0
            self._observer = self.observe(steps + around)
            if self.started:
                self.world.observer = self._observer

    def _make(self) -> World | Worlds:
        if not self.config.ranks:
            return NoRanks(self._observer)
        settings: dict[str, Any] = {
            "device": self.config.device,
            "timeout_s": self.config.timeout_s,
            "python": self.config.python or None,
            "preload": self.definition.preload,
            "logs": self.dir / "logs",
            "observer": self._observer,
            "env": routing_env(self.config) or None,
            "engine": self.config.engine,
        }
        places = devices(self.roles, self._sizes)
        machines = {name: getattr(self.config, name) for name in ("nodes", "endpoint", "launch")}
        if len(self._sizes) > 1:
            return Worlds(
                self._sizes,
                isolate=self.definition.isolate,
                devices=places,
                machines=world_machines(self.roles),
                **machines,
                **settings,
            )
        return World(self._sizes[0], devices=(places[0] or ()) if places else (), **machines, **settings)

    def _step(self) -> Stepped:
        self._check_going()
        self.start()
        if self.done == len(self.steps):
            raise KitError("every phase is done; call run() for the verdict")
        step = self.steps[self.done]
        rows: list[Row] = []

        def write(rank: int, found: list[dict[str, Any]]) -> None:
            rows.extend(self._append(step.cycle, step.phase, {rank: found}))
            if recorded := getattr(self._observer, "recorded", None):  # optional for observers
                recorded(len(rows))

        try:
            (self._drive if step.driver else self._call)(step, write)
        except BaseException as error:
            if isinstance(error, RankDied) and error.rank >= 0:  # the others report their own failures
                with contextlib.suppress(KitError, OSError):
                    write(error.rank, [Row(metric="failed", value=1, unit="1", time=time.time()).facts()])
            if not (self.definition.goes_on and isinstance(error, KitError)):
                self._failed(error)
                raise_as_break(error)
                raise
            self._go_on(step.phase, error, write)
        self.done += 1
        self._tell_panels()
        return Stepped(step.cycle, step.phase, rows, done=self.done, planned=len(self.steps), place=step.place)

    def _go_on(self, phase: str, error: KitError, write: Write) -> None:
        """Record how a phase broke, and replace the ranks: they may hang, and what they hold may be damaged."""
        self.broken[phase] = error
        try:
            text = str(error).partition("\n")[0]
            write(NOTEBOOK, [Row(metric=BROKE, value=1, unit="1", time=time.time(), text=text).facts()])
            self._renew()
        except BaseException as failure:
            self._failed(failure)
            raise

    def _refuse_broken(self) -> None:
        if self.broken:
            texts = [f"{phase}: {error}" for phase, error in self.broken.items()]
            raise KitError("\n".join([f"these phases broke: {', '.join(self.broken)}", *texts]))

    def _renew(self) -> None:
        self.world.restart()
        self._enter()

    def _call(self, step: Step, write: Write) -> None:
        self.world.submit(
            f"{RANKSIDE}:run_phase",
            args={"cycle": step.cycle, "name": step.phase},
            ranks=self._left(working(step, self.roles)),
            timeout_s=self.config.timeout_s,
            phase=step.phase,
            on_news=write,
        ).result()

    def _drive(self, step: Step, write: Write) -> None:
        """Run a driven step: its driver makes the calls, and every rank is measured from start to end."""
        ranks = self._left(working(step, self.roles))
        observer = self.world.observer
        drive = Drive(
            world=self.world,
            config=self.config,
            scene=self.bug.scene if self.bug else {},
            cycle=step.cycle,
            phase=step.phase,
            roles={role.name: role.ranks for role in self.roles if not step.roles or role.name in step.roles},
            folder=self.dir,
            write=write,
            quiet=Quiet(observer),
            tell=self._tell,
            restart=self._renew,
        )
        quiet: dict[str, Any] = {"phase": step.phase, "observer": drive.quiet, "on_news": write}
        observer.started(step.phase, ranks)
        began = time.monotonic()
        try:
            if ranks:
                self.world.submit(f"{RANKSIDE}:open_step", args={"name": step.phase}, ranks=ranks, **quiet).result()
            try:
                both = [self.bug.patch_in(phase, "notebook") for phase in ("", step.phase)] if self.bug else []
                patches = {place: wrong for patch in both for place, wrong in patch.items()}
                if self._controller is not None and step.driver != EXPLORED.driver:
                    self._host(self._controller, step.driver, drive, patches, ranks)
                else:
                    with replaced(patches):
                        load_callable(step.driver)(drive)
                        drive.finish()
            finally:
                drive.cancel()
                self._lost |= drive.lost
                if ranks:
                    with contextlib.suppress(KitError):  # ranks that died or hang cannot be measured
                        measured = self.world.submit(
                            f"{RANKSIDE}:close_step", ranks=self._idle(ranks), timeout_s=60, **quiet
                        )
                        measured.result()
                else:
                    seconds = time.monotonic() - began
                    write(NOTEBOOK, [Row(metric="seconds", value=seconds, unit="s", time=time.time()).facts()])
        finally:
            observer.ended()

    def _host(
        self,
        controller: ControllerActor,
        driver: str,
        drive: Drive,
        patches: Mapping[str, str],
        ranks: Sequence[int],
    ) -> None:
        """Run the driver in the controller's actor."""
        config = type(self.config)
        args = {
            "device": self.world.device,
            "driver": driver,
            "patches": patches,
            "config_type": f"{config.__module__}:{config.__qualname__}",
            "config": self._settings,
            "folder": str(drive.folder),
            "roles": drive.roles,
            "scene": drive.scene,
            "cycle": drive.cycle,
            "phase": drive.phase,
        }
        answer = controller.run(
            f"{__name__}:host_driver",
            args,
            world=self.world,
            ranks=ranks,
            phase=drive.phase,
            observer=drive.quiet,
            write=drive.write,
            silent_s=self.config.timeout_s,
        )
        drive.lost |= {*answer["lost"]}

    def _begin(self) -> None:
        if self.bug:
            refuse_device(self.bug, self.world.device)
        if not self.config.ranks:
            return
        self._settle_device()
        seats = self.world.status()
        answers = self._enter()
        places = [seat["device"] for seat in seats]
        about = {"ranks": self.world.ranks, "device": self.world.device, "why": seats[0]["why"], "devices": places}
        if len(self._sizes) > 1:
            about["sizes"] = list(self._sizes)
        if self.definition.roles is not None:
            about["roles"] = {role.name: list(role.ranks) for role in self.roles}
        self._about |= {"rank0": answers[0]["provenance"], "world": about}
        self._writer.set_provenance(self._about)
        self._append_once(GPU, gpu_of_rank(seats), "1")
        self._append_answers("pss_before", answers, ROUTING_BEFORE)

    def _tell(self, about: Mapping[str, Any]) -> None:
        self._about |= about
        self._writer.set_provenance(self._about)

    def _enter(self) -> dict[int, Any]:
        """Begin the lab on every rank; returns what each reports of itself."""
        config = type(self.config)
        nodes = [seat["node"] for seat in self.world.status()]
        certificate = make_certificate() if len({*nodes}) > 1 else None
        args = {
            "roles": [
                {"name": role.name, "ranks": role.ranks, "phases": role.phases or self.definition.phases}
                for role in self.roles
            ],
            "config_type": f"{config.__module__}:{config.__qualname__}",
            "config": self._settings,
            "fault": dataclasses.asdict(self.bug) if self.bug else None,
            "devices": [seat["device"] for seat in self.world.status()],
            "nodes": nodes,
            "world_sizes": self._sizes,
            "meeting": f"kit-{secrets.token_hex(8)}",
            "hosts": self.world.addresses if certificate else [],
            "fingerprint": certificate.fingerprint if certificate else "",
            "snapshots": str(self.dir / SNAPSHOTS) if self._snapshots else None,
        }
        if certificate is not None:
            called = sorted({0, *(role.ranks[0] for role in self.roles if role.called)})
            self.world.call(f"{RANKSIDE}:hold_key", ranks=called, pem=certificate.pem, timeout_s=self._own_limit)
        answers = self.world.call(f"{RANKSIDE}:begin", args=args, timeout_s=self._own_limit)
        ports: dict[str, int] = {}
        for answer in answers:
            ports |= answer.pop("ports")
        if ports:
            self.world.call(f"{RANKSIDE}:learn_ports", ports=ports, timeout_s=self._own_limit)
        return dict(enumerate(answers))

    @property
    def _own_limit(self) -> float:
        """The time limit of what the kit itself does on ranks before and after the phases: it imports modules, which is slow at first."""
        return max(self.config.timeout_s, OWN_S)

    @property
    def _snapshots(self) -> bool:
        return self.config.memory_snapshot and self.started and self.world.device.startswith("cuda")

    def _check_going(self) -> None:
        if self.error:
            raise KitError(f"this run has failed ({self.error}); make a new lab")
        if self.judged is not None:
            raise KitError("this run is already judged; make a new lab")

    def _append(self, cycle: int, phase: str, found: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Row]:
        names = roles_by_rank(self.roles)
        rows = [
            Row.placed(
                facts,
                run=self._writer.id,
                lab=self.name,
                cycle=cycle,
                phase=phase,
                rank=rank,
                role=names.get(rank, ""),
            )
            for rank, every in found.items()
            for facts in every
        ]
        self._writer.append(rows)
        if self._follower is not None:
            self._follower.see(rows)
        return rows

    def _append_answers(self, metric: str, answers: Mapping[int, Any], names: Sequence[str]) -> None:
        """Record each rank's proportional memory and, if routing was requested, their routing reports: numbers in the records, rank 0's
        texts in the provenance."""
        if self.config.routing != "torch":
            known = {rank: answer["routing"] for rank, answer in answers.items()}
            self._writer.set_provenance({**self._about, "routing": next(iter(known.values()))})
            for name in names:
                self._append_once(
                    f"routing_{name}", {rank: _whole_or_text(status[name]) for rank, status in known.items()}, "1"
                )
        rows = {rank: answer["pss"] for rank, answer in answers.items() if answer["pss"] is not None}
        self._append_once(metric, rows, "B")

    def _append_once(self, metric: str, values: Mapping[int, float | str], unit: str) -> None:
        """Record a number or text of each rank that belongs to no phase."""
        ended, answers = time.time(), {}
        for rank, value in values.items():
            number, text = (None, value) if isinstance(value, str) else (value, "")
            answers[rank] = [Row(metric=metric, value=number, unit=unit, time=ended, text=text).facts()]
        self._append(0, BOUNDARY, answers)

    def _tell_panels(self) -> None:
        for follower in self.followers:
            try:
                follower()
            except Exception:  # a panel that cannot be drawn must not end a step
                logging.getLogger(__name__).exception("a panel could not follow the lab")

    def _failed(self, error: BaseException) -> None:
        """Record the failure. An exception here must not hide the original error."""
        name = "stopped" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        words = f"{name}: {without_advice(str(error))}" if str(error) else name
        self.error = words.partition("\n")[0]
        call = f"{RANKSIDE}:memory_history"
        keep: tuple[Callable[[], object], ...] = (
            lambda: self._snapshots and self.world.call(call, ranks=self._idle(range(self.config.ranks)), timeout_s=60),
            lambda: write_text(self.dir / "logs" / "error.txt", words + "\n"),
            lambda: self._writer.write_verdict(self.verdict()),
            lambda: self._writer.finish(self.error, stopped=name == "stopped"),
            self._end_following,  # a tracker may wait for its server, and a person may interrupt that: the run is kept before
        )
        for each in (*keep, self._tell_panels):
            with contextlib.suppress(KitError, OSError, KeyboardInterrupt):  # a second Ctrl-C skips only one of these
                each()

    def _end_following(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def _left(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank not in self._lost]

    def _idle(self, ranks: Iterable[int]) -> list[int]:
        wanted = set(ranks)
        return [row["rank"] for row in self.world.status() if row["state"] == "idle" and row["rank"] in wanted]


def raise_as_break(error: BaseException) -> None:
    """BadInput means that nothing ran. Once a phase runs, for example code under test that asks for the impossible, the run broke."""
    if isinstance(error, BadInput):
        raise KitError(str(error)) from error


def devices(roles: Sequence[Role], sizes: Sequence[int]) -> list[list[int] | None]:
    """Device numbers for each World if roles place their ranks, None for one on the CPU; a World places all of its ranks or none."""
    placed = {rank: place for role in roles for rank, place in zip(role.ranks, role.devices or (), strict=False)}
    on_cpu = {rank for role in roles if role.devices is None for rank in role.ranks}
    if not placed and not on_cpu:
        return []
    worlds = [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    return [
        None if on_cpu.issuperset(ranks) else [placed[rank] for rank in ranks if rank in placed] for ranks in worlds
    ]


def check_given(world: World | Worlds, config: LabConfig, sizes: tuple[int, ...], *, isolate: bool) -> None:
    """Refuse a running World of another size, or one started without the flag that this routing needs."""
    if config.ranks != world.ranks:
        raise BadInput(f"ranks={config.ranks}, but the given World has {world.ranks}")
    if config.engine != world.engine:
        raise BadInput(f"engine={config.engine}, but the given World was made with engine={world.engine}")
    given = world.sizes if isinstance(world, Worlds) else (world.ranks,)
    if given != sizes:
        words = " and ".join(map(str, sizes))
        raise BadInput(
            f"this config needs {'a World' if len(sizes) == 1 else 'Worlds'} of {words} ranks, but world= has "
            f"{' and '.join(map(str, given))}; pass Worlds of these sizes, or leave out world="
        )
    if isinstance(world, Worlds) and len({seat["node"] for seat in world.status()}) > 1:
        raise BadInput("Worlds on several machines cannot be given; leave out world=, and use nodes= and endpoint=")
    if isinstance(world, Worlds) and world.isolate != isolate:
        raise BadInput(f"this lab needs Worlds made with isolate={isolate}; make new ones, or leave out world=")
    flag = routing.FLAGS.get(config.routing)
    if flag and not all(world.call("kit.routing:requested", name=config.routing)):
        env = {flag: "1"}
        raise BadInput(
            f"routing={config.routing} needs ranks started with it: make the World with env={env}, or leave out world="
        )


def routing_env(config: LabConfig) -> dict[str, str]:
    """The flags of the ranks, also those that turn off what is exported in this process."""
    wanted = {name: config.routing == name for name in routing.FLAGS}
    return {routing.FLAGS[name]: str(int(on)) for name, on in wanted.items() if on or routing.requested(name)}


def _whole_or_text(value: Any) -> float | str:
    return value if isinstance(value, str) else float(len(value) if isinstance(value, list) else value)
