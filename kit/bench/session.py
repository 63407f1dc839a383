"""Common to all benches: rows from samples, parts that run in turn, and a file to which each row is written at once.

A bench has a function of the device and of sizes that returns its parts by name. A part measures with a session and yields rows. A bench
does not judge: it ends with 0 even if a limit is not met.

An interrupt or a time limit ends the bench and loses no row. If a part breaks, a row gives the reason and the next part runs.
The file has one JSON object per line: `bench`, `provenance`, `seats`, `row` (with its `part`), `part` (with its `seconds`), `ended`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import pkgutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.bench import BENCHES
from kit.errors import BadInput, KitError
from kit.machine import has_gpu_driver
from kit.nccl import SHARED_GPU
from kit.results.comparison import machine
from kit.results.units import columns, unit_word
from kit.world import World
from kit.world.world import Worlds

if TYPE_CHECKING:
    from kit.results import Run

KIT = "kit"
HEADS = ("what", "who", "median", "low", "high", "n", "unit", "at most", "aim", "ceiling", "")
NUMBERS = ("median", "low", "high", "n", "at most", "aim", "ceiling")  # aligned to the right


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement and its spread: `low` and `high` are the minimum and maximum of `n` samples.

    Less is better. `limit` is "at most", `aim` an excellent value, `ceiling` the best that the machine allows. Without samples `median` is
    None and `note` gives the reason. `ids` describe the row for programs (way, groups, ranks, ...), which do not parse `what`.
    In a bench a row is identified by `what` and `who`; a later row with the same pair replaces it."""

    what: str
    who: str = KIT
    unit: str = "s"
    median: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    limit: float | None = None
    aim: float | None = None
    ceiling: float | None = None
    note: str = ""
    ids: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the median is within the limit; None without a median or a limit."""
        return None if self.median is None or self.limit is None else self.median <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def row(what: str, samples: Sequence[float], **about: Any) -> Row:
    """A row from its samples in the row's unit; without samples it needs a note."""
    if not samples:
        return Row(what=what, **about)
    values = [float(one) for one in samples]  # numpy's numbers are not JSON's
    spread: dict[str, Any] = {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "n": len(values),
    }
    return Row(what=what, **spread, **about)


def unmeasured(what: str, why: KitError | str, **about: Any) -> Row:
    """A row without samples, with the reason in a line."""
    return Row(what=what, note=f"not measured: {first_line(why)}", **about)


def first_line(text: object) -> str:
    return str(text).partition("\n")[0]


def over(what: str, above: Sequence[float], below: Sequence[float], **about: Any) -> Row:
    """Ratios turn by turn, so a disturbance of the machine affects both sides."""
    return row(what, [a / b for a, b in zip(above, below, strict=True)], unit="x", **about)


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def samples(what: str, n: int, once: Callable[[], float]) -> list[float]:
    progress(f"{what}, {n} times")
    return [once() for _ in range(n)]


def turn_by_turn(names: Sequence[str], rounds: int, timed: Callable[[str, int], float]) -> dict[str, list[float]]:
    """Seconds of each. In every turn each runs once, in changing order, after a garbage collection. The first turn, -1, is not counted,
    because it allocates pages and makes connections."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # existing objects are not scanned in every turn
    try:
        for turn in range(-1, rounds):
            for place in order(len(names), turn):
                gc.collect()
                taken = timed(names[place], turn)
                if turn >= 0:
                    seconds[names[place]].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def order(count: int, turn: int) -> list[int]:
    """The order of a turn: over `count` turns each is in every position and, for even counts, follows each other one equally often."""
    zigzag = [place // 2 + 1 if place % 2 else -(place // 2) for place in range(count)]
    return [(place + turn) % count for place in zigzag]


def progress(text: str) -> None:
    """Print the current measurement, on a terminal only."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr)


# -- what people read ----------------------------------------------------------------------------------------------------


def seated(seat: Mapping[str, Any]) -> str:
    """The ranks and their devices, in one line."""
    ranks = f"{seat['ranks']} rank{'s' * (seat['ranks'] > 1)}"
    return f"{ranks} on {', '.join(dict.fromkeys(seat['devices']))} ({seat['why']})"


