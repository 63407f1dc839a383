"""The known bugs of the lab `stream` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

SIMULATED = {"simulated": True, "ranks": 1}

# Known bugs of controllers. `broken.py` implements them; the named check detects each in a simulated run.
OF_THE_CONTROLLER = exposed_by(
    SIMULATED,
    Fault("off-by-one-window", "the gate blocks one batch too late", "no_sample_too_old", set={"places": 16}),
    Fault(
        "gate-never-opens",
        "the gate never learns of new versions, so dispatch stops for good",
        "no_deadlock",
        exit=3,
    ),
    Fault(
        "gate-checked-early",
        "a group counts as running only from its first token on, so too many groups pass the gate",
        "capacity_kept",
        set={"sampler": "capacity", "places": 32},
    ),
    Fault(
        "unbounded-buffer",
        "groups are dispatched although the buffer is full",
        "capacity_kept",
        set={"sampler": "windowed"},
    ),
    Fault(
        "drops-oldest",
        "a full buffer drops its oldest complete group without an event",
        "every_group_once",
        set={"sampler": "windowed"},
    ),
    Fault("lost-group", "a group whose task crashes when it is complete never ends", "every_group_once"),
    Fault("partial-group", "a group is complete without its last sample", "groups_whole"),
    Fault(
        "uncounted-partial",
        "tokens of samples that were given up are not counted as wasted",
        "tokens_conserved",
        set={"at_sync": "abort"},
    ),
    Fault(
        "slot-leak",
        "an unfinished group that ends does not give its slot back",
        "permits_return",
        set={"sampler": "windowed"},
    ),
    Fault(
        "discard-and-requeue",
        "groups that are unfinished at a sync are replaced by other prompts, so long answers are trained less often",
        "no_length_bias",
        set={"steps": 60, "replicas": 8, "group": 2, "window": 2, "answer": (4, 64)},
    ),
    Fault(
        "freshest-first-starves",
        "the youngest complete groups are trained first",
        "order_fair",
        set={"sampler": "ready-first", "window": 3, "train_pace_ms": 500, "steps": 20},
    ),
    Fault("waits-for-all", "a step begins only when all its groups are complete", "trains_before_straggler"),
    Fault("finish-per-chunk", "the optimizer steps after every chunk", "one_step_per_batch"),
    Fault("double-bump", "the version rises by two after a step", "version_monotone"),
    Fault("bump-on-abort", "the version rises after an aborted step", "version_monotone"),
    Fault("no-abort", "a failed step is not aborted on the trainer", "abort_on_failure"),
    Fault(
        "cleared-before-finish", "samples are cleared before the optimizer step that needs them", "one_clear_per_finish"
    ),
    Fault(
        "clear-fails-after-finish",
        "the version rises only after samples are cleared, and never if that fails",
        "one_clear_per_finish",
        exit=3,
    ),
    Fault("resumes-too-early", "dispatch continues once a single replica has the new weights", "publish_before_use"),
    Fault("caught-up-too-late", "lags are logged with the version of the previous step", "metrics_true"),
    Fault("logger-raises", "the run ends when the logger raises", "logger_is_harmless", exit=3),
    Fault("marks-untrained", "a group left out of its microbatch is marked trained", "notes_backed"),
    Fault("bumps-unfinished", "the version rises although no optimizer step was ordered", "notes_backed"),
    Fault("resume-replays", "after a resume, groups are trained a second time", "resume_equals"),
    Fault(
        "accepted-from-zero",
        "after a resume, groups accepted earlier are not counted, so too many start",
        "resume_equals",
        set={"sampler": "capacity", "places": 32},
    ),
    Fault("waits-at-the-end", "the loop waits for groups after the data has ended", "ends_cleanly", exit=3),
)

SMALL = {"ranks": 2, "replicas": 1, "steps": 3, "groups": 2, "group": 2, "lr": 3e-3}
# Samples span a sync: the replica's pace makes each of them take longer than a step of the trainer, on a busy machine too.
ACROSS = {"slots": 4, "answer": (14, 20), "decode": 2, "pace_ms": 40}

# Known bugs of ranks, in `ranks/broken.py`, and one of a port; the named check detects each in a run on live ranks.
OF_RANKS = exposed_by(
    SMALL,
    Fault(
        "stamp-after-reply",
        "all tokens of a sample are stamped with the version at its completion",
        "stamps_true",
        set=ACROSS,
    ),
    Fault(
        "stamp-at-publish",
        "a replica stamps tokens with a new version one call too late",
        "stamps_true",
        set=ACROSS,
    ),
    Fault(
        "one-stamp-per-group",
        "all tokens of a sample are stamped with the version of the first token",
        "stamps_per_token",
        set=ACROSS,
    ),
    Fault(
        "temperature-mismatch",
        "recorded log-probabilities are those of temperature 1",
        "behaviour_logprob",
        set={"temperature": 1.3},
    ),
    Fault(
        "prefix-cache-survives",
        "cached prompts have no version and survive a sync",
        "no_stale_prefix",
        set={**ACROSS, "at_sync": "recompute"},
    ),
    Fault(
        "keeps-kv-silently",
        "the KV cache is kept where the config says recompute",
        "kv_policy_kept",
        set={**ACROSS, "at_sync": "recompute"},
    ),
    Fault("torn-read", "a replica decodes while half of its weights are still old", "no_torn_generation", set=ACROSS),
    Fault(
        "rng-reset", "all samples of a group draw the same random numbers", "samples_differ", set={"answer": (8, 20)}
    ),
    Fault(
        "prev-by-new-weights",
        "previous log-probabilities are computed after an update of the same step",
        "on_policy_ratio_one",
        set={"batch": 2},
    ),
    Fault(
        "positional-groups",
        "advantages group samples by their position, not by their group",
        "advantage_by_group",
        set={"min_groups": 2},
    ),
    Fault("rejected-row-counts", "the baseline of a group counts a rejected sample", "advantage_by_group"),
    Fault(
        "wrong-denominator",
        "importance weights divide by log-probabilities of a policy that did not generate the tokens",
        "is_weight_right",
    ),
    Fault(
        "rescores-samples",
        "the trainer puts its own version and log-probabilities into the samples that it trains on",
        "recomputed_as_sampled",
        set=ACROSS,
    ),
    Fault(
        "blocks-the-loop",
        "the controller blocks while it waits for the trainer and answers no questions",
        "controller_answers",
        set={"train_pace_ms": 400},
    ),
    Fault("rollout-dies", "a replica is killed while it decodes", "replicas_answer", exit=3),
    Fault("rollout-stalls", "a replica stops answering", "replicas_answer", exit=3, set={"deadline_s": 6}),
)

FAULTS = (*OF_RANKS, *OF_THE_CONTROLLER)
