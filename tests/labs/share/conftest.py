"""Runs of the lab `share` without ranks."""

from __future__ import annotations

from typing import Any

from kit.labs.definition import made
from kit.labs.discover import find_fault
from kit.labs.share.lab import LAB, ShareConfig
from kit.results import Verdict
from tests.labs.simulated import run


def share(**settings: Any) -> ShareConfig:
    """The config of these settings; those of a pipeline as `**{"a.steps": 2}`, or of all as `steps=2`."""
    config: ShareConfig = made(ShareConfig, settings)
    return config


def simulated(fault: str | None = None, **config: Any) -> tuple[Verdict, str]:
    return run(LAB, find_fault(LAB, fault), **config)
