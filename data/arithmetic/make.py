"""Writes the problems in this folder: `python data/arithmetic/make.py --out data/arithmetic`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from kit.train.rollout import END, PAD, draw_problems

SEED, COUNT = 1, 300


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(problem)) + "\n" for problem in draw_problems(SEED, COUNT)]
    (folder / "problems.jsonl").write_text("".join(lines))
    (folder / "README.md").write_text(
        "# Arithmetic\n\n"
        f"{COUNT} problems: sums, differences and products of two numbers below 100, generated from seed {SEED} by\n"
        "`python data/arithmetic/make.py --out data/arithmetic`. Each line is a JSON object with `prompt` and `answer`. The data uses\n"
        "no other source and has the license of this repository.\n\n"
        f"A token is the ASCII code of a character; {PAD} is padding and {END} ends an answer. The reward is between 0 and 1: 0.75 times\n"
        "the share of correct characters (the end counts as one), plus 0.25 for the correct length, decreasing with the distance from it.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the arithmetic problems.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    write(parser.parse_args().out)
