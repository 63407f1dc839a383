"""`%load_ext kit`: cells that run on the ranks.

%%ranks                 the cell on every rank; the last line's value is shown per rank
%%ranks 0,2-3           on some
%%ranks --timeout 5     with a deadline of its own, in seconds
%ranks status           the ranks: pid, device, phase
%ranks stacks           what each rank is doing right now
%ranks restart          fresh ranks, whatever the old ones do
%ranks stop             close the World
%ranks start 4 --device cpu

They work on the World that was made last in this kernel, by a name of the notebook or by a lab with such a name, and is
still open. With none, the first `%%ranks` starts one of two ranks.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from kit.errors import BadInput
from kit.view import errors, tables
from kit.view.progress import Progress
from kit.view.values import RankValues

if TYPE_CHECKING:
    from kit.world import World

ACTIONS = ("status", "stacks", "restart", "stop", "start")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and does not exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; allowed is {self.usage}")


def seconds(text: str) -> float:
    """A type for argparse, whose message names it."""
    return float(text)


def cell_parser() -> Parser:
    parser = Parser("%%ranks", usage="%%ranks [0,2-3] [--timeout SECONDS]", add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", nargs="*")
    parser.add_argument("--timeout", type=seconds)
    return parser


def start_parser() -> Parser:
    usage = "%ranks start [RANKS] [--device auto|cpu|cuda] [--timeout SECONDS]"
    parser = Parser("%ranks start", usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", nargs="?", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout", type=seconds, default=60.0)
    return parser


def parse_ranks(words: list[str], size: int) -> list[int]:
    """0,2-3 as numbers; nothing means all."""
    chosen: set[int] = set()
    for part in ",".join(words).replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first and not dash:
            continue
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"%%ranks takes ranks like 0,2 or 0-3 and --timeout SECONDS, not {part!r}")
        low, high = int(first), int(last or first)
        if not low <= high < size:
            raise UsageError(f"%%ranks: this World has ranks 0 to {size - 1}, not {part!r}")
        chosen |= set(range(low, high + 1))
    return sorted(chosen) or list(range(size))


@magics_class
class RankMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._names: dict[str, Any] = shell.user_ns
        self._seen: list[weakref.ref[World]] = []  # in the order in which they were made
        self._made: World | None = None  # one that a magic started lives even where it has no name

    def notice(self, *_: object) -> None:
        """Look which Worlds the notebook has names for; called after every cell, so that the order is that of making."""
        module = sys.modules.get("kit.world.world")
        if module is None:  # no World was ever made
            return
        for value in list(self._names.values()):
            found = value if isinstance(value, module.World) else vars(value).get("world") if is_lab(value) else None
            if isinstance(found, module.World) and all(ref() is not found for ref in self._seen):
                self._seen.append(weakref.ref(found))

    def world(self) -> World | None:
        """The World made last and still open."""
        self.notice()
        self._seen = [ref for ref in self._seen if (world := ref()) is not None and world.state != "closed"]
        return self._seen[-1]() if self._seen else None

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> object:
        """Run a cell on the ranks, or look after them; `%%ranks` and `%ranks status` are explained in kit.view.magics."""
        if cell is not None:
            return self._run(line, cell)
        action, *rest = line.split() or ["status"]
        if action not in ACTIONS:
            raise UsageError(
                f"%ranks takes {', '.join(ACTIONS)}, not {action!r}; code for the ranks goes into a %%ranks cell"
            )
        if rest and action != "start":
            raise UsageError(f"%ranks {action} takes nothing more, not {' '.join(rest)!r}")
        return self._start(rest) if action == "start" else self._act(action)

    def _run(self, line: str, cell: str) -> RankValues | None:
        wanted = cell_parser().parse_args(line.split())
        world = self.world() or self._make(2)
        chosen = parse_ranks(wanted.ranks, world.ranks)
        before, world.observer = world.observer, Progress()
        try:
            texts = world.cell(cell, ranks=chosen, timeout_s=wanted.timeout)
        except SyntaxError as error:
            raise BadInput("".join(traceback.format_exception_only(error)).strip()) from None
        except KeyboardInterrupt:
            raise errors.Stopped(AFTER_INTERRUPT[world.state]) from None
        finally:
            world.observer = before
        return RankValues(chosen, texts) if any(text is not None for text in texts) else None

    def _make(self, ranks: int, **options: Any) -> World:
        """Make a World; the notebook gets the name `world` for it where that takes nothing away."""
        import kit

        self._made = made = kit.World(ranks, **options)
        self._seen.append(weakref.ref(made))
        taken = self._names.get("world")
        named = taken is None or getattr(taken, "state", "") == "closed"
        if named:
            self._names["world"] = made
        size = f"{ranks} rank{'s' * (ranks > 1)}"
        print(f"started a World of {size} on {made.device}" + ("; its name is `world`" if named else ""))
        return made

    def _start(self, words: list[str]) -> World:
        wanted = start_parser().parse_args(words)
        return self._make(wanted.ranks, device=wanted.device, timeout_s=wanted.timeout)

    def _act(self, action: str) -> World | None:
        world = self.world()
        if world is None:
            if action in {"stacks", "restart"}:
                raise UsageError(f"%ranks {action}: no World is open; %ranks start or a %%ranks cell starts one")
            print("no World is open; %ranks start or a %%ranks cell starts one")
            return None
        if action == "stop":
            world.close()
            print(f"the World of {world.ranks} ranks is closed")
            return None
        if action == "stacks":
            print("\n".join(f"rank {rank}:\n{stack.rstrip()}" for rank, stack in world.stacks().items()))
            return None
        if action == "restart":
            world.restart()
        return world


AFTER_INTERRUPT = {
    "idle": "the ranks stopped too and can be used",
    "busy": "some ranks have not answered yet; %ranks stacks shows them, %ranks restart starts fresh ones",
    "dead": "some ranks could not stop, so all were ended; %ranks restart starts fresh ones",
    "closed": "the World is closed",
}


def is_lab(value: object) -> bool:
    return type(value).__module__.startswith("kit.labs") and hasattr(value, "__dict__")


def load(ipython: Any) -> None:
    """What `%load_ext kit` does."""
    magics = RankMagics(ipython)
    ipython.register_magics(magics)
    ipython.events.register("post_run_cell", magics.notice)
    errors.install()
    tables.install(ipython)
