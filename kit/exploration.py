"""`kit explore`: own cores in thousands of random worlds, on all cores of the machine; the first failure is made small and kept as a run.

Worlds run in worker processes (`python -m kit.exploration`), because own code may hang, exit or take its process with it. A worker reads
orders as lines of JSON and answers in lines of JSON; one that does not answer in time is ended, and that is the finding about its seed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kit.errors import BadInput, KitError, hint
from kit.labs.definition import Definition, Fault, as_settings, fields, in_a_notebook
from kit.labs.discover import check_target, discover, find, find_fault, rules_of
from kit.labs.explored import FAILED_WORLDS
from kit.loop.explore import (
    BUSY,
    NEVER_RETURNED,
    SHRINK_S,
    WALL_S,
    Outcome,
    Shrunk,
    World,
    Worlds,
    outcome_of,
    play,
    rates,
    shrink,
    world_of,
)
from kit.results import Row, Run, create_run, runs_dir
from kit.results.records import NOTEBOOK, flat
from kit.results.units import counted
from kit.target import is_target, load, load_callable, refusal, replaced

if TYPE_CHECKING:
    import pandas as pd

    from kit.labs.lab import Drive

SEEDS = 1000
DRAWN = 20  # worlds in which a setting that is drawn differs
AT_A_TIME = 20  # seeds of one order to a worker
IN_A_RUN_S = 20.0  # in which a run explores; the same again to make a failure small
# Worlds that a run explores however long they take, unless one fails: a slow machine must not decide what is judged. Of 40, only one had
# a replica that dies while it answers.
IN_A_RUN = 100
HEARD_S = 0.1  # between two calls of `tell` while a failure is made small
SLACK_S = 20.0  # beyond the limit of a world: a process starts, or is busy


class ExplorationError(KitError):
    """Some worlds failed; raised by `raise_for_failures`."""


@dataclass(slots=True, kw_only=True)
class Failure:
    """The first failure, made small: `line` replays it, `dir` is its run. `rule` failed, because of `why`."""

    world: World
    rule: str
    why: str
    findings: dict[str, str]
    sizes: dict[str, int]
    events: int
    line: str
    dir: Path
    seed: int | None = None
    tried: int = 0

    @property
    def run(self) -> Run:
        from kit.view.named import plot_run

        return Run(self.dir, rules=rules_of, plotter=plot_run)


@dataclass(slots=True, kw_only=True)
class Exploration:
    """What came of each seed, in order, and the failure with the lowest seed. `seconds`: wall time of all."""

    lab: str
    settings: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and not any(outcome.findings for outcome in self.outcomes)

    @property
    def unmeasured(self) -> list[str]:
        """The rules that no world has rows for: own code may leave them away, and a pass says nothing about them."""
        nulls = [set(outcome.unmeasured) for outcome in self.outcomes]
        return sorted(set.intersection(*nulls)) if nulls else []

    def raise_for_failures(self) -> None:
        if not self.outcomes:
            raise ExplorationError("no world was run")
        if not self.passed:
            raise ExplorationError(self.sentence())

    def frame(self) -> pd.DataFrame:
        """A row per seed: its sizes, events, virtual and wall seconds, and the rules that failed."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "seed": outcome.seed,
                    **outcome.sizes,
                    "events": outcome.events,
                    "seconds": outcome.seconds,
                    "wall_s": outcome.wall_s,
                    "failed": " ".join(outcome.findings),
                }
                for outcome in self.outcomes
            ]
        )

    def sentence(self) -> str:
        worlds, events = len(self.outcomes), sum(outcome.events for outcome in self.outcomes)
        speed = f"{worlds} worlds, {events} events in {self.seconds:.1f} s ({worlds / max(self.seconds, 1e-9):.0f} worlds/s)"
        if self.passed:
            nulls = f"; not measured in any: {', '.join(self.unmeasured)}" if self.unmeasured else ""
            return f"{speed}: no rule failed{nulls}"
        failed = ", ".join(f"{rule} in {count}" for rule, count in rates(self.outcomes).items())
        lines = [f"{speed}: {failed}"]
        shown = self.failure
        if shown is None:
            lines.append(f"the first is seed {next(outcome.seed for outcome in self.outcomes if outcome.findings)}")
        else:
            sizes = ", ".join(counted(count, name.removesuffix("s")) for name, count in shown.sizes.items())
            lines += [
                f"seed {shown.seed} fails {shown.rule}; made small in {shown.tried} tries: {sizes}, {shown.events} events",
                f"  {shown.why}",
                f"replay: {shown.line}",
                f"the run is in {shown.dir}",
            ]
        return "\n".join(lines)

    def one_line(self) -> str:
        """How many worlds failed, and how to see the first failure again: a finding of the run that explored."""
        worlds, failed = len(self.outcomes), sum(bool(outcome.findings) for outcome in self.outcomes)
        if not failed:
            nulls = f"; not measured in any: {', '.join(self.unmeasured)}" if self.unmeasured else ""
            return f"no rule failed in {counted(worlds, 'world')}{nulls}"
        rules = ", ".join(f"{rule} in {count}" for rule, count in rates(self.outcomes).items())
        first = next(outcome for outcome in self.outcomes if outcome.findings)
        words = f"{failed} of {worlds} worlds failed ({rules}); seed {first.seed}: "
        if self.failure is None:
            return words + "; ".join(f"{rule}: {why}" for rule, why in first.findings.items())
        return f"{words}{self.failure.rule}: {self.failure.why}; replay: {self.failure.line}"

    def __repr__(self) -> str:
        return self.sentence()

    def to_json(self) -> dict[str, Any]:
        shown = self.failure
        return {
            "lab": self.lab,
            "settings": self.settings,
            "worlds": len(self.outcomes),
            "events": sum(outcome.events for outcome in self.outcomes),
            "seconds": self.seconds,
            "failed": dict(rates(self.outcomes)),
            "unmeasured": self.unmeasured,
            "failure": None if shown is None else {**dataclasses.asdict(shown), "dir": str(shown.dir)},
        }


