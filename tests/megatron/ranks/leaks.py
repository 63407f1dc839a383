"""Run many cycles of releasing and reloading everything, and record what remains after each."""

import sys

import torch.distributed as dist
from common import census, collect, write
from holders import holders as holders_of

from kit.megatron import groups, model
from kit.megatron.config import ModelConfig
from kit.megatron.tensors import process_memory

dist.init_process_group("gloo")
job = model.build(ModelConfig(tp=2))
job.step(1)
cycles = []
for _ in range(int(sys.argv[1])):
    job.mover.release()
    stats = groups.destroy()
    collect()
    released = census()
    groups.reload(stats["snapshot"])
    job.mover.restore()
    job.step(1)
    collect()
    cycles.append(
        {"released": released, "back": census(), "alive": stats["alive"], "anon": process_memory()["rss_anon"]}
    )
write({"cycles": cycles, "dead": [h.path for h in holders_of(job=job) if not h.alive]})
