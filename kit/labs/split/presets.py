"""Sets of tolerances for the split lab. A tolerance that a set does not name keeps the lab's default.

Both sets are for float32. For bfloat16, which has 8 bits of precision, start from the defaults.
"""

PRESETS = {
    "strict": {
        "loss_rel": 1e-12,  # losses are summed in float64; only the order of the sum differs
        "metric_rel": 1e-12,
        "chunk_rel": 0.0,  # the same sum for any number of chunks
        "grad_rel": 5e-7,  # four roundings of float32
        "result_rel": 5e-7,  # the norm of the gradients is float32
        "params_rel": 1e-6,
        "later_rel": 1e-5,
        "oracle_rel": 1e-6,
        "backends_rel": 1e-6,
    },
    "common practice": {
        "loss_rel": 1e-3,  # usual in tests of training stacks for losses and gradient norms
        "result_rel": 1e-3,
        "metric_rel": 1e-3,
        "grad_rel": 1e-5,  # float32 gradients, per tensor
        "chunk_rel": 1e-5,
        "params_rel": 1e-4,  # after some steps
        "later_rel": 1e-2,
        "oracle_rel": 1e-3,
        "backends_rel": 1e-3,
    },
}
