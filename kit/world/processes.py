"""Ending processes of this machine, and asking them for their stack.

Used by the notebook for its own machine and by each node's agent for the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kit.machine import children, start_time, stat_fields, waiting_place
from kit.world.stacks import users_part

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


def kill(pid: int, started: int, *, group: bool = False) -> bool:
    """SIGKILL the process (with its group), but only if it is still the one that started then."""
    if start_time(pid) != started:
        return False
    with contextlib.suppress(ProcessLookupError):
        if group and os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    return True


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Ask the kernel to make this process the parent of every descendant that loses its own."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans() -> None:
    """Collect adopted children that have ended, but no child that this process forked itself."""
    group, session = os.getpgid(0), os.getsid(0)
    for pid in children() or ():
        fields = stat_fields(pid)
        if fields and fields[0] == "Z" and (int(fields[2]) not in {pid, group} or int(fields[3]) != session):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end(living: Callable[[], list[int]]) -> None:
    """SIGKILL the processes that `living` finds until it finds none: one that dies may leave children or be replaced. At most 5 s."""
    deadline = time.monotonic() + 5.0
    while (found := living()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def end_children() -> bool:
    """End the children of this process and those that they leave to it. False where the kernel lists none."""
    if children() is None:
        return False

    def living() -> list[int]:
        """Trusted once two looks list the same: between list and state one may be handed on, and the list skips where one vanishes."""
        before: list[int] | None = None
        while (listed := children() or []) != before:
            before, found = listed, [(pid, stat_fields(pid)) for pid in listed]
            # A zombie with threads left has not given up its children yet.
            if alive := [pid for pid, fields in found if fields and (fields[0] not in "ZX" or int(fields[17]) > 1)]:
                return alive
        return []

    end(living)
    reap_orphans()
    return True


def describe(pid: int, started: int, stack_file: Path, wait_s: float = 0.5) -> str:
    """Why a rank does not answer: its Python stack if the interpreter can still write one, else its state and the reason."""
    fields = stat_fields(pid)
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
    state, place = STATES.get(fields[0], fields[0]), waiting_place(pid)
    return f"no stack: process {pid} is {state}{f' in {place}' if place else ''} and does not take signals"
