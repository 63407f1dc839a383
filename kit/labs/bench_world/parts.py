"""The parts of the bench of Worlds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kit import machine
from kit.errors import KitError, RankDied, RankTimeout
from kit.labs.bench import Bench, Part, Samples, ratios, run_part, show_progress, unmeasured, without_details
from kit.labs.bench_world.hosts import SecondHost
from kit.labs.lab import Drive
from kit.labs.stream import tables as stream_tables
from kit.measure.turns import seconds_of
from kit.world import World, asked, leftovers, warm
from kit.world.calls import Pending, wait
from kit.world.launch import RAY, RAY_START_S, TORCHRUN
from kit.world.leftovers import carriers, end_carriers
from kit.world.world import Printer

FUNCTIONS = "kit.labs.bench_world.ranks.functions"
REDUCED = 3.0  # 1 from rank 0 and 2 from rank 1
STARTED = "two ranks to the first all-reduce done, cold"
STEPPED = "one empty step on both ranks"
TOLD = "SIGKILL of a rank to the exception"
VANISHED = "SIGKILL of the notebook's process to nothing left"
PHASE_S = 0.1
SETTLE_S = 0.1  # delay before the kill, so rank 0 is inside the collective
GONE_S = 10.0
CUT_DEADLINE_S = 3.0
FAR_GONE_S = 30.0
WIDE = 8  # ranks for the row on calls in flight
FLYING = 100
EMPTY = f"{FUNCTIONS}:rank_number"
HOLDER = (
    "import json, sys\nfrom kit.world import World\nworld = World(2, device='cpu', **json.loads(sys.argv[1]))\n"
    f"world.call('{FUNCTIONS}:first_all_reduce')\nprint('ready', flush=True)\nsys.stdin.read()"
)
ROOT = Path(__file__).resolve().parents[3]


class OutputListener(Printer):
    """A World's observer that only records that there was output."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def output(self, rank: int, text: str) -> None:  # noqa: ARG002 - the protocol's names
        self.heard.set()


def world_of_two(bench: Bench, **options: object) -> World:
    return bench.world(2, device="cpu", observer=OutputListener(), **options)


def repeated(title: str, number: int, once: Callable[[], float]) -> list[float]:
    show_progress(f"{title}, {number} times")
    return [once() for _ in range(number)]


def all_reduce(world: World) -> None:
    values = world.call(f"{FUNCTIONS}:first_all_reduce")
    if values != [REDUCED] * 2:
        raise KitError(f"the first all-reduce gave {values} on the ranks, expected {REDUCED}")


def start_once(logs: Path, preload: Sequence[str] = ()) -> float:
    began = time.perf_counter()
    with World(2, device="cpu", logs=logs, observer=OutputListener(), preload=preload) as world:
        all_reduce(world)
        took = time.perf_counter() - began
        missing = [name for name in preload if not all(world.eval(f"{name!r} in __import__('sys').modules"))]
    if missing:
        raise KitError(f"{', '.join(missing)} should be loaded on every rank but is not")
    return took


def start_twice(logs: Path, preload: Sequence[str] = ()) -> tuple[float, float]:
    """The first start of a process, and the next one, which finds the waiting agent."""
    warm.end_waiting()
    return start_once(logs, preload), start_once(logs, preload)


def start_worlds(bench: Bench) -> Iterator[Samples]:
    for number in range(bench.config.starts):
        show_progress(f"{STARTED}, {number + 1} of {bench.config.starts}")
        first, second = start_twice(bench.logs)
        yield Samples(what=STARTED, values=[first], metric="started")
        yield second_start(STARTED, first, second)


def second_start(title: str, first: float, second: float) -> Samples:
    note = f"the second start takes {second:.2f} s"
    return ratios(
        "second_over_first", f"the next start in the same process, over: {title}", [second], [first], note=note
    )


def start_with_megatron(bench: Bench) -> Iterator[Samples]:
    """The time of a start, and its ratio to an import of megatron.core by the same interpreter, in turns."""
    title = f"{STARTED}, with megatron.core"
    against = "the same, over python -c 'import megatron.core'"
    python = asked.find_python()
    if not python.megatron:
        why = "the ranks' interpreter has no megatron.core"
        yield unmeasured(title, why, metric="started_with_megatron")
        yield unmeasured(against, why, metric="start_over_import", unit="x")
        return

    import_once = partial(seconds_of, partial(run_once, [python.path, "-c", "import megatron.core"]))
    import_once()  # loads the files into the page cache
    for number in range(bench.config.megatron):
        show_progress(f"{title}, {number + 1} of {bench.config.megatron}")
        started, second = start_twice(bench.logs, ["megatron.core"])
        imported = import_once()
        note = f"the import takes {imported:.2f} s"
        yield Samples(what=title, values=[started], metric="started_with_megatron")
        yield ratios("start_over_import", against, [started], [imported], note=note)
        yield second_start(title, started, second)


