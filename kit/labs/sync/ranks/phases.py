"""The phases of the sync lab on a rank, one method each: those of the trainer and those of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.labs.sync.ranks import inference, rehearse, sweep, trainer

if TYPE_CHECKING:
    from kit.labs.rankside import Context
    from kit.labs.sync.ranks.side import Side


class Trainer(trainer.Trainer):
    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        if self.sends:
            sweep.send(self)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        rehearse.trainer(self)
        self.count()


class Inference(inference.Inference):
    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.sweeps:
            sweep.receive(self)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        rehearse.inference(self)
        self.count()


def side(ctx: Context) -> Side:
    return Trainer(ctx) if ctx.rank < ctx.config.trainer_ranks else Inference(ctx)
