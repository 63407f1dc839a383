"""Copy storages to the host and resize them to 0.
kit run offload --set groups=false --set implementation=docs.examples.host_copies:HostCopies"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

Kept = list[tuple[torch.Tensor, int, torch.Tensor]]


class HostCopies:
    """Keeps views as views: parameters and buffers get their bytes back in the same place."""

    def __init__(self, ctx: Any) -> None:
        self.chunks, self.optimizer = ctx.chunks, ctx.optimizer

    def release(self) -> Kept:
        kept: Kept = []
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():  # 0 if another view of it was handled before
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
                kept.append((whole, storage.nbytes(), self.to_host(whole)))
                storage.resize_(0)
        return kept

    def restore(self, kept: Kept) -> None:
        for whole, size, host in kept:
            whole.untyped_storage().resize_(size)
            whole.copy_(host)

    def tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield from self.gradients(buffer)
                yield from [] if buffer.param_data is None else [buffer.param_data]
            yield from chunk.module.buffers()
            yield from (param.data for param in chunk.module.parameters())
        for inner in self.optimizer.chained_optimizers:
            for group in inner.optimizer.param_groups:
                yield from (param.data for param in group["params"])
            for state in inner.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def gradients(self, buffer: Any) -> Iterator[torch.Tensor]:
        yield buffer.grad_data

    def to_host(self, whole: torch.Tensor) -> torch.Tensor:
        # Not whole.cpu(): on a CPU that returns the tensor itself, which the next line empties.
        return torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda).copy_(whole)


# -- with one bug each ---------------------------------------------------------------------------------------------------


class HostCopiesInHalfPrecision(HostCopies):
    """Saves half the host memory by storing 32-bit numbers as bfloat16."""

    def to_host(self, whole: torch.Tensor) -> torch.Tensor:
        return super().to_host(whole.bfloat16() if whole.dtype == torch.float32 else whole)


class HostCopiesThatRestartTheStepCount(HostCopies):
    """Restarts Adam's step count, and so its bias correction."""

    def restore(self, kept: Kept) -> None:
        super().restore(kept)
        for inner in self.optimizer.chained_optimizers:
            for state in inner.optimizer.state.values():
                state["step"] = torch.zeros_like(state["step"])


class HostCopiesThatDropGradients(HostCopies):
    """Gradients return as zeros. The next step starts with zeros too, so training does not show it."""

    def restore(self, kept: Kept) -> None:
        super().restore(kept)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


class HostCopiesThatLeaveGradients(HostCopies):
    """Leaves the gradient buffers on the device."""

    def gradients(self, buffer: Any) -> Iterator[torch.Tensor]:  # noqa: ARG002 - none of them
        return iter(())


class HostCopiesThatReseed(HostCopies):
    """Seeds the random numbers again: every cycle draws the same dropout masks."""

    def restore(self, kept: Kept) -> None:
        super().restore(kept)
        torch.manual_seed(1234)


class HostCopiesThatPileUp(HostCopies):
    """Keeps the host copies of every cycle."""

    def restore(self, kept: Kept) -> None:
        super().restore(kept)
        self.__dict__.setdefault("old", []).append(kept)


class HostCopiesThatLeaveAProcess(HostCopies):
    """Starts a helper process in every cycle and never waits for it."""

    def release(self) -> Kept:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
        return super().release()


class HostCopiesThatStayOpen(HostCopies):
    """Stores copies in files and leaves the file of every cycle open."""

    files: list[Any] = []  # noqa: RUF012 - as real code often has it

    def release(self) -> Kept:
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115 - the bug
        return super().release()

    def to_host(self, whole: torch.Tensor) -> torch.Tensor:
        host = super().to_host(whole)
        self.files[-1].write(host.view(torch.uint8).numpy() if host.dim() else b"")
        return host
