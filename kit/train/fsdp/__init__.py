"""Training steps on FSDP2 (`fully_shard`, DTensor parameters): the plain one and the one that is cut into a stream."""

from kit.train.fsdp.job import (
    FsdpJob,
    Reductions,
    build,
    counted,
    forget_gradients,
    full_gradients,
    full_parameters,
    hooks,
    nonzero_gradients,
    reduction_groups,
    state,
)
from kit.train.fsdp.steps import FsdpSplit, FsdpSync

__all__ = [
    "FsdpJob",
    "FsdpSplit",
    "FsdpSync",
    "Reductions",
    "build",
    "counted",
    "forget_gradients",
    "full_gradients",
    "full_parameters",
    "hooks",
    "nonzero_gradients",
    "reduction_groups",
    "state",
]
