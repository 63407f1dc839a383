"""Which device a rank works on, and why. Runs on the rank, before anything touches CUDA."""

from __future__ import annotations

import torch


def choose(wanted: str, local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """`wanted` is auto, cpu or cuda. Auto takes CUDA when every rank of the node gets a card of its own."""
    if wanted == "cpu":
        return torch.device("cpu"), "asked for"
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is a build without CUDA"
    elif not torch.cuda.is_available():
        reason = "torch finds no usable CUDA device"
    elif torch.cuda.device_count() < local_size:
        reason = f"{torch.cuda.device_count()} CUDA devices for {local_size} ranks; each rank needs its own"
    else:
        return torch.device("cuda", local_rank), f"{torch.cuda.device_count()} CUDA devices for {local_size} ranks"
    if wanted == "cuda":
        raise RuntimeError(f"device='cuda' cannot be had: {reason}")
    return torch.device("cpu"), reason
