"""Pseudo-random numbers that depend only on their key, and the lengths and waits that are drawn with them.

The numbers have no generator and no state, so that the order of calls, other requests and restarts change nothing. Equal keys give equal
numbers on every machine. Lengths and waits have long tails, as those of real answers, tools and rewards, and are known before a loop runs.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

Part = int | str | tuple[int, ...]


def uniform(*key: Part) -> float:
    """A number in [0, 1) with 53 random bits, from a hash of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def whole_number(low: int, high: int, *key: Part) -> int:
    """A whole number from low to high, both included."""
    return low + int(uniform(*key) * (high - low + 1))


TAIL = 1.2  # exponent of a Pareto distribution


class Tailed(Protocol):
    """The settings of a pipeline from which its lengths and waits are drawn: the least and the most of each."""

    @property
    def seed(self) -> int: ...
    @property
    def answer(self) -> tuple[int, ...]: ...
    @property
    def tools(self) -> int: ...
    @property
    def tool_ms(self) -> tuple[int, ...]: ...


def long_tailed(low: int, high: int, *key: Part) -> int:
    """A whole number from `low` to `high`. Half of them are above 1.8 x low, one in 16 above 10 x low."""
    return min(high, int(low * (1.0 - uniform(*key)) ** (-1.0 / TAIL)))


def answer_length(config: Tailed, group: int, sample: int) -> int:
    """The number of tokens of an answer with `tail`."""
    low, high = config.answer
    return long_tailed(low, high, config.seed, "answer", group, sample)


def tool_stalls(config: Tailed, group: int, sample: int) -> dict[int, float]:
    """The seconds of each tool call of an answer, by the number of tokens before it. Calls are spread evenly over the answer."""
    low, high = config.tool_ms
    length = answer_length(config, group, sample) if config.tools else 1
    calls = min(config.tools, length - 1)
    return {
        call * length // (calls + 1): long_tailed(low, high, config.seed, "tool", group, sample, call) / 1000
        for call in range(1, calls + 1)
    }


def reward_wait_s(seed: int, reward_ms: tuple[int, ...], step: int) -> float:
    """The seconds between a step's last answer and its last reward."""
    low, high = reward_ms
    return long_tailed(low, high, seed, "reward", step) / 1000
