"""Records of a bench, made without ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from kit.labs.bench import Bench, Samples
from kit.results import Row, to_frame
from kit.results.records import NOTEBOOK, Recording


class Kept(Recording):
    """A driver's interface that keeps what is recorded."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.rows: list[Row] = []
        self.config = SimpleNamespace(**{"device": "cpu", **config})
        self.folder, self.phase, self.quiet = folder, "part", None
        self.about: dict[str, Any] = {}
        self.tell = self.about.update

    def _send(self, row: Row) -> None:
        self.rows.append(row)

    def frame(self) -> pd.DataFrame:
        about: dict[str, Any] = {
            "run": "r",
            "lab": "bench-x",
            "cycle": 0,
            "phase": self.phase,
            "rank": NOTEBOOK,
            "role": "",
        }
        return to_frame(Row.placed(row.facts(), **about) for row in self.rows)


def frame_of(measured: Iterable[Samples], folder: Path = Path("/tmp/none")) -> pd.DataFrame:
    drive: Any = Kept(folder)
    keep = SimpleNamespace(drive=drive, sharing=False)
    for samples in measured:
        Bench.keep(keep, samples)  # type: ignore[arg-type]
    return drive.frame()  # type: ignore[no-any-return]
