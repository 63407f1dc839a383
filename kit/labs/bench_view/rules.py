"""What the bench of panels asks: how long a person waits."""

from kit.results.samples import median_rule

RULES = (
    median_rule("run_opened", "Is a large run read and judged soon?", 2.0, "s"),
    median_rule("verdict_moved", "Is the verdict shown at once when a limit moves?", 100.0, "ms"),
    median_rule("runs_listed", "Is the first page of the table of runs there soon?", 1.0, "s"),
    median_rule("plot_moved", "Is a plot drawn at once when a limit moves?", 300.0, "ms"),
    median_rule("moved_over_first", "Is a plot drawn anew sooner than for the first time?", 0.9),
)
