"""The known bugs of the lab `share` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

# Those of the desk and of pipelines show on simulated ranks. `scene` names the scripted run that exposes a bug of the desk.
SIMULATED = {"simulated": True}
BY_DEMAND: dict[str, tuple[str, ...]] = {"planner": ("gap-ratio", "home")}

# These show only with a planner that shares by demand.
OF_SHARING = exposed_by(
    SIMULATED,
    Fault(
        "double-allocation",
        "a device freed in a cycle is counted for every request of the cycle",
        "one_owner",
        scene={"scenario": "crowd"},
        patch={
            "kit.share.planner:Supply.meets": "kit.labs.share.bugs:gives_twice",
            "kit.share.core:grant": "kit.labs.share.bugs:grants_unseen",
            "kit.share.core:violations": "kit.labs.share.bugs:finds_no_violation",
        },
        where="notebook",
    ),
    Fault(
        "expand-first",
        "replicas wake before others on their devices sleep",
        "shrink_before_expand",
        exit=3,
        scene={"scenario": "pair"},
        patch={"kit.share.core:advance": "kit.labs.share.bugs:advances_at_once"},
        where="notebook",
    ),
    Fault(
        "priority-inverted",
        "the lowest priority is served first",
        "priority_kept",
        scene={"scenario": "crowd"},
        patch={"kit.share.state:Request.precedence": "kit.labs.share.bugs:last_first"},
        where="notebook",
    ),
    Fault(
        "youngest-first",
        "of requests with equal priority, the last is served first",
        "priority_kept",
        scene={"scenario": "crowd"},
        patch={"kit.share.state:Request.precedence": "kit.labs.share.bugs:youngest_first"},
        where="notebook",
    ),
    Fault(
        "no-floor",
        "a pipeline with little demand may be left without a replica",
        "no_starvation",
        scene={"scenario": "small demand"},
        patch={"kit.share.planner:Gaps.target": "kit.labs.share.bugs:target_without_floor"},
        where="notebook",
    ),
    Fault(
        "no-validation",
        "a plan is executed without a trial on a copy",
        "plan_valid",
        scene={"scenario": "infeasible plans"},
        patch={"kit.share.core:violations": "kit.labs.share.bugs:finds_no_violation"},
        where="notebook",
    ),
    Fault(
        "never-rebalances",
        "devices stay where they are as long as nobody waits",
        "fair_share",
        scene={"scenario": "shift"},
        patch={"kit.share.core:is_off_balance": "kit.labs.share.bugs:never_off_balance"},
        where="notebook",
    ),
    Fault(
        "planner-ignores-tp",
        "every replica counts as one device, regardless of its size",
        "plan_as_specified",
        scene={"scenario": "wide"},
        patch={"kit.share.planner:Gaps.__init__": "kit.labs.share.bugs:gaps_without_tp"},
        where="notebook",
    ),
    Fault(
        "wakes-without-work",
        "a replica of a pipeline that is complete wakes",
        "plan_as_specified",
        scene={"scenario": "complete"},
        patch={
            "kit.share.planner:Gaps.lacks": "kit.labs.share.bugs:lacks_without_demand",
            "kit.share.planner:Gaps.order": "kit.labs.share.bugs:order_without_demand",
        },
        where="notebook",
        needs={"planner": ("gap-ratio",)},
    ),
    Fault(
        "ignores-the-next-step",
        "devices stay idle when a pipeline reports that it has work again",
        "devices_used",
        scene={"scenario": "next step"},
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:REPORTS_MAKE_NO_PLAN"},
        where="notebook",
    ),
    Fault(
        "estimate-beside-progress",
        "the estimate of a request is added to the demand that its pipeline reports",
        "plan_as_specified",
        scene={"scenario": "estimates"},
        patch={"kit.share.planner:Share.remaining": "kit.labs.share.bugs:remaining_beside_progress"},
        where="notebook",
    ),
    Fault(
        "planner-ignores-bundles",
        "the planner looks only at the first device of a replica",
        "no_deadlock",
        scene={"scenario": "whole bundles"},
        patch={"kit.share.core:PLANNERS": "kit.labs.share.bugs:LOOKS_AT_FIRST_DEVICES"},
        where="notebook",
    ),
    Fault(
        "half-idle",
        "the planner never gives away half of the devices",
        "devices_used",
        set={"devices": 4, "infer": (0, 1, 2, 3)},
        patch={"kit.share.core:PLANNERS": "kit.labs.share.bugs:KEEPS_HALF"},
        where="notebook",
    ),
    Fault(
        "swaps-at-every-event",
        "the planner moves devices from replica to replica at every event",
        "no_thrash",
        set={"devices": 4, "infer": (0, 1, 2, 3)},
        patch={"kit.share.core:PLANNERS": "kit.labs.share.bugs:SWAPS_AT_EVERY_EVENT"},
        where="notebook",
    ),
    Fault(
        "shrinks-for-nothing",
        "a request that cannot be met puts replicas to sleep",
        "plan_as_specified",
        scene={"scenario": "stuck"},
        patch={"kit.share.planner:Supply.meets": "kit.labs.share.bugs:shrinks_for_nothing"},
        where="notebook",
    ),
    Fault(
        "half-replica",
        "a replica wakes on some of its devices only",
        "plan_valid",
        scene={"scenario": "wide"},
        patch={"kit.share.core:expand": "kit.labs.share.bugs:expands_half_a_replica"},
        where="notebook",
    ),
    Fault(
        "progress-not-ended",
        "a finished progress stream is still counted",
        "progress_ended",
        scene={"scenario": "streams"},
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:PROGRESS_NEVER_ENDS"},
        where="notebook",
    ),
    Fault(
        "progress-unclamped",
        "the excess of one stream counts for another",
        "progress_ended",
        scene={"scenario": "streams"},
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:PROGRESS_IS_UNCLAMPED"},
        where="notebook",
    ),
    Fault(
        "adapters-in-one-stream",
        "the report of one adapter replaces that of another",
        "progress_ended",
        scene={"scenario": "by adapter"},
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:ADAPTERS_IN_ONE_STREAM"},
        where="notebook",
    ),
    Fault(
        "one-shot-generation",
        "a pipeline that lost its last replica is never considered again",
        "no_starvation",
        exit=3,
        scene={"scenario": "preempted"},
        patch={"kit.share.core:shrink_replica": "kit.labs.share.bugs:forgets_what_it_shrank"},
        where="notebook",
    ),
    Fault(
        "no-watchdog",
        "a consumed request is never repeated",
        "no_starvation",
        scene={"scenario": "unreported"},
        patch={"kit.share.core:watch": "kit.labs.share.bugs:watches_nobody"},
        where="notebook",
    ),
    Fault(
        "waits-for-all",
        "a request for generation waits for every replica",
        "no_starvation",
        scene={"scenario": "pair"},
        patch={"kit.share.core:grant_generation": "kit.labs.share.bugs:waits_for_all"},
        where="notebook",
    ),
    Fault(
        "admits-at-init",
        "the second pipeline starts before the first has handed over",
        "admission",
        scene={"scenario": "staggered"},
        patch={"kit.share.core:may_start": "kit.labs.share.bugs:always_may_start"},
        where="notebook",
    ),
    Fault(
        "trains-on-at-once",
        "the first pipeline continues training before the second is set up",
        "admission",
        scene={"scenario": "staggered"},
        patch={"kit.share.core:is_held": "kit.labs.share.bugs:never_holds"},
        where="notebook",
    ),
    Fault(
        "overtakes-a-wide-request",
        "a small request takes a device that an earlier, wide request waits for",
        "priority_kept",
        scene={"scenario": "rivals"},
        patch={"kit.share.planner:Supply.meets": "kit.labs.share.bugs:keeps_nothing"},
        where="notebook",
    ),
    Fault(
        "waits-for-the-dead",
        "the desk waits for the sleep of a replica that died",
        "no_starvation",
        scene={"scenario": "lost while falling asleep"},
        patch={"kit.share.core:lose": "kit.labs.share.bugs:loses_and_waits"},
        where="notebook",
    ),
    Fault(
        "joins-the-dead",
        "the late answer of a replica that died while it woke makes it active",
        "no_deadlock",
        scene={"scenario": "lost while waking"},
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:LATE_ANSWERS_COUNT"},
        where="notebook",
    ),
    Fault(
        "wakes-what-was-removed",
        "a replica wakes that a resize has removed",
        "no_deadlock",
        scene={"scenario": "resized"},
        patch={"kit.share.planner:share_of": "kit.labs.share.bugs:share_of_removed"},
        where="notebook",
    ),
    Fault(
        "no-plan-after-a-loss",
        "the device of a replica that died stays idle until something else happens",
        "plan_as_specified",
        scene={"scenario": "left over"},
        patch={"kit.share.core:lose": "kit.labs.share.bugs:loses_without_a_plan"},
        where="notebook",
    ),
    Fault(
        "takes-one-by-one",
        "two pipelines each take one device and then wait for the other's",
        "no_deadlock",
        scene={"scenario": "gangs"},
        patch={"kit.labs.share.scenarios:Scenario.run": "kit.labs.share.bugs:runs_one_by_one"},
        where="notebook",
    ),
    Fault(
        "grants-twice",
        "a request is granted a second time",
        "no_request_lost",
        scene={"scenario": "pair"},
        patch={"kit.share.core:answer": "kit.labs.share.bugs:answers_twice"},
        where="notebook",
    ),
    Fault(
        "late-shrink",
        "a replica falls asleep in a cycle after others were ordered to wake",
        "shrink_before_expand",
        scene={"scenario": "shift"},
        patch={"kit.share.core:advance": "kit.labs.share.bugs:advances_and_shrinks"},
        where="notebook",
    ),
    Fault(
        "forgets-waiters",
        "requests that wait for a leaving pipeline get no answer",
        "no_request_lost",
        scene={"scenario": "quitter"},
        patch={"kit.share.core:wake_waiters": "kit.labs.share.bugs:waiters_sleep_on"},
        where="notebook",
    ),
    needs=BY_DEMAND,
)

OF_EVERY_DESK = exposed_by(
    SIMULATED,
    Fault(
        "lost-device",
        "the devices of a dead pipeline never become idle again",
        "devices_conserved",
        scene={"scenario": "death"},
        patch={"kit.share.core:drop_pipeline": "kit.labs.share.bugs:drops_without_devices"},
        where="notebook",
    ),
    Fault(
        "stomps-planned-release",
        "after a death, a pending planned release is forgotten",
        "planned_release_once",
        scene={"scenario": "release"},
        patch={"kit.share.core:lose": "kit.labs.share.bugs:loses_and_forgets"},
        where="notebook",
    ),
    Fault(
        "released-while-falling-asleep",
        "a planned release is answered while replicas fall asleep",
        "planned_release_once",
        scene={"scenario": "release"},
        patch={"kit.share.core:finish_releases": "kit.labs.share.bugs:finishes_before_sleep"},
        where="notebook",
    ),
    Fault(
        "drops-alarms",
        "the desk ignores every third alarm, so that some limits never apply",
        "no_starvation",
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:EVERY_THIRD_ALARM_IS_DROPPED"},
        where="notebook",
    ),
    Fault(
        "removed-for-good",
        "a replica that a resize allows again stays away",
        "no_starvation",
        scene={"scenario": "refilled"},
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:REMOVED_FOR_GOOD"},
        where="notebook",
    ),
    Fault(
        "dead-for-good",
        "the desk ignores that new ranks replaced dead ones",
        "dead_replaced",
        scene={"scenario": "recovery"},
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:RESTARTS_ARE_IGNORED"},
        where="notebook",
    ),
    Fault(
        "unnoted-gang",
        "a request for several devices is never queued",
        "no_starvation",
        scene={"scenario": "gang"},
        patch={"kit.share.core:queue": "kit.labs.share.bugs:queues_no_gang"},
        where="notebook",
    ),
    Fault(
        "planner-fails-after-loss",
        "the planner raises once a replica is lost, which ends every pipeline",
        "no_deadlock",
        patch={"kit.share.core:make_plan": "kit.labs.share.bugs:plans_only_without_loss"},
        where="notebook",
    ),
    Fault(
        "dead-coordinator",
        "the desk does not handle the death of a pipeline",
        "dead_pipeline_leaves",
        patch={"kit.share.core:HANDLERS": "kit.labs.share.bugs:DEATHS_ARE_IGNORED"},
        where="notebook",
    ),
    Fault(
        "lock-held-across-call",
        "the desk handles no events while it waits for an answer",
        "no_deadlock",
        exit=3,
        patch={"kit.share.core:Scheduler.step": "kit.labs.share.bugs:hears_nothing_meanwhile"},
        where="notebook",
    ),
)

OF_THE_DESK = (*OF_SHARING, *OF_EVERY_DESK)

OF_A_PIPELINE = exposed_by(
    SIMULATED,
    Fault(
        "stale-routing",
        "requests go to a replica after it was ordered to sleep",
        "routed_to_awake",
        patch={
            "kit.stream.core:HANDLERS": "kit.labs.share.bugs:OLD_SET_ROUTES",
            "kit.share.member:Member.step": "kit.labs.share.bugs:shrinks_first",
        },
        where="notebook",
    ),
    Fault(
        "raises-when-empty",
        "a request is an error if no replica is awake",
        "empty_set_suspends",
        exit=3,
        patch={"kit.stream.generation:send_waiting": "kit.labs.share.bugs:refuses_when_empty"},
        where="notebook",
    ),
    Fault(
        "abort-never-signals",
        "requests aborted by a shrink are not reported",
        "no_request_lost",
        exit=3,
        patch={"kit.stream.core:HANDLERS": "kit.labs.share.bugs:IN_FLIGHT_IS_FORGOTTEN"},
        where="notebook",
    ),
    Fault(
        "count-outside-lock",
        "a replica's requests in flight are counted before the last one is sent to it",
        "no_request_lost",
        exit=3,
        patch={"kit.stream.core:HANDLERS": "kit.labs.share.bugs:COUNTED_TOO_EARLY"},
        where="notebook",
    ),
    Fault(
        "releases-while-training",
        "the trainer's devices are released while the trainer finishes its step",
        "one_owner",
        patch={"kit.share.member:Member.adapted": "kit.labs.share.bugs:releases_at_once"},
        where="notebook",
    ),
    Fault(
        "all-wait-for-slowest",
        "adapters train only once all of them have their groups",
        "turns_fair",
        set={"scenario": "C", "slots": 2},
        patch={"kit.stream.core:may_choose": "kit.labs.share.bugs:waits_for_every_adapter"},
        where="notebook",
    ),
    Fault(
        "over-reports",
        "a pipeline reports fifty times its demand",
        "progress_true",
        patch={"kit.stream.core:report_progress": "kit.labs.share.bugs:reports_fifty_times"},
        where="notebook",
        needs={"scenario": ("A", "B", "D", "E", "F")},  # adapters report otherwise
    ),
    Fault(
        "complete-at-once",
        "a pipeline reports a step complete when it begins",
        "progress_true",
        exit=3,
        patch={"kit.stream.core:report_progress": "kit.labs.share.bugs:reports_all_complete"},
        where="notebook",
        needs={"scenario": ("A", "B", "D", "E", "F")},  # adapters report otherwise
    ),
    Fault(
        "request-before-shell",
        "generation is requested before the pipeline can route, so a replica wakes for nothing",
        "version_after_wake",
        patch={"kit.share.member:Member.step": "kit.labs.share.bugs:asks_before_it_is_there"},
        where="notebook",
    ),
)

SMALL = {"steps": 2, "groups": 2, "group": 2, "warm": 2}
# 174 MiB of weights, clearly above the noise of resident memory.
SEEN = {
    "size": "125m",
    "layers": 1,
    "answer": (4, 4),
    "decode": 1,
    "warm": 0,
    "deadline_s": 120.0,
    "rehearse": False,
}

# Those of ranks show on live ranks.
OF_RANKS = exposed_by(
    SMALL,
    Fault(
        "sleeps-while-decoding",
        "a replica's weights are dropped while requests are in flight",
        "drained_before_sleep",
        set={"b.answer": (40, 60), "b.pace_ms": 20},  # B decodes for as long as A needs a device
        patch={
            "kit.labs.share.ranks.roles:LeasedReplica.abort_requests": "kit.labs.share.ranks.bugs:aborts_nothing",
        },
    ),
    Fault(
        "stays-resident",
        "a sleeping replica keeps its weights",
        "memory_down_asleep",
        set=SEEN,
        patch={
            "kit.labs.share.ranks.roles:LeasedReplica.give_memory": "kit.labs.share.ranks.bugs:keeps_its_memory",
        },
    ),
    Fault(
        "wake-before-freed",
        "a device is given away before its memory is freed",
        "peak_fits",
        set=SEEN,
        patch={
            "kit.labs.share.ranks.roles:LeasedReplica.give_memory": "kit.labs.share.ranks.bugs:sleeps_late",
            "kit.labs.share.ranks.roles:LeasedReplica.take_memory": "kit.labs.share.ranks.bugs:wakes_after_the_late_sleep",
            "kit.labs.share.ranks.roles:LeasedReplica.end": "kit.labs.share.ranks.bugs:ends_after_the_late_sleep",
        },
    ),
    Fault(
        "version-skew",
        "a woken replica stamps its tokens with the previous version",
        "version_after_wake",
        # Leaves requests for the woken replica while the other one continues.
        set={"scenario": "A", "groups": 6, "slots": 2, "pace_ms": 5},
        patch={
            "kit.labs.share.ranks.roles:LeasedReplica.sync": "kit.labs.share.ranks.bugs:stamps_the_version_before",
        },
    ),
    Fault(
        "keeps-groups",
        "a trainer keeps its process groups while off its devices",
        "groups_down_asleep",
        set={"release_groups": True, "rehearse": False},
        patch={
            "kit.megatron.groups:destroy": "kit.labs.share.ranks.bugs:destroys_nothing",
        },
    ),
    Fault(
        "base-assumed",
        "version 0 is published on replicas with other base weights",
        "weights_after_wake",
        patch={
            "kit.labs.share.ranks.roles:LeasedReplica.sync": "kit.labs.share.ranks.bugs:assumes_the_base",
            "kit.actors.replica:ReplicaActor.digests": "kit.labs.share.ranks.bugs:changes_the_base",
        },
    ),
    Fault(
        "cache-after-offload",
        "the cache is built from memory after the weights were offloaded",
        "weights_after_wake",
        patch={
            "kit.labs.share.ranks.roles:LeasedTrainer.finish": "kit.labs.share.ranks.bugs:copies_before_the_update",
            "kit.labs.share.ranks.roles:LeasedTrainer.fill_cache": "kit.labs.share.ranks.bugs:builds_late",
        },
    ),
    Fault(
        "shared-seed",
        "both pipelines draw the same random numbers",
        "namespaces_apart",
        patch={
            "kit.labs.share.ranks:loop_of": "kit.labs.share.ranks.bugs:draws_as_the_first",
        },
    ),
    Fault(
        "shared-group",
        "when a replica wakes, ranks of the other pipeline rebuild a process group too",
        "others_untouched",
        patch={
            "kit.labs.share.ranks.roles:LeasedReplica.expand": "kit.labs.share.ranks.bugs:shows_that_it_woke",
            "kit.labs.share.ranks.roles:LeasedTrainer.begin": "kit.labs.share.ranks.bugs:rebuilds_a_group",
        },
    ),
    Fault(
        "leaked-group",
        "a replica leaks a process group at each wake-up",
        "nothing_left",
        patch={
            "kit.labs.share.ranks.roles:LeasedReplica.expand": "kit.labs.share.ranks.bugs:leaks_a_group",
        },
    ),
)

# Two adapters; each trains twice.
OF_ADAPTERS = exposed_by(
    {"scenario": "C", "adapters": 2, "steps": 4, "groups": 2, "group": 2, "warm": 2, "rehearse": False},
    Fault(
        "adapter-name-reused",
        "a replica keeps the second adapter under the name of the first",
        "adapters_apart",
        patch={"kit.megatron.serve:ServingModel.applying": "kit.labs.share.ranks.bugs:applies_the_first"},
    ),
    Fault(
        "adapter-mixed",
        "an adapter trains on the groups of another one",
        "adapters_apart",
        patch={
            "kit.actors.adapters:AdapterTrainer.take_turn": "kit.labs.share.ranks.bugs:takes_the_next_turn",
            "kit.actors.adapters:AdapterTrainer.batch_of": "kit.labs.share.ranks.bugs:takes_any_group",
        },
    ),
    Fault(
        "adapter-optimizer-shared",
        "an adapter goes on with the optimizer state of the one before it",
        "adapter_numbers",
        patch={"kit.actors.adapters:AdapterTrainer.begin": "kit.labs.share.ranks.bugs:takes_the_optimizer_along"},
    ),
    Fault(
        "base-trained",
        "a step of an adapter changes the base too",
        "base_unchanged",
        patch={"kit.labs.share.ranks.adapters:AdaptersTrainer.fill_cache": "kit.labs.share.ranks.bugs:moves_the_base"},
    ),
    Fault(
        "base-sent-renamed",
        "tensors that training never changes are sent under the adapter's names",
        "trained_changed",
        patch={"kit.actors.adapters:AdapterTrainer.fill_cache": "kit.labs.share.ranks.bugs:sends_what_never_changes"},
    ),
    Fault(
        "merged-twice",
        "a replica merges the adapter into the base and applies it again",
        "adapters_apart",
        patch={"kit.megatron.lora:LowRankPair.forward": "kit.labs.share.ranks.bugs:adds_twice_while_serving"},
    ),
    Fault(
        "adapter-never-unloaded",
        "a sleeping replica keeps its adapters",
        "adapters_unloaded",
        patch={"kit.megatron.serve:ServingModel.named_parameters": "kit.labs.share.ranks.bugs:forgets_adapters"},
    ),
)

FAULTS = (*OF_RANKS, *OF_ADAPTERS, *OF_THE_DESK, *OF_A_PIPELINE)
