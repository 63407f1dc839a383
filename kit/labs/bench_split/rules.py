"""What the bench of the split step asks: ratios to the plain step, turn by turn in the same processes."""

from kit.results.samples import median_rule

RULES = (
    median_rule("whole_over_plain", "Does a step of one call take as long as the plain step?", 1.02),
    median_rule("five_over_plain", "Does a step of five calls take almost as long as the plain step?", 1.05),
    median_rule("peak_over_plain", "Does a split step have the same peak memory as the plain step?", 1.01),
    median_rule("metrics_over_bare", "Does a loss with metrics take almost as long as the bare loss?", 1.15),
)
