"""`kit bench world`: how fast a World starts, steps, restarts and reports a death; other tools in the same run, where installed.

Every start uses fresh processes and warm files: after the first sample the libraries are in the page cache. Two ranks on the CPU
over gloo, even if there is a GPU. A sample counts only if the result was correct: the sum, the named rank, the fresh pids.

Other tools that keep ranks alive between steps ("peers") are measured in the same way. Every trial is a fresh process (`python -m
kit.bench.world NAME ARGUMENTS`), so it can neither crash the bench nor be slowed by leftovers. Every process that a trial starts inherits
a mark, by which it is found and ended after the death of the trial. Imports are not timed, neither the kit's nor a peer's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

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
SETTLE_S, PEER_SETTLE_S = 0.1, 0.5  # delay before the kill, so rank 0 is inside the collective
GONE_S, PEER_GONE_S = 10.0, 5.0
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
    peer_trials: int = 3,
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
        "peers": lambda _: peers(PEERS, trials=peer_trials, steps=steps),
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


# -- peers, from outside -------------------------------------------------------------------------------------------------

PREFIX = "kit-bench-peer "
TRIAL_S = 120.0
WORDS = 300
Seen = dict[str, list[float]]  # samples by row: seconds, for a step milliseconds


def peers(wanted: Mapping[str, Any], *, trials: int, steps: int) -> Iterator[Row]:
    """Rows of every peer; a row with the reason if a peer is not installed."""
    for name, peer in wanted.items():
        try:
            who = f"{name} {importlib.metadata.version(peer.needs)}"
        except importlib.metadata.PackageNotFoundError:
            yield unmeasured(STARTED, f"{peer.needs} is not installed", who=name)
            continue
        progress(f"{who}, {trials} times each")
        seen: Seen = {what: [] for what in (STARTED, STEPPED, TOLD, VANISHED)}
        notes: dict[str, str] = {}
        try:
            for number in range(trials):
                # One complete trial: start, steps, SIGKILL of rank 1 while rank 0 waits for it.
                with trial(name, seen, steps=0 if number else steps, hold=False) as (process, _):
                    report = hear(process)
                    seen[TOLD].append(report["told"])
                    notes[TOLD] = report["words"]
                outlive(name, seen, notes)
        except KitError as error:
            notes[STARTED] = str(error)
        if seen[STEPPED]:
            notes[STEPPED] = peer.is_a_step
        for what, taken in seen.items():
            if taken or notes.get(what):
                yield row(what, taken, who=who, unit="ms" if what == STEPPED else "s", note=notes.get(what, ""))


def outlive(name: str, seen: Seen, notes: dict[str, str]) -> None:
    """One killed trial: seconds until every process that it started is gone."""
    with trial(name, seen, steps=0, hold=True) as (process, mark):
        known = carriers(mark.__eq__)
        began = time.perf_counter()
        process.kill()
        took = seconds_until_gone(mark.__eq__, known, began, PEER_GONE_S)
        if took is None:
            left = len(carriers(mark.__eq__))
            notes[VANISHED] = f"{left} of {len(known) - 1} processes are still alive after {PEER_GONE_S:.0f} s"
        else:
            seen[VANISHED].append(took)


@contextlib.contextmanager
def trial(name: str, seen: Seen, *, steps: int, hold: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs one trial, after its start and steps, and the mark by which all its processes are found and ended."""
    mark = leftovers.mark(f"peer-{name}")
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch, (Path(scratch) / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kit.bench.world", name, json.dumps({"steps": steps, "hold": hold})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=scratch,
            env=of_trial(mark, scratch),
        )
        limit = threading.Timer(TRIAL_S, end_carriers, [mark.__eq__])
        limit.start()  # ends the trial, so the reader sees the end of its output
        try:
            report = hear(process)
            seen[STARTED].append(report["start"])
            seen[STEPPED] += [1e3 * one for one in report["steps"]]
            yield process, mark
        except EOFError:
            raise KitError(f"a trial broke: {last_line(errors)}") from None
        finally:
            limit.cancel()
            end_carriers(mark.__eq__)
            process.communicate()


