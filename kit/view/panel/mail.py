"""How what happens in the controller's thread reaches the model: in the kernel's own thread, where its views are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

LOGGER = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


class Mail:
    """Changes of the model in their order. `post` has them made elsewhere; whoever calls `deliver` makes them here and now."""

    def __init__(self, post: Post | None = None) -> None:
        self._post = post or here()
        self._changes: deque[Callable[[], None]] = deque()
        self.lock = threading.RLock()

    def send(self, change: Callable[[], None]) -> None:
        self._changes.append(change)
        self._post(self.deliver)

    def deliver(self) -> None:
        """Make all changes that were sent."""
        with self.lock:
            while self._changes:
                try:
                    self._changes.popleft()()
                except Exception:  # a view that fails must not keep the others, or the ranks, from going on
                    LOGGER.exception("a view of the panel failed")


def here() -> Post:
    """How to reach the thread that this is called in: by its event loop, as in a kernel; without one there is nothing to go by."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return lambda call: call()

    def post(call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(call)

    return post
