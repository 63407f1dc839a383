"""The known bugs of the lab `sync` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

ENGINE = {"serve": "transformers", "size": "small"}  # vLLM has no heads of the default size
DOUBLE = {"receiver": "kit.sync.protocols:VllmCalls"}
DOUBLES = {"receiver": ("kit.sync.protocols:VllmCalls", "kit.sync.protocols:SglangSession")}
QUICK = {"cycles": 2, "sweep": False}
UNSEEN = {"verify": "none"}  # a comparison in transit would end the run before the check
TWO_RANKS = {"ranks": 6, "replicas": 2, "infer_tp": 2}
IN_BUCKETS = {"arena": "cache"}
KEPT_IN_BUCKETS = {"arena": ("cache",)}
SERVING = {"placement": "apart", "ranks": 4, "replicas": 2}

BUGS = "kit.labs.sync.ranks.bugs"
CALL, SENDING, STEPS = "kit.sync.receiver:Call", "kit.sync.sender:Sending", "kit.sync.sender:STEPS"
TRAINER, REPLICA = "kit.labs.sync.ranks.trainer:SyncTrainer", "kit.labs.sync.ranks.replica:SyncReplica"
SHARDS, PROTOCOLS = "kit.megatron.shards", "kit.sync.protocols:EngineDouble"
IN_THE_RANK = ("megatron", "transformers")  # models whose tensors are the rank's own
VLLM = {"serve": "vllm", "placement": "apart", "ranks": 2, "tp": 1, "replicas": 1, "size": "small"}
IN_VLLM = {"serve": ("vllm",)}
VLLM_MODEL = "kit.engines.vllm:VllmModel"
ENGINES = {"serve": ("transformers", "vllm")}
KITS = {"receiver": ("",), "serve": ("megatron",)}
HUGGING = "kit.engines.hugging:TransformersModel"
DELTA = {"delta": "word", "dtype": "bfloat16", "lr": 3e-6, "cycles": 3}
BY_WORD = {"delta": ("word",), "refresh": ("staged",)}
UNACKNOWLEDGED = {f"{SENDING}.acknowledge": f"{BUGS}:takes_any_acknowledgement"}
WITH_A_COPY = {"kit.labs.sync.ranks.trainer:streams": f"{BUGS}:keeps_a_copy"}

FAULTS = exposed_by(
    QUICK,
    Fault(
        "permuted-rows",
        "two rows of a tensor are swapped on arrival; its sum, minimum and maximum stay the same",
        "bit_exact",
        set=UNSEEN,
        needs={"serve": IN_THE_RANK},
        patch={f"{CALL}.apply": f"{BUGS}:swaps_two_rows"},
    ),
    Fault(
        "stale-bucket",
        "a bucket with changed tensors is not packed again, so old bytes are sent",
        "bit_exact",
        set=UNSEEN,
        patch={f"{TRAINER}.to_send": f"{BUGS}:sends_an_old_bucket", **WITH_A_COPY},
    ),
    Fault(
        "cache-after-offload",
        "buckets are packed after the weights were offloaded, from empty tensors",
        "bit_exact",
        set=UNSEEN,
        patch={
            f"{TRAINER}.refresh": f"{BUGS}:refreshes_after_an_offload",
            f"{TRAINER}.gather": f"{BUGS}:gathers_empty_tensors",
            **WITH_A_COPY,
        },
    ),
    Fault(
        "copied-beside-buckets",
        "an offload copies weights to the host although they are in buckets there already",
        "weights_once",
        set=IN_BUCKETS,
        needs=KEPT_IN_BUCKETS,
        patch={"kit.megatron.tensors:Elsewhere.covers": f"{BUGS}:covers_nothing"},
    ),
    Fault(
        "unfilled-bucket",
        "a bucket is handed out before it is filled",
        "bit_exact",
        set={**IN_BUCKETS, **UNSEEN},
        needs=KEPT_IN_BUCKETS,
        patch={f"{TRAINER}.to_send": f"{BUGS}:fills_the_last_bucket_late", f"{SENDING}.teardown": f"{BUGS}:fills_late"},
    ),
    Fault(
        "overwritten-bucket",
        "the trainer writes to a bucket that holds its weights while it is offloaded",
        "trainer_restored",
        set={**IN_BUCKETS, **UNSEEN},
        needs=KEPT_IN_BUCKETS,
        patch={f"{TRAINER}.offload": f"{BUGS}:writes_to_a_bucket"},
    ),
    Fault(
        "restored-old-version",
        "the trainer's weights come back from the buckets of the version before",
        "trainer_restored",
        set=IN_BUCKETS,
        needs=KEPT_IN_BUCKETS,
        patch={f"{TRAINER}.map_buckets": f"{BUGS}:maps_the_version_before"},
    ),
    Fault(
        "double-bump",
        "an expansion increments the version",
        "no_double_bump",
        patch={f"{SENDING}.tell": f"{BUGS}:bumps_in_an_expansion"},
    ),
    Fault(
        "activate-before-publish",
        "replicas get requests before their version is published",
        "version_order",
        patch={STEPS: f"{BUGS}:ACTIVATE_FIRST", f"{CALL}.activate": f"{BUGS}:runs_at_once"},
    ),
    Fault(
        "publish-before-apply",
        "the version is published before the new weights are applied",
        "version_order",
        patch={STEPS: f"{BUGS}:PUBLISH_FIRST"},
    ),
    Fault(
        "repeats-a-bucket",
        "a receiver reads the bytes of its first bucket for the second one too",
        "bit_exact",
        set={**UNSEEN, "bucket_mib": 0.25},
        patch={f"{CALL}.apply_bucket": f"{BUGS}:reads_the_first_bucket_again"},
    ),
    Fault(
        "dropped-bucket",
        "a receiver acknowledges its last bucket without applying it",
        "bit_exact",
        set=UNSEEN,
        patch={f"{CALL}.apply_bucket": f"{BUGS}:drops_the_last_bucket"},
    ),
    Fault(
        "swapped-shards",
        "the ranks of a replica swap their shards",
        "bit_exact",
        set=TWO_RANKS,
        needs=KITS,
        patch={f"{REPLICA}.destinations": f"{BUGS}:takes_the_next_ranks_shards"},
    ),
    Fault(
        "frozen-base",
        "the base is gathered under the names of every new version, so the digests on both ends agree",
        "trained_changed",
        patch={f"{TRAINER}.gather": f"{BUGS}:gathers_the_base"},
    ),
    Fault(
        "shared-layout-error",
        "both ends load and export queries in a wrong order of heads, so every tensor arrives bit for bit",
        "names_right",
        bugs=("NVIDIA-NeMo/RL#2802",),
        needs=KITS,
        patch={
            f"{SHARDS}:full_tensors": f"{BUGS}:full_tensors_by_heads",
            f"{SHARDS}:destinations": f"{BUGS}:destinations_by_heads",
        },
    ),
    Fault(
        "transposed-tensor",
        "a square tensor is loaded transposed, which no comparison of shapes sees",
        "logits_equal",
        bugs=("THUDM/slime#1840",),
        needs=KITS,
        patch={f"{REPLICA}.destinations": f"{BUGS}:transposes_a_square_tensor"},
    ),
    Fault(
        "queries-first",
        "a fused layer is loaded as all queries, all keys, all values, but the model interleaves them group by group",
        "bit_exact",
        needs=KITS,
        patch={f"{REPLICA}.destinations": f"{BUGS}:loads_queries_first"},
    ),
    Fault(
        "parameter-not-sent",
        "the lists of names on both ends lack a parameter, so nobody sends it and nobody misses it",
        "every_parameter_written",
        needs=KITS,
        patch={
            "kit.labs.sync.ranks.trainer:memory_of": f"{BUGS}:packs_all_but_one",
            f"{REPLICA}.destinations": f"{BUGS}:expects_all_but_one",
        },
    ),
    Fault(
        "scales-not-sent",
        "the scales of keys and values are no parameters, so they are not sent with the weights",
        "every_parameter_written",
        set={"kv_scales": True},
        needs={**KITS, "kv_scales": (True,)},
        patch={
            "kit.labs.sync.ranks.trainer:memory_of": f"{BUGS}:packs_no_scales",
            f"{REPLICA}.destinations": f"{BUGS}:expects_no_scales",
        },
    ),
    Fault(
        "old-tensor",
        "a tensor is loaded into memory that the model no longer uses",
        "every_parameter_written",
        bugs=("verl-project/verl#7224",),
        needs=KITS,
        patch={f"{REPLICA}.destinations": f"{BUGS}:writes_into_an_old_tensor"},
    ),
    Fault(
        "lost-constants",
        "a replica wakes without the tensors that no sync brings, such as the rotary table",
        "every_parameter_written",
        bugs=("vllm-project/vime#446",),
        needs={"placement": ("overlap",), "serve": IN_THE_RANK},
        patch={f"{REPLICA}.wake": f"{BUGS}:wakes_without_constants"},
    ),
    Fault(
        "finalized-again",
        "the step after a load also runs for tensors that were not loaded, at every sync",
        "every_parameter_written",
        bugs=("radixark/miles#1926",),
        needs={"serve": IN_THE_RANK},
        patch={f"{REPLICA}.finalize": f"{BUGS}:finalizes_constants_again"},
    ),
    Fault(
        "misaligned-offset",
        "a tensor is read at an offset that is one element too far",
        "bit_exact",
        set=UNSEEN,
        patch={f"{CALL}.apply_bucket": f"{BUGS}:reads_an_element_too_far"},
    ),
    Fault(
        "leaked-group",
        "the temporary process group of a sync is not destroyed",
        "groups_return_to_baseline",
        set={"transport": "broadcast"},
        needs={"transport": ("broadcast", "per-tensor")},
        patch={"kit.sync.groups:Broadcast.close": f"{BUGS}:keeps_its_group"},
    ),
    Fault(
        "leaked-segment",
        "a receiver keeps the sender's memory mapped",
        "segments_return_to_baseline",
        set={"transport": "shm"},
        needs={"transport": ("shm",)},
        patch={f"{CALL}.look": f"{BUGS}:keeps_the_memory_mapped"},
    ),
    Fault(
        "kept-weights",
        "a receiver keeps a copy of every bucket that arrives",
        "no_second_copy",
        bugs=("vllm-project/vllm#37334",),
        patch={f"{CALL}.look": f"{BUGS}:keeps_what_arrives"},
    ),
    Fault(
        "torn-read",
        "weights change while the gate is open, and a forward runs on torn weights",
        "no_torn_reads",
        bugs=("pytorch/torchtitan#3795",),
        set=SERVING,
        needs={"refresh": ("staged",)},
        patch={f"{CALL}.apply": f"{BUGS}:applies_without_a_gate"},
    ),
    Fault(
        "early-gate",
        "the gate opens before the last bucket is applied",
        "no_torn_reads",
        set=SERVING,
        needs={"refresh": ("staged",)},
        patch={f"{CALL}.apply_stored": f"{BUGS}:opens_the_gate_early"},
    ),
    Fault(
        "reads-ahead",
        "a forward reads one tensor before it passes the gate and the others after",
        "no_torn_reads",
        set=SERVING,
        needs={"serve": IN_THE_RANK},
        patch={f"{REPLICA}.prepare": f"{BUGS}:reads_ahead"},
    ),
    Fault(
        "resumed-trainer",
        "the trainer resumed with other weights and still publishes the base",
        "base_equal",
        patch={
            f"{TRAINER}.make_job": f"{BUGS}:resumes_with_other_weights",
            f"{SENDING}.compare_base": f"{BUGS}:trusts_the_base",
        },
    ),
    Fault(
        "receiver-dies",
        "a receiver is killed in the middle of a sync",
        "receivers_answer",
        exit=3,
        set={"deadline_s": 5},
        patch={f"{CALL}.look": f"{BUGS}:dies_in_the_middle"},
    ),
    Fault(
        "receiver-stalls",
        "a receiver stops answering in the middle of a sync",
        "receivers_answer",
        exit=3,
        set={"deadline_s": 10},
        patch={f"{CALL}.look": f"{BUGS}:stalls_in_the_middle"},
    ),
    Fault(
        "answered-twice",
        "a replica repeats its last answer when it pauses for new weights",
        "receivers_answer",
        patch={"kit.sync.serving:Serving.writing": f"{BUGS}:repeats_its_last_answer"},
    ),
    Fault(
        "first-tokens",
        "a forward keeps the tokens of its first request, like a captured graph with an input buffer that is not filled again",
        "logits_equal",
        needs=KITS,
        patch={"kit.engines.hosted:MegatronModel.logits": f"{BUGS}:keeps_the_first_tokens"},
    ),
    Fault(
        "activates-alone",
        "a rank runs the new version before all ranks of its replica are ready and keeps it if one of them fails",
        "failure_is_clean",
        set=TWO_RANKS,
        patch={f"{CALL}.activate": f"{BUGS}:runs_at_once"},
    ),
    Fault(
        "leaks-on-failure",
        "a receiver whose sync failed keeps its connection open",
        "failure_is_clean",
        patch={f"{CALL}.close": f"{BUGS}:keeps_its_connection"},
    ),
    Fault(
        "undo-without-finalize",
        "after an undo nothing is derived again from the old weights",
        "failure_is_clean",
        set=SERVING,
        needs={"refresh": ("staged",)},
        patch={f"{CALL}.undo": f"{BUGS}:derives_nothing_after_an_undo"},
    ),
    Fault(
        "failed-discard",
        "discarding a version that failed raises another error",
        "failure_is_clean",
        patch={"kit.sync.cache:Cache.discard": f"{BUGS}:discards_with_an_error"},
    ),
    Fault(
        "keeps-new-weights",
        "a failed receiver keeps the new weights and serves with them",
        "failure_is_clean",
        patch={f"{CALL}.undo": f"{BUGS}:keeps_new_weights"},
    ),
    Fault(
        "snapshot-before-ack",
        "the sender compares the next version with what it has sent, before the receivers acknowledged that",
        "bit_exact",
        set=DELTA,
        needs=BY_WORD,
        patch={f"{SENDING}.base": f"{BUGS}:takes_what_it_sent_for_the_base", **UNACKNOWLEDGED},
    ),
    Fault(
        "anchor-from-changed-only",
        "the copy with which the next version is compared has only the tensors that were sent last",
        "delta_bytes",
        set=DELTA,
        needs=BY_WORD,
        patch={f"{SENDING}.base": f"{BUGS}:keeps_only_what_was_sent"},
    ),
    Fault(
        "version-without-bytes",
        "a receiver takes the label of a version and writes none of its changes",
        "bit_exact",
        set=DELTA,
        needs=BY_WORD,
        patch={"kit.sync.buckets:Cut.write": f"{BUGS}:writes_no_words", **UNACKNOWLEDGED},
    ),
    Fault(
        "wrong-half",
        "an engine loads gate projections into the half of the packed tensor that belongs to up projections, and the reverse",
        "bit_exact",
        set=ENGINE,
        needs=ENGINES,
        patch={
            f"{HUGGING}.load": f"{BUGS}:loads_into_the_wrong_half",
            f"{VLLM_MODEL}.load": f"{BUGS}:loads_into_the_wrong_half_of_vllm",
        },
    ),
    Fault(
        "tied-name-skipped",
        "an engine has its own copy of the tied head and does not load it, because no tensor with its name comes",
        "bit_exact",
        set=ENGINE,
        needs=ENGINES,
        patch={
            f"{HUGGING}.__init__": f"{BUGS}:unties_the_head",
            "kit.engines.vllm:write_folder": f"{BUGS}:writes_an_untied_head",
        },
    ),
    Fault(
        "buffer-not-sent",
        "an engine's reload creates the rotary table again and leaves it empty, because no sync brings it",
        "every_parameter_written",
        set=ENGINE,
        needs=ENGINES,
        patch={
            "kit.engines.hosted:LoadedModel.finalize": f"{BUGS}:leaves_the_rotary_table_empty",
            "kit.engines.vllm:SIDE": f"{BUGS}:EMPTIED_SIDE",
        },
    ),
    Fault(
        "served-asleep",
        "an engine that gets a request while it sleeps wakes without weights and answers",
        "sleepers_release",
        set=ENGINE,
        needs={**ENGINES, "placement": ("overlap",)},
        patch={f"{HUGGING}.logits": f"{BUGS}:answers_asleep", f"{VLLM_MODEL}.logits": f"{BUGS}:answers_asleep_in_vllm"},
    ),
    Fault(
        "prepacked-stale",
        "vLLM packed its layers for the CPU: its own reload answers without an error and leaves the packed tied head old",
        "bit_exact",
        set=VLLM,
        needs=IN_VLLM,
        patch={f"{VLLM_MODEL}.linear": f"{BUGS}:PACKED"},
    ),
    Fault(
        "stale-vllm-cache",
        "vLLM answers a known prompt from keys and values of the old weights",
        "logits_equal",
        set=VLLM,
        needs=IN_VLLM,
        patch={f"{VLLM_MODEL}.drop_cache": f"{BUGS}:keeps_the_prefix_cache"},
    ),
    Fault(
        "vllm-update-left-open",
        "vLLM's update of the weights stays open, so that the next one is refused",
        "receivers_answer",
        exit=3,
        set=VLLM,
        needs=IN_VLLM,
        patch={f"{VLLM_MODEL}.finish": f"{BUGS}:forgets_an_open_update"},
    ),
    Fault(
        "vllm-finish-never-called",
        "vLLM's update of the weights is not finished before the next one begins",
        "receivers_answer",
        exit=3,
        set=VLLM,
        needs=IN_VLLM,
        patch={f"{VLLM_MODEL}.finalize": f"{BUGS}:never_finishes_in_vllm"},
    ),
    Fault(
        "finalize-twice",
        "the step after a load runs twice",
        "version_order",
        set=ENGINE,
        patch={f"{CALL}.finalize": f"{BUGS}:finalizes_twice"},
    ),
    Fault(
        "stale-prefix-cache",
        "an engine serves prefixes that it cached with old weights",
        "logits_equal",
        set=DOUBLE,
        needs=DOUBLES,
        patch={f"{PROTOCOLS}.drop_prefixes": f"{BUGS}:keeps_prefixes"},
    ),
    Fault(
        "finish-never-called",
        "the update of an engine is never finished, so the weights keep their old label, and the next update is refused",
        "no_double_bump",
        exit=3,
        set=DOUBLE,
        needs=DOUBLES,
        patch={f"{PROTOCOLS}.finalize": f"{BUGS}:never_finishes"},
    ),
    Fault(
        "update-left-open",
        "the update of an engine is not finished after a failure, so the next one is refused",
        "failure_is_clean",
        exit=3,
        set=DOUBLE,
        needs=DOUBLES,
        patch={f"{PROTOCOLS}.abandon": f"{BUGS}:leaves_the_update_open"},
    ),
    needs={"implementation": ("",)},
)
