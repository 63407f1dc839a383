"""A rank: forked by torchrun, joined into WORLD, then doing what the notebook asks until the notebook is gone.

Two connections lead to the notebook. On `work` the main thread takes one request after the other and answers it. On `watch` a thread
answers while the main thread is busy: its stack, its phase, how far each group's collectives got; and it carries the interrupt. When
`watch` closes, the notebook is gone, and the rank ends with all it started.

What user code raises is an answer, not an end. Standard library and torch only.
"""

from __future__ import annotations

import ast
import contextlib
import datetime as dt
import errno
import faulthandler
import functools
import importlib
import io
import itertools
import linecache
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from kit import routing, target
from kit.errors import BadInput, KitError
from kit.machine import start_time
from kit.world import agentside, leftovers
from kit.world.channel import ChannelClosed, Message, WorldLink, connect, reporting, take_reports
from kit.world.device import choose_device, prepare_device, restore

KEPT = 2_000  # cells with source that tracebacks can show
RAISE_AGAIN_S = 2.0  # how long what cleans up after an interrupt is not interrupted
SHOWN = 10_000  # characters of a shown value: a notebook cell, not a dump
VICTIM = ("gloo/transport", "NCCL error", "ncclRemoteError", "Connection closed by peer", "Connection reset by peer")