def explore(
    lab: str,
    seeds: int = SEEDS,
    *,
    first: int = 0,
    every: bool = False,
    shrinks: bool = True,
    jobs: int | None = None,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    wall_s: float = WALL_S,
    limit_s: float = math.inf,
    least: int = 0,
    shrink_s: float = SHRINK_S,
    like: Mapping[str, Any] | None = None,
    tell: Callable[[int, int, int], None] = lambda *_: None,
    **settings: Any,
) -> Exploration:
    """Run a lab's cores in `seeds` random worlds. `settings` name own code, such as `planner="mine:planner"`.

    It ends at the first failure, unless `every` world is wanted, and begins no more worlds after `limit_s`, but for the `least` that it
    plays while none fails; the failure with the lowest seed is made small. `like`: the settings of a run whose layout all worlds have.
    `tell` hears how many worlds are done, of how many, and how many failed; an exception of it ends the exploration, also while a failure
    is made small.
    """
    definition, bug = explorable(lab), find_fault(find(lab), fault)
    checked(definition, settings)
    if seeds < 1 or first < 0:
        raise BadInput(f"seeds={seeds} must be at least 1 and first={first} at least 0")
    done = Exploration(lab=lab, settings=settings)
    began = time.monotonic()

    def made_small(outcome: Outcome) -> Failure | None:
        """None if the process does not survive the seed once more: then only the seed is known."""
        crew[0].tell({"shrink": outcome.seed, "shrink_s": shrink_s})
        until = time.monotonic() + shrink_s + SLACK_S + 2 * BUSY * wall_s
        while crew[0].answers.empty() and time.monotonic() < until:
            report()
            time.sleep(HEARD_S)
        answer = crew[0].next(HEARD_S)
        if answer is None:
            return None
        failure = kept(definition, settings, bug, answer, out)
        failure.seed = outcome.seed
        if not failure.rule:
            failure.rule, why = next(iter(outcome.findings.items()))
            second = "returned" if failure.rule == NEVER_RETURNED else "did not fail"
            failure.why = f"{why}; a second run of this world {second}"
        return failure

    def report() -> None:
        tell(len(done.outcomes), seeds, sum(bool(seen.findings) for seen in done.outcomes))

    try:
        with workers(definition, settings, bug, wall_s, jobs or os.cpu_count() or 1, like=like) as crew:
            for outcome in outcomes(crew, range(first, first + seeds), every=every, until=began + limit_s, least=least):
                done.outcomes.append(outcome)
                report()
            done.outcomes.sort(key=lambda outcome: outcome.seed)
            done.seconds = time.monotonic() - began
            failed = [outcome for outcome in done.outcomes if outcome.findings]
            if failed and shrinks:
                done.failure = made_small(failed[0])
    finally:
        done.seconds = done.seconds or time.monotonic() - began
    return done


