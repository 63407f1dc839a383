"""What the bench of routing asks."""

from kit.results.samples import median_rule

RULES = (
    median_rule(
        "numbers_differ", "Does a job give the same numbers through torchcomms as without?", 0.0, "1", worst=True
    ),
)
