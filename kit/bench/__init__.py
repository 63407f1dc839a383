"""Side-by-side measurements: what the kit does, its limits, and other tools in the same run. `session` has the frame of every bench.

Ranks load this package for `onranks`, so it imports nothing itself."""

BENCHES = {  # by name, the `Bench` of each
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
