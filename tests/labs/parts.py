"""Runs that broke: the records of a good run, cut off where a rank or a phase ended."""

from __future__ import annotations

from itertools import pairwise

import kit
from kit.labs.discover import checks_of
from kit.results import judge


def failing_parts(run: kit.Run) -> list[tuple[str, str]]:
    """The checks that fail, or raise, on any beginning of a good run's records: they would blame it for having broken."""
    frame = run.frame()
    checks = [check for check in checks_of(run.lab) if check.asked(run.config)]
    assert not judge(frame, run.config, checks).failed
    owners = zip(frame["cycle"], frame["phase"], frame["rank"], strict=True)
    cuts = [0, *(index for index, (one, other) in enumerate(pairwise(owners), start=1) if one != other)]
    failed: dict[str, str] = {}
    for cut in cuts:
        for row in judge(frame.head(cut), run.config, checks).failed:
            failed.setdefault(row.check, row.why)
    return list(failed.items())
