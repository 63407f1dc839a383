"""How an error of the kit looks in a notebook: its own words, and the person's line that led to it.

An error carries all there is to say about the ranks. The notebook side's stack is the kit's own plumbing, so it is
left out, but for the innermost frame that is not the kit's. IPython asks an exception for `_render_traceback_`.
"""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from types import TracebackType

import IPython

import kit.errors
from kit.errors import KitError

OWN = tuple(f"{Path(inspect.getfile(module)).parent}/" for module in (kit.errors, IPython))


class Stopped(KeyboardInterrupt):
    """An interrupt that ended a `%%ranks` cell; what became of the World is its message."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31mKeyboardInterrupt\x1b[0m: {self}"]


def render(error: KitError) -> list[str]:
    """The lines that IPython shows."""
    head, *rest = (str(error) or type(error).__name__).split("\n")
    lines = [f"\x1b[31m{type(error).__name__}\x1b[0m: {head}", *rest]
    where = asked_at(error.__traceback__)
    return [where, *lines] if where else lines


def asked_at(stack: TracebackType | None) -> str:
    """Where the person's code asked for what failed; nothing for a magic, whose line is in plain sight."""
    frames = [f for f in traceback.extract_tb(stack) if not f.filename.startswith(OWN)]
    if not frames or not frames[-1].line or frames[-1].line.startswith("get_ipython().run_"):
        return ""
    frame = frames[-1]
    cell = "ipykernel_" in frame.filename or frame.filename.startswith("<")
    place = f"line {frame.lineno} of the cell" if cell else f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return f"{place}: {frame.line}"


def install() -> None:
    """Let IPython show errors of the kit that way. kit.errors itself knows nothing of notebooks."""
    KitError._render_traceback_ = render  # type: ignore[attr-defined]
