"""The rules of a ledger. Each yields a sentence for each violation and returns a summary; `docs/ledger.md` lists the events.

Any system may have written the ledger. A rule raises `Missing` (null), which names the event, if the ledger lacks an event that it
needs. Rows that contradict each other, or lack an id that other rows of the event have, are violations.
"""

from __future__ import annotations

from kit.stream.judge.backed import metrics_true, notes_backed
from kit.stream.judge.capacity import capacity_kept
from kit.stream.judge.ends import dead_rollout_named, ends_cleanly
from kit.stream.judge.given_up import eviction_justified, no_needless_waste
from kit.stream.judge.groups import (
    every_group_once,
    groups_whole,
    order_fair,
    samples_differ,
    tokens_conserved,
    trained_once,
)
from kit.stream.judge.permits import permits_return
from kit.stream.judge.publication import publish_before_use
from kit.stream.judge.requests import attempts_distinct, requests_spread
from kit.stream.judge.resume import resume_equals
from kit.stream.judge.stamps import stamps_per_token
from kit.stream.judge.steps import abort_on_failure, one_clear_per_finish, one_step_per_batch
from kit.stream.judge.straggler import trains_before_straggler
from kit.stream.judge.versions import no_sample_too_old, version_monotone

__all__ = ["RULES", "resume_equals"]

RULES = (
    no_sample_too_old, version_monotone, publish_before_use, stamps_per_token,
    every_group_once, trained_once, groups_whole, samples_differ, order_fair,
    tokens_conserved, one_step_per_batch, one_clear_per_finish, trains_before_straggler,
    abort_on_failure, capacity_kept, permits_return, ends_cleanly,
    dead_rollout_named, eviction_justified, no_needless_waste,
    attempts_distinct, requests_spread, metrics_true, notes_backed,
)  # fmt: skip
