"""Smoke: the smallest lab. It creates process groups, all-reduces over them, destroys them, and counts what is left."""

from kit.labs.definition import Definition, Fault
from kit.labs.smoke.config import SmokeConfig, plan

FAULTS = (
    Fault("leaked-group", "one group of every cycle is not destroyed", "groups_return_to_baseline"),
    Fault(
        "wrong-sum",
        "one rank contributes a wrong number to one all-reduce of the last cycle",
        "every_group_communicates",
    ),
)


LAB = Definition(
    name="smoke",
    summary="creates process groups, all-reduces over them, destroys them, and counts what is left",
    config=SmokeConfig,
    plan=plan,
    phases="kit.labs.smoke.ranks.phases:Smoke",
    checks="kit.labs.smoke.checks:CHECKS",
    presets="kit.labs.smoke.checks:PRESETS",
    first=("size", "ranks", "cycles", "groups", "implementation"),
    faults=FAULTS,
)
