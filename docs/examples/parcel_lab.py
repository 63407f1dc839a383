"""A whole lab from outside the kit: does what a sender broadcasts arrive, whole and new, and is it put away?

Config, two roles, three rules, two faults, and two charts in parcel_charts.py; CONTRIBUTING.md explains each part. In a package of your
own, name `LAB` as an entry point of the group `kit.labs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from kit.labs.definition import Definition, Fault, LabConfig, Option, Role, Step
from kit.results import Measured, Rule, incomplete, select

if TYPE_CHECKING:  # the ranks' environment may lack pandas
    import pandas as pd
    import torch

    from kit.labs.rankside import Context


@dataclass(frozen=True, kw_only=True, slots=True)
class ParcelConfig(LabConfig):
    cycles: Annotated[int, Option("number of parcels", low=1, high=1000)] = 3
    size: Annotated[int, Option("numbers in a parcel", low=1, high=1 << 20)] = 1024


def roles(config: ParcelConfig) -> tuple[Role, ...]:
    receivers = tuple(range(1, config.ranks))
    return Role(name="sender", ranks=(0,), phases=f"{__name__}:Sender"), Role(name="receiver", ranks=receivers)


def plan(config: ParcelConfig) -> list[Step]:
    phases = (("pack", ("sender",)), ("deliver", ()), ("look", ("receiver",)))
    return [Step(cycle, phase, who) for cycle in range(1, config.cycles + 1) for phase, who in phases]


def contents(ctx: Context, cycle: int) -> torch.Tensor:
    import torch

    return torch.arange(ctx.config.size, device=ctx.device, dtype=torch.float64) + cycle


class Sender:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def pack(self, cycle: int) -> None:
        self.parcel = contents(self.ctx, cycle)

    def deliver(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        import torch.distributed as dist

        dist.broadcast(self.parcel, 0)


class Receiver:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.shelf: list[torch.Tensor] = []

    def deliver(self, cycle: int) -> None:  # noqa: ARG002 - as above
        import torch.distributed as dist

        self.shelf.append(contents(self.ctx, -1))
        dist.broadcast(self.shelf[-1], 0)

    def look(self, cycle: int) -> None:
        """Compare with what this rank itself knows must have come, not with anything that the sender says."""
        parcel = self.shelf[-1]
        self.ctx.record("wrong_numbers", int((parcel != contents(self.ctx, cycle)).sum()))
        self.ctx.record("old_parcels", int(parcel.equal(contents(self.ctx, cycle - 1))))
        self.put_away()
        self.ctx.record("parcels_left", len(self.shelf))

    def put_away(self) -> None:
        self.shelf.clear()


def worst(metric: str) -> Any:
    def measure(frame: pd.DataFrame, config: Any) -> Measured:
        rows, wanted = select(frame, phase="look", metric=metric), (config["ranks"] - 1) * config["cycles"]
        if len(rows) < wanted:
            incomplete(f"{metric} was recorded {len(rows)} times, not {wanted} (once per receiver and cycle)")
        row = rows.loc[rows["value"].idxmax()]
        return Measured(float(row["value"]), f"{metric}: {row['value']:g} (rank {row['rank']}, cycle {row['cycle']})")

    return measure


RULES = (
    Rule("parcels_are_whole", "Does every number of every parcel arrive?", worst("wrong_numbers")),
    Rule("parcels_are_new", "Is no parcel the one of the cycle before?", worst("old_parcels")),
    Rule("shelf_is_empty", "Is every parcel put away before the next one comes?", worst("parcels_left")),
)


# What a fault puts in place of the right code, which does not know that there are faults.
deliver = Receiver.deliver


def damage(receiver: Receiver, cycle: int) -> None:
    deliver(receiver, cycle)
    receiver.shelf[-1][0] += 1


def hoard(receiver: Receiver) -> None: ...


HERE = f"{__name__}:"
FAULTS = (
    Fault("damaged", "a number changes", "parcels_are_whole", patch={f"{HERE}Receiver.deliver": f"{HERE}damage"}),
    Fault("hoarded", "no parcel is put away", "shelf_is_empty", patch={f"{HERE}Receiver.put_away": f"{HERE}hoard"}),
)
LAB = Definition(
    name="parcel",
    summary="a sender broadcasts parcels; receivers look at them and put them away",
    config=ParcelConfig,
    plan=plan,
    roles=roles,
    phases=f"{HERE}Receiver",
    rules=f"{HERE}RULES",
    charts=f"{__name__.removesuffix('lab')}charts:CHARTS",
    faults=FAULTS,
)
