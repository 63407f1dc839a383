"""What is still there of a tree of processes after its head was killed: found by the mark that all of them inherited."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from kit import machine

END_S = 10.0


def marked(fits: Callable[[str], bool]) -> list[int]:
    """Processes whose mark fits; one that has ended and waits to be reaped carries none."""
    return [pid for pid in machine.pids() if (value := machine.marked(pid)) is not None and fits(value)]


def seconds_until_gone(fits: Callable[[str], bool], known: list[int], since: float, at_most: float) -> float | None:
    """Seconds from `since` until no process has the mark; None if that took longer than `at_most`.

    The processes known before are looked at closely; all of /proc only when none of them is left."""
    while (now := time.perf_counter()) - since < at_most:
        if all(machine.marked(pid) is None for pid in known) and not marked(fits):
            return now - since
        time.sleep(0.001)
    return None


def end(fits: Callable[[str], bool]) -> None:
    """Kill what has the mark until there is nothing: what dies may be replaced by somebody who watched it."""
    deadline = time.monotonic() + END_S
    while (found := marked(fits)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
