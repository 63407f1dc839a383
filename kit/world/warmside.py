"""The waiting agent: a process that imports torch, never runs anything of a World, and forks each World's agent on request.

    notebook -> waiting   fork {agent's arguments, log, folder, mark}, look {target}, load, cancel
    waiting -> notebook   files {path: state}, forked {pid}, ended {status}, seen {why}

For Worlds that preload megatron.core it forks a second waiting process, which has that imported too and speaks through the first one. Both
end with the notebook. A forked agent is a session, has the World's mark and shares nothing with the notebook but its own channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from kit import machine, target
from kit.world import leftovers
from kit.world.channel import ChannelClosed, Message, WorldLink

MEGATRON = "megatron.core"
RUNS = "KIT_RUNS"  # the one variable that may change between Worlds: nothing that is imported reads it
KEY = 32  # bytes that the notebook sends first


class WaitingProcess:
    """One of the two, with the threads' common state. `folder` is removed at the end by the first one."""

    def __init__(self, link: WorldLink, folder: Path, mark_at: int, *, first: bool) -> None:
        self.link, self.folder, self.mark_at, self.first = link, folder, mark_at, first
        self.orders: queue.Queue[Message] = queue.Queue()
        self.lock = threading.Lock()  # held while a child is forked or forgotten
        self.cancelled: set[int] = set()
        self.children: dict[int, int] = {}  # number of the order -> pid
        self.awaited: dict[
            int, str
        ] = {}  # number -> folder of a World whose agent, which will remove it, is not there yet
        self.loaded: WorldLink | None = None  # to the process that has Megatron too
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                order = self.link.recv()
                if order["do"] == "cancel":
                    self.cancel(order["number"])
                    continue
                if order["do"] == "fork":
                    self.awaited[order["number"]] = order["folder"]
                self.orders.put(order)
        with self.lock:  # from here on nothing is forked
            for folder in [*map(Path, self.awaited.values()), self.folder] if self.first else ():
                leftovers.remove_folder(folder)
            os.killpg(0, signal.SIGKILL)

    def cancel(self, number: int) -> None:
        """Whatever became of an order: end its process, or see that it is never forked."""
        with self.lock:
            self.cancelled.add(number)
            self.awaited.pop(number, None)
            if pid := self.children.get(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            elif self.loaded is not None:
                self.loaded.send({"do": "cancel", "number": number})

    def tell(self, **message: Any) -> None:
        self.awaited.pop(message.get("forked", -1), None)
        with contextlib.suppress(ChannelClosed):
            self.link.send(message)

    def import_modules(self, *names: str) -> None:
        for name in names:
            importlib.import_module(name)
        self.tell(files=states_of_modules(), pid=os.getpid())

    def serve(self) -> NoReturn:
        while True:
            order = self.orders.get()
            if order["megatron"] and self.first and importlib.util.find_spec("transformer_engine") is None:
                self.pass_on(order)
            elif order["do"] == "look":
                self.look(order)
            elif order["do"] == "fork":
                self.fork_agent(order)

    def pass_on(self, order: Message) -> None:
        """To the process with Megatron, which is forked for the first such order."""
        if self.loaded is None:
            ours, theirs = socket.socketpair()
            if not os.fork():
                ours.close()
                self.link.close()
                load_and_serve(WorldLink(theirs, b"", caller=True), self.folder, self.mark_at, order["gpu"])
            theirs.close()
            self.loaded = WorldLink(ours, b"", caller=False)
            threading.Thread(target=self.relay, args=(self.loaded,), daemon=True).start()
        with self.lock:
            if order.get("number") not in self.cancelled:
                self.loaded.send(order)

    def relay(self, loaded: WorldLink) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                self.tell(**loaded.recv())
        os.killpg(0, signal.SIGKILL)  # without it this one would answer no order for Megatron

    def fork(self, number: int) -> int | None:
        """Like os.fork; None for an order that was cancelled."""
        with self.lock:
            if number in self.cancelled:
                return None
            if pid := os.fork():
                self.children[number] = pid
                return pid
        self.link.close()
        if self.loaded is not None:
            self.loaded.close()
        return 0

    def fork_agent(self, order: Message) -> None:
        pid = self.fork(order["number"])
        if pid == 0:
            become_agent(order, self.mark_at)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                while os.getpgid(pid) == os.getpgid(0):  # until then it ends with this process, and cannot tidy up
                    time.sleep(0.0005)
            self.tell(forked=order["number"], pid=pid, started=machine.start_time(pid))
            threading.Thread(target=self.wait_for, args=(order["number"], pid), daemon=True).start()

    def wait_for(self, number: int, pid: int) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with self.lock:
            self.children.pop(number)
        self.tell(ended=number, status=status)

    def look(self, order: Message) -> None:
        """Whether code can be loaded, by a fork that imports it and is gone afterwards."""
        ours, theirs = os.pipe()
        if (pid := self.fork(order["number"])) == 0:
            os.close(ours)
            look_and_exit(order, theirs)
        os.close(theirs)
        if pid is None:
            os.close(ours)
        else:
            threading.Thread(target=self.hear_look, args=(order["number"], pid, ours), daemon=True).start()

    def hear_look(self, number: int, pid: int, answer: int) -> None:
        with open(answer, encoding="utf-8") as pipe:
            why = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with self.lock:
            self.children.pop(number)
        self.tell(seen=number, status=status, why=why)


def load_and_serve(link: WorldLink, folder: Path, mark_at: int, gpu: bool) -> NoReturn:
    try:
        waiting = WaitingProcess(link, folder, mark_at, first=False)
        importlib.import_module("kit.world.device").spare("auto" if gpu else "cpu")
        with contextlib.suppress(Exception):  # the ranks report it, with a rank and a traceback
            waiting.import_modules(MEGATRON)
        waiting.serve()
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        traceback.print_exc()
        os._exit(1)


def become_agent(order: Message, mark_at: int) -> NoReturn:
    """Take on everything that a newly started agent would have: session, mark, output, folder, random state."""
    from kit.world.agentside import agent_main

    try:
        os.setsid()
        set_mark(order["mark"], mark_at)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(order["cwd"])
        if order["runs"] is not None:
            os.environ[RUNS] = order["runs"]
        (Path(order["folder"]) / leftovers.SESSION).write_text(str(os.getpid()))
        importlib.invalidate_caches()
        sys.modules["torch"].default_generator.seed()  # else random numbers would be the same in every World
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        agent_main(order["arguments"], preload="kit.world.rankside")
    except BaseException:  # noqa: BLE001 - as above
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def look_and_exit(order: Message, answer: int) -> NoReturn:
    why = ""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.chdir(order["cwd"])
        sys.path.insert(0, "")
        importlib.invalidate_caches()
        target.load_callable(order["target"])
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else error.code is not None)
    except BaseException as error:  # noqa: BLE001 - a person's module may raise anything
        why = target.raised_in_words(error)
    os.write(answer, why.encode(errors="backslashreplace"))
    os._exit(0)


