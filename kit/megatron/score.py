"""Log-probabilities of given tokens by a training job as it is: the previous policy, or a reference.

Each data rank scores its share of the rows in microbatches of the step's size, so that a step on the same weights computes the same bits.
Limits: as the split step, one model chunk a rank; all rows have the same length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kit.megatron.split import data_group, data_ranks, last_stage, synchronise
from kit.train.batch import cut, cuts, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.megatron.split import Job
    from kit.train.batch import Batch


def share(batch: Batch) -> Batch:
    """The rows of this data rank."""
    each = rows(batch) // data_ranks()
    mine = dist.get_rank(data_group())
    return cut(batch, mine * each, (mine + 1) * each)


@torch.no_grad()
def logprobs(job: Job, batch: Batch, mbs: int) -> torch.Tensor:
    """[rows, length] float32 on every rank's host; 0.0 in column 0. Collective; rows must fill whole microbatches on each data rank."""
    pieces = list(cuts(share(batch), mbs))
    found = torch.cat([_forward(job, piece) for piece in pieces]) if pieces else None
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, (dist.get_rank(data_group()), found) if last_stage() else None)
    by_share: dict[int, torch.Tensor] = dict(filter(None, tables))
    whole = torch.cat([by_share[place] for place in sorted(by_share)])
    return torch.nn.functional.pad(whole, (1, 0))


def _forward(job: Job, piece: Batch) -> torch.Tensor:
    """Of one microbatch, [rows, length - 1], on the last stage; elsewhere nothing that counts."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        ids = next(data)["input_ids"].to(job.device)
        places = torch.arange(ids.shape[1] - 1, device=job.device).expand(ids.shape[0], -1)
        out = model(ids[:, :-1], places, None, labels=ids[:, 1:].contiguous())
        return out, lambda losses, **_: -losses.float()

    outputs = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([piece]),
        model=job.chunks,
        num_microbatches=1,
        seq_length=piece["input_ids"].shape[1] - 1,
        micro_batch_size=rows(piece),
        forward_only=True,
        collect_non_loss_data=True,
    )
    synchronise(job.device)
    return outputs[0].cpu() if last_stage() else torch.empty(0)
