"""The checks of the offload lab. A check that this device or config cannot answer is null and says why."""

from __future__ import annotations

from kit.labs.growth import (
    at_most,
    few_cycles,
    growth,
    lasting,
    left,
    on_cuda,
    one_cycle,
    others_untouched,
    slope_limit,
    slopes,
    steady,
)
from kit.labs.offload import measures
from kit.results import Check

CHECKS = (
    at_most(
        "groups_return_to_baseline",
        "Are all groups gone while released, and is their number after a reload the same as before?",
        "groups_more",
        measures.groups_return,
        cannot=measures.undestroyed,
    ),
    at_most(
        "model_parallel_uninitialised",
        "While released, does Megatron report that it has no groups, or does using one raise an error that names it?",
        "initialised",
        measures.count_of(
            "idle", "initialised", "ranks where Megatron reports initialised groups and using one raises no error"
        ),
        cannot=measures.undestroyed,
    ),
    at_most(
        "every_group_communicates",
        "After a reload, does an all-reduce over every group reach the right ranks and return the exact sum?",
        "wrong_groups",
        measures.count_of("talk", "wrong_groups", "groups whose all-reduce fails or reaches the wrong ranks"),
    ),
    at_most(
        "membership_unchanged",
        "After a reload, does every group name refer to the same ranks in the same order as before?",
        "names_moved",
        measures.count_of("verify", "membership_changed", "group names that refer to other ranks"),
    ),
    at_most(
        "options_unchanged",
        "Do all groups keep their timeout, backend, options and description after a reload?",
        "options_changed",
        measures.count_of("verify", "options_changed", "groups with changed options"),
    ),
    at_most(
        "handles_alive",
        "Does every object that held a group hold a live one after a reload?",
        "stale_holders",
        measures.count_of("verify", "stale_holders", "references to a dead or replaced group"),
    ),
    at_most(
        "stale_handle_raises",
        "Does using a destroyed group raise an error that names it?",
        "stale_usable",
        measures.count_of("idle", "stale_usable", "destroyed groups whose use raises no error that names them"),
        cannot=measures.kept_groups,
    ),
    at_most(
        "old_groups_dead",
        "Are the old groups freed while released, with their sockets and threads?",
        "old_groups",
        measures.old_groups,
        cannot=measures.undestroyed,
    ),
    at_most(
        "world_released",
        "Is WORLD destroyed while released?",
        "worlds_left",
        measures.count_of(
            "idle", "world_left", found="WORLD still existed {where}", none="WORLD was destroyed in {everywhere}"
        ),
        cannot=measures.kept_world,
    ),
    at_most(
        "destroy_failure_raises",
        "Does a group that cannot be destroyed raise an error that names it?",
        "failures_hidden",
        measures.failure,
        cannot=measures.unrehearsed,
    ),
    Check(
        name="tensors_released",
        question="Do weights, gradients and optimizer state free their device memory while released?",
        tolerance="released_share",
        limit=0.9,
        unit="ratio",
        better=">=",
        measure=measures.tensors_released,
        cannot=measures.unmoved,
    ),
    at_most(
        "no_tensor_left",
        "Does every weight, gradient and optimizer tensor leave the device while released?",
        "tensors_left",
        measures.count_of(
            "idle",
            "left_tensors",
            found="{value:g} tensors still on the device while released {where}",
            none="none left on the device in {everywhere}; scalars do not count",
        ),
        cannot=measures.unmoved,
    ),
    at_most(
        "tensors_restored",
        "Is every tensor bit-identical after a reload (SHA-256)?",
        "tensors_changed",
        measures.tensors_restored,
        cannot=measures.unhashed,
    ),
    at_most(
        "random_unchanged",
        "After a reload, are all random number generators in the same state as before the release?",
        "generators_moved",
        measures.count_of(
            "verify",
            "generators_moved",
            found="generators with a changed state: {value:g} {where}",
            none="all generators unchanged in {everywhere}",
        ),
    ),
    at_most(
        "training_continues_bitwise",
        "Is training bit-identical to a run without any release?",
        "values_differ",
        measures.bitwise,
    ),
    at_most(
        "memory_drift",
        "Is memory while released the same in the last cycle as in the first?",
        "drift_mib",
        growth("idle", "while released"),
        limit=200,
        unit="MiB",
        cannot=one_cycle,
    ),
    at_most(
        "memory_slope",
        "Is memory growth per cycle no larger than in a control run without any release?",
        "slope_mib",
        slopes("idle", control="control"),
        limit=slope_limit(measures.state_bytes),
        unit="MiB/cycle",
        cannot=few_cycles,
    ),
    at_most(
        "reload_peak",
        "Does the memory peak of a reload stay within what training uses?",
        "peak_ratio",
        measures.reload_peak,
        limit=1.1,
        unit="ratio",
        cannot=measures.unseen,
    ),
    at_most(
        "residual",
        "Is almost no GPU memory in use while released, beyond a CUDA context?",
        "residual_mib",
        on_cuda(measures.residual),
        limit=500,
        unit="MiB",
        cannot=measures.kept_by_choice,
    ),
    Check(
        name="comm_released",
        question="Is the GPU memory of the communicators freed while released?",
        tolerance="comm_share",
        limit=0.7,
        unit="ratio",
        better=">=",
        measure=on_cuda(measures.comm_released),
        cannot=measures.kept_groups,
    ),
    at_most(
        "fds_return",
        "Does the number of file descriptors return to the baseline?",
        "fds_more",
        lasting("fds", "verify", "build", "compare"),
    ),
    at_most(
        "threads_return",
        "Does the number of threads return to the baseline?",
        "threads_more",
        lasting("threads", "verify", "build", "compare"),
    ),
    at_most(
        "nothing_left",
        "Does the job leave no descriptor, thread, process, shared memory or file behind when it ends?",
        "left_more",
        left("end", "baseline"),
    ),
    at_most(
        "time_steady",
        "Do the last releases and reloads take no longer than the earlier ones?",
        "time_ratio",
        steady(("release", "reload")),
        limit=3,
        unit="ratio",
        cannot=few_cycles,
    ),
    at_most(
        "others_untouched",
        "Does another process on the GPU keep its memory unchanged?",
        "others_mib",
        on_cuda(others_untouched("start")),
        limit=10,
        unit="MiB",
    ),
    at_most(
        "names_restored", "Are all patched functions restored at the end?", "names_replaced", measures.names_restored
    ),
    at_most(
        "state_as_found",
        "Are the caller's groups, globals and random state unchanged after success and after an error?",
        "not_as_found",
        measures.as_found,
    ),
)


# Sets of tolerances for the offload lab. A tolerance that a set does not name keeps the lab's default.
PRESETS = {
    "strict": {
        "released_share": 0.99,  # all except an allocator's rounding
        "drift_mib": 10.0,  # the host allocator varies by some MiB between two cycles
        "slope_mib": 0.1,  # 100 MiB in a long run of a thousand cycles
        "peak_ratio": 1.0,  # a reload needs no more memory than training
        "residual_mib": 500.0,  # about the size of a bare CUDA context, which cannot be released
        "comm_share": 0.9,
        "others_mib": 0.0,  # memory of other processes may not change
    },
    "common practice": {
        "released_share": 0.8,  # freeing most of the GPU counts as success
        "drift_mib": 200.0,  # the same as the lab's default
        "slope_mib": 10.0,  # not visible in a test of some tens of cycles
        "peak_ratio": 1.5,  # half a model more during a reload is usually planned for
        "residual_mib": 2048.0,  # on a GPU of 80 GiB, a rest below 2 GiB is rarely questioned
        "comm_share": 0.5,  # usually only the allocator is checked, which does not see communicators
        "fds_more": 16.0,  # usually not counted until a system limit is hit
        "threads_more": 16.0,
        "others_mib": 50.0,
    },
}
