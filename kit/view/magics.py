"""`%load_ext kit`: cells that run on the ranks.

%%ranks                 the cell on every rank; the last line's value is shown per rank
%%ranks 0,2-3           on some
%%ranks --timeout 5     with its own deadline, in seconds
%%ranks --background    start the cell and return to the prompt; several cells may run, on different ranks
%ranks wait             wait for the background cells and show their results
%ranks status           the ranks: pid, device, phase
%ranks stacks           what each rank is doing right now
%ranks push x y         give the ranks these variables of the notebook: numbers, text, lists, dicts with text as keys;
                        arrays and tuples become lists
%ranks pull x           make x in the notebook a list of the ranks' values of x
%ranks restart          start fresh ranks, even if the old ones hang
%ranks stop             close the World

They use the last World made in this kernel that is still open and has a name in the notebook, directly or through a lab.
If there is none, the first `%%ranks` starts one of two ranks. `%ranks status` also shows the agent that waits for the next World.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import traceback
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import IPython
from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from kit import errors
from kit.errors import BadInput, KitError
from kit.public import Pending, World, prepare_waiting, wait, waiting_line
from kit.view.progress import Progress, ranks_short, stacks_by_rank

OWN = tuple(f"{Path(inspect.getfile(module)).parent}/" for module in (errors, IPython))
ACTIONS = ("status", "stacks", "wait", "push", "pull", "restart", "stop")
DOTTED = re.compile(r"(?:([A-Za-z_][\w.]*)\.)?(\w*)$")
COMPLETION_S = 1.0
# Without running code of a property, which may take long or wait for other ranks.
NAMES_OF = (
    "(lambda value: [] if hasattr(type(value), '__get__') else dir(value))(__import__('functools').reduce("
    "__import__('inspect').getattr_static, {0}[1:], {{**vars(__import__('builtins')), **globals()}}[{0}[0]]))"
)


class MagicParser(argparse.ArgumentParser):
    """Raises one sentence instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; usage: {self.usage}")


def cell_parser() -> MagicParser:
    usage = "%%ranks [0,2-3] [--timeout SECONDS] [--background]"
    parser = MagicParser("%%ranks", usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", nargs="*")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--background", action="store_true")
    return parser


def parse_ranks(words: list[str], size: int) -> list[int]:
    """Parse 0,2-3; empty means all."""
    chosen: set[int] = set()
    for part in ",".join(words).replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first and not dash:
            continue
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"%%ranks accepts ranks like 0,2 or 0-3 and --timeout SECONDS, not {part!r}")
        low, high = int(first), int(last or first)
        if not low <= high < size:
            raise UsageError(f"%%ranks: this World has ranks 0 to {size - 1}, not {part!r}")
        chosen |= set(range(low, high + 1))
    return sorted(chosen) or list(range(size))


