"""Progress while ranks work: their lines marked by rank, and a bar after two seconds.

A bar names the phase, who has answered and who has not. In a terminal it is the last line, rewritten in place; in
Jupyter it is one display, updated. Outside both there is no bar, since a log keeps every line.
Everything happens in the thread of the call: there is no timer, so a bar moves only while ranks are waited for.
"""

from __future__ import annotations

import html
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from kit.results.records import STEP_LINE

AFTER_S = 2.0  # work that is done sooner needs no bar
EVERY_S = 0.25  # a page that is redrawn more often only costs
WIDTH = 20


def ranks_short(ranks: Sequence[int]) -> str:
    """0-3, 5: consecutive ranks as a range."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)


class Line:
    """Where a bar is drawn: nowhere, where nobody watches."""

    def draw(self, fraction: float, text: str) -> None: ...
    def clear(self) -> None: ...


class Terminal(Line):
    """The last line of a terminal, on stderr: stdout, to which the ranks' lines go, may be a pipe."""

    def draw(self, fraction: float, text: str) -> None:
        full = round(fraction * WIDTH)
        line = f"{'█' * full}{'░' * (WIDTH - full)} {text}"
        sys.stderr.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


class Notebook(Line):
    """One display in the output of the cell. It stays with its last text, since a display cannot be removed."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, fraction: float, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text, "text/html": bar_html(fraction, text)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)


def bar_html(fraction: float, text: str) -> str:
    words = html.escape(text, quote=True)
    bar = f'<progress value="{fraction:.3f}" max="1" aria-label="{words}"></progress>' if fraction < 1 else ""
    return f'<div class="kit-progress" style="display:flex;gap:.8em;align-items:center">{bar}<span>{words}</span></div>'


def watched() -> Line:
    if "ipykernel" in sys.modules:
        from IPython import get_ipython

        if getattr(get_ipython(), "kernel", None) is not None:
            return Notebook()
    return Terminal() if sys.stderr.isatty() else Line()


class Progress:
    """An observer of a World's calls. `total` calls make the bar full; with 1 it fills with the ranks that answered."""

    def __init__(self, *, total: int = 1, line: Line | None = None, after_s: float = AFTER_S) -> None:
        self._line = line or watched()
        self._total = max(1, total)
        self._after_s = after_s
        self._began: float | None = None
        self._drew = 0.0
        self._calls = 0
        self._phase = ""
        self._ranks: list[int] = []
        self._answered: list[int] = []
        self._recorded = 0

    def started(self, phase: str, ranks: Sequence[int]) -> None:
        if self._began is None:
            self._began = time.monotonic()
        self._phase, self._ranks, self._answered, self._recorded = phase, list(ranks), [], 0
        self._draw()

    def output(self, rank: int, text: str) -> None:
        lines = [line for line in text.split("\n") if not line.startswith(STEP_LINE)]
        if lines:
            self._line.clear()
            sys.stdout.write("".join(f"[{rank}] {line}\n" for line in lines))
            sys.stdout.flush()

    def tick(self, answered: Sequence[int]) -> None:
        self._answered = list(answered)
        self._draw()

    def recorded(self, count: int) -> None:
        self._recorded = count

    def ended(self) -> None:
        self._calls += 1
        if self._drew:
            self._answered, self._ranks = [], []
            self._draw(now=True)
        self._line.clear()

    def _draw(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        elapsed = clock - (self._began or clock)
        if elapsed < self._after_s or (clock - self._drew < EVERY_S and not now):
            return
        self._drew = clock
        share = len(self._answered) / len(self._ranks) if self._ranks else 0.0
        fraction = min(1.0, (self._calls + share) / self._total)
        self._line.draw(fraction, " · ".join(filter(None, self._words(elapsed))))

    def _words(self, elapsed: float) -> list[str]:
        silent = [rank for rank in self._ranks if rank not in self._answered]
        call = min(self._calls + bool(self._ranks), self._total)
        return [
            self._phase,
            f"{call} of {self._total}" if self._total > 1 else "",
            f"answered: {ranks_short(self._answered)}" if self._answered else "",
            f"waiting for: {ranks_short(silent)}" if silent else "",
            f"{self._recorded} records so far" if self._recorded else "",
            f"{elapsed:.0f} s",
        ]
