"""How every bench runs: part by part, with each row on disk as soon as it is measured.

An interrupt or a limit ends the bench, and loses no row: what was measured is in the file and is printed. A part that breaks is a row
with the reason; the others go on.

The file has one JSON object a line: `bench`, `provenance`, `seats`, `row` (with its `part`), `part` (with its `seconds`), `ended`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.bench.rows import Row, progress, seated, table, unmeasured
from kit.errors import BadInput, KitError
from kit.gpu import has_driver
from kit.nccl import SHARED_GPU
from kit.results.recorded import machine
from kit.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kit.bench.pace import Pace
    from kit.results import Run

SLACK = 2.5  # a part's limit, in predicted times
LEAST_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """How often each primitive of a Pace comes. `step` is of the tiny job: a larger one counts for several. `idle` is seconds that no
    machine changes."""

    process: float = 0
    world: float = 0
    megatron: float = 0
    job: float = 0
    step: float = 0
    group: float = 0
    copy: float = 0
    idle: float = 0

    def __add__(self, other: Cost) -> Cost:
        mine, others = asdict(self), asdict(other)
        return Cost(**{name: mine[name] + others[name] for name in mine})

    def __mul__(self, times: float) -> Cost:
        return Cost(**{name: times * count for name, count in asdict(self).items()})

    def terms(self, pace: Pace) -> dict[str, float]:
        """Seconds by primitive."""
        counts = asdict(self)
        return {name: count * (1.0 if name == "idle" else getattr(pace, f"{name}_s")) for name, count in counts.items()}

    def seconds(self, pace: Pace) -> float:
        return sum(self.terms(pace).values())

    def limit(self, pace: Pace) -> float:
        return max(LEAST_S, SLACK * self.seconds(pace))

    def told(self, pace: Pace) -> str:
        """The arithmetic in words, such as "1 process + 1 megatron + 40 step"; what takes less than 0.1 s is left out."""
        counts = asdict(self)
        return " + ".join(f"{counts[name]:.3g} {name}" for name, taken in self.terms(pace).items() if taken >= 0.1)


def total(costs: list[Cost]) -> Cost:
    return sum(costs, start=Cost())


def crowd(ranks: int) -> float:
    """How much longer ranks take to start where they are more than the cores."""
    return max(1.0, ranks / len(os.sched_getaffinity(0)))


INTERRUPTED = 130
Seat = dict[str, Any]


class Part(NamedTuple):
    """A part of a bench: what it measures with a session, and what that costs a machine, from which `kit reference` has its limit."""

    work: Callable[[Session], Iterable[Row]]
    cost: Cost = Cost()


class Session:
    """What the parts of one bench share: the device that was asked for, a scratch folder, Worlds, and who sat where."""

    def __init__(self, device: str, logs: Path, book: Book) -> None:
        self.device = device
        self.logs = logs
        self.book = book
        self._shared: dict[str, World] = {}

    def world(self, ranks: int, *, device: str = "", **options: Any) -> World:
        """A World on the bench's device. It insists on it: ranks that cannot have the GPU raise instead of using the CPU."""
        options.setdefault("logs", self.logs)
        made = World(ranks, device=device or self.device, **options)
        try:
            self.watch(made)
        except BaseException:
            made.close()
            raise
        return made

    def watch(self, world: World) -> None:
        """Keep where the ranks of a World sit, and the provenance of the first one."""
        rows = world.status()
        self.book.seat({"ranks": len(rows), "devices": [row["device"] for row in rows], "why": rows[0]["why"]})
        if self.book.provenance is None:
            self.book.describe(world.call("kit.measure:provenance", ranks=[world.numbers[0]])[0])

    def shared(self, ranks: int, *, fresh: bool = False, **options: Any) -> World:
        """The same World for every part that asks for the same; after a part that broke, a new one.

        `fresh`: with new processes, while torch and what is preloaded are loaded once for all parts."""
        key = repr((ranks, sorted(options.items())))
        world = self._shared.get(key)
        if world is None:
            world = self._shared[key] = self.world(ranks, **options)
            return world
        if fresh:
            world.restart()
        self.watch(world)
        return world

    def drop_shared(self) -> None:
        for world in self._shared.values():
            world.close()
        self._shared.clear()

    def lab(self, name: str, out: Path, *, world: World | None = None, **config: Any) -> Run:
        """A run of a lab on the bench's device, or on the ranks of a World. What ranks print is in the run's logs."""
        from kit.public import run  # here, since the ranks import benches too and need not have what tables are made of

        config.setdefault("device", self.device if world is None else world.device)
        with contextlib.redirect_stdout(io.StringIO()):
            made: Run = run(name, out=out, world=world, **config)
        self.book.seat(seat_of(made.provenance))
        if self.book.provenance is None:
            self.book.describe(made.provenance["rank0"])
        return made


def seat_of(provenance: Mapping[str, Any]) -> Seat:
    """Where the ranks of a lab's run sat, from its provenance."""
    about = provenance["world"]
    return {"ranks": about["ranks"], "devices": about["devices"], "why": about["why"]}


