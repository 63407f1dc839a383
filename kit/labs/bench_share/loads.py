"""The loads of the bench: settings of the lab `share` with paced ranks, which wait for each token and each trained sample.

STANDARD has what leaves the devices of real jobs idle, at different times in different jobs. It was written down before it was first
measured. Its figures are from:

- RollPacker (arXiv 2509.21009) and ROLL Flash (arXiv 2510.11345): generation takes about 70 % of a synchronous step, and lengths of
  answers have a long tail. Here 5 % of the answers have a quarter of all tokens, and the longest is 9 times the median.
- Heddle (arXiv 2603.28101) and RollArt (arXiv 2512.22560): agents wait for tools between their turns, with a long tail; rewards that run
  code are computed outside the devices. Here pipeline b calls two tools in each answer, and waits for the tests of each step.
- rlix reports 312 s for two fine-tunes where one takes 244 s. So one alone can have used at most 64 % of its devices' time. Here the two
  pipelines alone use about that share.

Durations are shortened to seconds per step; only their ratios matter.
"""

from __future__ import annotations

from typing import Any

# Each trains where the planner lets it generate first.
PACED: dict[str, Any] = {"a.train": (1,), "b.train": (0,), "pace_ms": 20, "layers": 1, "warm": 0}
PACED |= {"controls": "all", "rehearse": False}

# Lengths do not vary and nothing waits, so that one pipeline after the other uses all devices too. B's answers are half as long as A's,
# so half of the devices is too little for A. Two groups per pipeline are in flight at once.
EVEN: dict[str, Any] = {**PACED, "a.answer": (12, 12), "b.answer": (6, 6), "train_pace_ms": 5}
EVEN |= {"groups": 24, "group": 2, "slots": 2, "decode": 2}

# a reasons: answers of 8 to 128 tokens, rewards by a rule. b is an agent: short turns, tools, slow rewards.
STANDARD: dict[str, Any] = {**PACED, "tail": True, "train_pace_ms": 60, "groups": 6, "group": 4, "decode": 1}
STANDARD |= {"a.answer": (8, 128), "a.slots": 2, "a.reward_ms": (200, 1000)}
STANDARD |= {"b.answer": (6, 48), "b.slots": 4, "b.tools": 2, "b.tool_ms": (200, 2000), "b.reward_ms": (1000, 8000)}
STANDARD |= {"admission_ms": 0}  # both begin at once, as jobs that are already set up
FIRST_SEED = 1234  # of the first run; each next run has the next one
