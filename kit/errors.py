"""The kit's errors, worded so that a person can act on them. Every error the kit raises on purpose is a `KitError`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any


class KitError(Exception):
    """Base of all errors raised by the kit."""


LONG_VALUE = re.compile(r"(?<!\w)'[^']{300,}'(?!\w)|\S{300,}")  # a quoted value, or one without spaces


class BadInput(KitError, ValueError):  # noqa: N818 - the contract's name
    """Bad input, refused before any rank starts. One sentence: what was wrong, what is allowed. Long values are shortened."""

    def __init__(self, message: object = "") -> None:
        super().__init__(LONG_VALUE.sub(lambda value: f"{value[0][:80]}... ({len(value[0])} characters)", str(message)))


def refuse_if(wrong: object, sentence: str) -> None:
    if wrong:
        raise BadInput(sentence)


class RehearsedError(KitError, RuntimeError):
    """An error that a lab raises on purpose, to see what becomes of it."""


def hint(name: str, allowed: Iterable[str]) -> str:
    """Return the closest allowed name and all allowed names, for a BadInput about an unknown name."""
    names = sorted(set(allowed))
    return f"{suggestion(name, names)}allowed are: {', '.join(names) or 'none'}"


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """The closest allowed name as a question; empty if none is close."""
    import difflib  # ranks never need it

    names = sorted(set(allowed))
    near = difflib.get_close_matches(str(name), names, n=1)
    near = near or [longer for longer in names if str(name) in longer.split("_")]
    return f"did you mean {near[0]!r}? " if near else ""


class Cancelled(KitError):  # noqa: N818 - the contract's name
    """A call in flight was cancelled or interrupted; its ranks were asked to stop."""


@dataclass(eq=False, repr=False)
class RankProblem(KitError):  # noqa: N818 - as the contract names those
    """Base of RankError, RankDied and RankTimeout."""

    message: str
    _: KW_ONLY
    phase: str

    def __post_init__(self) -> None:
        super().__init__(self.message)


@dataclass(eq=False, repr=False, kw_only=True)
class RankError(RankProblem):
    """Code raised on a rank. `rank` is the first that failed; `ranks` are all that failed with the same traceback.

    `victim`: the error only reports that another rank is gone or late. `at`: when the first failure arrived, by time.monotonic().
    `refused`: the sentence of a `BadInput`, if one was raised.
    """

    rank: int
    traceback: str
    ranks: tuple[int, ...] = ()
    victim: bool = False
    at: float | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranks = self.ranks or (self.rank,)


@dataclass(eq=False, repr=False, kw_only=True)
class RankDied(RankProblem):
    """A rank's process is gone. `signal` is the signal's name ("SIGKILL"), or None if the process exited with `exitcode`."""

    rank: int
    signal: str | None = None
    exitcode: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class RankTimeout(RankProblem):
    """A deadline passed. `ranks` did not answer; `culprits` among them are those the others were waiting for."""

    ranks: tuple[int, ...]
    culprits: tuple[int, ...]
    stacks: dict[int, str]


def ending(status: int | None) -> dict[str, Any]:
    """Return a process's exit status as keyword arguments of RankDied."""
    if status is not None and status < 0:
        return {"signal": signal_name(-status)}
    return {"exitcode": status}


def how_ended(status: int) -> str:
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"


def signal_name(number: int) -> str:
    import signal  # slow enough to notice in `import kit`

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
