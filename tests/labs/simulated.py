"""Runs of labs on simulated ranks, without any process, and their verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.labs.definition import Definition, Fault, as_settings, made
from kit.labs.lab import Quiet
from kit.results import Row, Verdict
from kit.results.records import Recording
from kit.results.rules import judge
from kit.results.run import to_frame
from kit.target import load_callable, replaced
from kit.world.world import Printer
from tests.labs.parts import failed, passed, why

__all__ = ["Notebook", "failed", "passed", "run", "why"]


class Notebook(Recording):
    """The part of a Drive that a simulated run uses: its config, the fault's scene, and where rows go."""

    def __init__(self, config: Any, fault: Fault | None, folder: Path) -> None:
        self.config = config
        self.scene = fault.scene if fault else {}
        self.phase = ""
        self.rows: list[Row] = []
        self.folder = folder
        self.quiet = Quiet(Printer())

    def _send(self, row: Row) -> None:
        self.append([row])

    def append(self, rows: Sequence[Row]) -> None:
        self.rows += [dataclasses.replace(row, phase=self.phase) for row in rows]


def run(lab: Definition, fault: Fault | None, folder: Path = Path(), **config: Any) -> tuple[Verdict, str]:
    """Return the verdict of a simulated run and the error that ended it. With a fault, missing records are suspect.

    Own code runs in no random worlds unless there are to be some.
    """
    drive = Notebook(made(lab.config, {"simulated": True, "worlds": 0, **config}), fault, folder)
    error = ""
    try:
        for step in lab.plan(drive.config):
            drive.phase = step.phase
            patches = [fault.patch_in(phase, "notebook") for phase in ("", step.phase)] if fault else []
            with replaced({place: wrong for patch in patches for place, wrong in patch.items()}):
                load_callable(step.driver)(drive)
    except KitError as raised:
        error = str(raised)
    frame = to_frame(dataclasses.replace(row, run="test", lab=lab.name, cycle=1) for row in drive.rows)
    suspect = f"fault {fault.name!r}" if fault and not error else ""  # a broken run is judged as far as its records go
    return judge(frame, as_settings(drive.config), lab.load_rules(), suspect=suspect), error
