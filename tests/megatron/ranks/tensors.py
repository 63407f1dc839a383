"""Where a model's bytes are, with a model large enough to show in resident memory."""

from typing import Any

import torch.distributed as dist
from common import attempt, census, write

from kit.megatron import groups, model
from kit.megatron.config import ModelConfig
from kit.megatron.tensors import inventory, offload_natively


def aliases(job: model.Training) -> dict[str, bool]:
    """Whether each parameter's main_grad still lies inside DDP's gradient buffer."""
    buffers = [b for chunk in job.chunks for b in chunk.buffers]
    ranges = [(b.grad_data.data_ptr(), b.grad_data.data_ptr() + b.grad_data.nbytes) for b in buffers]
    return {
        name: any(low <= p.main_grad.data_ptr() < high for low, high in ranges) for name, p in job.named_parameters()
    }


def buckets_alias(job: model.Training) -> bool:
    return all(
        bucket.grad_data.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr() != 0
        for chunk in job.chunks
        for buffer in chunk.buffers
        for bucket in buffer.buckets
    )


def case(*, distributed_optimizer: bool, dtype: str) -> dict[str, Any]:
    config = ModelConfig(size="125m", layers=1, seq=16, distributed_optimizer=distributed_optimizer, dtype=dtype)
    job = model.build(config)
    job.step(1)
    job.mover.arena.open()  # its file stays open until the mover is closed
    fds = census()["fds"]
    cycles = []
    before = job.hashes()
    for kinds in (("grads",), ("weights", "optimizer"), ("weights", "grads", "optimizer")):
        out = job.mover.release(kinds)
        left = {i.name: i.kind for i in inventory(job.chunks, job.optimizer, job.device)}
        twice = attempt(job.mover.release)
        back = job.mover.restore()
        cycles.append(
            {
                "kinds": kinds,
                "out": out,
                "back": back,
                "left": sorted(set(left.values())),
                "twice": twice,
                "same": job.hashes() == before,
                "aliases": all(aliases(job).values()) and buckets_alias(job),
            }
        )
    result = {
        "cycles": cycles,
        "idle_restore": job.mover.restore()["tensors"],
        "unknown": attempt(lambda: job.mover.release(("everything",))),
        "native": attempt(lambda: offload_natively(job.chunks, job.optimizer, job.device)),
        "fds": census()["fds"] - fds,
    }
    job.step(1)
    job.mover.close()
    groups.destroy()
    return result


dist.init_process_group("gloo")
write(
    {
        "float32": case(distributed_optimizer=False, dtype="float32"),
        "bfloat16": case(distributed_optimizer=True, dtype="bfloat16"),
    }
)
