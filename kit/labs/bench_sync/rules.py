"""What the bench of weight transfer asks: ratios to one memcpy of the same bytes, and to the other ways, turn by turn."""

from kit.results.samples import median_rule

RULES = (
    median_rule("shm_over_memcpy", "Do large tensors cross shared memory at 0.8 of memcpy's speed?", 1 / 0.8),
    median_rule("small_shm_over_memcpy", "Do small tensors cross shared memory at 0.6 of memcpy's speed?", 1 / 0.6),
    median_rule("shm_over_group", "Does shared memory take at most a quarter of the time of the best group?", 1 / 4),
    median_rule("automatic_over_fixed", "Are automatic buckets about as fast as the best fixed size?", 1.1),
)
