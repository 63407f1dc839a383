"""A small task that the kit makes itself: sums, differences and products of small numbers, one token per character.

`python -m kit.train.task --out data/arithmetic` writes the problems that are kept in the repository; `problems` is a pure function.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path

PAD, END = 0, 10  # bytes that no problem holds: NUL and the end of a line
LONGEST = 11  # tokens of "99*99=9801" and the end
SEED, COUNT = 1, 300


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    prompt: str  # "17+25="
    answer: str  # "42"


def problems(seed: int, n: int) -> list[Problem]:
    """n problems, the same for the same seed wherever it runs."""
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    made = []
    for _ in range(n):
        # random() alone is the same in every Python version; randrange and choice need not be.
        left, right, sign = (int(draw.random() * limit) for limit in (100, 100, 3))
        value = (left + right, left - right, left * right)[sign]
        made.append(Problem(prompt=f"{left}{'+-*'[sign]}{right}=", answer=str(value)))
    return made


def encode(text: str) -> list[int]:
    return list(text.encode("ascii"))


def reward(problem: Problem, answer: list[int]) -> float:
    """0 to 1 for the tokens that were written, end included: three parts for right characters in place, one for the length."""
    wanted = [*encode(problem.answer), END]
    right = sum(a == b for a, b in zip(wanted, answer, strict=False))
    return 0.75 * right / len(wanted) + 0.25 / (1 + abs(len(answer) - len(wanted)))


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(problem)) + "\n" for problem in problems(SEED, COUNT)]
    (folder / "problems.jsonl").write_text("".join(lines))
    (folder / "README.md").write_text(
        "# Arithmetic\n\n"
        f"{COUNT} problems, made by `python -m kit.train.task --out data/arithmetic` from the seed {SEED}: sums, differences\n"
        "and products of two numbers below 100. One JSON object a line, with `prompt` and `answer`. Free of any other source,\n"
        "under the license of this repository.\n\n"
        f"A token is a character's ASCII code; {PAD} is padding and {END} ends an answer. A reward is between 0 and 1: 0.75 times\n"
        "the share of right characters in their place (the end counts as one), and 0.25 for the right length, less the further off.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the arithmetic problems.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    write(parser.parse_args().out)
