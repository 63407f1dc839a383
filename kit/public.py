"""What `import kit` offers, assembled from the rooms: a World with a place for its logs, labs, runs from disk, and sweeps.

A sweep is several runs of a lab in one folder: every combination of some settings' values, each repeated as often as requested. The runs
are in the subfolders `01`, `02`, ...; `index.json` lists each run with its settings and outcome, and the spread of times and measured
values over the repeats.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit import world as room
from kit.errors import BadInput
from kit.labs.definition import Definition
from kit.labs.discover import complaints, find, find_fault, from_text, rules_of
from kit.labs.lab import Lab
from kit.results import Run, runs_dir
from kit.results.frames import json_rows
from kit.results.records import read_json, user_path, write_json
from kit.results.run import INDEX, find_run, list_runs, refuse_filled, unique
from kit.results.verdict import without_parts
from kit.view.progress import Progress
from kit.world.calls import Pending, WorldObserver, wait
from kit.world.warm import prepare_waiting, waiting_line
from kit.world.world import Worlds

if TYPE_CHECKING:
    import pandas as pd

    from kit.view.panel import Panel
    from kit.world.calls import WorldObserver
    from kit.world.world import Worlds

__all__ = ["Pending", "Run", "World", "lab", "load", "panel", "prepare_waiting", "run", "runs", "wait", "waiting_line"]


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
        launch: str = "print",
        engine: str = "torchrun",
        logs: str | os.PathLike[str] | None = None,
        start_timeout_s: float | None = None,
        observer: WorldObserver | None = None,
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
                launch=launch,
                engine=engine,
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
        if self._crew.inherited:
            return  # a forked process ends; the World and its logs belong to its parent
        self._tidy("rank*.log")  # torchrun's log alone is not worth keeping: it may only show how it ended the ranks

    def _tidy(self, worth_keeping: str) -> None:
        if self._own is not None and not any(file.stat().st_size for file in self._own.glob(f"logs/{worth_keeping}")):
            shutil.rmtree(self._own, ignore_errors=True)


def prepare_lab(
    name: str,
    config: Mapping[str, Any],
    *,
    out: str | os.PathLike[str] | None = None,
    log: str | Sequence[str] = (),
    **options: Any,
) -> Lab:
    """Make a lab: check its config and make its folder. Its ranks start with its first step. `options` are passed to Lab."""
    from kit.trackers import tracker_opener

    return Lab(
        find(name),
        config,
        out=None if out is None else user_path(out),
        observe=lambda calls: Progress(total=calls),
        plotter=plot,
        panel=panel_of,
        follow=tracker_opener(log),
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

    With `world`, the lab uses the ranks of that World and leaves them alive.
    """
    return prepare_lab(name, config, fault=fault, out=out, tolerances=tolerances, world=world).start()


def run(
    name: str,
    *,
    fault: str | None = None,
    out: str | os.PathLike[str] | None = None,
    tolerances: Mapping[str, float] | None = None,
    world: room.World | Worlds | None = None,
    log: str | Sequence[str] = (),
    **config: Any,
) -> Run:
    """Run a lab from its first phase to its verdict; on the ranks of `world`, if one is given.

    With `log`, its numbers also go to an experiment tracker: `tensorboard:DIR`, `wandb[:PROJECT]`, `trackio[:PROJECT]`, or several.
    """
    with prepare_lab(name, config, fault=fault, out=out, tolerances=tolerances, world=world, log=log) as made:
        return made.run()


def panel(name: str, *, fault: str | None = None, out: str | os.PathLike[str] | None = None, **config: Any) -> Panel:
    """Return a panel of a lab: its settings, buttons, a strip of phases and ranks, and the run. Its Start button starts the ranks."""
    from kit.view.panel import make_panel

    prepare_waiting()
    return make_panel(find(name), config, fault=fault, out=out, plotter=plot)


def panel_of(lab: Lab) -> Panel:
    """Return the panel for `lab.panel()`, in the current state of the lab."""
    from kit.view.panel import adopt_lab

    return adopt_lab(lab, plotter=plot)


def load(path: str | os.PathLike[str]) -> Run:
    """Load a run from disk, complete or partial, by its folder or by its id in the runs folder."""
    return Run(find_run(user_path(path)), rules=rules_of, plotter=plot)


def runs(
    folder: str | os.PathLike[str] | None = None,
    *,
    lab: str | None = None,
    fault: str | None = None,
    status: str | None = None,
    verdict: str | None = None,
    **config: Any,
) -> pd.DataFrame:
    """Return the runs as a table, newest first, filtered by lab, fault (`fault=""`: none), status, verdict (failed, passed,
    not judged) or a setting (`tp=2`). `folder` defaults to the runs folder.

    The column `set` has the settings that are not the lab's defaults; `dir` is the argument for `kit.load`.
    """
    from kit.labs.discover import table

    root = runs_dir() if folder is None else user_path(folder)
    return table(root, lab=lab, fault=fault, status=status, verdict=verdict, config=config)