def table(rows: Sequence[Row]) -> str:
    notes = [f"{one.who}, {one.what}: {one.note}" for one in rows if one.note]
    shown = columns([HEADS, *map(_cells, rows)], right=[HEADS.index(head) for head in NUMBERS])
    return "\n".join([shown, "", *notes] if notes else [shown])


def _cells(one: Row) -> list[str]:
    judged = {None: "", True: "met", False: "NOT MET"}[one.met]
    low, high, n = (number(one.low), number(one.high), str(one.n)) if one.n else ("", "", "")
    median = number(one.median) if one.n else "-"
    unit = {"ratio": "x"}.get(one.unit, unit_word(one.unit))
    return [one.what, one.who, median, low, high, n, unit, *map(number, (one.limit, one.aim, one.ceiling)), judged]


def number(value: float | None) -> str:
    """Three significant digits."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


# -- how a bench runs --------------------------------------------------------------------------------------------------

INTERRUPTED = 130
Part = Callable[["Session"], Iterable[Row]]


class Bench(NamedTuple):
    """`parts(device, **sizes)` gives the parts by name. Default sizes are the full ones; `quick` has smaller ones."""

    parts: Callable[..., Mapping[str, Part]]
    quick: Mapping[str, Any]
    table: Callable[[Sequence[Row]], str] = table


class Session:
    """State shared by the parts of a bench: the requested device, a scratch folder, Worlds, and the device of each rank."""

    def __init__(self, device: str, logs: Path, book: Book) -> None:
        self.device = device
        self.logs = logs
        self.book = book
        self._shared: dict[str, World] = {}

    def world(self, ranks: int, *, device: str = "", **options: Any) -> World:
        """A World on the bench's device. Ranks that cannot use the GPU raise instead of using the CPU."""
        options.setdefault("logs", self.logs)
        made = World(ranks, device=device or self.device, **options)
        try:
            self.watch(made)
        except BaseException:
            made.close()
            raise
        return made

    def watch(self, world: World) -> None:
        """Record the devices of a World's ranks, and the provenance of the first World."""
        rows = world.status()
        self.book.seat({"ranks": len(rows), "devices": [row["device"] for row in rows], "why": rows[0]["why"]})
        if self.book.provenance is None:
            self.book.describe(world.call("kit.measure:provenance", ranks=[world.numbers[0]])[0])

    def worlds(self, sizes: Sequence[int]) -> Worlds:
        """Worlds for several runs of a lab with separate replicas. `with` ends them."""
        return Worlds(sizes, isolate=True, device=self.device, preload=("megatron.core",), logs=self.logs)

    def shared(self, ranks: int, *, fresh: bool = False, **options: Any) -> World:
        """One World shared by all parts with equal requests; a new one after a part that broke. `fresh` restarts its processes; torch
        and preloaded modules are still loaded once for all parts."""
        key = repr((ranks, sorted(options.items())))
        if key not in self._shared:
            self._shared[key] = self.world(ranks, **options)
            return self._shared[key]
        if fresh:
            self._shared[key].restart()
        self.watch(self._shared[key])
        return self._shared[key]

    def drop_shared(self) -> None:
        for world in self._shared.values():
            world.close()
        self._shared.clear()

    def lab(self, name: str, out: Path, *, world: World | Worlds | None = None, **config: Any) -> Run:
        """A run of a lab on the bench's device, or on the ranks of a World. The ranks' output is in the run's logs."""
        from kit.public import run  # here, because ranks import benches too and may lack the packages for tables

        config.setdefault("device", self.device if world is None else world.device)
        with contextlib.redirect_stdout(io.StringIO()):
            made: Run = run(name, out=out, world=world, **config)
        self.book.seat(seat_of(made.provenance))
        if self.book.provenance is None:
            self.book.describe(made.provenance["rank0"])
        return made


