"""What the bench of Worlds asks: times that a person waits for, and ratios to a control of the same run."""

from kit.results.samples import median_rule

RULES = (
    median_rule("started", "Are two ranks up soon, to their first all-reduce?", 2.5, "s"),
    median_rule("started_with_megatron", "Are two ranks with megatron.core up soon?", 4.5, "s"),
    median_rule("start_over_import", "Does such a start take hardly longer than the import of megatron.core?", 1.3),
    median_rule("second_over_first", "Does a later start of a process take a small part of its first?", 0.3),
    median_rule("stepped", "Does an empty step cost almost nothing?", 0.25, "ms"),
    median_rule("meter_share", "Does measuring a phase of 100 ms cost almost nothing?", 1.0, "%"),
    median_rule("death_told", "Is the death of a rank reported at once?", 0.5, "s"),
    median_rule("restarted", "Are fresh processes there soon after a restart?", 1.0, "s"),
    median_rule("at_once_over_in_turn", "Do calls in flight at once cost little more than one after another?", 2.0),
    median_rule("started_on_two", "Does a start on two hosts take hardly longer than on one?", 1.5),
    median_rule("stepped_on_two", "Does a step on two hosts cost little more than on one?", 2.0),
    median_rule("cut_named", "Is a lost host named soon after the deadline?", 2.0, "s"),
    median_rule("far_side_left", "Is nothing left on a lost host soon?", 30.0, "s"),
    median_rule("both_sides_left", "Is nothing left anywhere when the notebook dies behind a cut cable?", 30.0, "s"),
    median_rule(
        "start_over_ray", "Does a start on Ray take hardly longer than Ray's own start of such actors?", 1.0, "s"
    ),
    median_rule("loop_on_ray", "Does a loop on Ray take hardly longer per step than the embedded one?", 1.2),
    median_rule("vanished", "Is nothing left soon after the notebook's process was killed?", 2.0, "s"),
    median_rule("helped", "Does kit --help answer at once?", 0.3, "s"),
)
