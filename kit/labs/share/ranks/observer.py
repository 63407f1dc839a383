"""The rank that watches the others of its machine, where the notebook's process sees nothing."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.labs.rankside import Context
from kit.labs.share.watch import Watch


class FarObserver:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.folder: Path | None = None

    def prepare(self, cycle: int) -> None: ...

    def watch(self, names: Mapping[str, str], machine: int) -> str:
        """Returns the folder for the locks of this machine's devices."""
        self.folder = Path(tempfile.mkdtemp(prefix="kit-devices-"))
        devices, on_gpus = self.ctx.config.devices_on(machine), self.ctx.device.type == "cuda"
        named = {int(pid): name for pid, name in names.items()}
        self.watcher = Watch(named, self.folder, devices, place=machine, on_gpus=on_gpus)
        return str(self.folder)

    def clock(self) -> float:
        return time.time()

    def start(self) -> None:
        self.watcher.start()

    def look(self) -> tuple[Any, ...]:
        seen = self.watcher.look()
        return [row.facts() for row in seen.rows], seen.changes, seen.owners

    def stop(self) -> tuple[Any, ...]:
        samples = self.watcher.stop()
        self._forget()
        return samples

    def end(self, cycle: int) -> None:  # noqa: ARG002 - as for every role
        self._forget()  # a loop that failed stopped no watch

    def _forget(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