def seat_of(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The devices of the ranks of a lab's run, from its provenance."""
    return {name: provenance["world"][name] for name in ("ranks", "devices", "why")}


@dataclass(slots=True)
class Book:
    """All measurements of a bench, in memory and in a file that is always up to date. Without a file, only in memory."""

    bench: str
    path: Path | None = None
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    provenance: dict[str, Any] | None = None
    seats: list[dict[str, Any]] = field(default_factory=list)
    shared: bool = False  # whether ranks of the current part share a GPU, which slows their collectives

    def begin(self) -> None:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text("")
            except OSError as error:
                raise BadInput(f"cannot write rows to {self.path}: {error.strerror}") from error
        self.write(bench=self.bench)

    def keep(self, part: str, row: Row) -> None:
        if self.shared:
            row = replace(row, note="; ".join(filter(None, [row.note, SHARED_GPU])))
        self.rows[row.what, row.who] = row
        self.write(part=part, row=row.to_json())

    def describe(self, provenance: dict[str, Any]) -> None:
        self.provenance = provenance
        self.write(provenance=provenance)

    def seat(self, seat: dict[str, Any]) -> None:
        gpus = [device for device in seat["devices"] if device.startswith("cuda")]
        self.shared = self.shared or len(set(gpus)) < len(gpus)
        if seat not in self.seats:
            self.seats.append(seat)
            self.write(seats=self.seats)

    def write(self, **line: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def read_rows(path: Path) -> dict[str, Any]:
    """The content of a file of rows, as printed by `kit bench --json`, even if the bench broke; empty if there is no row."""
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
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    device: str = "auto",
    out: Path | None = None,
    bench: Bench | None = None,
    **sizes: Any,
) -> int:
    """Run a bench's parts, or some of them, and print their rows. Ends with 0, or 130 if interrupted."""
    bench = bench or pkgutil.resolve_name(BENCHES[name])
    book, how, finished = Book(name, out), "broke", 0
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch:
        session = Session(device_for(device), Path(scratch), book)
        parts = chosen(name, bench.parts(session.device, **(bench.quick if quick else {}), **sizes), only)
        book.begin()
        try:
            for part, work in parts.items():
                perform(session, part, work)
                finished += 1
            if book.provenance is None:
                session.world(1, device="cpu").close()
            how = "finished"
        except KeyboardInterrupt:
            how = "interrupted"
        finally:
            session.drop_shared()
            book.write(ended=how)
    print(page(book, bench.table))
    if how == "interrupted":
        print(f"interrupted: {finished} of {len(parts)} parts were finished", file=sys.stderr)
        return INTERRUPTED
    return 0


def page(book: Book, shown: Callable[[Sequence[Row]], str]) -> str:
    """The table of rows, a line about the machine, and the device of each rank."""
    lines = [shown(list(book.rows.values())), ""]
    if book.provenance is not None:
        lines.append(machine(book.provenance))
    return "\n".join([*lines, *(f"seats: {seated(seat)}" for seat in book.seats)])


def perform(session: Session, part: str, work: Part) -> None:
    """Run one part and record its time, even if it breaks."""
    progress(part)
    began = time.monotonic()
    session.book.shared = False
    try:
        for row in work(session):
            session.book.keep(part, row)
    except KitError as error:
        session.drop_shared()
        session.book.keep(part, unmeasured(part, error))
    session.book.write(part=part, seconds=round(time.monotonic() - began, 3))


def chosen(name: str, parts: Mapping[str, Part], only: Sequence[str]) -> dict[str, Part]:
    """The parts by name; `steps` stands for every `steps.X`."""
    found = {word: [part for part in parts if part == word or part.startswith(f"{word}.")] for word in only}
    if unknown := [word for word in only if not found[word]]:
        raise BadInput(f"bench {name} has no part {unknown[0]!r}; its parts are: {', '.join(parts)}")
    wanted = {part for some in found.values() for part in some}
    return {part: work for part, work in parts.items() if not only or part in wanted}


def device_for(asked: str) -> str:
    """`auto` is the GPU if there is a driver, even if torch cannot use it; the error then names the reason."""
    return asked if asked != "auto" else "cuda" if has_gpu_driver() else "cpu"
