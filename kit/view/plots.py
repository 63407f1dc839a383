"""Pictures of runs: `plot_run(run)` for any run, a lab's or one that a Recorder wrote in a script of one's own."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from kit.errors import BadInput
from kit.view import drawings, offload, split, sync
from kit.view.steps import Steps, steps
from kit.view.style import Theme, theme

if TYPE_CHECKING:
    from kit.results import Run, Verdict

FORMATS = (".png", ".svg", ".pdf")
COUNTS = {"groups": "Process groups", "fds": "Open files", "threads": "Threads"}


class LabPicture(Protocol):
    """What a module offers that draws the runs of one lab in its own way."""

    def tells(self, seen: Steps) -> bool:
        """Whether the run has what this picture shows; else it is drawn as any run."""

    def words(self, run: Run, seen: Steps) -> list[str]:
        """For the heading: what was run, and how often."""

    def draw(self, picture: Figure, run: Run, seen: Steps, verdict: Verdict, look: Theme) -> None: ...


PICTURES: Mapping[str, LabPicture] = {"offload": offload, "split": split, "sync": sync}


class Picture(Figure):
    """A figure that a notebook shows by itself, whatever its matplotlib settings."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write a .png, .svg or .pdf."""
        path = Path(path)
        if path.suffix not in FORMATS:
            raise BadInput(f"a picture is saved as {', '.join(FORMATS)}, not {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = {"Date": None} if path.suffix == ".svg" else None  # the same run makes the same file
        with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "kit"}):
            self._settle()
            self.savefig(path, dpi=110, metadata=stamp)
        return path

    def _settle(self) -> None:
        """Lay out once and round: the solver's last digits differ from one time to the next, and names in the file with them."""
        self.draw_without_rendering()
        self.set_layout_engine("none")
        for axes in self.axes:
            x, y, width, height = axes.get_position(original=True).bounds
            axes.set_position((round(x, 5), round(y, 5), round(width, 5), round(height, 5)))


def plot_run(
    run: Run, *, theme_name: str = "light", tolerances: Mapping[str, float] | None = None, seen: Steps | None = None
) -> Picture:
    """The lab's own picture, else time, memory and census through the phases, a timeline of ranks and the verdict.

    `theme_name` is light or dark; `tolerances` move the limits that are drawn. `seen` are the run's steps, where they are known.
    """
    look, verdict = theme(theme_name), run.verdict(**(tolerances or {}))
    seen = steps(run) if seen is None else seen
    with mpl.rc_context(look.rc()):
        if not seen.order:
            return nothing(run, look)
        picture = Picture(layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        own = PICTURES.get(run.lab)
        if own is not None and own.tells(seen):
            own.draw(picture, run, seen, verdict, look)
            words = own.words(run, seen)
        else:
            draw(picture, seen, verdict, look)
            words = [drawings.counted(len(seen.cycles), "cycle")]
        picture.suptitle(heading(run, seen, words, tolerances), x=0.01, ha="left", fontsize=11.5)
    return picture


def draw(picture: Picture, seen: Steps, verdict: Verdict, look: Theme) -> None:
    counts = [name for name in COUNTS if name in seen.metrics()]
    host = [name for name in drawings.HOST if name in seen.metrics()]
    device = [name for name in drawings.DEVICE if name in seen.metrics()]
    memory = ["host"] * bool(host) + ["device"] * bool(device)
    rows = [(spread(["legend"]), 0.2 * math.ceil(len(seen.phases) / drawings.legend_columns(seen)))]
    rows += [(spread(["time"]), 2.6), (spread(memory), 2.6)] if device else [(spread(["time", *memory]), 2.6)]
    rows += [(spread(counts), 1.9)] if counts else []
    rows += [(spread(["timeline"]), 0.5 + min(0.27 * len(seen.ranks), 4.0))]
    rows += [(spread(["verdict"]), 0.2 * len(verdict))] if verdict else []
    picture.set_size_inches(11, sum(height for _, height in rows) + 0.5 * len(rows))
    names: list[Any] = [row for row, _ in rows]
    axes = picture.subplot_mosaic(names, height_ratios=[height for _, height in rows])
    drawings.times(axes["time"], seen, look)
    if host:
        drawings.memory(axes["host"], seen, look, drawings.HOST, "Host memory of the ranks")
    if device:
        drawings.memory(axes["device"], seen, look, drawings.DEVICE, seen.card_title)
    for name in counts:
        drawings.census(axes[name], seen, look, name, title=COUNTS[name], allowed=drawings.allowed(verdict, name))
    drawings.timeline(axes["timeline"], seen, look)
    drawings.phase_legend(axes["legend"], seen, look)
    if verdict:
        drawings.verdict_lines(axes["verdict"], verdict, look)


def spread(names: list[str]) -> list[str]:
    """A row of six columns shared by one, two or three drawings."""
    return [name for name in names for _ in range(6 // len(names))]


def heading(run: Run, seen: Steps, words: list[str], tolerances: Mapping[str, float] | None = None) -> str:
    """What was run and how it ended; a picture with limits that a person moved says so."""
    name = run.lab if run.id.startswith(run.lab) else f"{run.lab} {run.id}"
    fault = [f"fault: {run.fault}"] if run.fault else []
    limits = ", ".join(f"{key} {value:g}" for key, value in (tolerances or {}).items())
    moved = [f"limits moved: {limits}"] if limits else []
    return " · ".join([name, drawings.counted(len(seen.ranks), "rank"), *words, *fault, run.status, *moved])


def nothing(run: Run, look: Theme) -> Picture:
    picture = Picture(figsize=(6, 1.2))
    picture.text(0.5, 0.5, f"{run.id}: no phase has been measured yet", ha="center", va="center", color=look.faint)
    return picture
