"""Sets of tolerances for the split lab, as a person may want them instead of the lab's own. What a set leaves out stays the lab's.

Both are meant for float32. bfloat16 keeps 8 bits, and there the lab's own limits are the ones to start from.
"""

PRESETS = {
    "strict": {
        "loss_rel": 1e-12,  # losses are summed in float64: only the order of the sum is another
        "metric_rel": 1e-12,
        "chunk_rel": 0.0,  # one and the same sum, however the step is cut
        "grad_rel": 5e-7,  # four roundings of float32
        "result_rel": 5e-7,  # of gradients' norm, which is of that type
        "params_rel": 1e-6,
        "later_rel": 1e-5,
        "oracle_rel": 1e-6,
        "backends_rel": 1e-6,
    },
    "common practice": {
        "loss_rel": 1e-3,  # tests of training stacks compare losses and gradient norms to 1e-3
        "result_rel": 1e-3,
        "metric_rel": 1e-3,
        "grad_rel": 1e-5,  # gradients of float32, tensor by tensor
        "chunk_rel": 1e-5,
        "params_rel": 1e-4,  # some steps later
        "later_rel": 1e-2,
        "oracle_rel": 1e-3,
        "backends_rel": 1e-3,
    },
}
