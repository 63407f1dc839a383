"""Stream: asynchronous RL under a single controller, with the weight version of every token recomputed."""

from kit.labs.definition import Definition, Fault, exposed_by
from kit.labs.stream.config import StreamConfig, fits, plan, roles

SIMULATED = {"simulated": True, "ranks": 1}

# Known bugs of controllers. `broken.py` has the wrong rules; each is seen by its check in a simulated run.
OF_THE_CONTROLLER = exposed_by(
    SIMULATED,
    Fault(
        "off-by-one-window",
        "the gate blocks one batch too late",
        "no_sample_too_old",
        set={"places": 16},
    ),
    Fault(
        "gate-never-opens",
        "the gate does not hear of new versions, so that dispatch pauses for ever",
        "no_deadlock",
        exit=3,
    ),
    Fault(
        "gate-checked-early",
        "a group counts as running only from its first token on, so that others pass the gate before",
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
        "groups that are unfinished at a sync are thrown away for other prompts, so that long answers are trained less often",
        "no_length_bias",
        set={"steps": 60, "replicas": 8, "group": 2, "window": 2, "answer": (4, 64)},
    ),
    Fault(
        "freshest-first-starves",
        "of the complete groups the youngest are trained first",
        "order_fair",
        set={"sampler": "ready-first", "window": 3, "train_pace_ms": 500, "steps": 20},
    ),
    Fault("waits-for-all", "a step begins only when all its groups are complete", "trains_before_straggler"),
    Fault("finish-per-chunk", "the optimizer steps after every chunk", "one_step_per_batch"),
    Fault("double-bump", "the version rises by two after a step", "version_monotone"),
    Fault("bump-on-abort", "the version rises after a step that was aborted", "version_monotone"),
    Fault("no-abort", "a step that failed is not aborted on the trainer", "abort_on_failure"),
    Fault(
        "cleared-before-finish", "samples are cleared before the optimizer step that needs them", "one_clear_per_finish"
    ),
    Fault(
        "clear-fails-after-finish",
        "the version rises only once samples are cleared; where that fails it never does",
        "one_clear_per_finish",
        exit=3,
    ),
    Fault(
        "resumes-too-early",
        "dispatch goes on once one replica has the new weights",
        "publish_before_use",
    ),
    Fault("caught-up-too-late", "lags are logged by a version that was looked up a step ago", "metrics_true"),
    Fault("waits-at-the-end", "the loop waits for groups after the data has ended", "ends_cleanly", exit=3),
)

FAULTS = OF_THE_CONTROLLER

LAB = Definition(
    name="stream",
    summary="replicas generate while the trainer trains; every token's weight version is recomputed, every group accounted for",
    config=StreamConfig,
    plan=plan,
    roles=roles,
    isolate=True,
    fits=fits,
    phases="kit.labs.stream.ranks.trainer:Trainer",
    checks="kit.labs.stream.checks:CHECKS",
    presets="kit.labs.stream.checks:PRESETS",
    pictures="kit.labs.stream.pictures:PICTURES",
    first=("size", "ranks", "tp", "replicas", "steps", "groups", "group", "sampler", "window", "at_sync"),
    faults=FAULTS,
    preload=("megatron.core",),
)
