"""What the bench of streaming asks; the control is the plain loop of the same run, or the same tokens with every stamp off by one."""

from kit.results.samples import median_rule

RULES = (
    median_rule(
        "outcomes_differ", "Does the loop with staleness 0 give the outcomes of the plain loop?", 0.0, "1", worst=True
    ),
    median_rule("wrong_stamps", "Does every decidable token have the right stamp?", 0.0, "1", worst=True),
    median_rule("undecidable_tokens", "Are most tokens decidable?", 0.5, "ratio"),
    median_rule("samples_without_sync", "Does a sync fall into a tenth of the samples?", 0.9, "ratio"),
    median_rule("wrong_stamps_missed", "Are wrong stamps of the control found?", 0.01, "ratio"),
    median_rule("possible_over_gain", "Does streaming reach 0.9 of the possible speed-up?", 1 / 0.9, "ratio"),
    median_rule("exposed_over_plain", "Is generation hidden after the first fill?", 0.1, "ratio"),
    median_rule("error_over_gain", "Does the reward on policy rise by five standard errors?", 0.2, "ratio"),
)