def step_costs(bench: Bench) -> Iterator[Samples]:
    steps, phases = bench.config.steps, bench.config.phases
    with world_of_two(bench) as world:

        def once(code: str) -> float:
            return 1e3 * seconds_of(lambda: world.run(code))

        all_reduce(world)
        world.run("from kit.measure import PhaseMeter")
        empty = repeated(STEPPED, steps, lambda: once("pass"))
        yield Samples(what=STEPPED, values=empty, metric="stepped", unit="ms")
        metered = f"{STEPPED}, measured as a phase"
        inside = repeated(metered, steps, lambda: once("with PhaseMeter():\n    pass"))
        yield Samples(what=metered, values=inside, unit="ms")
        costs = world.call(f"{FUNCTIONS}:meter_cost", n=phases, seconds=PHASE_S)
    shares = [100 * cost / PHASE_S for per_rank in costs for cost in per_rank]
    yield Samples(what="the meter's own cost in a phase of 100 ms", values=shares, metric="meter_share", unit="%")


def in_flight(bench: Bench) -> Iterator[Samples]:
    """Calls to single ranks of 8: with every rank kept busy, over one call after another."""
    title = f"{FLYING} calls over {WIDE} ranks, in flight at once, over one after another"

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
            flying = [pending for pending in flying if pending not in done]
            free += [rank for pending in done for rank in pending.result()]

    with bench.world(WIDE, device="cpu", observer=OutputListener()) as world:
        for rank in range(WIDE):
            world.call(EMPTY, ranks=[rank])
        for _ in range(bench.config.flights):
            above, below = seconds_of(partial(at_once, world)), seconds_of(partial(in_turn, world))
            yield ratios("at_once_over_in_turn", title, [above], [below])


def death_once(world: World, words: list[str]) -> float:
    """SIGKILL rank 1 while rank 0 waits in a collective; seconds until the exception that names it, and its first line."""
    listener = OutputListener()
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
        world.call(f"{FUNCTIONS}:wait_for_rank_1", phase="collective", timeout_s=60)
    except RankDied as error:
        took = time.perf_counter() - killed[0]
        if (error.rank, error.signal, error.phase) != (1, "SIGKILL", "collective"):
            raise
        words[:] = [f"{type(error).__name__}: {without_details(error)}"]
    finally:
        killer.join()
    world.restart()
    return took


def death(bench: Bench) -> Iterator[Samples]:
    words: list[str] = []
    with world_of_two(bench) as world:
        for _ in range(bench.config.deaths):
            seconds = death_once(world, words)
            yield Samples(what=TOLD, values=[seconds], metric="death_told", note="".join(words))


def restart(bench: Bench) -> Iterator[Samples]:
    title = "World.restart(), fresh processes, to their first all-reduce done"
    with world_of_two(bench) as world:
        for _ in range(bench.config.restarts):
            before = world.pids
            seconds = seconds_of(world.restart) + seconds_of(lambda: all_reduce(world))
            if set(before) & set(world.pids):
                raise KitError(f"restart() changed the pids from {before} to {world.pids}; all must be new")
            yield Samples(what=title, values=[seconds], metric="restarted")


def notebook_start(bench: Bench) -> Iterator[Samples]:
    values = repeated(VANISHED, bench.config.kernels, lambda: kernel_death_once(bench.logs))
    yield Samples(what=VANISHED, values=values, metric="vanished")


def ask_for_help(bench: Bench) -> Iterator[Samples]:
    once = partial(run_once, [sys.executable, "-m", "kit", "--help"], environment())
    values = repeated("kit --help", bench.config.helps, lambda: seconds_of(once))
    yield Samples(what="kit --help", values=values, metric="helped")


