"""Reading a rank's Python stack: for people, and for the one question whether it waits in a collective."""

from __future__ import annotations

import itertools
import linecache
import re
import traceback
from types import FrameType

# Modules in whose functions a rank waits for other ranks, and calls on work handles and groups that do so from C.
WAITING_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn",
    "kit.sync.link",
)
WAITING_CALL = re.compile(
    r"\.(wait|barrier|monitored_barrier|all_?reduce\w*|all_?gather\w*|reduce_scatter\w*|broadcast|send|recv)\($"
)
EXECUTE_FILE = "kit/world/execute.py"
EXECUTE = "kit.world.execute"  # what it runs is the user's


def stack_of(frame: FrameType | None) -> str:
    """The stack from the user's code on."""
    if frame is None:
        return ""
    users = []
    for inner, line in traceback.walk_stack(frame):
        if inner.f_globals.get("__name__") == EXECUTE:
            break
        users.append((inner, line))
    return "".join(traceback.StackSummary.extract(users[::-1]).format())


def users_part(dump: str) -> str:
    """Of what faulthandler wrote (innermost frame first, no source lines): the main thread's frames down to the kit's own."""
    block = next((block for block in dump.split("\n\n") if EXECUTE_FILE in block), dump)
    return "\n".join(itertools.takewhile(lambda line: EXECUTE_FILE not in line, block.strip().splitlines()))


def in_collective(frame: FrameType | None) -> bool:
    """Does the innermost Python frame wait for other ranks?"""
    depth = 0
    inner = frame
    while inner is not None and depth < 3:  # a decorator or two may stand between
        if inner.f_globals.get("__name__", "").startswith(WAITING_MODULES):
            return True
        inner = inner.f_back
        depth += 1
    return frame is not None and WAITING_CALL.search(current_call(frame)) is not None


def current_call(frame: FrameType) -> str:
    """The source of the call that the frame is in, up to its opening bracket: `work.wait(`."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, end_line, column, end = positions
    if line is None or column is None or end is None:
        return ""
    source = linecache.getline(frame.f_code.co_filename, line)
    text = source.encode()[column : end if end_line == line else None].decode(errors="replace")
    head = balanced_head(text)
    return head + "(" if head else ""


def balanced_head(call: str) -> str:
    """`f(a)(b, c)` -> `f(a)`: what is called by the outermost, last call of an expression."""
    depth = 0
    for index in range(len(call) - 1, -1, -1):
        depth += (call[index] == ")") - (call[index] == "(")
        if depth == 0 and call[index] == "(":
            return call[:index]
    return ""
