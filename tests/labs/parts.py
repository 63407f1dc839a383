"""Helpers for tests of several labs: how a run is judged where it broke, and the training steps in its ranks' logs."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import kit
from kit.labs.discover import rules_of
from kit.results import judge
from kit.results.records import STEP_LINE


def failing_parts(run: kit.Run) -> list[tuple[str, str]]:
    """Return the checks that fail or raise on some beginning of a good run's records: they would blame a run for having broken."""
    frame = run.frame()
    checks = [check for check in rules_of(run.lab) if check.asked(run.config)]
    assert not judge(frame, run.config, checks).failed
    owners = zip(frame["cycle"], frame["phase"], frame["rank"], strict=True)
    cuts = [0, *(index for index, (one, other) in enumerate(pairwise(owners), start=1) if one != other)]
    failed: dict[str, str] = {}
    for cut in cuts:
        for row in judge(frame.head(cut), run.config, checks).failed:
            failed.setdefault(row.check, row.why)
    return list(failed.items())


def logged_steps(logs: Path, rank: int) -> list[tuple[int, str, float]]:
    """Return step, what was trained, and loss for each training step in a rank's log. Every line must have a trainer's full format."""
    lines = [line for line in (logs / f"rank{rank}.log").read_text().splitlines() if line.startswith(STEP_LINE)]
    found = [re.fullmatch(STEP, line) for line in lines]
    assert all(found), lines
    return [(int(one["step"]), one["what"] or "", float(one["loss"])) for one in found if one]


STEP = (
    rf"{STEP_LINE}(?P<step>\d+)( \((?P<what>.+)\))?: loss (?P<loss>\S+), grad norm \S+, "
    r"(resident|allocated) [\d.]+ MiB, [\d.]+ ms"
)
