"""The checks of the offload lab. A check that this device or config cannot answer is null and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.labs.growth import (
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
from kit.labs.offload.counts import (
    as_found,
    bitwise,
    count_of,
    failure,
    groups_return,
    kept_groups,
    kept_world,
    names_restored,
    old_groups,
    random_unchanged,
    tensors_left,
    tensors_restored,
    undestroyed,
    unhashed,
    unrehearsed,
    world_released,
)
from kit.labs.offload.memory import (
    comm_released,
    kept_by_choice,
    reload_peak,
    residual,
    state_bytes,
    tensors_released,
    unmoved,
    unseen,
)
from kit.results import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from kit.labs.offload.counts import Measure

    Cannot = Callable[[Mapping[str, Any]], str]


def zero(name: str, question: str, measure: Measure, tolerance: str, cannot: Cannot | None = None) -> Check:
    return Check(
        name=name,
        question=question,
        tolerance=tolerance,
        limit=0,
        unit="1",
        better="<=",
        measure=measure,
        cannot=cannot,
    )


CHECKS = (
    zero(
        "groups_return_to_baseline",
        "Are all groups gone while released, and is their number after a reload the same as before?",
        groups_return,
        "groups_more",
        undestroyed,
    ),
    zero(
        "model_parallel_uninitialised",
        "While released, does Megatron report that it has no groups (or does using one raise an error that names it)?",
        count_of(
            "idle", "initialised", "ranks where Megatron reports initialised groups and using one raises no error"
        ),
        "initialised",
        undestroyed,
    ),
    zero(
        "every_group_communicates",
        "After a reload, does an all-reduce over every group reach the right ranks and return the exact sum?",
        count_of("talk", "wrong_groups", "groups whose all-reduce fails or reaches the wrong ranks"),
        "wrong_groups",
    ),
    zero(
        "membership_unchanged",
        "Does every group name refer to the same ranks in the same order as before?",
        count_of("verify", "membership_changed", "group names that refer to other ranks"),
        "names_moved",
    ),
    zero(
        "options_unchanged",
        "Do all groups keep their timeout, backend, options and description?",
        count_of("verify", "options_changed", "groups with changed options"),
        "options_changed",
    ),
    zero(
        "handles_alive",
        "Does every object that held a group hold a live one after a reload?",
        count_of("verify", "stale_holders", "references to a dead or replaced group"),
        "stale_holders",
    ),
    zero(
        "stale_handle_raises",
        "Does using a destroyed group raise an error that names it?",
        count_of("idle", "stale_usable", "destroyed groups whose use raises no error that names them"),
        "stale_usable",
        kept_groups,
    ),
    zero(
        "old_groups_dead",
        "Are the old groups freed, with their sockets and threads?",
        old_groups,
        "old_groups",
        undestroyed,
    ),
    zero("world_released", "Is WORLD destroyed while released?", world_released, "worlds_left", kept_world),
    zero(
        "destroy_failure_raises",
        "Does a group that cannot be destroyed raise an error that names it?",
        failure,
        "failures_hidden",
        unrehearsed,
    ),
    Check(
        name="tensors_released",
        question="Does the memory of weights, gradients and optimizer state leave the device?",
        tolerance="released_share",
        limit=0.9,
        unit="ratio",
        better=">=",
        measure=tensors_released,
        cannot=unmoved,
    ),
    zero(
        "no_tensor_left",
        "Does every weight, gradient and optimizer tensor leave the device?",
        tensors_left,
        "tensors_left",
        unmoved,
    ),
    zero(
        "tensors_restored",
        "Is every tensor bit-identical after a reload (SHA-256)?",
        tensors_restored,
        "tensors_changed",
        unhashed,
    ),
    zero(
        "random_unchanged",
        "Are all random number generators in the same state as before the release?",
        random_unchanged,
        "generators_moved",
    ),
    zero(
        "training_continues_bitwise",
        "Is training bit-identical to a run without any release?",
        bitwise,
        "values_differ",
    ),
    Check(
        name="memory_drift",
        question="Is memory while released the same in the last cycle as in the first?",
        tolerance="drift_mib",
        limit=200,
        unit="MiB",
        better="<=",
        measure=growth("idle", "while released"),
        cannot=one_cycle,
    ),
    Check(
        name="memory_slope",
        question="Is memory growth per cycle no larger than in a control without any release?",
        tolerance="slope_mib",
        limit=slope_limit(state_bytes),
        unit="MiB/cycle",
        better="<=",
        measure=slopes("idle", control="control"),
        cannot=few_cycles,
    ),
    Check(
        name="reload_peak",
        question="Does a reload peak at no more memory than training uses?",
        tolerance="peak_ratio",
        limit=1.1,
        unit="ratio",
        better="<=",
        measure=reload_peak,
        cannot=unseen,
    ),
    Check(
        name="residual",
        question="How much GPU memory does the process still hold while released?",
        tolerance="residual_mib",
        limit=500,
        unit="MiB",
        better="<=",
        measure=on_cuda(residual),
        cannot=kept_by_choice,
    ),
    Check(
        name="comm_released",
        question="Is the communicators' memory freed?",
        tolerance="comm_share",
        limit=0.7,
        unit="ratio",
        better=">=",
        measure=on_cuda(comm_released),
        cannot=kept_groups,
    ),
    zero(
        "fds_return",
        "Does the number of file descriptors return to the baseline?",
        lasting("fds", "verify", "build", "compare"),
        "fds_more",
    ),
    zero(
        "threads_return",
        "Does the number of threads return to the baseline?",
        lasting("threads", "verify", "build", "compare"),
        "threads_more",
    ),
    zero("nothing_left", "Is nothing left once the job has ended?", left("end", "baseline"), "left_more"),
    Check(
        name="time_steady",
        question="Do the last releases and reloads take as long as earlier ones?",
        tolerance="time_ratio",
        limit=3,
        unit="ratio",
        better="<=",
        measure=steady(("release", "reload")),
        cannot=few_cycles,
    ),
    Check(
        name="others_untouched",
        question="Does another process on the GPU keep its memory unchanged?",
        tolerance="others_mib",
        limit=10,
        unit="MiB",
        better="<=",
        measure=on_cuda(others_untouched("start")),
    ),
    zero("names_restored", "Are all patched functions restored at the end?", names_restored, "names_replaced"),
    zero(
        "state_as_found",
        "Is the distributed state at the end the same as at the start?",
        as_found,
        "not_as_found",
    ),
)


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
