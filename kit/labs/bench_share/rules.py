"""What the bench of time sharing asks; the controls are each pipeline alone in the same run, and a bound that is computed before it."""

from kit.results.samples import median_rule

RULES = (
    median_rule("outcomes_differ", "Do two pipelines together give the outcomes of each alone?", 0.0, "1", worst=True),
    median_rule("two_owners", "Does no device have two owners?", 0.0, "1", worst=True),
    median_rule("shared_over_bound", "Do both pipelines take hardly longer than the bound?", 1.15, "ratio"),
    median_rule("shared_over_serial", "Do pipelines that wait take less time together than in turn?", 0.8, "ratio"),
    median_rule("bound_over_fastest", "Is every loop slower than the bound?", 1.0, "ratio", worst=True),
    median_rule("switch_over_parts", "Does a switch take hardly longer than its parts alone?", 1.3, "ratio"),
    median_rule("adapters_over_base", "Does a replica with adapters serve hardly slower than the base?", 1.3, "ratio"),
    median_rule("bundle_moved", "Does the scheduler move a bundle at once?", 1.0, "ms"),
    median_rule("plan_from_nothing", "Does the scheduler plan from nothing at once?", 25.0, "ms"),
    median_rule("large_plan", "Does the scheduler plan for 64 pipelines and 1024 devices at once?", 100.0, "ms"),
)
