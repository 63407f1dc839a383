"""The known bugs of the lab `share` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

# Known bugs. Those of the desk and of pipelines show on simulated ranks; `kit.share.broken` and `simulated.py` implement them.
SIMULATED = {"simulated": True}

OF_THE_DESK = exposed_by(
    SIMULATED,
    Fault("double-allocation", "a device freed in a cycle is counted for every request of the cycle", "one_owner"),
    Fault("expand-first", "replicas wake before others on their devices sleep", "shrink_before_expand", exit=3),
    Fault("lost-device", "the devices of a dead pipeline never become idle again", "devices_conserved"),
    Fault("priority-inverted", "the lowest priority is served first", "priority_kept"),
    Fault("youngest-first", "of requests with equal priority, the last is served first", "priority_kept"),
    Fault("no-floor", "a pipeline with little demand may be left without a replica", "no_starvation"),
    Fault("no-validation", "a plan is executed without a trial on a copy", "plan_valid"),
    Fault("never-rebalances", "devices stay where they are as long as nobody waits", "fair_share"),
    Fault("planner-ignores-tp", "every replica counts as one device, regardless of its size", "plan_as_specified"),
    Fault("shrinks-for-nothing", "a request that cannot be met puts replicas to sleep", "plan_as_specified"),
    Fault("half-replica", "a replica wakes on some of its devices only", "plan_valid"),
    Fault("stomps-planned-release", "after a death, a pending planned release is forgotten", "planned_release_once"),
    Fault("progress-not-ended", "a finished progress stream is still counted", "progress_ended"),
    Fault("progress-unclamped", "the excess of one stream counts for another", "progress_ended"),
    Fault(
        "one-shot-generation",
        "a pipeline that lost its last replica is never considered again",
        "no_starvation",
        exit=3,
    ),
    Fault("no-watchdog", "a consumed request is never repeated", "no_starvation"),
    Fault("waits-for-all", "a request for generation waits for every replica", "no_starvation"),
    Fault("admits-at-init", "the second pipeline starts before the first has handed over", "admission"),
    Fault("trains-on-at-once", "the first pipeline continues training before the second is set up", "admission"),
    Fault("forgets-waiters", "requests that wait for a leaving pipeline get no answer", "no_request_lost"),
    Fault("dead-coordinator", "the desk does not handle the death of a pipeline", "dead_pipeline_leaves"),
    Fault("lock-held-across-call", "the desk handles no events while it waits for an answer", "no_deadlock", exit=3),
)

OF_A_PIPELINE = exposed_by(
    SIMULATED,
    Fault("stale-routing", "requests go to a replica after it was ordered to sleep", "routed_to_awake"),
    Fault("raises-when-empty", "a request is an error if no replica is awake", "empty_set_suspends", exit=3),
    Fault("abort-never-signals", "requests aborted by a shrink are not reported", "no_request_lost", exit=3),
    Fault(
        "count-outside-lock",
        "a replica's requests in flight are counted before the last one is sent to it",
        "no_request_lost",
        exit=3,
    ),
    Fault(
        "request-before-shell",
        "generation is requested before the pipeline can route, so a replica wakes for nothing",
        "version_after_wake",
    ),
)

SMALL = {"steps_a": 2, "steps_b": 2, "groups": 2, "group": 2, "warm": 2}
# 174 MiB of weights, clearly above the noise of resident memory.
SEEN = {
    "size": "125m",
    "layers": 1,
    "answer_a": (4, 4),
    "answer_b": (4, 4),
    "decode": 1,
    "warm": 0,
    "deadline_s": 120.0,
    "rehearse": False,
}

# In `ranks/broken.py`; the named check detects each in a run on live ranks.
OF_RANKS = exposed_by(
    SMALL,
    Fault(
        "sleeps-while-decoding",
        "a replica's weights are dropped while requests are in flight",
        "drained_before_sleep",
        set={"answer_b": (40, 60), "pace_ms": (0, 20)},  # B decodes for as long as A needs a device
    ),
    Fault("stays-resident", "a sleeping replica keeps its weights", "memory_down_asleep", set=SEEN),
    Fault("wake-before-freed", "a device is given away before its memory is freed", "peak_fits", set=SEEN),
    Fault(
        "version-skew",
        "a woken replica stamps its tokens with the previous version",
        "version_after_wake",
        # Leaves requests for the woken replica while the other one continues.
        set={"scenario": "A", "groups": 6, "slots": 2, "pace_ms": (5, 0)},
    ),
    Fault(
        "keeps-groups",
        "a trainer keeps its process groups while off its devices",
        "groups_down_asleep",
        set={"release_groups": True, "rehearse": False},
    ),
    Fault("base-assumed", "version 0 is published on replicas with other base weights", "weights_after_wake"),
    Fault(
        "cache-after-offload", "the cache is built from memory after the weights were offloaded", "weights_after_wake"
    ),
    Fault("shared-seed", "both pipelines draw the same random numbers", "namespaces_apart"),
    Fault(
        "shared-group",
        "when a replica wakes, ranks of the other pipeline rebuild a process group too",
        "others_untouched",
    ),
    Fault("leaked-group", "a replica leaks a process group at each wake-up", "nothing_left"),
)

FAULTS = (*OF_RANKS, *OF_THE_DESK, *OF_A_PIPELINE)
