"""Tolerances: the limits a person moves, by keyword or from a JSON file `{name: number}`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.results.files import read_json, write_json
from kit.results.records import WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def checked_tolerances(tolerances: Mapping[str, Any], allowed: Sequence[str] | None = None) -> dict[str, float]:
    """The tolerances as floats; an unknown name or a value that is not a number is a `BadInput`."""
    if not isinstance(tolerances, Mapping):
        raise BadInput(f'tolerances must be names and numbers like {{"drift_mib": 50}}, not {tolerances!r}')
    result: dict[str, float] = {}
    for name, value in tolerances.items():
        if allowed is not None and name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            names = ", ".join(sorted(set(allowed))) or "none"
            raise BadInput(f"unknown tolerance {name!r}; {hint}allowed are: {names}")
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
            raise BadInput(f"tolerance {name!r} is {value!r}; it must be a number")
        result[name] = float(value)
    return result


def load_tolerances(path: Path) -> dict[str, float]:
    """A tolerance set from a JSON file `{name: number}`."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise BadInput(f'{path} holds no tolerance set; it must be one JSON object like {{"drift_mib": 50}}')
    return checked_tolerances(
        {name: WORDS.get(value, value) if isinstance(value, str) else value for name, value in data.items()}
    )


def save_tolerances(path: Path, tolerances: Mapping[str, float]) -> None:
    """The file that `load_tolerances` and `kit run --tolerances` take."""
    write_json(path, checked_tolerances(tolerances))