def shares_gpu(seat: Seat) -> bool:
    gpus = [device for device in seat["devices"] if device.startswith("cuda")]
    return len(set(gpus)) < len(gpus)


@dataclass(slots=True)
class Book:
    """Everything that one bench measured, in memory and in a file that is never behind. Without a file it is in memory alone."""

    bench: str
    path: Path | None = None
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    provenance: dict[str, Any] | None = None
    seats: list[Seat] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    shared: bool = False  # whether ranks of the part that runs share a GPU, which slows whatever they say to each other

    def begin(self) -> None:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text("")
            except OSError as error:
                raise BadInput(f"cannot write rows to {self.path}: {error.strerror}") from error
        self._write(bench=self.bench)

    def keep(self, part: str, row: Row) -> None:
        if self.shared:
            row = replace(row, note="; ".join(filter(None, [row.note, SHARED_GPU])))
        self.rows[row.what, row.who] = row
        self._write(part=part, row=row.to_json())

    def describe(self, provenance: dict[str, Any]) -> None:
        self.provenance = provenance
        self._write(provenance=provenance)

    def seat(self, seat: Seat) -> None:
        self.shared = self.shared or shares_gpu(seat)
        if seat not in self.seats:
            self.seats.append(seat)
            self._write(seats=self.seats)

    def took(self, part: str, seconds: float) -> None:
        self.parts[part] = round(seconds, 3)
        self._write(part=part, seconds=self.parts[part])

    def end(self, how: str) -> None:
        self._write(ended=how)

    def _write(self, **line: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def read_rows(path: Path) -> dict[str, Any]:
    """What a file of rows tells, as `kit bench --json` does, however the bench ended; empty where there is no row."""
    found: dict[str, Any] = {"bench": "", "rows": {}, "provenance": None, "seats": [], "parts": {}, "ended": ""}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a process that was killed
            continue
        if "row" in line:
            found["rows"][line["row"]["what"], line["row"]["who"]] = line["row"]
        elif "part" in line:
            found["parts"][line["part"]] = line["seconds"]
        else:
            found |= line
    return {**found, "rows": list(found["rows"].values())} if found["rows"] else {}


def conduct(
    name: str,
    sizes: Any = None,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    device: str = "auto",
    out: Path | None = None,
    module: Any = None,
) -> int:
    """Run a bench's parts, or some of them, and print their rows. Ends with 0, or 130 where it was interrupted."""
    module = module or import_module(f"kit.bench.{name}")
    sizes = sizes or (module.QUICK if quick else module.Sizes())
    book = Book(name, out)
    how = "broke"
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch:
        session = Session(device_for(device), Path(scratch), book)
        parts = chosen(name, module.parts(sizes, session.device), only)
        book.begin()
        try:
            for part, (work, _) in parts.items():
                perform(session, part, work)
            if book.provenance is None:
                session.world(1, device="cpu").close()
            how = "finished"
        except KeyboardInterrupt:
            how = "interrupted"
        finally:
            session.drop_shared()
            book.end(how)
    print(told(book, getattr(module, "table", table)))
    if how == "interrupted":
        print(f"interrupted: {len(book.parts)} of {len(parts)} parts were finished", file=sys.stderr)
        return INTERRUPTED
    return 0


def told(book: Book, shown: Callable[[Sequence[Row]], str]) -> str:
    """A table for people, the machine in a line, and where the ranks sat."""
    lines = [shown(list(book.rows.values())), ""]
    if book.provenance is not None:
        lines.append(machine(book.provenance))
    return "\n".join([*lines, *(f"seats: {seated(seat)}" for seat in book.seats)])


def perform(session: Session, part: str, work: Callable[[Session], Iterable[Row]]) -> None:
    """One part. Its time stands with it, also where it broke."""
    progress(part)
    began = time.monotonic()
    session.book.shared = False
    try:
        for row in work(session):
            session.book.keep(part, row)
    except KitError as error:
        session.drop_shared()
        session.book.keep(part, unmeasured(part, error))
    session.book.took(part, time.monotonic() - began)


def chosen(name: str, parts: Mapping[str, Part], only: Sequence[str]) -> dict[str, Part]:
    """The parts by name; `steps` stands for every `steps.X`."""
    picked = {part: work for part, work in parts.items() if not only or any(fits(part, word) for word in only)}
    for word in only:
        if not any(fits(part, word) for part in parts):
            raise BadInput(f"bench {name} has no part {word!r}; its parts are: {', '.join(parts)}")
    return picked


def fits(part: str, word: str) -> bool:
    return part == word or part.startswith(f"{word}.")


def device_for(asked: str) -> str:
    """`auto` is the GPU wherever there is a driver, whether or not torch can use it: the error then names the reason."""
    if asked != "auto":
        return asked
    return "cuda" if has_driver() else "cpu"


def new_file(name: str, folder: Path) -> Path:
    """A file for the rows of a bench that was given none."""
    stamp = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return folder / "benches" / f"{name}-{stamp}.jsonl"
