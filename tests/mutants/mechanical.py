"""Mutants that nobody chose: a library changes the code under test mechanically, and the labs run on it.

    python -m tests.mutants.mechanical                     # draw, run, and write the section of docs/mutants.md
    python -m tests.mutants.mechanical --room stream --count 40 --no-page

The operators are those of cosmic-ray (`pip install -e .[mutants]`). Every place of a room where one applies is a candidate; a hash of the
parent commit orders the places and chooses one operator for each. So whoever writes a commit cannot choose its mutants. A room gets mutants
in proportion to its statements.

A mutant is first judged by its lab alone, with cut-down settings, as a person would run it: a check that fails, or a run that breaks, sees
it. What no lab sees is given to the nearest quick tests. Results are lines of JSON in build/, so a draw that was stopped goes on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants.catalogue import SETUPS
from tests.mutants.mutant import ROOT
from tests.mutants.table import markdown

RESULTS = ROOT / "build" / "mechanical.jsonl"
PAGE = ROOT / "docs" / "mutants.md"
TITLE = "## Drawn by a library"
COUNT = 300
LAB_S = 240.0  # beyond all deadlines of the labs at these settings
TESTS_S = 600.0
WORLDS = 100  # random ones, in which the cores run after the lab's own settings
SEEN_BY_LAB = ("check", "broke")
SURE = 1.96  # standard deviations of an interval of 95 %
# A decorator that is gone raises at the import, nearly always; the last two need a person to name variables.
UNUSED = ("RemoveDecorator", "VariableReplacer", "VariableInserter")


class Room(NamedTuple):
    """Code under test, the commands of the lab that should see its bugs, and the nearest tests."""

    name: str
    files: tuple[str, ...]
    runs: tuple[str, ...]
    tests: tuple[str, ...]


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
            STREAM,
            f"{STREAM} --set sampler=strict --set window=0 --set at_sync=abort",
            f"{STREAM} --set window=2 --set replicas=3",
            f"{STREAM} --set places=16 --set sampler=docs.examples.own_sampler:InOrder",
            f"explore stream --seeds {WORLDS}",
            "run stream --set steps=3 --set worlds=0",
        ),
        ("tests/stream", "tests/loop"),
    ),
    Room(
        "share",
        ("kit/share/core.py", "kit/share/planner.py", "kit/share/member.py", "kit/share/state.py"),
        (
            "run share --set simulated=true",
            "run share --set simulated=true --set scenario=F",
            f"explore share --seeds {WORLDS}",
            "run share --set a.steps=2 --set b.steps=2 --set rehearse=false --set worlds=0",
        ),
        ("tests/share", "tests/loop"),
    ),
)

# Survivors that behave exactly as the original, each with its argument. At most one in ten of those drawn.
EQUIVALENT: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """One mutation: the `occurrence`-th of an operator in a file."""

    room: str
    file: str
    line: int
    operator: str
    occurrence: int

    @property
    def id(self) -> str:
        key = f"{self.file} {self.line} {self.operator} {self.occurrence}"
        return f"{self.room}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """`state`: check, broke, tests, or survived. `by`: the checks or the test that failed, or how the run broke."""

    id: str
    room: str
    file: str
    line: int
    operator: str
    change: str
    state: str
    by: list[str] = field(default_factory=list)
    seconds: float = 0.0
    seed: str = ""


# -- the draw -------------------------------------------------------------------------------------------------------------


def operators() -> dict[str, Any]:
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name]() for name in provider if name not in UNUSED}


def files_of(room: Room) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in room.files for path in ROOT.glob(pattern))


def statements(room: Room) -> int:
    return sum(
        isinstance(node, ast.stmt) for file in files_of(room) for node in ast.walk(ast.parse((ROOT / file).read_text()))
    )


def places(room: Room) -> Iterator[tuple[tuple[int, int], Place]]:
    """Yield every mutation of a room with its position in the file."""
    import parso
    from cosmic_ray.ast import ast_nodes

    known = operators()
    for file in files_of(room):
        source = (ROOT / file).read_text()
        unread = unread_lines(source)
        seen: Counter[str] = Counter()
        for node in ast_nodes(parso.parse(source)):
            for name, operator in known.items():
                for start, _ in operator.mutation_positions(node):
                    occurrence = seen[name]
                    seen[name] += 1
                    if not any(first <= start < last for first, last in unread):
                        yield start, Place(room.name, file, start[0], name, occurrence)


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

    def order(*words: object) -> bytes:
        return hashlib.sha256("\0".join(map(str, (seed, *words))).encode()).digest()

    by_place: dict[tuple[str, int, int], list[Place]] = {}
    for (line, column), place in places(room):
        by_place.setdefault((place.file, line, column), []).append(place)
    chosen: list[Place] = []
    for where in sorted(by_place, key=lambda where: order(*where)):
        if len(chosen) == count:
            break
        ways = sorted(by_place[where], key=lambda place: order(place.operator, place.occurrence))
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


def parent() -> str:
    return subprocess.check_output(["git", "-C", ROOT, "rev-parse", "HEAD^"], text=True).strip()


# -- one mutant ---------------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the repository's files in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0
        names = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-z"], text=True).split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def change(self, place: Place) -> str:
        """Write the mutated file; return the change as people read it."""
        source = (ROOT / place.file).read_text()
        mutated = mutate(source, operators()[place.operator], place.occurrence)
        (self.folder / place.file).write_text(mutated)
        pairs = zip(source.splitlines(), mutated.splitlines(), strict=False)
        return next((f"{old.strip()} -> {new.strip()}" for old, new in pairs if old != new), "")

    def restore(self, place: Place) -> None:
        shutil.copy2(ROOT / place.file, self.folder / place.file)

    def lab(self, room: Room) -> tuple[str, list[str]]:
        """Run the room's lab until a run sees something."""
        for arguments in room.runs:
            self.runs += 1
            out = self.folder / "build" / f"run-{self.runs}"
            status, text = self.python(["-m", "kit", *arguments.split(), "--out", str(out)], LAB_S)
            verdict = out / "verdict.json"
            rows = json.loads(verdict.read_text()) if verdict.exists() else []
            shutil.rmtree(out, ignore_errors=True)
            if status == 1:
                return "check", [row["check"] for row in rows if row["passed"] is False]
            if status != 0:
                return "broke", [f"exit {status}: {text.strip().splitlines()[-1][:160] if text.strip() else ''}"]
        return "survived", []

    def tested(self, room: Room) -> tuple[str, list[str]]:
        # A test that a hand-written mutant still fits the source sees any change of that source.
        wanted = ["-m", "not slow and not browser", "-q", "-x", "-p", "no:cacheprovider", *room.tests]
        wanted += ["-k", "not every_mutant_applies"]
        status, text = self.python(["-m", "pytest", *wanted], TESTS_S)
        failed = [line.partition(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return ("tests", failed or [f"exit {status}"]) if status else ("survived", [])

    def python(self, arguments: Sequence[str], seconds: float) -> tuple[int, str]:
        """Run in the copy, with no more than so many seconds; a run that hangs ends with -1."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "KIT_RUNS": str(self.folder / "runs"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # a cached file of the mutant would outlive it within the same second
        }
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return -1, f"no end within {seconds:g} s"
        return process.returncode, text


def judged(copy: Copy, room: Room, place: Place, seed: str) -> Outcome:
    started = time.monotonic()
    change = copy.change(place)
    try:
        state, by = copy.lab(room)
        if state == "survived":
            state, by = copy.tested(room)
    finally:
        copy.restore(place)
    return Outcome(
        id=place.id,
        room=place.room,
        file=place.file,
        line=place.line,
        operator=place.operator,
        change=change,
        state=state,
        by=by,
        seconds=round(time.monotonic() - started, 1),
        seed=seed,
    )


# -- all of them --------------------------------------------------------------------------------------------------------------


def run_all(rooms: Sequence[Room], count: int, seed: str, results: Path) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    known = {outcome.id for outcome in read(results, seed)}
    shares = shared_out(count)
    with tempfile.TemporaryDirectory(prefix="kit-mutants-") as name:
        copy = Copy(Path(name))
        for room in rooms:
            todo = [place for place in drawn(room, shares[room.name], seed) if place.id not in known]
            if not todo:
                continue
            state, by = copy.lab(room)
            if state != "survived":
                raise SystemExit(f"room {room.name} fails without a mutant: {state}, {', '.join(by)}")
            for place in todo:
                outcome = judged(copy, room, place, seed)
                with results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                where = f"{outcome.file}:{outcome.line}"
                print(
                    f"{outcome.state:8} {outcome.seconds:5.1f} s  {outcome.id} {where} {outcome.change}: "
                    f"{', '.join(outcome.by)}",
                    flush=True,
                )


def read(results: Path, seed: str) -> list[Outcome]:
    """Return the outcomes of this draw."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return [Outcome(**line) for line in lines if line["seed"] == seed]


def share_in_words(seen: int, total: int) -> str:
    """A number, its share, and the 95 % interval (Wilson) of that share, since a draw is a sample."""
    if not total:
        return "0"
    share, spread = seen / total, SURE**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = SURE * math.sqrt(share * (1 - share) / total + spread / total / 4) / (1 + spread)
    return f"{seen} ({share:.0%}; {max(0.0, middle - half):.0%} to {min(1.0, middle + half):.0%})"


def section(outcomes: Sequence[Outcome], seed: str) -> str:
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
        rows.append(
            [name, len(states), count["check"], count["broke"], *shares, count["survived"], count["equivalent"]]
        )
    head = ["room", "drawn", "a check", "run broke", "lab alone", "lab or tests", "survived", "equivalent"]
    left = [
        [
            outcome.id,
            f"`{outcome.file}:{outcome.line}`",
            f"`{outcome.change}`",
            EQUIVALENT.get(outcome.id, "seen by tests only" if outcome.state == "tests" else "not seen"),
        ]
        for outcome in outcomes
        if outcome.state not in SEEN_BY_LAB
    ]
    return "\n".join(
        [
            TITLE,
            "",
            f"`python -m tests.mutants.mechanical` draws places and operators (cosmic-ray) by a hash of the parent commit, `{seed[:12]}`,",
            "and runs the labs with cut-down settings on each; what they let through goes to the nearest quick tests.",
            "A room gets mutants in proportion to its statements. Shares have their 95 % interval (Wilson).",
            "",
            markdown(head, rows),
            "",
            "What the labs alone did not see:",
            "",
            markdown(["id", "place", "change", "outcome"], left) if left else "Nothing.",
            "",
        ]
    )


def write(page: Path, outcomes: Sequence[Outcome], seed: str) -> None:
    """Put the section in its place on the page: before the section "By check"."""
    before, _, after = page.read_text().partition("## By check")
    page.write_text(f"{before.partition(TITLE)[0]}{section(outcomes, seed)}\n## By check{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.mechanical", description=__doc__)
    parser.add_argument("--room", action="append", choices=[room.name for room in ROOMS], help="only these rooms")
    parser.add_argument("--count", type=int, default=COUNT, help="mutants of all rooms together")
    parser.add_argument("--seed", default=parent(), help="what the draw hashes; the default is the parent commit")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--no-page", action="store_true", help="leave docs/mutants.md as it is")
    asked = parser.parse_args()
    rooms = [room for room in ROOMS if not asked.room or room.name in asked.room]
    run_all(rooms, asked.count, asked.seed, asked.results)
    if not asked.no_page:
        write(PAGE, read(asked.results, asked.seed), asked.seed)


if __name__ == "__main__":
    main()
