"""Running one request on a rank: code, an expression or a function; its value or its failure becomes the answer."""

from __future__ import annotations

import ast
import importlib
import linecache
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kit.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.world.channel import Message
    from kit.world.rankside import Rank

SHOWN = 10_000  # characters of a shown value: a notebook cell, not a dump
VICTIM = ("gloo/transport", "NCCL error", "ncclRemoteError", "Connection closed by peer", "Connection reset by peer")


def answer(rank: Rank, request: Message) -> Message:
    """The value, or what was raised; `sys.exit` is told here and done by the caller."""
    name = f"<ranks {request['id']}>"
    try:
        if request["do"] == "run":
            return {"value": run(rank.names, request["code"], name)}
        if request["do"] == "eval":
            register_source(name, request["code"])
            return {"value": eval(compile(request["code"], name, "eval"), rank.names)}  # noqa: S307 - running a person's code is the purpose
        return {"value": function(request["target"])(**request["with"])}
    except SystemExit as error:
        return {**failure(error), "exiting": True}
    except BaseException as error:  # noqa: BLE001 - every failure of the person's code is an answer
        return failure(error)


def run(names: dict[str, Any], code: str, name: str) -> str | None:
    """Execute a cell; if its last line is an expression, its repr."""
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    register_source(name, code)
    exec(compile(tree, name, "exec"), names)  # noqa: S102 - running a person's code is the purpose
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), names)  # noqa: S307
    if value is None or code.rstrip().endswith(";"):
        return None
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def register_source(name: str, code: str) -> None:
    """Let tracebacks show the lines of a cell."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)


def function(target: str) -> Callable[..., Any]:
    """`package.module:attr.attr`"""
    module, _, attributes = target.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    if not callable(found):
        raise TypeError(f"{target} is not callable")
    return cast("Callable[..., Any]", found)


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
    str(ast.__file__),
    "<frozen importlib",
)
