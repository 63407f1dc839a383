"""Drives a lab for its panel, in one thread that lives as long as the panel: ranks end with the thread that started them.

Its buttons' methods return at once. What happens on the ranks reaches the model in the kernel's own thread, a few times a second at
most, so that views need no locks and the kernel stays free.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kit.errors import BadInput
from kit.labs.definition import role_names
from kit.labs.lab import Lab
from kit.view.panel.model import PanelModel
from kit.view.progress import Watch, failure_of

EVERY_S = 0.2  # between two updates of what only ticks
POLL_S = 0.02
CLOSE_S = 10.0

LOGGER = logging.getLogger(__name__)


class Controller:
    """`start`, `step`, `run_all`, `stop`, `restart`, `close`, as a panel's buttons. `wait` is for scripts."""

    def __init__(self, model: PanelModel, *, lab: Lab | None = None, out: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self._mail = Mail()
        self._out = None if out is None else Path(out)
        self._given = lab  # its ranks were not started here
        self._lab: Lab | None = None
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._busy = 0
        self._over = True  # there is no lab, or it has come to its end and the model knows
        self._stopping = threading.Event()
        self._closed = False
        self._watch = Watch(self._stopping, self._flush, EVERY_S)
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"kit-panel-{model.definition.name}")
        if lab is not None:
            self._adopt(lab)

    # -- what the buttons do --------------------------------------------------------------------------------------------

    def _order(self, name: str) -> None:
        if self._allowed(name):
            self._stopping.clear()
            goes_on = self.model.state == "ready" and name in {"step", "run"}
            with self.model.hold_trait_notifications():
                self.model.failure = None
                self.model.said = ""
                self.model.state = "running" if goes_on else "starting"
            self._send(name)

    start = partialmethod(_order, "start")
    step = partialmethod(_order, "step")
    run_all = partialmethod(_order, "run")
    restart = partialmethod(_order, "restart")

    def stop(self) -> None:
        """End the ranks, whatever they do. What was measured stays."""
        if self._allowed("stop"):
            self._stopping.set()
            self.model.state = "stopping"
            self.model.said = "stopping: ranks are asked to stop, and ended if they do not"
            self._send("stop")  # for ranks that wait for orders; where a call is under way its next tick ends it

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        if self._thread.is_alive():
            self._orders.put("close")
            self._thread.join(CLOSE_S)
        elif self._lab is not None:
            self._lab.close()
        self._mail.deliver()

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until nothing is under way. The model is up to date then, in a kernel's cell too."""
        deadline = time.monotonic() + timeout_s
        while self._busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the panel is still {self.model.state} after {timeout_s:g} s")
            self._mail.deliver()
            time.sleep(POLL_S)
        self._mail.deliver()

    # -- in the caller's thread ---------------------------------------------------------------------------------------------

    def _allowed(self, name: str) -> bool:
        model = self.model
        if name in model.can and not self._closed:
            return True
        problem = next(iter(model.problems.values()), "")
        why = "the panel is closed" if self._closed else problem or f"the lab is {model.state}"
        model.said = f"{name} is not possible now: {why}"
        return False

    def _send(self, name: str) -> None:
        with self._mail.lock:
            self._busy += 1
        if not self._thread.is_alive():
            self._thread.start()
        self._orders.put(name)

    def _adopt(self, lab: Lab) -> None:
        self._lab = lab
        ended = end_of(lab)
        state = ended or ("ready" if lab.started else "idle")
        self._watch.take(lab)
        self._over = bool(ended)
        self.model.state = state
        if lab.started:
            self._mail.send(lambda: self.model.follow(lab.dir))
        self._flush()
        self._mail.deliver()

    # -- in the controller's thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            name = self._orders.get()
            if name == "close":
                break
            try:
                self._do(name)
            except BadInput as error:
                self._end("idle", self.model.refuse, str(error))
            except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this run and is shown; the panel stays
                self._failed(error)
            self._flush()
            self._mail.send(self._rested)
        if self._lab is not None:
            self._lab.close()

    def _rested(self) -> None:
        self._busy -= 1

    def _do(self, name: str) -> None:
        if not self._over and self._lab is not None and self._caught_up(self._lab):
            return
        if name == "stop":
            if not self._over:
                raise KeyboardInterrupt
            return
        self._watch.begin(all_of_it=name == "run")
        lab = self._lab
        if lab is None or self._over or name in {"start", "restart"} or not lab.started:
            lab = self._make()
        before, lab.observe = lab.observe, lambda _: self._watch
        try:
            self._go(lab, name)
        finally:
            lab.observe = before  # a step by hand is watched as ever

    def _go(self, lab: Lab, name: str) -> None:
        if not lab.started:
            lab.start()
            self._mail.send(lambda: self.model.follow(lab.dir))
        for _ in range({"step": 1, "run": self._watch.left}.get(name, 0)):
            self._check_stop()
            self._mail.send(self._running)
            began = time.monotonic()
            self._watch.stepped(lab.step(), time.monotonic() - began)
        self._check_stop()
        if self._watch.left:
            self._end("ready", self._say, self._watch.words())
            return
        self._mail.send(self._running)
        run = lab.run()
        if lab is not self._given:
            lab.close()
        self._end("finished", self.model.finished, run)

    def _caught_up(self, lab: Lab) -> bool:
        """Take over what was done by hand since the panel's last order; true if the lab has ended."""
        if lab.done != self._watch.done:  # by hand
            self._watch.take(lab)
        if lab.judged is not None:
            self._end("finished", self.model.finished, lab.judged)
        elif lab.error:
            self._end(end_of(lab), self._say, lab.error)
        return self._over

    def _make(self) -> Lab:
        """A new lab of the settings as they are; a lab that has its ranks already when it is adopted stays as it is."""
        model, old = self.model, self._lab
        if old is not None:
            same = (old.given, old.fault) == (model.given, model.fault)
            if same and not old.started and not old.error:
                return old
            self._lab = None
            old.close()
        made = self._lab = Lab(
            model.definition,
            model.given,
            fault=model.fault,
            out=self._folder(),
            tolerances=model.tolerances,
            plotter=model.plotter,
        )
        self._watch.take(made)
        self._over = False
        self._flush()
        return made

    def _folder(self) -> Path | None:
        """The folder that was asked for; later runs of the panel go beside it."""
        if self._out is None:
            return None
        beside = (self._out.with_name(f"{self._out.name}-{number}") for number in itertools.count(2))
        return next(folder for folder in itertools.chain([self._out], beside) if not (folder / "run.json").exists())

    def _failed(self, error: BaseException) -> None:
        watch = self._watch
        done = f"{watch.done} of {watch.done + watch.left} phases were done, and what they measured is kept"
        failure = failure_of(error, watch.stacks, watch.phase, done)
        if self._lab is not None:
            self._lab.close()
        watch.failed(failure)
        self._mail.send(lambda: setattr(self.model, "failure", failure))
        self._end("stopped" if failure.kind == "stopped" else "failed", self._say, failure.message)

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _say(self, text: str) -> None:
        self.model.said = text

    def _running(self) -> None:
        if self.model.state != "stopping":
            self.model.state = "running"

    def _end(self, state: str, then: Callable[..., None], *what: Any) -> None:
        def change() -> None:
            with self.model.hold_trait_notifications():
                self.model.state = state
                then(*what)
                self.model.judge()

        self._over = state != "ready"
        self._watch.rest()
        self._flush()
        self._mail.send(change)

    def _flush(self) -> None:
        phases, progress, log = self._watch.seen()
        roles = {} if self._lab is None else role_names(self._lab.roles)
        grew, self._watch.grew = self._watch.grew, False

        def change() -> None:
            with self.model.hold_trait_notifications():
                self.model.size = len(phases[0].ranks) if phases else 0
                self.model.roles = roles
                self.model.phases, self.model.progress, self.model.log = phases, progress, log
                if grew:
                    self.model.grown()

        self._mail.send(change)


def end_of(lab: Lab) -> str:
    """How a lab that was driven by hand ended; empty where it has not."""
    if lab.judged is not None:
        return "finished"
    return "" if not lab.error else "stopped" if lab.error.startswith("stopped") else "failed"


class Mail:
    """Changes of the model, in order, made in the kernel's own thread. `deliver` makes them now."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # a kernel's; without one, changes are made at once
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self._changes: deque[Callable[[], None]] = deque()
        self.lock = threading.RLock()

    def send(self, change: Callable[[], None]) -> None:
        self._changes.append(change)
        if self._loop is None:
            self.deliver()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        with self.lock:
            while self._changes:
                try:
                    self._changes.popleft()()
                except Exception:  # a view that fails must not keep the others, or the ranks, from going on
                    LOGGER.exception("a view of the panel failed")