def hear(process: subprocess.Popen[str]) -> Any:
    """The next report of the trial; output of its library is skipped."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    raise EOFError


def last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    return lines[-1][:200] if lines else f"it printed nothing within {TRIAL_S:.0f} s"


def environment() -> dict[str, str]:
    """This environment, with the kit importable from the same place."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def of_trial(mark: str, scratch: str) -> dict[str, str]:
    """CPU only, as for the kit; the kit and this Python are found first; temporary files are removed with the trial."""
    return {
        **environment(),
        machine.MARK: mark,
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(Path(scratch) / "ipython"),
        "TMPDIR": scratch,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONUNBUFFERED": "1",
    }


def seconds_until_gone(fits: Callable[[str], bool], known: list[int], since: float, at_most: float) -> float | None:
    """Seconds from `since` until no process has the mark; None if that took longer than `at_most`. /proc is searched only when none of
    the `known` processes is left."""
    while (now := time.perf_counter()) - since < at_most:
        if all(machine.marked(pid) is None for pid in known) and not carriers(fits):
            return now - since
        time.sleep(0.001)
    return None


# -- a trial, in a process of its own. It tells a line when the first all-reduce and the steps are done; then it is killed (hold), or
# kills rank 1 and tells a second line --------------------------------------------------------------------------------------


def run_trial(peer: Any, *, steps: int, hold: bool) -> None:
    began = time.perf_counter()
    values = peer.start()
    started = time.perf_counter() - began
    if values != [REDUCED] * 2:
        raise RuntimeError(f"the all-reduce gave {values}")
    taken = [seconds_of(peer.step) for _ in range(steps)] if peer.is_a_step else []
    victim = peer.pids()[1]
    tell({"start": started, "steps": taken})
    if hold:
        sys.stdin.read()
    peer.hang()
    time.sleep(PEER_SETTLE_S)
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    try:
        peer.answer()
    except BaseException as error:  # noqa: BLE001 - any exception is the answer
        tell(
            {
                "told": time.perf_counter() - began,
                "words": f"{type(error).__name__}: {' '.join(str(error).split())}"[:WORDS],
            }
        )
    os._exit(0)  # skip the library's exit code; the bench ends leftovers


