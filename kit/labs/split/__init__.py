"""Split: a training step that is fed in chunks gives the numbers of the plain step, for any number of chunks."""

from kit.labs.definition import Definition
from kit.labs.split.config import SplitConfig, fits, plan
from kit.labs.split.faults import FAULTS

LAB = Definition(
    name="split",
    summary="a training step fed as a stream of microbatches gives the loss, gradients, weights and metrics of the plain step",
    config=SplitConfig,
    plan=plan,
    fits=fits,
    phases="kit.labs.split.ranks.phases:Split",
    checks="kit.labs.split.checks:CHECKS",
    presets="kit.labs.split.checks:PRESETS",
    pictures="kit.labs.split.pictures:PICTURES",
    first=("backend", "size", "ranks", "tp", "pp", "ep", "steps", "chunks", "recipe", "level", "implementation"),
    faults=FAULTS,
    preload=("megatron.core",),
)
