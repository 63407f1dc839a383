"""`routing` other than torch's, in every lab: the numbers that ranks report, and the check that it was in effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit import nccl2
from kit.errors import BadInput
from kit.labs import growth
from kit.results import Check, Measured, select
from kit.routing import FLAG, requested

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from kit.labs.options import LabConfig
    from kit.world import World
    from kit.world.several import Worlds

# The parts of a rank's answer that become records: at the start, and of the groups at the end.
BEFORE = ("requested", "importable", "effective", "reason")
AFTER = ("groups", "groups_effective", "options_lost")


def wanted(config: LabConfig) -> bool:
    return config.routing != "torch"


def environment(config: LabConfig) -> dict[str, str]:
    """The environment variables to set for ranks; none if no flag is wanted or exported."""
    settings = {
        FLAG: (config.routing == "torchcomms", requested()),
        nccl2.FLAG: (config.routing == nccl2.NAME, nccl2.requested()),
    }
    return {name: str(int(asked)) for name, (asked, exported) in settings.items() if asked or exported}


def refuse_unrouted(world: World | Worlds, routing: str) -> None:
    """Refuse a running World that was started without the flag."""
    module, flag = ("kit.nccl2", nccl2.FLAG) if routing == nccl2.NAME else ("kit.routing", FLAG)
    if not all(world.call(f"{module}:requested")):
        raise BadInput(
            f"routing={routing} needs ranks started with it: make the World with env={{{flag!r}: '1'}}, or leave out world="
        )


def numbers(answers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[int, float | str]]:
    """The metrics of records, with a value or a text for each rank; a list becomes its length."""
    values = {name: [one[name] for one in answers] for name in names}
    return {f"routing_{name}": {rank: _number(x) for rank, x in enumerate(row)} for name, row in values.items()}


def _number(value: Any) -> float | str:
    return value if isinstance(value, str) else float(len(value) if isinstance(value, list) else value)


def by_rank(frame: pd.DataFrame, metric: str) -> dict[int, float]:
    found = select(frame, phase="run", metric=metric)
    return dict(zip(found["rank"].tolist(), found["value"].tolist(), strict=True))


def routed_part(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """The share of groups (WORLD included) that is routed, on the rank with the lowest share."""
    effective = by_rank(frame, "routing_effective")
    rank = min(effective, key=effective.__getitem__)
    if effective[rank] != 1:
        reason = select(frame, phase="run", metric="routing_reason", rank=rank)["text"].iloc[0]
        return Measured(0.0, f"requested but not in effect on rank {rank}: {reason or 'see run.json'}")
    made, routed = by_rank(frame, "routing_groups"), by_rank(frame, "routing_groups_effective")
    rank = min(made, key=lambda one: routed[one] / made[one])
    why = f"{routed[rank]:.0f} of {made[rank]:.0f} groups on rank {rank} go through {config['routing']}"
    lost = max(by_rank(frame, "routing_options_lost").values())
    return Measured(
        routed[rank] / made[rank], why + (f"; {lost:.0f} options were dropped, see run.json" if lost else "")
    )


EVERY_LAB = (
    Check(
        name="routing_effective",
        question="Do all collectives go through the backend that `routing` names?",
        tolerance="routed_part",
        limit=1,
        unit="1",
        better=">=",
        measure=routed_part,
        when=lambda config: config.get("routing", "torch") != "torch",
    ),
    *growth.EVERY_LAB,
)
