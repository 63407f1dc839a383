"""Split: a training step that is fed in chunks gives the numbers of the plain step, for any number of chunks."""

from kit.labs.definition import Definition, Fault
from kit.labs.split.config import SplitConfig, fits, plan

QUICK = {"chunks": [1, 5], "level": "tokens", "steps": 2, "dtype": "float32"}
OVERLAP = {**QUICK, "overlap_grad_reduce": True}
EXPERTS = {**QUICK, "ep": 2, "experts": 4, "reduce": "mean", "level": "sequences"}

# Known bugs of split steps. `ranks/broken.py` implements each; the check that it names detects it.
FAULTS = (
    Fault(
        "double-reduce",
        "gradients are reduced twice: by start_grad_sync and again by finish",
        "one_reduction",
        set=QUICK,
    ),
    Fault("no-reduce", "gradients are not reduced over data-parallel ranks", "grad_parity", set=QUICK),
    Fault(
        "no-sync-leak",
        "no_sync_func stays in force, so the reduction of the next step starts too early",
        "one_reduction",
        exit=3,
        set=OVERLAP,
    ),
    Fault(
        "per-chunk-finalize",
        "finalize_model_grads_func stays in force and reduces at the end of every chunk",
        "chunk_invariance",
        set=QUICK,
    ),
    Fault(
        "one-scalar-metrics",
        "every metric is divided by the loss's normalizer",
        "metric_parity",
        set={**QUICK, "level": "sequences"},
    ),
    Fault("counts-normalised", "counts are divided by the loss's normalizer", "metric_parity", set=QUICK),
    Fault(
        "late-lr", "the reported learning rate is read after the schedule has advanced", "lr_of_this_step", set=QUICK
    ),
    Fault("hooks-lost-on-error", "an error in the step leaves the job's hooks replaced", "hooks_restored", set=QUICK),
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
        set={**QUICK, "tp": 2},
    ),
    Fault(
        "mask-not-shifted",
        "the loss does not shift the token mask by one, in the plain and in the split step",
        "oracle",
        set=QUICK,
    ),
    Fault(
        "dummy-bins-counted",
        "padding bins of a data-parallel rank are counted as valid",
        "replicas_counted_once",
        set={**QUICK, "backend": "fsdp2", "batching": "packed", "token_budget": 48},
    ),
    Fault("abort-keeps-grads", "abort leaves gradients in the buffers", "abort_is_clean", set=QUICK),
    Fault(
        "missing-sync",
        "the optimizer does not wait for the GPU and gets gradients before they are divided",
        "grad_parity",
        set=QUICK,
        devices=("cuda",),
    ),
    Fault(
        "release-mid-step",
        "gradient memory is released and allocated again while a step is open: gradients of earlier chunks are lost",
        "chunk_invariance",
        set=QUICK,
    ),
    Fault(
        "drops-last-microbatch",
        "the last microbatch of a chunk is counted but not trained on",
        "loss_parity",
        set=QUICK,
    ),
    Fault(
        "metrics-on-rank-0-alone",
        "metrics are reduced to the first data-parallel rank only; the others report their own rows",
        "ranks_agree",
        set=QUICK,
    ),
    Fault("abort-keeps-random", "abort does not restore the random state", "abort_is_clean", set=QUICK),
    Fault(
        "norm-of-sums",
        "grad_norm is the norm of the raw sums, not divided by the true count",
        "result_parity",
        set=QUICK,
    ),
    Fault("loses-a-metric", "a metric is missing from the result", "metric_coverage", set=QUICK),
    Fault("ticks-on-abort", "abort increments the version", "version_ticks", set=QUICK),
    Fault(
        "schedule-by-steps",
        "the schedule advances by 1 instead of the batch size",
        "params_parity",
        set={**QUICK, "steps": 5},
    ),
    Fault("nan-applied", "NaN gradients are applied to the weights", "nonfinite_skipped", set=QUICK),
    Fault("unclipped", "gradients are not clipped, in the plain and in the split step", "update", set=QUICK),
    Fault(
        "weights-cancel", "the loss computes importance weights as expm1(gap) + 1 in float32", "extreme_gaps", set=QUICK
    ),
    Fault(
        "masks-multiply",
        "the loss multiplies masked places by 0, so NaN and infinities reach the sum",
        "masked_places",
        set=QUICK,
    ),
    Fault("drops-remainder", "rows after the last whole microbatch are silently dropped", "misuse_raises", set=QUICK),
    Fault(
        "group-per-step",
        "every step creates a process group and never destroys it",
        "groups_return_to_baseline",
        set=QUICK,
    ),
    Fault(
        "moe-aux-summed",
        "the reported load-balancing loss is a sum over microbatches instead of a mean",
        "experts_balance",
        set=EXPERTS,
    ),
)

LAB = Definition(
    name="split",
    summary="a training step fed as a stream of microbatches gives the loss, gradients, weights and metrics of the plain step",
    config=SplitConfig,
    plan=plan,
    fits=fits,
    phases="kit.labs.split.ranks.phases:Split",
    checks="kit.labs.split.checks:CHECKS",
    presets="kit.labs.split.checks:PRESETS",
    pictures="kit.labs.split.pictures:PICTURES",
    first=("backend", "size", "ranks", "tp", "pp", "ep", "steps", "chunks", "recipe", "level", "implementation"),
    faults=FAULTS,
    preload=("megatron.core",),
)
