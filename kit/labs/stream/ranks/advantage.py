"""Advantages of the samples of a group, by the group's number and never by position."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kit.labs.stream.ranks.rows import Key

TINY = 1e-6


def advantages(rewards: Mapping[Key, float], kind: str) -> dict[Key, float]:
    """`grpo`: reward less the mean of its group, over the group's deviation. `leave-one-out`: reward less the mean of the others."""
    groups: dict[int, list[Key]] = {}
    for key in rewards:
        groups.setdefault(key.group, []).append(key)
    return {key: value for keys in groups.values() for key, value in _of_group(keys, rewards, kind)}


def _of_group(keys: list[Key], rewards: Mapping[Key, float], kind: str) -> Iterable[tuple[Key, float]]:
    values = [rewards[key] for key in keys]
    mean = statistics.fmean(values)
    if kind == "leave-one-out":
        others = max(len(values) - 1, 1)
        return [(key, (rewards[key] - mean) * len(values) / others) for key in keys]
    deviation = statistics.pstdev(values)
    return [(key, (rewards[key] - mean) / (deviation + TINY)) for key in keys]
