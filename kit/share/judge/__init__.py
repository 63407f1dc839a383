"""The rules of a ledger of leases. Each yields a sentence for each violation and returns a summary; any system may have written the ledger.

A rule raises `Missing` (null), which names the event, if the ledger lacks an event that it needs.
"""

from __future__ import annotations

from kit.share.judge.admission import admission
from kit.share.judge.devices import devices_conserved, one_owner, shrink_before_expand
from kit.share.judge.ends import dead_pipeline_leaves, dead_replaced, no_deadlock
from kit.share.judge.leaving import planned_release_once
from kit.share.judge.plans import fair_share, plan_as_specified, plan_valid
from kit.share.judge.progress import progress_ended, progress_true
from kit.share.judge.replicas import drained_before_sleep, empty_set_suspends, routed_to_awake, version_after_wake
from kit.share.judge.requests import no_request_lost, no_starvation, priority_kept

BY_DEMAND = (plan_as_specified, fair_share)  # of the kit's own desk and planner only
RULES = (
    one_owner,
    shrink_before_expand,
    devices_conserved,
    no_request_lost,
    routed_to_awake,
    priority_kept,
    no_starvation,
    plan_valid,
    plan_as_specified,
    fair_share,
    planned_release_once,
    admission,
    progress_ended,
    progress_true,
    drained_before_sleep,
    empty_set_suspends,
    version_after_wake,
    no_deadlock,
    dead_pipeline_leaves,
    dead_replaced,
)
