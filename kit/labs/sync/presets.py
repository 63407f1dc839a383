"""Sets of tolerances for the sync lab, as a person may want them instead of the lab's own. What a set leaves out stays the lab's."""

PRESETS = {
    "strict": {
        "logits_rel": 0.0,  # the same bits, which only equal layouts on both sides can give
        "growth_mib": 10.0,  # a host's allocator moves by some MiB between two versions
        "others_mib": 0.0,  # nobody else's memory may move
    },
    "common practice": {
        "logits_rel": 3e-2,  # a trainer's and an engine's numbers are called equal within a few per cent
        "growth_mib": 500.0,  # what stays below the noise of a resident-set plot of an engine
        "copies": 3.0,  # a copy at the sender, one on its way, one that is put together
        "others_mib": 50.0,
    },
}
