"""Lengths and waits with long tails, as real answers, tools and rewards have them. Each depends only on its key, so that they are known
before a loop runs: any replica gives the same, also after a restart."""

from __future__ import annotations

from typing import Protocol

from kit.train.arithmetic import Part, uniform

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
