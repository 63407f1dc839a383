"""A rank: forked by torchrun, joined into WORLD, then doing what the notebook says until the notebook is gone.

Two connections lead to the notebook. On `work` the main thread takes one request after the other and answers it. On `watch` a thread
answers while the main thread is busy: its stack, its phase, how far each group's collectives got; and it carries the interrupt. When
`watch` closes, the notebook is gone, and the rank ends with all it started.

What user code raises is an answer, not an end. Standard library and torch only.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import faulthandler
import importlib
import io
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kit import nccl2
from kit.errors import KitError
from kit.machine import start_time
from kit.routing import requested
from kit.world import agentside, execute, leftovers
from kit.world.channel import ChannelClosed, Link, Message, connect, reporting, take_reports
from kit.world.device import choose, prepare, restore
from kit.world.execute import in_collective, stack_of


class Rank:
    """What one rank knows of itself. `names` is the namespace that persists between cells.

    `number` is what the notebook calls it: in one of several Worlds it counts through all of them, `rank` does not.
    """

    def __init__(self, node: agentside.Node) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.order = node.order
        self.number = number_of(node.order)
        os.environ["KIT_RANK"] = str(self.number)  # for a lab on this rank
        self.folder = node.folder
        self.phase = "start"
        self.busy = False
        self.call = 0  # the request it works at
        self.interrupted = 0  # the request that is to stop, which may not have begun yet
        self.all_here = threading.Event()
        self.main = threading.main_thread()
        prepare(os.environ, self.order["device"], node.folder)
        self.device, self.why, needed = choose(
            self.order["device"],
            self.order["first"] + self.local_rank,
            self.order["neighbours"],
            tuple(self.order["devices"]),
            self.local_rank,
        )
        self.seat = self.order["devices"][self.local_rank] if self.order["devices"] else self.device.index
        for name, value in needed.items():
            os.environ.setdefault(name, value)  # a person's own setting stays
        if self.device.type != "cuda" and (torch.version.cuda or torch.version.hip):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # whatever asks whether there is a GPU gets the World's answer
        # Cells run as __main__, so that what they define can be pickled among ranks.
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.names: dict[str, Any] = module.__dict__
        self.names.update(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            device=self.device,
            torch=torch,
            dist=dist,
        )

    def hello(self, role: str) -> Message:
        pid = os.getpid()
        return {
            "role": role,
            "rank": self.number,
            "node": agentside.NODE.node,
            "pid": pid,
            "started": start_time(pid),
            "device": str(self.device),
            "why": self.why,
            "host": os.uname().nodename,
            "seat": self.seat,
        }

    def join(self) -> None:
        """Make WORLD, once every rank is there. A prefix per generation keeps a rebuilt World from reading an earlier one's rendezvous.

        The store lives in the process that forks the ranks. While its thread lets a caller in it holds locks of the C library,
        and a rank that is forked in that moment would wait for them for ever.
        """
        seconds = dt.timedelta(seconds=self.order["group_timeout_s"])
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*where, world_size=self.world_size, is_master=False, timeout=seconds)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
        if requested():
            from kit.world import routing  # where it was not asked for it is not even loaded

            routing.install()
        over_gpus = "cpu:gloo,cuda:nccl"
        if nccl2.requested():
            nccl2.install()
            over_gpus = nccl2.WORLD
        dist.init_process_group(
            over_gpus if cuda else "gloo",
            store=PrefixStore(f"kit/{self.order['generation']}", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=seconds,
            device_id=self.device if cuda else None,
        )

    def serve(self, work: Link) -> None:
        while True:
            request = work.recv()
            self.phase, self.call = request["phase"], request["id"]
            try:
                self.busy = True  # from here on an interrupt raises
                stopped = self.interrupted == self.call  # before it began
                answer = execute.failure(KeyboardInterrupt()) if stopped else execute.answer(self.names, request)
                self.busy = False
            except KeyboardInterrupt as error:  # before the code began, or after it ended
                self.busy = False
                answer = execute.failure(error)
            answer["id"] = request["id"]
            answer["log"], answer["lost"] = LOG.flushed()
            with reporting:
                if rows := take_reports():
                    answer["news"] = rows
            try:
                work.send(answer)
            except (TypeError, ValueError, RecursionError) as error:  # not JSON, too big for the channel, or too deep
                told = TypeError(f"the value cannot be sent: {error}; it must be numbers, text, lists or dicts")
                work.send({**answer, **execute.failure(told), "value": None})
            if answer.get("exiting"):
                end()

    def watch(self, link: Link) -> None:
        try:
            while True:
                message = link.recv()
                if message["do"] == "join":
                    self.all_here.set()
                elif message["do"] == "interrupt":
                    self.interrupted = message["call"]
                    if self.busy and self.call == self.interrupted:
                        signal.pthread_kill(self.main.ident or 0, signal.SIGINT)
                elif message["do"] == "news":
                    with reporting:  # sent before an answer can be, so that nothing overtakes it
                        link.send({"id": message["id"], "news": take_reports()})
                else:
                    link.send({"id": message["id"], **self.look()})
        except ChannelClosed:
            end()

    def look(self) -> Message:
        """What the main thread is doing, seen from the side."""
        frame = sys._current_frames().get(self.main.ident or 0)  # the documented way to another thread's frame
        return {
            "phase": self.phase,
            "stack": stack_of(frame) if self.busy else "",
            "waiting": self.busy and in_collective(frame),
            "progress": collective_counts(),
        }


def number_of(order: Message) -> int:
    return int(order["first"]) + int(os.environ["RANK"])


def collective_counts() -> dict[str, int]:
    """Per registered group, by name, how many collectives this rank has entered."""
    counts: dict[str, int] = {}
    groups: list[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
    for group, name in groups:  # the only list of groups there is
        with contextlib.suppress(RuntimeError, KitError):  # of a handle whose group is suspended, say
            counts[name] = group._get_sequence_number_for_group()
    return counts


def on_interrupt(_signal: int, _frame: object) -> None:
    if RANK.busy:
        raise KeyboardInterrupt


def end() -> None:
    """End with all this rank started. By signal: torchrun takes a status of 0 for a rank that has yet to hand in its result."""
    os.killpg(0, signal.SIGKILL)


class LogStream(io.RawIOBase):
    """A rank's output: straight into its log file, at the level of file descriptors, so that C libraries and crashes are in it too.

    A full disk loses output and counts it; it never raises in the code that printed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lost = 0

    @classmethod
    def install(cls, folder: str, rank: int) -> LogStream:
        """Make the log this process's stdout and stderr."""
        path = Path(folder) / f"rank{rank}.log"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        stream = cls(1)
        text: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(stream, 1 << 16), **text)
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(stream, 1 << 10), **text)
        return stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return os.write(self._fd, data)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise
            self.lost += len(data)
            return len(data)

    def flushed(self) -> tuple[int, int]:
        """Flush what was printed; the log's size, and how many bytes were lost since the last call."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a person's code may have closed it, or put anything in its place
                stream.flush()
        lost, self.lost = self.lost, 0
        return os.fstat(self._fd).st_size, lost


RANK: Rank
LOG: LogStream


def main() -> None:
    global RANK, LOG  # noqa: PLW0603 - one rank is one process
    node = agentside.NODE
    agent = os.getppid()
    os.setpgid(0, 0)  # what this rank starts can be ended with it
    leftovers.die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    node.link.close()  # the fork's copy; the agent's end must be its own
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    tempfile.tempdir = None  # the agent's is the World's own folder
    restore()
    LOG = LogStream.install(node.order["logs"], number_of(node.order))
    RANK = Rank(node)
    signal.signal(signal.SIGINT, on_interrupt)
    stacks = (node.folder / f"stack{RANK.number}").open("a")
    faulthandler.register(leftovers.STACK_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.stderr.fileno(), all_threads=False)
    work, watch = (connect(node.order["address"], node.key) for _ in range(2))
    threading.Thread(target=RANK.watch, args=(watch,), daemon=True, name="kit-watch").start()
    watch.send(RANK.hello("watch"))
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        for module in node.order["preload"]:
            importlib.import_module(module)
        RANK.all_here.wait()
        RANK.join()
    except Exception as error:  # noqa: BLE001 - any reason not to start is told by name
        work.send({**RANK.hello("work"), "failed": execute.failure(error)})
        traceback.print_exc()
        os._exit(1)
    work.send(RANK.hello("work"))
    RANK.phase = "idle"
    try:
        RANK.serve(work)
    except ChannelClosed:
        end()
    except Exception:
        traceback.print_exc()  # the rank's last words, which the notebook reads from its log
        raise
