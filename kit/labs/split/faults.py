"""Known bugs of split steps. `ranks/broken.py` implements each; the check that it names detects it."""

from kit.labs.definition import Fault

QUICK = {"chunks": [1, 5], "level": "tokens", "steps": 2, "dtype": "float32"}
OVERLAP = {**QUICK, "overlap_grad_reduce": True}
EXPERTS = {**QUICK, "ep": 2, "experts": 4, "reduce": "mean", "level": "sequences"}

FAULTS = (
    Fault(
        name="double-reduce",
        breaks="gradients are reduced twice: by start_grad_sync and again by finish",
        check="one_reduction",
        set=QUICK,
    ),
    Fault(
        name="no-reduce", breaks="gradients are not reduced over data-parallel ranks", check="grad_parity", set=QUICK
    ),
    Fault(
        name="no-sync-leak",
        breaks="no_sync_func stays in force, so the reduction of the next step starts too early",
        check="one_reduction",
        exit=3,
        set=OVERLAP,
    ),
    Fault(
        name="per-chunk-finalize",
        breaks="finalize_model_grads_func stays in force and reduces at the end of every chunk",
        check="chunk_invariance",
        set=QUICK,
    ),
    Fault(
        name="one-scalar-metrics",
        breaks="every metric is divided by the loss's normalizer",
        check="metric_parity",
        set={**QUICK, "level": "sequences"},
    ),
    Fault(
        name="counts-normalised",
        breaks="counts are divided by the loss's normalizer",
        check="metric_parity",
        set=QUICK,
    ),
    Fault(
        name="late-lr",
        breaks="the reported learning rate is read after the schedule has advanced",
        check="lr_of_this_step",
        set=QUICK,
    ),
    Fault(
        name="hooks-lost-on-error",
        breaks="an error in the step leaves the job's hooks replaced",
        check="hooks_restored",
        set=QUICK,
    ),
    Fault(
        name="moe-aux-unscaled",
        breaks="the load-balancing loss of experts is divided like the main loss",
        check="grad_parity",
        set=EXPERTS,
    ),
    Fault(
        name="replicas-counted-n-times",
        breaks="metrics are summed over all ranks, including tensor-parallel ones",
        check="replicas_counted_once",
        set={**QUICK, "tp": 2},
    ),
    Fault(
        name="mask-not-shifted",
        breaks="the loss does not shift the token mask by one, in the plain and in the split step",
        check="oracle",
        set=QUICK,
    ),
    Fault(
        name="dummy-bins-counted",
        breaks="padding bins of a data-parallel rank are counted as valid",
        check="replicas_counted_once",
        set={**QUICK, "backend": "fsdp2", "batching": "packed", "token_budget": 48},
    ),
    Fault(
        name="abort-keeps-grads",
        breaks="abort leaves gradients in the buffers",
        check="abort_is_clean",
        set=QUICK,
    ),
    Fault(
        name="missing-sync",
        breaks="the optimizer does not wait for the GPU and gets gradients before they are divided",
        check="grad_parity",
        set=QUICK,
        devices=("cuda",),
    ),
    Fault(
        name="release-mid-step",
        breaks="gradient memory is released and allocated again while a step is open: gradients of earlier chunks are lost",
        check="chunk_invariance",
        set=QUICK,
    ),
    Fault(
        name="drops-last-microbatch",
        breaks="the last microbatch of a chunk is counted but not trained on",
        check="loss_parity",
        set=QUICK,
    ),
    Fault(
        name="metrics-on-rank-0-alone",
        breaks="metrics are reduced to the first data-parallel rank only; the others report their own rows",
        check="ranks_agree",
        set=QUICK,
    ),
    Fault(
        name="abort-keeps-random",
        breaks="abort does not restore the random state",
        check="abort_is_clean",
        set=QUICK,
    ),
    Fault(
        name="norm-of-sums",
        breaks="grad_norm is the norm of the raw sums, not divided by the true count",
        check="result_parity",
        set=QUICK,
    ),
    Fault(name="loses-a-metric", breaks="a metric is missing from the result", check="metric_coverage", set=QUICK),
    Fault(name="ticks-on-abort", breaks="abort increments the version", check="version_ticks", set=QUICK),
    Fault(
        name="schedule-by-steps",
        breaks="the schedule advances by 1 instead of the batch size",
        check="params_parity",
        set={**QUICK, "steps": 5},
    ),
    Fault(
        name="nan-applied",
        breaks="NaN gradients are applied to the weights",
        check="nonfinite_skipped",
        set=QUICK,
    ),
    Fault(
        name="unclipped",
        breaks="gradients are not clipped, in the plain and in the split step",
        check="update",
        set=QUICK,
    ),
    Fault(
        name="weights-cancel",
        breaks="the loss computes importance weights as expm1(gap) + 1 in float32",
        check="extreme_gaps",
        set=QUICK,
    ),
    Fault(
        name="masks-multiply",
        breaks="the loss multiplies masked places by 0, so NaN and infinities reach the sum",
        check="masked_places",
        set=QUICK,
    ),
    Fault(
        name="drops-remainder",
        breaks="rows after the last whole microbatch are silently dropped",
        check="misuse_raises",
        set=QUICK,
    ),
    Fault(
        name="group-per-step",
        breaks="every step creates a process group and never destroys it",
        check="groups_return_to_baseline",
        set=QUICK,
    ),
    Fault(
        name="moe-aux-summed",
        breaks="the reported load-balancing loss is a sum over microbatches instead of a mean",
        check="experts_balance",
        set=EXPERTS,
    ),
)
