"""Mutants that nobody chose: a library changes the code under test mechanically, and the labs run on it.

    python -m tests.mutants.mechanical                     # draw, run, and write the section of docs/mutants.md
    python -m tests.mutants.mechanical --room stream --count 40 --no-page

The operators are those of cosmic-ray (`pip install -e .[mutants]`). Every place of a room where one applies is a candidate; a hash of it
and of one commit orders the places and chooses one operator for each, so nobody chooses the mutants. The rooms take turns in proportion to
their statements: the first so many of a draw are a sample of all of them, wherever it was stopped.

A mutant is first judged by its lab alone, with cut-down settings, as a person would run it: a check that fails, or a run that breaks, sees
it. What no lab sees is given to the nearest quick tests. A run, or a file of tests, that never reaches the changed statement is left out.

Results are lines of JSON beside this file. The name of a mutant hashes the source of its function: a result holds while that is unchanged,
and a mutant that nothing saw runs again once its lab or the tests have changed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.labs.parts import OF_WALL_TIME
from tests.mutants import reached
from tests.mutants.catalogue import SETUPS
from tests.mutants.mutant import ROOT
from tests.mutants.table import markdown

RESULTS = Path(__file__).with_name("drawn.jsonl")
PAGE = ROOT / "docs" / "mutants.md"
TITLE = "## Drawn by a library"
SEED = "97615f4ba6b9c3c12ae7245bf8fafa32875a40fd"  # the parent of the first commit with results
COUNT = 300
LAB_S = 240.0  # beyond all deadlines of the labs at these settings
TESTS_S = 600.0
WORLDS = 100  # random ones, in which the cores run after the lab's own settings
SEEN_BY_LAB = ("check", "broke")
SEEN = (*SEEN_BY_LAB, "tests", "mended")
SAID_OF = {
    "tests": "seen by tests only",
    "mended": "not seen; a test was written for it",
    "survived": "not seen",
    "untested": "let through by the lab; its tests have not run",
}
SURE = 1.96  # standard deviations of an interval of 95 %
# A decorator that is gone raises at the import, nearly always; the last two need a person to name variables.
UNUSED = ("RemoveDecorator", "VariableReplacer", "VariableInserter")


class Room(NamedTuple):
    """Code under test, the commands of the lab that should see its bugs, and the nearest tests."""

    name: str
    files: tuple[str, ...]
    runs: tuple[str, ...]
    tests: tuple[str, ...]
    here: bool = False  # whether the code runs on the notebook side

    @property
    def mode(self) -> str:
        """Which kind of process of `kept.py` runs the lab."""
        return "fork" if self.here else "stay"


def runs_of(lab: str) -> tuple[str, ...]:
    """The commands of all setups in which mutants of the lab run that were written by hand."""
    return tuple(
        " ".join([f"run {lab} --set ranks={setup.ranks}", *map(set_by, setup.config.items())])
        for setup in SETUPS.values()
        if setup.lab == lab
    )


def set_by(setting: tuple[str, Any]) -> str:
    name, value = setting
    return f"--set {name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"


STREAM = "run stream --set simulated=true --set ranks=1"

ROOMS = (
    Room(
        "offload",
        (
            "kit/megatron/groups.py",
            "kit/megatron/handles.py",
            "kit/megatron/tensors.py",
            "kit/megatron/ownership.py",
            "kit/measure/host.py",
            "kit/labs/offload/ranks/releaser.py",
        ),
        runs_of("offload"),
        ("tests/megatron", "tests/measure"),
    ),
    Room(
        "split",
        ("kit/megatron/split.py", "kit/train/protocol.py", "kit/train/losses.py", "kit/train/plain.py"),
        runs_of("split"),
        ("tests/train", "tests/megatron"),
    ),
    Room(
        "sync",
        ("kit/sync/*.py", "kit/megatron/shards.py", "kit/megatron/serve.py"),
        runs_of("sync"),
        ("tests/sync", "tests/megatron"),
    ),
    Room(
        "stream",
        (
            "kit/stream/core.py",
            "kit/stream/generation.py",
            "kit/stream/settings.py",
            "kit/stream/ports.py",
            "kit/loop/messages.py",
            "kit/loop/runner.py",
        ),
        (
            f"explore stream --seeds {WORLDS}",
            STREAM,
            f"{STREAM} --set sampler=strict --set window=0 --set at_sync=abort",
            f"{STREAM} --set window=2 --set replicas=3",
            f"{STREAM} --set places=16 --set sampler=docs.examples.own_sampler:InOrder",
            "run stream --set steps=3 --set worlds=0",
        ),
        ("tests/stream", "tests/loop", "tests/labs/stream"),
        here=True,
    ),
    Room(
        "share",
        ("kit/share/core.py", "kit/share/planner.py", "kit/share/member.py", "kit/share/state.py"),
        (
            f"explore share --seeds {WORLDS}",
            "run share --set simulated=true",
            "run share --set simulated=true --set scenario=F",
            "run share --set a.steps=2 --set b.steps=2 --set rehearse=false --set worlds=0",
        ),
        ("tests/share", "tests/loop", "tests/labs/share"),
        here=True,
    ),
)

# Survivors that behave exactly as the original, each with its argument. At most one in ten of those drawn.
EQUIVALENT = {
    "sync-e46c5b34": "equivalent: the method does nothing, whatever its arguments are",
    "sync-3c3613e0": "equivalent: the same bytes by another way of copying; kit bench sync asks for its speed",
}

# Checks that a busy machine may fail: such a mutant is seen if a second run says so too.
TIMED = OF_WALL_TIME | {"reload_peak", "memory_drift", "memory_slope", "trains_before_straggler"}


@dataclass(frozen=True, slots=True)
class Place:
    """One mutation: the `occurrence`-th of an operator in a file, and `within` its function or statement, with the hash of that source."""

    room: str
    file: str
    line: int
    operator: str
    occurrence: int
    unit: str = ""
    source: str = ""
    within: int = 0

    @property
    def id(self) -> str:
        return f"{self.room}-{digest(self.file, self.unit, self.source, self.operator, self.within)[:8]}"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """`state`: check, broke, tests, survived; before its tests ran, untested; mended by a test that was written for it afterwards, set by
    hand. `by`: what failed, or how the run broke."""

    id: str
    room: str
    file: str
    unit: str
    line: int
    operator: str
    change: str
    state: str
    by: list[str] = field(default_factory=list)
    seconds: float = 0.0
    judges: str = ""  # the hash of the room's lab and tests

    @property
    def holds(self) -> bool:
        """Whether to run it again is no use: it was seen, or its lab and its tests are the same."""
        return self.state in SEEN or self.judges == judges(next(room for room in ROOMS if room.name == self.room))


def digest(*words: object) -> str:
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()


# -- the draw -------------------------------------------------------------------------------------------------------------


def operators() -> dict[str, Any]:
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name]() for name in provider if name not in UNUSED}


def files_of(room: Room) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in room.files for path in ROOT.glob(pattern))


@cache
def judges(room: Room) -> str:
    """Hash what may see a mutant of a room: its lab, and its tests."""
    folders = [ROOT / "kit" / "labs" / room.name, *(ROOT / folder for folder in room.tests)]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return digest(*(path.read_text() for path in paths))[:12]


def statements(room: Room) -> int:
    return sum(
        isinstance(node, ast.stmt) for file in files_of(room) for node in ast.walk(ast.parse((ROOT / file).read_text()))
    )


def units(source: str) -> list[tuple[int, int, str, str]]:
    """Return first line, last line, name and hash of each outermost function, and of each statement outside of functions."""
    lines = source.splitlines()
    parts: list[tuple[int, int, str, str]] = []

    def collect(body: Sequence[ast.stmt], around: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{around}{node.name}.")
                continue
            decorators = getattr(node, "decorator_list", [])
            first, last = min([node.lineno, *(each.lineno for each in decorators)]), node.end_lineno or node.lineno
            name = around + (node.name if isinstance(node, ast.FunctionDef) else "")
            parts.append((first, last, name, digest(*lines[first - 1 : last])[:12]))

    collect(ast.parse(source).body, "")
    return parts


def places(room: Room) -> Iterator[tuple[tuple[int, int], Place]]:
    """Yield every mutation of a room with its position in the unit that holds it."""
    import parso
    from cosmic_ray.ast import ast_nodes

    known = operators()
    for file in files_of(room):
        source = (ROOT / file).read_text()
        unread, parts = unread_lines(source), units(source)
        seen: Counter[str] = Counter()
        within: Counter[tuple[str, int]] = Counter()
        for node in ast_nodes(parso.parse(source)):
            for name, operator in known.items():
                for start, _ in operator.mutation_positions(node):
                    occurrence = seen[name]
                    seen[name] += 1
                    unit = next((part for part in parts if part[0] <= start[0] <= part[1]), None)
                    if unit is None or any(first <= start < last for first, last in unread):
                        continue
                    first, _, words, source_hash = unit
                    number = within[name, first]
                    within[name, first] += 1
                    place = Place(room.name, file, start[0], name, occurrence, words, source_hash, number)
                    yield (start[0] - first, start[1]), place


def unread_lines(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the ranges that no run evaluates: annotations, and imports for the type checker only."""
    ranges = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            parts = [node]
        ranges += [
            ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))  # type: ignore[attr-defined]
            for part in parts
            if part is not None
        ]
    return ranges


