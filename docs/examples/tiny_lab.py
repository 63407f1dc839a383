"""A whole lab in one file: does a buffer that every rank sums keep its numbers? CONTRIBUTING.md explains each part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from kit.labs.definition import Definition, Fault, LabConfig, Option, Step
from kit.results import Measured, incomplete, rule, select

if TYPE_CHECKING:  # the ranks' environment may lack pandas
    from collections.abc import Mapping

    import pandas as pd

    from kit.labs.rankside import Context


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyConfig(LabConfig):
    cycles: Annotated[int, Option("number of sums", low=1, high=1000)] = 3
    size: Annotated[int, Option("numbers in the buffer", low=1, high=1 << 20)] = 1024


def plan(config: TinyConfig) -> list[Step]:
    return [Step(cycle, phase) for cycle in range(1, config.cycles + 1) for phase in ("fill", "total")]


class Tiny:
    """The phases; one object per rank."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def fill(self, cycle: int) -> None:
        import torch

        self.buffer = torch.full((self.ctx.config.size,), float(cycle), device=self.ctx.device)

    def total(self, cycle: int) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.buffer)
        wrong = int((self.buffer != cycle * self.ctx.world_size).sum())
        self.ctx.record("wrong_sums", wrong)


right_fill = Tiny.fill


def forget_a_number(self: Tiny, cycle: int) -> None:
    """The fault: what replaces `Tiny.fill` while it is on."""
    right_fill(self, cycle)
    if self.ctx.rank == 1:
        self.buffer[0] = 0


def sums_are_exact(frame: pd.DataFrame, config: Mapping[str, Any]) -> Measured:
    """Is every sum exact?"""
    rows = select(frame, phase="total", metric="wrong_sums")
    if len(rows) < config["cycles"] * config["ranks"]:
        incomplete(f"wrong_sums was recorded {len(rows)} times, not {config['cycles'] * config['ranks']}")
    worst = rows.loc[rows["value"].idxmax()]
    return Measured(float(worst["value"]), f"rank {worst['rank']} in cycle {worst['cycle']} of {config['cycles']}")


HERE = "docs.examples.tiny_lab"  # in your package: my_package.my_lab
FAULTS = (
    Fault(
        "forgets",
        "rank 1 loses a number before the sum",
        "sums_are_exact",
        patch={f"{HERE}:Tiny.fill": f"{HERE}:forget_a_number"},
    ),
)
RULES = (rule(sums_are_exact),)
LAB = Definition(
    name="tiny",
    summary="sum a buffer over all ranks and compare it with the exact sum",
    config=TinyConfig,
    plan=plan,
    phases=f"{HERE}:Tiny",
    rules=f"{HERE}:RULES",
    faults=FAULTS,
)
