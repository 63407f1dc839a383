"""The arithmetic task of reinforcement learning loops.

Prompts such as "7+5=", one token for each character, a reward for each answer. The vocabulary has 16 tokens, so that a tiny model can learn
the task and random weights sometimes write the right digit. A problem depends on seed and index alone, a minimum length on seed, index and
sample. Limits: sums and differences of two numbers below `limit`; no answer is negative.
"""

from __future__ import annotations

from kit.train.draws import uniform, whole_number
from kit.train.rollout import Problem

CHARACTERS = "0123456789+-*="
END, PAD = len(CHARACTERS), len(CHARACTERS) + 1
VOCAB = len(CHARACTERS) + 2
DIGITS = 10
STRAGGLERS = 8  # one sample in this many gets the longest minimum length


def problem(seed: int, index: int, limit: int = 10) -> Problem:
    """Problem number `index` of a seed: a sum, or a difference with the larger number first."""
    left, right = (whole_number(0, limit - 1, seed, side, index) for side in ("left", "right"))
    if uniform(seed, "sign", index) < 0.5:
        return Problem(prompt=f"{left}+{right}=", answer=str(left + right))
    left, right = max(left, right), min(left, right)
    return Problem(prompt=f"{left}-{right}=", answer=str(left - right))


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def reward(asked: Problem, tokens: list[int]) -> float:
    """0 to 1 for the tokens of an answer, END included. Only the exact answer gets 1.

    0.75 times the share of wanted tokens (END among them) in their places, and 0.25 times the share of digits before END, by which
    answers of untrained weights and answers with a minimum length differ.
    """
    wanted = [*encode(asked.answer), END]
    right = sum(a == b for a, b in zip(wanted, tokens, strict=False))
    written = tokens[: tokens.index(END)] if END in tokens else tokens
    digits = sum(token < DIGITS for token in written)
    return 0.75 * right / len(wanted) + 0.25 * digits / max(1, len(written))


def min_tokens(seed: int, index: int, sample: int, *, low: int, high: int) -> int:
    """The number of tokens before a sample may end: `low` to half of `high`, and `high` for one straggler in STRAGGLERS."""
    if uniform(seed, "straggler", index, sample) < 1 / STRAGGLERS:
        return high
    return whole_number(low, max(low, high // 2), seed, "length", index, sample)
