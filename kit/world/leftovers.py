"""Processes and folders that earlier Worlds left behind, in spite of everything.

Every process that a World starts carries KIT_WORLD=<id>@<pid namespace>:<notebook's pid>:<its start time> in its environment, and so
do the processes that it starts. The World's folder has the same name and holds the session in which its agent and ranks run.

- The mark of another namespace, machine or boot is passed over: its notebook may be alive where this process cannot see it.
- The World is gone when its notebook (pid *and* start time) is.
- A process with the mark of a World that is gone is a leftover. `end` ends it only if it runs in that World's session: any other
  may have inherited the variable from a shell, so it is only listed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import select
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from kit import machine
from kit.errors import BadInput

SESSION = "session"  # the file in a World's folder
REMOVED_S = 2.0  # within which a folder is gone, unless the disk does not let it go


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A process with the mark of a World that lost its notebook. `sure`: it runs in that World's session."""

    world: str
    pid: int
    started: int
    command: str
    sure: bool

    def to_json(self) -> dict[str, object]:
        since = datetime.fromtimestamp(machine.started_at(self.started)).astimezone()
        return {**asdict(self), "since": f"{since:%Y-%m-%d %H:%M:%S}"}


def mark(world: str) -> str:
    """The value of KIT_WORLD for a World of this process, and the name of its folder."""
    return f"{world}@{machine.owner()}"


def is_dead(value: str) -> bool:
    world, _, owner = value.rpartition("@")
    return "/" not in world and machine.is_gone(owner)


def find_leftovers() -> list[Leftover]:
    leftovers = []
    for pid in machine.pids():
        with contextlib.suppress(OSError):  # it ended, or is another user's
            value, fields = machine.marked(pid), machine.stat_fields(pid)
            if pid == os.getpid() or value is None or fields is None or fields[0] in "ZX" or not is_dead(value):
                continue
            file = leftover_place() / value / SESSION
            sure = file.is_file() and file.read_text() == fields[3]
            started = int(fields[19])
            leftovers.append(
                Leftover(world=value, pid=pid, started=started, command=machine.command(pid)[:120], sure=sure)
            )
    return sorted(leftovers, key=lambda one: one.started)


def dead_folders(found: Iterable[Leftover]) -> list[Path]:
    """Folders of Worlds that lost their notebook, and to which none of these leftovers belongs; folders of Ray that a launch left."""
    used = {leftover.world for leftover in found}
    dead = [path for path in base().iterdir() if is_dead(path.name) and path.name not in used]
    places = {Path(tempfile.gettempdir()), Path("/tmp")}  # noqa: S108 - the owner of what is in it is checked
    return [*dead, *(path for place in places for path in place.glob("kit-ray-*") if is_unlocked(path))]


def is_unlocked(folder: Path) -> bool:
    """Whether it is this user's, and no process holds its lock: raylaunch.py does until its end, in whatever pid namespace."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(descriptor).st_uid == os.getuid()
        finally:
            os.close(descriptor)
    return False


def remove_folder(folder: Path) -> None:
    """Remove a World's folder. A process that has not ended yet may make a file in it meanwhile, so once is not enough."""
    deadline = time.monotonic() + REMOVED_S
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
        shutil.rmtree(folder, ignore_errors=True)


def end_leftovers(found: Sequence[Leftover]) -> list[Path]:
    """End leftover processes, those that surely are, and remove dead Worlds' folders; what was removed."""
    ended = [leftover for leftover in found if leftover.sure]
    for leftover in ended:
        kill_process(leftover.pid, leftover.started)
    deadline = time.monotonic() + 5
    while any(machine.alive(leftover.pid, leftover.started) for leftover in ended) and time.monotonic() < deadline:
        time.sleep(0.01)
    removed = dead_folders(find_leftovers())
    for folder in removed:
        remove_folder(folder)
    return removed


def carriers(fits: Callable[[str], bool]) -> list[int]:
    """Processes with a mark that fits. A zombie carries none."""
    return [pid for pid in machine.pids() if (value := machine.marked(pid)) is not None and fits(value)]


def end_carriers(fits: Callable[[str], bool], spare: int | None = None) -> None:
    """End all processes with a mark that fits, except `spare`: one may have left its rank's process group."""
    kill_all(lambda: [pid for pid in carriers(fits) if pid != spare])


def forget_shared(pids: Iterable[int]) -> None:
    """Remove the counters that torch keeps in /dev/shm for CUDA memory shared between processes: a killed process leaves them there."""
    for pid in pids:
        for file in Path("/dev/shm").glob(f"torch_{pid}_*"):  # noqa: S108 - named by processes of ours that are gone
            with contextlib.suppress(OSError):  # in a /dev/shm that containers share it may be another user's
                file.unlink()


def leftover_place() -> Path:
    root = Path(tempfile.gettempdir())
    if len(str(root)) > 50:  # a Unix socket's path ends at 107 bytes
        root = Path("/tmp")  # noqa: S108 - owner and mode of our folder in it are checked
    return root / f"kit-{os.getuid()}"


