"""Offload buffer by buffer, as verl does. Gradients are dropped and return as zeros.
kit run offload --set groups=false --set implementation=docs.examples.verl_moves:Moves"""

from collections.abc import Iterator
from typing import Any

import torch


class Moves:
    """Moves parameter buffers, parameters and Adam's moments to the host; drops gradient buffers."""

    def __init__(self, ctx: Any) -> None:
        self.chunks, self.optimizer = ctx.chunks, ctx.optimizer
        self.cpu_data: dict[torch.Tensor, torch.Tensor] = {}

    def release(self) -> None:
        for buffer in self.buffers():
            if buffer.param_data is not None:
                self.to_cpu(buffer.param_data)
            buffer.grad_data_size = buffer.grad_data.untyped_storage().nbytes()
            buffer.grad_data.untyped_storage().resize_(0)
        for tensor in self.others():
            if tensor.untyped_storage().nbytes():  # not in a buffer's param_data
                self.to_cpu(tensor)

    def restore(self, _: None) -> None:
        for tensor, host in self.cpu_data.items():
            tensor.untyped_storage().resize_(host.nbytes)
            tensor.copy_(host)
        self.cpu_data.clear()
        for buffer in self.buffers():
            buffer.grad_data.untyped_storage().resize_(buffer.grad_data_size)
            self.clear(buffer)

    def clear(self, buffer: Any) -> None:
        buffer.grad_data.zero_()

    def to_cpu(self, tensor: torch.Tensor) -> None:
        self.cpu_data[tensor] = tensor.cpu() if tensor.is_cuda else tensor.clone()
        tensor.untyped_storage().resize_(0)

    def buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from [*chunk.buffers, *chunk.expert_parallel_buffers]

    def others(self) -> Iterator[torch.Tensor]:
        """Parameters, master copies and states of the optimizers."""
        for chunk in self.chunks:
            yield from (param.data for param in chunk.module.parameters())
        for inner in self.optimizer.chained_optimizers:
            for group in inner.optimizer.param_groups:
                yield from (param.data for param in group["params"])
            for state in inner.optimizer.state.values():
                yield from (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)


# -- with one bug each ---------------------------------------------------------------------------------------------------


class MovesByAlias(Moves):
    """On a CPU, .cpu() returns the tensor itself: the only copy is emptied, and the reload reads undefined memory."""

    def to_cpu(self, tensor: torch.Tensor) -> None:
        self.cpu_data[tensor] = tensor.cpu()
        self.sizes = {**getattr(self, "sizes", {}), tensor: tensor.untyped_storage().nbytes()}
        tensor.untyped_storage().resize_(0)

    def restore(self, _: None) -> None:
        for tensor in self.cpu_data:
            tensor.untyped_storage().resize_(self.sizes[tensor])
        super().restore(None)


class MovesThatLeaveGarbage(Moves):
    """Resizes gradient buffers without zeroing them. NaN stands for the old content of that memory."""

    def clear(self, buffer: Any) -> None:
        buffer.grad_data.fill_(float("nan"))
