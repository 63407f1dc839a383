"""Known bugs of the smoke lab. Each is switched on in `ranks/phases.py` and caught by the check it names."""

from kit.labs.definition import Fault

FAULTS = (
    Fault(
        name="leaked-group",
        breaks="one group of every cycle is forgotten when groups are destroyed",
        check="groups_return_to_baseline",
    ),
    Fault(
        name="wrong-sum",
        breaks="one rank puts a wrong number into one message of the last cycle",
        check="every_group_communicates",
    ),
)
