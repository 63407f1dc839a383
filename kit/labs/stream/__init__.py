"""Stream: asynchronous RL under a single controller, with the weight version of every token recomputed."""

from kit.labs.definition import Definition
from kit.labs.stream.config import StreamConfig, fits, plan, roles

LAB = Definition(
    name="stream",
    summary="replicas generate while the trainer trains; every token's weight version is recomputed, every group accounted for",
    config=StreamConfig,
    plan=plan,
    roles=roles,
    isolate=True,
    fits=fits,
    phases="kit.labs.stream.ranks.trainer:Trainer",
    checks="kit.labs.stream.checks:CHECKS",
    presets="kit.labs.stream.checks:PRESETS",
    pictures="kit.labs.stream.pictures:PICTURES",
    first=("size", "ranks", "tp", "replicas", "steps", "groups", "group", "sampler", "window", "at_sync"),
    preload=("megatron.core",),
)
