"""Smoke: the smallest lab. Groups are made, talked over, destroyed, and what is left of them is counted."""

from kit.labs.definition import Definition
from kit.labs.smoke.config import SmokeConfig, plan
from kit.labs.smoke.faults import FAULTS

LAB = Definition(
    name="smoke",
    summary="make groups, talk over them with values that depend on the rank, destroy them, count what is left",
    config=SmokeConfig,
    plan=plan,
    phases="kit.labs.smoke.ranks.phases:Smoke",
    checks="kit.labs.smoke.checks:CHECKS",
    presets="kit.labs.smoke.presets:PRESETS",
    first=("size", "ranks", "cycles", "groups", "implementation"),
    faults=FAULTS,
)
