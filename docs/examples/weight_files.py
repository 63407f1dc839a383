"""Weights through a file: the trainer writes all of them, every receiver reads them and copies them into its own tensors.

This is the common way without a transport. `kit bench sync` compares it with transports, in the parts `model.files`, `small.files` and
`large.files`.
"""

import warnings
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint

Tensors = dict[str, torch.Tensor]


class Safetensors:
    @staticmethod
    def write(folder: Path, tensors: Tensors) -> None:
        save_file(tensors, folder / "model.safetensors")

    @staticmethod
    def read(folder: Path, tensors: Tensors) -> None:
        with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))


class Checkpoint:
    """torch.distributed.checkpoint, used by one process alone, about which it warns."""

    @staticmethod
    def write(folder: Path, tensors: Tensors) -> None:
        with warnings.catch_warnings(action="ignore"):
            checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)

    @staticmethod
    def read(folder: Path, tensors: Tensors) -> None:
        with warnings.catch_warnings(action="ignore"):
            checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
