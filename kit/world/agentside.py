"""The agent: one process a node that holds torch loaded, runs torchrun, and ends with the notebook.

It calls the notebook first and imports torch second, so that a notebook that dies early takes it along. On `launch` it runs
torchrun's own command line in this process with `--run-path --start-method fork`: torchrun forks the ranks from here, so torch (and
what was preloaded) is imported once and not once a rank. No CUDA is touched here, or the forked ranks could not use it: even GPUs
are counted by a child.

    notebook -> agent   launch {torchrun, ...}, watch {rank: pid}, kill, log, describe
    agent -> notebook   hello, exit {rank, status}, ended {error}, answers

It does not restart ranks by itself, and it knows nothing of what they run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import logging
import multiprocessing.process
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, Protocol

from kit import machine
from kit.world import leftovers
from kit.world.channel import ASKED_S, SILENCE_S, ChannelClosed, Message, WorldLink, connect

AGENT = Path(__file__).with_name("agent.py")
STATUS_S = 1.0  # for another thread to note the status that it has just taken


class RankHost(Protocol):
    """How a rank reaches the notebook, and the order to launch it."""

    key: bytes
    certificate: str
    node: int
    folder: Path
    order: Message


class Node:
    """What the agent's threads and, after the fork, its ranks share. A rank finds here how to reach the notebook."""

    def __init__(self, address: str, key: bytes, certificate: str, node: int, folder: Path) -> None:
        self.key, self.certificate, self.node, self.folder = key, certificate, node, folder
        self.link: WorldLink = connect(address, key, certificate)
        self.link.limit_silence()
        self.launched = threading.Event()
        self.order: Message = {}
        self._door: socket.socket | None = None  # of the ranks' store
        self.ranks: dict[int, tuple[int, int]] = {}  # rank -> pid, start time
        self.link.send({"role": "agent", "node": node, "pid": os.getpid(), "started": machine.start_time(os.getpid())})

    def listen(self) -> None:
        """Do what the notebook asks until it is gone; then end everything."""
        try:
            while True:
                message = self.link.recv()
                answer = getattr(self, "on_" + message["do"])(**message.get("with", {}))
                if "id" in message:
                    self.link.send({"id": message["id"], "answer": answer})
        except ChannelClosed:
            self.end()
        except Exception:  # noqa: BLE001 - a fault of the agent must not leave ranks behind
            traceback.print_exc()
            self.end()

    def end(self) -> None:
        self.on_kill()
        self.forget_ranks()
        leftovers.remove_folder(self.folder)
        os.killpg(0, signal.SIGKILL)

    def forget_ranks(self) -> None:
        leftovers.forget_shared(pid for pid, _ in self.ranks.values())
        self.ranks = {}

    def on_launch(self, **order: Any) -> None:
        self.forget_ranks()
        for scratch in self.folder.glob("torchelastic_*"):
            shutil.rmtree(scratch, ignore_errors=True)
        self.order = order
        if order["store"] is not None and self._door is None:
            # While this process may still import: another machine's torchrun that finds nobody here waits long before it tries again.
            with contextlib.suppress(OSError):  # `take_door` will say why
                self._door = store_socket(order)
        self.launched.set()

    def take_door(self) -> socket.socket:
        door, self._door = self._door, None
        return store_socket(self.order) if door is None else door

    def on_watch(self, ranks: dict[str, list[int]]) -> None:
        self.ranks = {int(rank): (pid, started) for rank, (pid, started) in ranks.items()}
        for rank, (pid, _) in self.ranks.items():
            threading.Thread(target=self.watch, args=(rank, pid), daemon=True).start()

    def watch(self, rank: int, pid: int) -> None:
        """Report at once how a rank ended, without taking its status from torchrun. The status of Ray's processes is not known."""
        if self.order["ray"] is not None:
            leftovers.wait_for_end(pid)
        child = next((process for process in list(multiprocessing.process._children) if process.pid == pid), None)  # type: ignore[attr-defined]
        status: int | None = None
        try:
            ended_child = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended_child is not None:
                killed = ended_child.si_code in {os.CLD_KILLED, os.CLD_DUMPED}
                status = -ended_child.si_status if killed else ended_child.si_status
        except ChildProcessError:  # torchrun was quicker, and its own handle has the status, or will have it soon
            end = time.monotonic() + STATUS_S
            while child is not None and (status := child.exitcode) is None and time.monotonic() < end:
                time.sleep(0.005)
        with contextlib.suppress(ChannelClosed):
            self.link.send({"exit": rank, "pid": pid, "status": status, "at": time.monotonic()})

    def on_kill(self) -> None:
        for pid, started in self.ranks.values():
            leftovers.kill_process(pid, started, group=True)
        if not leftovers.end_children() and (value := os.environ.get(machine.MARK)):
            leftovers.end_carriers(value.__eq__, spare=os.getpid())

    def on_kill_rank(self, rank: int) -> bool:
        return rank in self.ranks and leftovers.kill_process(*self.ranks[rank])

    def on_log(self, rank: int, offset: int, limit: int) -> str:
        return read_log(Path(self.order["logs"]), rank, offset, limit).decode("latin-1")

    def on_describe(self, rank: int) -> str:
        pid, started = self.ranks[rank]
        return leftovers.describe_leftover(pid, started, self.folder / f"stack{rank}")


