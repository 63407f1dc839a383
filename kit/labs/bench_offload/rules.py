"""What the bench of offloading asks: ratios to plain copies of the same bytes, cycle by cycle in the same process."""

from kit.results.samples import median_rule

RULES = (
    median_rule("out_over_memcpy", "Do tensors go out at 0.7 of memcpy's speed?", 1 / 0.7),
    median_rule("back_over_populate", "Do tensors come back at 0.8 of the speed of populate-then-copy?", 1 / 0.8),
    median_rule("out_over_pinned", "Do tensors go out at 0.8 of the speed of a pinned copy?", 1 / 0.8),
    median_rule("back_over_pinned", "Do tensors come back at 0.8 of the speed of a pinned copy?", 1 / 0.8),
    median_rule("left_resident", "Is most of the host memory of tensors that are out given back?", 10.0, "%"),
)
