"""What the bench of weight transfer asks: ratios to one memcpy of the same bytes, and to the other ways, turn by turn."""

from kit.labs.sync.lab import MOST_BESIDE
from kit.results.samples import median_rule

RULES = (
    median_rule("staged_pause", "Does a staged sync stop serving for at most 15 % of its time?", 15.0, "%"),
    median_rule("shm_over_memcpy", "Do large tensors cross shared memory at 0.8 of memcpy's speed?", 1 / 0.8),
    median_rule("small_shm_over_memcpy", "Do small tensors cross shared memory at 0.6 of memcpy's speed?", 1 / 0.6),
    median_rule("shm_over_copies", "Do large tensors reach a receiver in the time of two copies at once?", 1.05),
    median_rule("two_over_one", "Do two receivers take at most twice the time of one?", 2.0),
    median_rule("verified", "Do digests of every tensor on both ends add at most 60 %?", 1.6),
    median_rule("verified_beside", "Do they add at most 30 % where each end has a core for them?", 1.3),
    median_rule("small_verified", "Do digests of small tensors at most treble the time?", 3.0),
    median_rule("expand_over_memcpy", "Does a replica that wakes get its weights in the time of one copy?", 1.1),
    median_rule("adopted_over_copied", "Does a replica wake by a mapping about as soon as by a copy?", 1.25),
    median_rule(
        "cached_once", "Are an offloaded trainer's weights on the host once with arena=cache?", MOST_BESIDE, "copies"
    ),
    median_rule("shm_over_group", "Does shared memory take at most a quarter of the time of the best group?", 1 / 4),
    median_rule("delta_over_needed", "Does a delta bring at most twice the bytes of what changed?", 2.0),
    median_rule("terms_predict", "Do two terms predict the time of a third size, within a factor of 2?", 2.0),
    median_rule(
        "engine_sync_over_load", "Does a sync to vLLM take at most twice the time of its own load from memory?", 2.0
    ),
    median_rule("automatic_over_fixed", "Are automatic buckets about as fast as the best fixed size?", 1.1),
)
