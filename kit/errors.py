"""What can go wrong, in words a person can act on. Every error the kit raises on purpose is a `KitError`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any


class KitError(Exception):
    """Base of all errors raised by the kit."""


class BadInput(KitError, ValueError):  # noqa: N818 - the contract's name
    """Something a person asked for cannot be; raised before any rank starts. One sentence: what was wrong, what is allowed."""


def hint(name: str, allowed: Iterable[str]) -> str:
    """What BadInput says of a name that is not there: the closest one, and all that are allowed."""
    import difflib  # not for ranks

    names = sorted(set(allowed))
    near = difflib.get_close_matches(str(name), names, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"allowed are: {', '.join(names) or 'none'}"


class Cancelled(KitError):  # noqa: N818 - the contract's name
    """A call in flight was cancelled or interrupted; its ranks were asked to stop."""


@dataclass(eq=False, repr=False)
class RankError(KitError):
    """Code raised on a rank. `rank` is the first that failed; `ranks` are all that failed with the same traceback.

    `victim`: it only tells that another rank is gone or late. `at`: when the first failure was heard of, by time.monotonic().
    `refused`: the sentence of a `BadInput`, where that is what was raised.
    """

    message: str
    _: KW_ONLY
    rank: int
    phase: str
    traceback: str
    ranks: tuple[int, ...] = ()
    victim: bool = False
    at: float | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.ranks = self.ranks or (self.rank,)


@dataclass(eq=False, repr=False)
class RankDied(KitError):  # noqa: N818 - the contract's name
    """A rank's process is gone. `signal` is its name ("SIGKILL"), or None when it exited by itself; then `exitcode` tells."""

    message: str
    _: KW_ONLY
    rank: int
    phase: str
    signal: str | None = None
    exitcode: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)


@dataclass(eq=False, repr=False)
class RankTimeout(KitError):  # noqa: N818 - the contract's name
    """A deadline passed. `ranks` did not answer; `culprits` among them are those the others were waiting for."""

    message: str
    _: KW_ONLY
    phase: str
    ranks: tuple[int, ...]
    culprits: tuple[int, ...]
    stacks: dict[int, str]

    def __post_init__(self) -> None:
        super().__init__(self.message)


def ending(status: int | None) -> dict[str, Any]:
    """A process's status as RankDied's keywords."""
    if status is not None and status < 0:
        return {"signal": signal_name(-status)}
    return {"exitcode": status}


def signal_name(number: int) -> str:
    import signal  # slow enough to notice in `import kit`

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
