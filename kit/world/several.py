"""Several Worlds with one face, as a trainer and its inference servers are: each a torchrun job and a process group of its own.

A rank's number counts through all of them, in calls, answers, errors and logs. A call runs on all at the same time, in a thread for
each World; what ranks print and who has answered is shown in the caller's thread. When a rank dies, all Worlds end, as one World does.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any, Self

from kit.errors import BadInput, KitError, RankDied, RankError, RankTimeout
from kit.world.asked import check_call, check_chosen, check_layout, check_seconds
from kit.world.calls import TICK_S, Interrupted, Observer
from kit.world.capacity import check_ranks
from kit.world.members import Part
from kit.world.silence import ranks_word
from kit.world.world import TIMEOUT_S, Printer, World, tell_the_prompt

GRACE_S = 3.0  # after a failure in one World: how long the others are waited for

News = SimpleQueue[tuple[int, str] | None]  # what a rank printed; None: a World is through with its share


class Worlds:
    """Live ranks in as many Worlds as there are sizes; the part of World's face that a lab needs."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        names: Sequence[str] = (),
        device: str = "auto",
        timeout_s: float = TIMEOUT_S,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        logs: str | os.PathLike[str] | None = None,
        start_timeout_s: float | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not sizes:
            raise BadInput("Worlds need at least one size, a number of ranks")
        for size in sizes:
            check_layout(size, 1, "")
        check_ranks(sum(sizes))
        self.names = tuple(names) or tuple(f"World {n}" for n in range(len(sizes)))
        self.observer: Observer = observer or Printer()
        self.timeout_s = timeout_s
        self.worlds: list[World] = []
        self._lock = threading.RLock()
        try:
            for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
                made = World(
                    size,
                    device=device,
                    timeout_s=timeout_s,
                    python=python,
                    env=env,
                    preload=preload,
                    logs=logs,
                    start_timeout_s=start_timeout_s,
                    observer=self.observer,
                    part=Part(first, sum(sizes)),
                )
                self.worlds.append(made)
            for world in self.worlds:  # while one launches, the agents of the others load torch
                world.launch()
        except BaseException:
            self.close()
            raise

    def call(
        self,
        target: str,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        phase: str | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Call `package.module:function` on every rank of every World with JSON keyword arguments; its JSON result per rank."""
        phase = phase or check_call(target, arguments)
        seconds = self.timeout_s if timeout_s is None else timeout_s
        check_seconds("timeout_s", seconds)
        chosen = check_chosen(ranks, range(self.ranks))
        parts = [(world, mine) for world in self.worlds if (mine := [n for n in chosen if n in world.numbers])]
        news: News = SimpleQueue()

        def share(world: World, mine: list[int]) -> Share:
            return Share(
                world, lambda: world.call(target, ranks=mine, timeout_s=seconds, phase=phase, **arguments), news
            )

        with self._lock:
            try:
                for world, mine in parts:  # none is asked before all can be
                    world.ready(mine)
                shares = [share(*part) for part in parts]
                self.observer.started(phase, chosen)
                try:
                    together(shares, news, self.observer)
                except Interrupted:
                    dead = next((world.dead for world in self.worlds if world.dead), "")
                    tell_the_prompt(f"Worlds ended: {dead}")
                    raise
                finally:
                    self.observer.ended()
                if any(one.error is not None for one in shares):
                    raise failure(shares, seconds)
            finally:
                self._end_together()
        return [value for one in shares for value in one.values]

    def restart(self) -> None:
        """End all ranks, whatever they do, and start fresh ones."""
        with self._lock:
            for world in self.worlds:
                world.restart()

    def close(self) -> None:
        """End all ranks of all Worlds and wait until they are gone. May be called again."""
        for world in self.worlds:
            world.close()

    def stacks(self) -> dict[int, str]:
        """What each rank is doing right now."""
        return {rank: stack for world in self.worlds for rank, stack in world.stacks().items()}

    def status(self) -> list[dict[str, Any]]:
        """A row per rank, as World's."""
        return [row for world in self.worlds for row in world.status()]

    @property
    def pids(self) -> list[int]:
        return [pid for world in self.worlds for pid in world.pids]

    @property
    def ranks(self) -> int:
        return sum(world.ranks for world in self.worlds)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(world.ranks for world in self.worlds)

    @property
    def device(self) -> str:
        return self.worlds[0].device

    @property
    def state(self) -> str:
        """idle, busy, dead or closed: of the Worlds' states the last in this order."""
        return max((world.state for world in self.worlds), key=("idle", "busy", "dead", "closed").index)

    def _end_together(self) -> None:
        """Where one World is dead the others end too: what they were doing they did with it."""
        why = next((world.dead for world in self.worlds if world.dead), "")
        for world in self.worlds if why else ():
            if not world.dead:
                world.die(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rows = "; ".join(f"{name}: {world!r}" for name, world in zip(self.names, self.worlds, strict=True))
        return f"<Worlds of {' and '.join(map(str, self.sizes))} ranks, {self.state}: {rows}>"


class Stopped(KitError):  # noqa: N818 - nobody outside sees it
    """A call that is given up because another World failed; its ranks stay busy."""


class Share(threading.Thread):
    """One World's share of a call. It is that World's observer too: the call asks it often, and so can be stopped."""

    def __init__(self, world: World, call: Callable[[], list[Any]], news: News) -> None:
        super().__init__(daemon=True, name="kit-world-call")
        self.values: list[Any] = []
        self.error: BaseException | None = None
        self.at = math.inf
        self.answered: Sequence[int] = ()
        self.world = world
        self._call = call
        self._news = news
        self._stops: deque[BaseException] = deque()

    def run(self) -> None:
        before, self.world.observer = self.world.observer, self
        try:
            self.values = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for all
            self.error = error
            heard = error.at if isinstance(error, RankError) else None
            self.at = heard or time.monotonic()
        finally:
            self.world.observer = before
            self._news.put(None)

    def stop(self, error: BaseException) -> None:
        """Raise it in the World's call, which does with it what it would do in the caller's own thread."""
        self._stops.append(error)

    def started(self, phase: str, ranks: Sequence[int]) -> None: ...

    def output(self, rank: int, text: str) -> None:
        self._news.put((rank, text))

    def tick(self, answered: Sequence[int]) -> None:
        self.answered = list(answered)
        if self._stops:
            raise self._stops.popleft()

    def ended(self) -> None: ...


def together(shares: Sequence[Share], news: News, observer: Observer) -> None:
    """Run all shares to their ends. An interrupt goes to every World and is raised when all have dealt with it."""
    raised: BaseException | None = None
    patience = math.inf
    begun = False
    while not begun or any(share.is_alive() for share in shares):
        try:
            if not begun:
                begun = True
                for share in shares:
                    share.start()
            show(news, observer, TICK_S)
            observer.tick([rank for share in shares for rank in share.answered])
            # Who was interrupted has a time of its own to stop in.
            if raised is None and patience == math.inf and any(share.error is not None for share in shares):
                patience = time.monotonic() + GRACE_S
            if time.monotonic() > patience:
                stop_all(shares, Stopped)
        except KeyboardInterrupt as error:
            raised, patience = error, math.inf
            stop_all(shares, KeyboardInterrupt)
        except BaseException as error:  # noqa: BLE001 - an observer's failure must not leave threads behind
            raised = raised or error
            stop_all(shares, Stopped)
    show(news, observer, 0)
    if raised is not None:
        raise next((share.error for share in shares if isinstance(share.error, Interrupted)), raised)


def stop_all(shares: Sequence[Share], error: type[BaseException]) -> None:
    for share in shares:
        if share.is_alive():
            share.stop(error())


def show(news: News, observer: Observer, seconds: float) -> None:
    """Hand on what ranks printed: wait so long for the first of it, and not for more."""
    try:
        one = news.get(timeout=seconds) if seconds else news.get_nowait()
        while True:
            if one is not None:
                observer.output(*one)
            one = news.get_nowait()
    except Empty:
        return


def failure(shares: Sequence[Share], seconds: float) -> BaseException:
    """The error to raise: of the worst kind the one that came first. What else went wrong is a note on it."""
    failed = sorted((share for share in shares if share.error is not None), key=lambda one: (kind(one.error), one.at))
    errors = [share.error for share in failed if share.error is not None]
    if all(isinstance(error, RankTimeout) for error in errors) and len(errors) > 1:
        return timeout([error for error in errors if isinstance(error, RankTimeout)], seconds)
    for share in failed[1:]:
        if isinstance(share.error, Stopped):
            busy = [row["rank"] for row in share.world.status() if row["state"] == "busy"]
            errors[0].add_note(f"{ranks_word(busy)} did not answer within {GRACE_S:g} s of it and are left as they are")
        else:
            errors[0].add_note(f"after it: {str(share.error).partition(chr(10))[0]}")
    return errors[0]


def kind(error: BaseException | None) -> int:
    """The order of blame, as in one World: who died, who raised, who only tells of another's end, who is silent."""
    if isinstance(error, RankError):
        return 2 if error.victim else 1
    if isinstance(error, RankTimeout):
        return 3
    return 4 if isinstance(error, Stopped) else 0 if isinstance(error, RankDied) else 1


def timeout(errors: Sequence[RankTimeout], seconds: float) -> RankTimeout:
    """One of several. Ranks of one World that only wait may wait for a culprit of another."""
    ranks = sorted(rank for error in errors for rank in error.ranks)
    culprits = tuple(sorted(rank for error in errors for rank in error.culprits))
    waiting = [rank for rank in ranks if rank not in culprits]
    if waiting and culprits:
        why = f"{ranks_word(waiting)} waiting for {ranks_word(culprits)}"
    elif culprits:
        why = "none of them waits for others: busy, stopped or gone"
    else:
        why = "each waits for others, so they wait for different things: compare the stacks"
    bodies = [str(error).partition("\n")[2] for error in errors]
    return RankTimeout(
        "\n".join([f"no answer from {ranks_word(ranks)} within {seconds:g} s; {why}", *bodies]),
        phase=errors[0].phase,
        ranks=tuple(ranks),
        culprits=culprits,
        stacks={rank: stack for error in errors for rank, stack in error.stacks.items()},
    )
