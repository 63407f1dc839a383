"""The notebook's end of the waiting agent (kit.world.warmside): one process that has torch imported, from which Worlds' agents are forked.

The first World of this process starts it, or `prepare_waiting` before that, and every later World is spared the imports. A World gets an
agent from it only if a new agent would begin alike: the same Python, environment, kind of device, cores, limits and umask, and no
imported file has changed since. Else it is replaced. A World with `env=` or several machines always starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from kit import machine
from kit.errors import KitError, how_ended
from kit.world import asked, leftovers
from kit.world.agentside import AGENT
from kit.world.asked import WorldPlan
from kit.world.channel import ChannelClosed, WorldLink
from kit.world.warmside import MEGATRON, RUNS, state_of_file

SETTING = "KIT_WAITING_AGENT"
ROOM = 2 * 2**30  # bytes of free memory without which none is started in advance


class Conditions(NamedTuple):
    """What a process has from its start on and keeps."""

    python: str
    env: dict[str, str]
    gpu: bool
    inherited: tuple[object, ...]


def conditions(python: str, device: str, neighbours: int) -> Conditions:
    gpu = device != "cpu" and machine.has_gpu_driver()
    env = {name: value for name, value in asked.agent_environment(neighbours).items() if name != RUNS}
    return Conditions(python, env, gpu, machine.inherited())


class ForkedAgent:
    """`pid`, `poll` and `wait` of a Popen, for an agent that the waiting one forks. `pid` is None until then."""

    def __init__(self, waiting: WaitingAgent, number: int, log: Path) -> None:
        self.waiting, self.number, self.log = waiting, number, log
        self.pid: int | None = None
        self.started = 0
        self.status: int | None = None

    def poll(self) -> int | None:
        if self.status is None and self.waiting.gone.is_set():
            if self.pid is None:
                with self.log.open("a") as log:
                    log.write(self.waiting.last_words)
                self.status = self.waiting.process.wait()
            elif not machine.alive(self.pid, self.started):
                self.status = -signal.SIGKILL  # nobody has its status; this is how an agent ends itself
        return self.status

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if self.pid is None:
                self.waiting.cancel(self.number)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the World's agent", seconds)
            time.sleep(0.002)
        return status


class WaitingAgent:
    """The process, the orders to it, and a thread that takes in its answers."""

    def __init__(self, met: Conditions) -> None:
        self.conditions = met
        self.gone = threading.Event()
        self.last_words = ""
        self.retired = False
        self.pids: list[int] = []  # of the processes that have imported what they should
        self.files: dict[str, Any] = {}
        self.agents: dict[int, ForkedAgent] = {}  # those that have not ended
        self.looks: dict[int, tuple[int, str] | None] = {}
        self.answered = threading.Condition()
        self._numbers = itertools.count(1)
        mark = leftovers.mark(secrets.token_hex(3))
        self.folder = leftovers.base() / mark
        self.folder.mkdir(mode=0o700)
        self._sock, theirs = socket.socketpair()
        command = [met.python, str(AGENT), "--wait", str(theirs.fileno()), str(self.folder)]
        with theirs, (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**met.env, machine.MARK: mark},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        (self.folder / leftovers.SESSION).write_text(str(self.process.pid))
        key = secrets.token_bytes(32)
        self._sock.sendall(key)
        self.link = WorldLink(self._sock, key, caller=False)
        threading.Thread(target=self._listen, daemon=True, name="kit-waiting-agent").start()

    def order(self, do: str, **order: Any) -> int:
        number = next(self._numbers)
        with contextlib.suppress(ChannelClosed):
            begins = {"cwd": str(Path.cwd()), "runs": os.environ.get(RUNS)}
            self.link.send({"do": do, "number": number, "gpu": self.conditions.gpu, **begins, **order})
        return number

    def cancel(self, number: int) -> None:
        """See to it that an order is not carried out, or no further; an agent that was never forked counts as ended."""
        with contextlib.suppress(ChannelClosed):
            self.link.send({"do": "cancel", "number": number})
        with self.answered:
            if agent := self.agents.get(number):
                agent.status = -signal.SIGKILL
            self._end_if_retired()

    def fork(self, plan: WorldPlan, folder: Path, log: Path, arguments: list[str]) -> ForkedAgent:
        with self.answered:
            number = self.order(
                "fork", megatron=MEGATRON in plan.preload, log=str(log), folder=str(folder), mark=folder.name,
                arguments=arguments,
            )  # fmt: skip
            self.agents[number] = agent = ForkedAgent(self, number, log)
        return agent

    def look(self, target: str, *, megatron: bool) -> int:
        with self.answered:
            number = self.order("look", target=target, megatron=megatron)
            self.looks[number] = None
        return number

    def hear_look(self, number: int, seconds: float) -> str:
        """Why code cannot be loaded; empty if it can."""
        with self.answered:
            over = self.answered.wait_for(lambda: self.looks[number] or self.gone.is_set(), seconds)
            result = self.looks.pop(number)
            self._end_if_retired()
        if result is None:
            self.cancel(number)
            return (
                f"the waiting agent is gone: {self.last_words}" if over else f"it did not answer within {seconds:g} s"
            )
        status, why = result
        return why or (f"it {how_ended(status)}" if status else "")

    def _listen(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                message = self.link.recv()
                with self.answered:
                    self._note(message)
                    self.answered.notify_all()
        self.link.close()
        try:
            self.process.wait(3.0)
        except subprocess.TimeoutExpired:
            leftovers.end_group(self.process.pid)
            self.process.wait()
        with contextlib.suppress(OSError):
            self.last_words = (self.folder / "log").read_text(errors="replace")
        leftovers.remove_folder(self.folder)
        with self.answered:
            self.gone.set()
            self.answered.notify_all()

    def _note(self, message: dict[str, Any]) -> None:
        if "files" in message:
            self.files |= message["files"]
            self.pids.append(message["pid"])
        elif "forked" in message:
            agent = self.agents[message["forked"]]
            agent.started, agent.pid = message["started"], message["pid"]
        elif "ended" in message:
            self.agents.pop(message["ended"]).status = message["status"]
            self._end_if_retired()
        elif message["seen"] in self.looks:
            self.looks[message["seen"]] = message["status"], message["why"]

    def usable(self, wanted: Conditions) -> bool:
        """Whether a process that it forks begins as a new process would."""
        if self.gone.is_set() or self.process.poll() is not None or self.conditions != wanted:
            return False
        return all(state_of_file(path) == state for path, state in list(self.files.items()))

    def retire(self) -> None:
        """Fork nothing more, and end once the last agent has: its parent collects it."""
        with self.answered:
            self.retired = True
            self._end_if_retired()

    def _end_if_retired(self) -> None:
        if self.retired and not self.looks and all(agent.status is not None for agent in self.agents.values()):
            self.end()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


# -- the one of this process ---------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_current: WaitingAgent | None = None
_started: weakref.WeakSet[WaitingAgent] = weakref.WeakSet()  # with those that were replaced, but have Worlds


def is_wanted() -> bool:
    return os.environ.get(SETTING, "on").lower() not in {"off", "0", "no", "false"}


def waiting_agent(wanted: Conditions) -> WaitingAgent:
    """The one that fits; a new one if there is none."""
    global _current  # noqa: PLW0603 - a process has one
    with _lock:
        if _current is None or not _current.usable(wanted):
            if _current is not None:
                _current.retire()
            _current = WaitingAgent(wanted)
            _started.add(_current)
        return _current


def fork_agent(plan: WorldPlan, folder: Path, log: Path, arguments: list[str]) -> ForkedAgent | None:
    """Order an agent for a World; None if it must start one itself."""
    if plan.job_machines > 1 or plan.env or not is_wanted():
        return None
    wanted = conditions(plan.python.path, plan.device, plan.part.neighbours)
    with _lock:  # so that it is not retired before it has the order
        return waiting_agent(wanted).fork(plan, folder, log, arguments)


def look_up(target: str, python: str, device: str, ranks: int, *, megatron: bool, seconds: float) -> str | None:
    """Why ranks could not load this code, or an empty text; None if there is no waiting agent to try it in."""
    if not is_wanted():
        return None
    wanted = conditions(python, device, ranks)
    with _lock:
        waiting = waiting_agent(wanted)
        number = waiting.look(target, megatron=megatron)
    return waiting.hear_look(number, seconds)


def prepare_waiting() -> None:
    """Start the waiting agent in the background, with Megatron where the ranks' Python has it, so that the first World finds it."""

    def start() -> None:
        with contextlib.suppress(KitError, OSError):
            python = asked.find_python()
            waiting = waiting_agent(conditions(python.path, "auto", 2))
            if python.megatron:
                waiting.order("load", megatron=True)

    if is_wanted() and _current is None and machine.free_memory() > ROOM:
        threading.Thread(target=start, daemon=True, name="kit-prepare").start()


def waiting_line() -> str:
    """One sentence about the waiting agent; empty if there is none."""
    waiting = _current
    if waiting is None or waiting.gone.is_set():
        return ""
    loaded = ("nothing yet", "torch", f"torch and {MEGATRON}")[len(waiting.pids)]
    size = (machine.resident(waiting.pids[-1] if waiting.pids else waiting.process.pid) or 0) >> 20
    return (
        f"an agent with {loaded} imported waits for the next World (pid {waiting.process.pid}, {size} MiB); {SETTING}=off before the "
        "kernel starts turns it off"
    )


def end_waiting() -> None:
    """End it, and wait until it has ended. The next World starts another one."""
    global _current
    with _lock:
        waiting, _current = _current, None
    if waiting is not None:
        waiting.end()
        waiting.gone.wait(5.0)


def forget_waiting() -> None:
    """In a process forked from the notebook: close its copies of the channels, or their agents would outlive the notebook."""
    global _lock, _current  # noqa: PLW0603 - another thread may have held the lock
    _lock = threading.RLock()
    _current = None
    for waiting in _started:
        waiting.link.close()
    _started.clear()


os.register_at_fork(after_in_child=forget_waiting)
atexit.register(end_waiting)
