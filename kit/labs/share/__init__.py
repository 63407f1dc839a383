"""Share: two RL pipelines take turns on the same devices, under a scheduler that is checked from outside."""

from kit.labs.definition import Definition
from kit.labs.share.config import ShareConfig, fits, plan, roles
from kit.labs.share.faults import FAULTS

LAB = Definition(
    name="share",
    summary="two pipelines share devices in time; each computes bit for bit what it computes alone",
    config=ShareConfig,
    plan=plan,
    roles=roles,
    isolate=True,
    fits=fits,
    phases="kit.labs.share.ranks.broken:train",
    checks="kit.labs.share.checks:CHECKS",
    presets="kit.labs.share.checks:PRESETS",
    pictures="kit.labs.share.pictures:PICTURES",
    foreign="kit.labs.share.foreign:settings_of",
    first=("scenario", "steps_a", "steps_b", "answer_a", "answer_b", "groups", "group", "planner", "controls"),
    faults=FAULTS,
    preload=("megatron.core",),
)
