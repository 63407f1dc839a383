"""Helpers for tests of several labs: what a verdict says, made-up rows, how a broken run is judged, and training steps in ranks' logs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import kit
from kit.labs.discover import rules_of
from kit.results import Row, Rule, Verdict, VerdictRow, judge
from kit.results.records import STEP_LINE
from kit.world.asked import has_module, python_has

# Checks of wall time, which a shared machine may miss at any moment.
OF_WALL_TIME = {"time_steady", "times_do_not_rise", "controller_answers", "death_named_in_time"}


def failed(verdict: Verdict, *, timed: str = "") -> set[str]:
    """The failed checks. Of those of wall time only the one named in `timed` counts."""
    return {row.check.partition("/")[0] for row in verdict if row.passed is False} - (OF_WALL_TIME - {timed})


def unanswered(verdict: Verdict) -> set[str]:
    """The checks that were not measured, except `nothing_piles_up`: it needs three cycles, and most runs of tests are shorter."""
    return {row.check for row in verdict if row.passed is None} - {"nothing_piles_up"}


def passed(verdict: Verdict, check: str) -> bool | None:
    return next(row.passed for row in verdict if row.check == check)


def why(verdict: Verdict, check: str) -> str:
    return next(row.why for row in verdict if row.check == check)


class Answers(dict[str, VerdictRow]):
    """The rules' answers to some rows, by check. A rule is asked when its answer is looked up: most tests look at one of thirty."""

    def __init__(
        self,
        frame: pd.DataFrame,
        config: Mapping[str, Any],
        rules: Sequence[Rule],
        tolerances: Mapping[str, float] | None = None,
    ) -> None:
        self.frame, self.config, self.tolerances = frame, config, tolerances
        self.rules = {rule.name: rule for rule in rules if rule.asked(config)}

    def __missing__(self, check: str) -> VerdictRow:
        rule = self.rules[check.partition("/")[0]]
        for row in judge(self.frame, self.config, [rule], self.tolerances):
            self[row.check] = row
        return dict(self)[check]

    def __contains__(self, check: object) -> bool:
        return check in self.rules


def rows_of_metric(run: kit.Run, phase: str, metric: str) -> pd.DataFrame:
    frame = run.frame()
    return frame[(frame["phase"] == phase) & (frame["metric"] == metric)]


def made_up_row(
    about: dict[str, Any],
    name: str,
    value: float | None,
    ids: dict[str, Any] | None = None,
    text: str = "",
    *,
    old: bool = False,
) -> Row:
    """A row at its place; `old`: as older kits wrote it, which coded texts and ids in names and numbers."""
    if old:
        path = "/".join([name, *map(str, (ids or {}).values())])
        return Row(**about, metric=path, value=1 if value is None else value, unit="1")
    return Row(**about, metric=name, value=value, unit="1", ids=ids or {}, text=text)


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


def vllm_python() -> str:
    """The interpreter that KIT_VLLM_PYTHON names, if it has vLLM; otherwise empty."""
    named = os.environ.get("KIT_VLLM_PYTHON", "")
    return named if named and python_has(named, "vllm") else ""


def on_an_engine(settings: Mapping[str, Any]) -> Any:
    """The mark of a test with these settings, which is skipped where their engine is not installed."""
    engine = settings.get("serve", "megatron")
    if engine == "vllm":
        return pytest.mark.skipif(not vllm_python(), reason="needs vLLM: make env-vllm, and KIT_VLLM_PYTHON")
    missing = engine == "transformers" and not has_module("transformers")
    return pytest.mark.skipif(missing, reason=f"needs the package {engine}")
