"""A job in plain PyTorch, with dropout and without Megatron, for the offload lab to release and reload.
kit run offload --set model=docs.examples.plain_job:Job"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Job:
    """Data parallel by hand: `chunks`, `optimizer`, and step(n). Gives the same numbers when built again."""

    def __init__(self, ctx: Any) -> None:
        torch.manual_seed(ctx.config.seed)
        self.rank, self.ranks = ctx.rank, ctx.world_size
        self.net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 1)).to(ctx.device)
        self.chunks = [self.net]
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.done = 0

    def step(self, n: int) -> list[dict[str, float]]:
        return [self.one() for _ in range(n)]

    def one(self) -> dict[str, float]:
        self.optimizer.zero_grad()
        loss = self.net(self.rows()).square().mean()
        loss.backward()
        for param in self.net.parameters():
            dist.all_reduce(param.grad)
            param.grad /= self.ranks
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        return {"loss": loss.item(), "grad_norm": norm.item()}

    def rows(self) -> torch.Tensor:
        """Rows from a separate generator, seeded by step and rank."""
        generator = torch.Generator().manual_seed(self.done * self.ranks + self.rank)
        return torch.randn(8, 256, generator=generator).to(self.net[0].weight.device)


# -- with one bug each ---------------------------------------------------------------------------------------------------


class JobWithUnseededRows(Job):
    """Every process draws other rows: no two runs can be compared."""

    def rows(self) -> torch.Tensor:
        generator = torch.Generator()
        generator.seed()
        return torch.randn(8, 256, generator=generator).to(self.net[0].weight.device)


class JobWithAHiddenAverage(Job):
    """Keeps an average of its weights in a hidden place, so it is never released."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.average = [param.detach().clone() for param in self.net.parameters()]

    def one(self) -> dict[str, float]:
        done = super().one()
        for mean, param in zip(self.average, self.net.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.01)
        return done
