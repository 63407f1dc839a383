"""The known bugs of the lab `smoke` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault

FAULTS = (
    Fault(
        "leaked-group",
        "one group of every cycle is not destroyed",
        "groups_return_to_baseline",
        patch={"kit.labs.smoke.ranks.phases:Smoke.destroy": "kit.labs.smoke.ranks.bugs:forgets_a_group"},
    ),
    Fault(
        "wrong-sum",
        "one rank contributes a wrong number to one all-reduce of the last cycle",
        "every_group_communicates",
        patch={"kit.labs.smoke.ranks.phases:Smoke.message": "kit.labs.smoke.ranks.bugs:one_number_too_large"},
        during=("talk",),
    ),
)
