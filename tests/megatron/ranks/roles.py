"""Two jobs in one set of ranks: the first two ranks train with tp=2, the last one alone."""

from datetime import timedelta

import torch
import torch.distributed as dist
from common import attempt, write

from kit.megatron import groups, model
from kit.megatron.config import ModelConfig
from kit.megatron.serve import as_world

dist.init_process_group("gloo")
groups.install()
rank = dist.get_rank()
roles = [[0, 1], [2]]
made = [dist.new_group(ranks) for ranks in roles]
mine = next(place for place, ranks in enumerate(roles) if rank in ranks)
with as_world(made[mine]):
    inside = (dist.get_rank(), dist.get_world_size())
    job = model.build(ModelConfig(tp=len(roles[mine]), layers=2, seq=16))
    log = job.step(2)
outside = (dist.get_rank(), dist.get_world_size())
dist.new_group([0, 1, 2], timeout=timedelta(seconds=20))  # the two jobs made different numbers of groups
total = torch.tensor([float(rank)])
dist.all_reduce(total)
with as_world(made[mine]):
    log += job.step(1)


def other() -> None:
    with as_world(made[1 - mine]):
        raise AssertionError("nobody may act for a group that is not its own")


write({"inside": inside, "outside": outside, "log": log, "total": total.item(), "other": attempt(other)})
dist.destroy_process_group()
