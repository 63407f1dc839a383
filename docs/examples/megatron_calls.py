"""Megatron's own offload of gradient buffers, which return as zeros. Run it with groups=false, weights=false, optimizer=false:
kit run offload --set implementation=docs.examples.megatron_calls:GradBuffers"""

from typing import Any


class GradBuffers:
    """Calls offload_grad_buffers() and restore_grad_buffers() of every chunk."""

    def __init__(self, ctx: Any) -> None:
        self.chunks = ctx.chunks

    def release(self) -> None:
        for chunk in self.chunks:
            chunk.offload_grad_buffers()

    def restore(self, _: None) -> None:
        for chunk in self.chunks:
            chunk.restore_grad_buffers()


class GradBuffersThatAreReplaced(GradBuffers):
    """Replaces the buffers. Each parameter's main_grad still refers to the old one, which is never reduced again."""

    def release(self) -> None:
        for chunk in self.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                buffer.grad_data = buffer.grad_data.new_empty(0)

    def restore(self, _: None) -> None:
        for chunk in self.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                buffer.grad_data = buffer.grad_data.new_zeros(buffer.numel)
