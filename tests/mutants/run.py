"""Run mutants in reused Worlds and report what became of each.

    python -m tests.mutants.run [--only WORD]... [--limit N] [--results FILE] [--page FILE]

States:
- **caught**: a check that the unmutated kit passes fails; or the run breaks and the kit names the place: a rank's own error (not that of a
  rank that waited for another), a rank that died, or a deadline with the culprits' names. The table distinguishes these.
- **broke**: the run ends with 3, and the kit names no rank, or only ranks that waited. Such a run cannot be mistaken for a correct one.
- **survived**: the run ends with 0, whatever its records say; or the kit does not return.
- **equivalent**: survived, and in every setup of its lab all records (without times and memory), digests included, equal those of the
  unmutated kit. Records that differ between runs of the unmutated kit are not counted; nor is one that differs in only one of two runs of
  the mutant.

Every run has fresh ranks in a reused World: a restart takes a tenth of a second. In each setup the unmutated kit runs first and must pass:
once, and twice more before the records of a mutant that survived are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit
from kit.errors import KitError
from kit.labs.discover import rules_of
from kit.loop.limit import time_limit
from kit.results import Run
from tests.mutants import reachable, table
from tests.mutants.catalogue import CATALOGUE, SETUPS, Setup, others
from tests.mutants.mutant import Mutant

RESULTS = Path(__file__).with_name("written.jsonl")
CONTROLS = 3  # runs of the unmutated kit, before records are compared with theirs
PATIENCE_S = 20.0  # the World's timeout; its calls take a second or two
HUNG_S = 150.0  # beyond all deadlines of the labs
WITHOUT_VALUE = {"s", "B", "B/s"}  # units of values that differ between runs
# Counts that depend on earlier runs, on this machine's speed, or on memory addresses.
LEVELS = {"fds", "threads", "sockets", "served", "addresses_changed"}
RANKSIDE = "tests.mutants.onranks"
SEEN = ("caught", "broke")

Key = tuple[Any, ...]
Records = dict[Key, tuple[Any, str]]


class Hung(Exception):  # noqa: N818 - it is a state
    def __init__(self) -> None:
        super().__init__(f"the kit did not come back within {HUNG_S:g} s")


@dataclass(slots=True)
class Seen:
    """One run: its records without times and memory, the checks by result, and the error that broke it."""

    records: Records
    failed: list[str]
    passed: list[str]
    null: list[str]
    error: str = ""  # its type, and the ranks it names
    named: bool = True

    def state(self, by: list[str]) -> str:
        """Return the state of a mutant that made these checks fail."""
        if by or (self.error and self.named):
            return "caught"
        return "broke" if self.error and not self.error.startswith(Hung.__name__) else "survived"


@dataclass(slots=True)
class Control:
    """Runs of the unmutated kit in one setup."""

    runs: list[Seen]

    @property
    def passed(self) -> set[str]:
        return set(self.runs[0].passed)

    def unlike(self, seen: Seen) -> list[Key]:
        """Return the keys of records that are the same in all runs of the unmutated kit and differ here. NaN equals NaN."""
        keys = {key for run in (*self.runs, seen) for key in run.records}
        values = {key: {repr(run.records.get(key)) for run in self.runs} for key in keys}
        return sorted(key for key in keys if len(values[key]) == 1 and repr(seen.records.get(key)) not in values[key])


@dataclass(kw_only=True, slots=True)
class Result:
    """The outcome of a mutant. `by` are the checks that failed, `null` those that could no longer be judged."""

    id: str
    state: str
    setup: str
    by: list[str] = field(default_factory=list)
    null: list[str] = field(default_factory=list)
    error: str = ""
    differs: int = 0
    first: str = ""
    ran: int = 0
    seconds: float = 0.0
    kit: str = ""  # the digest of the sources that its lab can reach


# -- one run ------------------------------------------------------------------------------------------------------------------


def once(world: kit.World, setup: Setup, mutant: Mutant | None, folder: Path) -> tuple[Seen, int]:
    """Run once in a World with the mutant in force; also return how often its statement ran, summed over ranks."""
    if mutant is not None:
        world.call(f"{RANKSIDE}:swap", **dataclasses.asdict(mutant))
    out, ran = folder / f"{time.monotonic_ns()}", 0
    error: BaseException | None = None
    try:
        with time_limit(HUNG_S, Hung), contextlib.redirect_stdout(io.StringIO()):  # hide what ranks print
            kit.run(setup.lab, world=world, out=out, **setup.config)
    except (KitError, Hung) as broke:
        error = broke
    seen = look(out, error)
    if mutant is not None:
        with contextlib.suppress(KitError):
            ran = sum(world.call(f"{RANKSIDE}:restore", timeout_s=5))
    shutil.rmtree(out, ignore_errors=True)
    return seen, ran


def look(out: Path, error: BaseException | None) -> Seen:
    """Judge a run's folder, complete or broken off, as far as its records go."""
    rows: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    records: Records = {}
    if (out / "run.json").exists():
        run = Run(out, rules=rules_of)
        for row in run.verdict():
            rows[row.passed].append(row.check)
        records = records_of(out)
    named, words = naming(error)
    return Seen(records=records, failed=rows[False], passed=rows[True], null=rows[None], error=words, named=named)