class Rank:
    """A rank's state. `names` is the namespace that persists between cells.

    `number` is the notebook's number for it: in one of several Worlds it counts through all of them, `rank` does not.
    """

    def __init__(self, node: agentside.RankHost) -> None:
        self.node = node.node
        self.rank, self.world_size, local_rank = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        self.order = order = node.order
        self.number = call_number(order)
        os.environ["KIT_RANK"] = str(self.number)  # for a lab on this rank
        os.environ["KIT_FOLDER"] = str(node.folder)  # ends with the World, also where its rank cannot tidy up
        self.phase = "start"
        self.busy = False
        self.call = 0  # the request it works at
        self.interrupted = 0  # the request that is to stop, which may not have begun yet
        self.raised_at = -math.inf  # when an interrupt was raised in this answer
        self.lent: Message | None = None  # the request that lent this rank to Ray, until Ray gives it back
        self.all_here = threading.Event()
        self.main = threading.main_thread()
        devices = order["devices"]
        prepare_device(os.environ, order["device"], node.folder)
        self.device, self.why, needed = choose_device(
            order["device"], order["before"] + local_rank, order["neighbours"], tuple(devices), local_rank
        )
        self.seat = devices[local_rank] if devices else self.device.index
        for name, value in needed.items():
            os.environ.setdefault(name, value)  # a person's own setting stays
        if self.device.type != "cuda" and (torch.version.cuda or torch.version.hip):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # whatever asks whether there is a GPU gets the World's answer
        # Cells run as __main__, so that what they define can be pickled among ranks.
        sys.modules["__main__"] = types.ModuleType("__main__")
        self.names: dict[str, Any] = sys.modules["__main__"].__dict__
        self.names.update(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=local_rank,
            device=self.device,
            torch=torch,
            dist=dist,
        )

    def hello(self, role: str) -> Message:
        pid = os.getpid()
        return {
            "role": role,
            "rank": self.number,
            "node": self.node,
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
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, world_size=self.world_size, is_master=False, timeout=seconds)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
        routing.install_routes()
        count_transfers()
        dist.init_process_group(
            routing.world_backend() if cuda else "gloo",
            store=PrefixStore(f"kit/{self.order['generation']}", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=seconds,
            device_id=self.device if cuda else None,
        )

    def serve(self, work: WorldLink) -> None:
        """Answer requests until the notebook is gone, or lends this rank."""
        self.main = threading.current_thread()
        if self.lent is not None:
            request, self.lent = self.lent, None
            self.send_reply(work, request, {"value": None})
        while True:
            request = work.recv()
            self.phase, self.call = request["phase"], request["id"]
            if request["do"] == "lend":
                self.lent = request
                return
            reply = self.answer(request)
            self.send_reply(work, request, reply)
            if reply.get("exiting"):
                end_rank()

    def answer(self, request: Message) -> Message:
        try:
            self.raised_at = -math.inf
            self.busy = True  # from here on an interrupt raises
            stopped = self.interrupted == self.call  # before it began
            reply = rank_failure(KeyboardInterrupt()) if stopped else answer_call(self.names, request)
            self.busy = False
        except KeyboardInterrupt as error:  # before the code began, or after it ended
            self.busy = False
            reply = rank_failure(error)
        return reply

    def send_reply(self, work: WorldLink, request: Message, reply: Message) -> None:
        reply["id"] = request["id"]
        reply["log"], reply["lost"] = LOG.flushed()
        with reporting:
            reply["news"] = take_reports()
        try:
            work.send(reply)
        except (TypeError, ValueError, RecursionError) as error:  # not JSON, too big for the channel, or too deep
            refused = TypeError(f"the value cannot be sent: {error}; it must be numbers, text, lists or dicts")
            work.send({**reply, **rank_failure(refused), "value": None})

    def watch(self, link: WorldLink) -> None:
        try:
            while True:
                message = link.recv()
                if message["do"] == "join":
                    self.all_here.set()
                elif message["do"] == "interrupt":
                    self.interrupted = message["call"]
                    if self.busy and self.call == self.interrupted and self.main is threading.main_thread():
                        signal.pthread_kill(self.main.ident or 0, signal.SIGINT)
                elif message["do"] == "news":
                    with reporting:  # sent before an answer can be, so that nothing overtakes it
                        link.send({"id": message["id"], "news": take_reports()})
                else:
                    link.send({"id": message["id"], **self.look()})
        except ChannelClosed:
            end_rank()

    def look(self) -> Message:
        frame = sys._current_frames().get(self.main.ident or 0)  # the documented way to another thread's frame
        return {
            "phase": self.phase,
            "stack": stack_of(frame) if self.busy else "",
            "awaits": awaited(frame) if self.busy else "",
            "progress": collective_counts(),
            "sent": transfer_counts("send", self.order["first"]),
            "received": transfer_counts("recv", self.order["first"]),
        }


def call_number(order: Message) -> int:
    return int(order["first"]) + int(os.environ["RANK"])


def collective_counts() -> dict[str, int]:
    """Per registered group, by name, how many collectives this rank has entered."""
    counts: dict[str, int] = {}
    for group, name in named_groups():
        if (number := sequence_number(group)) is not None:
            counts[name] = number - _numbered.get(counted_group(group), 0)
    return counts


def sequence_number(group: Any) -> int | None:
    """None for a group that does not answer, such as a handle that is suspended."""
    with contextlib.suppress(RuntimeError, KitError):
        return int(group._get_sequence_number_for_group())
    return None


def named_groups() -> list[tuple[Any, str]]:
    return list(dist.distributed_c10d._world.pg_names.items())  # the only list of groups


# By group, as a name comes again for a group that is made after its first one was destroyed.
# By "send" or "recv" and the peer's rank in the group.
_transfers: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, int]]] = weakref.WeakKeyDictionary()
# How many transfers have a number in the group's sequence: with gloo all, with NCCL none.
_numbered: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def counted_group(registered: Any) -> dist.ProcessGroup:
    """The group whose transfers are counted: the living one inside a handle of kit.megatron.handles."""
    group: dist.ProcessGroup = getattr(registered, "kit_inner", None) or registered
    return group


def count_transfers() -> None:
    """Count what this process sends to and receives from each peer. A group's sequence number does not have the peer, or no transfers."""
    for kind in ("send", "recv"):
        setattr(dist.ProcessGroup, kind, counting_transfers(kind, getattr(dist.ProcessGroup, kind)))


