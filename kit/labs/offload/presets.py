"""Sets of tolerances for the offload lab, as a person may want them instead of the lab's own. What a set leaves out stays the lab's."""

PRESETS = {
    "strict": {
        "released_share": 0.99,  # all but an allocator's rounding
        "drift_mib": 10.0,  # a host's allocator moves by some MiB between two cycles
        "slope_mib": 0.1,  # 100 MiB after a thousand cycles, which a long run has
        "peak_ratio": 1.0,  # the way back needs nothing that training does not need
        "residual_mib": 500.0,  # a bare CUDA context takes about so much; less cannot be asked
        "comm_share": 0.9,
        "others_mib": 0.0,  # nobody else's memory may move
    },
    "common practice": {
        "released_share": 0.8,  # a sleep that frees most of the GPU is called a success
        "drift_mib": 200.0,  # the lab's own is what people accept here
        "slope_mib": 10.0,  # not seen over the tens of cycles of a test
        "peak_ratio": 1.5,  # half a model more while weights come back is planned for
        "residual_mib": 2048.0,  # what is left on a GPU of 80 GiB is rarely asked about below 2 GiB
        "comm_share": 0.5,  # communicators' memory is not in the allocator's numbers, which is all that is looked at
        "fds_more": 16.0,  # counted by nobody before a limit of the system is hit
        "threads_more": 16.0,
        "others_mib": 50.0,
    },
}
