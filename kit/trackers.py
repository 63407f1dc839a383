"""Experiment trackers that a run's numbers go to: `--log NAME[:TARGET]`. Their libraries are optional, and missing ones are bad input.

The axis of a point is the cycle or the optimizer update, so a tracker never gets two values of a name at one x.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kit.errors import BadInput, hint
from kit.results.curves import CurvePoint, Curves
from kit.results.records import Row, make_folder, user_path

PROJECT = "lifecycle-kit"  # of runs without a project in the option


class Tracker(Protocol):
    """One run in a tracker."""

    def log(self, point: CurvePoint) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder TARGET/RUN, in which `tensorboard --logdir TARGET` finds them."""

    def __init__(self, library: Any, target: str, run: str, config: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has no place for settings
        self._writer = library.Writer(str(user_path(target) / run))

    def log(self, point: CurvePoint) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, step=point.x)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of W&B. W&B's own step may not go back, so each axis is a metric that the others are drawn over."""

    def __init__(self, library: Any, target: str, run: str, config: Mapping[str, Any]) -> None:
        self._run = library.init(project=target or PROJECT, name=run, config=dict(config), reinit="create_new")
        self._axis_of: dict[str, str] = {}

    def log(self, point: CurvePoint) -> None:
        for name in point.values.keys() - self._axis_of.keys():
            self._axis_of[name] = point.axis
            self._run.define_metric(name, step_metric=point.axis)
        self._run.log({**point.values, point.axis: point.x})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, in its local database."""

    def __init__(self, library: Any, target: str, run: str, config: Mapping[str, Any]) -> None:
        self._library = library
        library.init(project=target or PROJECT, name=run, config=dict(config), embed=False)

    def log(self, point: CurvePoint) -> None:
        self._library.log(dict(point.values), step=point.x)

    def close(self) -> None:
        self._library.finish()


# The adapter and its library, by the word in front of the colon.
TRACKERS: Mapping[str, tuple[Callable[..., Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard.summary"),
    "wandb": (WandB, "wandb"),
    "trackio": (Trackio, "trackio"),
}
USAGE = "tensorboard:DIR, wandb[:PROJECT] or trackio[:PROJECT]"


class Following:
    """Sends a run's points to its trackers. A tracker that fails is left out from then on: it must not end the run."""

    def __init__(self, trackers: Mapping[str, Tracker], curves: Sequence[Curves]) -> None:
        self._trackers, self._curves = dict(trackers), curves

    def see(self, rows: Sequence[Row]) -> None:
        for curves in self._curves:
            self._send(curves.see, rows)

    def close(self) -> None:
        for curves in self._curves:
            self._send(curves.close)
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.close)
        self._trackers = {}

    def _send(self, points: Callable[..., Iterable[CurvePoint]], *rows: Sequence[Row]) -> None:
        if not self._trackers:
            return
        try:
            made = list(points(*rows))
        except Exception as error:  # noqa: BLE001 - own code may write rows that make no curve
            warnings.warn(f"this run is no longer logged: {error}", RuntimeWarning, stacklevel=2)
            self._trackers = {}
            return
        for point in made:
            for name, tracker in [*self._trackers.items()]:
                if not self._attempt(name, tracker.log, point):
                    del self._trackers[name]

    def _attempt(self, name: str, call: Callable[..., None], *given: CurvePoint) -> bool:
        try:
            call(*given)
        except Exception as error:  # noqa: BLE001 - as above
            warnings.warn(f"--log {name} failed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
            return False
        return True


Opener = Callable[[str, Mapping[str, Any], Sequence[Curves]], Following]


def tracker_opener(asked: str | Sequence[str]) -> Opener | None:
    """Check what `--log` asks for, and load its libraries. The answer opens the trackers for a run; None: there are none."""
    wanted = [asked] if isinstance(asked, str) else asked
    libraries = {text: load_library(text) for text in dict.fromkeys(wanted)}
    if not libraries:
        return None

    def opened(run: str, config: Mapping[str, Any], curves: Sequence[Curves]) -> Following:
        trackers: dict[str, Tracker] = {}
        for text, library in libraries.items():
            name, _, target = text.partition(":")
            try:
                trackers[text] = TRACKERS[name][0](library, target, run, config)
            except Exception as error:
                Following(trackers, ()).close()
                raise BadInput(f"--log {text} cannot start: {type(error).__name__}: {error}") from error
        return Following(trackers, curves)

    return opened


def load_library(text: str) -> Any:
    name, _, target = text.partition(":")
    if name not in TRACKERS:
        raise BadInput(f"--log {text!r} names no tracker; {hint(name, TRACKERS)}")
    if name == "tensorboard" and not target:
        raise BadInput(f"--log {text} needs a folder, as in tensorboard:DIR")
    try:
        library = importlib.import_module(TRACKERS[name][1])
    except ImportError as error:
        raise BadInput(f"--log {name} needs the package {name}: pip install {name} ({error})") from error
    except Exception as error:
        raise BadInput(f"--log {name}: the package cannot be loaded: {type(error).__name__}: {error}") from error
    if name == "tensorboard":
        make_folder(user_path(target))
    return library
