"""What the bench of releasing asks: the exact way against a common one that makes communicators by the same mechanism."""

from kit.results.samples import median_rule

RULES = (median_rule("exact_over_common", "Is the exact way as fast as a common one with the same mechanism?", 1.0),)
