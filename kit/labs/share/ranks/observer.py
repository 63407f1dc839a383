"""The rank that watches the others of its machine, where the notebook's process sees nothing. It is on the CPU."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.labs.rankside import Context, when_step_ends
from kit.labs.share.watch import Watch


class FarObserver:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def prepare(self, cycle: int) -> None: ...

    def watch(self, names: Mapping[str, str], machine: int, on_gpus: bool) -> str:
        """Returns the folder for the locks of this machine's devices. A loop that fails stops no watch, so the step's end does."""
        folder = Path(tempfile.mkdtemp(prefix="kit-devices-", dir=os.environ["KIT_FOLDER"]))
        when_step_ends(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        named = {int(pid): name for pid, name in names.items()}
        devices = self.ctx.config.devices_on(machine)
        self.watcher = Watch(named, folder, devices, place=machine, on_gpus=on_gpus)
        when_step_ends(self.watcher.end)
        return str(folder)

    def clock(self) -> float:
        return time.time()

    def start(self) -> None:
        self.watcher.start()

    def look(self) -> tuple[Any, ...]:
        seen = self.watcher.look()
        return [row.facts() for row in seen.rows], seen.changes, seen.owners

    def stop(self) -> tuple[Any, ...]:
        return self.watcher.stop()

    def end(self, cycle: int) -> None: ...
