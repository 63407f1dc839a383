"""What every lab says of a `routing` other than torch's: the numbers that ranks tell, and the check that asks whether it was in effect."""

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

# What of a rank's answer is a record: at the beginning, and of the groups at the end.
BEFORE = ("requested", "importable", "effective", "reason")
AFTER = ("groups", "groups_effective", "options_lost")


def wanted(config: LabConfig) -> bool:
    return config.routing != "torch"


def environment(config: LabConfig) -> dict[str, str]:
    """What ranks need that this process has otherwise: nothing where no flag is wanted or exported."""
    settings = {
        FLAG: (config.routing == "torchcomms", requested()),
        nccl2.FLAG: (config.routing == nccl2.NAME, nccl2.requested()),
    }
    return {name: str(int(asked)) for name, (asked, exported) in settings.items() if asked or exported}


def refuse_unrouted(world: World | Worlds, routing: str) -> None:
    """Ranks that are there already were started with the flag or without."""
    module, flag = ("kit.nccl2", nccl2.FLAG) if routing == nccl2.NAME else ("kit.routing", FLAG)
    if not all(world.call(f"{module}:requested")):
        raise BadInput(
            f"routing={routing} needs ranks that were started for it: make the World with env={{{flag!r}: '1'}}, or leave world= out"
        )


def numbers(said: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[int, float | str]]:
    """Records' metrics with a value or a text for each rank; of a list it is the length."""
    values = {name: [one[name] for one in said] for name in names}
    return {f"routing_{name}": {rank: _number(x) for rank, x in enumerate(row)} for name, row in values.items()}


def _number(value: Any) -> float | str:
    return value if isinstance(value, str) else float(len(value) if isinstance(value, list) else value)


def by_rank(frame: pd.DataFrame, metric: str) -> dict[int, float]:
    found = select(frame, phase="run", metric=metric)
    return dict(zip(found["rank"].tolist(), found["value"].tolist(), strict=True))


def routed_part(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Of WORLD and all groups made since, the part that is routed, on the rank where it is least."""
    effective = by_rank(frame, "routing_effective")
    rank = min(effective, key=effective.__getitem__)
    if effective[rank] != 1:
        told = select(frame, phase="run", metric="routing_reason", rank=rank)["text"].iloc[0]
        return Measured(0.0, f"requested but not in effect on rank {rank}: {told or 'see run.json'}")
    made, routed = by_rank(frame, "routing_groups"), by_rank(frame, "routing_groups_effective")
    rank = min(made, key=lambda one: routed[one] / made[one])
    said = f"rank {rank}: {routed[rank]:.0f} of {made[rank]:.0f} groups go through {config['routing']}"
    lost = max(by_rank(frame, "routing_options_lost").values())
    return Measured(
        routed[rank] / made[rank], said + (f"; {lost:.0f} options were dropped, see run.json" if lost else "")
    )


EVERY_LAB = (
    Check(
        name="routing_effective",
        question="Do all collectives go through what `routing` names?",
        tolerance="routed_part",
        limit=1,
        unit="1",
        better=">=",
        measure=routed_part,
        when=lambda config: config.get("routing", "torch") != "torch",
    ),
    *growth.EVERY_LAB,
)
