"""Other tools that keep ranks alive between steps, asked the same questions in the same run, where they are installed.

Each peer runs in processes of its own (`python -m kit.bench.peers NAME ARGUMENTS`), a fresh one for every trial: it can neither crash the
bench nor be slowed by what another left. All that a trial starts inherits a mark, is found by it after the death of its head, and is
ended. Imports are not timed, neither the kit's nor a peer's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from kit import machine
from kit.bench.session import Row, progress, row, seconds_of, unmeasured
from kit.errors import KitError
from kit.world import leftovers
from kit.world.leftovers import carriers, end_carriers

STARTED = "two ranks to the first all-reduce done, cold"
STEPPED = "one empty step on both ranks"
TOLD = "SIGKILL of a rank to the exception"
VANISHED = "SIGKILL of the notebook's process to nothing left"

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "kit-bench-peer "
TRIAL_S = 120.0
GONE_S = 5.0
REDUCED = 3.0
SETTLE_S = 0.5  # from sending the work to the kill: by then rank 0 is inside the collective
WORDS = 300
Seen = dict[str, list[float]]  # samples by question: seconds, of a step milliseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The distribution a peer needs, and what stands for a step there."""

    needs: str
    step: str = ""


PEERS = {
    "ipyparallel": Library(needs="ipyparallel", step="DirectView.execute('pass')"),
    "monarch": Library(needs="torchmonarch", step="an empty endpoint called on both actors"),
    "nbdistributed": Library(
        needs="nbdistributed",
        step="'pass' sent to all by its manager; its cells, which poll for the answer, take longer",
    ),
    "torchrun": Library(needs="torch"),
}


def installed(library: Library) -> str | None:
    """Its version; None where it is not there."""
    try:
        return importlib.metadata.version(library.needs)
    except importlib.metadata.PackageNotFoundError:
        return None


def peers(*, trials: int, steps: int, wanted: dict[str, Library] = PEERS) -> Iterator[Row]:
    """Rows of every peer; of one that is not installed, a row that says so."""
    for name, library in wanted.items():
        version = installed(library)
        if version is None:
            yield unmeasured(STARTED, f"{library.needs} is not installed", who=name)
            continue
        who = f"{name} {version}"
        progress(f"{who}, {trials} times each")
        seen: dict[str, list[float]] = {what: [] for what in (STARTED, STEPPED, TOLD, VANISHED)}
        notes = {STEPPED: library.step}
        try:
            for number in range(trials):
                ask(name, seen, notes, steps=0 if number else steps)
                outlive(name, seen, notes)
        except KitError as error:
            notes[STARTED] = str(error)
        if not seen[STEPPED]:
            del notes[STEPPED]
        for what, taken in seen.items():
            if taken or notes.get(what):
                yield row(what, taken, who=who, unit="ms" if what == STEPPED else "s", note=notes.get(what, ""))


def ask(name: str, seen: Seen, notes: dict[str, str], *, steps: int) -> None:
    """One trial to its end: start, steps, SIGKILL of rank 1 while rank 0 waits for it."""
    with trial(name, seen, steps=steps, hold=False) as (process, _):
        said = hear(process)
        seen[TOLD].append(said["told"])
        notes[TOLD] = said["words"]


def outlive(name: str, seen: Seen, notes: dict[str, str]) -> None:
    """One trial that is killed: seconds until everything that it started is gone."""
    with trial(name, seen, steps=0, hold=True) as (process, mark):
        known = carriers(mark.__eq__)
        began = time.perf_counter()
        process.kill()
        took = seconds_until_gone(mark.__eq__, known, began, GONE_S)
        if took is None:
            left = len(carriers(mark.__eq__))
            notes[VANISHED] = f"{left} of {len(known) - 1} processes are still there after {GONE_S:.0f} s"
        else:
            seen[VANISHED].append(took)


