"""An engine of one's own as replica: a model in plain torch, which takes whole tensors by their Hugging Face names.
kit run sync --set serve=docs.examples.own_engine:Plain"""

from collections.abc import Iterator
from typing import Any

import torch

from kit.train.plain import PlainModel


class Plain:
    """Weights in one dict, from which every forward runs."""

    def __init__(self, ctx: Any) -> None:
        self.model = PlainModel(ctx.geometry, dtype=ctx.dtype, device="meta")
        self.tensors = {name: tensor.clone() for name, tensor in ctx.weights.items()}

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as the engine holds it."""
        yield from self.tensors.items()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor may be overwritten afterwards."""
        self.tensors[name].copy_(tensor)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What follows the last token of each row; an error while the engine sleeps."""
        if not all(tensor.untyped_storage().nbytes() for tensor in self.tensors.values()):
            raise RuntimeError("asleep")
        every: torch.Tensor = torch.func.functional_call(self.model, self.tensors, (tokens,))
        return every[:, -1].float()

    def sleep(self) -> None:
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.tensors = {name: tensor.new_empty(0) for name, tensor in self.tensors.items()}

    def wake(self) -> None:
        self.tensors = {name: tensor.new_empty(self.shapes[name]) for name, tensor in self.tensors.items()}


class PlainThatRemembers(Plain):
    """Keeps the answer to a prompt, as a prefix cache keeps keys and values, and does not drop it when weights change."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.answers: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.answers.setdefault(tuple(tokens.flatten().tolist()), super().logits(tokens))


class PlainThatForgetsInTime(PlainThatRemembers):
    """Drops all answers when the last tensor of a version is loaded."""

    def finalize(self) -> None:
        self.answers.clear()