def replay(
    lab: str,
    world: str | World,
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    wall_s: float = WALL_S,
    **settings: Any,
) -> Failure:
    """Run one world again, from the line that a failure printed. Its `rule` is empty if nothing failed."""
    definition, bug = explorable(lab), find_fault(find(lab), fault)
    checked(definition, settings)
    if isinstance(world, str):
        try:
            world = json.loads(world)
        except ValueError as error:
            raise BadInput(f"--replay takes a world as JSON, as a failure prints it: {error}") from error
    if not isinstance(world, dict):
        raise BadInput("--replay takes a world as JSON, as a failure prints it")
    with workers(definition, settings, bug, wall_s, 1) as crew:
        answer = crew[0].ask({"play": world}, BUSY * wall_s + SLACK_S)
        if answer is None:
            raise KitError("the process of the world ended or did not answer")
        if "refused" in answer:
            raise BadInput(f"this is no world of lab {lab!r}: {answer['refused']}")
        return kept(definition, settings, bug, answer, out)


def explored(drive: Drive) -> None:
    """The driver of the phase `explored`: own code in worlds with the layout of the run. The smallest failure is a run in its folder."""
    config = drive.config
    definition = next(known for known in discover().labs.values() if known.config is type(config))

    def tell(worlds: int, total: int, failed: int) -> None:
        drive.quiet.about(f"{worlds} of {total} worlds{f', {failed} failed' if failed else ''}")
        drive.quiet.tick(())

    done = explore(
        definition.name,
        config.worlds,
        every=True,
        limit_s=IN_A_RUN_S,
        least=IN_A_RUN,
        shrink_s=IN_A_RUN_S,
        like=as_settings(config),
        out=drive.folder / drive.phase,
        tell=tell,
        **chosen_code(definition, as_settings(config)),
    )
    failed = sum(bool(outcome.findings) for outcome in done.outcomes)
    drive.record("worlds", len(done.outcomes))
    left = (
        f"; after {done.seconds:.0f} s no more of {config.worlds} worlds began"
        if len(done.outcomes) < config.worlds
        else ""
    )
    if done.outcomes:
        drive.record(FAILED_WORLDS, failed, text=done.one_line() + left)


@dataclass(slots=True, kw_only=True)
class Power:
    """Whether a planted bug was found: the first seed that shows it, and the rules that failed there. `beyond`: why none can show it."""

    fault: str
    check: str
    seed: int | None = None
    failed: tuple[str, ...] = ()
    beyond: str = ""


def power(lab: str, seeds: int = SEEDS, **options: Any) -> Iterator[Power]:
    """Switch on every known bug of the lab's cores, one after the other, and look for it: how strong these worlds are."""
    definition = explorable(lab)
    kind: type[Worlds] = load(definition.worlds)
    for fault in definition.faults:
        # A patch of a pipeline or of ports is no bug of these cores.
        if fault.where != "notebook" or not all(place.partition(":")[0] in kind.rooms for place in fault.patch):
            continue
        found = Power(fault=fault.name, check=fault.caught_by, beyond=kind.beyond.get(fault.name, ""))
        if not found.beyond:
            failed = [
                row for row in explore(lab, seeds, fault=fault.name, shrinks=False, **options).outcomes if row.findings
            ]
            if failed:
                found.seed, found.failed = failed[0].seed, tuple(failed[0].findings)
        yield found


# -- labs that can be explored --------------------------------------------------------------------------------------------------


def explorable(lab: str) -> Definition:
    labs, broken = discover()
    names = [name for name, known in labs.items() if known.worlds]
    if lab in names or lab in broken:
        return find(lab)
    if lab in labs:
        raise BadInput(f"lab {lab!r} has no random worlds; explore {' or '.join(names)}")
    raise BadInput(f"unknown lab {lab!r}; {hint(lab, names)}")


def own_settings(definition: Definition) -> tuple[str, ...]:
    kind: type[Worlds] = load(definition.worlds)
    return kind.own


