"""A batch of sends and receives over a handle: which groups torch gets, what arrives, and how a released group refuses it."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from common import attempt, write

dist.init_process_group("gloo")

from kit.megatron import groups  # noqa: E402 - the default group is there before the handles come

given: list[str] = []
plain_check = c10d._check_p2p_op_list


def noting(ops: Any) -> None:
    """Record the types of the batch's groups, then call torch's own check, which this replaces."""
    given.extend({type(op.group).__name__ for op in ops})
    plain_check(ops)


def exchange(group: Any) -> float:
    """Return the sum of the values received from the other rank."""
    rank = dist.get_rank()
    out, into = torch.full((4,), float(rank + 1)), torch.zeros(4)
    ops = [dist.P2POp(dist.isend, out, 1 - rank, group), dist.P2POp(dist.irecv, into, 1 - rank, group)]
    held = [op.group for op in ops]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert [op.group for op in ops] == held
    return into.sum().item()


def main() -> None:
    c10d._check_p2p_op_list = noting
    groups.install()
    group: Any = dist.new_group([0, 1], group_desc="PIPELINE")
    result: dict[str, Any] = {"sums": [exchange(None), exchange(group)], "given": given}
    result["empty"] = attempt(lambda: dist.batch_isend_irecv([]))
    ops = [dist.P2POp(dist.isend, torch.zeros(1), 1 - dist.get_rank(), group)]
    inner, group.kit_inner = group.kit_inner, None
    result["released"] = attempt(lambda: dist.batch_isend_irecv(ops))
    group.kit_inner = inner
    groups.uninstall()
    result["uninstalled"] = exchange(None)
    write(result)


main()
