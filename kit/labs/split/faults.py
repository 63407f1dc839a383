"""The known bugs of the lab `split` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

KIT_SPLIT = "kit.labs.split.ranks.backends:split_step"
KIT_LOSS = "kit.labs.split.ranks.backends:of_recipe"
KIT_MODEL = "kit.labs.split.ranks.backends:assemble"

QUICK = {"chunks": [1, 5], "level": "tokens", "steps": 2, "dtype": "float32"}
EXPERTS = {"ep": 2, "experts": 4, "reduce": "mean", "level": "sequences"}
CLIPPED = ("grpo", "dapo", "gspo", "cispo", "tis", "icepop", "seq-mask-tis", "on-policy", "reinforce", "vapo")
STEP = "kit.megatron.split:MegatronSplit"
BUGS = "kit.labs.split.ranks.bugs"
ON_FSDP2 = {"implementation": (KIT_SPLIT,), "backend": ("fsdp2",)}
TWO_PARTS = {"backend": "fsdp2", "cp": 2}
ON_PARTS = {"backend": ("fsdp2",), "cp": (2, 3, 4, 8)}
ON_MEGATRON = {"implementation": (KIT_SPLIT,), "backend": ("megatron",)}

OF_THE_STEP = exposed_by(
    QUICK,
    Fault(
        "double-reduce",
        "gradients are reduced twice: by start_grad_sync and again by finish",
        "one_reduction",
        patch={f"{STEP}._reduce": f"{BUGS}:reduces_twice"},
    ),
    Fault(
        "no-reduce",
        "gradients are not reduced over data-parallel ranks",
        "grad_parity",
        patch={f"{STEP}._reduce": f"{BUGS}:left_out"},
    ),
    Fault(
        "no-sync-leak",
        "no_sync_func stays in force, so the reduction of the next step starts too early",
        "one_reduction",
        exit=3,
        set={"overlap_grad_reduce": True},
        patch={f"{STEP}._hook": f"{BUGS}:keeps_no_sync"},
    ),
    Fault(
        "per-chunk-finalize",
        "finalize_model_grads_func stays in force and reduces at the end of every chunk",
        "chunk_invariance",
        patch={f"{STEP}._hook": f"{BUGS}:keeps_finalize"},
    ),
    Fault(
        "one-scalar-metrics",
        "every metric is divided by the loss's normalizer",
        "metric_parity",
        bugs=(
            "huggingface/trl#7012",
            "verl-project/verl#4711",
        ),
        set={"level": "sequences"},
        patch={f"{STEP}.begin": f"{BUGS}:by_one_scalar"},
    ),
    Fault(
        "counts-normalised",
        "counts are divided by the loss's normalizer",
        "metric_parity",
        patch={f"{STEP}.begin": f"{BUGS}:divides_counts"},
    ),
    Fault(
        "late-lr",
        "the reported learning rate is read after the schedule has advanced",
        "lr_of_this_step",
        patch={f"{STEP}._update": f"{BUGS}:reads_rate_late"},
    ),
    Fault(
        "hooks-lost-on-error",
        "an error in the step leaves the job's hooks replaced",
        "hooks_restored",
        patch={f"{STEP}._restore": f"{BUGS}:loses_hooks_on_error"},
    ),
    Fault(
        "moe-aux-unscaled",
        "the load-balancing loss of experts is divided like the main loss",
        "grad_parity",
        bugs=("NVIDIA/Megatron-LM#1652",),
        set={**EXPERTS, "dtype": "float32"},
        needs={"dtype": ("float32",)},  # its effect is within the rounding of bfloat16
        patch={f"{STEP}._aux_guess": f"{BUGS}:aux_scale_of_one", f"{STEP}._correct_aux": f"{BUGS}:left_out"},
    ),
    Fault(
        "replicas-counted-n-times",
        "metrics are summed over all ranks, including tensor-parallel ones",
        "replicas_counted_once",
        set={"tp": 2},
        patch={f"{STEP}._step_metrics": f"{BUGS}:counts_every_replica"},
    ),
    Fault(
        "count-shifted",
        "valid tokens are counted one column too early: the first column for the last",
        "replicas_counted_once",
        patch={"kit.train.protocol:counts": f"{BUGS}:counts_one_column_early"},
    ),
    Fault(
        "abort-keeps-grads",
        "abort leaves gradients in the buffers",
        "abort_is_clean",
        patch={f"{STEP}._give_up": f"{BUGS}:abort_keeps_gradients"},
    ),
    Fault(
        "missing-sync",
        "the optimizer does not wait for the GPU and gets gradients before they are divided",
        "grad_parity",
        devices=("cuda",),
        patch={f"{STEP}._normalise": f"{BUGS}:divides_late", f"{STEP}._synchronise": f"{BUGS}:left_out"},
    ),
    Fault(
        "release-mid-step",
        "gradient memory is released and allocated again while a step is open: gradients of earlier chunks are lost",
        "chunk_invariance",
        patch={f"{STEP}.microbatch": f"{BUGS}:releases_gradients"},
    ),
    Fault(
        "drops-last-microbatch",
        "the last microbatch of a chunk is counted but not trained on",
        "loss_parity",
        patch={f"{STEP}._pieces": f"{BUGS}:drops_last_microbatch"},
    ),
    Fault(
        "metrics-on-rank-0-alone",
        "metrics are reduced to the first data-parallel rank only; the others report their own rows",
        "ranks_agree",
        patch={f"{STEP}._step_metrics": f"{BUGS}:reports_own_rows"},
    ),
    Fault(
        "abort-keeps-random",
        "abort does not restore the random state",
        "abort_is_clean",
        patch={f"{STEP}._give_up": f"{BUGS}:abort_keeps_random"},
    ),
    Fault(
        "norm-of-sums",
        "grad_norm is the norm of the raw sums, not divided by the true count",
        "result_parity",
        patch={f"{STEP}._update": f"{BUGS}:norm_of_sums"},
    ),
    Fault(
        "loses-a-metric",
        "a metric is missing from the result",
        "metric_coverage",
        patch={f"{STEP}._step_metrics": f"{BUGS}:loses_a_metric"},
    ),
    Fault(
        "ticks-on-abort",
        "abort increments the version",
        "version_ticks",
        patch={f"{STEP}.abort": f"{BUGS}:ticks_on_abort"},
    ),
    Fault(
        "schedule-by-steps",
        "the schedule advances by 1 instead of the batch size",
        "params_parity",
        set={"steps": 5},
        patch={f"{STEP}._update": f"{BUGS}:schedules_by_steps"},
    ),
    Fault(
        "wrong-clip",
        "gradients are clipped to a norm that is half of the configured one",
        "update",
        patch={f"{STEP}._update": f"{BUGS}:clips_to_half"},
    ),
    Fault(
        "scales-up",
        "gradients with a norm below the limit of clipping are scaled up to it",
        "update",
        needs={"distributed_optimizer": (False,), "tp": (1,), "pp": (1,), "experts": (0,)},
        patch={f"{STEP}._update": f"{BUGS}:scales_up_to_the_limit"},
    ),
    Fault(
        "lost-on-interrupt",
        "an interrupt in the step, which is no Exception, leaves the job's hooks replaced",
        "hooks_restored",
        needs={"pp": (1,)},
        patch={"kit.train.protocol:SplitStep._guarded": f"{BUGS}:restores_only_after_errors"},
    ),
    Fault(
        "routers-left",
        "a split step does not move the biases that balance the experts",
        "routers_match",
        set={**EXPERTS, "router_bias": True},
        patch={f"{STEP}._reduce": f"{BUGS}:leaves_the_routers"},
    ),
    Fault(
        "routers-moved-twice",
        "a split step moves the biases that balance the experts twice as far",
        "routers_match",
        bugs=("pytorch/torchtitan#1593",),
        set={**EXPERTS, "router_bias": True},
        patch={f"{STEP}._reduce": f"{BUGS}:moves_the_routers_twice"},
    ),
    Fault(
        "twice-divided",
        "gradients are divided twice by the number of data-parallel ranks",
        "grad_parity",
        patch={f"{STEP}._normalise": f"{BUGS}:divides_by_the_ranks_again"},
    ),
    Fault(
        "keeps-graphs",
        "every microbatch keeps its loss, and with it the graph of its backward pass",
        "nothing_stays",
        patch={f"{STEP}._raw_loss": f"{BUGS}:keeps_every_loss"},
    ),
    Fault(
        "hook-per-step",
        "every step leaves one more hook on the model",
        "nothing_stays",
        patch={f"{STEP}._open": f"{BUGS}:adds_a_hook"},
    ),
    Fault(
        "sums-means",
        "metrics that are means are added up over data-parallel ranks",
        "means_averaged",
        patch={"kit.train.protocol:over_ranks": f"{BUGS}:adds_up_means"},
    ),
    Fault(
        "left-in-eval",
        "abort leaves the model in evaluation mode",
        "hooks_restored",
        patch={f"{STEP}._give_up": f"{BUGS}:gives_up_in_eval"},
    ),
    Fault(
        "file-per-abort",
        "every abort leaves a file open",
        "nothing_stays",
        patch={f"{STEP}._give_up": f"{BUGS}:gives_up_with_an_open_file"},
    ),
    Fault(
        "nan-applied",
        "NaN gradients are applied to the weights",
        "nonfinite_skipped",
        patch={f"{STEP}._update": f"{BUGS}:applies_nan"},
    ),
    Fault(
        "drops-remainder",
        "rows after the last whole microbatch are silently dropped",
        "misuse_raises",
        patch={f"{STEP}._pieces": f"{BUGS}:drops_remainder"},
    ),
    Fault(
        "group-per-step",
        "every step creates a process group and never destroys it",
        "groups_return_to_baseline",
        patch={f"{STEP}._metrics": f"{BUGS}:makes_a_group"},
    ),
    Fault(
        "moe-aux-summed",
        "the reported load-balancing loss is a sum over microbatches instead of a mean",
        "experts_balance",
        set=EXPERTS,
        patch={f"{STEP}._metrics": f"{BUGS}:sums_aux"},
    ),
    needs=ON_MEGATRON,
)
FAULTS = OF_THE_STEP + exposed_by(
    QUICK,
    Fault(
        "dummy-bins-counted",
        "padding bins of a data-parallel rank are counted as valid",
        "replicas_counted_once",
        set={"backend": "fsdp2", "batching": "packed", "token_budget": 48, "layers": 1, "microbatches": 5},
        needs=ON_FSDP2,
        patch={"kit.train.fsdp:FsdpSplit.fill": f"{BUGS}:pads_with_real_rows"},
    ),
    Fault(
        "keeps-rows",
        "the microbatch that is held back until finish is the caller's rows, not a copy",
        "rows_copied",
        set={"backend": "fsdp2"},
        needs=ON_FSDP2,
        patch={"kit.train.fsdp:FsdpSplit._run": f"{BUGS}:holds_the_callers_rows"},
    ),
    Fault(
        "keys-gradient-of-own-part",
        "the gradient of keys and values is not summed over the context group, in the plain and in the split step",
        "oracle",
        set=TWO_PARTS,
        needs={**ON_PARTS, "dtype": ("float32",)},  # its effect is within the rounding of bfloat16
        patch={"kit.train.columns:slope_of_keys": f"{BUGS}:keeps_its_own_part"},
    ),
    Fault(
        "scaled-by-cp",
        "gradients are too large by the size of the context group, in the plain and in the split step",
        "oracle",
        set=TWO_PARTS,
        needs=ON_PARTS,
        patch={"kit.train.columns:slope_of_scores": f"{BUGS}:sums_whole_slopes"},
    ),
    Fault(
        "context-ranks-counted",
        "sequences and tokens are counted over all ranks, context ranks included",
        "replicas_counted_once",
        set=TWO_PARTS,
        needs={**ON_FSDP2, **ON_PARTS},
        patch={"kit.train.fsdp:FsdpSplit._true_counts": f"{BUGS}:counts_context_ranks"},
    ),
    Fault(
        "norm-of-data-ranks",
        "the norm to clip by has the shards of the data ranks only, in the plain and in the split step",
        "update",
        set=TWO_PARTS,
        needs={**ON_FSDP2, **ON_PARTS},
        patch={"kit.train.fsdp:Steps._norm": f"{BUGS}:leaves_out_context_ranks"},
    ),
    Fault(
        "mask-not-shifted",
        "the loss does not shift the token mask by one, in the plain and in the split step",
        "oracle",
        needs={"loss": (KIT_LOSS,)},
        patch={"kit.train.losses:valid": f"{BUGS}:mask_not_shifted"},
    ),
    Fault(
        "weights-cancel",
        "the loss computes importance weights as expm1(gap) + 1 in float32",
        "extreme_gaps",
        set={"level": "sequences"},  # with which every recipe works
        needs={"loss": (KIT_LOSS,), "recipe": CLIPPED},
        patch={"kit.train.losses:ClippedPolicyGradient._weight": f"{BUGS}:cancelling_weight"},
    ),
    Fault(
        "masks-multiply",
        "the loss multiplies masked places by 0, so NaN and infinities reach the sum",
        "masked_places",
        needs={"loss": (KIT_LOSS,)},
        patch={"kit.train.losses:kept_inside": f"{BUGS}:multiplies_masks"},
    ),
    Fault(
        "unclipped",
        "gradients are not clipped, in the plain and in the split step",
        "update",
        needs={"backend": ("megatron",), "model": (KIT_MODEL,)},
        patch={KIT_MODEL: f"{BUGS}:without_clipping"},
    ),
)
