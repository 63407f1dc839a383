"""What only the judge of the offload lab computes: the size that a job must have, and how training with releases differs from controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.megatron import observe
from kit.megatron.config import ModelConfig, model_bytes

Steps = list[dict[str, float]]  # the numbers of each training step


def expected_bytes(job: Any, ranks: int) -> dict[str, int]:
    """Bytes of each kind that a rank of the kit's own job must have, from its geometry; empty for your own."""
    config = getattr(job, "config", None)
    if not isinstance(config, ModelConfig):
        return {}
    sizes = model_bytes(config, ranks=ranks, stage=observe.stage())
    return {"weights": sizes["params"], "grads": sizes["grads"], "optimizer": sizes["optimizer"]}


def unequal(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names with another digest, or with one on one side only."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def steps_that_differ(trained: Steps, control: Steps) -> int:
    pairs = zip(trained, control, strict=False)
    return sum(step != expected for step, expected in pairs) + abs(len(trained) - len(control))


def first_departure(trained: Steps, control: Steps) -> tuple[int, str] | None:
    """The first step, counted from 1, at which training differs from the control, and the difference."""
    for number, (step, expected) in enumerate(zip(trained, control, strict=False), 1):
        if step != expected:
            names = [name for name in {**step, **expected} if step.get(name) != expected.get(name)]
            return number, ", ".join(f"{name} {step.get(name)} vs {expected.get(name)}" for name in names)
    if len(trained) != len(control):
        return min(len(trained), len(control)) + 1, f"{len(trained)} steps vs {len(control)}"
    return None