def counting_transfers(kind: str, post: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(post)
    def post_counted(group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any, **named: Any) -> Any:
        peer = args[0] if args else named["dstRank" if kind == "send" else "srcRank"]
        before = sequence_number(group)
        _transfers.setdefault(group, Counter())[kind, peer] += 1
        try:
            return post(group, tensors, *args, **named)
        finally:
            after = sequence_number(group)
            if before is not None and after is not None:
                _numbered[group] = _numbered.get(group, 0) + after - before

    return post_counted


def transfer_counts(kind: str, first: int) -> dict[str, int]:
    """How many transfers of this kind were posted, by "group/peer"; `first` is the notebook's number of rank 0 of this World."""
    counts: dict[str, int] = {}
    members = dist.distributed_c10d._world.pg_group_ranks
    for group, name in named_groups():
        posted = _transfers.get(counted_group(group), Counter())
        for rank, number_in_group in members.get(group, {}).items():
            if count := posted[kind, number_in_group]:
                counts[f"{name}/{first + rank}"] = count
    return counts


def on_interrupt(_signal: int, _frame: object) -> None:
    """The signal comes again until the answer is there. What cleans up is not disturbed, but what was raised in a `__del__` is lost."""
    if RANK.busy and time.monotonic() - RANK.raised_at >= RAISE_AGAIN_S:
        RANK.raised_at = time.monotonic()
        raise KeyboardInterrupt


def end_rank() -> None:
    """End with all this rank started. By signal: torchrun takes a status of 0 for a rank that has yet to hand in its result."""
    os.killpg(0, signal.SIGKILL)


class LogStream(io.RawIOBase):
    """A rank's output: straight into its log file, at the level of file descriptors, so that C libraries and crashes are in it too.

    A full disk loses output, which is counted; it never raises in the code that printed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lost = 0

    @classmethod
    def install(cls, folder: str, rank: int) -> LogStream:
        fd = os.open(Path(folder) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
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


# -- one request: code, an expression or a function becomes a value or a failure ------------------------------------------


def answer_call(names: dict[str, Any], request: Message) -> Message:
    """The value, or what was raised; `sys.exit` is reported here and carried out by the caller."""
    try:
        if request["do"] == "run":
            return {"value": run_cell(names, request["code"], request["cell"])}
        if request["do"] == "eval":
            expression = compiled(request["code"], "eval", request["cell"])[1]
            assert expression is not None
            return {"value": eval(expression, names)}  # noqa: S307 - running a person's code is the purpose
        return {"value": target.load_callable(request["target"])(**request["with"])}
    except SystemExit as error:
        return {**rank_failure(error), "exiting": True}
    except BaseException as error:  # noqa: BLE001 - every failure of the person's code is an answer
        return rank_failure(error)


def run_cell(names: dict[str, Any], code: str, cell: int) -> str | None:
    body, last = compiled(code, "exec", cell)
    assert body is not None
    exec(body, names)  # noqa: S102 - running a person's code is the purpose
    value = None if last is None else eval(last, names)  # noqa: S307
    if value is None or code.rstrip().endswith(";"):
        return None
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


@functools.lru_cache(maxsize=256)  # a step that is repeated is compiled once
def compiled(code: str, mode: str, cell: int) -> tuple[CodeType | None, CodeType | None]:
    """What to execute, and the last line where that is an expression. Tracebacks show the source and the cell's number."""
    name = f"<ranks {cell}>"
    linecache.cache.pop(f"<ranks {cell - KEPT}>", None)
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    if mode == "eval":
        return None, compile(code, name, "eval")
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
        return compile(tree, name, "exec"), compile(ast.Expression(last.value), name, "eval")
    return compile(tree, name, "exec"), None


def rank_failure(error: BaseException) -> Message:
    """An exception as JSON, with the kit's own frames left out of the traceback."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(OWN):
        shown = shown.tb_next
    words, status = text_of(error), getattr(error, "code", None)
    return {
        "error": f"{type(error).__name__}: {words}".strip().removesuffix(":"),
        "traceback": "".join(traceback.format_exception(type(error), error, shown)),
        # Errors that only report that another rank is gone or late: never the cause when there is another error.
        "victim": type(error).__name__.startswith(("Dist", "Peer")) or any(mark in words for mark in VICTIM),
        "refused": words if isinstance(error, BadInput) else "",
        "exitcode": status if isinstance(status, int) else 0 if status is None else 1,
    }


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 - a person's own __str__ may raise anything
        return f"(its text raises {type(worse).__name__})"


OWN = (
    __file__,
    str(importlib.__file__),
    str(target.__file__),
    str(ast.__file__),
    "<frozen importlib",
)


# -- a rank's Python stack: for people, and for the one question what it waits for -------------------------------------

# Modules with functions in which a rank waits for other ranks, and calls on work handles and groups that do so from C.
WAITING_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn",
    "kit.sync.link",
)
WAITING_CALL = re.compile(
    r"\.(wait|barrier|monitored_barrier|all_?reduce\w*|all_?gather\w*|reduce_scatter\w*|broadcast|send|recv)\($"
)
# Calls that return once a device has done its work, to which transfers and collectives between GPUs belong.
DEVICE_CALL = re.compile(r"\b(synchronize|item|cpu|tolist|numpy|nonzero|float|int|bool)\($")
ENTRIES = {answer_call.__code__, run_cell.__code__}  # what they call is the user's code


def stack_of(frame: FrameType | None) -> str:
    """The stack from the user's code on."""
    if frame is None:
        return ""
    users = list(itertools.takewhile(lambda step: step[0].f_code not in ENTRIES, traceback.walk_stack(frame)))
    return "".join(traceback.StackSummary.extract(iter(users[::-1])).format())


def awaited(frame: FrameType | None) -> str:
    """What the innermost Python frame waits for: "ranks", a "device", or "" for nothing."""
    if frame is None:
        return ""
    # A decorator or two may stand between.
    innermost = [inner for inner, _ in itertools.islice(traceback.walk_stack(frame), 3)]
    if any(inner.f_globals.get("__name__", "").startswith(WAITING_MODULES) for inner in innermost):
        return "ranks"
    if WAITING_CALL.search(current_call(frame)):
        return "ranks"
    return "device" if any(DEVICE_CALL.search(current_call(inner)) for inner in innermost) else ""


def current_call(frame: FrameType) -> str:
    """The source of the call that the frame is in, up to its opening bracket: `work.wait(`."""
    line, end_line, column, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or column is None or end is None:
        return ""
    source = linecache.getline(frame.f_code.co_filename, line)
    text = source.encode()[column : end if end_line == line else None].decode(errors="replace")
    depth = 0
    # From the end back to the bracket that opens the last call: `f(a)(b, c)`.
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0 and text[index] == "(":
            return text[: index + 1]
    return ""


# -- the life of a rank --------------------------------------------------------------------------------------------------

RANK: Rank
LOG: LogStream


def rank_main() -> None:
    node = agentside.NODE
    agent = os.getppid()
    os.setpgid(0, 0)  # what this rank starts can be ended with it
    leftovers.die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    node.link.close()  # the fork's copy; the agent's end must be its own
    tempfile.tempdir = None  # the agent's is the World's own folder
    restore()
    work = join_notebook(node)
    try:
        RANK.serve(work)
    except ChannelClosed:
        end_rank()
    except Exception:
        traceback.print_exc()  # the rank's last words, which the notebook reads from its log
        raise


def join_notebook(node: agentside.RankHost) -> WorldLink:
    """Make this process a rank of the notebook's World; returns the link on which it gets requests."""
    global RANK, LOG  # noqa: PLW0603 - one rank is one process
    LOG = LogStream.install(node.order["logs"], call_number(node.order))
    RANK = Rank(node)
    if threading.current_thread() is threading.main_thread():  # an asynchronous actor works in another one
        signal.signal(signal.SIGINT, on_interrupt)
    stacks = (node.folder / f"stack{RANK.number}").open("a")
    faulthandler.register(leftovers.STACK_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.stderr.fileno(), all_threads=False)
    work, watch = (connect(node.order["address"], node.key, node.certificate) for _ in range(2))
    threading.Thread(target=RANK.watch, args=(watch,), daemon=True, name="kit-watch").start()
    watch.send(RANK.hello("watch"))
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        for module in node.order["preload"]:
            importlib.import_module(module)
        RANK.all_here.wait()
        RANK.join()
    except Exception as error:  # noqa: BLE001 - any reason not to start is reported
        work.send({**RANK.hello("work"), "failed": rank_failure(error)})
        traceback.print_exc()
        os._exit(1)
    work.send(RANK.hello("work"))
    RANK.phase = "idle"
    return work