def chosen_code(definition: Definition, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that name code and are not the lab's own."""
    usual = {known.name: known.default for known in fields(definition.config)}
    return {name: settings[name] for name in own_settings(definition) if settings[name] != usual[name]}


def checked(definition: Definition, settings: Mapping[str, Any]) -> None:
    own = own_settings(definition)
    if why := in_a_notebook(settings, [name for name in own if name in settings]):
        raise BadInput(f"{why}: worlds run in other processes")
    for name, value in settings.items():
        if name not in own:
            if {name, name.rpartition(".")[2]} & drawn_settings(definition):
                raise BadInput(f"{name} is drawn for each world; explore {definition.name} takes only {', '.join(own)}")
            raise BadInput(f"explore {definition.name} has no setting {name!r}; {hint(name, own)}")
        if ":" in str(value):
            check_target(name, str(value))


def drawn_settings(definition: Definition) -> set[str]:
    """The settings of the lab that differ from world to world."""
    worlds: Worlds = load(definition.worlds)()
    drawn = [as_settings(worlds.config(world_of(worlds, seed))) for seed in range(DRAWN)]
    # A nested config's setting counts for all of them.
    flattened = [{name.rpartition(".")[2]: value for name, value in flat(settings).items()} for settings in drawn]
    return {name for name in set().union(*flattened) if len({str(known.get(name)) for known in flattened}) > 1}


# -- workers ----------------------------------------------------------------------------------------------------------------


class Worker:
    """A process that runs worlds. Restarted if it dies or does not answer."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.order = json.dumps(order)
        self.wall_s = float(order["wall_s"])
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.process: subprocess.Popen[str] | None = None
        self.closed = False
        self._starting = threading.Lock()

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kit.exploration", self.order]
        self.answers = queue.Queue()
        # A terminal sends Ctrl-C to workers too. They inherit that it is blocked, from their first moment on: this process ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path_of_this()},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        threading.Thread(target=self._hear, args=(self.process.stdout, self.answers), daemon=True).start()
        return self.process

    @staticmethod
    def _hear(lines: TextIO, answers: queue.Queue[dict[str, Any] | None]) -> None:
        for line in lines:
            answers.put(json.loads(line))
        answers.put(None)

    def tell(self, order: Mapping[str, Any]) -> None:
        with self._starting:
            process = None if self.closed else self.process or self.start()
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it died, or was ended; whoever waits for its answer learns that
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Its next answer; None if it died or did not answer, and then it is ended."""
        try:
            answer = None if self.closed else self.answers.get(timeout=seconds)
        except queue.Empty:
            answer = None
        if answer is None:
            self.end()
        return answer

    def ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        self.tell(order)
        return self.next(seconds)

    def close(self) -> None:
        """End it for good: a thread that still gives it orders does not start it again."""
        with self._starting:
            self.closed = True
        self.end()

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # an order that it did not read
                        pipe.close()


def path_of_this() -> str:
    """Workers import what this process can import, in the same order."""
    return os.pathsep.join(name or str(Path.cwd()) for name in sys.path)


@contextmanager
def workers(
    definition: Definition,
    settings: Mapping[str, Any],
    bug: Fault | None,
    wall_s: float,
    count: int,
    *,
    like: Mapping[str, Any] | None = None,
) -> Iterator[list[Worker]]:
    order = {
        "worlds": definition.worlds,
        "like": like,
        "settings": dict(settings),
        "patch": {} if bug is None else dict(bug.patch),
        "wall_s": wall_s,
    }
    crew = [Worker(order) for _ in range(count)]
    try:
        yield crew
    finally:
        for worker in crew:
            worker.close()


def outcomes(
    crew: list[Worker], seeds: range, *, every: bool, until: float = math.inf, least: int = 0
) -> Iterator[Outcome]:
    """Yield outcomes as they come. After a failure, or that time, no further seeds begin, but lower ones that have begun end. The first
    `least` seeds have no such time while none has failed."""
    orders = [seeds[at : at + AT_A_TIME] for at in range(0, len(seeds), AT_A_TIME)]
    todo: queue.SimpleQueue[range] = queue.SimpleQueue()
    for order in orders:
        todo.put(order)
    came: queue.Queue[Outcome | BaseException | None] = queue.Queue()
    enough, failed = threading.Event(), threading.Event()

    def over(order: range) -> bool:
        return time.monotonic() > until and (failed.is_set() or order.start >= seeds.start + least)

    def work(worker: Worker) -> None:
        try:
            while not enough.is_set():
                try:
                    order = todo.get_nowait()
                except queue.Empty:
                    break
                run_order(worker, order, came, functools.partial(over, order))
        except BaseException as error:  # noqa: BLE001 - raised again where outcomes are taken
            came.put(error)
        finally:
            came.put(None)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in crew]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            outcome = came.get()
            if outcome is None:
                running -= 1
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                if outcome.findings:
                    failed.set()
                    if not every:
                        enough.set()
                yield outcome
    finally:
        enough.set()


