"""Mutants that nobody chose: a library changes the code under test mechanically, and the labs run on it.

    python -m tests.mutants.mechanical                     # draw, run, and write the section of docs/mutants.md
    python -m tests.mutants.mechanical --room stream --count 40 --no-page

The operators are those of cosmic-ray (`pip install -e .[mutants]`). Every place of a room where one applies is a candidate; a hash of it
and of one commit orders the places and chooses one operator for each, so nobody chooses the mutants. The rooms take turns in proportion to
their statements: the first so many of a draw are a sample of all of them, wherever it was stopped.

A mutant is first judged by its lab alone, with cut-down settings, as a person would run it: a check that fails, or a run that breaks, sees
it. What no lab sees is given to the nearest quick tests. A run or a test that never reaches the changed statement is left out; of the runs
that reach it there are two, and each other one that reaches more statements of its function.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tests.labs.parts import OF_WALL_TIME
from tests.mutants import reached
from tests.mutants.catalogue import SETUPS
from tests.mutants.mutant import ROOT
from tests.mutants.table import markdown

RESULTS = Path(__file__).with_name("drawn.jsonl")
KNOWN = ROOT / "build" / "drawn.json"  # the draws, and what runs and tests reach, each until its sources change
PAGE = ROOT / "docs" / "mutants.md"
TITLE = "## Drawn by a library"
SEED = "97615f4ba6b9c3c12ae7245bf8fafa32875a40fd"  # the parent of the first commit with results
COUNT = 300
MAP_S = 2400.0  # for what has not run yet
TESTS_S = 240.0  # of the tests for one mutant, which without it take that long
SLOWER, SPARE_S = 4, 20.0  # how much longer than without a mutant a run or tests may take
FIRST, LAB, TESTS = "first", "lab", "tests"  # one run of the lab, all of its runs, also its tests
PYTEST = ("-m", "not slow and not browser", "-q", "-p", "no:cacheprovider")
RUNS = 2  # of a lab for each mutant, before only those count that reach more of its function
LATE = (
    "Timeout",
    "SyncFailed",
    "gone",
    "did not answer",
    "no answer within",
)  # in the words of runs that a busy machine may break
WORLDS = 100  # random ones, in which the cores run after the lab's own settings
SEEN_BY_LAB = ("check", "broke")
SEEN = (*SEEN_BY_LAB, "tests", "mended")
SAID_OF = {
    "tests": "seen by tests only",
    "mended": "not seen; a check or a test was written for it",
    "survived": "not seen",
    "untested": "let through by the lab; its tests have not run",
    "begun": "let through by one run of the lab; others and its tests have not run",
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
    """The commands of all setups in which mutants of the lab run that were written by hand; a busy machine may take longer for a phase."""
    return tuple(
        " ".join([f"run {lab} --set ranks={setup.ranks}", *map(set_by, without_limit(setup.config).items())])
        for setup in SETUPS.values()
        if setup.lab == lab
    )


def without_limit(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "timeout_s"}


def set_by(setting: tuple[str, Any]) -> str:
    name, value = setting
    return f"--set {name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"


STREAM = "run stream --set simulated=true --set ranks=1"
LIVE = "run stream --set steps=3 --set worlds=0"
SHARED = "run share --set simulated=true"
ADAPTED = "run share --set scenario=C --set rehearse=false --set worlds=0"
TOKENS = "run split --set ranks=2 --set chunks=[1,2] --set microbatches=4 --set steps=2 --set dtype=float32 --set level=tokens"
SMALL_SPLIT, SMALL_SYNC = runs_of("split")[0], runs_of("sync")[0]
OWN_SAMPLER = "--set sampler=docs.examples.own_sampler:InOrder"
CACHED = f"{SMALL_SYNC} --set arena=cache"  # its trainer is released without copies of its weights

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
        (*runs_of("offload"), CACHED),
        ("tests/megatron", "tests/measure"),
    ),
    Room(
        "split",
        ("kit/megatron/split.py", "kit/train/protocol.py", "kit/train/losses.py", "kit/train/plain.py"),
        (
            *runs_of("split"),
            f"{SMALL_SPLIT} --set backend=fsdp2 --set batching=packed",
            f"{SMALL_SPLIT} --set backend=fsdp2 --set batching=dynamic --set recipe=nll",
            f"{TOKENS} --set ep=2 --set experts=4 --set reduce=mean --set layers=2",
            f"{SMALL_SPLIT} --set kl=0.05 --set kl_kind=k2 --set kl_output_clamp=0.01 --set kl_input_clamp=0.5",
        ),
        ("tests/train", "tests/megatron"),
    ),
    Room(
        "sync",
        ("kit/sync/*.py", "kit/megatron/shards.py", "kit/megatron/serve.py"),
        (
            *runs_of("sync"),
            LIVE,  # replicas decode there
            ADAPTED,
            f"{SMALL_SYNC} --set receiver=kit.sync.protocols:VllmCalls",
            f"{SMALL_SYNC} --set receiver=kit.sync.protocols:SglangSession",
            f"{SMALL_SYNC} --set delta=word --set lr=3e-6 --set dtype=bfloat16",  # some words change
            CACHED,
            f"{SMALL_SYNC} --set implementation=docs.examples.exported_sync:Exported",  # by a folder of weights
            f"{SMALL_SYNC} --set verify_share=0.5",
        ),
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
            f"{STREAM} --set places=16 {OWN_SAMPLER}",
            LIVE,
            f"explore stream --seeds {WORLDS} {OWN_SAMPLER}",
            f"{STREAM} --set previous=recomputed --set reference=recomputed",
            SHARED,  # a desk asks for its progress
        ),
        ("tests/stream", "tests/loop", "tests/labs/stream"),
        here=True,
    ),
    Room(
        "share",
        ("kit/share/core.py", "kit/share/planner.py", "kit/share/member.py", "kit/share/state.py"),
        (
            f"explore share --seeds {WORLDS}",
            SHARED,
            f"{SHARED} --set scenario=F",
            f"{SHARED} --set planner=static",
            f"{SHARED} --set pipeline=tests.labs.share.test_own:Right",
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
    "offload-1afe9125": "equivalent: descriptor 0 is a rank's standard input, so no arena has it",
    "share-2f1abb6c": "equivalent: its only caller gives three arguments by their place and the others by name",
    "stream-1be18105": "equivalent: each status is one of four constants of the file, and a resumed loop has no samples",
    "share-b5414624": "equivalent: every caller gives the core, the name and the clusters by their place",
    "stream-919d014d": "equivalent: the first event sets the second and the count to 1, whatever was there",
    "sync-9a59bfd5": "equivalent: both callers give `split` by its name and the others by their place",
    "sync-429ab7af": "equivalent: the logits are float32, so a tensor of float64 is a copy in any case",
    "split-563f2586": "equivalent: no ratio is below the band and above it, so either is the same as one of both",
    "share-ba181e6b": "equivalent: an error is of a command's name, a word of the source, which Python keeps once",
    "offload-90fff7b4": "equivalent: every caller gives the kinds by their place",
    "offload-3557f2fe": "equivalent: every copy is waited for at the end, so the bytes are the same; on a GPU copies would be slower",
    "sync-504c7a65": "equivalent: `offsets` has one entry more than `on_host`, and the last is left out, so both are of one length",
    "sync-fe9d0974": "equivalent: the same bytes, in other cuts; kit bench sync asks for its speed",
    "sync-603d1afd": "equivalent: without experts no parameter has one's number in its name, and with them the next lines set it",
    "sync-1819a09e": "equivalent: every `how` comes from the file's tables, which hold this one object, and stays in its process",
    "sync-63904441": "equivalent: every caller gives the replica by its place",
    "split-03bb130d": "equivalent: nothing reads it before `begin`, which makes it anew",
    "share-fefec64a": "equivalent: a pipeline whose request waits has no replica, so it adds nothing to what is divided",
    "stream-95586050": "equivalent: every caller gives the kind and the settings by their place, and the others by name",
    "split-01c135d2": "equivalent: the pieces of one call are rows of one batch, so all of them have its length",
}

# Why a lab does not see others. They count as not seen.
ON_A_GPU = "this code runs on a GPU only"
WORDS = "only the words of an error differ"
HINTS = "only how fast a reload is, which kit bench offload measures"
BAD_ON_PURPOSE = "mode=manual is wrong as it is: the lab is there to show that"
SPEED = "only how fast a sync is"
SUSPENDS = "only mode=suspend runs it, which is refused without a GPU"
KITS_OWN = "the kit's own bookkeeping: no code of a user's stands in its place"
WHY = {
    "offload-119dd683": "the kit's own list of groups that stayed; the lab looks for them itself",
    "offload-89b64116": ON_A_GPU,
    "offload-45bc7641": HINTS,
    "offload-a362ba66": HINTS,
    "offload-b0a7106b": ON_A_GPU,
    "offload-ca0d0690": HINTS,
    "offload-ca51b63f": ON_A_GPU,
    "offload-d661cb7c": "on a CPU only the types of the groups differ, which a slow test compares",
    "offload-ef332806": ON_A_GPU,
    "offload-1b2c2589": BAD_ON_PURPOSE,
    "offload-857c53d1": BAD_ON_PURPOSE,
    "offload-fd4d2ca1": KITS_OWN,
    "offload-d02e0d42": "no lab calls it: notebooks do",
    "offload-19b86647": SUSPENDS,
    "offload-de82a670": SUSPENDS,
    "offload-f867c6ea": SUSPENDS,
    "offload-60862534": SUSPENDS,
    "offload-9a333eca": ON_A_GPU,
    "offload-85a67afb": HINTS,
    "offload-bf88a330": WORDS,
    "offload-0a976319": WORDS,
    "offload-4dfcc70c": "only where groups are routed through torchcomms",
    "offload-f3429aed": "only mode=manual and mode=official run it, which are wrong as they are",
    "split-4ceac1c1": "only how fast a step is: it is a guess, which `finish` corrects by a further pass",
    "split-40ded642": "only a row of one token, which predicts nothing, tells them apart",
    "split-832921c0": "only how fast a step is",
    "share-a7e50bd1": "only for an error that no scene sends: the clock's, or a doubled one",
    "share-cdb2c53a": "only when the desk repeats a request that it does not answer",
    "stream-81e381dc": WORDS,
    "stream-a1e8b92e": KITS_OWN,
    "stream-fbf9ca6e": "a figure of a table, which no check judges",
    "stream-a1a935fb": "only how often a sampler is asked for its admission",
    "stream-bd5c6690": "since then worlds draw `floor`, and `one_step_per_batch` sees it",
    "sync-213bafb7": WORDS,
    "sync-19f21675": "only where a write takes longer than the gate's limit",
    "sync-4d2253e8": "only own transports without `on_device` differ, and only on a GPU",
    "sync-224b7985": "no run of a lab fills the cache of prefixes",
    "sync-55517adc": "only where a forward is awaited before the replica serves",
    "sync-cd003c0c": WORDS,
    "sync-dbb6473d": f"{WORDS}, at receivers that do not fail themselves",
    "sync-4c6e7de4": "a lab uses no cache after it was closed",
    "sync-5e805f38": ON_A_GPU,
    "sync-520e039c": f"{WORDS}, from bucket 257 on",
    "sync-62e37df1": WORDS,
    "sync-8c11f83b": "no run of a lab asks with a token below 0",
    "sync-02f8a5bb": WORDS,
    "sync-dc0a0db7": WORDS,
    "sync-94a9fd29": SPEED,
    "sync-49b20ad5": SPEED,
    "sync-dcd008a5": f"{SPEED}: what is bound is looked up again each time",
    "sync-5723fbc5": "no run of a lab fills the cache of prefixes",
    "sync-2add6b8d": "each token has its version, in more spans than there are versions",
    "sync-885d11f9": "every weight of a lab is contiguous; on a GPU it raises",
    "sync-aa193589": "an error comes later than its limit; in no run of a lab strangers call while a receiver is missing",
    "sync-dd924166": "only where the clock reads the very nanosecond of the end",
}

# Checks that a busy machine may fail: such a mutant is seen if a second run says so too.
TIMED = OF_WALL_TIME | {"reload_peak", "memory_drift", "memory_slope", "trains_before_straggler", "never_returned"}


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
    """`state`: check, broke, tests, survived; before its tests ran, untested; before the lab's second run, begun; mended by a test that was
    written for it afterwards, set by hand. `by`: what failed, or how the run broke."""

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
    judges: str = ""  # the hash of the room's runs, their labs and its tests
    through: list[str] = field(default_factory=list)  # keys of the lab's runs that let it through
    runs: int = -1  # of the lab that reach the statement without the mutant; -1: not counted

    @property
    def holds(self) -> bool:
        """Whether to run it again is no use: it was seen, or its lab and its tests are the same."""
        return self.state in SEEN or self.id in EQUIVALENT or (self.state != "begun" and self.is_of_today)

    @property
    def is_of_today(self) -> bool:
        return self.judges == judges(next(room for room in ROOMS if room.name == self.room))


def digest(*words: object) -> str:
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()


# -- the draw -------------------------------------------------------------------------------------------------------------


@cache
def operators() -> dict[str, Any]:
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name]() for name in provider if name not in UNUSED}


def files_of(room: Room) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in room.files for path in ROOT.glob(pattern))


@cache
def judges(room: Room) -> str:
    """Hash what may see a mutant of a room: its runs, and its tests."""
    return digest(*map(key_of_lab, room.runs), hash_of(*(ROOT / folder for folder in room.tests)))[:12]


@cache
def key_of_lab(arguments: str) -> str:
    """Hash a command and its lab."""
    return digest(arguments, hash_of(ROOT / "kit" / "labs" / arguments.split()[1]))[:12]


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
        chosen += next(([place] for place in ways if changes_the_program(place)), [])
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
    shares, known = shared_out(count), Known()
    queues: dict[str, list[Place]] = {}
    for room in rooms:
        key = digest("draw", shares[room.name], seed, hash_of(*sources(room)))
        if key not in known:
            known[key] = [asdict(place) for place in drawn(room, shares[room.name], seed)]
        queues[room.name] = [Place(**place) for place in known[key]]
    return in_turns(queues)


class Known(dict[str, Any]):
    """What took long to find out, by a hash of what it depends on; kept in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.read()

    def read(self) -> None:
        self.update(json.loads(KNOWN.read_text()) if KNOWN.exists() else {})

    def __setitem__(self, key: str, value: Any) -> None:
        self.read()  # what another process found out meanwhile
        super().__setitem__(key, value)
        KNOWN.parent.mkdir(exist_ok=True)
        whole = KNOWN.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(self))
        whole.replace(KNOWN)


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

    def run(self, arguments: str, mode: str, limit_s: float = MAP_S) -> tuple[str, list[str]]:
        """Run a command of the kit: its state, and the checks that failed or its last line."""
        self.runs += 1
        out = self.folder / "build" / f"run-{self.runs}"
        words = arguments.split()
        status, text = self.ask(mode, [*words, "--out", str(out)], limit_s)
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

    def ask(self, mode: str, words: list[str], limit_s: float) -> tuple[int, str]:
        """Have a kept process run a command. One that does not end is ended, and -1 its status."""
        process = self.kept.get(mode)
        if process is None or process.poll() is not None:
            process = self.kept[mode] = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.kept", mode],
                cwd=self.folder,
                env=self.environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
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
            return -1, f"no answer within {limit_s:g} s"
        got = json.loads(answer)
        return got["status"], got["text"]

    def tests(self, names: Sequence[str], limit_s: float) -> tuple[str, list[str]]:
        """Run these tests until one fails."""
        status, text = self.ask("fork", ["pytest", *PYTEST, "-x", *names], limit_s)
        failed = [line.partition(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if status in (0, 5):  # 5: no test in these files
            return "survived", []
        return "tests", failed or [f"exit {status}: {text.strip()[-160:]}"]

    def close(self) -> None:
        for process in self.kept.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


class Reach(NamedTuple):
    lines: reached.Lines
    seconds: float


class Map:
    """Which statements each run and each test reaches without a mutant; looked up when first asked for, and kept in a file."""

    def __init__(self, folder: Path) -> None:
        self.copy = Copy(folder)
        self.turn = reached.Turn(folder / "build" / "reached")
        self.lock = threading.Lock()
        self.known = Known()
        self.failing: set[str] = set()
        for file in {file for room in ROOMS for file in files_of(room)}:
            path = folder / file
            path.write_text(reached.instrumented(path.read_text(), file))

    def of_run(self, room: Room, arguments: str) -> Reach | None:
        """None where the run fails without a mutant, three times."""
        key = key_of_run(room, arguments)
        if key in self.known:
            return as_reach(self.known[key])  # nobody waits here for another map
        with self.lock:
            for _ in range(3):
                if key not in self.known and key not in self.failing:
                    started, turn = time.monotonic(), self.turn.begin()
                    if self.fine(arguments, *self.copy.run(arguments, room.mode)):
                        self.known[key] = [as_text(self.turn.noted(turn)), time.monotonic() - started]
            if key in self.known:
                return as_reach(self.known[key])
            self.failing.add(key)
            return None

    def of_tests(self, folder: str) -> dict[str, Reach]:
        """By the name of a test; those that fail without a mutant are left out."""
        key = digest(folder, hash_of(ROOT / folder, *sources(*ROOMS)))
        with self.lock:
            if key not in self.known:
                status, text = self.copy.ask("fork", ["pytest", *PYTEST, "-p", "tests.mutants.turns", folder], MAP_S)
                failed = {
                    line.partition(" - ")[0].partition(" ")[2]
                    for line in text.splitlines()
                    if line.startswith(("FAILED", "ERROR"))
                }
                print(
                    f"tests of {folder}: exit {status}; fails without a mutant: {', '.join(failed) or 'none'}",
                    flush=True,
                )
                turns = json.loads((self.turn.folder / "tests.json").read_text())
                self.known[key] = {
                    name: [as_text(self.turn.noted(setup) | self.turn.noted(call)), seconds]
                    for name, (setup, call, seconds) in turns.items()
                    if name not in failed
                }
            return {name: as_reach(each) for name, each in self.known[key].items()}

    def fine(self, arguments: str, state: str, by: Sequence[str]) -> bool:
        if state != "survived":
            print(f"fails without a mutant: {arguments}: {', '.join(by)}", flush=True)
        return state == "survived"


def key_of_run(room: Room, arguments: str) -> str:
    return digest(key_of_lab(arguments), hash_of(*sources(room)))


def as_text(lines: reached.Lines) -> str:
    return " ".join(f"{file}:{line}" for file, line in sorted(lines))


def as_reach(kept: Sequence[Any]) -> Reach:
    places = [place.rpartition(":") for place in kept[0].split()]
    return Reach({(file, int(line)) for file, _, line in places}, kept[1])


def hash_of(*paths: Path) -> str:
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return digest(*(file.read_text() for file in files))


def sources(*rooms: Room) -> list[Path]:
    return [ROOT / file for room in rooms for file in files_of(room)]


def judged(copy: Copy, known: Map, room: Room, place: Place, before: Outcome | None, *, ask: str) -> Outcome:
    """Judge a mutant by the first run of its lab, by all of them, or by tests; a run that let it through is not had again."""
    started = time.monotonic()
    through = [*before.through] if before is not None else []
    change = copy.change(place)
    try:
        if ask == TESTS:
            state, by = by_tests(copy, known, room, statements_at(room, place))
            if state == "survived" and before is not None and not before.holds:
                return before  # runs of its lab are left
        else:
            state, by = by_lab(copy, known, room, place, through, runs=1 if ask == FIRST else None)
            if (state, ask) == ("untested", FIRST):
                state = "begun"
            if state == "untested" and before is not None and before.state in SEEN:
                return before  # it is still its tests that see it
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
        through=through,
    )


def statements_at(room: Room, place: Place) -> reached.Lines:
    """The changed statement; outside of functions, those that read what it sets; a header, all of its function."""
    source = (ROOT / place.file).read_text()
    if line := reached.statement_of(source, place.line):
        return {(place.file, line)}
    if inside := reached.around(source, place.line):
        return {(place.file, line) for line in inside}
    names = reached.names_set_at(source, place.line)
    return {(file, line) for file in files_of(room) for line in reached.mentions((ROOT / file).read_text(), names)}


class BusyMachineError(Exception):
    """What a run said of a mutant it says without it, too."""


def by_lab(
    copy: Copy,
    known: Map,
    room: Room,
    place: Place,
    through: list[str],
    *,
    runs: int | None = None,
) -> tuple[str, list[str]]:
    """Run the lab, all of it or its first `runs`; those of `through` have let the mutant through before, others come to them."""
    at = statements_at(room, place)
    inside = {(place.file, line) for line in reached.around((ROOT / place.file).read_text(), place.line)} or at
    for arguments, reach in islice(in_order(known, room, at, inside), runs):
        if key_of_lab(arguments) in through:
            continue
        limit_s = SLOWER * reach.seconds + SPARE_S
        state, by = copy.run(arguments, room.mode, limit_s)
        if doubtful(state, by):
            state, by = copy.run(arguments, room.mode, limit_s)
        if doubtful(state, by):
            copy.restore(place)
            control = copy.run(arguments, room.mode, limit_s)
            copy.change(place)
            if control[0] != "survived":
                raise BusyMachineError(f"without the mutant too: {', '.join(control[1])}")
        if state != "survived":
            return state, by
        through.append(key_of_lab(arguments))
    return "untested", []


def in_order(known: Map, room: Room, at: reached.Lines, inside: reached.Lines) -> Iterator[tuple[str, Reach]]:
    """Yield the runs that reach a statement: the room's first one, then the ones that add most of its function."""
    reaching = ((each, reach) for each in room.runs if (reach := known.of_run(room, each)) and at & reach.lines)
    first = next(reaching, None)
    if first is None:
        return
    yield first
    covered, ran, left = first[1].lines & inside, 1, list(reaching)
    while left:
        best = max(left, key=lambda each: len(each[1].lines & inside - covered))
        if ran >= RUNS and best[1].lines & inside <= covered:
            return
        yield best
        left.remove(best)
        covered, ran = covered | best[1].lines & inside, ran + 1


def doubtful(state: str, by: Sequence[str]) -> bool:
    """Whether a busy machine may be the reason."""
    late = state == "broke" and any(word in line for line in by for word in LATE)
    return late or (state == "check" and set(by) <= TIMED)


def by_tests(copy: Copy, known: Map, room: Room, at: reached.Lines) -> tuple[str, list[str]]:
    """The tests that reach the statement, file by file, the quickest first, as many as fit into `TESTS_S`."""
    files: dict[str, dict[str, float]] = {}
    for folder in room.tests:
        for name, reach in known.of_tests(folder).items():
            file = name.partition("::")[0]
            if at & reach.lines and not file.endswith("/test_mutants.py"):  # they want the source as it is
                files.setdefault(file, {})[name] = reach.seconds
    order = sorted(files.values(), key=lambda tests: sum(tests.values()))
    nearest: list[str] = []
    seconds = 0.0
    for name, takes in [each for tests in order for each in sorted(tests.items(), key=lambda each: each[1])]:
        if nearest and seconds + takes > TESTS_S:
            continue
        nearest.append(name)
        seconds += takes
    return copy.tests(nearest, SLOWER * seconds + SPARE_S) if nearest else ("survived", [])


# -- all of them --------------------------------------------------------------------------------------------------------------


def run_all(
    rooms: Sequence[Room],
    count: int,
    seed: str,
    results: Path,
    workers: int,
    *,
    passes: Sequence[str] = (FIRST, LAB, TESTS),
    again: Sequence[str] = (),
    end: float = math.inf,
) -> None:
    """Run each lab once on what has no result yet, then all its runs on what that lets through, then the tests.

    The mutants of `again` go through all runs of their lab although tests have seen them: a check may be newer. No mutant begins after
    `end`, a time of `time.monotonic`.
    """
    with tempfile.TemporaryDirectory(prefix="kit-mutants-") as name:
        reaches = Map(Path(name) / "map")
        copies = [Copy(Path(name) / str(number)) for number in range(workers)]
        by_name, places_drawn = {room.name: room for room in rooms}, draw(rooms, count, seed)
        for ask in (LAB,) if again else passes:
            run_pass(by_name, places_drawn, results, reaches, copies, ask=ask, again=again, end=end)
        count_runs(rooms, places_drawn, results)
        for copy in (reaches.copy, *copies):
            copy.close()


def run_pass(
    rooms: Mapping[str, Room],
    places_drawn: Sequence[Place],
    results: Path,
    reaches: Map,
    copies: Sequence[Copy],
    *,
    ask: str,
    again: Sequence[str] = (),
    end: float,
) -> None:
    before = {outcome.id: outcome for outcome in read(results, places_drawn)}
    todo = iter(
        [place for place in places_drawn if (place.id in again if again else is_left(before.get(place.id), ask))]
    )
    lock = threading.Lock()

    def work(copy: Copy) -> None:
        while True:
            with lock:
                place = next(todo, None)
            if place is None or time.monotonic() > end:
                return
            try:
                outcome = judged(copy, reaches, rooms[place.room], place, before.get(place.id), ask=ask)
            except BusyMachineError as busy:
                print(f"no result  {place.id}: {busy}", flush=True)
                continue
            with lock:
                if outcome is not before.get(place.id):
                    note(results, outcome)
                words = f"{outcome.id} {outcome.file}:{outcome.line} {outcome.change}: {', '.join(outcome.by)}"
                print(f"{outcome.state:8} {outcome.seconds:5.1f} s  {words}", flush=True)

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def note(results: Path, outcome: Outcome) -> None:
    with results.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def count_runs(rooms: Sequence[Room], places_drawn: Sequence[Place], results: Path) -> None:
    """Write how many runs of the lab reach what it did not see, where the map has all of them."""
    known, outcomes = Known(), {outcome.id: outcome for outcome in read(results, places_drawn)}
    for room in rooms:
        keys = [key_of_run(room, arguments) for arguments in room.runs]
        if not known.keys() >= {*keys}:
            continue
        reaches = [as_reach(known[key]).lines for key in keys]
        for place in places_drawn:
            outcome = outcomes.get(place.id)
            if place.room == room.name and outcome is not None and outcome.state not in SEEN_BY_LAB:
                at = statements_at(room, place)
                runs = sum(bool(at & lines) for lines in reaches)
                if runs != outcome.runs:
                    note(results, replace(outcome, runs=runs))


def is_left(outcome: Outcome | None, ask: str) -> bool:
    """Whether a mutant waits for what is asked now; an older result of a lab that has changed waits for all of its runs.

    What tests see before those runs is not seen by the lab alone, whatever they would have said.
    """
    if outcome is None:
        return ask == FIRST
    if ask == TESTS:
        return outcome.state == "untested" or not outcome.holds
    return ask == LAB and not outcome.holds


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
statements. The lab runs on each mutant, by commands that a person may type, with few cycles and steps: once, then by those that reach more
of the function, at least twice in all. What that lets through goes to the nearest quick tests, as many as take {minutes:g} minutes
together, and where a person named one to a slow test. What never reaches the changed statement is left out. The results are in
`tests/mutants/drawn.jsonl`; each holds until the source of its function changes. The order is by a hash too, so those that have run are a
sample of each room. Shares have their 95 % interval (Wilson); *untested* mutants, of which a run of the lab or the tests are left, count
as not seen. *mended* mutants were not seen until somebody read them and wrote a check or a test: only the last share has them, and it
says what is seen today, not what would be seen of other mutants. Many had their tests before all runs of their lab, so that the share of
the lab alone is the least that it sees. *unreached* are those of what nothing sees whose statement no run of the lab reaches on this
machine, which has no GPU."""


def section(outcomes: Sequence[Outcome], drawn_by_room: Mapping[str, int]) -> str:
    """Return the part of the page about drawn mutants."""
    rows = []
    for name in (*drawn_by_room, "all"):
        states = [
            "equivalent" if outcome.id in EQUIVALENT else outcome.state
            for outcome in outcomes
            if name in ("all", outcome.room)
        ]
        count = Counter(states)
        counted = len(states) - count["equivalent"]
        by_lab = count["check"] + count["broke"]
        either = by_lab + count["tests"]
        shares = [share_in_words(seen, counted) for seen in (by_lab, either, either + count["mended"])]
        count["untested"] += count["begun"]
        left = [count[state] for state in ("survived", "untested", "equivalent")]
        unseen = [each for each in outcomes if each.state not in SEEN and each.id not in EQUIVALENT]
        left.append(sum(each.runs == 0 for each in unseen if name in ("all", each.room)))
        size = sum(drawn_by_room.values()) if name == "all" else drawn_by_room[name]
        rows.append([name, size, len(states), count["check"], count["broke"], *shares, *left])
    head = ["room", "drawn", "run", "a check", "run broke", "lab alone", "lab or tests", "or mended"]
    head += ["survived", "untested", "equivalent", "unreached"]
    left_rows = [
        [
            outcome.id,
            f"`{outcome.file}`, `{outcome.unit}`",
            f"`{outcome.change}`".replace("|", "\\|"),
            EQUIVALENT.get(outcome.id) or "; ".join(filter(None, (SAID_OF[outcome.state], WHY.get(outcome.id)))),
        ]
        for outcome in outcomes
        if outcome.state not in SEEN_BY_LAB
    ]
    return "\n".join(
        [
            TITLE,
            "",
            ABOUT.format(count=COUNT, minutes=TESTS_S / 60),
            "",
            markdown(head, rows),
            "",
            "What the labs alone did not see:",
            "",
            markdown(["id", "place", "change", "outcome"], left_rows) if left_rows else "Nothing.",
            "",
        ]
    )


def write(page: Path, outcomes: Sequence[Outcome], drawn_by_room: Mapping[str, int]) -> None:
    """Put the section in its place on the page: before the section "By check"."""
    before, _, after = page.read_text().partition("## By check")
    page.write_text(f"{before.partition(TITLE)[0]}{section(outcomes, drawn_by_room)}\n## By check{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.mechanical", description=__doc__)
    parser.add_argument("--room", action="append", choices=[room.name for room in ROOMS], help="only these rooms")
    parser.add_argument("--count", type=int, default=COUNT, help="mutants of all rooms together")
    parser.add_argument("--seed", default=SEED, help="what the draw hashes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after so many")
    parser.add_argument("--again", action="append", default=[], metavar="ID", help="give these to their lab again")
    parser.add_argument(
        "--ask", action="append", choices=(FIRST, LAB, TESTS), help="only these passes: a first run, all runs, tests"
    )
    parser.add_argument("--no-runs", action="store_true", help="write the page from the results")
    parser.add_argument("--no-page", action="store_true", help="leave docs/mutants.md as it is")
    asked = parser.parse_args()
    rooms = [room for room in ROOMS if not asked.room or room.name in asked.room]
    if not asked.no_runs:
        end = time.monotonic() + 60 * asked.minutes
        passes = asked.ask or (FIRST, LAB, TESTS)
        run_all(rooms, asked.count, asked.seed, asked.results, asked.workers, passes=passes, again=asked.again, end=end)
    if not asked.no_page:
        places_drawn = draw(ROOMS, COUNT, asked.seed)
        write(PAGE, read(asked.results, places_drawn), Counter(place.room for place in places_drawn))


if __name__ == "__main__":
    main()
