"""Words about the cases of a split run, for the reasons of its checks and for its pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.labs.split.config import cases_of
from kit.results.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping


def every_chunks(config: Mapping[str, Any]) -> str:
    """The numbers of chunks of a run."""
    return "chunks " + ", ".join(str(count or "one per microbatch") for count in config["chunks"])


def scope(config: Mapping[str, Any]) -> str:
    """The steps, levels and numbers of chunks that a run compared."""
    levels = sorted({case.level for case in cases_of(config)}, reverse=True)
    return f"{counted(config['steps'], 'step')}, loss per {' and per '.join(map(singular, levels))}, {every_chunks(config)}"


def singular(level: str) -> str:
    return level.removesuffix("s")


def where(config: Mapping[str, Any], cycle: int) -> str:
    case = next(case for case in cases_of(config) if case.cycle == cycle)
    return f"loss per {singular(case.level)}, {chunks_of(case.chunks)}"


def chunks_of(count: int) -> str:
    return counted(count, "chunk") if count else "one chunk per microbatch"


def against(row: Mapping[str, Any]) -> str:
    """A number of the split step beside the plain step's."""
    return f"{row['split']:.9g} vs {row['sync']:.9g} in the plain step"