def base() -> Path:
    """The owner-only folder under which Worlds keep their folders."""
    folder = leftover_place()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077 or not stat.S_ISDIR(info.st_mode):
        raise BadInput(
            f"{folder} must be a folder of yours that only you can enter; remove it, or set TMPDIR to another place"
        )
    return folder


def end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# -- ending processes of this machine, and asking them for their stack: by the notebook here, by each node's agent there

# The signal on which a rank's interpreter writes its Python stacks, even inside a C call that holds the interpreter's lock.
STACK_SIGNAL = signal.SIGRTMAX - 3
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible kernel call",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "gone (not yet reaped)",
    "X": "gone",
}
# Where a rank's main thread enters the user's code; the thread that looks at it has frames of that file too.
ENTERED = re.compile(r'kit/world/rankside\.py", line \d+ in (answer|run_cell)$', re.MULTILINE)


def kill_process(pid: int, started: int, *, group: bool = False) -> bool:
    """SIGKILL the process (with its group), but only if it is still the one that started then."""
    if machine.start_time(pid) != started:
        return False
    with contextlib.suppress(ProcessLookupError):
        kill_one = os.killpg if group and os.getpgid(pid) == pid else os.kill
        kill_one(pid, signal.SIGKILL)
    return True


def interrupt_process(pid: int, started: int) -> None:
    if machine.start_time(pid) == started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


def wait_for_end(pid: int) -> None:
    """Of a process that need not be a child of this one."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        finally:
            os.close(descriptor)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def let_signals_end_forks() -> None:
    """From now on SIGTERM, SIGHUP and SIGQUIT end a process that this one forks, from its first instruction on.

    torchrun handles them with an exception, and a fork inherits the handler: a signal in a rank's first milliseconds would end it with
    status 1 or get lost. So they are blocked during the fork. Forks of forks are not affected. This is no hook of `os.register_at_fork`:
    what the handler of a signal that came meanwhile raises in a hook is lost, and with it the signal. torchrun does not know of a process
    during whose fork its handler raised; that ends with the World.
    """
    fork, ending = os.fork, (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

    def fork_blocked() -> int:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # may block and raise, for a signal that came just before
            pid = fork()
            if not pid:
                os.fork = fork
                for number in ending:
                    signal.signal(number, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    os.fork = fork_blocked


def adopt_orphans() -> None:
    """Ask the kernel to make this process the parent of every descendant that loses its own."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans() -> None:
    """Collect adopted children that have ended, but no child that this process forked itself."""
    group, session = os.getpgid(0), os.getsid(0)
    for pid in machine.children() or ():
        fields = machine.stat_fields(pid)
        if fields and fields[0] == "Z" and (int(fields[2]) not in {pid, group} or int(fields[3]) != session):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_all(living: Callable[[], list[int]]) -> None:
    """SIGKILL the processes that `living` finds until it finds none: one that dies may leave children or be replaced. At most 5 s."""
    deadline = time.monotonic() + 5.0
    while (survivors := living()) and time.monotonic() < deadline:
        for pid in survivors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def end_children() -> bool:
    """End the children of this process and those that they leave to it. False where the kernel lists none."""
    if machine.children() is None:
        return False

    def living() -> list[int]:
        """Trusted once two looks list the same: between list and state one may be handed on, and the list skips where one vanishes."""
        before: list[int] | None = None
        while (listed := machine.children() or []) != before:
            before, pids = listed, [(pid, machine.stat_fields(pid)) for pid in listed]
            # A zombie with threads left has not given up its children yet.
            if left := [pid for pid, fields in pids if fields and (fields[0] not in "ZX" or int(fields[17]) > 1)]:
                return left
        return []

    kill_all(living)
    reap_orphans()
    return True


def describe_leftover(pid: int, started: int, stack_file: Path, wait_s: float = 0.5) -> str:
    """Why a rank does not answer: its Python stack if the interpreter can still write one, else its state and the reason."""
    fields = machine.stat_fields(pid)
    if fields is None or int(fields[19]) != started or fields[0] in "ZX":
        return f"no stack: process {pid} is gone"
    if fields[0] in "Tt":
        return f"no stack: process {pid} is stopped (state {fields[0]}); `kill -CONT {pid}` lets it go on"
    before = stack_file.stat().st_size if stack_file.exists() else 0
    os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if stack_file.exists() and stack_file.stat().st_size > before:
            time.sleep(0.02)  # several short writes make up one dump
            return users_part(stack_file.read_text(errors="replace")[before:])
        time.sleep(0.005)
    state, place = STATES.get(fields[0], fields[0]), machine.waiting_place(pid)
    return f"no stack: process {pid} is {state}{f' in {place}' if place else ''} and does not take signals"


def users_part(dump: str) -> str:
    """Of what faulthandler wrote (innermost frame first, no source lines): the main thread's frames down to the kit's own."""
    block = next((block for block in dump.split("\n\n") if ENTERED.search(block)), dump)
    return "\n".join(itertools.takewhile(lambda line: not ENTERED.search(line), block.strip().splitlines()))
