"""The tab in which a panel explores the code under test: random worlds, and the first failure, made small, as the run that is shown."""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets as widgets

from kit.exploration import SEEDS, Exploration, chosen_code, explore
from kit.labs.discover import find_fault
from kit.view import look
from kit.view.look import Tab
from kit.view.model import BUSY, OVER, Mail, PanelModel

ASIDE = "Runs the controller, sampler, desk or planner that the settings name in random worlds, without ranks."


class Abandoned(Exception):  # noqa: N818 - not an error
    """A person ended the exploration."""


class ExploreTab(Tab):
    """Worlds run in processes of their own; a thread waits for them, so that the kernel stays responsive."""

    def __init__(self, model: PanelModel) -> None:
        super().__init__(model)
        self.mail = Mail()
        self.thread: threading.Thread | None = None
        self.ends = threading.Event()
        self.seeds = look.labelled_control(
            widgets.BoundedIntText, "Worlds", "how many random worlds to run", value=SEEDS, min=1, max=10**6
        )
        self.go = look.button("Explore", "random", "run the code under test in random worlds", self.start)
        self.end = look.button("End", "stop", "end the exploration", self.ends.set, disabled=True)
        self.widget = widgets.VBox(
            [
                widgets.HTML(f"<p>{look.span_html('faint', ASIDE)}</p>"),
                look.flex_box(self.seeds, self.go, self.end),
                self.notice,
            ]
        )
        model.observe(self._changed, "state")

    def _changed(self, _: Any = None) -> None:
        self.go.disabled = self.thread is not None or self.model.state in BUSY
        self.end.disabled = self.thread is None

    def start(self) -> None:
        self.ends.clear()
        settings = chosen_code(self.model.definition, self.model.values)
        self.thread = threading.Thread(target=self._explore, args=(self.seeds.value, settings), daemon=True)
        self._changed()
        self._say("exploring ...")
        self.thread.start()

    def _explore(self, seeds: int, settings: dict[str, Any]) -> None:
        definition, fault = self.model.definition, self.model.fault
        bug = find_fault(definition, fault)

        def tell(worlds: int, total: int, failed: int) -> None:
            if self.ends.is_set():
                raise Abandoned
            words = f"{worlds} of {total} worlds{f', {failed} failed' if failed else ''}"
            self.mail.send(lambda: self._say(words))

        try:
            on_this_side = fault if bug is not None and bug.where == "notebook" else None
            done = explore(definition.name, seeds, fault=on_this_side, tell=tell, **settings)
            self.mail.send(lambda: self._show(done))
        except Abandoned:
            self.mail.send(lambda: self._say("ended"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the panel survives and says it
            words = str(error)
            self.mail.send(lambda: self._say(words, bad=True))
        self.mail.send(self._rest)

    def _rest(self) -> None:
        self.thread = None
        self._changed()

    def _show(self, done: Exploration) -> None:
        self._say(done.sentence(), bad=not done.passed)
        if done.failure is not None and (self.model.state == "idle" or self.model.state in OVER):
            self.model.show(self.model.open(done.failure.dir))
