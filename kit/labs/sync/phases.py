"""What a rank makes of the sync lab: its side. One method a phase on either."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.labs.sync.inference import Inference
from kit.labs.sync.trainer import Trainer

if TYPE_CHECKING:
    from kit.labs.rankside import Context
    from kit.labs.sync.side import Side


def side(ctx: Context) -> Side:
    return Trainer(ctx) if ctx.rank < ctx.config.trainer_ranks else Inference(ctx)