# -- the mark in the environment that the kernel shows ---------------------------------------------------------------------


def find_mark() -> int:
    """The address of KIT_WORLD in this process's first environment, which /proc shows and no later change reaches."""
    environment = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    number = 0
    while (address := environment[number]) is not None:
        if ctypes.string_at(address).startswith(f"{machine.MARK}=".encode()):
            return int(address)
        number += 1
    raise KeyError(machine.MARK)


def set_mark(mark: str, mark_at: int) -> None:
    """Replace it in place, so that whoever looks for this World's processes finds this one: marks of a notebook have one length."""
    value = f"{machine.MARK}={mark}".encode()
    if len(value) != len(ctypes.string_at(mark_at)):
        raise ValueError(f"the mark {mark} has another length than the one before")
    ctypes.memmove(mark_at, value, len(value))
    os.environ[machine.MARK] = mark
    if machine.marked("self") != mark:
        raise OSError("the kernel does not show a process's environment as it is now; set KIT_WAITING_AGENT=off")


# -- is what was imported still what lies on disk? ----------------------------------------------------------------------------


def state_of_file(path: str) -> list[int] | None:
    try:
        info = os.stat(path)  # noqa: PTH116 - thousands of them
    except OSError:
        return None
    return [info.st_mtime_ns, info.st_size]


def states_of_modules() -> dict[str, list[int] | None]:
    """Every file that a module was imported from, and the folders where packages are installed and removed."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return {path: state_of_file(path) for path in [*files, *folders] if isinstance(path, str)}


def wait_main(arguments: list[str]) -> NoReturn:
    """`arguments`: the number of the inherited socket, and the folder."""
    sock = socket.socket(fileno=int(arguments[0]))
    link = WorldLink(sock, sock.recv(KEY, socket.MSG_WAITALL), caller=True)
    waiting = WaitingProcess(link, Path(arguments[1]), find_mark(), first=True)
    waiting.import_modules("torch.distributed.run", "kit.world.rankside", "kit.world.device")
    waiting.serve()
