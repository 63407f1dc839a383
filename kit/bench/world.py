"""`kit bench world`: how fast a World starts, steps, restarts, and tells of a death; other tools in the same run where installed.

Every start is of fresh processes, on warm files: after the first sample the libraries are in the page cache. Two ranks on the CPU
over gloo, also where there is a GPU. A sample counts only if the thing was right: the sum, the name of the dead, the fresh pids.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.bench import remains
from kit.bench.cost import Cost, crowd
from kit.bench.onranks import REDUCED
from kit.bench.peers import PEERS, STARTED, STEPPED, TOLD, VANISHED, installed, peers
from kit.bench.report import progress
from kit.bench.rows import Row, row
from kit.errors import KitError, RankDied
from kit.world import World, interpreter, leftovers
from kit.world.pending import Pending, wait

if TYPE_CHECKING:
    from kit.bench.session import Part, Session

ROOT = Path(__file__).resolve().parents[2]
MS = 1e3
PHASE_S = 0.1
SETTLE_S = 0.1  # from "waiting" to the kill: by then rank 0 is inside the collective
GONE_S = 10.0
WIDE = 8  # ranks of the row on calls in flight
FLYING = 100
EMPTY = "kit.bench.onranks:number"
HOLDER = (
    "import sys\nfrom kit.world import World\nworld = World(2, device='cpu', logs=sys.argv[1])\n"
    "world.call('kit.bench.onranks:first_all_reduce')\nprint('ready', flush=True)\nsys.stdin.read()"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How many samples of each."""

    starts: int = 7
    megatron: int = 5
    steps: int = 200
    deaths: int = 7
    kernels: int = 5
    helps: int = 7
    restarts: int = 7
    phases: int = 20
    flights: int = 5
    peer_trials: int = 3


QUICK = Sizes(
    starts=3, megatron=2, steps=50, deaths=3, kernels=2, helps=3, restarts=3, phases=5, flights=2, peer_trials=0
)


def parts(session: Session, sizes: Sizes) -> dict[str, Part]:
    """All on the CPU, as its ranks are. Those of one World share it."""

    def two() -> World:
        return session.shared(2, device="cpu", observer=LISTENER)

    return {
        "start": lambda: [start(session.logs, sizes)],
        "megatron": lambda: start_with_megatron(session.logs, sizes),
        "step": lambda: step(two(), sizes),
        "death": lambda: [death(two(), sizes)],
        "restart": lambda: [restart(two(), sizes)],
        "calls": lambda: [in_flight(session.logs, sizes)],
        "notebook": lambda: [kernel_death(session.logs, sizes)],
        "help": lambda: [help_(sizes)],
        "peers": lambda: peers(trials=sizes.peer_trials, steps=sizes.steps),
    }


