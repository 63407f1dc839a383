"""The arithmetic task: the stored weights are what the command writes; rewards are graded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kit.train.rollout import END, LONGEST, PAD, Problem, answer_reward, draw_problems, encode_ascii

ROOT = Path(__file__).parents[2]


def test_the_kept_files_are_what_the_command_writes(tmp_path) -> None:
    subprocess.run([sys.executable, "data/arithmetic/make.py", "--out", str(tmp_path / "new")], cwd=ROOT, check=True)
    kept = ROOT / "data" / "arithmetic"
    for name in ("README.md", "problems.jsonl"):
        assert (kept / name).read_bytes() == (tmp_path / "new" / name).read_bytes()


def test_kept_problems_are_right() -> None:
    lines = (ROOT / "data" / "arithmetic" / "problems.jsonl").read_text().splitlines()
    assert len(lines) == 300
    signs = set()
    for line in lines:
        problem = json.loads(line)
        assert problem["prompt"].endswith("=")
        assert str(eval(problem["prompt"][:-1])) == problem["answer"]
        assert len(problem["prompt"] + problem["answer"]) + 1 <= LONGEST
        signs |= {sign for sign in "+-*" if sign in problem["prompt"]}
    assert signs == {"+", "-", "*"}


def test_problems_are_of_the_seed() -> None:
    assert draw_problems(3, 20) == draw_problems(3, 40)[:20]
    assert draw_problems(3, 20) != draw_problems(4, 20)


def test_no_problem_holds_padding_or_the_end() -> None:
    for problem in draw_problems(1, 50):
        tokens = encode_ascii(problem.prompt + problem.answer)
        assert not {PAD, END} & set(tokens)
        assert len(tokens) == len(problem.prompt) + len(problem.answer)


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ([*encode_ascii("42"), END], 1.0),
        ([*encode_ascii("47"), END], 0.75),
        (encode_ascii("42"), 0.5 + 0.125),
        ([*encode_ascii("4"), END], 0.25 + 0.125),
        ([], 0.25 / 4),
        ([*encode_ascii("999999"), END], 0.25 / 5),
    ],
)
def test_rewards_are_graded(answer, worth) -> None:
    assert answer_reward(Problem(prompt="17+25=", answer="42"), answer) == pytest.approx(worth)