@magics_class
class RankMagics(Magics):
    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._names: dict[str, Any] = shell.user_ns
        self._seen: list[weakref.ref[World]] = []  # in the order in which they were made
        self._made: World | None = None  # keeps a World that a magic started alive without a name
        self._background: list[tuple[World, Pending]] = []

    def notice(self, *_: object) -> None:
        """Find the Worlds that have names in the notebook; called after every cell, so they are in order of creation."""
        module = sys.modules.get("kit.world.world")
        if module is None:  # no World was ever made
            return
        for value in list(self._names.values()):
            world = value if isinstance(value, module.World) else vars(value).get("world") if is_lab(value) else None
            if isinstance(world, module.World) and all(ref() is not world for ref in self._seen):
                self._seen.append(weakref.ref(world))

    def world(self) -> World | None:
        """The World made last and still open."""
        self.notice()
        self._seen = [ref for ref in self._seen if (world := ref()) is not None and world.state != "closed"]
        return self._seen[-1]() if self._seen else None

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> object:
        """Run a cell on the ranks or manage them; see kit.view.magics."""
        if cell is not None:
            return self._run(line, cell)
        action, *words_after = line.split() or ["status"]
        if action not in ACTIONS:
            raise UsageError(
                f"%ranks accepts {', '.join(ACTIONS)}, not {action!r}; put code for the ranks into a %%ranks cell"
            )
        if action in {"push", "pull"}:
            self._move(action, words_after)
            return None
        if words_after:
            raise UsageError(f"%ranks {action} accepts no further arguments, not {' '.join(words_after)!r}")
        return self._wait() if action == "wait" else self._act(action)

    def _run(self, line: str, cell: str) -> RankValues | None:
        wanted = cell_parser().parse_args(line.split())
        world = self.world() or self._make()
        chosen = parse_ranks(wanted.ranks, world.ranks)
        before, world.observer = world.observer, Progress()
        try:
            if wanted.background:
                pending = world.submit_code(cell, ranks=chosen, timeout_s=wanted.timeout)
                self._background.append((world, pending))
                print(f"running in the background on {ranks_short(chosen)}; %ranks wait shows the result")
                return None
            texts = world.cell(cell, ranks=chosen, timeout_s=wanted.timeout)
        except SyntaxError as error:
            raise BadInput("".join(traceback.format_exception_only(error)).strip()) from None
        except KeyboardInterrupt:
            raise CellStopped(AFTER_INTERRUPT[world.state]) from None
        finally:
            world.observer = before
        return shown_values(dict(zip(chosen, texts, strict=True)))

    def _move(self, action: str, names: list[str]) -> None:
        world = self.world()
        if not names or not all(name.isidentifier() for name in names):
            raise UsageError(f"%ranks {action} accepts names of variables, such as `%ranks {action} x`")
        if world is None:
            raise UsageError(f"%ranks {action}: no World is open; a %%ranks cell starts one")
        for name in names:
            if action == "pull":
                if not all(world.eval(f"{name!r} in globals()")):
                    raise UsageError(f"%ranks pull: the ranks have no variable {name!r}")
                self._names[name] = world.eval(f"{name}.tolist() if hasattr({name}, 'tolist') else {name}")
            elif name not in self._names:
                raise UsageError(f"%ranks push: the notebook has no variable {name!r}")
            else:
                world.run(f"{name} = __import__('json').loads({as_json(name, self._names[name])!r})")

    def complete(self, context: CompletionContext) -> dict[str, Any]:
        """Names on rank 0 in a %%ranks cell, while it is idle."""
        in_cell = context.full_text.startswith("%%ranks") and context.cursor_line > 0
        before, world = context.text_until_cursor, self.world() if in_cell else None
        if world is None or world.state != "idle":
            return {"completions": []}
        match = DOTTED.search(before)
        owner, start = match.groups() if match else (None, "")
        try:
            code = NAMES_OF.format(owner.split(".")) if owner else "list(globals())"
            (names,) = world.eval(code, ranks=[0], timeout_s=COMPLETION_S)
        except (KitError, SyntaxError):  # no such name there, or rank 0 has become busy
            return {"completions": []}
        prefix = f"{owner}." if owner else ""
        hidden = start.startswith("_")
        shown = [name for name in sorted(names) if name.startswith(start) and (hidden or not name.startswith("_"))]
        return {"completions": [SimpleCompletion(prefix + name) for name in shown], "matched_fragment": prefix + start}

    def _wait(self) -> RankValues | None:
        """Wait for all background cells; the first error is raised once all have ended."""
        waiting, self._background = self._background, []
        if not waiting:
            print("no cell is running in the background")
            return None
        shown: dict[int, str | None] = {}
        failed: list[Exception] = []
        try:
            wait([pending for _, pending in waiting], first=False)
            for _, pending in waiting:
                try:
                    shown |= dict(zip(pending.ranks, pending.result(), strict=True))
                except KitError as error:
                    failed.append(error)
        except KeyboardInterrupt:
            raise CellStopped(AFTER_INTERRUPT[waiting[-1][0].state]) from None
        if failed:
            raise failed[0]
        return shown_values(dict(sorted(shown.items())))

    def _make(self) -> World:
        """Start a World of two ranks and name it `world` in the notebook if that name is free."""
        self._made = made = World(2)
        self._seen.append(weakref.ref(made))
        taken = self._names.get("world")
        named = taken is None or getattr(taken, "state", "") == "closed"
        if named:
            self._names["world"] = made
        print(f"started a World of 2 ranks on {made.device}" + ("; its name is `world`" if named else ""))
        return made

    def _act(self, action: str) -> World | None:
        world = self.world()
        if action == "status" and (line := waiting_line()):
            print(line)
        if world is None:
            if action in {"stacks", "restart"}:
                raise UsageError(f"%ranks {action}: no World is open; a %%ranks cell starts one")
            print("no World is open; a %%ranks cell starts one")
            return None
        if action == "stop":
            world.close()
            print(f"the World of {world.ranks} ranks is closed")
            return None
        if action == "stacks":
            print(stacks_by_rank(world.stacks()))
            return None
        if action == "restart":
            world.restart()
        return world