class Listener:
    """A World's observer that only hears that something was said."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def started(self, phase: str, ranks: Sequence[int]) -> None: ...

    def output(self, rank: int, text: str) -> None:  # noqa: ARG002 - the protocol's names
        self.heard.set()

    def tick(self, answered: Sequence[int]) -> None: ...

    def ended(self) -> None: ...


LISTENER = Listener()


@contextmanager
def world_of_two(logs: Path, **options: Any) -> Iterator[World]:
    with World(2, device="cpu", logs=logs, observer=Listener(), **options) as world:
        yield world


def all_reduce(world: World) -> None:
    values = world.call("kit.bench.onranks:first_all_reduce")
    if values != [REDUCED] * 2:
        raise KitError(f"the first all-reduce came to {values} on the ranks and not to {REDUCED}")


def samples(n: int, once: Callable[[], float], what: str) -> list[float]:
    progress(f"{what}, {n} times")
    return [once() for _ in range(n)]


def start_once(logs: Path, preload: Sequence[str] = ()) -> float:
    began = time.perf_counter()
    with world_of_two(logs, preload=preload) as world:
        all_reduce(world)
        took = time.perf_counter() - began
        missing = [name for name in preload if not all(world.eval(f"{name!r} in __import__('sys').modules"))]
    if missing:
        raise KitError(f"{', '.join(missing)} should be loaded on every rank, and is not")
    return took


def start(logs: Path, sizes: Sizes) -> Row:
    return row(STARTED, samples(sizes.starts, lambda: start_once(logs), STARTED), limit=2.5, aim=1.0)


def start_with_megatron(logs: Path, sizes: Sizes) -> list[Row]:
    """The start itself, and over an import of megatron.core by the same interpreter, taken in turns."""
    what = f"{STARTED}, with megatron.core"
    over = "the same, over python -c 'import megatron.core'"
    found = interpreter.find()
    if not found.megatron:
        note = "not measured: the ranks' interpreter has no megatron.core"
        return [Row(what=what, limit=4.5, aim=3.0, note=note), Row(what=over, unit="x", limit=1.3, note=note)]

    def import_once() -> float:
        began = time.perf_counter()
        subprocess.run([found.path, "-c", "import megatron.core"], check=True, capture_output=True)
        return time.perf_counter() - began

    import_once()  # from here on the files are in the page cache
    progress(f"{what}, {sizes.megatron} times")
    pairs = [(start_once(logs, ["megatron.core"]), import_once()) for _ in range(sizes.megatron)]
    imports = statistics.median(taken for _, taken in pairs)
    return [
        row(what, [taken for taken, _ in pairs], limit=4.5, aim=3.0),
        row(
            over,
            [taken / bare for taken, bare in pairs],
            unit="x",
            limit=1.3,
            note=f"the import takes {imports:.2f} s, median",
        ),
    ]


def step(world: World, sizes: Sizes) -> list[Row]:
    def once(code: str) -> float:
        began = time.perf_counter()
        world.run(code)
        return MS * (time.perf_counter() - began)

    all_reduce(world)
    world.run("from kit.measure import PhaseMeter")
    metered = f"{STEPPED}, measured as a phase"
    own = "the meter's own cost in a phase of 100 ms"
    empty = samples(sizes.steps, lambda: once("pass"), STEPPED)
    inside = samples(sizes.steps, lambda: once("with PhaseMeter():\n    pass"), metered)
    progress(own)
    costs = world.call("kit.bench.onranks:meter_cost", n=sizes.phases, seconds=PHASE_S)
    shares = [100 * cost / PHASE_S for per_rank in costs for cost in per_rank]
    return [
        row(STEPPED, empty, unit="ms", limit=0.25, aim=0.15),
        row(metered, inside, unit="ms"),
        row(own, shares, unit="%", limit=1.0),
    ]


def in_flight(logs: Path, sizes: Sizes) -> Row:
    """Calls to 8 ranks, each to one of them: with every rank busy as soon as it is free, over one call after another."""
    what = f"{FLYING} calls over {WIDE} ranks, in flight at once, over one after another"

    def in_turn(world: World) -> float:
        began = time.perf_counter()
        for number in range(FLYING):
            world.call(EMPTY, ranks=[number % WIDE])
        return time.perf_counter() - began

    def at_once(world: World) -> float:
        began = time.perf_counter()
        free, flying, sent = list(range(WIDE)), list[Pending](), 0
        while sent < FLYING or flying:
            while free and sent < FLYING:
                flying.append(world.submit(EMPTY, ranks=[free.pop()]))
                sent += 1
            done = wait(flying)
            flying = [one for one in flying if one not in done]
            free += [rank for one in done for rank in one.result()]
        return time.perf_counter() - began

    with World(WIDE, device="cpu", logs=logs, observer=Listener()) as world:
        for rank in range(WIDE):
            world.call(EMPTY, ranks=[rank])
        taken = samples(sizes.flights, lambda: at_once(world) / in_turn(world), what)
    return row(what, taken, unit="x", limit=2.0)


def death_once(world: World, words: list[str]) -> float:
    """SIGKILL rank 1 while rank 0 waits in a collective; seconds until the exception that names it, and its first line."""
    listener = Listener()
    world.observer = listener
    killed: list[float] = []
    victim = world.pids[1]

    def kill() -> None:
        if listener.heard.wait(timeout=30):
            time.sleep(SETTLE_S)
            killed.append(time.perf_counter())
            os.kill(victim, 9)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        world.call("kit.bench.onranks:wait_for_rank_1", phase="collective", timeout_s=60)
    except RankDied as error:
        told = time.perf_counter()
        if (error.rank, error.signal, error.phase) != (1, "SIGKILL", "collective"):
            raise
        words[:] = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
    finally:
        killer.join()
    world.restart()
    return told - killed[0]


def death(world: World, sizes: Sizes) -> Row:
    words: list[str] = []
    taken = samples(sizes.deaths, lambda: death_once(world, words), TOLD)
    return row(TOLD, taken, limit=0.5, aim=0.05, note="".join(words))


def restart_once(world: World) -> float:
    before = world.pids
    began = time.perf_counter()
    world.restart()
    all_reduce(world)
    took = time.perf_counter() - began
    if set(before) & set(world.pids):
        raise KitError(f"after restart() the ranks are {world.pids}, and before it they were {before}")
    return took


def restart(world: World, sizes: Sizes) -> Row:
    what = "World.restart(), fresh processes, to their first all-reduce done"
    return row(what, samples(sizes.restarts, lambda: restart_once(world), what), limit=1.0, aim=0.1)


def kernel_death_once(logs: Path) -> float:
    """SIGKILL a process that has a World; seconds until no process and no folder of that World is there."""
    command = [sys.executable, "-c", HOLDER, str(logs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as holder:
        assert holder.stdout is not None
        said = holder.stdout.readline()
        owner = str(holder.pid)

        def fits(mark: str) -> bool:
            return mark.split(":")[1] == owner

        known = remains.marked(fits)
        began = time.perf_counter()
        holder.kill()
        if said != b"ready\n" or len(known) < 3:
            raise KitError(f"a World in another process did not start; it has the processes {known}")
        took = remains.seconds_until_gone(fits, known, began, GONE_S)
        if took is None:
            remains.end(fits)
            raise KitError(f"{GONE_S:.0f} s after the SIGKILL of its notebook a World still had processes")
        while any(folder.name.split(":")[1:2] == [owner] for folder in leftovers.base().iterdir()):
            took = time.perf_counter() - began
            if took > GONE_S:
                raise KitError(f"{GONE_S:.0f} s after the SIGKILL of its notebook a World still had its folder")
    return took


def kernel_death(logs: Path, sizes: Sizes) -> Row:
    return row(VANISHED, samples(sizes.kernels, lambda: kernel_death_once(logs), VANISHED), limit=2.0)


def help_(sizes: Sizes) -> Row:
    def once() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kit", "--help"], env=environment(), check=True, capture_output=True)
        return time.perf_counter() - began

    return row("kit --help", samples(sizes.helps, once, "kit --help"), limit=0.3)


def environment() -> dict[str, str]:
    """Ours, with the kit to be found wherever this process found it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def costs(sizes: Sizes) -> dict[str, Cost]:
    """The World that three parts share is counted with the first. Of the peers torchrun is always there."""
    others = sum(installed(library) is not None for name, library in PEERS.items() if name != "torchrun")
    return {
        "start": Cost(world=sizes.starts),
        "megatron": Cost(megatron=1.5 * sizes.megatron + 0.5),
        "step": Cost(world=1.2, idle=2.5 * sizes.phases * PHASE_S),
        "death": Cost(world=0.2 * sizes.deaths, idle=0.2 * sizes.deaths),
        "restart": Cost(world=0.2 * sizes.restarts),
        "calls": Cost(world=0.6 * crowd(WIDE) + 0.2 * sizes.flights),
        "notebook": Cost(world=1.4 * sizes.kernels),
        "help": Cost(process=0.05 * sizes.helps),
        "peers": Cost(world=4, idle=2) * sizes.peer_trials + Cost(world=10, idle=5) * (sizes.peer_trials * others),
    }
