"""What `import kit` offers, put together from the rooms: a World with a place for its logs, labs, and runs from disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import world as room
from kit.labs.discover import checks_of, find
from kit.labs.lab import Lab
from kit.results import Run, runs_dir
from kit.results.run import find_run, unique
from kit.view.progress import Progress
from kit.world.pending import Pending, wait

if TYPE_CHECKING:
    import pandas as pd

    from kit.view.panel import Panel
    from kit.world.pending import Observer
    from kit.world.several import Worlds

__all__ = ["Pending", "Run", "World", "lab", "load", "panel", "run", "runs", "wait"]


class World(room.World):
    """`ranks` live torchrun ranks; see docs/world.md. Without `logs`, logs are kept in the runs folder if anything was printed."""

    def __init__(
        self,
        ranks: int = 2,
        *,
        device: str = "auto",
        timeout_s: float = 60.0,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        nodes: int = 1,
        endpoint: str = "",
        logs: str | os.PathLike[str] | None = None,
        start_timeout_s: float | None = None,
        observer: Observer | None = None,
        devices: Sequence[int] = (),
    ) -> None:
        self._own = None if logs is not None else runs_dir() / "worlds" / unique()
        try:
            super().__init__(
                ranks,
                device=device,
                timeout_s=timeout_s,
                python=python,
                env=env,
                preload=preload,
                nodes=nodes,
                endpoint=endpoint,
                logs=logs if self._own is None else self._own / "logs",
                start_timeout_s=start_timeout_s,
                observer=observer or Progress(),
                devices=devices,
            )
        except BaseException:
            self._tidy("*.log")
            raise

    def close(self) -> None:
        super().close()
        self._tidy("rank*.log")  # torchrun's log may show the order in which it ended the ranks

    def _tidy(self, worth_keeping: str) -> None:
        """Remove the logs' folder where nothing worth keeping was printed."""
        if self._own is not None and not any(file.stat().st_size for file in self._own.glob(f"logs/{worth_keeping}")):
            shutil.rmtree(self._own, ignore_errors=True)


def prepare(name: str, config: Mapping[str, Any], *, out: str | os.PathLike[str] | None = None, **options: Any) -> Lab:
    """Make a lab whose config is checked and whose folder is there; its ranks start with its first step. `options` are Lab's."""
    return Lab(
        find(name),
        config,
        out=None if out is None else Path(out),
        observe=lambda calls: Progress(total=calls),
        plotter=plot,
        panel=panel_of,
        **options,
    )


def lab(
    name: str,
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    tolerances: Mapping[str, float] | None = None,
    world: room.World | Worlds | None = None,
    **config: Any,
) -> Lab:
    """Start a lab to step by hand. `config` sets its fields, `fault` switches a known bug on, `out` is the run's folder.

    `world` is one that is there already: its ranks are used and left alive.
    """
    return prepare(name, config, fault=fault, out=out, tolerances=tolerances, world=world).start()


def run(
    name: str,
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    tolerances: Mapping[str, float] | None = None,
    world: room.World | Worlds | None = None,
    **config: Any,
) -> Run:
    """Run a lab from its first phase to its verdict; on the ranks of `world`, if one is given."""
    with prepare(name, config, fault=fault, out=out, tolerances=tolerances, world=world) as made:
        return made.run()


def panel(name: str, *, fault: str | None = None, out: str | os.PathLike[str] | None = None, **config: Any) -> Panel:
    """A panel of a lab: its settings, buttons, a strip of phases and ranks, and the run. Ranks start with its Start."""
    from kit.view.panel import make

    return make(find(name), config, fault=fault, out=out, plotter=plot)


def panel_of(lab: Lab) -> Panel:
    """The panel that `lab.panel()` returns, in the current state of the lab."""
    from kit.view.panel import adopt

    return adopt(lab, plotter=plot)


def load(path: str | os.PathLike[str]) -> Run:
    """A run from disk, complete or partial: its folder, or its id where it is among the runs."""
    return Run(find_run(Path(path)), checks=checks_of, plotter=plot)


def runs(
    folder: str | os.PathLike[str] | None = None,
    *,
    lab: str | None = None,
    fault: str | None = None,
    status: str | None = None,
    verdict: str | None = None,
    **config: Any,
) -> pd.DataFrame:
    """The runs as a table, newest first: those of a lab, with a fault (`fault=""`: without one), a status, a verdict
    (failed, passed, not judged), or a setting (`tp=2`). `folder` is the runs folder unless it is given.

    The column `set` has the settings that are not the lab's defaults, `dir` what `kit.load` takes.
    """
    from kit.labs.discover import table

    where = runs_dir() if folder is None else Path(folder)
    return table(where, lab=lab, fault=fault, status=status, verdict=verdict, config=config)


def plot(run: Run, name: str = "overview", **options: Any) -> object:
    from kit.view.named import plot as draw

    return draw(run, name, **options)