AFTER_INTERRUPT = {
    "idle": "the ranks stopped too and are usable",
    "busy": "some ranks have not answered yet; %ranks stacks shows them, %ranks restart starts fresh ones",
    "dead": "some ranks could not stop, so all were ended; %ranks restart starts fresh ones",
    "closed": "the World is closed",
}


def as_json(name: str, value: Any) -> str:
    plain = value.tolist() if hasattr(value, "tolist") else value
    try:
        text = json.dumps(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"%ranks push sends numbers, text, lists, dicts and arrays; {name}: {error}") from None
    if (key := other_key(plain)) is not None:
        raise BadInput(f"%ranks push sends dicts with text as keys; {name} has the key {key[0]!r}")
    return text


def other_key(value: Any) -> tuple[Any] | None:
    """A key in it that is not text, which JSON would turn into text; None if there is none."""
    if isinstance(value, dict):
        keys = ((key,) for key in value if not isinstance(key, str))
        return next(keys, None) or other_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next(filter(None, map(other_key, value)), None)
    return None


def is_lab(value: object) -> bool:
    return type(value).__module__.startswith("kit.labs") and hasattr(value, "__dict__")


# -- what a cell shows ----------------------------------------------------------------------------------------------------


class RankValues(dict[int, str | None]):
    """The shown values by rank; None if a rank's last line had none."""

    def __repr__(self) -> str:
        same: dict[str, list[int]] = {}
        for rank, text in self.items():
            if text is not None:
                same.setdefault(text, []).append(rank)
        marks = {text: f"[{ranks_short(ranks)}] " for text, ranks in same.items()}
        width = max(map(len, marks.values()), default=0)
        indent = "\n" + " " * width  # aligns the rows of a tensor
        return "\n".join(f"{marks[text]:<{width}}{text.replace(chr(10), indent)}" for text in same)


def shown_values(texts: dict[int, str | None]) -> RankValues | None:
    return RankValues(texts) if any(text is not None for text in texts.values()) else None


class CellStopped(KeyboardInterrupt):
    """An interrupt that ended a `%%ranks` cell; its message is the state of the World."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31mKeyboardInterrupt\x1b[0m: {self}"]


def render(error: KitError) -> list[str]:
    head, *traceback_lines = (str(error) or type(error).__name__).split("\n")
    lines = [f"\x1b[31m{type(error).__name__}\x1b[0m: {head}", *traceback_lines]
    place = asked_at(error.__traceback__)
    return [place, *lines] if place else lines


def show_interrupt(
    shell: Any, kind: type[BaseException], error: Any, stack: TracebackType, tb_offset: int | None = None
) -> None:
    """Show an interrupt of the kit's code by the line of the cell that called it, any other one as IPython does."""
    if any(frame.filename.startswith(OWN[0]) for frame in traceback.extract_tb(stack)):
        lines = [asked_at(stack), f"\x1b[31mKeyboardInterrupt\x1b[0m: {str(error) or 'the call was interrupted'}"]
        error._render_traceback_ = lambda: [line for line in lines if line]
    shell.showtraceback((kind, error, stack), tb_offset=tb_offset)


def asked_at(stack: TracebackType | None) -> str:
    """The line of user code that made the failing call; empty for a magic, because its line is visible."""
    calls = traceback.extract_tb(stack)
    # Below the kit's first frame the standard library may follow, as in a wait.
    first = next((at for at, frame in enumerate(calls) if frame.filename.startswith(OWN[0])), len(calls))
    frames = [frame for frame in calls[:first] if not frame.filename.startswith(OWN)]
    if not frames or not frames[-1].line or frames[-1].line.startswith("get_ipython().run_"):
        return ""
    frame = frames[-1]
    cell = "ipykernel_" in frame.filename or frame.filename.startswith("<")
    place = f"line {frame.lineno} of the cell" if cell else f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return f"{place}: {frame.line}"


def load_extension(ipython: Any) -> None:
    magics = RankMagics(ipython)
    ipython.register_magics(magics)
    ipython.events.register("post_run_cell", magics.notice)

    @context_matcher()  # type: ignore[untyped-decorator]
    def names_on_ranks(context: CompletionContext) -> dict[str, Any]:
        return magics.complete(context)

    ipython.Completer.custom_matchers.append(names_on_ranks)
    prepare_waiting()
    if not ipython.custom_exceptions:  # else a person has their own display of exceptions
        ipython.set_custom_exc((KeyboardInterrupt,), show_interrupt)
    # kit.errors does not depend on notebooks.
    KitError._render_traceback_ = render  # type: ignore[attr-defined]