def read_log(logs: Path, rank: int, offset: int, limit: int) -> bytes:
    """Bytes of a rank's log from an offset on. A negative offset counts from the end."""
    try:
        with (logs / f"rank{rank}.log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size + offset) if offset < 0 else offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


def store_socket(order: Message) -> socket.socket:
    """Where the ranks' store is to listen. By itself it would listen on every interface, on a port that another process could take."""
    family = socket.AF_INET6 if ":" in order["store"][0] else socket.AF_INET
    return socket.create_server(tuple(order["store"]), family=family)


def torchrun(node: Node) -> None:
    """Run torchrun's command line here until its ranks have ended. Its store listens on one address: the endpoint's, or loopback."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import run as cli
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    order = node.order
    arguments = list(order["torchrun"])
    if order["store"] is not None:
        door = node.take_door()
        address, port = order["store"][0], door.getsockname()[1]

        def store_at_address(host: str, port: int, size: int, master: bool, timeout: Any, **_: Any) -> TCPStore:
            return TCPStore(host, port, size, master, timeout, master_listen_fd=door.detach())

        static_tcp_rendezvous.TCPStore = store_at_address  # type: ignore[attr-defined, assignment]
        arguments += ["--master-addr", address, "--master-port", str(port)]
    cli.main([*arguments, str(AGENT)])


def import_all(names: list[str]) -> None:
    """Import what the ranks will want. A module that fails is left to the ranks, where the error gets a rank and a traceback."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return  # Megatron imports it where it is there, and it asks the GPU what it can: see kit.world.device
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def look_around(node: Node) -> None:
    """Once a second: a zombie counts against the limit on processes, and the notebook's machine may be lost."""
    looks = 0  # a machine that was paused itself has heard nothing either: first the kernel asks the other one
    while True:
        time.sleep(1.0)
        leftovers.reap_orphans()
        looks = looks + 1 if node.link.silence() > SILENCE_S - ASKED_S else 0
        if looks > ASKED_S:
            node.end()


def plain_logging() -> None:
    """Torch's log formatter imports its compiler when the first line is written: a second in the way of every restart."""
    for name in list(logging.root.manager.loggerDict):
        if name == "torch" or name.startswith("torch."):
            for handler in logging.getLogger(name).handlers:
                handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))


NODE: Node


def begin_again(node: int, ranks: int) -> None:
    """On another machine than the notebook's: make the folder, and start this program once more, with the World's mark in the environment
    that the kernel shows, and without the key. So `kit clean` finds on this machine what an agent that was killed left."""
    folder = leftovers.base() / leftovers.mark(f"node{node}-{secrets.token_hex(3)}")
    folder.mkdir(mode=0o700)
    with contextlib.suppress(PermissionError):  # it leads a group already, in a session that others may share
        os.setsid()
    (folder / leftovers.SESSION).write_text(str(os.getsid(0)))
    (folder / "key").touch(mode=0o600)
    key = os.environ.pop("KIT_KEY", None) or sys.stdin.readline().strip()
    (folder / "key").write_text(key)
    os.environ[machine.MARK] = folder.name
    for name, value in machine.defaults_of_ranks(ranks).items():
        os.environ.setdefault(name, value)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--folder", str(folder)])  # noqa: S606 - itself


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kit.world.agent", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where the notebook listens")
    parser.add_argument("--node", type=int, required=True, help="this machine's number, from 1 on")
    parser.add_argument("--ranks", type=int, default=1, help="number of this machine's ranks, which share its cores")
    text = "fingerprint of the certificate of a notebook on another machine"
    parser.add_argument("--certificate", default="", metavar="SHA256", help=text)
    text = "module to import, where it is there, before the first order comes"
    parser.add_argument("--early", action="append", default=[], metavar="MODULE", help=text)
    text = "owner-only folder with the key; made where it is not given: KIT_KEY has the key, else the first input line"
    parser.add_argument("--folder", type=Path, help=text)
    return parser.parse_args(arguments)


def agent_main(arguments: list[str] | None = None, *, preload: str) -> NoReturn:
    """`preload`: the module of the ranks, imported once before they are forked. By default the arguments are those of the command."""
    global NODE  # noqa: PLW0603 - the forked ranks find it here
    options = options_of(arguments)
    if options.folder is None:
        begin_again(options.node, options.ranks)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # so that the end takes only what was started here
    leftovers.adopt_orphans()
    leftovers.let_signals_end_forks()
    folder = options.folder
    key_file = folder / "key"
    key = bytes.fromhex(key_file.read_text())
    key_file.unlink()  # read once; the ranks get it through the fork
    try:
        NODE = Node(options.connect, key, options.certificate, options.node, folder)
    except (OSError, ChannelClosed) as error:
        leftovers.remove_folder(folder)
        sys.exit(f"no notebook answers at {options.connect}: {error}")
    threading.Thread(target=NODE.listen, daemon=True).start()
    threading.Thread(target=look_around, args=(NODE,), daemon=True).start()
    importlib.import_module("torch.distributed.run")
    importlib.import_module(preload)
    device = importlib.import_module("kit.world.device")
    plain_logging()
    import_all(options.early)
    tempfile.tempdir = str(folder)  # torchrun's error files and log folders end with the World
    while True:
        NODE.launched.wait()
        NODE.launched.clear()
        order, problem, statuses = NODE.order, "", {}
        device.spare(order["device"])
        import_all(order["preload"])
        try:
            if order["ray"] is None:
                torchrun(NODE)
            else:
                importlib.import_module("kit.world.rayside").run_actors(NODE)
        except Exception as failure:  # noqa: BLE001 - torchrun's error is passed on; the notebook judges
            problem = f"{type(failure).__name__}: {failure}"
            statuses = {
                order["first"] + rank: worker.exitcode for rank, worker in getattr(failure, "failures", {}).items()
            }
        with contextlib.suppress(ChannelClosed):
            NODE.link.send({"ended": order["generation"], "error": problem, "statuses": statuses})