def mutate(source: str, operator: Any, occurrence: int) -> str:
    """Apply an operator at its n-th place of a text."""
    import parso
    from cosmic_ray.ast import Visitor

    class Change(Visitor):
        seen = 0

        def visit(self, node: Any) -> Any:
            for index, _ in enumerate(operator.mutation_positions(node)):
                if self.seen == occurrence:
                    node = operator.mutate(node, index)
                self.seen += 1
            return node

    text: str = Change().walk(parso.parse(source)).get_code()
    if text == source:
        raise LookupError(f"the operator has no place {occurrence}")
    return text


def drawn(room: Room, count: int, seed: str) -> list[Place]:
    """Order the places by hash and take one operator for each, by hash again."""
    by_place: dict[tuple[object, ...], list[Place]] = {}
    for position, place in places(room):
        by_place.setdefault((place.file, place.unit, place.source, *position), []).append(place)
    chosen: list[Place] = []
    for where in sorted(by_place, key=lambda where: digest(seed, *where)):
        if len(chosen) == count:
            break
        ways = sorted(by_place[where], key=lambda place: digest(seed, place.operator, place.within))
        chosen += [place for place in ways if changes_the_program(place)][:1]
    return chosen


def changes_the_program(place: Place) -> bool:
    """Whether the mutated text is Python, and another program: a library also makes `{a: 1, -more}`."""
    source = (ROOT / place.file).read_text()
    try:
        mutated = ast.parse(mutate(source, operators()[place.operator], place.occurrence))
    except SyntaxError:
        return False
    return ast.dump(mutated) != ast.dump(ast.parse(source))


