"""Share: two RL pipelines take turns on the same devices, under a scheduler that is checked from outside."""

from kit.labs.definition import Definition, Fault, exposed_by
from kit.labs.share.config import ShareConfig, fits, plan, roles

# Known bugs. Those of the desk and of pipelines show on simulated ranks: `kit.share.broken` and `simulated.py` have their wrong rules.
SIMULATED = {"simulated": True}

OF_THE_DESK = exposed_by(
    SIMULATED,
    Fault("double-allocation", "a device that is freed in a cycle is counted for every request of it", "one_owner"),
    Fault("expand-first", "replicas wake before others on their devices sleep", "shrink_before_expand", exit=3),
    Fault("lost-device", "the devices of a pipeline that died are never idle again", "devices_conserved"),
    Fault("priority-inverted", "the lowest priority comes first", "priority_kept"),
    Fault("youngest-first", "of equal requests the last one comes first", "priority_kept"),
    Fault("no-floor", "a pipeline with little demand may be left without a replica", "no_starvation"),
    Fault("no-validation", "a plan is carried out without a trial on a copy", "plan_valid"),
    Fault("never-rebalances", "devices stay where they are as long as nobody waits", "fair_share"),
    Fault("planner-ignores-tp", "a replica counts as one device, however many it has", "plan_as_specified"),
    Fault("shrinks-for-nothing", "a request that cannot be met puts replicas to sleep", "plan_as_specified"),
    Fault("half-replica", "a replica wakes on some of its devices only", "plan_valid"),
    Fault("stomps-planned-release", "a death makes a pending planned release forgotten", "planned_release_once"),
    Fault("progress-not-ended", "a stream of progress that ended is still counted", "progress_ended"),
    Fault("progress-unclamped", "what one stream has too much fills another one", "progress_ended"),
    Fault(
        "one-shot-generation",
        "a pipeline whose last replica was taken is not thought of again",
        "no_starvation",
        exit=3,
    ),
    Fault("no-watchdog", "nobody asks again for a request that was consumed", "no_starvation"),
    Fault("waits-for-all", "a request for generation waits for every replica", "no_starvation"),
    Fault("admits-at-init", "the second pipeline starts before the first has handed over", "admission"),
    Fault("trains-on-at-once", "the first pipeline trains on before the second is set up", "admission"),
    Fault("forgets-waiters", "who waits for a pipeline that leaves hears nothing", "no_request_lost"),
    Fault("dead-coordinator", "the desk does not handle the death of a pipeline", "dead_pipeline_leaves"),
    Fault("lock-held-across-call", "the desk hears nothing while it waits for an answer", "no_deadlock", exit=3),
)

OF_A_PIPELINE = exposed_by(
    SIMULATED,
    Fault("stale-routing", "requests go to a replica after it was ordered to sleep", "routed_to_awake"),
    Fault("raises-when-empty", "a request that finds no replica is an error", "empty_set_suspends", exit=3),
    Fault("abort-never-signals", "nobody hears of the requests that a shrink aborts", "no_request_lost", exit=3),
    Fault(
        "count-outside-lock",
        "what a replica has in flight is counted before the last request was sent to it",
        "no_request_lost",
        exit=3,
    ),
    Fault(
        "request-before-shell",
        "generation is asked for before the pipeline can route, so that a replica wakes for nobody",
        "version_after_wake",
    ),
)

SMALL = {"steps_a": 2, "steps_b": 2, "groups": 2, "group": 2, "warm": 2}
# 174 MiB of weights, which can be told from noise in resident memory.
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

# In `ranks/broken.py`; each is seen by its check in a run on live ranks.
OF_RANKS = exposed_by(
    SMALL,
    Fault(
        "sleeps-while-decoding",
        "a replica's weights go while requests are in flight",
        "drained_before_sleep",
        set={"answer_b": (40, 60), "pace_ms": (0, 20)},  # B decodes for as long as A needs a device
    ),
    Fault("stays-resident", "a replica that sleeps keeps its weights", "memory_down_asleep", set=SEEN),
    Fault("wake-before-freed", "a device is given away before the memory on it is down", "peak_fits", set=SEEN),
    Fault(
        "version-skew",
        "a replica that woke up stamps its tokens with the version before",
        "version_after_wake",
        # There are requests left for the replica that wakes while the other one goes on.
        set={"scenario": "A", "groups": 6, "slots": 2, "pace_ms": (5, 0)},
    ),
    Fault(
        "keeps-groups",
        "a trainer off its devices keeps its process groups",
        "groups_down_asleep",
        set={"release_groups": True, "rehearse": False},
    ),
    Fault("base-assumed", "version 0 is published where base weights are others", "weights_after_wake"),
    Fault("cache-after-offload", "the cache is built from memory that the weights have left", "weights_after_wake"),
    Fault("shared-seed", "both pipelines draw the same random numbers", "namespaces_apart"),
    Fault(
        "shared-group",
        "ranks of the other pipeline rebuild a process group when a replica wakes, as if they shared it",
        "others_untouched",
    ),
    Fault("leaked-group", "a replica leaves a process group behind with each wake", "nothing_left"),
)

LAB = Definition(
    name="share",
    summary="two pipelines share devices in time; each computes bit for bit what it computes alone",
    config=ShareConfig,
    plan=plan,
    roles=roles,
    isolate=True,
    fits=fits,
    phases="kit.labs.share.ranks.broken:train",
    checks="kit.labs.share.checks:CHECKS",
    presets="kit.labs.share.checks:PRESETS",
    pictures="kit.labs.share.pictures:PICTURES",
    foreign="kit.labs.share.foreign:settings_of",
    first=("scenario", "steps_a", "steps_b", "answer_a", "answer_b", "groups", "group", "planner", "controls"),
    faults=(*OF_RANKS, *OF_THE_DESK, *OF_A_PIPELINE),
    preload=("megatron.core",),
)
