"""The known bugs of the lab `stream` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

KIT_CORE = "kit.labs.stream.drive:controller"
SIMULATED = {"simulated": True, "ranks": 1}
CORE, GENERATION = "kit.stream.core", "kit.stream.generation"
BUGS = "kit.labs.stream.bugs"

# Bugs of the controller, which simulated runs show.
OF_THE_CONTROLLER = exposed_by(
    SIMULATED,
    Fault(
        "off-by-one-window",
        "the gate blocks one batch too late",
        "no_sample_too_old",
        set={"places": 16},
        patch={f"{GENERATION}:gate_is_open": f"{BUGS}:gate_one_batch_late"},
    ),
    Fault(
        "gate-never-opens",
        "the gate never learns of new versions, so dispatch stops for good",
        "no_deadlock",
        exit=3,
        patch={f"{GENERATION}:gate_is_open": f"{BUGS}:gate_of_version_0"},
    ),
    Fault(
        "starts-beyond-the-end",
        "the gate opens for batches that no step of the run will train",
        "capacity_kept",
        patch={f"{GENERATION}:gate_is_open": f"{BUGS}:gate_beyond_the_run"},
    ),
    Fault(
        "gate-checked-early",
        "a group counts as running only from its first token on, so too many groups pass the gate",
        "capacity_kept",
        set={"sampler": "capacity", "places": 32},
        patch={f"{GENERATION}:gate_is_open": f"{BUGS}:gate_counts_first_tokens"},
    ),
    Fault(
        "unbounded-buffer",
        "groups are dispatched although the buffer is full",
        "capacity_kept",
        set={"sampler": "windowed"},
        patch={f"{GENERATION}:place_is_free": f"{BUGS}:always_a_place"},
    ),
    Fault(
        "drops-oldest",
        "a full buffer drops its oldest complete group without an event",
        "every_group_once",
        set={"sampler": "windowed"},
        patch={f"{GENERATION}:place_is_free": f"{BUGS}:oldest_makes_room"},
    ),
    Fault(
        "lost-group",
        "a group never ends if its task crashes when it is complete",
        "every_group_once",
        patch={f"{GENERATION}:complete": f"{BUGS}:loses_every_fifth"},
    ),
    Fault(
        "reports-done",
        "a loop that cannot go on ends as if all its steps were trained",
        "ends_cleanly",
        bugs=("verl-project/verl#6387",),
        set={"on_failed": "stop"},
        scene={"fails": {"generate": 9}},
        patch={f"{GENERATION}:end_with_error": f"{BUGS}:ends_as_done"},
    ),
    Fault(
        "partial-group",
        "a group is complete without its last sample",
        "groups_whole",
        patch={f"{CORE}:HANDLERS": f"{BUGS}:HANDLERS_GIVE_UP_THE_LAST"},
    ),
    Fault(
        "failed-sample-counts",
        "a sample counts as complete although its request failed",
        "groups_whole",
        bugs=("NVIDIA-NeMo/RL#3589",),
        set={"on_failed": "replace"},
        scene={"fails": {"generate": 3}},
        patch={f"{CORE}:HANDLERS": f"{BUGS}:HANDLERS_COUNT_THE_FAILED"},
    ),
    Fault(
        "uncounted-partial",
        "tokens of samples that were given up are not counted as wasted",
        "tokens_conserved",
        set={"at_sync": "abort"},
        patch={f"{GENERATION}:give_up_attempt": f"{BUGS}:forgets_the_attempt"},
    ),
    Fault(
        "restarts-at-sync",
        "a sync starts requests in flight again although at_sync=keep",
        "no_needless_waste",
        patch={f"{CORE}:hold": f"{BUGS}:restarts_in_flight"},
    ),
    Fault(
        "attempt-not-counted",
        "a sample is sent again under the same attempt number",
        "attempts_distinct",
        set={"at_sync": "abort"},
        patch={f"{GENERATION}:give_up_attempt": f"{BUGS}:repeats_the_attempt"},
    ),
    Fault(
        "busiest-replica",
        "all requests go to the replica with the most requests in flight",
        "requests_spread",
        set={"steps": 20, "replicas": 3},
        patch={f"{GENERATION}:active": f"{BUGS}:only_the_busiest"},
    ),
    Fault(
        "slot-leak",
        "an unfinished group that ends does not give its slot back",
        "permits_return",
        set={"sampler": "windowed"},
        patch={f"{GENERATION}:leave": f"{BUGS}:keeps_the_slot"},
    ),
    Fault(
        "discard-and-requeue",
        "groups that are unfinished at a sync are replaced by other prompts, so long answers are trained less often",
        "no_length_bias",
        set={"steps": 60, "replicas": 8, "group": 2, "window": 2, "answer": (4, 64)},
        patch={f"{CORE}:hold": f"{BUGS}:requeues"},
    ),
    Fault(
        "drops-stragglers",
        "the last group of every step is dropped instead of awaited",
        "eviction_justified",
        patch={f"{CORE}:choose": f"{BUGS}:drops_stragglers"},
    ),
    Fault(
        "replaces-long-groups",
        "a group with a long answer is replaced although none of its requests failed",
        "eviction_justified",
        set={"answer": (4, 32)},
        patch={f"{CORE}:HANDLERS": f"{BUGS}:HANDLERS_REPLACE_LONG_GROUPS"},
    ),
    Fault(
        "evicts-too-early",
        "complete groups are evicted one version before they leave the window",
        "eviction_justified",
        bugs=("PrimeIntellect-ai/prime-rl#1764",),
        set={"sampler": "windowed", "window": 1, "places": 16, "train_pace_ms": 100},
        patch={f"{CORE}:SAMPLERS": f"{BUGS}:EVICTS_TOO_EARLY"},
    ),
    Fault(
        "freshest-first-starves",
        "the youngest complete groups are trained first",
        "order_fair",
        set={"sampler": "ready-first", "window": 3, "train_pace_ms": 500, "steps": 20},
        patch={f"{CORE}:SAMPLERS": f"{BUGS}:FRESHEST_FIRST"},
    ),
    Fault(
        "waits-for-all",
        "a step begins only when all its groups are complete",
        "trains_before_straggler",
        patch={f"{CORE}:limits": f"{BUGS}:trainer_waits_for_all"},
    ),
    Fault(
        "finish-per-chunk",
        "the optimizer steps after every chunk",
        "one_step_per_batch",
        patch={f"{CORE}:boundary": f"{BUGS}:update_per_chunk"},
    ),
    Fault(
        "double-bump",
        "the version rises by two after a step",
        "version_monotone",
        patch={f"{CORE}:bump": f"{BUGS}:bumps_twice"},
    ),
    Fault(
        "bump-on-abort",
        "the version rises after an aborted step",
        "version_monotone",
        patch={f"{CORE}:on_aborted": f"{BUGS}:bumps_on_abort"},
    ),
    Fault(
        "no-abort",
        "a failed step is not aborted on the trainer",
        "abort_on_failure",
        exit=3,  # the trainer refuses the next step
        patch={f"{CORE}:abort": f"{BUGS}:no_abort"},
    ),
    Fault(
        "one-retry-too-many",
        "the first failed step does not count as retried",
        "abort_on_failure",
        scene={"fails": {"microbatch": 1, "finish": 2}},
        patch={f"{CORE}:fail_step": f"{BUGS}:retries_once_more"},
    ),
    Fault(
        "cleared-before-finish",
        "samples are cleared before the optimizer step that needs them",
        "one_clear_per_finish",
        patch={f"{CORE}:finish": f"{BUGS}:clears_with_the_finish", f"{CORE}:on_finished": f"{BUGS}:cleared_already"},
    ),
    Fault(
        "clear-fails-after-finish",
        "the version rises only after samples are cleared, and never if that fails",
        "one_clear_per_finish",
        exit=3,
        scene={"fails": {"clear": 2}},
        patch={f"{CORE}:bump": f"{BUGS}:left_out", f"{CORE}:on_cleared": f"{BUGS}:bumps_when_cleared"},
    ),
    Fault(
        "resumes-too-early",
        "dispatch continues once a single replica has the new weights",
        "publish_before_use",
        bugs=("allenai/open-instruct#1627",),
        patch={f"{CORE}:HANDLERS": f"{BUGS}:HANDLERS_RESUME_WITH_THE_FIRST"},
    ),
    Fault(
        "caught-up-too-late",
        "lags are logged with the version of the previous step",
        "metrics_true",
        patch={f"{CORE}:log": f"{BUGS}:logs_the_version_before"},
    ),
    Fault(
        "complete-at-once",
        "the desk is told that a step is complete when it begins",
        "metrics_true",
        patch={f"{CORE}:report_progress": f"{BUGS}:reports_complete_steps"},
    ),
    Fault(
        "sync-counted-as-waiting",
        "the logged seconds of a sync count as waiting for samples",
        "metrics_true",
        patch={"kit.stream.ports:Meter.take": f"{BUGS}:counts_syncs_as_waiting"},
    ),
    Fault(
        "no-idle-replicas",
        "the logged idle seconds of replicas are always 0",
        "metrics_true",
        patch={"kit.stream.ports:Meter.take": f"{BUGS}:counts_no_idle_replica"},
    ),
    Fault(
        "logger-raises",
        "the run ends when the logger raises",
        "logger_is_harmless",
        exit=3,
        patch={f"{CORE}:HANDLERS": f"{BUGS}:HANDLERS_END_WITH_THE_LOGGER"},
    ),
    Fault(
        "marks-untrained",
        "a group left out of its microbatch is marked trained",
        "notes_backed",
        patch={f"{GENERATION}:StreamTurn.do": f"{BUGS}:skips_every_fifth"},
    ),
    Fault(
        "bumps-unfinished",
        "the version rises although no optimizer step was ordered",
        "notes_backed",
        patch={f"{CORE}:finish": f"{BUGS}:pretends_the_finish"},
    ),
    Fault(
        "resume-skips",
        "a run is resumed at prompts ahead of those that were trained, as after a saved position of the data that counts what was fetched",
        "resume_equals",
        bugs=("NVIDIA-NeMo/RL#3599",),
        patch={f"{CORE}:resume_from": f"{BUGS}:prompts_ahead"},
    ),
    Fault(
        "resume-replays",
        "after a resume, groups are trained a second time",
        "resume_equals",
        patch={f"{CORE}:resume_from": f"{BUGS}:all_prompts_again"},
    ),
    Fault(
        "accepted-from-zero",
        "after a resume, groups accepted earlier are not counted, so too many start",
        "resume_equals",
        set={"sampler": "capacity", "places": 32},
        patch={f"{CORE}:Controller.begin": f"{BUGS}:counts_from_zero"},
    ),
    Fault(
        "waits-at-the-end",
        "the loop waits for groups after the data has ended",
        "ends_cleanly",
        exit=3,
        scene={"prompts": 8},
        patch={f"{CORE}:is_stuck": f"{BUGS}:never_stuck"},
    ),
    where="notebook",
    during=("stream", "resume"),
    needs={"implementation": (KIT_CORE,)},
)

SMALL = {"ranks": 2, "replicas": 1, "steps": 3, "groups": 2, "group": 2, "lr": 3e-3}
# Samples span a sync: the replica's pace makes each of them take longer than a step of the trainer, on a busy machine too.
ACROSS = {"slots": 4, "answer": (14, 20), "decode": 2, "pace_ms": 40}

ENGINE, PREFIXES = "kit.megatron.serve:Engine", "kit.megatron.serve:PrefixCache"
REPLICA, TRAINER = "kit.labs.stream.ranks.replica:Replica", "kit.labs.stream.ranks.trainer:Trainer"
ADVANTAGES = "kit.actors.trainer:advantages"
RANK_BUGS = "kit.labs.stream.ranks.bugs"
KITS_MODEL = {"serve": ("megatron",)}
HOSTED, ENGINES_OWN = {"serve": "transformers", "size": "small"}, {"serve": ("transformers", "vllm")}
HUGGING, VLLM_MODEL = "kit.engines.hugging:TransformersModel", "kit.engines.vllm:VllmModel"

# Bugs of ranks, and one of a port; runs on live ranks show them.
OF_RANKS = exposed_by(
    SMALL,
    Fault(
        "stamp-after-reply",
        "all tokens of a sample are stamped with the version at its completion",
        "stamps_true",
        set=ACROSS,
        patch={f"{ENGINE}._leave": f"{RANK_BUGS}:stamps_the_end"},
    ),
    Fault(
        "stamp-at-publish",
        "a replica stamps tokens with a new version one call too late",
        "stamps_true",
        set=ACROSS,
        patch={
            f"{REPLICA}.sync": f"{RANK_BUGS}:stamps_late_after_sync",
            f"{REPLICA}.decode": f"{RANK_BUGS}:stamps_late",
        },
    ),
    Fault(
        "one-stamp-per-group",
        "all tokens of a sample are stamped with the version of the first token",
        "stamps_per_token",
        set=ACROSS,
        patch={f"{ENGINE}._leave": f"{RANK_BUGS}:stamps_the_start"},
    ),
    Fault(
        "temperature-mismatch",
        "recorded log-probabilities are those of temperature 1",
        "behaviour_logprob",
        bugs=("huggingface/trl#6789",),
        set={"temperature": 1.3},
        needs=KITS_MODEL,
        patch={f"{ENGINE}._sample": f"{RANK_BUGS}:records_untempered"},
    ),
    Fault(
        "one-draw-per-sample",
        "one random number chooses the tokens at all positions of a sample",
        "draws_independent",
        needs=KITS_MODEL,
        patch={f"{ENGINE}._sample": f"{RANK_BUGS}:draws_once"},
    ),
    Fault(
        "prefix-cache-survives",
        "cached prompts have no version and survive a sync",
        "no_stale_prefix",
        bugs=("NovaSky-AI/SkyRL#2246",),
        set={**ACROSS, "at_sync": "recompute"},
        needs=KITS_MODEL,
        patch={
            f"{PREFIXES}.get": f"{RANK_BUGS}:gets_any_version",
            f"{PREFIXES}.put": f"{RANK_BUGS}:puts_any_version",
            f"{PREFIXES}.clear": f"{RANK_BUGS}:keeps_prefixes",
        },
    ),
    Fault(
        "keeps-kv-silently",
        "the KV cache is kept where the config says recompute",
        "kv_policy_kept",
        set={**ACROSS, "at_sync": "recompute"},
        needs=KITS_MODEL,
        patch={f"{ENGINE}.weights_changed": f"{RANK_BUGS}:keeps_cache"},
    ),
    Fault(
        "engine-untempered",
        "an engine records log-probabilities of temperature 1, as vLLM does by default",
        "behaviour_logprob",
        set={**HOSTED, "temperature": 1.3},
        needs=ENGINES_OWN,
        patch={f"{HUGGING}.recorded": f"{RANK_BUGS}:records_raw", f"{VLLM_MODEL}.recorded": f"{RANK_BUGS}:RAW"},
    ),
    Fault(
        "engine-keeps-kv",
        "an engine that is paused for a sync keeps the KV cache where the config says recompute",
        "kv_policy_kept",
        set={**ACROSS, **HOSTED, "at_sync": "recompute"},
        needs=ENGINES_OWN,
        patch={
            f"{HUGGING}.pause": f"{RANK_BUGS}:pauses_and_keeps",
            f"{VLLM_MODEL}.pause": f"{RANK_BUGS}:pauses_vllm_and_keeps",
        },
    ),
    Fault(
        "torn-read",
        "a replica decodes while half of its weights are still old",
        "no_torn_generation",
        set={**ACROSS, "lr": 1e-2},
        needs=KITS_MODEL,
        patch={
            f"{REPLICA}.sync": f"{RANK_BUGS}:tears_weights",
            f"{REPLICA}.decode": f"{RANK_BUGS}:decodes_torn",
            f"{REPLICA}.reset": f"{RANK_BUGS}:resets_torn",
        },
    ),
    Fault(
        "rng-reset",
        "all samples of a group draw the same random numbers",
        "samples_differ",
        set={"answer": (8, 20)},
        patch={f"{REPLICA}.request": f"{RANK_BUGS}:draws_the_same"},
    ),
    Fault(
        "prev-by-new-weights",
        "previous log-probabilities are computed after an update of the same step",
        "on_policy_ratio_one",
        set={"batch": 2},
        patch={f"{TRAINER}.microbatch": f"{RANK_BUGS}:scores_again"},
    ),
    Fault(
        "positional-groups",
        "advantages group samples by their position, not by their group",
        "advantage_by_group",
        set={"min_groups": 2},
        patch={ADVANTAGES: f"{RANK_BUGS}:by_position"},
    ),
    Fault(
        "rejected-row-counts",
        "the baseline of a group counts a rejected sample",
        "advantage_by_group",
        patch={ADVANTAGES: f"{RANK_BUGS}:with_rejected"},
    ),
    Fault(
        "wrong-denominator",
        "importance weights divide by log-probabilities of a policy that did not generate the tokens",
        "is_weight_right",
        patch={f"{TRAINER}.assemble": f"{RANK_BUGS}:divides_by_previous"},
    ),
    Fault(
        "masks-last-sample",
        "the last sample of every group is masked, so that a group of 4 trains 3",
        "every_sample_trained",
        patch={f"{TRAINER}.assemble": f"{RANK_BUGS}:masks_the_last"},
    ),
    Fault(
        "whitens-advantages",
        "the split step whitens the advantages that it gets over the samples of its microbatch",
        "every_sample_trained",
        patch={"kit.train.protocol:SplitStep.microbatch": f"{RANK_BUGS}:whitens"},
    ),
    Fault(
        "rescores-samples",
        "the trainer puts its own version and log-probabilities into the samples that it trains on",
        "recomputed_as_sampled",
        set=ACROSS,
        patch={f"{TRAINER}.batch_of": f"{RANK_BUGS}:rescores"},
    ),
    Fault(
        "schedule-starts-again",
        "a resumed trainer gets its weights and its optimizer, but not the place in its learning rate schedule",
        "resume_equals",
        patch={f"{TRAINER}.load": f"{RANK_BUGS}:loads_without_the_schedule"},
    ),
    Fault(
        "blocks-the-loop",
        "the controller blocks while it waits for the trainer and answers no questions",
        "controller_answers",
        set={"train_pace_ms": 400},
        where="notebook",
        during=("stream",),
        patch={"kit.stream.live:LiveRanks.wait": f"{BUGS}:waits_for_the_trainer"},
    ),
    Fault(
        "rollout-dies",
        "a replica is killed while it decodes",
        "replicas_answer",
        exit=3,
        patch={f"{REPLICA}.decode": f"{RANK_BUGS}:replica_dies"},
        during=("lockstep",),
    ),
    Fault(
        "rollout-stalls",
        "a replica stops answering",
        "replicas_answer",
        exit=3,
        set={"deadline_s": 6},
        patch={f"{REPLICA}.decode": f"{RANK_BUGS}:stalls"},
        during=("lockstep",),
    ),
)

FAULTS = (*OF_RANKS, *OF_THE_CONTROLLER)