def records_of(out: Path) -> Records:
    found: Records = {}
    times: dict[Key, int] = {}
    for path in sorted(out.glob("records*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = tuple(str(row.get(name, "")) for name in ("cycle", "phase", "rank", "metric", "ids"))
            times[key] = times.get(key, -1) + 1
            vague = row["unit"] in WITHOUT_VALUE or row["metric"].removesuffix("_before") in LEVELS
            value = None if vague else row["value"]
            found[*key, str(times[key])] = value, row.get("text", "")
    return found


def naming(error: BaseException | None) -> tuple[bool, str]:
    """Return whether the kit names the culprit, and a short form of its error."""
    if error is None:
        return True, ""
    line = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, kit.RankError):
        named, who = not error.victim, f"rank {error.rank}, {error.phase}"
    elif isinstance(error, kit.RankTimeout):
        named, who = bool(error.culprits), f"ranks {list(error.culprits)}, {error.phase}"
    elif isinstance(error, kit.RankDied):
        named, who = True, f"rank {error.rank}, {error.phase}"
    else:
        named, who = isinstance(error, kit.BadInput), "start"
    return named, f"{type(error).__name__} ({who}): {line}"


# -- Worlds -------------------------------------------------------------------------------------------------------------------


class Runner:
    """Run mutants in one World at a time, and keep the unmutated kit's records for each setup."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world: kit.World | None = None
        self.controls: dict[str, Control] = {}
        self.started = self.runs = 0

    def judge(self, mutant: Mutant, setup: Setup) -> Result:
        """Judge one mutant in one setup."""
        started = time.monotonic()
        setup = setup.changed(mutant.set)
        control = self.control(setup)
        seen, ran = self.run(setup, mutant)
        by = [check for check in seen.failed if check in control.passed]
        state, differs = seen.state(by), control.unlike(seen)
        if state == "survived" and differs:  # run again, and without the mutant: a record may differ by chance
            control = self.control(setup, CONTROLS)
            differs = sorted(set(control.unlike(seen)) & set(control.unlike(self.run(setup, mutant)[0])))
        judged = {*seen.passed, *seen.failed}
        return Result(
            id=mutant.id,
            state=state,
            setup=setup.name,
            by=by,
            null=[] if seen.error else sorted(control.passed - judged),
            error=seen.error,
            differs=len(differs),
            first=" ".join(differs[0][1:4]) if differs else "",
            ran=ran,
            seconds=round(time.monotonic() - started, 1),
        )

    def control(self, setup: Setup, least: int = 1) -> Control:
        """Return at least so many runs of the unmutated kit in this setup, or in an equal one. All must pass."""
        control = self.controls.setdefault(setup.key, Control([]))
        while len(control.runs) < least:
            seen, _ = self.run(setup)
            if seen.error or seen.failed:
                raise SystemExit(f"setup {setup.name} fails without a mutant: {seen.error or ', '.join(seen.failed)}")
            control.runs.append(seen)
        return control

    def run(self, setup: Setup, mutant: Mutant | None = None) -> tuple[Seen, int]:
        """Run with fresh ranks."""
        if self.world is not None and self.world.ranks == setup.ranks:
            self.world.restart()
        else:
            self.drop()
            logs = self.folder / "logs"
            self.world = kit.World(
                setup.ranks, device="cpu", timeout_s=PATIENCE_S, preload=("megatron.core",), logs=logs
            )
            self.started += 1
        self.runs += 1
        seen, ran = once(self.world, setup, mutant, self.folder)
        if seen.error:
            self.drop()
        return seen, ran

    def drop(self) -> None:
        world, self.world = self.world, None
        if world is not None:
            world.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a word in a mutant's id, setup, place or origin")
    parser.add_argument("--limit", type=int, default=0, help="at most so many that have no result yet")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="a line of JSON for each; those that are there are kept"
    )
    parser.add_argument("--page", type=Path, help="write the page of mutants here, from all results of these sources")
    given = parser.parse_args()
    run_all(given.only, given.limit, given.results)
    if given.page:
        table.write(given.page, table.read(given.results))


def about(mutant: Mutant) -> str:
    return f"{mutant.id} {mutant.config} {mutant.place} {mutant.origin}"


def line(mutant: Mutant, result: Result) -> str:
    """Format a result for people."""
    why = ", ".join(result.by) or result.error
    if result.differs and result.state == "survived":
        why = why or f"{result.differs} records differ, such as {result.first}"
    head = f"{result.state:10} {result.seconds:5.1f} s  {mutant.id} {result.setup} {mutant.place}"
    return f"{head}: {mutant.bug} (ran {result.ran}): {why}"


def run_all(only: Sequence[str], limit: int, results: Path) -> None:
    """Run each mutant in its own setup, then those not yet caught in their lab's other setups. Finished mutants are skipped."""
    chosen = [mutant for mutant in CATALOGUE if all(word in about(mutant) for word in only)]
    results.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kit-mutants-"))
    os.environ["KIT_RUNS"] = str(folder / "runs")
    digests = {lab: reachable.digest(lab) for lab in table.LABS}
    runner, started, count = Runner(folder), time.monotonic(), 0
    rows = table.read(results)
    try:
        for mutant, setup in todo(chosen, rows):
            if limit and count == limit:
                break
            count += 1
            result = runner.judge(mutant, setup)
            result.kit = digests[setup.lab]
            rows.append(dataclasses.asdict(result))
            with results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{count} {line(mutant, result)}", flush=True)
    finally:
        runner.drop()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{count} mutants in {time.monotonic() - started:.0f} s: {runner.runs} runs in {runner.started} Worlds")


def todo(chosen: Sequence[Mutant], rows: list[dict[str, Any]]) -> Iterator[tuple[Mutant, Setup]]:
    """Yield what to run next, based on the results so far: `rows` grows meanwhile. Setup by setup, small Worlds first."""
    setups = sorted(SETUPS.values(), key=lambda setup: (setup.ranks, setup.name))
    for own in (True, False):
        for setup in setups:
            for mutant in chosen:
                if (mutant.config == setup.name) is not own or (not own and setup.name not in others(mutant.config)):
                    continue
                mine = [row for row in rows if row["id"] == mutant.id]
                if not any(row["state"] in SEEN or row["setup"] == setup.name for row in mine):
                    yield mutant, setup


if __name__ == "__main__":
    main()
