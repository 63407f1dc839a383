"""How torch computes in this process: settings that code under test may change only for a while."""

from __future__ import annotations

from collections.abc import Callable

import torch

SETTINGS: dict[str, Callable[[], object]] = {
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
    "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
    "torch.is_autocast_enabled('cpu')": lambda: torch.is_autocast_enabled("cpu"),
    "torch.is_autocast_enabled('cuda')": lambda: torch.is_autocast_enabled("cuda"),
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": torch.get_default_device,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.get_deterministic_debug_mode()": torch.get_deterministic_debug_mode,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
}


def settings_now() -> dict[str, object]:
    return {name: setting(read) for name, read in SETTINGS.items()}


def setting(read: Callable[[], object]) -> object:
    """None if torch cannot report it: its old and new names were mixed."""
    try:
        return read()
    except RuntimeError:
        return None