def tell(what: dict[str, Any]) -> None:
    print(f"\n{PREFIX}{json.dumps(what)}", flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def reduce(rank: int, port: int) -> float:
    """Runs on a rank, to which a library sends it without this module."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.ones(1) * (rank + 1)
    dist.all_reduce(value)
    return float(value)


def wait_for_rank_1() -> None:
    """Runs on a rank, as above."""
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


# A peer is two ranks held by a library, which is loaded when the peer is made.
#   needs     the library's distribution
#   is_a_step what counts as a step; empty if the library does not keep ranks between steps
#   start()   starts the ranks; returns the result of an all-reduce of 1 and 2
#   step()    an empty step on both ranks
#   pids()    of both ranks
#   hang()    returns at once; rank 1 sleeps, rank 0 waits for it in a collective
#   answer()  waits for the answer to `hang`, as a user's cell would; raises what the library raises


class IPyParallel:
    """A controller and two engines; a step is `execute` on both, as a `%%px` cell is."""

    needs, is_a_step = "ipyparallel", "DirectView.execute('pass')"

    def __init__(self) -> None:
        self.library: Any = import_module("ipyparallel")

    def start(self) -> list[float]:
        cluster = self.library.Cluster(n=2, engines="local", log_level=logging.ERROR)
        self.client = cluster.start_and_connect_sync()
        self.both = self.client[:]
        port = free_port()
        sent = [self.client[engine].apply_async(reduce, rank, port) for rank, engine in enumerate(self.client.ids)]
        return [float(one.get(60)) for one in sent]

    def step(self) -> None:
        self.both.execute("pass", silent=True, block=True)

    def pids(self) -> list[int]:
        return list(self.both.apply_sync(os.getpid))

    def hang(self) -> None:
        self.waiting = self.both.apply_async(wait_for_rank_1)

    def answer(self) -> None:
        self.waiting.get(60)


class Monarch:
    """Two processes with an actor each; a step is an endpoint called on both."""

    needs, is_a_step = "torchmonarch", "an empty endpoint called on both actors"

    def __init__(self) -> None:
        library: Any = import_module("monarch.actor")
        # By default an unhandled death ends this process too, before it can report the time.
        library.unhandled_fault_hook = lambda _: None

        class Ranks(library.Actor):  # type: ignore[misc]
            @library.endpoint  # type: ignore[untyped-decorator]
            def reduce(self, port: int) -> float:
                return reduce(library.current_rank().rank, port)

            @library.endpoint  # type: ignore[untyped-decorator]
            def nothing(self) -> None: ...

            @library.endpoint  # type: ignore[untyped-decorator]
            def pid(self) -> int:
                return os.getpid()

            @library.endpoint  # type: ignore[untyped-decorator]
            def wait(self) -> None:
                wait_for_rank_1()

        self.library, self.actors = library, Ranks

    def start(self) -> list[float]:
        self.ranks = self.library.this_host().spawn_procs({"gpus": 2}).spawn("ranks", self.actors)
        return [float(value) for _, value in self.ranks.reduce.call(free_port()).get().items()]

    def step(self) -> None:
        self.ranks.nothing.call().get()

    def pids(self) -> list[int]:
        return [int(value) for _, value in self.ranks.pid.call().get().items()]

    def hang(self) -> None:
        self.waiting = self.ranks.wait.call()

    def answer(self) -> None:
        self.waiting.get(timeout=60)


class NBDistributed:
    """The two managers behind its `%dist_init`; a step is a cell's message to all."""

    needs = "nbdistributed"
    is_a_step = "its manager sends 'pass' to all; its cells poll for the answer and take longer"
    REDUCE = "value = torch.ones(1) * (rank + 1)\ndist.all_reduce(value)\nvalue.item()"
    HANG = "import time\nif rank == 1: time.sleep(600)\ndist.barrier()"
    TRIES, TRY_S = 240, 0.25

    def __init__(self) -> None:
        self.processes: Any = import_module("nbdistributed.process_manager")
        self.communication: Any = import_module("nbdistributed.communication")

    def start(self) -> list[float]:
        self.manager = self.processes.ProcessManager()
        self.link = self.communication.CommunicationManager(2, self.manager.start_workers(2))
        self.connect()
        return [float(answer["output"]) for _, answer in sorted(self.link.send_to_all("execute", self.REDUCE).items())]

    def connect(self) -> None:
        """Messages to a worker that has not connected yet are lost, so repeat until both answer."""
        for _ in range(self.TRIES):
            with contextlib.suppress(TimeoutError):
                self.link.send_to_all("get_status", {}, timeout=self.TRY_S)
                return
        raise TimeoutError("the workers did not connect")

    def step(self) -> None:
        self.link.send_to_all("execute", "pass")

    def pids(self) -> list[int]:
        return [process.pid for process in self.manager.processes]

    def hang(self) -> None:
        self.waiting = ThreadPoolExecutor(1).submit(self.link.send_to_all, "execute", self.HANG)

    def answer(self) -> None:
        self.waiting.result()


class Torchrun:
    """Plain torchrun, as a notebook starts a script with it; its exit reports a death."""

    needs, is_a_step = "torch", ""

    SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
os.write(1, f"{rank} {os.getpid()} {value.item()}\\n".encode())
if rank == 1:
    time.sleep(600)
dist.barrier()
"""

    def start(self) -> list[float]:
        script = Path("script.py")  # in the trial's folder
        script.write_text(self.SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.states = sorted(self.process.stdout.readline().split() for _ in range(2))
        return [float(value) for _, _, value in self.states]

    def pids(self) -> list[int]:
        return [int(pid) for _, pid, _ in self.states]

    def hang(self) -> None:
        """The script does so after its all-reduce."""

    def answer(self) -> None:
        _, errors = self.process.communicate()
        raise subprocess.SubprocessError(f"status {self.process.returncode}: {errors[errors.find('Root Cause') :]}")


PEERS = {"ipyparallel": IPyParallel, "monarch": Monarch, "nbdistributed": NBDistributed, "torchrun": Torchrun}
QUICK = {"starts": 3, "megatron": 2, "steps": 50, "deaths": 3, "kernels": 2, "helps": 3, "restarts": 3, "phases": 5}
WORLD = Bench(parts, {**QUICK, "flights": 2, "peer_trials": 0})

if __name__ == "__main__":
    run_trial(PEERS[sys.argv[1]](), **json.loads(sys.argv[2]))
