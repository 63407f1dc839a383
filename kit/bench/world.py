"""`kit bench world`: how fast a World starts, steps, restarts and reports a death. `make peers` compares it with other tools.

Every start uses fresh processes and warm files: after the first sample the libraries are in the page cache. Two ranks on the CPU
over gloo, even if there is a GPU. A sample counts only if the result was correct: the sum, the named rank, the fresh pids.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kit import machine
from kit.bench.onranks import REDUCED
from kit.bench.session import Bench, Part, Row, first_line, over, progress, row, samples, seconds_of, unmeasured
from kit.errors import KitError, RankDied
from kit.world import World, asked, leftovers
from kit.world.calls import Pending, wait
from kit.world.leftovers import carriers, end_carriers
from kit.world.world import Printer

STARTED = "two ranks to the first all-reduce done, cold"
STEPPED = "one empty step on both ranks"
TOLD = "SIGKILL of a rank to the exception"
VANISHED = "SIGKILL of the notebook's process to nothing left"
PHASE_S = 0.1
SETTLE_S = 0.1  # delay before the kill, so rank 0 is inside the collective
GONE_S = 10.0
WIDE = 8  # ranks for the row on calls in flight
FLYING = 100
EMPTY = "kit.bench.onranks:number"
HOLDER = (
    "import sys\nfrom kit.world import World\nworld = World(2, device='cpu', logs=sys.argv[1])\n"
    "world.call('kit.bench.onranks:first_all_reduce')\nprint('ready', flush=True)\nsys.stdin.read()"
)
ROOT = Path(__file__).resolve().parents[2]


def parts(
    _: str,
    *,
    starts: int = 7,
    megatron: int = 5,
    steps: int = 200,
    deaths: int = 7,
    kernels: int = 5,
    helps: int = 7,
    restarts: int = 7,
    phases: int = 20,
    flights: int = 5,
) -> dict[str, Part]:
    """All parts run on the CPU. Parts with the same ranks share one World. Sizes are numbers of samples."""

    def of_two(part: Callable[..., list[Row]], *counts: int) -> Part:
        return lambda session: part(session.shared(2, device="cpu", observer=LISTENER), *counts)

    def alone(what: str, n: int, once: Callable[[Path], float], **about: float) -> Part:
        return lambda session: [row(what, samples(what, n, lambda: once(session.logs)), **about)]

    ask_for_help = partial(run_once, [sys.executable, "-m", "kit", "--help"], environment())
    return {
        "start": alone(STARTED, starts, start_once, limit=2.5, aim=1.0),
        "megatron": lambda session: start_with_megatron(session.logs, megatron),
        "step": of_two(step, steps, phases),
        "death": of_two(death, deaths),
        "restart": of_two(restart, restarts),
        "calls": lambda session: in_flight(session.logs, flights),
        "notebook": alone(VANISHED, kernels, kernel_death_once, limit=2.0),
        "help": alone("kit --help", helps, lambda _: seconds_of(ask_for_help), limit=0.3),
    }


class Listener(Printer):
    """A World's observer that only records that there was output."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def output(self, rank: int, text: str) -> None:  # noqa: ARG002 - the protocol's names
        self.heard.set()


LISTENER = Listener()


@contextlib.contextmanager
def world_of_two(logs: Path, **options: Any) -> Iterator[World]:
    with World(2, device="cpu", logs=logs, observer=Listener(), **options) as world:
        yield world


def all_reduce(world: World) -> None:
    values = world.call("kit.bench.onranks:first_all_reduce")
    if values != [REDUCED] * 2:
        raise KitError(f"the first all-reduce gave {values} on the ranks, expected {REDUCED}")


def start_once(logs: Path, preload: Sequence[str] = ()) -> float:
    began = time.perf_counter()
    with world_of_two(logs, preload=preload) as world:
        all_reduce(world)
        took = time.perf_counter() - began
        missing = [name for name in preload if not all(world.eval(f"{name!r} in __import__('sys').modules"))]
    if missing:
        raise KitError(f"{', '.join(missing)} should be loaded on every rank but is not")
    return took


def start_with_megatron(logs: Path, n: int) -> list[Row]:
    """The time of a start, and its ratio to an import of megatron.core by the same interpreter, in turns."""
    what = f"{STARTED}, with megatron.core"
    against = "the same, over python -c 'import megatron.core'"
    found = asked.find_python()
    if not found.megatron:
        why = "the ranks' interpreter has no megatron.core"
        return [unmeasured(what, why, limit=4.5, aim=3.0), unmeasured(against, why, unit="x", limit=1.3)]

    import_once = partial(seconds_of, partial(run_once, [found.path, "-c", "import megatron.core"]))
    import_once()  # loads the files into the page cache
    progress(f"{what}, {n} times")
    pairs = [(start_once(logs, ["megatron.core"]), import_once()) for _ in range(n)]
    starts, imports = zip(*pairs, strict=True)
    note = f"the import takes {statistics.median(imports):.2f} s, median"
    return [row(what, starts, limit=4.5, aim=3.0), over(against, starts, imports, limit=1.3, note=note)]


