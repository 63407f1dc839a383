"""What the bench of time sharing asks; the controls are each pipeline alone and the bound by arithmetic, in the same run."""

from kit.results.samples import median_rule

RULES = (
    median_rule("outcomes_differ", "Do two pipelines together give the outcomes of each alone?", 0.0, "1", worst=True),
    median_rule("two_owners", "Does no device have two owners?", 0.0, "1", worst=True),
    median_rule("shared_over_bound", "Do both pipelines take hardly longer than the bound?", 1.15, "ratio"),
    median_rule("switch_over_parts", "Does a switch take hardly longer than its parts alone?", 1.3, "ratio"),
    median_rule("bundle_moved", "Does the scheduler move a bundle at once?", 1.0, "ms"),
    median_rule("plan_from_nothing", "Does the scheduler plan from nothing at once?", 25.0, "ms"),
)
