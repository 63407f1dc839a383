"""The known bugs of the lab `split` that can be switched on, each with the rule that catches it."""

from kit.labs.definition import Fault, exposed_by

QUICK = {"chunks": [1, 5], "level": "tokens", "steps": 2, "dtype": "float32"}
EXPERTS = {"ep": 2, "experts": 4, "reduce": "mean", "level": "sequences"}

# Known bugs of split steps. `ranks/broken.py` implements each; the check that it names detects it.
FAULTS = exposed_by(
    QUICK,
    Fault("double-reduce", "gradients are reduced twice: by start_grad_sync and again by finish", "one_reduction"),
    Fault("no-reduce", "gradients are not reduced over data-parallel ranks", "grad_parity"),
    Fault(
        "no-sync-leak",
        "no_sync_func stays in force, so the reduction of the next step starts too early",
        "one_reduction",
        exit=3,
        set={"overlap_grad_reduce": True},
    ),
    Fault(
        "per-chunk-finalize",
        "finalize_model_grads_func stays in force and reduces at the end of every chunk",
        "chunk_invariance",
    ),
    Fault(
        "one-scalar-metrics",
        "every metric is divided by the loss's normalizer",
        "metric_parity",
        set={"level": "sequences"},
    ),
    Fault("counts-normalised", "counts are divided by the loss's normalizer", "metric_parity"),
    Fault("late-lr", "the reported learning rate is read after the schedule has advanced", "lr_of_this_step"),
    Fault("hooks-lost-on-error", "an error in the step leaves the job's hooks replaced", "hooks_restored"),
    Fault(
        "moe-aux-unscaled",
        "the load-balancing loss of experts is divided like the main loss",
        "grad_parity",
        set=EXPERTS,
    ),
    Fault(
        "replicas-counted-n-times",
        "metrics are summed over all ranks, including tensor-parallel ones",
        "replicas_counted_once",
        set={"tp": 2},
    ),
    Fault(
        "mask-not-shifted",
        "the loss does not shift the token mask by one, in the plain and in the split step",
        "oracle",
    ),
    Fault(
        "dummy-bins-counted",
        "padding bins of a data-parallel rank are counted as valid",
        "replicas_counted_once",
        set={"backend": "fsdp2", "batching": "packed", "token_budget": 48},
    ),
    Fault("abort-keeps-grads", "abort leaves gradients in the buffers", "abort_is_clean"),
    Fault(
        "missing-sync",
        "the optimizer does not wait for the GPU and gets gradients before they are divided",
        "grad_parity",
        devices=("cuda",),
    ),
    Fault(
        "release-mid-step",
        "gradient memory is released and allocated again while a step is open: gradients of earlier chunks are lost",
        "chunk_invariance",
    ),
    Fault("drops-last-microbatch", "the last microbatch of a chunk is counted but not trained on", "loss_parity"),
    Fault(
        "metrics-on-rank-0-alone",
        "metrics are reduced to the first data-parallel rank only; the others report their own rows",
        "ranks_agree",
    ),
    Fault("abort-keeps-random", "abort does not restore the random state", "abort_is_clean"),
    Fault("norm-of-sums", "grad_norm is the norm of the raw sums, not divided by the true count", "result_parity"),
    Fault("loses-a-metric", "a metric is missing from the result", "metric_coverage"),
    Fault("ticks-on-abort", "abort increments the version", "version_ticks"),
    Fault(
        "schedule-by-steps", "the schedule advances by 1 instead of the batch size", "params_parity", set={"steps": 5}
    ),
    Fault("nan-applied", "NaN gradients are applied to the weights", "nonfinite_skipped"),
    Fault("unclipped", "gradients are not clipped, in the plain and in the split step", "update"),
    Fault("weights-cancel", "the loss computes importance weights as expm1(gap) + 1 in float32", "extreme_gaps"),
    Fault(
        "masks-multiply", "the loss multiplies masked places by 0, so NaN and infinities reach the sum", "masked_places"
    ),
    Fault("drops-remainder", "rows after the last whole microbatch are silently dropped", "misuse_raises"),
    Fault("group-per-step", "every step creates a process group and never destroys it", "groups_return_to_baseline"),
    Fault(
        "moe-aux-summed",
        "the reported load-balancing loss is a sum over microbatches instead of a mean",
        "experts_balance",
        set=EXPERTS,
    ),
)
