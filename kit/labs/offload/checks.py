"""What the offload lab asks of its records. A check that this device cannot answer says why, and is null."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.labs.memory import growth, on_cuda, others_untouched
from kit.labs.offload.counts import (
    as_found,
    bitwise,
    count_of,
    failure,
    groups_return,
    lasting,
    old_groups,
    tensors_restored,
)
from kit.labs.offload.memory import (
    comm_released,
    reload_peak,
    residual,
    slope,
    tensors_released,
)
from kit.results import Check

if TYPE_CHECKING:
    from kit.labs.offload.counts import Measure


def zero(name: str, question: str, measure: Measure, tolerance: str) -> Check:
    return Check(name=name, question=question, tolerance=tolerance, limit=0, unit="1", better="<=", measure=measure)


CHECKS = (
    zero(
        "groups_return_to_baseline",
        "Are the groups gone while released, and no more of them after?",
        groups_return,
        "groups_more",
    ),
    zero(
        "model_parallel_uninitialised",
        "Does Megatron know that it has no groups?",
        count_of("idle", "initialised", "ranks whose Megatron still calls itself initialised"),
        "initialised",
    ),
    zero(
        "every_group_communicates",
        "Does every rebuilt group give the exact sum?",
        count_of("talk", "wrong_groups", "groups with a wrong sum"),
        "wrong_groups",
    ),
    zero(
        "membership_unchanged",
        "Does every name stand for the same ranks?",
        count_of("verify", "membership_changed", "names that stand for other ranks"),
        "names_moved",
    ),
    zero(
        "options_unchanged",
        "Same timeout, backend, options, description?",
        count_of("verify", "options_changed", "groups with other options"),
        "options_changed",
    ),
    zero(
        "handles_alive",
        "Does every holder point at a living group?",
        count_of("verify", "stale_holders", "holders of a dead or replaced group"),
        "stale_holders",
    ),
    zero(
        "stale_handle_raises",
        "Does a group in use after destroy raise, by name?",
        count_of("idle", "stale_usable", "destroyed groups that do not raise by name"),
        "stale_usable",
    ),
    zero("old_groups_dead", "Are old groups really gone, sockets and threads too?", old_groups, "old_groups"),
    zero("destroy_failure_raises", "Does a group that cannot be destroyed raise, by name?", failure, "failures_hidden"),
    Check(
        name="tensors_released",
        question="Do the bytes leave the device?",
        tolerance="released_share",
        limit=0.9,
        unit="ratio",
        better=">=",
        measure=tensors_released,
    ),
    zero("tensors_restored", "Is every tensor back, by its hash?", tensors_restored, "tensors_changed"),
    zero("training_continues_bitwise", "Does it train as if nothing had happened?", bitwise, "values_differ"),
    Check(
        name="memory_drift",
        question="Does memory stay where it was after the first cycle?",
        tolerance="drift_mib",
        limit=200,
        unit="MiB",
        better="<=",
        measure=growth("idle", "while released"),
    ),
    Check(
        name="memory_slope",
        question="Does memory grow with every cycle, more than in a control?",
        tolerance="slope_mib",
        limit=1,
        unit="MiB/cycle",
        better="<=",
        measure=slope,
    ),
    Check(
        name="reload_peak",
        question="Does the way back take more memory than training?",
        tolerance="peak_ratio",
        limit=1.1,
        unit="ratio",
        better="<=",
        measure=reload_peak,
    ),
    Check(
        name="residual",
        question="How much of the card is still taken while released?",
        tolerance="residual_mib",
        limit=500,
        unit="MiB",
        better="<=",
        measure=on_cuda(residual),
    ),
    Check(
        name="comm_released",
        question="Does the communicators' memory come back?",
        tolerance="comm_share",
        limit=0.7,
        unit="ratio",
        better=">=",
        measure=on_cuda(comm_released),
    ),
    zero("fds_return", "Are sockets and files as many as before?", lasting("fds", "verify", "build"), "fds_more"),
    zero("threads_return", "Are threads as many as before?", lasting("threads", "verify", "build"), "threads_more"),
    Check(
        name="others_untouched",
        question="Does a process beside the job keep its memory on the card?",
        tolerance="others_mib",
        limit=10,
        unit="MiB",
        better="<=",
        measure=on_cuda(others_untouched("start")),
    ),
    zero(
        "state_as_found",
        "Is the distributed state left as it was found?",
        as_found,
        "not_as_found",
    ),
)
