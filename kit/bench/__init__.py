"""Benchmarks: the kit, its theoretical limits, and other tools in the same run. `session` has the parts common to all benches.

Ranks load this package for `onranks`, so it imports nothing itself."""

BENCHES = {  # the `Bench` of each name
    "limits": "kit.bench.reference:LIMITS",
    "offload": "kit.bench.offload:OFFLOAD",
    "release": "kit.bench.offload:RELEASE",
    "routing": "kit.bench.offload:ROUTING",
    "share": "kit.bench.loops:SHARE",
    "split": "kit.bench.split:SPLIT",
    "stream": "kit.bench.loops:STREAM",
    "sync": "kit.bench.sync:SYNC",
    "view": "kit.bench.view:VIEW",
    "world": "kit.bench.world:WORLD",
}