@contextlib.contextmanager
def trial(name: str, seen: Seen, *, steps: int, hold: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs one trial, once it has started and stepped, and the mark by which all that it starts is found and ended."""
    mark = leftovers.mark(f"peer-{name}")
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as scratch, (Path(scratch) / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kit.bench.peers", name, json.dumps({"steps": steps, "hold": hold})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=scratch,
            env=of_trial(mark, scratch),
        )
        limit = threading.Timer(TRIAL_S, end_carriers, [mark.__eq__])
        limit.start()  # it ends what is waited for: the reader sees its end
        try:
            said = hear(process)
            seen[STARTED].append(said["start"])
            seen[STEPPED] += [1e3 * one for one in said["steps"]]
            yield process, mark
        except EOFError:
            raise KitError(f"a trial broke: {last_line(errors)}") from None
        finally:
            limit.cancel()
            end_carriers(mark.__eq__)
            process.communicate()


def hear(process: subprocess.Popen[str]) -> Any:
    """The next report of the trial; what its library prints is skipped."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    raise EOFError


def last_line(errors: IO[str]) -> str:
    errors.seek(0)
    said = [line.strip() for line in errors if line.strip()]
    return said[-1][:200] if said else f"it said nothing within {TRIAL_S:.0f} s"


def environment() -> dict[str, str]:
    """Ours, with the kit to be found wherever this process found it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def of_trial(mark: str, scratch: str) -> dict[str, str]:
    """The CPU only, as for the kit; the kit and this very Python found by whatever looks for them; files go with the trial."""
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
    """Seconds from `since` until no process has the mark; None if that took longer than `at_most`. All of /proc is searched only once
    none of the `known` processes is left."""
    while (now := time.perf_counter()) - since < at_most:
        if all(machine.marked(pid) is None for pid in known) and not carriers(fits):
            return now - since
        time.sleep(0.001)
    return None


# -- a trial, in a process of its own. It tells a line when the first all-reduce and the steps are done; then it is killed (hold), or
# kills rank 1 and tells a second line --------------------------------------------------------------------------------------


def run(peer: Peer, *, steps: int, hold: bool) -> None:
    began = time.perf_counter()
    values = peer.start()
    started = time.perf_counter() - began
    if values != [REDUCED] * 2:
        raise RuntimeError(f"the all-reduce came to {values}")
    taken = [seconds_of(peer.step) for _ in range(steps)] if hasattr(peer, "step") else []
    victim = peer.pids()[1]
    tell({"start": started, "steps": taken})
    if hold:
        sys.stdin.read()
    peer.hang()
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    try:
        peer.answer()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer
        told = time.perf_counter() - began
        tell({"told": told, "words": f"{type(error).__name__}: {' '.join(str(error).split())}"[:WORDS]})
    os._exit(0)  # what the library does at exit is not asked; the bench ends what is left


def tell(what: dict[str, Any]) -> None:
    print(f"\n{PREFIX}{json.dumps(what)}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reduce(rank: int, port: int) -> float:
    """On a rank, to which a library sends it without this module."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.ones(1) * (rank + 1)
    dist.all_reduce(value)
    return float(value)


def wait_for_rank_1() -> None:
    """On a rank, as above."""
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


# A peer is two ranks held by some library, which is loaded when the peer is made.
#   start()   starts the ranks; returns what an all-reduce of 1 and 2 came to on them
#   step()    an empty step on both ranks; a library without it does not keep ranks between steps
#   pids()    of both ranks
#   hang()    returns at once; rank 1 sleeps, rank 0 waits for it in a collective
#   answer()  waits for the answer to `hang`, as a person's cell would; raises what the library raises


class IPyParallel:
    """A controller and two engines; a step is `execute` on both, as a `%%px` cell is."""

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
    """The two managers behind its `%dist_init`; a step is what a cell sends to all."""

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
        """What is sent to a worker that has not connected yet is lost: ask until both answer."""
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
    """torchrun alone, as a notebook starts a script with it: it has no steps, and its exit reports a death."""

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
        script = Path("script.py")  # in the trial's own folder
        script.write_text(self.SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = sorted(self.process.stdout.readline().split() for _ in range(2))
        return [float(value) for _, _, value in self.said]

    def pids(self) -> list[int]:
        return [int(pid) for _, pid, _ in self.said]

    def hang(self) -> None:
        """The script does so after its all-reduce."""

    def answer(self) -> None:
        _, errors = self.process.communicate()
        raise subprocess.SubprocessError(f"status {self.process.returncode}: {errors[errors.find('Root Cause') :]}")


Peer = IPyParallel | Monarch | NBDistributed | Torchrun
HELD_BY: dict[str, type[Peer]] = dict(zip(PEERS, (IPyParallel, Monarch, NBDistributed, Torchrun), strict=True))

if __name__ == "__main__":
    run(HELD_BY[sys.argv[1]](), **json.loads(sys.argv[2]))