def run_order(worker: Worker, seeds: range, came: queue.Queue[Any], over: Callable[[], bool]) -> None:
    """Run these seeds in a worker. One at which it dies or hangs is a finding; the rest is ordered again. Once it is `over` it is ended."""
    while seeds and not over():
        worker.tell({"seeds": [seeds.start, seeds.stop]})
        for at, seed in enumerate(seeds):
            limit_s = BUSY * worker.wall_s + SLACK_S
            answer = worker.next(limit_s)
            if answer is None:
                why = f"the process of the world ended, or did not answer for {limit_s:g} s"
                came.put(Outcome(seed=seed, findings={NEVER_RETURNED: why}))
                seeds = seeds[at + 1 :]
                break
            if "refused" in answer:
                raise BadInput(answer["refused"])
            came.put(Outcome(**answer))
            if over():
                worker.end()
                break
        else:
            return


# -- a failure ----------------------------------------------------------------------------------------------------------------


def kept(
    definition: Definition, settings: Mapping[str, Any], bug: Fault | None, answer: Mapping[str, Any], out: Any
) -> Failure:
    """Write the world's ledger as a run of the lab."""
    words = ["kit", "explore", definition.name]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    words += ["--fault", bug.name] if bug is not None else []
    words += ["--replay", json.dumps(answer["world"], separators=(",", ":"))]
    about = {"explored": answer["world"], "replay": shlex.join(words)}
    writer = create_run(
        runs_dir(), definition.name, answer["config"], about, out=out, fault=None if bug is None else bug.name
    )
    place = {"run": writer.id, "lab": definition.name, "rank": NOTEBOOK}
    rows = [Row.placed(facts, phase=phase, **place) for phase, facts in answer["rows"]]
    writer.append([*rows, *lengths(rows)])
    rule, findings = answer["rule"], answer["findings"]
    broke = rule if rule and rule not in {known.name for known in definition.all_rules()} else ""
    writer.finish(f"{broke}: {findings[broke]}" if broke else None)
    run = Run(writer.dir, rules=rules_of)
    writer.write_verdict(run.verdict())
    return Failure(
        world=answer["world"],
        rule=rule,
        why=findings.get(rule, ""),
        findings=dict(findings),
        sizes=answer["sizes"],
        events=len(answer["rows"]),
        line=shlex.join(words),
        dir=writer.dir,
        tried=answer["tried"],
    )


def lengths(rows: Sequence[Row]) -> Iterator[Row]:
    """The virtual seconds of each phase, as a lab records them: tables and plots list phases by them."""
    ends = {row.phase: row for row in rows}
    for end in ends.values():
        yield dataclasses.replace(end, metric="seconds", value=end.time, unit="s", ids={}, text="")


# -- in a worker --------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Obey orders on stdin: `seeds` [first, last), `shrink` a seed, `play` a world. Each world's answer is a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what own code prints is no answer
    order = json.loads(sys.argv[1])
    wall_s = float(order["wall_s"])

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    with ExitStack() as scope:
        scope.enter_context(replaced(order["patch"]))
        worlds = worlds_of(order)
        gc.freeze()  # what is loaded stays: looking through it for garbage takes an eighth of the time
        for line in sys.stdin:
            orders = json.loads(line)
            try:
                if "seeds" in orders:
                    for seed in range(*orders["seeds"]):
                        say(dataclasses.asdict(outcome_of(worlds, seed, wall_s)))
                elif "shrink" in orders:
                    world = world_of(worlds, orders["shrink"])
                    say(answer_of(worlds, shrink(worlds, world, wall_s=wall_s, limit_s=orders["shrink_s"])))
                else:
                    say(answer_of(worlds, Shrunk(orders["play"], play(worlds, orders["play"], wall_s))))
            except (LookupError, TypeError, ValueError) as error:
                say({"refused": f"{type(error).__name__}: {error}"})


def worlds_of(order: Mapping[str, Any]) -> Worlds:
    """The worlds of an order. Own code is loaded here, because what it imports may take longer than a world may; if it cannot be loaded,
    its first world says so."""
    worlds: Worlds = load_callable(order["worlds"])(like=order["like"], **order["settings"])
    for target in filter(is_target, order["settings"].values()):
        refusal(target)
    return worlds


def answer_of(worlds: Worlds, small: Shrunk) -> dict[str, Any]:
    return {
        "world": small.world,
        "rule": small.played.rule,
        "findings": small.played.findings,
        "sizes": worlds.sizes(small.world),
        "rows": [(row.phase or worlds.phase, row.facts()) for row in small.played.rows],
        "config": as_settings(worlds.config(small.world)),
        "tried": small.tried,
    }


if __name__ == "__main__":
    main()
