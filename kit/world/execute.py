"""Running one request on a rank: code, an expression or a function; its value or its failure becomes the answer."""

from __future__ import annotations

import ast
import functools
import importlib
import linecache
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import target
from kit.errors import BadInput

if TYPE_CHECKING:
    from types import CodeType

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