def shared_out(count: int) -> dict[str, int]:
    """Divide a number of mutants among the rooms by their statements."""
    sizes = {room.name: statements(room) for room in ROOMS}
    return {name: max(1, round(count * size / sum(sizes.values()))) for name, size in sizes.items()}


def draw(rooms: Sequence[Room], count: int, seed: str) -> list[Place]:
    shares = shared_out(count)
    return in_turns({room.name: drawn(room, shares[room.name], seed) for room in rooms})


def in_turns(queues: dict[str, list[Place]]) -> list[Place]:
    """Merge the rooms' draws so that each beginning has the rooms' shares."""
    turns = [((number + 0.5) / len(queue), place) for queue in queues.values() for number, place in enumerate(queue)]
    return [place for _, place in sorted(turns, key=lambda turn: (turn[0], turn[1].room))]


# -- one mutant ---------------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the repository's files in which one file at a time is changed, with a process of each kind that runs commands there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[str, subprocess.Popen[str]] = {}
        self.runs = 0
        names = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], text=True)
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "build" / "reached").mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "KIT_RUNS": str(folder / "runs"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # a cached file of the mutant would outlive it within the same second
        }

    def change(self, place: Place) -> str:
        """Write the mutated file; return the change as people read it."""
        source = (ROOT / place.file).read_text()
        mutated = mutate(source, operators()[place.operator], place.occurrence)
        (self.folder / place.file).write_text(mutated)
        pairs = zip(source.splitlines(), mutated.splitlines(), strict=False)
        return next((f"{old.strip()} -> {new.strip()}" for old, new in pairs if old != new), "")

    def restore(self, place: Place) -> None:
        shutil.copy2(ROOT / place.file, self.folder / place.file)

    def run(self, arguments: str, mode: str) -> tuple[str, list[str]]:
        """Run a command of the kit: its state, and the checks that failed or its last line."""
        self.runs += 1
        out = self.folder / "build" / f"run-{self.runs}"
        words = arguments.split()
        status, text = self.ask(mode, [*words, "--out", str(out)])
        verdict = out / "verdict.json"
        rows = json.loads(verdict.read_text()) if verdict.exists() else []
        error = json.loads((out / "run.json").read_text()).get("error") if (out / "run.json").exists() else ""
        shutil.rmtree(out, ignore_errors=True)
        if status == 1:
            failed = [row["check"] for row in rows if row["passed"] is False]
            return "check", failed or [text.strip().splitlines()[-1][:160]]
        if status != 0:
            last = (error or text or "no output").strip().splitlines()[0 if error else -1]
            return "broke", [f"exit {status}: {last[:160]}"]
        return "survived", []

    def ask(self, mode: str, words: list[str]) -> tuple[int, str]:
        """Have a kept process run a command. One that does not end is ended, and -1 its status."""
        process = self.kept.get(mode)
        if process is None or process.poll() is not None:
            process = self.kept[mode] = self.start(
                ["-m", "tests.mutants.kept", mode], stdin=subprocess.PIPE, errors=None
            )
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(LAB_S, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        try:
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        late.cancel()
        if not answer:
            process.wait()
            return -1, f"no answer within {LAB_S:g} s"
        got = json.loads(answer)
        return got["status"], got["text"]

    def start(self, arguments: Sequence[str], *, stdin: int, errors: int | None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if errors is None else errors,
            start_new_session=True,
        )

    def tests(self, files: Sequence[str]) -> tuple[str, list[str]]:
        # A test that a hand-written mutant still fits the source sees any change of that source.
        wanted = ["-m", "not slow and not browser", "-q", "-x", "-p", "no:cacheprovider", *files]
        process = self.start(["-m", "pytest", *wanted], stdin=subprocess.DEVNULL, errors=subprocess.STDOUT)
        try:
            text, _ = process.communicate(timeout=TESTS_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "tests", [f"no end within {TESTS_S:g} s"]
        failed = [line.partition(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if process.returncode in (0, 5):  # 5: no test in these files
            return "survived", []
        return "tests", failed or [f"exit {process.returncode}"]

    def close(self) -> None:
        for process in self.kept.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


class Map:
    """Which statements each run and each file of tests reaches without a mutant; looked up once, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.copy = Copy(folder)
        self.lock = threading.Lock()
        self.lines: dict[str, reached.Lines | None] = {}
        for file in {file for room in ROOMS for file in files_of(room)}:
            path = folder / file
            path.write_text(reached.instrumented(path.read_text(), file))

    def of_run(self, room: Room, arguments: str) -> reached.Lines | None:
        """None where the run fails without a mutant, three times."""
        with self.lock:
            if arguments not in self.lines:
                self.lines[arguments] = None
                for _ in range(3):
                    reached_by_run = self.reached(lambda: self.copy.run(arguments, room.mode))
                    if reached_by_run is not None:
                        self.lines[arguments] = reached_by_run
                        break
            return self.lines[arguments]

    def of_tests(self, file: str) -> reached.Lines | None:
        with self.lock:
            if file not in self.lines:
                self.lines[file] = self.reached(lambda: self.copy.tests([file]))
            return self.lines[file]

    def reached(self, run: Any) -> reached.Lines | None:
        folder = self.copy.folder / "build" / "reached"
        reached.noted(folder)
        state, by = run()
        lines = reached.noted(folder)
        if state != "survived":
            print(f"fails without a mutant: {state}, {', '.join(by)}", flush=True)
        return lines if state == "survived" else None


def judged(copy: Copy, known: Map, room: Room, place: Place, before: Outcome | None, *, tested: bool) -> Outcome:
    """Judge a mutant by its lab, unless that was done before, and by tests if asked."""
    started = time.monotonic()
    line = reached.statement_of((ROOT / place.file).read_text(), place.line)
    change = copy.change(place)
    try:
        state, by = ("untested", []) if before else by_lab(copy, known, room, (place.file, line))
        if state == "untested" and tested:
            state, by = by_tests(copy, known, room, (place.file, line))
    finally:
        copy.restore(place)
    return Outcome(
        id=place.id,
        room=place.room,
        file=place.file,
        unit=place.unit,
        line=place.line,
        operator=place.operator,
        change=change,
        state=state,
        by=by,
        seconds=round(time.monotonic() - started, 1),
        judges=judges(room),
    )


def by_lab(copy: Copy, known: Map, room: Room, at: tuple[str, int]) -> tuple[str, list[str]]:
    for arguments in room.runs:
        lines = known.of_run(room, arguments)
        if lines is None or (at[1] and at not in lines):
            continue
        state, by = copy.run(arguments, room.mode)
        if doubtful(state, by):
            state, by = copy.run(arguments, room.mode)
        if state != "survived":
            return state, by
    return "untested", []


def doubtful(state: str, by: Sequence[str]) -> bool:
    """Whether a busy machine may be the reason."""
    return state == "broke" or (state == "check" and set(by) <= TIMED)


def by_tests(copy: Copy, known: Map, room: Room, at: tuple[str, int]) -> tuple[str, list[str]]:
    files = sorted(str(path.relative_to(ROOT)) for folder in room.tests for path in (ROOT / folder).rglob("test_*.py"))
    files = [file for file in files if not file.endswith("/test_mutants.py")]  # they want the source as it is
    nearest = [file for file in files if (lines := known.of_tests(file)) is not None and (not at[1] or at in lines)]
    return copy.tests(nearest) if nearest else ("survived", [])


# -- all of them --------------------------------------------------------------------------------------------------------------


def run_all(rooms: Sequence[Room], count: int, seed: str, results: Path, workers: int, *, tested: bool) -> None:
    """Run what has no result yet. With `tested`, also run the tests on what the labs let through."""
    by_name, places_drawn = {room.name: room for room in rooms}, draw(rooms, count, seed)
    before = {outcome.id: outcome for outcome in read(results, places_drawn) if outcome.holds}
    todo = iter(
        [each for each in places_drawn if each.id not in before or (tested and before[each.id].state == "untested")]
    )
    lock = threading.Lock()

    def work(copy: Copy, reaches: Map) -> None:
        while True:
            with lock:
                place = next(todo, None)
            if place is None:
                return
            outcome = judged(copy, reaches, by_name[place.room], place, before.get(place.id), tested=tested)
            with lock:
                with results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                words = f"{outcome.id} {outcome.file}:{outcome.line} {outcome.change}: {', '.join(outcome.by)}"
                print(f"{outcome.state:8} {outcome.seconds:5.1f} s  {words}", flush=True)

    with tempfile.TemporaryDirectory(prefix="kit-mutants-") as name:
        reaches = Map(Path(name) / "map")
        copies = [Copy(Path(name) / str(number)) for number in range(workers)]
        threads = [threading.Thread(target=work, args=(copy, reaches)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for copy in (reaches.copy, *copies):
            copy.close()


def read(results: Path, places_drawn: Sequence[Place]) -> list[Outcome]:
    """Return the outcomes of functions as they are now, the newest of each."""
    lines = results.read_text().splitlines() if results.exists() else []
    outcomes = {outcome.id: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}
    return [outcomes[place.id] for place in places_drawn if place.id in outcomes]


def share_in_words(seen: int, total: int) -> str:
    """A number, its share, and the 95 % interval (Wilson) of that share, since a draw is a sample."""
    if not total:
        return "0"
    share, spread = seen / total, SURE**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = SURE * math.sqrt(share * (1 - share) / total + spread / total / 4) / (1 + spread)
    return f"{seen} ({share:.0%}; {max(0.0, middle - half):.0%} to {min(1.0, middle + half):.0%})"


ABOUT = """\
`python -m tests.mutants.mechanical` draws {count} places and operators (cosmic-ray) by a hash, from each room in proportion to its
statements. The lab runs with cut-down settings on each mutant; what that lets through goes to the nearest quick tests. The results are in
`tests/mutants/drawn.jsonl`; each holds until the source of its function changes. The order is by a hash too, so those
that have run are a sample of each room. Shares have their 95 % interval (Wilson). *lab or tests* counts an *untested* mutant, on which no
test has run yet, as not seen."""


def section(outcomes: Sequence[Outcome]) -> str:
    """Return the part of the page about drawn mutants."""
    rows = []
    names = [*dict.fromkeys(outcome.room for outcome in outcomes)]
    for name in (*names, "all"):
        states = [
            "equivalent" if outcome.id in EQUIVALENT else outcome.state
            for outcome in outcomes
            if name in ("all", outcome.room)
        ]
        count = Counter(states)
        counted = len(states) - count["equivalent"]
        by_lab = count["check"] + count["broke"]
        either = by_lab + count["tests"]
        shares = [share_in_words(seen, counted) for seen in (by_lab, either)]
        left = [count["survived"] + count["mended"], count["untested"], count["equivalent"]]
        rows.append([name, len(states), count["check"], count["broke"], *shares, *left])
    head = ["room", "run", "a check", "run broke", "lab alone", "lab or tests", "survived", "untested", "equivalent"]
    left_rows = [
        [
            outcome.id,
            f"`{outcome.file}`, `{outcome.unit}`",
            f"`{outcome.change}`".replace("|", "\\|"),
            EQUIVALENT.get(outcome.id, SAID_OF[outcome.state]),
        ]
        for outcome in outcomes
        if outcome.state not in SEEN_BY_LAB
    ]
    return "\n".join(
        [
            TITLE,
            "",
            ABOUT.format(count=COUNT),
            "",
            markdown(head, rows),
            "",
            "What the labs alone did not see:",
            "",
            markdown(["id", "place", "change", "outcome"], left_rows) if left_rows else "Nothing.",
            "",
        ]
    )


def write(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Put the section in its place on the page: before the section "By check"."""
    before, _, after = page.read_text().partition("## By check")
    page.write_text(f"{before.partition(TITLE)[0]}{section(outcomes)}\n## By check{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.mechanical", description=__doc__)
    parser.add_argument("--room", action="append", choices=[room.name for room in ROOMS], help="only these rooms")
    parser.add_argument("--count", type=int, default=COUNT, help="mutants of all rooms together")
    parser.add_argument("--seed", default=SEED, help="what the draw hashes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time")
    parser.add_argument("--no-tests", action="store_true", help="leave what the labs let through for later")
    parser.add_argument("--no-runs", action="store_true", help="write the page from the results")
    parser.add_argument("--no-page", action="store_true", help="leave docs/mutants.md as it is")
    asked = parser.parse_args()
    rooms = [room for room in ROOMS if not asked.room or room.name in asked.room]
    if not asked.no_runs:
        run_all(rooms, asked.count, asked.seed, asked.results, asked.workers, tested=not asked.no_tests)
    if not asked.no_page:
        write(PAGE, read(asked.results, draw(ROOMS, COUNT, asked.seed)))


if __name__ == "__main__":
    main()
