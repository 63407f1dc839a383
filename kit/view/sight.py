"""A run as the plots by name need it, read once: a plot that is drawn again for another limit reads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.view import offload, split, sync
from kit.view.steps import Steps, steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from kit.results import Run, Verdict

LABS = {"offload": offload, "split": split, "sync": sync}


@dataclass(frozen=True, slots=True)
class Sight:
    """A run's records and steps, as they were when it was looked at. `own` is the lab whose own drawings fit it, if any."""

    run: Run
    config: Mapping[str, Any]
    frame: pd.DataFrame
    seen: Steps
    own: str

    @classmethod
    def of(cls, run: Run) -> Sight:
        seen = steps(run)
        lab = LABS.get(run.lab)
        return cls(run, run.config, run.frame(), seen, run.lab if lab is not None and lab.tells(seen) else "")

    def verdict(self, tolerances: Mapping[str, float] | None = None) -> Verdict:
        """The checks' answers; a run without checks here has the ones that it stored, and takes no tolerances."""
        return self.run.verdict(**(tolerances or {}))