def kernel_death_once(
    logs: Path, before: Callable[[], None] = lambda: None, gone_s: float = GONE_S, **where: Any
) -> float:
    """SIGKILL a process that has a World; seconds until all processes and folders of that World are gone. `where`: options of the World;
    `before`: called when it is there."""
    command = [sys.executable, "-c", HOLDER, json.dumps({"logs": str(logs), **where})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as holder:
        assert holder.stdout is not None
        printed = holder.stdout.readline()
        owner = str(holder.pid)

        def fits(mark: str) -> bool:
            return mark.split(":")[1] == owner

        known, least = carriers(fits), 1 + 2 // where.get("nodes", 1)  # an agent and its ranks
        before()
        began = time.perf_counter()
        holder.kill()
        if printed != b"ready\n" or len(known) < least:
            raise KitError(f"a World in another process did not start; its processes: {known}")
        took = seconds_until_gone(fits, known, began, gone_s)
        if took is None:
            end_carriers(fits)
            raise KitError(f"{gone_s:.0f} s after the SIGKILL of its notebook, a World still had processes")
        while any(folder.name.split(":")[1:2] == [owner] for folder in leftovers.base().iterdir()):
            took = time.perf_counter() - began
            if took > gone_s:
                raise KitError(f"{gone_s:.0f} s after the SIGKILL of its notebook, a World still had its folder")
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


def two_hosts(bench: Bench) -> Iterator[Samples]:
    """Two network namespaces as two hosts, beside one host; then their cable is cut in a step."""
    started, stepped = f"{STARTED}: on two hosts, over on one", f"{STEPPED}: on two hosts, over on one"
    named = "a cable cut in a step, from the deadline to the exception that names the far ranks"
    left = "the same, from the cut to nothing left on the far host"
    gone = "SIGKILL of the notebook's process behind a cut cable to nothing left on either host"
    try:
        other = SecondHost()
    except KitError as error:
        yield unmeasured(started, error, metric="started_on_two", unit="x")
        yield unmeasured(stepped, error, metric="stepped_on_two", unit="x")
        for ranks in (2, WIDE):
            yield unmeasured(f"{named}, {ranks} ranks", error, metric="cut_named")
            yield unmeasured(f"{left}, {ranks} ranks", error, metric="far_side_left")
        yield unmeasured(gone, error, metric="both_sides_left")
        return
    try:
        for number in range(bench.config.hosts):
            show_progress(f"{started}, {number + 1} of {bench.config.hosts}")
            starts, steps = zip(
                *(step_from_cold(bench, where) for where in (options_on(other, bench), {})), strict=True
            )
            yield ratios("started_on_two", started, starts[:1], starts[1:])
            yield ratios("stepped_on_two", stepped, steps[:1], steps[1:])
        for ranks in (2, WIDE):
            show_progress(f"{named}, {ranks} ranks")
            seconds, seconds_left = cut_once(bench, other, ranks)
            yield Samples(what=f"{named}, {ranks} ranks", values=[seconds], metric="cut_named")
            yield Samples(what=f"{left}, {ranks} ranks", values=[seconds_left], metric="far_side_left")
        show_progress(gone)
        yield Samples(what=gone, values=[notebook_death_once(bench, other)], metric="both_sides_left")
    finally:
        other.remove()


def options_on(other: SecondHost, bench: Bench) -> dict[str, Any]:
    return {
        "nodes": 2,
        "endpoint": other.free_endpoint(),
        "launch": other.launch,
        "env": {"GLOO_SOCKET_IFNAME": other.near},
        "start_timeout_s": bench.config.timeout_s,
    }


def step_from_cold(bench: Bench, where: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a start to the first all-reduce, and the median of a step."""
    warm.end_waiting()
    began = time.perf_counter()
    with World(2, device="cpu", logs=bench.logs, observer=OutputListener(), **where) as world:
        all_reduce(world)
        took = time.perf_counter() - began
        return took, statistics.median(seconds_of(lambda: world.run("pass")) for _ in range(bench.config.steps))


def cut_once(bench: Bench, other: SecondHost, ranks: int) -> tuple[float, float]:
    """Cut the cable while the far ranks hang and the near ones wait for them."""
    far = tuple(range(ranks // 2, ranks))
    hang = f"import time\nif rank >= {ranks // 2}: time.sleep(600)\ndist.barrier()"
    with World(ranks, device="cpu", logs=bench.logs, observer=OutputListener(), **options_on(other, bench)) as world:
        pending = world.submit_code(hang, timeout_s=CUT_DEADLINE_S)
        due = time.perf_counter() + CUT_DEADLINE_S
        other.cut()
        cut = time.perf_counter()
        try:
            pending.result()
        except RankTimeout as error:
            named = time.perf_counter() - due
            if error.culprits != far:
                raise
        else:
            raise KitError("ranks behind a cut cable answered")
    try:
        return named, seconds_until_empty(other, cut)
    finally:
        other.mend()


def seconds_until_empty(other: SecondHost, since: float) -> float:
    while other.pids():
        if (gone := time.perf_counter() - since) > 2 * FAR_GONE_S:
            raise KitError(f"{gone:.0f} s after the cable was cut, the far host still had processes")
        time.sleep(0.1)
    return time.perf_counter() - since


def notebook_death_once(bench: Bench, other: SecondHost) -> float:
    """SIGKILL a process that has a World on both hosts, just after the cable was cut; seconds until both have nothing of it."""
    began = time.perf_counter()

    def cut() -> None:
        nonlocal began
        other.cut()
        began = time.perf_counter()

    try:
        near = kernel_death_once(bench.logs, cut, 2 * FAR_GONE_S, **options_on(other, bench))
        return max(near, seconds_until_empty(other, began))
    finally:
        other.mend()


# Two actors of Ray that join a group, without the kit: the seconds from the import of Ray to their first all-reduce.
OWN_ACTORS = """
import sys, time
began = time.perf_counter()
import ray
small = {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000, "log_to_driver": False}
ray.init("local", logging_level="ERROR", _temp_dir=sys.argv[1], **small)

class Actor:
    def first_all_reduce(self, rank, store):
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        value = torch.ones(1) * (rank + 1)
        dist.all_reduce(value)
        return value.item()

actors = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(2)]
print(ray.get([actor.first_all_reduce.remote(rank, sys.argv[1] + "/store") for rank, actor in enumerate(actors)]))
print(time.perf_counter() - began)
ray.shutdown()
"""


def ray_by_itself(python: str) -> float:
    """The folder's path is short, because Ray makes Unix sockets in it."""
    with tempfile.TemporaryDirectory(prefix="kit-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        env = {**environment(), "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
        printed, why = asked.run_python(python, OWN_ACTORS, folder, timeout_s=RAY_START_S, env=env)
    if why or printed.splitlines()[:1] != [str([REDUCED] * 2)]:
        raise KitError(f"Ray's own start failed: {why or printed}")
    return float(printed.splitlines()[-1])


def on_ray(bench: Bench) -> Iterator[Samples]:
    """Ranks as actors of Ray beside actors that Ray starts by itself, and a loop with its controller in one beside the embedded loop."""
    started = f"{STARTED}: as actors of Ray, minus Ray's own start of two actors that do the same"
    looped = "a step of the loop with its controller in an actor of Ray, over the embedded loop's"
    python = asked.find_python().path
    if not asked.has_ray(python):
        yield unmeasured(started, "Ray is not installed", metric="start_over_ray", unit="s")
        yield unmeasured(looped, "Ray is not installed", metric="loop_on_ray", unit="x")
        return
    for number in range(bench.config.rays):
        show_progress(f"{started}, {number + 1} of {bench.config.rays}")
        by_itself = ray_by_itself(python)
        ours, _ = step_from_cold(bench, {"engine": RAY})
        note = f"Ray's own start takes {by_itself:.2f} s"
        yield Samples(what=started, values=[ours - by_itself], metric="start_over_ray", note=note)
    for number in range(bench.config.rays):
        show_progress(f"{looped}, {number + 1} of {bench.config.rays}")
        seconds = [step_of_loop(bench, engine, number) for engine in (RAY, TORCHRUN)]
        yield ratios("loop_on_ray", looped, seconds[:1], seconds[1:])


def step_of_loop(bench: Bench, engine: str, number: int) -> float:
    run = bench.lab("stream", f"{engine}-{number}", engine=engine, device="cpu", phases="stream")
    return float(stream_tables.steps(run.frame())["total"].median())


PARTS: dict[str, Part] = {
    "start": start_worlds,
    "megatron": start_with_megatron,
    "step": step_costs,
    "death": death,
    "restart": restart,
    "calls": in_flight,
    "hosts": two_hosts,
    "ray": on_ray,
    "notebook": notebook_start,
    "help": ask_for_help,
}


def measure_world(drive: Drive) -> None:
    run_part(drive, PARTS[drive.phase])
