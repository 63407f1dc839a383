"""Sets of tolerances for the sync lab. A tolerance that a set does not name keeps the lab's default."""

PRESETS = {
    "strict": {
        "logits_rel": 0.0,  # bit for bit, which only equal layouts can give
        "growth_mib": 10.0,  # the host allocator varies by some MiB between versions
        "others_mib": 0.0,  # memory of other processes may not change
    },
    "common practice": {
        "logits_rel": 3e-2,  # usual between a trainer and an inference engine: a few percent
        "growth_mib": 500.0,  # below the noise of an engine's resident set
        "copies": 3.0,  # one copy at the sender, one in transit, one being assembled
        "others_mib": 50.0,
    },
}
