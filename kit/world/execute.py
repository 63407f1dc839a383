"""Running one request on a rank: code, an expression or a function becomes a value or a failure. And reading the rank's Python stack."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import linecache
import re
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from kit import target
from kit.errors import BadInput
from kit.world.channel import Message

KEPT = 2_000  # cells whose source tracebacks can show
SHOWN = 10_000  # characters of a shown value: a notebook cell, not a dump
VICTIM = ("gloo/transport", "NCCL error", "ncclRemoteError", "Connection closed by peer", "Connection reset by peer")


def answer(names: dict[str, Any], request: Message) -> Message:
    """The value, or what was raised; `sys.exit` is reported here and carried out by the caller."""
    try:
        if request["do"] == "run":
            return {"value": run(names, request["code"], request["cell"])}
        if request["do"] == "eval":
            expression = compiled(request["code"], "eval", request["cell"])[1]
            assert expression is not None
            return {"value": eval(expression, names)}  # noqa: S307 - running a person's code is the purpose
        return {"value": target.load_callable(request["target"])(**request["with"])}
    except SystemExit as error:
        return {**failure(error), "exiting": True}
    except BaseException as error:  # noqa: BLE001 - every failure of the person's code is an answer
        return failure(error)


def run(names: dict[str, Any], code: str, cell: int) -> str | None:
    """Execute a cell; if its last line is an expression, its repr."""
    body, last = compiled(code, "exec", cell)
    assert body is not None
    exec(body, names)  # noqa: S102 - running a person's code is the purpose
    if last is None:
        return None
    value = eval(last, names)  # noqa: S307
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


def failure(error: BaseException) -> Message:
    """An exception as JSON, with the kit's own frames left out of the traceback."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(OWN):
        shown = shown.tb_next
    words = text_of(error)
    return {
        "error": f"{type(error).__name__}: {words}".strip().removesuffix(":"),
        "traceback": "".join(traceback.format_exception(type(error), error, shown)),
        # Errors that only tell that another rank is gone or late: never the cause when there is another error.
        "victim": type(error).__name__.startswith(("Dist", "Peer")) or any(mark in words for mark in VICTIM),
        "refused": words if isinstance(error, BadInput) else "",
        "exitcode": exit_code(error) if isinstance(error, SystemExit) else None,
    }


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 - a person's own __str__ may raise anything
        return f"(its text raises {type(worse).__name__})"


def exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


OWN = (
    __file__,
    str(Path(__file__).with_name("rankside.py")),
    str(importlib.__file__),
    str(target.__file__),
    str(ast.__file__),
    "<frozen importlib",
)

# -- a rank's Python stack: for people, and for the one question whether it waits in a collective ----------------------

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
# Where the main thread enters the user's code; the thread that looks at it has frames of this file too.
ENTERED = re.compile(r'kit/world/execute\.py", line \d+ in (answer|run)$', re.MULTILINE)
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
    block = next((block for block in dump.split("\n\n") if ENTERED.search(block)), dump)
    return "\n".join(itertools.takewhile(lambda line: not ENTERED.search(line), block.strip().splitlines()))


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
