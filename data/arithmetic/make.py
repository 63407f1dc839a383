"""Writes the problems in this folder: `python data/arithmetic/make.py --out data/arithmetic`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from kit.train.rollout import END, PAD, problems

SEED, COUNT = 1, 300


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(problem)) + "\n" for problem in problems(SEED, COUNT)]
    (folder / "problems.jsonl").write_text("".join(lines))
    (folder / "README.md").write_text(
        "# Arithmetic\n\n"
        f"{COUNT} problems, made by `python data/arithmetic/make.py --out data/arithmetic` from the seed {SEED}: sums, differences\n"
        "and products of two numbers below 100. One JSON object a line, with `prompt` and `answer`. Free of any other source,\n"
        "under the license of this repository.\n\n"
        f"A token is a character's ASCII code; {PAD} is padding and {END} ends an answer. A reward is between 0 and 1: 0.75 times\n"
        "the share of right characters in their place (the end counts as one), and 0.25 for the right length, less the further off.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the arithmetic problems.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    write(parser.parse_args().out)