def step(world: World, steps: int, phases: int) -> list[Row]:
    def once(code: str) -> float:
        return 1e3 * seconds_of(lambda: world.run(code))

    all_reduce(world)
    world.run("from kit.measure import PhaseMeter")
    metered = f"{STEPPED}, measured as a phase"
    own = "the meter's own cost in a phase of 100 ms"
    empty = samples(STEPPED, steps, lambda: once("pass"))
    inside = samples(metered, steps, lambda: once("with PhaseMeter():\n    pass"))
    progress(own)
    costs = world.call("kit.bench.onranks:meter_cost", n=phases, seconds=PHASE_S)
    shares = [100 * cost / PHASE_S for per_rank in costs for cost in per_rank]
    return [
        row(STEPPED, empty, unit="ms", limit=0.25, aim=0.15),
        row(metered, inside, unit="ms"),
        row(own, shares, unit="%", limit=1.0),
    ]


def in_flight(logs: Path, n: int) -> list[Row]:
    """Calls to single ranks of 8: with every rank kept busy, over one call after another."""
    what = f"{FLYING} calls over {WIDE} ranks, in flight at once, over one after another"

    def in_turn(world: World) -> None:
        for number in range(FLYING):
            world.call(EMPTY, ranks=[number % WIDE])

    def at_once(world: World) -> None:
        free, flying, sent = list(range(WIDE)), list[Pending](), 0
        while sent < FLYING or flying:
            while free and sent < FLYING:
                flying.append(world.submit(EMPTY, ranks=[free.pop()]))
                sent += 1
            done = wait(flying)
            flying = [one for one in flying if one not in done]
            free += [rank for one in done for rank in one.result()]

    with World(WIDE, device="cpu", logs=logs, observer=Listener()) as world:
        for rank in range(WIDE):
            world.call(EMPTY, ranks=[rank])
        taken = samples(what, n, lambda: seconds_of(partial(at_once, world)) / seconds_of(partial(in_turn, world)))
    return [row(what, taken, unit="x", limit=2.0)]


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
        took = time.perf_counter() - killed[0]
        if (error.rank, error.signal, error.phase) != (1, "SIGKILL", "collective"):
            raise
        words[:] = [f"{type(error).__name__}: {first_line(error)}"]
    finally:
        killer.join()
    world.restart()
    return took


def death(world: World, n: int) -> list[Row]:
    words: list[str] = []
    taken = samples(TOLD, n, lambda: death_once(world, words))
    return [row(TOLD, taken, limit=0.5, aim=0.05, note="".join(words))]


def restart(world: World, n: int) -> list[Row]:
    what = "World.restart(), fresh processes, to their first all-reduce done"

    def once() -> float:
        before = world.pids
        took = seconds_of(world.restart) + seconds_of(lambda: all_reduce(world))
        if set(before) & set(world.pids):
            raise KitError(f"restart() changed the pids from {before} to {world.pids}; all must be new")
        return took

    return [row(what, samples(what, n, once), limit=1.0, aim=0.1)]


def kernel_death_once(logs: Path) -> float:
    """SIGKILL a process that has a World; seconds until all processes and folders of that World are gone."""
    command = [sys.executable, "-c", HOLDER, str(logs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as holder:
        assert holder.stdout is not None
        printed = holder.stdout.readline()
        owner = str(holder.pid)

        def fits(mark: str) -> bool:
            return mark.split(":")[1] == owner

        known = carriers(fits)
        began = time.perf_counter()
        holder.kill()
        if printed != b"ready\n" or len(known) < 3:
            raise KitError(f"a World in another process did not start; its processes: {known}")
        took = seconds_until_gone(fits, known, began, GONE_S)
        if took is None:
            end_carriers(fits)
            raise KitError(f"{GONE_S:.0f} s after the SIGKILL of its notebook, a World still had processes")
        while any(folder.name.split(":")[1:2] == [owner] for folder in leftovers.base().iterdir()):
            took = time.perf_counter() - began
            if took > GONE_S:
                raise KitError(f"{GONE_S:.0f} s after the SIGKILL of its notebook, a World still had its folder")
    return took


def run_once(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    subprocess.run(command, env=env, check=True, capture_output=True)


def environment() -> dict[str, str]:
    """This environment, with the kit importable from the same place."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def seconds_until_gone(fits: Callable[[str], bool], known: list[int], since: float, at_most: float) -> float | None:
    """Seconds from `since` until no process has the mark; None if that took longer than `at_most`. /proc is searched only when none of
    the `known` processes is left."""
    while (now := time.perf_counter()) - since < at_most:
        if all(machine.marked(pid) is None for pid in known) and not carriers(fits):
            return now - since
        time.sleep(0.001)
    return None


QUICK = {"starts": 3, "megatron": 2, "steps": 50, "deaths": 3, "kernels": 2, "helps": 3, "restarts": 3, "phases": 5}
WORLD = Bench(parts, {**QUICK, "flights": 2})
