"""Known bugs of steps that are cut. Each is switched on in `broken.py` and caught by the check it names."""

from kit.labs.definition import Fault

QUICK = {"chunks": [1, 5], "level": "tokens", "steps": 2, "dtype": "float32"}
OVERLAP = {**QUICK, "overlap_grad_reduce": True}
EXPERTS = {**QUICK, "ep": 2, "experts": 4, "reduce": "mean", "level": "sequences"}

FAULTS = (
    Fault(
        name="double-reduce",
        breaks="gradients are reduced by start_grad_sync, and by finishing once more",
        check="one_reduction",
        set=QUICK,
    ),
    Fault(name="no-reduce", breaks="gradients of other data ranks never arrive", check="grad_parity", set=QUICK),
    Fault(
        name="no-sync-leak",
        breaks="no_sync_func is left as it is, so that the next step's reduction begins before its time",
        check="one_reduction",
        exit=3,
        set=OVERLAP,
    ),
    Fault(
        name="per-chunk-finalize",
        breaks="finalize_model_grads_func stays in force and runs at the end of every chunk",
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
    Fault(name="late-lr", breaks="the rate is read after the schedule has moved", check="lr_of_this_step", set=QUICK),
    Fault(
        name="hooks-lost-on-error",
        breaks="an error leaves the job without its hooks",
        check="hooks_restored",
        set=QUICK,
    ),
    Fault(
        name="moe-aux-unscaled",
        breaks="the experts' load-balancing loss is divided as the main loss is",
        check="grad_parity",
        set=EXPERTS,
    ),
    Fault(
        name="replicas-counted-n-times",
        breaks="metrics are summed over all ranks, tensor parallel ones too",
        check="replicas_counted_once",
        set={**QUICK, "tp": 2},
    ),
    Fault(
        name="mask-not-shifted",
        breaks="the loss takes a token's mask for that of its prediction, in both ways of stepping alike",
        check="oracle",
        set=QUICK,
    ),
    Fault(
        name="dummy-bins-counted",
        breaks="bins that only pad a data rank's share are counted as valid",
        check="replicas_counted_once",
        set={**QUICK, "backend": "fsdp2", "batching": "packed", "token_budget": 48},
    ),
    Fault(
        name="abort-keeps-grads",
        breaks="an abort leaves its gradients in the buffers",
        check="abort_is_clean",
        set=QUICK,
    ),
    Fault(
        name="missing-sync",
        breaks="the optimizer does not wait for the device, so that it sees gradients before they are divided",
        check="grad_parity",
        set=QUICK,
        devices=("cuda",),
    ),
    Fault(
        name="release-mid-step",
        breaks="memory is released and brought back while a step is open: the gradients of earlier chunks are gone",
        check="chunk_invariance",
        set=QUICK,
    ),
    Fault(
        name="drops-last-microbatch",
        breaks="the last microbatch of a call is counted, not run",
        check="loss_parity",
        set=QUICK,
    ),
    Fault(
        name="metrics-on-rank-0-alone",
        breaks="metrics are reduced to the first data rank alone; the others report their own rows",
        check="ranks_agree",
        set=QUICK,
    ),
    Fault(
        name="abort-keeps-random",
        breaks="an abort leaves the random numbers where the step took them",
        check="abort_is_clean",
        set=QUICK,
    ),
    Fault(
        name="norm-of-sums",
        breaks="the norm in the result is that of the raw sums, not divided by the true count",
        check="result_parity",
        set=QUICK,
    ),
    Fault(name="loses-a-metric", breaks="a metric is missing from the result", check="metric_coverage", set=QUICK),
    Fault(name="ticks-on-abort", breaks="an abort makes a new version", check="version_ticks", set=QUICK),
    Fault(
        name="schedule-by-steps",
        breaks="the schedule moves by one in place of the batch size",
        check="params_parity",
        set={**QUICK, "steps": 5},
    ),
    Fault(
        name="nan-applied",
        breaks="a step whose gradients are NaN is applied like any other",
        check="nonfinite_skipped",
        set=QUICK,
    ),
    Fault(
        name="unclipped",
        breaks="nothing clips gradients, in both ways of stepping alike",
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
        breaks="the loss multiplies masked places by 0, which leaves NaN and infinities in",
        check="masked_places",
        set=QUICK,
    ),
    Fault(
        name="drops-remainder",
        breaks="rows beyond the last whole microbatch are left out without a word",
        check="misuse_raises",
        set=QUICK,
    ),
    Fault(
        name="group-per-step",
        breaks="every step makes a process group and destroys none",
        check="groups_return_to_baseline",
        set=QUICK,
    ),
    Fault(
        name="moe-aux-summed",
        breaks="the metric of the experts' load-balancing loss is a sum over microbatches",
        check="experts_balance",
        set=EXPERTS,
    ),
)
