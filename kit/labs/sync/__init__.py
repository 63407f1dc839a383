"""Sync: weights from trainer shards to inference replicas with another layout; complete, exact, in order, with nothing left behind."""

from kit.labs.definition import Definition
from kit.labs.sync.config import SyncConfig, fits, plan, roles
from kit.labs.sync.faults import FAULTS

LAB = Definition(
    name="sync",
    summary="weights go from trainer shards to inference replicas, verified and versioned; no forward runs on torn weights",
    config=SyncConfig,
    plan=plan,
    roles=roles,
    fits=fits,
    phases="kit.labs.sync.ranks.phases:side",
    checks="kit.labs.sync.checks:CHECKS",
    presets="kit.labs.sync.checks:PRESETS",
    pictures="kit.labs.sync.pictures:PICTURES",
    first=("size", "ranks", "tp", "pp", "replicas", "placement", "transport", "cycles", "steps"),
    faults=FAULTS,
    preload=("megatron.core",),
)