def plot(run: Run, name: str = "overview", **options: Any) -> object:
    from kit.view.named import plot_run as draw

    return draw(run, name, **options)


# -- sweeps --------------------------------------------------------------------------------------------------------------

BETWEEN = re.compile(r",(?![^\[]*\])")  # commas outside of a list
INTERRUPTED = 130
MOST_RUNS = 10_000  # of one sweep
MOST_SETTINGS = 2**20  # bytes of a file of settings
Ended = tuple[int, dict[str, Any]]  # the exit status of a run, and its JSON


class SweepPoint(NamedTuple):
    swept: dict[str, Any]
    repeat: int

    def __str__(self) -> str:
        return " ".join([*(f"{name}={json.dumps(value)}" for name, value in self.swept.items()), f"#{self.repeat}"])


def sweep_points(lab: Definition, sweeps: Mapping[str, str], repeat: int) -> list[SweepPoint]:
    """Return every combination, then all of them again per repeat, so that a slow drift of the machine affects all equally."""
    texts = [[(name, text) for text in BETWEEN.split(values)] for name, values in sweeps.items()]
    if (count := repeat * math.prod(map(len, texts))) > MOST_RUNS:
        raise BadInput(f"--sweep and --repeat give {count} runs; at most {MOST_RUNS} fit into one sweep")
    swept = [from_text(lab, dict(pairs)) for pairs in itertools.product(*texts)]
    return [SweepPoint(settings, number) for number in range(1, repeat + 1) for settings in swept]


def check_points(lab: Definition, given: Mapping[str, Any], found: Sequence[SweepPoint], fault: str | None) -> None:
    """Refuse a sweep that has a run which could not start, before the first run starts."""
    for point in found:
        wrong = complaints(lab, {**given, **point.swept}, find_fault(lab, fault))
        if wrong:
            raise BadInput(f"{point}: {'; '.join(dict.fromkeys(wrong.values()))}")


def sweep(
    lab: str, found: Sequence[SweepPoint], out: Path | None, run: Callable[[dict[str, Any], Path], Ended]
) -> tuple[int, Path]:
    """Run every point; return the worst exit status and the folder. An interrupt ends the sweep, and the index has the runs so far."""
    folder = (user_path(out) if out else runs_dir() / f"{lab}-sweep-{unique()}").absolute()
    if (folder / INDEX).exists():
        raise BadInput(f"{folder} already holds a sweep; choose another folder")
    if folder.is_dir():
        refuse_filled(folder)
    rows: list[dict[str, Any]] = []
    for number, point in enumerate(found, start=1):
        print(f"run {number} of {len(found)}: {point}", flush=True)
        status, answer = run(point.swept, folder / f"{number:02}")
        rows.append({"dir": f"{number:02}", "set": point.swept, "repeat": point.repeat, **answer})
        write_json(folder / INDEX, {"lab": lab, "planned": len(found), "runs": rows, "spread": spread(folder, rows)})
        if status == INTERRUPTED:
            break
    return max(row["exit"] for row in rows), folder


def spread(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return per combination the median, minimum and maximum over its repeats of each phase's median time and each check's number."""
    import pandas as pd

    spread_rows = []
    for row in rows:
        done = load(folder / row["dir"])
        frame = done.frame()
        times = frame[frame["metric"] == "seconds"].groupby("phase", sort=False)["value"].median()
        numbers = [(f"{phase}: time", "s", seconds) for phase, seconds in times.items()]
        checks = without_parts(done.shown_verdict())
        numbers += [
            (f"check {check.check}", check.unit, check.measured) for check in checks if check.measured is not None
        ]
        spread_rows += [(json.dumps(row["set"]), *number) for number in numbers]
    table = pd.DataFrame(spread_rows, columns=["set", "what", "unit", "value"])
    grouped = table.groupby(["set", "what", "unit"], sort=False)["value"].agg(["median", "min", "max", "count"])
    return [{**row, "set": json.loads(row["set"])} for row in json_rows(grouped.reset_index())]


def runs_of(folder: Path) -> list[Path]:
    """Return the runs of a sweep in order, or the folder itself if it is no sweep."""
    if not (folder / INDEX).is_file():
        return [folder]
    return sorted(list_runs(folder))


def settings_from_file(path: Path) -> dict[str, Any]:
    import yaml

    kind = path.suffix.lower()
    if kind not in {".json", ".yaml", ".yml"}:
        raise BadInput(f"{path.name!r} has no known ending; settings are read from .json, .yaml or .yml")
    if path.exists() and not path.is_file():
        raise BadInput(f"cannot read {path}: it is not a file")
    if path.exists() and (size := path.stat().st_size) > MOST_SETTINGS:
        raise BadInput(f"{path} has {size} bytes; a file of settings has at most {MOST_SETTINGS}")
    try:
        values = read_json(path) if kind == ".json" else yaml.safe_load(path.read_text(encoding="utf-8"))
    except BadInput:
        raise
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise BadInput(f"{path} is damaged: its brackets are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise BadInput(f"{path} has no settings; it must be one object such as {{cycles: 5}}")
    return values
