"""The phases of the sync lab on a rank: those of a trainer or of a replica, the comparison of transports and the rehearsed failures."""

from __future__ import annotations

from dataclasses import replace

from kit.labs.rankside import Context
from kit.labs.sync.ranks import rehearsals, sweep
from kit.labs.sync.ranks.own import OwnReplica, OwnTrainer
from kit.labs.sync.ranks.replica import SyncReplica
from kit.labs.sync.ranks.side import Side
from kit.labs.sync.ranks.trainer import SyncTrainer


def side(ctx: Context) -> Side:
    if ctx.config.implementation:
        return OwnTrainer(ctx) if ctx.rank < ctx.config.trainer_ranks else OwnReplica(ctx)
    return TrainerPhases(ctx) if ctx.rank < ctx.config.trainer_ranks else ReplicaPhases(ctx)


class TrainerPhases(SyncTrainer):
    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - phases are called with their cycle
        if self.sends:
            sweep.send_once(self, replace(self.targets()[-1], state="paused"))

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        rehearsals.of_trainer(self)
        self.count()


class ReplicaPhases(SyncReplica):
    def sweep(self, cycle: int) -> None:  # noqa: ARG002 - as above
        if self.last:
            sweep.receive(self)

    def rehearse(self, cycle: int) -> None:  # noqa: ARG002 - as above
        rehearsals.of_replica(self)
        self.count()
