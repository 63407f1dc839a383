"""Runs of the lab `share` without ranks."""

from __future__ import annotations

from typing import Any

from kit.labs.discover import find_fault
from kit.labs.share.lab import LAB
from kit.results import Verdict
from tests.labs.simulated import run


def simulated(fault: str | None = None, **config: Any) -> tuple[Verdict, str]:
    return run(LAB, find_fault(LAB, fault), **config)
