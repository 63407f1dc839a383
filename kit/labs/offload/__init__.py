"""Offload: a Megatron job gives everything back, is measured while it holds nothing, comes back, and trains on bit for bit."""

from kit.labs.definition import Definition
from kit.labs.offload.config import OffloadConfig, fits, plan
from kit.labs.offload.faults import FAULTS

LAB = Definition(
    name="offload",
    summary="a Megatron job releases communicators, weights, gradients and optimizer, reloads them, and trains on bit for bit",
    config=OffloadConfig,
    plan=plan,
    fits=fits,
    phases="kit.labs.offload.ranks.phases:Offload",
    checks="kit.labs.offload.checks:CHECKS",
    presets="kit.labs.offload.checks:PRESETS",
    pictures="kit.labs.offload.pictures:PICTURES",
    first=("size", "ranks", "tp", "pp", "ep", "cycles", "steps", "mode", "implementation"),
    faults=FAULTS,
    preload=("megatron.core",),
)
