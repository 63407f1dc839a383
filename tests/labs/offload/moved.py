"""Releasers that make new tensors at every reload; they run on ranks, and in tests without any."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Remade:
    """Right: a parameter's data is copied from the host, on all ranks or on none."""

    retries = True

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.host: dict[str, torch.Tensor] = {}

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [named for chunk in self.ctx.chunks for named in chunk.named_parameters()]

    def release(self) -> None:
        self.host = {name: parameter.data.clone() for name, parameter in self.parameters()}
        self.empty()

    def empty(self) -> None:
        for _, parameter in self.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def restore(self, state: None) -> None:
        failure, name = "", ""
        try:
            for name, parameter in self.parameters():
                parameter.data = self.host[name].clone()
        except RuntimeError as error:
            failure = self.named(name, error)
        failures: list[str] = [failure] * self.ctx.world_size
        if self.ctx.world_size > 1:
            dist.all_gather_object(failures, failure)
        if any(failures):
            self.undo()
            raise RuntimeError("; ".join(filter(None, failures)))
        self.host.clear()

    def named(self, name: str, error: Exception) -> str:
        return f"rank {self.ctx.rank}: {name}: {error}"

    def undo(self) -> None:
        self.empty()


class KeepsPart(Remade):
    """Wrong: what came before the error stays on the device."""

    def undo(self) -> None: ...


class FirstUnguarded(Remade):
    """Wrong: the first parameter comes back before anything is guarded, and an error there is torch's own."""

    def restore(self, state: None) -> None:
        name, parameter = self.parameters()[0]
        parameter.data = self.host[name].clone()
        super().restore(state)


class LastUnguarded(Remade):
    """Wrong: the last parameter comes back after everything was settled."""

    def restore(self, state: None) -> None:
        name, parameter = self.parameters()[-1]
        last = self.host[name]
        super().restore(state)
        parameter.data = last.clone()


class WarmsUp(Remade):
    """Right: its first reload also makes room that it keeps, so that later ones make fewer allocations."""

    room: torch.Tensor | None = None

    def restore(self, state: None) -> None:
        if self.room is None:
            self.room = torch.zeros(16, 16)
        super().restore(state)


class NamesNoTensor(Remade):
    def named(self, name: str, error: Exception) -> str:
        return f"rank {self.ctx.rank}: {error}"


class Unseen(Remade):
    """Right, with memory that torch's operations do not make."""

    retries = True

    def restore(self, state: None) -> None:
        for name, parameter in self.parameters():
            copy = torch.frombuffer(bytearray(self.host[name].numpy().tobytes()), dtype=parameter.dtype)
            parameter.data = copy.view(self.host[name].shape)
